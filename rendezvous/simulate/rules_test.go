package simulate

import (
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/history"
)

// rules hold for every history. They are looked at whenever workers start or stop, and whenever the daemon notes
// something.
type rules struct {
	c *cluster

	mu      sync.Mutex
	said    *history.Rules
	ends    map[string]end // by launcher
	worlds  map[job.EpochID]*world
	newest  job.EpochID // that had workers
	lastRun time.Time   // workers were started
	broken  []string    // rules
	digest  uint64      // of all events
	lines   *[]string   // the events, if that is not nil
}

// world is an epoch as its nodes were told of it.
type world struct {
	size, workers int
	addr          string
	ranks         []string // the node of each, or ""
	works         int      // nodes whose workers run
	counted       int      // of those, the nodes that the daemon has no reason to give up
}

func newRules(c *cluster) *rules {
	return &rules{c: c, worlds: map[job.EpochID]*world{}, ends: map[string]end{},
		said: history.NewRules(c.params.Min, c.params.Max, c.params.Unit)}
}

// breaks books that a rule is broken.
func (r *rules) breaks(format string, args ...any) {
	if len(r.broken) < 10 {
		r.broken = append(r.broken, fmt.Sprintf("%s: ", r.c.clock())+fmt.Sprintf(format, args...))
	}
}

// record adds an event to the history. Events of one moment have no order.
func (r *rules) record(what ...any) {
	if r.lines != nil {
		*r.lines = append(*r.lines, fmt.Sprintf("%15d %v", r.c.clock(), what))
	}
	h := fnv.New64a()
	fmt.Fprintln(h, time.Now().UnixNano(), what)
	r.digest += h.Sum64()
}

// tell has all events from now on added to lines, and returns the digest of those before.
func (r *rules) tell(lines *[]string) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = lines
	return r.digest
}

// heard adds to the history.
func (r *rules) heard(what ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record(what...)
}

// told is what a launcher hears.
func (r *rules) told(n *node, d rendezvous.Directive) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record(n.id, d.Kind, d.EpochID)
	if e, ends := r.ends[n.id]; ends && time.Now().After(e.at) && d.Seq > e.seq {
		r.said.Over(n.id, e.kind)
	}
	if err := r.said.Told(history.Told{ID: n.id, Kind: d.Kind, EpochID: d.EpochID, Place: d.Place, Restarts: d.Restarts,
		Cause: d.Cause, Paused: d.Paused, Barred: d.Barred}); err != nil {
		r.breaks("%v", err)
	}
	if d.Command != nil && d.Command.Args[0] != r.c.run {
		r.breaks("node %s was told the command of run %s", n.id, d.Command.Args[0])
	}
}

// sent: a Run has reached the host of a launcher.
func (r *rules) sent(id string, e job.EpochID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said.Sent(id, e)
}

// noticed: a notice is of the launcher's own run, and so is a command.
func (r *rules) noticed(n *node, notice job.Notice) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if notice.Topic != r.c.run {
		r.breaks("node %s has got a notice of run %s", n.id, notice.Topic)
	}
}

// forgotten: all that daemons have kept is lost.
func (r *rules) forgotten() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said.Forgotten()
	clear(r.ends)
}

