// Package merge puts the stacks of many ranks together: into a tree, and into groups of ranks in the same functions.
package merge

import (
	"bufio"
	"cmp"
	"io"
	"slices"
	"strings"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
)

// Tree are the stacks of many ranks, one in the other: each Node is a function that those below it have called.
type Tree struct {
	Roots []*Node // in the order in which they were found
	// All are the ranks of the world that were to be merged.
	All rankset.Set
	// Known are the ranks with a stack, and Stated the ranks with a known state of their process. A rank in neither
	// is no evidence of being outside of a function.
	Known, Stated rankset.Set
	// NoData are the ranks of All that are not in Known.
	NoData rankset.Set
}

// Node is a function on the stacks of some ranks.
type Node struct {
	Frame hang.Frame // Line is 0 in a tree without lines
	// State: this is no function but the state of the processes, which is Frame.File.
	State  bool
	Ranks  rankset.Set
	Stacks int   // how many threads' stacks it is on; of main threads as many as there are Ranks
	End    int   // how many of these end here
	Lines  []int // in a tree without lines the lines of the frames, ascending, the first 8 of them
	// Exact: on some stack it is for certain. Others were found by a search of the stack, see Thread.Approximate.
	Exact bool
	// Children are the functions that it has called, in the order in which they were found.
	Children []*Node

	index map[nodeKey]*Node // Children, when they are more than a few
}

// nodeKey identifies a child of a node.
type nodeKey struct {
	hang.Frame
	state bool
}

func (n *Node) key() nodeKey { return nodeKey{n.Frame, n.State} }

// Options select the parts of a Tree. The zero value: the Python stacks of all threads and ranks.
type Options struct {
	Native bool // the stacks of the native code
	Lines  bool // frames on different lines are different
	States bool // the states of the processes, as stacks of their own
	// Children are merged instead of the threads of the ranks.
	Children bool
	// Threads and Ranks choose; nil is all.
	Threads func(hang.Thread) bool
	Ranks   func(rank int) bool
}

// Stacks puts the stacks of all ranks into a tree. It takes time in proportion to the frames that differ in memory:
// ranks that share their Stacks are as cheap as one.
func Stacks(w hang.World, ev []hang.Evidence, o Options) *Tree {
	t := &Tree{}
	m := merger{tree: t, Options: o, seen: map[*hang.Stacks][][]*Node{}}
	for _, e := range byRank(ev) {
		if o.Ranks == nil || o.Ranks(e.Rank) {
			m.add(e)
		}
	}
	t.All = w.Ranks()
	if o.Ranks != nil {
		t.All = t.All.Filter(o.Ranks)
	}
	t.NoData = t.All.Without(t.Known)
	return t
}

// byRank returns pointers to the evidence in the order of the ranks.
func byRank(ev []hang.Evidence) []*hang.Evidence {
	sorted := make([]*hang.Evidence, len(ev))
	for i := range ev {
		sorted[i] = &ev[i]
	}
	slices.SortStableFunc(sorted, func(a, b *hang.Evidence) int { return cmp.Compare(a.Rank, b.Rank) })
	return sorted
}

type merger struct {
	Options
	tree *Tree
	root Node
	// seen are the ways from the root that the threads of shared Stacks take.
	seen map[*hang.Stacks][][]*Node
}

func (m *merger) add(e *hang.Evidence) {
	if state, ok := e.State(); ok && m.States {
		m.tree.Stated.Add(e.Rank)
		m.count(e.Rank, []*Node{m.child(&m.root, nodeKey{hang.Frame{Func: "State", File: hang.StateName(state)}, true})})
	}
	if e.Stacks == nil {
		return
	}
	ways, ok := m.seen[e.Stacks]
	if !ok {
		ways = m.ways(e.Stacks)
		m.seen[e.Stacks] = ways
	}
	for _, way := range ways {
		m.tree.Known.Add(e.Rank)
		m.count(e.Rank, way)
	}
}

