package serve

import (
	"crypto/rand"
	"fmt"
	"iter"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/slow"
	"dlrover-run/internal/job"
	"dlrover-run/internal/runhost"
)

// run is an Incident with a clock. Its lock is held for one step at a time, and nothing of Config but Saved is called
// under it.
type run struct {
	runhost.Run
	hub   *Hub
	id    string
	ended atomic.Pointer[job.EpochID] // the Incident does not know it yet

	meeting sync.Mutex // before Run: a goroutine fetches the world

	of     *hang.Incident
	slow   slow.Judge
	checks *slow.Checks // nil: no node is examined because it is slow
	drains *slow.Drains // nil: no node leaves because it is slow
	stays  string       // why the nodes have not left that slow the job, as was logged
	fewer  float64      // steps in a second because of slow ranks, as was told; -1: nothing was
	shared interner
	held   int       // bytes of evidence, as booked in the hub
	used   time.Time // time of the last request
}

func (h *Hub) newRun(id string, spec hang.Spec) *run {
	now := time.Now()
	r := &run{hub: h, id: id, used: now, fewer: -1}
	switch spec.Slow {
	case hang.ActCheck:
		r.checks = &slow.Checks{Links: spec.SlowLink}
	case hang.ActDrain:
		r.drains = &slow.Drains{}
	}
	var kept hang.Kept
	if h.cfg.Kept != nil {
		kept = h.cfg.Kept(id)
	}
	r.of = hang.NewIncident(hang.IncidentConfig{
		Spec: spec, Seq: uint64(now.UnixNano()), Kept: kept,
		Judge: func(w hang.World, es iter.Seq[hang.Evidence], store []hang.StoreWait) hang.Verdict {
			return h.judge(id, w, es, store)
		},
		Saved: func() (int64, bool) {
			if h.cfg.Saved == nil {
				return 0, false
			}
			return h.cfg.Saved(id)
		},
	})
	return r
}

// take delivers a report of the node with the seat, and returns the question to that node.
func (r *run) take(s Seat, p *parcel) (hang.Ask, error) {
	if err := r.meet(s.Epoch); err != nil {
		return hang.Ask{}, err
	}
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil {
		return hang.Ask{}, r.Err()
	}
	r.used = time.Now()
	r.stepLocked(r.used, hang.Tick{}) // or events of the rendezvous would follow the report
	if e, live := r.of.Epoch(); !live || e != s.Epoch {
		return hang.Ask{}, notMember(r.id, errOtherEpoch)
	}
	r.hub.stats.reported()
	if len(p.report.Facts) > 0 {
		p.report.Ask = 0 // it is no evidence
	}
	r.unpackLocked(s.GroupRank, p)
	r.stepLocked(r.used, hang.Heard{GroupRank: s.GroupRank, Report: p.report})
	r.slowLocked(s.GroupRank, p.report.Summary)
	r.checkLocked(s.GroupRank, &p.report)
	return r.of.Pending(s.GroupRank), nil
}

// meet passes the world of an epoch to the Incident. Of thousands of nodes that report at once one fetches it.
func (r *run) meet(e job.EpochID) error {
	if r.knows(e) {
		return nil
	}
	r.meeting.Lock()
	defer r.meeting.Unlock()
	if r.knows(e) {
		return nil
	}
	w, err := r.hub.cfg.World(r.id)
	if err != nil {
		return notMember(r.id, err)
	}
	return r.begin(w)
}

// knows reports whether the epoch is the newest that has begun, and may be over.
func (r *run) knows(e job.EpochID) bool {
	r.Lock()
	defer r.Unlock()
	known, _ := r.of.Epoch()
	return known == e
}

func (r *run) begin(w hang.World) error {
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil {
		return r.Err()
	}
	r.stepLocked(time.Now(), hang.Begin{World: w})
	r.slow.Begin(w)
	return nil
}

// unpackLocked decodes evidence, as far as the Incident wants it and there is room.
func (r *run) unpackLocked(groupRank int, p *parcel) {
	rep := &p.report
	if !r.of.Wants(groupRank, rep.Ask) {
		rep.Evidence = nil
		return
	}
	size := len(rep.RAS)
	for i := range rep.Evidence {
		size += rep.Evidence[i].Size()
	}
	room := min(r.hub.cfg.maxRunHeld-r.held, r.hub.cfg.maxHeld-int(r.hub.held.Load()))
	if size > room {
		rep.Evidence, rep.RAS, rep.Store = nil, "", nil
		r.hub.stats.refused()
		return
	}
	if p.size()+size > room {
		p.bare()
	}
	r.shared.of(r.of.File())
	p.unpack(&r.shared)
}

func (r *run) collect(w hang.World) (uint64, error) {
	if err := r.begin(w); err != nil {
		return 0, err
	}
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil {
		return 0, r.Err()
	}
	r.used = time.Now()
	r.stepLocked(r.used, hang.Collect{})
	seq, recent := r.of.Collection()
	if !recent {
		return 0, fmt.Errorf("%w: the nodes were asked too often; try again in a minute", errBusy)
	}
	return seq, nil
}

