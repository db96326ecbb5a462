// Package slow finds the ranks of a job that the others wait for in most steps (pure).
//
// The ranks of a process group begin the same collectives. One that takes longer than the others is early in its steps
// for more of the time: its mean position (hang.Looks) is behind that of its group. No clocks are compared for that.
package slow

import (
	"slices"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
)

const (
	// window is the least time that is judged at once. Two windows in a row must agree.
	window = 12 * time.Second
	// usualSteps is how many steps with looks most ranks must have in a window, leastSteps each of them; otherwise it
	// lasts longer, up to longest.
	usualSteps = 8
	leastSteps = 5
	longest    = 10 * time.Minute
	// silent is for how long a window waits for the report of a node, or two of its reports if these are rarer.
	silent = time.Minute
	// pause is the least time between two attempts to end a window.
	pause = time.Second
)

// Judge finds slow ranks among the workers of one run. It is for one goroutine.
type Judge struct {
	world  hang.World
	nodes  []node           // by group rank
	began  time.Time        // the window; zero: nobody has reported
	before time.Time        // the one before
	tried  time.Time        // when the window was last found to be too short
	found  []finding        // by group rank
	orders map[uint64]order // of groups, see compare
	pace   float64          // steps of the median rank in a second of the last two windows; 0: they were not compared
}

// node is a node of the world, with the sums of its newest report, and those when the present window began.
type node struct {
	at    time.Time
	ranks []rank
}

// rank has the sums of a worker: the newest, those when the window began, and what it found in the last two windows,
// the newer one first.
type rank struct {
	rank       int
	now, start hang.RankLooks
	last       [2]hang.RankLooks
}

// finding is what is known of the slow ranks of one node.
type finding struct {
	hang.Slowed
	ranks    rankset.Set
	missed   int  // windows since they were seen to be slow
	examined bool // by Checks
}

// Change is that ranks slow the job, or do no more.
type Change struct {
	hang.Slowed
	Over bool
}

// Begin starts with the workers of another epoch. Nothing is known of them.
func (j *Judge) Begin(w hang.World) {
	if w.Epoch == j.world.Epoch && len(j.nodes) == len(w.Nodes) {
		return
	}
	*j = Judge{world: w, nodes: make([]node, len(w.Nodes))}
}

// Slowed are the ranks that slow the job now, by node; 16 at most.
func (j *Judge) Slowed() (list []hang.Slowed) {
	for _, f := range j.found {
		list = append(list, f.Slowed)
	}
	return list
}

// Fewer is how many steps fewer the job makes in a second because of the ranks that slow it; false: its ranks were not
// compared yet.
func (j *Judge) Fewer() (steps float64, known bool) {
	share := 0.0
	for i := range j.found {
		share = max(share, j.found[i].Share)
	}
	return j.pace * share / (1 - share), j.pace > 0
}

// Heard takes a summary of a node, and returns what has changed. Sums of ranks that are not the node's are left out.
func (j *Judge) Heard(now time.Time, groupRank int, s *hang.Summary) []Change {
	if groupRank < 0 || groupRank >= len(j.nodes) || len(s.Looks) == 0 {
		return nil
	}
	j.nodes[groupRank].hear(now, j.world.Nodes[groupRank], s.Looks)
	if j.began.IsZero() {
		j.began = now
	}
	if !j.complete(now) {
		return nil
	}
	j.turn()
	changes := j.judge()
	j.before, j.began = j.began, now
	return changes
}

func (n *node) hear(now time.Time, of hang.WorldNode, looks []hang.RankLooks) {
	n.at = now
	for _, l := range looks[:min(len(looks), of.Slots)] {
		if l.Rank < of.RankBase || l.Rank >= of.RankBase+of.Slots {
			continue
		}
		i := slices.IndexFunc(n.ranks, func(r rank) bool { return r.rank == l.Rank })
		if i < 0 {
			n.ranks = append(n.ranks, rank{rank: l.Rank, start: l})
			i = len(n.ranks) - 1
		}
		n.ranks[i].now = l
	}
}

// complete reports whether the window is long enough, for the nodes that report and for their steps.
func (j *Judge) complete(now time.Time) bool {
	took := now.Sub(j.began)
	if took < window || now.Sub(j.tried) < pause {
		return false
	}
	j.tried = now
	wait := max(silent, 2*hang.Summaries(len(j.nodes)))
	for i := range j.nodes {
		if n := &j.nodes[i]; len(n.ranks) > 0 && !n.at.After(j.began) && took < wait {
			return false
		}
	}
	return took >= longest || j.steps() >= usualSteps
}

// steps is the median of the steps of the ranks in the window, each in the group with the most.
func (j *Judge) steps() uint64 {
	var all []uint64
	for i := range j.nodes {
		for k := range j.nodes[i].ranks {
			r, most := &j.nodes[i].ranks[k], uint64(0)
			for _, g := range since(r.now, r.start).Groups {
				most = max(most, g.Steps)
			}
			all = append(all, most)
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// turn ends the window.
func (j *Judge) turn() {
	for i := range j.nodes {
		for k := range j.nodes[i].ranks {
			r := &j.nodes[i].ranks[k]
			r.last[0], r.last[1] = since(r.now, r.start), r.last[0]
			r.start = r.now
		}
	}
}

// since is what a worker's sums have grown by. Sums that have begun anew are left out.
func since(now, before hang.RankLooks) hang.RankLooks {
	d := hang.RankLooks{Rank: now.Rank}
	if now.Steps < before.Steps || now.Watched < before.Watched || now.Busy < before.Busy || now.Data < before.Data {
		return d
	}
	d.Steps = now.Steps - before.Steps
	d.Watched, d.Busy, d.Data = now.Watched-before.Watched, now.Busy-before.Busy, now.Data-before.Data
	for _, g := range now.Groups {
		was := groupOf(&before, g.ID)
		if was == nil {
			was = &hang.GroupLooks{}
		}
		if was.Steps >= g.Steps || was.Positions > g.Positions || was.Squares > g.Squares ||
			was.Full > g.Full || was.Begun > g.Begun {
			continue
		}
		d.Groups = append(d.Groups, hang.GroupLooks{ID: g.ID, Begun: g.Begun - was.Begun, Looks: hang.Looks{
			Steps: g.Steps - was.Steps, Positions: g.Positions - was.Positions, Squares: g.Squares - was.Squares,
			Full: g.Full - was.Full}})
	}
	return d
}

func groupOf(r *hang.RankLooks, id uint64) *hang.GroupLooks {
	for i := range r.Groups {
		if r.Groups[i].ID == id {
			return &r.Groups[i]
		}
	}
	return nil
}