func (m *merger) ways(s *hang.Stacks) (ways [][]*Node) {
	threads := s.Threads
	if m.Children {
		threads = s.Children
	}
	for _, t := range threads {
		if m.Threads != nil && !m.Threads(t) {
			continue
		}
		if way := m.way(t); len(way) > 0 {
			ways = append(ways, way)
		}
	}
	return ways
}

// maxDepth bounds a stack: of a deeper one a Tree has the outermost frames, and a Group the innermost.
const maxDepth = 512

// way walks from the outermost frame of a thread inwards.
func (m *merger) way(t hang.Thread) (way []*Node) {
	frames := t.Python
	if m.Native {
		frames = t.Native
	}
	at := &m.root
	for i, f := range slices.Backward(frames[max(0, len(frames)-maxDepth):]) {
		line := f.Line
		if !m.Lines {
			f.Line = 0
		}
		if at = m.child(at, nodeKey{Frame: f}); at == nil {
			break
		}
		if !m.Lines {
			at.line(line)
		}
		at.Exact = at.Exact || !m.Native || !t.Approximate || i == 0 // the instruction that a thread is at is known
		way = append(way, at)
	}
	return way
}

// maxLines is how many lines of a function are kept apart.
const maxLines = 8

func (n *Node) line(line int) {
	i, found := slices.BinarySearch(n.Lines, line)
	if !found && line > 0 && len(n.Lines) < maxLines {
		n.Lines = slices.Insert(n.Lines, i, line)
	}
}

// indexFrom is how many children are searched one by one.
const indexFrom = 8

// child finds a function that n has called, or adds it. It is nil where link-time optimisation has left no name:
// xpu_timer's viewer ends stacks there.
func (m *merger) child(n *Node, k nodeKey) *Node {
	if c := n.find(k); c != nil {
		return c
	}
	if strings.Contains(k.Func, "lto_priv") || strings.Contains(k.File, "lto_priv") {
		return nil
	}
	c := &Node{Frame: k.Frame, State: k.state}
	n.Children = append(n.Children, c)
	if n == &m.root {
		m.tree.Roots = n.Children
	}
	switch {
	case n.index != nil:
		n.index[k] = c
	case len(n.Children) == indexFrom:
		n.index = map[nodeKey]*Node{}
		for _, c := range n.Children {
			n.index[c.key()] = c
		}
	}
	return c
}

func (n *Node) find(k nodeKey) *Node {
	if n.index != nil {
		return n.index[k]
	}
	for _, c := range n.Children {
		if c.State == k.state && c.Frame == k.Frame {
			return c
		}
	}
	return nil
}

// count adds a stack of a rank to the nodes of its way.
func (m *merger) count(rank int, way []*Node) {
	for _, n := range way {
		n.Ranks.Add(rank)
		n.Stacks++
	}
	way[len(way)-1].End++
}

// maxFolded is how many bytes Folded writes at most.
const maxFolded = 64 << 20

// Folded writes the tree as xpu_timer's viewer does, a line for each stack that ends:
// func@source@stuck|leak;func@source@stuck|leak 1, the outermost function first. Stuck are the ranks that are in the
// function, leak all others of the world, including ranks with no data (NoData). Characters of a name that would
// break the format are replaced. It stops at the end of a line below maxFolded bytes, and reports whether it has.
func (t *Tree) Folded(w io.Writer) (cut bool, err error) { return t.folded(w, maxFolded) }

func (t *Tree) folded(w io.Writer, room int) (cut bool, err error) {
	f := &folder{w: bufio.NewWriter(w), all: t.All, room: room}
	for _, n := range t.Roots {
		f.write(n)
	}
	return f.cut, f.w.Flush()
}

type folder struct {
	w    *bufio.Writer
	all  rankset.Set
	path []byte
	room int // bytes that may still be written
	cut  bool
}

func (f *folder) write(n *Node) {
	if f.cut {
		return
	}
	before := len(f.path)
	f.path = f.frame(f.path, n)
	if n.End > 0 {
		f.line()
	}
	f.path = append(f.path, ';')
	for _, c := range n.Children {
		f.write(c)
	}
	f.path = f.path[:before]
}

