package hang

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// Incident is the state machine of the hangs of one run. It is not safe for concurrent use.
//
// One incident follows another as nodes suspect something: idle, asking for evidence, waiting for as long as it may
// take, confirming, decided, idle. It decides by its events, their times and Config.Judge alone.
type Incident struct {
	cfg   IncidentConfig
	now   time.Time
	out   []Effect
	seq   uint64 // of the newest Ask
	asks  bucket // of Asks that cost the nodes something
	opens bucket // of incidents

	world      World // of the newest epoch
	live       bool  // its workers run
	beganAt    time.Time
	steps      uint64      // the most that a worker of this epoch is known to have made
	crew       []nodeState // by group rank
	suspecting int         // nodes that suspect something

	state   State
	file    *file // of the newest incident or collection, nil for none
	ask     Ask   // that answers are awaited for
	until   time.Time
	due     time.Time     // when the verdict may be confirmed
	lookAt  time.Time     // when the evidence is asked for again, in StateWaiting
	pause   time.Duration // before the next look
	sweepAt time.Time
	dropAt  time.Time // when the file is forgotten
	collect collection

	told   []Told
	lapsed uint64 // the incident that was reported, and then lapsed; 0: none
	trials progress
	// longest is for how long the run has made no progress and then has resumed by itself.
	longest time.Duration
}

// nodeState is one node of the present world.
type nodeState struct {
	suspicions []Suspicion
	heard      time.Time // time of the newest repetition
	since      time.Time // its last progress
	slow       string
}

// collection is a user's request for stacks.
type collection struct {
	ask     Ask
	at      time.Time
	until   time.Time // zero: it has ended
	missing int
}

// NewIncident returns an Incident without nodes.
func NewIncident(cfg IncidentConfig) *Incident {
	return &Incident{cfg: cfg, seq: cfg.Seq, state: StateIdle, asks: bucket{left: maxAsks}, opens: bucket{left: maxAsks}}
}

// Step takes one event and returns the actions, in order.
func (c *Incident) Step(now time.Time, ev IncidentEvent) []Effect {
	if now.Before(c.now) {
		now = c.now // time never goes back
	}
	c.now, c.out = now, nil
	c.expire()
	switch ev := ev.(type) {
	case Begin:
		c.begin(ev.World)
	case Heard:
		c.heard(ev)
	case Collect:
		c.beginCollection()
	case Over:
		c.over(ev.Epoch)
	}
	c.advance()
	return c.out
}

