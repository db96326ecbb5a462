package page

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/text"
)

// Bounds of the words beside the grid. The picture has all switches and ranks.
const (
	maxSwitchRows = 24
	maxNamedRuns  = 8
)

// grid is the picture of all workers, drawn by the script: a block for each switch, in it a column for each node, and a
// cell for each rank.
type grid struct {
	Nodes, Workers int
	Gone           int    // missing nodes; they are drawn, too
	Cells          string // of each node a line, see cell.line
	Switches       string // a JSON list of their names; "": there is only one
	Rack           string // whether the trouble is below one switch, in words
	Rows           []*leaf
	More           int // switches beyond Rows
	Late           []string
	LateAt         time.Time // zero: no arrivals are known
}

// leaf is a switch with the numbers of its workers.
type leaf struct {
	Number             int
	Name               string
	Nodes, Workers     int
	Red, Amber, Absent int
}

// Tone is that of the worst worker.
func (l *leaf) Tone() answers.Tone {
	switch {
	case l.Red > 0:
		return answers.Bad
	case l.Amber+l.Absent > 0:
		return answers.Waits
	}
	return answers.Good
}

// Text counts the nodes and workers.
func (l *leaf) Text() string {
	counts := []string{}
	for _, c := range []struct {
		n    int
		what string
	}{{l.Red, "in trouble"}, {l.Amber, "waiting or in doubt"}, {l.Absent, "late"}} {
		if c.n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", c.n, c.what))
		}
	}
	return fmt.Sprintf("%d nodes, %d workers: %s", l.Nodes, l.Workers, cmp.Or(strings.Join(counts, ", "), "well"))
}

// cell is a node in the grid.
type cell struct {
	tone         answers.Tone
	slots, first int // first is its first rank, -1: none
	leaf         string
	name, state  string
}

// cells are the present nodes of a run, and then the missing ones.
func cells(f answers.Facts) (all []cell) {
	slow, base := f.SlowNodes(), 0
	for _, n := range nodesIn(f.Run) {
		c := cell{answers.OfNode(n), n.Slots, -1, n.Switch, n.Name, describe.Node(n)}
		if n.GroupRank >= 0 {
			c.first = base
			base += n.Slots
		}
		if slow[n.Name] {
			c.tone, c.state = worse(c.tone, answers.Waits), c.state+", slow"
		}
		all = append(all, c)
	}
	for _, l := range f.Run.Missing {
		all = append(all, cell{answers.Bad, l.Slots, -1, l.Switch, l.Node, "gone: " + l.Reason})
	}
	return all
}

// ranks are facts about each rank besides the state of its node.
type ranks struct {
	bad, doubtful rankset.Set
	late          []string // by rank: the seconds, with a + before it comes; "": unknown
}

func ranksOf(f answers.Facts, workers int) (r ranks) {
	r.bad, r.doubtful = f.Suspects()
	came := f.Arrivals()
	if came == nil {
		return r
	}
	r.late = make([]string, workers)
	for _, l := range came.Late {
		late := strconv.FormatFloat(l.Late.Seconds(), 'f', 1, 64)
		if l.Absent {
			late += "+"
		}
		for _, run := range rankset.Named(l.Ranks) {
			for rank := run.First; rank <= min(run.Last, workers-1); rank++ {
				r.late[rank] = late
			}
		}
	}
	return r
}

// line is the tone of the workers, their number, the first rank, the number of the switch, their lateness, the state
// and the name, with tabs between. Workers that differ have a digit each for the tone, and commas between their
// latenesses.
func (c cell) line(r ranks, l *leaf) string {
	tones, late := make([]string, c.slots), make([]string, c.slots)
	for i := range c.slots {
		tone := c.tone
		if rank := c.first + i; c.first >= 0 {
			tone, late[i] = r.of(rank, tone)
		}
		tones[i] = digits[tone]
		l.count(tone, strings.HasSuffix(late[i], "+"))
	}
	l.Nodes++
	return fmt.Sprintf("%s\t%d\t%d\t%d\t%s\t%s\t%s", brief(tones, "", digits[c.tone]), c.slots, c.first, l.Number,
		brief(late, ",", ""), text.EscapeLine(c.state), text.EscapeLine(c.name))
}

// of is the tone of a rank whose node has a tone, and its lateness.
func (r ranks) of(rank int, node answers.Tone) (tone answers.Tone, late string) {
	if rank < len(r.late) {
		late = r.late[rank]
	}
	switch {
	case r.bad.Has(rank):
		return answers.Bad, late
	case r.doubtful.Has(rank):
		return worse(node, answers.Waits), late
	}
	return node, late
}

