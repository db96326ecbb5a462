// Package preset holds as data the environment that each framework expects in a worker. Lookup finds a framework's
// table, Preset.Environ fills it in for one worker, MergeEnv lays the result over the launcher's own environment.
//
// The package is pure: it must not read the process's environment, which is passed as a function, nor a clock or a
// file, and it starts no goroutine.
package preset

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// LookupEnv looks up a variable of the launcher's own environment, as os.LookupEnv does. nil is an empty environment.
type LookupEnv func(name string) (string, bool)

func (l LookupEnv) lookup(name string) (string, bool) {
	if l == nil {
		return "", false
	}
	return l(name)
}

// Vars is everything that a preset may use for one worker.
type Vars struct {
	LocalRank, Rank, GroupRank, RoleRank                     int // a group is one launcher, which is one node
	LocalWorldSize, WorldSize, GroupWorldSize, RoleWorldSize int
	Role                                                     string
	MasterAddr                                               string
	MasterPort                                               int
	RestartCount, MaxRestarts                                int
	RunID                                                    string
	// AgentStore: the launcher serves the store at MasterAddr:MasterPort; no rank hosts it.
	AgentStore       bool
	ErrorFile        string    // where the worker writes its error; "" = nowhere
	VirtualLocalRank bool      // every worker is local rank 0 and sees one device
	OldTorch         bool      // the workers' torch is older than 2.2
	Signals          string    // --signals-to-handle
	Parent           LookupEnv // the launcher's own environment, which workers inherit
	// World is every node by group rank, in the order of their ranks; nil unless Preset.World asks for it.
	World []Node
	// Devices is the number of accelerators that workers of this node may see, if Preset.Devices asks for it; 0: there are
	// none. Device is their kind: "cuda", "rocm", "ascend", "metax" or "".
	Devices int
	Device  string
	// ServicePort is the port of node 0 for the framework's own service, instead of its first port; 0: the first port.
	ServicePort int
	// Servers is the number of parameter servers next to the workers.
	Servers int
	// Share is this node's part of a job that has nodes for its side processes: Workers, or the name of a Side. "": the
	// first node has all sides next to its workers.
	Share string
	// LogDir is where the worker's own log files belong, and for Sides the directory above theirs; "": none are kept.
	LogDir string
	// Attempt is unlike that of any other start of this run's workers, and can be part of a file's name.
	Attempt string
}

// Workers is the Share of a node without sides.
const Workers = "workers"

// Node is one node of a world.
type Node struct {
	GroupRank       int
	Addr            string // where the others reach it
	RankBase, Slots int    // its workers have the ranks from RankBase to RankBase+Slots-1
	// Ports are free on that node and kept for the framework: at least as many as Preset.Ports returns for its slots. The
	// number 0 stands for one that is not known yet.
	Ports []int
}

// Preset describes the environment that one framework expects.
type Preset struct {
	Name string
	// QuickRestart: workers catch the signal that stops them, and have nothing to save when they are to be started again.
	QuickRestart bool
	// Ports is the number of free ports that a node with so many workers offers; nil: none.
	Ports func(slots int) int
	// World: Vars.World is needed.
	World bool
	// Devices: Vars.Devices and Vars.Device are needed.
	Devices bool
	// Wants are variables without which most scripts fail, and which only the user can set.
	Wants []string
	// Args are put between the script and its own arguments; nil: none.
	Args func(Vars) []string
	// Sides are all side processes of the job; nil: none. SidesOf are a node's.
	Sides func(Vars) ([]Side, error)
	// Success is the rule for the success of the job: all, rank0, node0 or any; "": the launcher's default.
	Success string

	vars []variable
}

// Side is a side process: it executes the workers' program and has no rank.
type Side struct {
	Name string   // of its log file, and in messages
	Env  []string // NAME=value, to be laid over the inherited environment
}

// SidesOf returns the side processes of the node with v for its local rank 0.
func (p Preset) SidesOf(v Vars) ([]Side, error) {
	if p.Sides == nil || v.Share == Workers || v.Share == "" && v.GroupRank != 0 {
		return nil, nil
	}
	all, err := p.Sides(v)
	if v.Share == "" {
		return all, err
	}
	return slices.DeleteFunc(all, func(s Side) bool { return s.Name != v.Share }), err
}

// PortsOf is the number of ports that a node with so many workers offers.
func (p Preset) PortsOf(slots int) int {
	if p.Ports == nil {
		return 0
	}
	return p.Ports(slots)
}

// ArgsOf are put between the script and its own arguments.
func (p Preset) ArgsOf(v Vars) []string {
	if p.Args == nil {
		return nil
	}
	return p.Args(v)
}

// variable is one row of a preset.
type variable struct {
	name string
	// value returns false to leave the variable as it is inherited.
	value func(Vars) (string, bool, error)
}

// presetNames lists the presets.
func presetNames() []string {
	var names []string
	for _, p := range presets() {
		names = append(names, p.Name)
	}
	return names
}

// Lookup finds a preset.
func Lookup(name string) (Preset, error) {
	for _, p := range presets() {
		if p.Name == name {
			return p, nil
		}
	}
	return Preset{}, fmt.Errorf("preset %q is unknown: use %s or auto", name, strings.Join(presetNames(), ", "))
}

func presets() []Preset {
	return []Preset{torch(), deepspeed(), mindspore(), jax(), tensorflow(), paddle(), mpi(), torchft()}
}

// Environ returns the variables of one worker: NAME=value, sorted, to be laid over the inherited environment.
func (p Preset) Environ(v Vars) ([]string, error) {
	var env []string
	for _, row := range p.vars {
		value, set, err := row.value(v)
		if err != nil {
			return nil, fmt.Errorf("preset %s: %s for local rank %d: %w", p.Name, row.name, v.LocalRank, err)
		}
		if set {
			env = append(env, row.name+"="+value)
		}
	}
	slices.Sort(env)
	return env, nil
}

// MergeEnv returns parent with overlay's variables in place of its own. The last of equal names counts, as in os/exec.
func MergeEnv(parent, overlay []string) []string {
	all := slices.Concat(parent, overlay)
	seen := make(map[string]bool, len(all))
	out := make([]string, 0, len(all))
	for _, entry := range slices.Backward(all) {
		name, _, _ := strings.Cut(entry, "=")
		if !seen[name] {
			seen[name] = true
			out = append(out, entry)
		}
	}
	slices.Reverse(out)
	return out
}

// Ways to fill a row.

func text(name string, get func(Vars) string) variable {
	return variable{name, func(v Vars) (string, bool, error) { return get(v), true, nil }}
}

func number(name string, get func(Vars) int) variable {
	return text(name, func(v Vars) string { return strconv.Itoa(get(v)) })
}

// only is row for workers that when selects.
func only(when func(Vars) bool, row variable) variable {
	return variable{row.name, func(v Vars) (string, bool, error) {
		if !when(v) {
			return "", false, nil
		}
		return row.value(v)
	}}
}

// inherited is value, unless the variable is inherited, even if empty.
func inherited(name, value string) variable {
	return inheritedOf(name, func(Vars) string { return value })
}

func inheritedOf(name string, get func(Vars) string) variable {
	return variable{name, func(v Vars) (string, bool, error) {
		if _, found := v.Parent.lookup(name); found {
			return "", false, nil
		}
		return get(v), true, nil
	}}
}
