package run

import (
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strconv"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/preflight"
	"dlrover-run/launcher"
	"dlrover-run/launcher/preset"
)

// maxServers bounds --ms-servers.
const maxServers = 256

// sidesFeature has the options about the side processes of a preset. The preset chooses them, and the agent starts
// and ends them.
func sidesFeature() row {
	return row{
		name: "sides",
		settings: func(o *options, s *settings) error {
			return s.framework.readSides(o, s.scheduler.Servers, s.size.share, s.rdzv.port)
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			if j.s.framework.port == 0 {
				return nil, nil
			}
			p := &fixedPort{root: os.DirFS("/"), port: j.s.framework.port}
			o := &feature.Opened{Configure: func(cfg *launcher.Config) { cfg.Sides = p.sides }}
			if !j.s.surelyFirst() {
				return o, nil
			}
			return o, feature.Unusable(p.free(j.s.node.Addr))
		},
	}
}

// readSides reads the options. servers is the number of pods that are servers, port is where the nodes meet.
func (f *framework) readSides(o *options, servers int, share string, port int) error {
	f.port, f.servers = o.Int("ms-port"), o.Int("ms-servers")
	if share != "" {
		return f.sidesByScheduler(o, servers, port)
	}
	if f.port < 0 || f.port > 65535 {
		return fmt.Errorf("--ms-port=%d: need a port from 1 to 65535, or 0 for a free one", f.port)
	}
	if f.servers < 0 || f.servers > maxServers {
		return fmt.Errorf("--ms-servers=%d: need 0 to %d parameter servers", f.servers, maxServers)
	}
	if f.preset.Name == "mindspore" {
		return f.inheritSides(o)
	}
	for _, name := range []string{"ms-port", "ms-servers"} {
		if o.IsSet(name) && o.Int(name) != 0 {
			return fmt.Errorf("--%s is for MindSpore, and the preset is %s: add --preset=mindspore, or leave it out", name,
				f.preset.Name)
		}
	}
	return nil
}

// sidesByScheduler finds the port if the servers are pods. The nodes meet at $MS_SCHED_PORT, because that is the
// port which others reach by $MS_SCHED_HOST. MindSpore's scheduler gets another one.
func (f *framework) sidesByScheduler(o *options, servers, port int) error {
	switch {
	case f.port < 0 || f.port > 65535:
		return fmt.Errorf("--ms-port=%d: need a port from 1 to 65535, or 0 for a free one", f.port)
	case f.port != 0 && f.port == port:
		return fmt.Errorf("--ms-port=%d is where the nodes meet: leave it out, or choose another port", f.port)
	case o.IsSet("ms-servers") && f.servers != servers:
		return fmt.Errorf("--ms-servers=%d and %d pods of parameter servers contradict each other: leave the option out",
			f.servers, servers)
	}
	f.servers = servers
	return nil
}

// inheritSides takes values from MindSpore's own variables where no option is set.
func (f *framework) inheritSides(o *options) (err error) {
	for _, v := range []struct {
		option, name string
		to           *int
		most         int
	}{{"ms-port", "MS_SCHED_PORT", &f.port, 65535}, {"ms-servers", "MS_SERVER_NUM", &f.servers, maxServers}} {
		text := o.Lookup(v.name)
		if text == "" || o.IsSet(v.option) {
			continue
		}
		if *v.to, err = strconv.Atoi(text); err != nil || *v.to < 0 || *v.to > v.most {
			return fmt.Errorf("$%s=%q: need a number from 0 to %d; --%s overrides it", v.name, text, v.most, v.option)
		}
	}
	return nil
}

// surelyFirst reports whether this node will have group rank 0, as far as it is known before the nodes have met.
func (s *settings) surelyFirst() bool {
	return s.rdzv.backend == local || s.rdzv.backend == static && s.node.Rank == 0 || s.params.Max == 1 ||
		s.size.share == "scheduler"
}

// fixedPort is the port of the framework's service on the first node that the user has chosen.
type fixedPort struct {
	root fs.FS
	port int
}

// sides adds no side processes, but those of the preset need the port.
func (p *fixedPort) sides(e launcher.Epoch) ([]launcher.Side, error) {
	if e.Place.GroupRank != 0 || len(e.World) == 0 {
		return nil, nil
	}
	return nil, p.free(e.World[0].Addr)
}

// free returns an error if another process has the port on this node, at the address addr.
func (p *fixedPort) free(addr string) error {
	if _, err := netip.ParseAddr(addr); err != nil {
		addr = "" // a name
	}
	if err := preflight.Listenable(p.root, addr, p.port); err != nil {
		return fmt.Errorf("--ms-port=%d: %w; end it, or give all nodes another port", p.port, err)
	}
	return nil
}

// planSide is the --dry-run output of a side process.
type planSide struct {
	Name string   `json:"name"`
	Argv []string `json:"argv"`
	Env  []string `json:"env"`
}

// planSides are the side processes of the first node, as far as they are known before the nodes have met.
func planSides(s *settings, cfg launcher.Config, v preset.Vars) (plans []planSide, err error) {
	sides, err := s.framework.preset.SidesOf(v)
	for _, side := range sides {
		env := slices.Clone(side.Env)
		slices.Sort(env)
		plans = append(plans, planSide{Name: side.Name, Argv: cfg.ArgsOf(v), Env: env})
	}
	return plans, err
}
