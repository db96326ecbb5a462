package hang

import (
	"cmp"
	"slices"
	"time"
)

// file is the evidence collected for one incident, or for a user's request for stacks.
type file struct {
	id    uint64
	world World
	began time.Time
	since time.Time     // the last progress, by the first node that suspected
	wait  time.Duration // between began and the confirmation, at least

	nodes   []nodeReport // by group rank
	missing int          // nodes that have not answered the newest Ask
	size    int          // of all evidence, see Incident.Held

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

// newFile begins a file for the present world in place of the old one.
func (c *Incident) newFile() {
	c.seq++
	f := &file{id: c.seq, world: c.world, began: c.now, since: c.now, nodes: make([]nodeReport, len(c.world.Nodes))}
	c.file = f
}

// expect awaits an answer of every node that has workers.
func (f *file) expect() {
	for i, n := range f.world.Nodes {
		f.nodes[i].answered = n.Slots == 0
	}
	f.missing = f.world.Working()
}

func (f *file) heardOf(groupRank int) bool {
	return groupRank >= 0 && groupRank < len(f.nodes) && f.nodes[groupRank].answered
}

// answer takes the answer of a node. Late answers count, too.
func (c *Incident) answer(groupRank int, r *Report) {
	f := c.file
	d := &f.nodes[groupRank]
	whole := r.Ask == c.ask.Seq && c.ask.What == AskEvidence
	es := f.of(groupRank)
	for i := range r.Evidence {
		es = f.take(es, groupRank, r.Evidence[i], whole, r.Partial)
		if p := newestPage(&r.Evidence[i]); p != nil {
			c.steps = max(c.steps, p.Steps)
		}
	}
	f.size -= d.evidence.size()
	d.evidence = pack(es)
	f.size += d.evidence.size()
	d.store = r.Store
	if r.RAS != "" {
		d.ras = r.RAS
	}
	if r.Ask == c.ask.Seq && !d.answered {
		d.answered = true
		f.missing--
	}
	if r.Ask == c.collect.ask.Seq && !d.collected {
		d.collected = true
		if c.collect.missing--; c.collect.missing == 0 {
			c.endCollection()
		}
	}
}

// of is the evidence of one node's workers, by rank.
func (f *file) of(groupRank int) []Evidence {
	return f.nodes[groupRank].evidence.unpack(f.world.Nodes[groupRank].Name, groupRank)
}

// take adds one worker's evidence to its node. If whole is set, it replaces the earlier evidence; otherwise it is
// added.
func (f *file) take(es []Evidence, groupRank int, e Evidence, whole bool, partial string) []Evidence {
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

// Size is about how many bytes e takes in memory, without Stacks and Groups.
func (e *Evidence) Size() int {
	const evidence, sample, page, entry = 280, 176, 200, 160
	n := evidence + len(e.Work) + len(e.Sockets)*32 + len(e.Log) + len(e.Exception) + len(e.Error)
	for _, s := range e.Samples {
		n += sample
		if p := s.Page; p != nil {
			n += page + len(p.Groups)*24 + len(p.StepTimes)*8 + len(p.Spans)*24
		}
	}
	if e.Flight != nil {
		n += len(e.Flight.Entries) * entry
	}
	return n
}

// add is for a further look at the same worker.
func (e *Evidence) add(more Evidence) {
	e.Samples = append(slices.Clip(e.Samples), more.Samples...)
	if n := len(e.Samples); n > maxSamples {
		e.Samples = slices.Delete(e.Samples, 1, 1+n-maxSamples) // the first one shows the most progress
	}
	if more.Stacks != nil {
		e.Stacks, e.Exception = more.Stacks, more.Exception // a look at pages alone knows of neither
	}
	if len(more.Groups) > 0 {
		e.Groups = more.Groups
	}
	if more.Flight != nil {
		e.Flight = more.Flight
	}
	if more.Sockets != nil {
		e.Sockets = more.Sockets
	}
	if more.Log != "" {
		e.Log = more.Log
	}
	e.Error = more.Error
}

// newest is the last look at the worker, zero without any.
func (e *Evidence) newest() Sample {
	if len(e.Samples) == 0 {
		return Sample{}
	}
	return e.Samples[len(e.Samples)-1]
}

// thin leaves the rings of the newest page only.
func (e *Evidence) thin() {
	for i := range e.Samples[:max(len(e.Samples)-1, 0)] {
		if p := e.Samples[i].Page; p != nil && (p.StepTimes != nil || p.Spans != nil) {
			e.Samples[i].Page = p.bare()
		}
	}
}

// bare is a copy without the rings.
func (p *Page) bare() *Page {
	bare := *p
	bare.StepTimes, bare.Spans = nil, nil
	return &bare
}

func newestPage(e *Evidence) *Page {
	for _, s := range slices.Backward(e.Samples) {
		if s.Page != nil {
			return s.Page
		}
	}
	return nil
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
	c := confirmation{suspects: v.SuspectRanks()}
	waiting, _ := ParseRanks(v.Waiting)
	c.waiting = RanksOf(waiting...)
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
	suspects, waiting RankSet
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

// onDevice reports whether it was seen to wait for its device.
func (e *Evidence) onDevice() bool {
	if e.Stacks == nil {
		return false
	}
	w, sure := waitOf(e.Stacks)
	return sure && w.op == onDevice
}

// find records the present result of the evidence.
func (f *file) find(now time.Time, v Verdict) {
	if !sameSuspects(f.verdict, v) || decisive(f.verdict.Kind) != decisive(v.Kind) {
		f.foundAt = now
	}
	f.verdict, f.judgedAt = v, now
}

// sameSuspects reports whether two verdicts name the same ranks.
func sameSuspects(a, b Verdict) bool {
	return slices.EqualFunc(a.Suspects, b.Suspects, func(x, y Suspect) bool { return x.Rank == y.Rank })
}

// sameVerdict reports whether nothing has changed that people want to know.
func sameVerdict(a, b Verdict) bool {
	return a.Kind == b.Kind && a.Confidence == b.Confidence && sameSuspects(a, b)
}