// brief is one of the values if they are all the same.
func brief(all []string, sep, none string) string {
	if len(all) == 0 {
		return none
	}
	if !slices.ContainsFunc(all, func(v string) bool { return v != all[0] }) {
		return all[0]
	}
	return strings.Join(all, sep)
}

// digits are the tones for the script; the larger is the worse.
var digits = map[answers.Tone]string{answers.Good: "0", answers.Plain: "1", answers.Waits: "2", answers.Bad: "3"}

func worse(a, b answers.Tone) answers.Tone {
	if digits[a] > digits[b] {
		return a
	}
	return b
}

func (l *leaf) count(tone answers.Tone, absent bool) {
	l.Workers++
	switch {
	case tone == answers.Bad:
		l.Red++
	case tone == answers.Waits:
		l.Amber++
	case absent:
		l.Absent++
	}
}

// gridOf is nil for a run without nodes.
func gridOf(f answers.Facts) *grid {
	all := cells(f)
	if len(all) == 0 {
		return nil
	}
	g := &grid{Gone: len(f.Run.Missing)}
	g.Nodes = len(all) - g.Gone
	for _, c := range all[:g.Nodes] {
		g.Workers += c.slots
	}
	r, leaves, byName := ranksOf(f, g.Workers), []*leaf{}, map[string]*leaf{}
	lines := make([]string, 0, len(all))
	for _, c := range all {
		l := byName[c.leaf]
		if l == nil {
			l = &leaf{Number: len(leaves), Name: cmp.Or(c.leaf, "unknown switch")}
			leaves, byName[c.leaf] = append(leaves, l), l
		}
		lines = append(lines, c.line(r, l))
	}
	g.Cells = strings.Join(lines, "\n")
	g.fold(leaves)
	if came := f.Arrivals(); came != nil {
		g.Late, g.LateAt = lateness(came.Late), came.At
	}
	return g
}

// fold adds the switches, the worst first, if there are several.
func (g *grid) fold(leaves []*leaf) {
	if len(leaves) < 2 {
		return
	}
	names := make([]string, len(leaves))
	for i, l := range leaves {
		names[i] = l.Name
	}
	data, _ := json.Marshal(names) // strings
	g.Switches, g.Rack = string(data), rack(leaves)
	slices.SortStableFunc(leaves, func(a, b *leaf) int {
		return -cmp.Or(cmp.Compare(a.Red, b.Red), cmp.Compare(a.Amber+a.Absent, b.Amber+b.Absent))
	})
	g.Rows = leaves[:min(len(leaves), maxSwitchRows)]
	g.More = len(leaves) - len(g.Rows)
}

// rack is the answer to the question of its name: is the trouble below one switch?
func rack(leaves []*leaf) string {
	what, of := "in trouble", func(l *leaf) int { return l.Red }
	total := func() (n int) {
		for _, l := range leaves {
			n += of(l)
		}
		return n
	}
	if total() == 0 {
		what, of = "waiting, late or in doubt", func(l *leaf) int { return l.Amber + l.Absent }
	}
	var below []string
	for _, l := range leaves {
		if of(l) > 0 {
			below = append(below, fmt.Sprintf("%s (%d of %d)", l.Name, of(l), l.Workers))
		}
	}
	n := len(below)
	if more := n - maxNamedRuns; more > 0 {
		below = append(below[:maxNamedRuns], fmt.Sprintf("and %d more", more))
	}
	switch n {
	case 0:
		return "No worker is in trouble."
	case 1:
		return fmt.Sprintf("All %d workers %s are below one switch: %s.", total(), what, below[0])
	case len(leaves):
		return fmt.Sprintf("%d workers %s are below all %d switches.", total(), what, n)
	}
	return fmt.Sprintf("%d workers %s are below %d of %d switches: %s.", total(), what, n, len(leaves),
		strings.Join(below, ", "))
}

// lateness has the arrivals in words.
func lateness(all []hang.Lateness) (lines []string) {
	var with rankset.Set
	for _, l := range all {
		set := rankset.Named(l.Ranks)
		switch {
		case l.Absent:
			lines = append(lines, fmt.Sprintf("Ranks %s have not come, %s after the first.", set.Brief(maxNamedRuns),
				describe.Age(l.Late)))
		case l.Late > withFirst && len(lines) < maxNamedRuns:
			lines = append(lines, fmt.Sprintf("Ranks %s came %.1f s after the first.", set.Brief(maxNamedRuns),
				l.Late.Seconds()))
		default:
			for _, run := range set {
				for rank := run.First; rank <= run.Last; rank++ {
					with.Add(rank)
				}
			}
		}
	}
	if n := with.Len(); n > 0 {
		lines = append(lines, fmt.Sprintf("%d ranks came with the first.", n))
	}
	return lines
}

// withFirst bounds the lateness of a punctual rank: arrivals are seen twice a second.
const withFirst = 600 * time.Millisecond