// Next is when the Incident next wants a Tick; zero: not before another event.
func (c *Incident) Next() time.Time {
	var next time.Time
	consider := func(at time.Time) {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	switch c.state {
	case StateSuspected:
		consider(c.asks.next(c.now))
	case StateAsking, StateConfirming:
		consider(c.until)
	case StateWaiting:
		consider(c.lookAt)
	}
	if c.suspecting > 0 {
		consider(c.sweepAt)
	}
	consider(c.collect.until)
	consider(c.dropAt)
	return next
}

// Epoch is the newest that has begun; false: it is over, or none has.
func (c *Incident) Epoch() (job.EpochID, bool) { return c.world.Epoch, c.live }

func (c *Incident) begin(w World) {
	if c.live && c.world.Epoch == w.Epoch {
		return
	}
	c.over(c.world.Epoch)
	c.world, c.live, c.beganAt, c.steps = w, true, c.now, 0
	c.crew, c.suspecting = make([]nodeState, len(w.Nodes)), 0
}

// over keeps the file, for a caller that has yet to write the report.
func (c *Incident) over(e job.EpochID) {
	if !c.live || e != c.world.Epoch {
		return
	}
	c.live, c.crew, c.suspecting, c.lapsed = false, nil, 0, 0
	c.rest()
	c.endCollection()
}

// rest is idle. The file is kept for some time.
func (c *Incident) rest() {
	c.state, c.ask, c.pause = StateIdle, Ask{}, 0
	if c.file != nil {
		c.dropAt = c.now.Add(keepTime)
	}
}

func (c *Incident) heard(ev Heard) {
	if !c.live || ev.GroupRank < 0 || ev.GroupRank >= len(c.crew) || ev.Report.Epoch != c.world.Epoch {
		return
	}
	m, r := &c.crew[ev.GroupRank], &ev.Report
	c.suspect(m, r.Suspicions)
	if len(r.Suspicions) == 0 {
		c.speaks(ev.GroupRank)
	}
	c.longest = max(c.longest, min(r.Paused, longestPause))
	if s := r.Summary; s != nil {
		m.slow = s.Slow
		c.steps = max(c.steps, s.Steps)
	}
	if c.suspecting > 0 && c.state == StateIdle {
		c.open(ev.GroupRank)
	}
	if c.Wants(ev.GroupRank, r.Ask) {
		c.answer(ev.GroupRank, r)
		if c.state == StateWaiting && r.Ask == c.ask.Seq {
			c.reconsider()
		}
	}
}

// reconsider judges again if a verdict was made without nodes because their evidence was late. On an overloaded
// machine the next evidence may be late as well.
func (c *Incident) reconsider() {
	f := c.file
	if f.missing > 0 || decisive(f.verdict.Kind) {
		return
	}
	if v := c.opinion(); decisive(v.Kind) {
		f.find(c.now, v)
		c.plan()
	}
}

// suspect replaces the earlier suspicions of a node.
func (c *Incident) suspect(m *nodeState, ss []Suspicion) {
	if len(m.suspicions) > 0 {
		c.suspecting--
	}
	ss = m.dated(c.now, ss)
	m.suspicions, m.heard = ss, c.now
	if len(ss) == 0 {
		return
	}
	if c.suspecting == 0 {
		c.sweepAt = c.now.Add(sweepEvery)
	}
	c.suspecting++
	m.since = c.now
	for _, s := range ss {
		if at := c.now.Add(-s.age()); at.Before(m.since) {
			m.since = at
		}
	}
}

// dated converts the ages of a report to the present time. A report is older than now by its delivery time and the
// look before it. Without progress since the previous report, the age counts from that report. Otherwise each answer
// would delay the deadline by its own delay.
func (m *nodeState) dated(now time.Time, ss []Suspicion) []Suspicion {
	ss = slices.Clone(ss)
	for i := range ss {
		for _, old := range m.suspicions {
			since, at := m.heard.Add(-old.Age), now.Add(-ss[i].Age)
			if old.Rank == ss[i].Rank && at.After(since) && !at.After(m.heard) {
				ss[i].Age = now.Sub(since)
			}
		}
	}
	return ss
}

// sweep forgets suspicions that were not repeated. That is no progress: a launcher without a connection reports
// nothing.
func (c *Incident) sweep() {
	for i := range c.crew {
		if m := &c.crew[i]; len(m.suspicions) > 0 && c.now.Sub(m.heard) >= staleTime {
			c.suspect(m, nil)
		}
	}
	c.sweepAt = c.now.Add(sweepEvery)
	if c.suspecting == 0 && c.state != StateIdle {
		c.lapse()
	}
}

// open begins an incident.
func (c *Incident) open(groupRank int) {
	if !c.opens.take(c.now) {
		return // a repeated suspicion is no news; it is repeated if it holds
	}
	m := &c.crew[groupRank]
	if c.collect.until.IsZero() {
		c.newFile()
	} // else the evidence is being collected, too
	c.file.began, c.file.since, c.file.wait, c.dropAt = c.now, m.since, c.soon(confirmWait), time.Time{}
	c.state, c.pause = StateSuspected, firstWait
	oldest := m.suspicions[0]
	for _, s := range m.suspicions {
		c.file.wait = max(c.file.wait, min(s.Limit/2, longestWait)) // a limit is four times the 99th percentile or more
		if s.Age > oldest.Age {
			oldest = s
		}
	}
	name := c.world.Nodes[groupRank].Name
	c.note(job.EventHangSuspected, name,
		"rank %d (node %d %s) has made no progress for %s: %s", oldest.Rank, groupRank, name,
		seconds(oldest.Age), oldest.Why)
}

// expire ends everything that is past its deadline.
func (c *Incident) expire() {
	if c.suspecting > 0 && reached(c.sweepAt, c.now) {
		c.sweep()
	}
	if reached(c.collect.until, c.now) {
		c.endCollection()
	}
	if reached(c.dropAt, c.now) {
		c.file, c.dropAt = nil, time.Time{}
	}
}

// advance continues while something is due.
func (c *Incident) advance() {
	for before := State(""); c.state != before; {
		before = c.state
		c.goOn()
	}
}

func (c *Incident) goOn() {
	if c.state == StateIdle {
		return
	}
	if c.suspecting == 0 {
		c.withdraw("nothing is suspected any more")
		return
	}
	switch c.state {
	case StateSuspected:
		c.demand(AskEvidence, StateAsking, askTime)
	case StateAsking:
		if c.answered() {
			c.judge()
		}
	case StateWaiting:
		if reached(c.lookAt, c.now) {
			c.look()
		}
	case StateConfirming:
		if c.answered() {
			c.confirm()
		}
	}
}

// answered reports whether all nodes have answered, or are late.
func (c *Incident) answered() bool { return c.file.missing == 0 || reached(c.until, c.now) }

// demand asks all nodes for something, unless much was asked lately; then it is tried again. A verdict waits for that
// as it is: if new evidence came first, there would be no room for its confirmation again.
func (c *Incident) demand(what askKind, state State, time time.Duration) {
	if !c.asks.take(c.now) {
		if c.state == StateWaiting {
			c.lookAt = c.asks.next(c.now)
		}
		return
	}
	c.state, c.until = state, c.now.Add(time)
	c.ask = c.say(Ask{What: what, Incident: c.file.id})
	c.file.expect()
}

// say sends an Ask to all nodes.
func (c *Incident) say(a Ask) Ask {
	c.seq++
	a.Seq, a.Epoch = c.seq, c.world.Epoch
	c.out = append(c.out, Effect{Ask: &a})
	return a
}

// judge makes a verdict of evidence that has just arrived.
func (c *Incident) judge() {
	c.file.find(c.now, c.opinion())
	c.plan()
}

// opinion is the present result of the evidence.
func (c *Incident) opinion() Verdict {
	f := c.file
	return c.cfg.Judge(f.world, f.all(), f.waits()).Aged(max(c.now.Sub(f.since), 0))
}

// plan decides when the verdict is looked at again: when it may be reported or acted upon, or when the situation may
// have changed.
func (c *Incident) plan() {
	c.state, c.lookAt, c.due = StateWaiting, c.now.Add(c.pause), time.Time{}
	if decisive(c.file.verdict.Kind) {
		c.due = c.dueAt()
		ready := c.due
		if ready.Sub(c.now) > freshTime {
			ready = ready.Add(-lookAhead)
		}
		if ready.Before(c.lookAt) {
			c.lookAt = ready
			return
		}
	}
	c.pause = min(2*c.pause, longestWait)
}

// dueAt is when the verdict may be reported. If these suspects, or enough others, were reported, it is when it may be
// acted upon.
func (c *Incident) dueAt() time.Time {
	f := c.file
	if f.told > 0 {
		if told := &c.told[len(c.told)-1].Verdict; sameSuspects(*told, f.verdict) {
			return later(c.actAt(&f.verdict), c.actAt(told)) // their earlier symptoms may recur
		}
	}
	if f.told >= maxRetold {
		return c.actAt(&f.verdict)
	}
	tell := c.lastProgress().Add(f.verdict.tell())
	if steady := c.steadyAt(); steady.Before(tell) {
		tell = steady
	}
	return later(f.began.Add(f.wait), tell)
}

// steadyAt is when an unchanged finding is reported, even if it may last longer: the run has never progressed after
// so long a pause. A phase with a name has its own time.
func (c *Incident) steadyAt() time.Time {
	if c.file.verdict.Phase.lasting() {
		return c.lastProgress().Add(c.file.verdict.Deadline)
	}
	steady := max(steadyTime, c.longest)
	if after := c.cfg.Spec.After; after > 0 && after < steadyTime {
		steady = after
	}
	return later(c.lastProgress().Add(steady), c.file.foundAt.Add(c.soon(firstWait)))
}

// soon is a pause before a report, or less where the user wants reports within less than steadyTime.
func (c *Incident) soon(pause time.Duration) time.Duration {
	if after := c.cfg.Spec.After; after > 0 {
		return min(pause, after/4)
	}
	return pause
}

// tell is when v may be reported, counted from the last progress.
func (v *Verdict) tell() time.Duration {
	if v.Tell == 0 {
		return v.Deadline
	}
	return min(v.Tell, v.Deadline)
}

// decisive verdicts are reported, and acted upon.
func decisive(k Kind) bool { return k != KindNone && k != KindSlow }

// lastProgress is that of the node that made some last, of those that suspect something.
func (c *Incident) lastProgress() time.Time {
	last := c.file.since
	for i := range c.crew {
		if m := &c.crew[i]; len(m.suspicions) > 0 {
			last = later(last, m.since)
		}
	}
	return last
}

// look confirms the verdict if it is due and still fresh; otherwise it asks again.
func (c *Incident) look() {
	fresh := c.now.Sub(c.file.judgedAt) < freshTime
	if decisive(c.file.verdict.Kind) && reached(c.due, c.now) && fresh {
		c.file.markProgress()
		c.demand(AskPages, StateConfirming, pagesTime)
		return
	}
	c.demand(AskEvidence, StateAsking, askTime)
}

// confirm compares the second look with the first.
func (c *Incident) confirm() {
	f, before := c.file, c.file.verdict
	if r, moved := f.moved(before); moved {
		c.withdraw(fmt.Sprintf("rank %d makes progress", r))
		return
	}
	f.find(c.now, c.opinion())
	if !sameSuspects(before, f.verdict) || !decisive(f.verdict.Kind) {
		c.plan()
		c.lookAt = c.now.Add(pagesTime)
		return
	}
	if reached(c.dueAt(), c.now) {
		c.doubtSilent()
		c.decide()
		return
	}
	c.plan() // it is something else now, which may take longer
}

// doubtSilent lowers the confidence when a suspect's node has not confirmed that nothing has changed.
func (c *Incident) doubtSilent() {
	v := &c.file.verdict
	for _, s := range v.Suspects {
		if v.Confidence == High && !c.file.heardOf(s.GroupRank) {
			v.Confidence, v.Doubt = Low, fmt.Sprintf("node %d %s did not answer when it was asked again", s.GroupRank, s.Node)
			*v = v.Aged(v.Age) // updates its line
		}
	}
}

// decide reports the verdict at once, and again when it counts as a hang. That takes another look with the same
// result. Then it is acted upon.
func (c *Incident) decide() {
	f := c.file
	c.state = StateDecided
	if v := &f.verdict; c.now.Before(c.lastProgress().Add(min(v.tell(), cmp.Or(c.cfg.Spec.After, v.tell())))) {
		v.doubt("it may take its time")
		*v = v.Aged(v.Age)
	}
	decided := reached(c.actAt(&f.verdict), c.now)
	again := f.told > 0 && sameVerdict(c.told[len(c.told)-1].Verdict, f.verdict)
	if decided || !again && f.told < maxRetold {
		c.tell(decided, again)
	}
	switch {
	case !decided:
		c.plan()
	case c.cfg.Spec.Action != ActReport:
		c.act()
	}
}

// actAt is when v may be acted upon.
func (c *Incident) actAt(v *Verdict) time.Time { return c.lastProgress().Add(c.patience(v)) }

// patience is for how long there must have been no progress before a verdict counts. A rank that does nothing may still
// go on; that is the likelier the longer this run has paused before.
func (c *Incident) patience(v *Verdict) time.Duration {
	if v.Certain {
		return v.Deadline
	}
	wait := max(v.Deadline, cmp.Or(c.cfg.Spec.After, actLate), 3*c.longest)
	if v.Confidence == Low {
		wait = max(wait, lowWait)
	}
	return wait
}

// tell sends the verdict to nodes and people. decided: the action follows now.
func (c *Incident) tell(decided, again bool) {
	f, v := c.file, c.file.verdict
	f.told++
	a := Ask{What: TellVerdict, Incident: f.id, Line: text.Head(v.Line, maxLine), Kind: v.Kind, Confidence: v.Confidence,
		Age: v.Age, Action: ActReport, Decided: decided, Again: again, Waiting: clipRanks(v.Waiting, maxLine/2)}
	if decided {
		a.Action, _ = c.action()
	}
	for _, s := range v.Suspects[:min(len(v.Suspects), maxListed)] {
		a.Suspects = append(a.Suspects, s.Rank)
	}
	c.say(a)
	node := ""
	if len(v.Suspects) > 0 {
		node = v.Suspects[0].Node
	}
	if again {
		c.told[len(c.told)-1].Verdict = v
	} else {
		c.note(job.EventHangVerdict, node, "%s", v.Line)
		c.told = append(c.told, Told{Incident: f.id, Epoch: f.world.Epoch, At: c.now, Verdict: v, Action: a.Action})
		c.told = slices.Delete(c.told, 0, max(len(c.told)-maxTold, 0))
	}
	if !decided {
		return
	}
	c.told[len(c.told)-1].Decided = true
	c.note(job.EventHangDecided, node, "%s", v.Line)
	if v.Kind == KindComm {
		c.out = append(c.out, Effect{Doubt: v.Line})
	}
}

// act gives the order. It is the last that an incident does.
func (c *Incident) act() {
	action, why := c.action()
	c.told[len(c.told)-1].Action = action
	text := c.file.verdict.Line
	if action == ActRestart {
		c.trials.restarted(c.achieved())
	}
	if why != "" {
		text = why + ": " + text
	}
	c.out = append(c.out, Effect{Order: &Order{Action: action, Epoch: c.file.world.Epoch, Text: text}})
}

// action returns the action for the verdict, and the reason if it is not the action of the Spec.
func (c *Incident) action() (a Action, why string) {
	a = c.cfg.Spec.Action
	if a == ActRestart && c.trials.fruitless(c.achieved()) >= maxFruitless {
		return ActStop, fmt.Sprintf("%d restarts for hangs have brought no newer step", maxFruitless)
	}
	return a, ""
}

// lapse ends an incident that gets no reports any more. Its earlier reports to people stand.
func (c *Incident) lapse() {
	if c.file.told > 0 {
		c.lapsed = c.file.id
		c.rest()
		return
	}
	c.withdraw("no node repeats what it has suspected")
}

// speaks withdraws a lapsed incident: a node of a suspect reports again, and suspects nothing.
func (c *Incident) speaks(groupRank int) {
	if c.lapsed == 0 {
		return
	}
	i := slices.IndexFunc(c.told, func(t Told) bool { return t.Incident == c.lapsed })
	if i < 0 {
		return
	}
	ss := c.told[i].Verdict.Suspects
	if len(ss) == 0 || slices.ContainsFunc(ss, func(s Suspect) bool { return s.GroupRank == groupRank }) {
		c.retract(c.lapsed, fmt.Sprintf("node %d %s speaks again: its workers make progress", groupRank,
			c.world.Nodes[groupRank].Name))
		c.lapsed = 0
	}
}

// withdraw ends an incident: it was no hang, or is none any more. Nodes that still suspect something report it again.
func (c *Incident) withdraw(why string) {
	c.retract(c.file.id, fmt.Sprintf("after %s: %s", seconds(c.now.Sub(c.file.began)), why))
	for i := range c.crew {
		c.crew[i].suspicions = nil
	}
	c.suspecting = 0
	c.rest()
}

// retract withdraws the reports of an incident.
func (c *Incident) retract(id uint64, line string) {
	for i := range c.told {
		c.told[i].Withdrawn = c.told[i].Withdrawn || c.told[i].Incident == id
	}
	c.say(Ask{What: TellOver, Incident: id, Line: line})
	c.note(job.EventHangWithdrawn, "", "%s", line)
}

func (c *Incident) note(event job.Event, node, format string, args ...any) {
	c.out = append(c.out, Effect{Note: &job.Note{Event: event, Node: node, Text: fmt.Sprintf(format, args...)}})
}

// beginCollection asks for stacks, unless these are being asked for, or were a moment ago.
func (c *Incident) beginCollection() {
	if _, recent := c.Collection(); recent || !c.live || !c.asks.take(c.now) {
		return
	}
	if c.state == StateIdle {
		c.newFile()
	}
	a := c.say(Ask{What: AskStacks, Incident: c.file.id})
	c.collect = collection{ask: a, at: c.now, until: c.now.Add(collectTime), missing: c.world.Working()}
	c.dropAt = time.Time{}
}

func (c *Incident) endCollection() {
	c.collect.until = time.Time{}
	if c.state == StateIdle && c.file != nil {
		c.dropAt = c.now.Add(keepTime)
	}
}

// Wants reports whether the evidence of a node that answers an Ask is of use. Each Ask is answered once; late
// evidence is better than none.
func (c *Incident) Wants(groupRank int, ask uint64) bool {
	f := c.file
	if !c.live || f == nil || f.world.Epoch != c.world.Epoch || groupRank < 0 || groupRank >= len(f.nodes) || ask == 0 {
		return false
	}
	switch d := &f.nodes[groupRank]; {
	case ask == c.ask.Seq:
		return !d.answered
	case ask == c.collect.ask.Seq:
		return !d.collected
	default:
		return f.id < ask && ask <= c.seq && d.evidence.empty()
	}
}

// Collection is the Ask.Seq of the newest collection of stacks; false: it was too long ago, and another one cannot
// begin now.
func (c *Incident) Collection() (seq uint64, recent bool) {
	k := &c.collect
	return k.ask.Seq, k.ask.Seq != 0 && (!k.until.IsZero() || c.now.Sub(k.at) < pagesTime)
}

// Held is about how many bytes of evidence are kept, without stacks and groups, which many workers share.
func (c *Incident) Held() int {
	if c.file == nil {
		return 0
	}
	return c.file.size
}

// File is the number of the incident with evidence; 0: there is none.
func (c *Incident) File() uint64 {
	if c.file == nil {
		return 0
	}
	return c.file.id
}

// Pending is the Ask for a node that reports and may have missed the notice; Seq is 0 for nothing.
func (c *Incident) Pending(groupRank int) Ask {
	if !c.live || c.file == nil || groupRank < 0 || groupRank >= len(c.file.nodes) {
		return Ask{}
	}
	d := &c.file.nodes[groupRank]
	switch {
	case (c.state == StateAsking || c.state == StateConfirming) && !d.answered:
		return c.ask
	case !c.collect.until.IsZero() && !d.collected:
		return c.collect.ask
	}
	return Ask{}
}
