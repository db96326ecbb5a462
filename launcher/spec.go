package launcher

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
)

// spec is a worker's, with the variables of the parts.
func (c *Config) spec(e Epoch, id logs.WorkerID, errorFile string, env []string) (proc.Spec, error) {
	vars := c.varsOf(e, id.LocalRank, errorFile)
	path, args, err := c.program(e, vars)
	if err != nil {
		return proc.Spec{}, err
	}
	overlay, err := c.Preset.Environ(vars)
	if err != nil {
		return proc.Spec{}, err
	}
	s := proc.Spec{
		Path: path, Args: args, Dir: c.Dir, Env: preset.MergeEnv(c.Env, append(overlay, env...)), Stdin: c.Stdin,
	}
	if c.CPUs != nil {
		s.CPUs = c.CPUs(id.LocalRank)
	}
	if c.MemoryPolicy != nil {
		s.Memory = c.MemoryPolicy(id.LocalRank)
	}
	return s, nil
}

// varsOf are the values for one worker of e.
func (c *Config) varsOf(e Epoch, localRank int, errorFile string) preset.Vars {
	vars := c.Vars(e.Place, localRank, errorFile)
	vars.MaxRestarts, vars.Attempt = e.MaxRestarts, attemptName(c.RunID, e.Directive)
	if c.LogsKept && errorFile != "" {
		vars.LogDir = filepath.Dir(errorFile)
	}
	if c.Preset.World {
		vars.World = presetWorld(e.World)
	}
	return vars
}

// program returns the path and argv that one worker of e executes.
func (c *Config) program(e Epoch, v preset.Vars) (path string, args []string, err error) {
	if e.Command == nil {
		return c.Path, c.ArgsOf(v), nil
	}
	p, err := c.Resolve(*e.Command)
	if err != nil {
		return "", nil, &commandError{err}
	}
	return p.Path, c.withArgs(p.Args, p.Own, v), nil
}

// sidesOf returns those of Config.Sides and of the preset.
func (c *Config) sidesOf(g *group) (all []Side, err error) {
	if c.Sides != nil {
		if all, err = c.Sides(g.epoch); err != nil {
			return nil, err
		}
	}
	list, err := c.Preset.SidesOf(c.sideVars(g))
	return append(all, list...), err
}

func (c *Config) sideVars(g *group) preset.Vars {
	vars := c.varsOf(g.epoch, 0, "")
	if c.LogsKept {
		vars.LogDir = g.attempt.Dir()
	}
	return vars
}

// attemptName is unlike that of any other start of the run's workers. It can be part of a file's name.
func attemptName(run string, d Directive) string {
	clean := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || strings.ContainsRune("/\\ ", r) {
			return '_'
		}
		return r
	}, run)
	return fmt.Sprintf("%.100s-%d-%d-%d", clean, d.Term, d.Round, d.Epoch)
}

// presetWorld is a world as presets see it.
func presetWorld(world []job.Member) []preset.Node {
	nodes := make([]preset.Node, len(world))
	for i, m := range world {
		nodes[i] = preset.Node{GroupRank: m.GroupRank, Addr: m.Addr, RankBase: m.RankBase, Slots: m.Slots, Ports: m.Ports}
	}
	return nodes
}

// ArgsOf is the argv of the worker that v describes.
func (c *Config) ArgsOf(v preset.Vars) []string { return c.withArgs(c.Args, c.Own, v) }

// withArgs returns argv for the worker that v describes; its first own words are no arguments of the program.
func (c *Config) withArgs(argv []string, own int, v preset.Vars) []string {
	argv = slices.Clone(argv)
	for i := range argv {
		argv[i] = c.Substitute(argv[i], v.LocalRank)
	}
	return slices.Insert(argv, own, c.Preset.ArgsOf(v)...)
}

// Vars are the values that a worker's environment is made of.
func (c *Config) Vars(p job.Place, localRank int, errorFile string) preset.Vars {
	return preset.Vars{
		LocalRank: localRank, LocalWorldSize: c.Slots,
		Rank: p.RankBase + localRank, WorldSize: p.WorldSize,
		GroupRank: p.GroupRank, GroupWorldSize: p.GroupWorldSize,
		Role: c.Role, RoleRank: p.RoleRankBase + localRank, RoleWorldSize: p.RoleWorldSize,
		MasterAddr: p.MasterAddr, MasterPort: p.MasterPort, AgentStore: !p.WorkerStore,
		RestartCount: p.RestartCount, MaxRestarts: c.Policy.MaxRestarts, RunID: c.RunID,
		ErrorFile: errorFile, VirtualLocalRank: c.VirtualLocalRank, OldTorch: c.OldTorch, Signals: c.SignalNames,
		Parent: lookup(c.Env), ServicePort: c.ServicePort, Servers: c.Servers, Share: c.Share,
		Devices: c.Devices, Device: c.Device,
	}
}

// lookup reads an environment block; the last of equal names wins, as in exec.
func lookup(env []string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for _, kv := range slices.Backward(env) {
			if v, ok := strings.CutPrefix(kv, name+"="); ok {
				return v, true
			}
		}
		return "", false
	}
}
