package hang

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"dlrover-run/hang/rankset"
)

// file is the evidence collected for one incident, or for a user's request for stacks.
type file struct {
	id    uint64
	world World
	began time.Time     // when the first node suspected something
	since time.Time     // the last progress, by that node
	wait  time.Duration // between began and the confirmation, at least

	nodes   []nodeReport // by group rank
	missing int          // nodes that have not answered the newest Ask
	size    int          // of all evidence, see Incident.Held

	arrivals *Arrivals // by the evidence of the verdict, or of a collection; nil: unknown
	verdict  Verdict
	judgedAt time.Time
	foundAt  time.Time // since when it has had these suspects
	told     int       // how often a verdict was
}

// nodeReport is one node's part of a file.
type nodeReport struct {
	answered  bool   // the newest Ask
	collected bool   // the newest collection
	evidence  packed // by rank, of ranks with some
	marks     packed // the same before the confirmation
	store     []StoreWait
	ras       string
}

// open makes it an incident, with the last progress of the first node that suspected.
func (f *file) open(now, since time.Time, wait time.Duration) {
	f.began, f.since, f.wait = now, since, wait
}

// expect awaits an answer of every node that has workers.
func (f *file) expect() {
	for i, n := range f.world.Nodes {
		f.nodes[i].answered = n.Slots == 0
	}
	f.missing = f.world.Working()
}

// expectStacks awaits an answer to a new collection.
func (f *file) expectStacks() {
	for i := range f.nodes {
		f.nodes[i].collected = false
	}
}

// has reports whether there is a node with this group rank.
func (f *file) has(groupRank int) bool { return groupRank >= 0 && groupRank < len(f.nodes) }

// answers notes that a node has answered the newest Ask.
func (f *file) answers(groupRank int) {
	if d := &f.nodes[groupRank]; !d.answered {
		d.answered = true
		f.missing--
	}
}

// collects notes that a node has answered the newest collection; false: it had before.
func (f *file) collects(groupRank int) bool {
	d := &f.nodes[groupRank]
	first := !d.collected
	d.collected = true
	return first
}

// take adds the evidence of a node, and returns the most steps on a page of it. If whole is set, it replaces the
// earlier evidence.
func (f *file) take(groupRank int, r *Report, whole bool) (steps uint64) {
	d := &f.nodes[groupRank]
	es := f.of(groupRank)
	for i := range r.Evidence {
		es = f.merge(es, groupRank, r.Evidence[i], whole, r.Partial)
		if p := r.Evidence[i].Page(); p != nil {
			steps = max(steps, p.Steps)
		}
	}
	f.size -= d.evidence.size()
	d.evidence = pack(es)
	f.size += d.evidence.size()
	d.store = r.Store
	if r.RAS != "" {
		d.ras = r.RAS
	}
	return steps
}

// of is the evidence of one node's workers, by rank.
func (f *file) of(groupRank int) []Evidence {
	return f.nodes[groupRank].evidence.unpack(f.world.Nodes[groupRank].Name, groupRank)
}

// merge adds one worker's evidence to its node. If whole is set, it replaces the earlier evidence; otherwise it is
// added.
func (f *file) merge(es []Evidence, groupRank int, e Evidence, whole bool, partial string) []Evidence {
	n := f.world.Nodes[groupRank]
	if e.Rank < n.RankBase || e.Rank >= n.RankBase+n.Slots {
		return es
	}
	if e.Error == "" {
		e.Error = partial
	}
	i, known := slices.BinarySearchFunc(es, e.Rank, func(x Evidence, rank int) int { return cmp.Compare(x.Rank, rank) })
	if !known {
		f.nodes[groupRank].marks = packed{}
		e.thin()
		return slices.Insert(es, i, e)
	}
	old := &es[i]
	if whole || old.PID != e.PID || old.Start != e.Start {
		*old = e
	} else if e.newest().At > old.newest().At { // it was not overtaken
		old.add(e)
	}
	old.thin()
	return es
}

// waits are the keys that are waited for in the workers' store.
func (f *file) waits() (out []StoreWait) {
	for i := range f.nodes {
		out = append(out, f.nodes[i].store...)
		if len(out) > maxStoreWaits {
			return out[:maxStoreWaits]
		}
	}
	return out
}

// markProgress remembers the progress of all workers.
func (f *file) markProgress() {
	for i := range f.nodes {
		f.nodes[i].marks = f.nodes[i].evidence
	}
}

// moved finds a worker among suspects and waiters of v that has made progress since markProgress, and forgets that.
func (f *file) moved(v Verdict) (rank int, moved bool) {
	c := confirmation{suspects: v.SuspectRanks(), waiting: rankset.Named(v.Waiting)}
	for i := range f.nodes {
		d := &f.nodes[i]
		before := d.marks
		if d.marks = (packed{}); len(c.moved) > 0 || before.empty() {
			continue
		}
		now := f.of(i)
		for k, e := range before.unpack("", i) {
			if was, is := e.newest(), now[k].newest(); is.At > was.At && was.PID != 0 {
				c.see(&e, was, is)
			}
		}
	}
	if len(c.moved) == 0 && c.spins && !c.rests {
		c.moved = c.stirred
	}
	if len(c.moved) == 0 {
		return 0, false
	}
	return c.moved[0], true
}

// A confirmation compares two looks at the ranks of a verdict. Work of a suspect without a page is no progress until
// it reaches the ranks that wait. If all waiters spin for their devices, which looks like work, only the suspect's
// own rest is a sign.
type confirmation struct {
	suspects, waiting rankset.Set
	moved, stirred    []int // ranks that progress, and suspects without a page that do something
	spins, rests      bool  // of a rank that waits
}

func (c *confirmation) see(e *Evidence, was, is Sample) {
	suspect, waiter, goesOn := c.suspects.Has(e.Rank), c.waiting.Has(e.Rank), Progressed(was, is)
	switch {
	case suspect && len(c.waiting) > 0 && is.Page == nil:
		if goesOn {
			c.stirred = append(c.stirred, e.Rank)
		}
	case !goesOn:
		c.rests = c.rests || waiter
	case waiter && is.Page == nil && e.onDevice():
		c.spins = true
	case suspect || waiter:
		c.moved = append(c.moved, e.Rank)
	}
}

// find records the present result of the evidence.
func (f *file) find(now time.Time, v Verdict) {
	if !sameSuspects(f.verdict, v) || decisive(f.verdict.Kind) != decisive(v.Kind) {
		f.foundAt = now
	}
	f.verdict, f.judgedAt = v, now
}

// doubtSilent lowers the confidence when a suspect's node has not confirmed that nothing has changed.
func (f *file) doubtSilent() {
	v := &f.verdict
	for _, s := range v.Suspects {
		if v.Confidence == High && !(f.has(s.GroupRank) && f.nodes[s.GroupRank].answered) {
			v.Confidence, v.Doubt = Low, fmt.Sprintf("node %d %s did not answer when it was asked again", s.GroupRank, s.Node)
			*v = v.aged(v.Age) // updates its line
		}
	}
}
