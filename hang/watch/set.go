package watch

import (
	"bytes"
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/openfile"
	"dlrover-run/internal/stable"
)

// Set is the workers that one torchrun has started at a time.
type Set struct {
	Workers          []Process // by local rank, without gaps
	Parent           Process   // the torchrun
	RankBase         int       // the rank of local rank 0
	WorldSize        int       // of the whole job
	GroupRank        int       // of this torchrun
	MasterPort       uint16    // 0: unknown
	restarts, newest uint64
}

// Process is one worker. Start, field 22 of its stat, distinguishes it from another process that has got its pid.
type Process struct {
	PID   int
	Start uint64
}

const procRoot = "/proc"

// Bounds of the search for workers.
const (
	maxEnviron = 4 << 20 // bytes
	maxLocal   = 1024    // workers of a set
	maxGroup   = 1 << 16 // torchruns of a job
	maxWorld   = 1 << 20
)

// candidate is a process with the variables of a worker, and a parent with others.
type candidate struct {
	Process
	kin
	local, rank, localSize, group int
	port                          uint16
}

// kin are the workers that were started together.
type kin struct {
	parent   int
	restarts uint64
	world    int
}

// FindSet returns the set that was started last of the complete ones; nil: there is none. Processes with an
// environment that must not be read are passed over.
func FindSet() *Set { return findSet(procRoot) }

func findSet(root string) *Set {
	dirs, err := os.ReadDir(root)
	if err != nil {
		return nil
	}
	seen := map[int]candidate{}
	for _, d := range dirs {
		if pid, err := strconv.Atoi(d.Name()); err == nil {
			if c, ok := examine(root, pid); ok {
				seen[pid] = c
			}
		}
	}
	families := map[kin][]candidate{}
	for _, c := range seen {
		if p, ok := seen[c.parent]; !ok || p.rank != c.rank || p.local != c.local { // else it is a worker's child
			families[c.kin] = append(families[c.kin], c)
		}
	}
	var found *Set
	for f, cs := range families {
		s := assemble(root, f, cs)
		if s != nil && (found == nil || s.later(found)) {
			found = s
		}
	}
	return found
}

// later reports whether s was started after t.
func (s *Set) later(t *Set) bool {
	return cmp.Or(cmp.Compare(s.newest, t.newest), cmp.Compare(s.restarts, t.restarts),
		cmp.Compare(s.Parent.PID, t.Parent.PID)) > 0
}

// Lives reports whether all of the workers live. Zombies do not.
func (s *Set) Lives() bool {
	return !slices.ContainsFunc(s.Workers, func(p Process) bool { return !p.Lives() })
}

// Over reports whether none of the workers lives.
func (s *Set) Over() bool {
	return !slices.ContainsFunc(s.Workers, func(p Process) bool { return p.Lives() })
}

// Same reports whether both are the same processes.
func (s *Set) Same(t *Set) bool { return t != nil && slices.Equal(s.Workers, t.Workers) }

// Lives reports whether the process lives.
func (p Process) Lives() bool {
	st, err := newProcfs(procRoot).stat(p.PID)
	return err == nil && st.start == p.Start && st.alive()
}

// alive reports whether it has not ended; a zombie has.
func (s stat) alive() bool { return s.state != 'Z' && s.state != 'X' }

// assemble returns nil if a worker is missing, or the ranks are none that torchrun gives.
func assemble(root string, f kin, cs []candidate) *Set {
	stable.Sort(cs, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.local, b.local), cmp.Compare(a.Start, b.Start), cmp.Compare(a.PID, b.PID))
	})
	// a child of a parent that has ended was adopted, and is younger than the worker
	cs = slices.CompactFunc(cs, func(a, b candidate) bool { return a.local == b.local })
	first, parent := cs[0], Process{PID: f.parent}
	if st, err := newProcfs(root).stat(f.parent); err == nil {
		parent.Start = st.start
	}
	s := &Set{Parent: parent, RankBase: first.rank, WorldSize: f.world, GroupRank: first.group, MasterPort: first.port,
		restarts: f.restarts}
	for i, c := range cs {
		if c.local != i || c.rank != first.rank+i || c.localSize != len(cs) {
			return nil
		}
		s.Workers, s.newest = append(s.Workers, c.Process), max(s.newest, c.Start)
	}
	return s
}

// examine reports whether a process has the variables of a worker.
func examine(root string, pid int) (c candidate, ok bool) {
	st, err := newProcfs(root).stat(pid)
	if err != nil || !st.alive() {
		return c, false
	}
	env, err := openfile.Read(filepath.Join(root, strconv.Itoa(pid), "environ"), maxEnviron)
	if err != nil || !c.parse(env) {
		return c, false
	}
	c.Process, c.parent = Process{PID: pid, Start: st.start}, st.parent
	return c, true
}

// parse reads the variables of an environment.
func (c *candidate) parse(env []byte) bool {
	vars := map[string]string{}
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if name, value, ok := strings.Cut(string(kv), "="); ok {
			if _, again := vars[name]; !again {
				vars[name] = value
			}
		}
	}
	ok := true
	number := func(name string, least, most int) int {
		n, err := strconv.Atoi(vars[name])
		ok = ok && err == nil && n >= least && n <= most
		return n
	}
	c.localSize = number("LOCAL_WORLD_SIZE", 1, maxLocal)
	c.local = number("LOCAL_RANK", 0, c.localSize-1)
	c.world = number("WORLD_SIZE", c.localSize, maxWorld)
	c.rank = number("RANK", c.local, c.world-1)
	c.group = number("GROUP_RANK", 0, min(maxGroup, c.world)-1)
	c.restarts, _ = strconv.ParseUint(vars["TORCHELASTIC_RESTART_COUNT"], 10, 32)
	port, _ := strconv.ParseUint(vars["MASTER_PORT"], 10, 16)
	c.port = uint16(port)
	return ok
}