func (f *folder) line() {
	if f.room -= len(f.path) + len(" 1\n"); f.room < 0 {
		f.cut = true
		return
	}
	_, _ = f.w.Write(f.path) // Flush reports it
	_, _ = f.w.WriteString(" 1\n")
}

func (f *folder) frame(b []byte, n *Node) []byte {
	b = append(b, n.Name()...)
	b = append(b, '@')
	b = n.Ranks.Append(b, '/')
	b = append(b, '|')
	return f.all.Without(n.Ranks).Append(b, '/')
}

// Name is func@source, with the line where the tree has lines.
func (n *Node) Name() string { return Foldable(n.Frame.Func) + "@" + Foldable(n.Frame.Source()) }

// Foldable replaces characters that would break a line of folded stacks, or act on a terminal. An empty name is
// Unknown.
func Foldable(name string) string {
	if name == "" {
		return hang.Unknown
	}
	return strings.ReplaceAll(text.Clean(name, '_'), ";", ":")
}

// Group is a group of ranks with their main threads (Thread.Main) in the same functions.
type Group struct {
	Ranks  rankset.Set
	States string // the states of their processes, each once
	Phases []hang.Phase
	// Frames begin with the innermost. A line is 0 where they are on different ones.
	Frames []hang.Frame
	Native hang.Frame // the innermost native function of the first rank
}

// Groups returns the groups, the largest first, then by rank. Ranks without a stack of that sort are in none.
func Groups(ev []hang.Evidence, native bool) []Group {
	g := grouper{native: native, groups: map[string]*Group{}, seen: map[*hang.Stacks]*Group{}}
	for _, e := range byRank(ev) {
		if e.Stacks != nil {
			g.add(e)
		}
	}
	out := make([]Group, 0, len(g.groups))
	for _, s := range g.groups {
		out = append(out, *s)
	}
	stable.Sort(out, func(a, b Group) int {
		return cmp.Or(cmp.Compare(b.Ranks.Len(), a.Ranks.Len()), cmp.Compare(a.Ranks[0].First, b.Ranks[0].First))
	})
	return out
}

type grouper struct {
	native bool
	groups map[string]*Group
	seen   map[*hang.Stacks]*Group // of Stacks that ranks share
	key    []byte
}

func (g *grouper) add(e *hang.Evidence) {
	s, ok := g.seen[e.Stacks]
	if !ok {
		s = g.find(e.Stacks)
		g.seen[e.Stacks] = s
	}
	if s == nil {
		return
	}
	s.Ranks.Add(e.Rank)
	if len(e.Samples) == 0 {
		return
	}
	last := e.Samples[len(e.Samples)-1]
	if state := last.Proc.State; state != 0 && strings.IndexByte(s.States, state) < 0 {
		s.States += string(rune(state))
	}
	if last.Page != nil && !slices.Contains(s.Phases, last.Page.Phase) {
		s.Phases = append(s.Phases, last.Page.Phase)
	}
}

// find returns the group of these stacks, nil if they have no main thread.
func (g *grouper) find(st *hang.Stacks) *Group {
	main := st.Main()
	if main == nil {
		return nil
	}
	frames := main.Python
	if g.native {
		frames = main.Native
	}
	if len(frames) == 0 {
		return nil
	}
	frames = frames[:min(len(frames), maxDepth)]
	g.key = g.key[:0]
	for _, f := range frames {
		g.key = append(append(append(append(g.key, f.Func...), 0), f.File...), 0)
	}
	s := g.groups[string(g.key)]
	if s == nil {
		s = &Group{Frames: slices.Clone(frames)}
		s.Native = hang.Innermost(main.Native)
		g.groups[string(g.key)] = s
	}
	for i, f := range frames {
		if s.Frames[i].Line != f.Line {
			s.Frames[i].Line = 0
		}
	}
	return s
}
