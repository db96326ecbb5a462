package hang

import (
	"fmt"
	"iter"
	"time"

	"dlrover-run/internal/job"
)

// Incident is the state machine of the hangs of one run. It is not safe for concurrent use.
//
// One incident follows another as nodes suspect something: idle, asking for evidence, waiting for as long as it may
// take, confirming, decided, idle. It decides by its events, their times and Config.Judge alone.
type Incident struct {
	cfg   IncidentConfig
	now   time.Time
	out   []Effect
	opens bucket // of incidents

	world World // of the newest epoch
	live  bool  // its workers run

	state  State
	file   *file     // of the newest incident or collection, nil for none
	dropAt time.Time // when the file is forgotten

	suspicions suspicions
	asker      asker
	next       nextLook
	told       toldVerdicts
	progress   progress
	patience   patience
	pace       *Pace // of the newest epoch with steps; it is replaced, and never changed
}

// NewIncident returns an Incident without nodes.
func NewIncident(cfg IncidentConfig) *Incident {
	return &Incident{cfg: cfg, state: StateIdle, opens: bucket{left: maxAsks},
		asker: asker{seq: cfg.Seq, room: bucket{left: maxAsks}}, patience: patience{after: cfg.Spec.After},
		progress: recalled(cfg.Kept)}
}

// Step takes one event and returns the effects, in order.
func (in *Incident) Step(now time.Time, ev IncidentEvent) []Effect {
	if now.Before(in.now) {
		now = in.now // time never goes back
	}
	in.now, in.out = now, nil
	in.expire()
	switch ev := ev.(type) {
	case Begin:
		in.begin(ev.World)
	case Heard:
		in.heard(ev)
	case Collect:
		in.beginCollection()
	case Examine:
		in.emit(Effect{Ask: &ev.Ask})
	case Over:
		in.over(ev.Epoch)
	}
	in.advance()
	return in.out
}

