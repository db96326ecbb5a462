// Package ports holds free ports of this node for the servers of its workers.
package ports

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/freeports"
	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/tempdir"
	"dlrover-run/launcher"
	"dlrover-run/rendezvous"
)

// ports are free TCP ports of this node for the servers of its workers. The workers of all nodes get their numbers.
// They are held, bound and not listened on, from the join to the start of the workers, and again between two epochs.
// The first ones are the preset's, which passes them to the workers in its own way, the others those of --ports.
type ports struct {
	*freeports.Ports
	offer  func([]int)
	preset func(slots int) int
	slots  int
	dir    string // has the world file; "": no option requests it
	log    *slog.Logger
}

// New is the feature.
func New() feature.Feature {
	var users, all int
	var world bool
	return feature.Feature{
		Name: "ports",
		Settings: func(o feature.Options) error {
			if users = o.Int("ports"); users < 0 || users > rendezvous.MaxPorts {
				return fmt.Errorf("--ports=%d: need 0 to %d ports on this node", users, rendezvous.MaxPorts)
			}
			j := o.Job()
			all, world = users+j.Preset.PortsOf(j.Slots), j.Preset.World
			if all > rendezvous.MaxPorts {
				return fmt.Errorf("--preset=%s needs %d ports for %d workers: with --ports=%d it is %d of at most %d for a node; "+
					"start fewer workers", j.Preset.Name, all-users, j.Slots, users, all, rendezvous.MaxPorts)
			}
			return nil
		},
		Plan: func(p *feature.Plan) {
			if users > 0 {
				p.Features["ports"] = users
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if all == 0 && !world {
				return nil, nil
			}
			p, err := open(n, all, users > 0)
			if err != nil {
				return nil, err
			}
			part := launcher.Part{Start: p.start, Stop: p.stop}
			return &feature.Opened{Part: part, Configure: feature.NeedsWorld, Close: p.close}, nil
		},
	}
}

// open holds count ports. If tell is set, the workers get a file with them.
func open(n feature.Node, count int, tell bool) (*ports, error) {
	j := n.Job()
	held, err := freeports.Hold(count, j.Port)
	if err != nil {
		return nil, feature.Unusable(fmt.Errorf("--preset=%s and --ports need %d ports: %w; ask for fewer",
			j.Preset.Name, count, err))
	}
	p := &ports{Ports: held, offer: n.SetPorts, preset: j.Preset.PortsOf, slots: j.Slots, log: n.Log()}
	if tell {
		p.dir, err = tempdir.Make("dlrover-world-") // mode 0700
	}
	if err != nil {
		held.Release()
		return nil, feature.Unusable(fmt.Errorf("--ports: no place for the file that tells workers of all nodes: %w; "+
			"set TMPDIR to a directory that this user may write to", err))
	}
	j.Node.Ports = held.Numbers()
	return p, nil
}

// start leaves the ports to the workers.
func (p *ports) start(r *launcher.StartRequest) {
	if p.dir != "" {
		if err := p.writeWorld(r.World); err != nil {
			p.log.Error("cannot write the world file: workers that read it fail", "path", p.worldFile(), "err", err)
		}
	}
	p.Release()
	r.Setenv(p.environ()...)
}

func (p *ports) environ() []string {
	if p.dir == "" {
		return nil
	}
	var list []string
	for _, n := range p.users(p.Numbers(), p.slots) {
		list = append(list, strconv.Itoa(n))
	}
	return []string{"DLROVER_PORTS=" + strings.Join(list, ","), "DLROVER_WORLD_FILE=" + p.worldFile()}
}

// users are the ports of a node that are not the preset's.
func (p *ports) users(all []int, slots int) []int { return all[min(p.preset(slots), len(all)):] }

// stop holds the ports again. A port that another process took meanwhile, such as a worker's child that still runs, is
// lost; the next world gets another one.
func (p *ports) stop(r launcher.StopRequest) {
	if r.Early {
		return
	}
	if err := p.HoldAgain(); err != nil {
		p.log.Warn("fewer ports are offered to the next world", "ports", p.Numbers(), "err", err)
	}
	p.offer(p.Numbers())
}

// worldNode is one node in the world file.
type worldNode struct {
	GroupRank int    `json:"group_rank"`
	Node      string `json:"node"`
	Addr      string `json:"addr"`
	RankBase  int    `json:"rank_base"`
	Slots     int    `json:"slots"`
	Role      string `json:"role"`
	Ports     []int  `json:"ports"`
}

func (p *ports) worldFile() string { return filepath.Join(p.dir, "world.json") }

// writeWorld writes the nodes in rank order. It replaces the file at once, so a reader sees the old or the new one.
func (p *ports) writeWorld(world []job.Member) error {
	nodes := make([]worldNode, len(world))
	for i, m := range world {
		// Every reader gets a list.
		ports := append([]int{}, p.users(m.Ports, m.Slots)...)
		nodes[i] = worldNode{m.GroupRank, m.Node, m.Addr, m.RankBase, m.Slots, m.Role, ports}
	}
	data, err := json.Marshal(nodes)
	if err != nil {
		return err
	}
	return openfile.Replace(p.worldFile(), append(data, '\n'), 0o600)
}

func (p *ports) close() error {
	p.Release()
	if p.dir == "" {
		return nil
	}
	return os.RemoveAll(p.dir)
}
