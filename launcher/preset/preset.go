// Package preset holds what each framework expects in a worker's environment, as data: Lookup finds a framework's
// table, Preset.Environ fills it in for one worker, MergeEnv lays the result over the launcher's own environment.
//
// The package is pure: it must not read the process's environment, which comes in as a function, nor a clock or a file,
// and it starts no goroutine.
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
}

// Preset is one framework's environment.
type Preset struct {
	Name string
	// QuickRestart: workers catch the signal that stops them, and have nothing to save when they are to be started again.
	QuickRestart bool

	vars []variable
}

// variable is one row of a preset.
type variable struct {
	name string
	// value returns false to leave the variable as it is inherited.
	value func(Vars) (string, bool, error)
}

// Names lists the presets.
func Names() []string {
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
	return Preset{}, fmt.Errorf("preset %q is unknown: use %s", name, strings.Join(Names(), ", "))
}

func presets() []Preset {
	return []Preset{torch()}
}

// Environ returns what the preset sets for one worker: NAME=value, sorted, to be laid over the inherited environment.
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

// only is row for workers of which when says so.
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
	return variable{name, func(v Vars) (string, bool, error) {
		_, found := v.Parent.lookup(name)
		return value, !found, nil
	}}
}
