// Package nodechecks examines this node, and the ways to the others, at the request of the rendezvous.
package nodechecks

import (
	"fmt"
	"os/exec"
	"strings"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/duration"
	"dlrover-run/launcher/argv"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/healthcheck"
	"dlrover-run/rendezvous"
	"dlrover-run/switchbox"
)

// checkSettings are the options of the checks before training.
type checkSettings struct {
	spec   netcheck.Spec // nil Level: no check was requested
	health string        // --health-check
	box    *boxSettings  // nil without --switchbox-check
	only   bool          // --check-only
	wants  bool          // the user requires accelerators
	gpus   int           // that were counted
	kind   string        // of these
	python string        // the workers' interpreter
	noPy   error         // why there is none
}

// boxSettings are the options of --switchbox-check.
type boxSettings struct {
	pairs  []switchbox.Pair
	limits switchbox.Limits
}

// list is the pairs as one word.
func (b *boxSettings) list() string {
	if b.limits.Ring {
		return switchbox.RingWord
	}
	var words []string
	for _, p := range b.pairs {
		words = append(words, p.String())
	}
	return strings.Join(words, ",")
}

func (k *checkSettings) asked() bool { return k.spec.Level != "" }

// New is the feature.
func New() feature.Feature {
	var k checkSettings
	return feature.Feature{
		Name: "node check",
		Settings: func(o feature.Options) (err error) {
			if k, err = read(o); err == nil && k.asked() {
				k.gate(o.Job().Params)
			}
			return err
		},
		Plan: func(p *feature.Plan) {
			if k.asked() {
				p.Features["node_checks"] = k.plan()
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if !k.asked() {
				return nil, nil
			}
			c, err := openNodeChecks(n, k)
			return c.opened(), err
		},
	}
}

// read reads the options. Options about the manner of a check are refused without one that requests a check.
func read(o feature.Options) (k checkSettings, err error) {
	precheck := o.Int("precheck")
	network := o.Bool("network-check") || precheck > 0
	k.health, k.only = o.String("health-check"), o.Bool("check-only")
	box := o.Bool("switchbox-check")
	if k.only && !network && !box && k.health == "" {
		network = true
	}
	if err := checkCompany(o, network, box, network || box || k.health != ""); err != nil {
		return k, err
	}
	if !network && !box && k.health == "" {
		return k, nil
	}
	if k.spec, err = readCheckSpec(o, network, precheck == 2); err != nil {
		return k, err
	}
	if box {
		if k.box, err = readSwitchbox(o); err != nil {
			return k, err
		}
		if !network {
			o.Warn("--switchbox-check without --network-check tests the devices of every node by itself; " +
				"the links between nodes are not tested")
		}
	}
	if k.spec.Level == netcheck.LevelFull {
		k.python, k.noPy = o.Python()
	}
	if k.gpus, k.kind = o.GPUs(); o.String("accelerator") == feature.NoAccelerator {
		k.gpus, k.kind = 0, ""
	} else {
		k.wants = !o.Job().Bare && (o.IsSet("accelerator") || o.String("nproc-per-node") == "gpu")
		if named := feature.Kinds(o.String("accelerator")); k.kind == "" && o.IsSet("accelerator") && len(named) > 0 {
			k.kind = named[0] // the test itself detects the devices
		}
	}
	if strings.HasPrefix(k.health, healthcheck.Socket+"/") || !strings.HasPrefix(k.health, healthcheck.Socket) {
		return k, nil
	}
	return k, fmt.Errorf("--health-check=%s: need the absolute path of a socket, such as unix:/run/health.sock", k.health)
}

// checkCompany refuses options without the check that they belong to.
func checkCompany(o feature.Options, network, box, any bool) error {
	for _, c := range []struct {
		with    bool
		what    string
		options []string
	}{
		{network, "--network-check", []string{"exclude-straggler", "comm-perf-test", "check-level"}},
		{box, "--switchbox-check", []string{"box-pairs", "min-bandwidth", "min-channels"}},
		{any, "--network-check, --switchbox-check, --health-check or --check-only",
			[]string{"check-ttl", "check-timeout", "check-action"}},
	} {
		for _, name := range c.options {
			if !c.with && o.IsSet(name) {
				return fmt.Errorf("--%s acts only with %s: add that, or leave --%s out", name, c.what, name)
			}
		}
	}
	return nil
}

func readCheckSpec(o feature.Options, network, comm bool) (netcheck.Spec, error) {
	s := netcheck.Spec{
		Level: netcheck.LevelLocal, ExcludeStraggler: o.Bool("exclude-straggler"),
		ReportOnly: o.String("check-action") == "report",
	}
	if network {
		s.Level = netcheck.Level(o.String("check-level"))
		s.Comm = comm || o.Bool("comm-perf-test")
	}
	if s.Comm && s.Level == netcheck.LevelHost {
		return s, fmt.Errorf("--comm-perf-test and --precheck=2 measure with PyTorch, which --check-level=host leaves out: " +
			"use --check-level=full")
	}
	if s.ExcludeStraggler && s.ReportOnly {
		return s, fmt.Errorf("--exclude-straggler and --check-action=report contradict each other: use one of them")
	}
	var err error
	if text := o.String("check-ttl"); text != "run" {
		if s.TTL, err = duration.Within(text, time.Millisecond, netcheck.MaxTTL); err != nil {
			return s, fmt.Errorf("--check-ttl: %w, or run for as long as the node stays", err)
		}
	}
	s.Timeout, err = o.Within("check-timeout", minCheckTimeout, netcheck.MaxTimeout)
	return s, err
}

// minCheckTimeout is the least --check-timeout.
const minCheckTimeout = 10 * time.Second

func readSwitchbox(o feature.Options) (*boxSettings, error) {
	text := o.String("box-pairs")
	b := &boxSettings{limits: switchbox.Limits{
		MinBandwidth: float64(o.Int("min-bandwidth")), MinChannels: o.Int("min-channels"), Ring: text == argv.Ring,
	}}
	if b.limits.Ring {
		return b, switchbox.CheckPairs(nil, b.limits)
	}
	pairs, err := argv.ParsePairs([]string{text})
	if err != nil {
		return nil, err
	}
	b.limits.Given = o.IsSet("box-pairs")
	for _, p := range pairs {
		b.pairs = append(b.pairs, switchbox.Pair{A: p[0], B: p[1]})
	}
	return b, switchbox.CheckPairs(b.pairs, b.limits)
}

// gate makes all nodes of the run wait for the checks.
func (k *checkSettings) gate(p *rendezvous.Params) {
	p.Gate, p.Check = true, k.spec.String()
	p.GateTimeout = 2*k.spec.Timeout + localBudget // --health-check may take as long as the tests
	if k.spec.Level == netcheck.LevelFull {
		p.GateTimeout += netcheck.ImportTimeout
	}
}

// localBudget is the time for a node's other own checks, and for all nodes to join.
const localBudget = 60 * time.Second

// planChecks is the feature's part of the --dry-run output.
type planChecks struct {
	Level            netcheck.Level `json:"level"`
	Action           string         `json:"action"`
	Comm             bool           `json:"comm_perf_test"`
	ExcludeStraggler bool           `json:"exclude_straggler"`
	TTL              string         `json:"ttl"`
	Timeout          string         `json:"timeout"`
	HealthCheck      string         `json:"health_check,omitempty"`
	Switchbox        *planBox       `json:"switchbox,omitempty"`
	Only             bool           `json:"check_only,omitempty"`
}

type planBox struct {
	Pairs       []switchbox.Pair `json:"box_pairs,omitempty"`
	Ring        bool             `json:"ring,omitempty"` // of all devices, in place of pairs
	MinMBps     float64          `json:"min_bandwidth_mbps"`
	MinChannels int              `json:"min_channels"`
}

func (k *checkSettings) plan() planChecks {
	p := planChecks{
		Level: k.spec.Level, Action: "exclude", Comm: k.spec.Comm, ExcludeStraggler: k.spec.ExcludeStraggler,
		TTL: "run", Timeout: k.spec.Timeout.String(), HealthCheck: k.health, Only: k.only,
	}
	if k.spec.ReportOnly {
		p.Action = "report"
	}
	if k.spec.TTL > 0 {
		p.TTL = k.spec.TTL.String()
	}
	if k.box != nil {
		p.Switchbox = &planBox{k.box.pairs, k.box.limits.Ring, k.box.limits.MinBandwidth, k.box.limits.MinChannels}
	}
	return p
}

// startCommand starts a command of a check. Nothing else in the launcher may wait for children.
func (c *nodeChecks) startCommand(cmd *exec.Cmd) (wait func() error, err error) {
	return c.node.Processes().Command(cmd)
}