func (r *run) picture(evidence bool) (hang.Picture, iter.Seq[hang.Evidence], error) {
	r.Lock()
	defer r.Unlock()
	if r.Err() != nil {
		return hang.Picture{}, nil, r.Err()
	}
	if !evidence {
		p := r.of.Picture(false)
		p.Slowed = r.slow.Slowed()
		return p, nil, nil
	}
	p, all := r.of.Pictures()
	p.Slowed = r.slow.Slowed()
	return p, all, nil
}

// slowLocked tells what a summary changes of the ranks that slow the job.
func (r *run) slowLocked(groupRank int, s *hang.Summary) {
	if s == nil {
		return
	}
	changes := r.slow.Heard(r.used, groupRank, s)
	r.costLocked() // first: the notes have the rendezvous keep it
	for _, c := range changes {
		n := job.Note{Event: job.EventSlowFound, Node: c.Node, Text: c.Line()}
		if c.Over {
			n.Event, n.Text = job.EventSlowOver, c.OverLine()
		}
		r.performLocked([]hang.Effect{{Note: &n}})
	}
	if r.drains == nil {
		return
	}
	if list := r.drains.Next(r.used, &r.slow); len(list) > 0 {
		r.Tell(func() { r.drain(list) })
	}
}

// costLocked tells what slow ranks cost, when that has changed.
func (r *run) costLocked() {
	fewer, known := r.slow.Fewer()
	if !known || fewer == r.fewer || r.hub.cfg.Slowed == nil {
		return
	}
	r.fewer = fewer
	epoch, _ := r.of.Epoch()
	r.Tell(func() { r.hub.cfg.Slowed(r.id, epoch, fewer) })
}

// checkLocked has a node examined whose ranks slow the job, and tells the result.
func (r *run) checkLocked(groupRank int, rep *hang.Report) {
	if r.checks == nil {
		return
	}
	r.checks.Heard(groupRank, rep)
	if asks := r.checks.Test(r.used); len(asks) > 0 {
		test, key := rand.Text(), []byte(rand.Text()+rand.Text())
		for _, a := range asks {
			a.Link.Test, a.Link.Key = test, key
			r.stepLocked(r.used, hang.Examine{Ask: a})
		}
	}
	if s := r.checks.Done(r.used, &r.slow); s != nil {
		n := job.Note{Event: job.EventSlowChecked, Node: s.Node, Text: s.CheckedLine()}
		r.performLocked([]hang.Effect{{Note: &n}})
	}
	if !r.of.Idle() {
		return
	}
	if nodes := r.checks.Next(r.used, &r.slow); len(nodes) > 0 {
		ask := hang.Ask{What: hang.AskFacts, Nodes: nodes, Listen: r.checks.Links && len(nodes) > 1}
		r.stepLocked(r.used, hang.Examine{Ask: ask})
	}
}

// drain has the first of the nodes leave that can.
func (r *run) drain(list []hang.Drain) {
	var why []string
	for _, d := range list {
		err := r.hub.cfg.Drain(r.id, d)
		if err == nil {
			r.Lock()
			r.drains.Left(r.used)
			r.Unlock()
			return
		}
		why = append(why, err.Error())
	}
	if text := strings.Join(why, "; "); text != r.stays {
		r.stays = text
		r.hub.cfg.Log.Warn("nodes that slow the job stay", "run_id", r.id, "why", text)
	}
}

// stepLocked first takes the events of the rendezvous since the last step.
func (r *run) stepLocked(now time.Time, ev hang.IncidentEvent) {
	if e := r.ended.Swap(nil); e != nil {
		r.performLocked(r.of.Step(now, hang.Over{Epoch: *e}))
		if _, live := r.of.Epoch(); !live {
			r.slow = slow.Judge{}
		}
	}
	r.performLocked(r.of.Step(now, ev))
	if r.of.File() != r.shared.file {
		r.shared.of(r.of.File())
	}
	r.bookLocked(r.of.Held() + r.shared.size)
	r.Arm(now, r.of.Next())
}

func (r *run) bookLocked(held int) {
	r.hub.held.Add(int64(held - r.held))
	r.held = held
}

func (r *run) performLocked(acts []hang.Effect) {
	cfg := &r.hub.cfg
	for _, a := range acts {
		r.hub.stats.count(a)
		switch {
		case a.Ask != nil:
			r.Tell(func() { cfg.Notify(r.id, *a.Ask) })
		case a.Note != nil:
			r.Tell(func() { cfg.Note(r.id, *a.Note) })
		case a.Order != nil:
			r.Tell(func() { cfg.Order(r.id, *a.Order) })
		case a.Doubt != "":
			r.Tell(func() { cfg.Doubt(r.id, a.Doubt) })
		}
	}
}

// Tick implements runhost.Machine.
func (r *run) Tick(now time.Time) { r.stepLocked(now, hang.Tick{}) }

// Idle implements runhost.Machine.
func (r *run) Idle(now time.Time) bool { return now.Sub(r.used) > retention }

// Closed implements runhost.Machine.
func (r *run) Closed() { r.bookLocked(0) }