// Next is when the Incident next wants a Tick; zero: not before another event.
func (in *Incident) Next() time.Time {
	var next time.Time
	consider := func(at time.Time) {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	switch in.state {
	case StateSuspected:
		consider(in.asker.room.next(in.now))
	case StateAsking, StateConfirming:
		consider(in.asker.until)
	case StateWaiting:
		consider(in.next.at)
	}
	if in.suspicions.count > 0 {
		consider(in.suspicions.sweepAt)
	}
	consider(in.asker.collect.until)
	consider(in.dropAt)
	return next
}

// Epoch is the newest that has begun; false: it is over, or none has.
func (in *Incident) Epoch() (job.EpochID, bool) { return in.world.Epoch, in.live }

func (in *Incident) begin(w World) {
	if in.live && in.world.Epoch == w.Epoch {
		return
	}
	in.over(in.world.Epoch)
	in.world, in.live = w, true
	in.progress.begin(in.now)
	in.suspicions.begin(len(w.Nodes))
}

// over keeps the file, for a caller that has yet to write the report.
func (in *Incident) over(e job.EpochID) {
	if !in.live || e != in.world.Epoch {
		return
	}
	in.live, in.told.lapsed = false, 0
	in.suspicions.begin(0)
	in.rest()
	in.endCollection()
}

// rest is idle. The file is kept for some time.
func (in *Incident) rest() {
	in.state, in.asker.ask, in.next.pause = StateIdle, Ask{}, 0
	if in.file != nil {
		in.dropAt = in.now.Add(keepTime)
	}
}

func (in *Incident) heard(ev Heard) {
	if !in.live || !in.suspicions.has(ev.GroupRank) || ev.Report.Epoch != in.world.Epoch {
		return
	}
	r := &ev.Report
	in.suspicions.replace(in.now, ev.GroupRank, r.Suspicions)
	if len(r.Suspicions) == 0 {
		in.emit(in.told.speaks(ev.GroupRank, in.world.Nodes[ev.GroupRank].Name)...)
	}
	in.patience.paused(r.Paused)
	if s := r.Summary; s != nil {
		in.suspicions.nodes[ev.GroupRank].slow = s.Slow
		in.progress.made(s.Steps)
		if s.Steps > 0 {
			in.pace = &Pace{in.world.Epoch, s.Steps, s.StepTime, in.now.Add(-s.Age)}
		}
	}
	if in.suspicions.count > 0 && in.state == StateIdle {
		in.open(ev.GroupRank)
	}
	if in.Wants(ev.GroupRank, r.Ask) {
		in.answer(ev.GroupRank, r)
		if in.state == StateWaiting && r.Ask == in.asker.ask.Seq {
			in.reconsider()
		}
	}
}

// answer takes the answer of a node. Late answers count, too.
func (in *Incident) answer(groupRank int, r *Report) {
	ask := in.asker.ask
	in.progress.made(in.file.take(groupRank, r, r.Ask == ask.Seq && ask.What == AskEvidence))
	if r.Ask == ask.Seq {
		in.file.answers(groupRank)
	}
	if r.Ask == in.asker.collect.ask.Seq && in.file.collects(groupRank) && in.asker.collect.complete() {
		in.endCollection()
	}
}

// reconsider judges again if a verdict was made without nodes because their evidence was late. On an overloaded
// machine the next evidence may be late as well.
func (in *Incident) reconsider() {
	f := in.file
	if f.missing > 0 || decisive(f.verdict.Kind) {
		return
	}
	if v := in.opinion(); decisive(v.Kind) {
		f.find(in.now, v)
		in.plan()
	}
}

// open begins an incident.
func (in *Incident) open(groupRank int) {
	if !in.opens.take(in.now) {
		return // a repeated suspicion is no news; it is repeated if it holds
	}
	if in.asker.collect.until.IsZero() {
		in.newFile()
	} // else the evidence is being collected, too
	m := &in.suspicions.nodes[groupRank]
	oldest, limit := m.oldest()
	in.file.open(in.now, m.since, max(in.patience.soon(confirmWait), min(limit/2, longestWait)))
	in.state, in.next.pause, in.dropAt = StateSuspected, firstWait, time.Time{}
	name := in.world.Nodes[groupRank].Name
	in.emit(noteOf(job.EventHangSuspected, name, fmt.Sprintf("rank %d (node %d %s) has made no progress for %s: %s",
		oldest.Rank, groupRank, name, seconds(oldest.Age), oldest.Why)))
}

// expire ends everything that is past its deadline.
func (in *Incident) expire() {
	if in.suspicions.sweep(in.now) && in.suspicions.count == 0 && in.state != StateIdle {
		in.lapse()
	}
	if reached(in.asker.collect.until, in.now) {
		in.endCollection()
	}
	if reached(in.dropAt, in.now) {
		in.file, in.dropAt = nil, time.Time{}
	}
}

// advance continues while something is due.
func (in *Incident) advance() {
	for before := State(""); in.state != before; {
		before = in.state
		in.goOn()
	}
}

func (in *Incident) goOn() {
	if in.state == StateIdle {
		return
	}
	if in.suspicions.count == 0 {
		in.withdraw("nothing is suspected any more") // the state is idle now
	}
	switch in.state {
	case StateSuspected:
		in.demand(AskEvidence, StateAsking, askTime)
	case StateAsking:
		if in.answered() {
			in.file.find(in.now, in.opinion())
			in.plan()
		}
	case StateWaiting:
		if reached(in.next.at, in.now) {
			in.look()
		}
	case StateConfirming:
		if in.answered() {
			in.confirm()
		}
	}
}

// answered reports whether all nodes have answered, or are late.
func (in *Incident) answered() bool { return in.file.missing == 0 || reached(in.asker.until, in.now) }

// demand asks all nodes for something, unless much was asked lately; then it is tried again. A verdict waits for that
// as it is: if new evidence came first, there would be no room for its confirmation again.
func (in *Incident) demand(what askKind, state State, time time.Duration) {
	if !in.asker.room.take(in.now) {
		if in.state == StateWaiting {
			in.next.at = in.asker.room.next(in.now)
		}
		return
	}
	in.state, in.asker.until = state, in.now.Add(time)
	in.asker.ask = in.ask(what)
	in.file.expect()
}

// ask asks all nodes for something.
func (in *Incident) ask(what askKind) Ask {
	a := Ask{What: what, Incident: in.file.id}
	in.emit(Effect{Ask: &a})
	return a
}

// emit adds effects; an Ask gets its number.
func (in *Incident) emit(es ...Effect) {
	for _, e := range es {
		if e.Ask != nil {
			e.Ask.Seq, e.Ask.Judge, e.Ask.Epoch = in.asker.number(), in.cfg.Seq, in.world.Epoch
		}
		in.out = append(in.out, e)
	}
}

// opinion is the present result of the evidence.
func (in *Incident) opinion() Verdict {
	f, v := in.file, Verdict{}
	f.look(in.now, func(all iter.Seq[Evidence]) { v = in.cfg.Judge(f.world, all, f.waits()) })
	return v.aged(max(in.now.Sub(f.since), 0))
}

// plan decides when the verdict is looked at again.
func (in *Incident) plan() {
	in.state = StateWaiting
	due := time.Time{}
	if decisive(in.file.verdict.Kind) {
		due = in.dueAt()
	}
	in.next.plan(in.now, due)
}

// dueAt is when the verdict may be reported. If it was, it is when it may be acted upon.
func (in *Incident) dueAt() time.Time {
	return in.patience.dueAt(in.file, in.told.newest(), in.lastProgress())
}

// lastProgress is that of the node that made some last, of those that suspect something.
func (in *Incident) lastProgress() time.Time { return in.suspicions.lastProgress(in.file.since) }

// look confirms the verdict if it is due and still fresh; otherwise it asks again.
func (in *Incident) look() {
	fresh := in.now.Sub(in.file.judgedAt) < freshTime
	if decisive(in.file.verdict.Kind) && reached(in.next.due, in.now) && fresh {
		in.file.markProgress()
		in.demand(AskPages, StateConfirming, pagesTime)
		return
	}
	in.demand(AskEvidence, StateAsking, askTime)
}

// confirm compares the second look with the first.
func (in *Incident) confirm() {
	f, before := in.file, in.file.verdict
	if r, moved := f.moved(before); moved {
		in.withdraw(fmt.Sprintf("rank %d makes progress", r))
		return
	}
	f.find(in.now, in.opinion())
	if !sameSuspects(before, f.verdict) || !decisive(f.verdict.Kind) {
		in.plan()
		in.next.at = in.now.Add(pagesTime)
		return
	}
	if reached(in.dueAt(), in.now) {
		f.doubtSilent()
		in.decide()
		return
	}
	in.plan() // it is something else now, which may take longer
}

// newFile begins a file for the present world in place of the old one.
func (in *Incident) newFile() {
	in.file = &file{id: in.asker.number(), world: in.world, began: in.now, since: in.now,
		nodes: make([]nodeReport, len(in.world.Nodes))}
}

// beginCollection asks for stacks, unless these are being asked for, or were a moment ago.
func (in *Incident) beginCollection() {
	if _, recent := in.Collection(); recent || !in.live || !in.asker.room.take(in.now) {
		return
	}
	if in.state == StateIdle {
		in.newFile()
	}
	in.file.expectStacks()
	in.asker.collect = collection{
		ask: in.ask(AskStacks), at: in.now, until: in.now.Add(collectTime), missing: in.world.Working(),
	}
	in.dropAt = time.Time{}
}

func (in *Incident) endCollection() {
	if f := in.file; f != nil && !in.asker.collect.until.IsZero() && in.state == StateIdle {
		f.look(in.now, func(all iter.Seq[Evidence]) { all(func(Evidence) bool { return true }) })
	}
	in.asker.collect.until = time.Time{}
	if in.state == StateIdle && in.file != nil {
		in.dropAt = in.now.Add(keepTime)
	}
}

// Wants reports whether the evidence of a node that answers an Ask is of use. Each Ask is answered once; late
// evidence is better than none.
func (in *Incident) Wants(groupRank int, ask uint64) bool {
	f := in.file
	return in.live && f != nil && f.world.Epoch == in.world.Epoch && f.has(groupRank) &&
		in.asker.wants(ask, f.id, &f.nodes[groupRank])
}

// Collection is the Ask.Seq of the newest collection of stacks; false: it was too long ago, and another one cannot
// begin now.
func (in *Incident) Collection() (seq uint64, recent bool) {
	k := &in.asker.collect
	return k.ask.Seq, k.ask.Seq != 0 && (!k.until.IsZero() || in.now.Sub(k.at) < pagesTime)
}

// Idle reports whether workers run, nothing is suspected, and no node is asked for anything.
func (in *Incident) Idle() bool {
	return in.live && in.state == StateIdle && in.asker.collect.until.IsZero()
}

// Held is about how many bytes of evidence are kept, without stacks and groups, which many workers share.
func (in *Incident) Held() int {
	if in.file == nil {
		return 0
	}
	return in.file.size
}

// File is the number of the incident with evidence; 0: there is none.
func (in *Incident) File() uint64 {
	if in.file == nil {
		return 0
	}
	return in.file.id
}

// Pending is the Ask for a node that reports and may have missed the notice; Seq is 0 for nothing.
func (in *Incident) Pending(groupRank int) Ask {
	if !in.live || in.file == nil || !in.file.has(groupRank) {
		return Ask{}
	}
	asking := in.state == StateAsking || in.state == StateConfirming
	return in.asker.pending(asking, &in.file.nodes[groupRank])
}