// over books that the run has ended, as a launcher has heard. All that are in it hear the same.
func (r *rules) over(n *node, kind job.Kind) {
	var here []string
	if d := n.link.daemon(); d != nil {
		here = d.hub.IDs(r.c.run)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said.Over(n.id, kind)
	heard := n.hear(nil)
	for _, id := range here { // perhaps of another run by that name
		o := r.c.byID(id)
		if o != nil && o.hear(nil).Round > 0 && !o.hear(nil).Newer(heard.EpochID) && time.Now().After(o.unfair) {
			r.ends[id] = end{kind, time.Now().Add(5 * time.Millisecond), heard.Seq}
		}
	}
}

// end is what a launcher hears of the end of its run, once earlier answers have arrived. Those that are slow may not. A
// launcher that is busy takes an earlier directive later.
type end struct {
	kind job.Kind
	at   time.Time
	seq  uint64 // of the directive by which the first one has heard of it
}

func (r *rules) started(n *node, d rendezvous.Directive) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := d.Place
	r.record("start", n.id, d.EpochID, p.GroupRank, p.GroupWorldSize)
	w := r.worlds[d.EpochID]
	if w == nil {
		w = &world{size: p.GroupWorldSize, workers: p.WorldSize, addr: p.MasterAddr, ranks: make([]string, p.GroupWorldSize)}
		r.forget()
		r.worlds[d.EpochID] = w
		q, odd := r.c.params, w.workers != slots*w.size && !r.c.played
		if w.size < q.Min || w.size > q.Max || w.size%q.Unit != 0 || odd {
			r.breaks("epoch %v has %d nodes, %d workers", d.EpochID, w.size, w.workers)
		}
	}
	switch {
	case p.GroupWorldSize != w.size || p.WorldSize != w.workers || p.MasterAddr != w.addr:
		r.breaks("node %s was told another world %v: %+v, not %d nodes at %s", n.id, d.EpochID, *p, w.size, w.addr)
	case p.GroupRank < 0 || p.GroupRank >= w.size || p.RankBase != slots*p.GroupRank && !r.c.played:
		r.breaks("node %s has group rank %d, rank %d of %d", n.id, p.GroupRank, p.RankBase, w.size)
	case w.ranks[p.GroupRank] != "":
		r.breaks("nodes %s and %s both have group rank %d of epoch %v", w.ranks[p.GroupRank], n.id, p.GroupRank, d.EpochID)
	}
	if p.GroupRank < len(w.ranks) {
		w.ranks[p.GroupRank] = n.id
	}
	if d.Confirms() {
		r.breaks("node %s starts workers in a pause, or under a bar", n.id)
	}
	if e, works := n.running(); works || !d.EpochID.Newer(n.ran().EpochID) {
		r.breaks("node %s starts epoch %v after %v, %v", n.id, d.EpochID, n.ran().EpochID, e)
	}
	n.work(&d)
	w.works++
	n.excused = n.rival || n.link.isCut() || (r.c.played || r.newest.Newer(d.EpochID)) && !time.Now().After(n.unfair)
	if !n.excused {
		w.counted++
	}
	for e, o := range r.worlds {
		if e != d.EpochID && o.counted > 0 && !(r.c.played && n.excused) {
			r.breaks("node %s starts epoch %v while %d nodes run %v: %v", n.id, d.EpochID, o.counted, e, r.c.counted(e))
		}
	}
	if d.EpochID.Newer(r.newest) {
		r.newest = d.EpochID
	}
	r.lastRun = time.Now()
}

// forget drops worlds without workers, but for the newest ones, that nobody may run twice.
func (r *rules) forget() {
	for e, w := range r.worlds {
		if len(r.worlds) > 20 && w.works == 0 && e != r.newest {
			delete(r.worlds, e)
		}
	}
}

// stopped reports whether n has had workers.
func (r *rules) stopped(n *node) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, works := n.running()
	if !works {
		return false
	}
	n.work(nil)
	r.record("stop", n.id, e)
	w := r.worlds[e]
	w.works--
	if !n.excused {
		w.counted--
	}
	return true
}

// excuse books that the daemon may give up a node until then: its workers may run beside those of a newer world.
func (r *rules) excuse(n *node, until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n.unfair = later(n.unfair, until)
	if e, works := n.running(); works && !n.excused {
		r.worlds[e].counted--
	}
	n.excused = true
}

// rivals books that one of two nodes may replace the other at any moment in which that is cut off.
func (r *rules) rivals(ns ...*node) {
	for _, n := range ns {
		r.excuse(n, forever())
		r.mu.Lock()
		n.rival = true
		r.mu.Unlock()
	}
}

func forever() time.Time { return time.Now().Add(1000 * time.Hour) }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (r *rules) ended(n *node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record("end", n.id)
	if r.c.played && forgivable(n) {
		return
	}
	if why := n.why(); !errors.Is(why, errKilled) && !errors.Is(why, errLeft) && !n.killed() {
		r.breaks("node %s has ended: %v", n.id, why)
	}
}

// forgivable: a launcher may be refused, give up a daemon that stays away, and never have reached one.
func forgivable(n *node) bool {
	why := n.why()
	return errors.Is(why, rendezvous.ErrRefused) || errors.Is(why, api.ErrAway) || n.session == nil
}

// noted is what the daemon notes about the run.
func (r *rules) noted(note rendezvous.Note) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.record("note", note.Event, note.Node, note.Text)
	n := r.c.byID(note.ID)
	if r.c.played && note.ID != "" && n == nil {
		r.breaks("a note is about a node of another run: %+v", note)
	}
	switch {
	case note.Event != job.EventNodeLoss || n == nil || n.killed() || n.hasLeft() || !time.Now().After(n.unfair):
	case note.Text == "its connection broke while it was waiting": // it has no workers, and joins again
		r.c.mark("a node that waits is lost, and joins again")
	default:
		r.breaks("node %s is lost, and lives: %s", note.ID, note.Text)
	}
}

func (r *rules) newestStart() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lastRun
}

// counted are the nodes that count in an epoch.
func (c *cluster) counted(e job.EpochID) (ids []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, n := range c.nodes {
		if in, works := n.running(); works && in == e && !n.excused {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}
