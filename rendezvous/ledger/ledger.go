// Package ledger books the time of a run. A Ledger gets the changes of the run's state, and the reports of launchers
// about their workers, with their times. It is pure: it has no clock, no files and no goroutines.
//
// Every moment since the run was opened is in exactly one class. While a world is smaller than the run's largest one,
// the share of the ranks that it lacks counts as Waiting.
//
// Some time is booked before its class is known: as Training at first, and it moves when a report tells that
// no step was made (Standing), that the steps were repeated (Lost), or that workers waited for a save (Saving).
package ledger

import (
	"maps"
	"math/bits"
	"slices"
	"sort"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// Class is a way to spend time.
type Class string

// The classes. Without a class, time does not count: the run is not open, or has ended.
const (
	Training   Class = "training"    // steps that were kept; where no steps are known, workers run
	Waiting    Class = "waiting"     // for nodes, or for the ranks that the largest world had
	Checking   Class = "checking"    // a world could be sealed, and waits for checks of its nodes
	Starting   Class = "starting"    // from the seal to the first step; where no steps are known, to the workers' start
	Stopping   Class = "stopping"    // workers of a broken world are being stopped
	BackingOff Class = "backing-off" // the next start waits because restarts have brought no progress
	Standing   Class = "standing"    // from the last step to the stop
	Lost       Class = "lost"        // steps since the checkpoint that was loaded
	Saving     Class = "saving"      // saves have kept the workers from training
	Paused     Class = "paused"      // by an order, or held: it is outside of every share
)

// Classes are all of them, in the order in which they are shown.
func Classes() []Class {
	return []Class{Training, Waiting, Checking, Starting, Stopping, BackingOff, Standing, Lost, Saving, Paused}
}

// Times are the times of classes. Those of a later version are kept.
type Times map[Class]time.Duration

// Sum is the time of all classes.
func (t Times) Sum() (sum time.Duration) {
	for _, d := range t {
		sum += d
	}
	return sum
}

// add keeps no class without time: a Ledger is written often.
func (t *Times) add(c Class, d time.Duration) {
	if *t == nil {
		*t = Times{}
	}
	if (*t)[c] += d; (*t)[c] == 0 {
		delete(*t, c)
	}
}

// Row is the cost of all stops of one cause at one node.
type Row struct {
	// Cause is Start, Others, or a job.CauseKind. Node may be "".
	Cause string `json:"cause"`
	Node  string `json:"node,omitempty"`
	Count int    `json:"count"`
	Times Times  `json:"times,omitempty"`
}

// Causes besides those of job.
const (
	Start  = "start"  // the run was opened
	Others = "others" // those for which there was no row any more
)

// Bounds of a Ledger.
const (
	maxRows  = 32
	maxMarks = 16
	maxNode  = 128 // bytes
	maxText  = 256 // bytes
)

// Bill is the cost of one stop, from the last step before it to the first one after it.
type Bill struct {
	Cause string `json:"cause"`
	Node  string `json:"node,omitempty"`
	Text  string `json:"text,omitempty"`
	Times Times  `json:"times,omitempty"`
	// Closed: the workers go on, or those of another epoch have failed before.
	Closed bool `json:"closed,omitempty"`
}

// Report is a Ledger for readers.
type Report struct {
	// Since is when the run was opened, later by the time that does not count. All before At is in Times, and Class is
	// that of now. Times add up to the time between both.
	Since time.Time `json:"since"`
	At    time.Time `json:"at"`
	Class Class     `json:"class,omitempty"`
	Times Times     `json:"times"`
	// Rows are the costs of stops, in the order of the first stop of each.
	Rows []Row `json:"rows,omitempty"`
	// Stepping: launchers report steps. Without, Training is all time in which workers ran, unless it was lost.
	Stepping bool `json:"stepping,omitempty"`
	// Slowed is the part of Training and Lost in which ranks have slowed the job, and Missed how many steps fewer it has
	// made because of them.
	Slowed time.Duration `json:"slowed,omitempty"`
	Missed float64       `json:"missed_steps,omitempty"`
}

// Ledger is the account of one run. The zero value is that of one which has not been opened.
type Ledger struct {
	Report
	Bill  Bill `json:"bill,omitzero"` // the newest
	Ranks int  `json:"ranks,omitempty"`
	Full  int  `json:"full,omitempty"` // ranks of the largest world
	// Short is the row of the stop since which ranks are missing, by its cause and node.
	Short Bill   `json:"short,omitzero"`
	Epoch epoch  `json:"epoch,omitzero"`
	Marks []mark `json:"marks,omitempty"`
	// Fewer is how many steps fewer the newest world makes in a second because of ranks that slow it; 0: none do.
	Fewer float64 `json:"fewer,omitempty"`
}

// epoch is the newest world, as far as it is known. Its training is measured by the run's clock of training, which
// stands still in every class but Training, and does not go back for steps that are lost.
type epoch struct {
	ID      job.EpochID   `json:"id,omitzero"`
	Broken  bool          `json:"broken,omitempty"`
	Began   time.Duration `json:"began,omitempty"`  // the clock of training at the seal
	Ran     bool          `json:"ran,omitempty"`    // its first step is booked
	Silent  bool          `json:"silent,omitempty"` // a node has said that its workers have made no step
	Step    int64         `json:"step,omitempty"`
	StepAt  time.Time     `json:"step_at,omitzero"` // the newest step
	BrokeAt time.Time     `json:"broke_at,omitzero"`
	Resumed bool          `json:"resumed,omitempty"`
	Blocked time.Duration `json:"blocked,omitempty"`
}

// mark is when, by the clock of training, the state of a checkpoint was reached.
type mark struct {
	Step int64         `json:"step"`
	At   time.Duration `json:"at"`
}

// clock is that of training.
func (l *Ledger) clock() time.Duration { return l.Times[Training] + l.Times[Lost] }

// trained is the training of the newest world.
func (l *Ledger) trained() time.Duration { return l.clock() - l.Epoch.Began }

// Pass reports the class since now. The first one opens the run.
func (l *Ledger) Pass(now time.Time, c Class) {
	if c == l.Class {
		return // a Ledger changes only with the class, and is kept no more often
	}
	l.book(now)
	if l.Since.IsZero() {
		l.Since, l.At = now, now
		l.begin(Bill{Cause: Start})
	}
	if l.Class == Stopping {
		l.settle()
	}
	if l.Class = c; c == Training || c == "" {
		l.Bill.Closed = true
	}
}

// book books the time until now.
func (l *Ledger) book(now time.Time) {
	d := now.Sub(l.At)
	if l.Since.IsZero() || d <= 0 {
		return
	}
	l.At = now
	switch l.Class {
	case "":
		l.Since = l.Since.Add(d)
	case Training:
		trains := l.share(d)
		l.Times.add(Training, trains)
		l.Times.add(Waiting, d-trains)
		l.slow(trains)
		if l.Short.Cause != "" {
			l.row(l.Short).Times.add(Waiting, d-trains)
		}
	default:
		l.Times.add(l.Class, d)
		l.charge(l.Class, d)
	}
}

// share is the part of d for which the present world stands.
func (l *Ledger) share(d time.Duration) time.Duration {
	if l.Ranks >= l.Full || l.Ranks < 0 || d <= 0 {
		return d
	}
	hi, lo := bits.Mul64(uint64(d), uint64(l.Ranks))
	part, _ := bits.Div64(hi, lo, uint64(l.Full)) // less than d
	return time.Duration(part)
}

// charge books time on the newest bill, unless that is of no stop.
func (l *Ledger) charge(c Class, d time.Duration) {
	if c == Training || c == Saving || c == Paused || l.Bill.Cause == "" {
		return
	}
	l.Bill.Times.add(c, d)
	l.row(l.Bill).Times.add(c, d)
}

// move books time again that was booked as from.
func (l *Ledger) move(from, to Class, d time.Duration) {
	if d = min(d, l.Times[from]); d <= 0 {
		return
	}
	l.Times.add(from, -d)
	l.Times.add(to, d)
	l.charge(from, -d)
	l.charge(to, d)
	if from == Training && to != Lost && l.Fewer > 0 {
		l.unslow(d)
	}
	l.unslow(l.Slowed - l.clock())
}

// slow books time of training as slowed, if ranks slow the job.
func (l *Ledger) slow(d time.Duration) {
	if l.Fewer > 0 {
		l.Slowed += d
		l.Missed += l.Fewer * d.Seconds()
	}
}

// unslow takes d of the slowed time back: nobody has trained.
func (l *Ledger) unslow(d time.Duration) {
	if d = min(d, l.Slowed); d > 0 {
		l.Missed *= float64(l.Slowed-d) / float64(l.Slowed)
		l.Slowed -= d
	}
}

// row is that of a bill, a new one if there is room.
func (l *Ledger) row(b Bill) *Row {
	find := func(cause, node string) int {
		return slices.IndexFunc(l.Rows, func(r Row) bool { return r.Cause == cause && r.Node == node })
	}
	i := find(b.Cause, b.Node)
	if i < 0 && len(l.Rows) >= maxRows {
		b.Cause, b.Node = Others, ""
		i = find(Others, "")
	}
	if i < 0 {
		i = len(l.Rows)
		l.Rows = append(l.Rows, Row{Cause: b.Cause, Node: b.Node})
	}
	return &l.Rows[i]
}

// begin closes the newest bill, and opens another one.
func (l *Ledger) begin(b Bill) {
	b.Node, b.Text = text.Clip(b.Node, maxNode), text.Clip(b.Text, maxText)
	l.Bill = b
	l.row(b).Count++
}

// Broke reports that the workers of the newest world are being stopped, and returns the bill of the stop before.
func (l *Ledger) Broke(now time.Time, c job.Cause) Bill {
	l.book(now)
	before := l.Bill
	l.Epoch.Broken, l.Epoch.BrokeAt = true, now
	l.begin(Bill{Cause: string(c.Kind), Node: c.Node, Text: c.Text})
	return before
}

// Blame gives the newest stop another cause, which explains the first one.
func (l *Ledger) Blame(c job.Cause) {
	old := l.Bill
	node := text.Clip(c.Node, maxNode)
	if old.Cause == string(c.Kind) && old.Node == node {
		return
	}
	from := l.row(old)
	from.Count--
	for class, d := range old.Times {
		from.Times.add(class, -d)
	}
	l.Rows = slices.DeleteFunc(l.Rows, func(r Row) bool { return r.Count == 0 && len(r.Times) == 0 })
	l.begin(Bill{Cause: string(c.Kind), Node: c.Node, Text: c.Text, Times: old.Times})
	for class, d := range old.Times {
		l.row(l.Bill).Times.add(class, d)
	}
}

// Sealed reports a world of so many ranks.
func (l *Ledger) Sealed(now time.Time, id job.EpochID, ranks int) {
	l.book(now)
	l.settle()
	full := max(l.Full, ranks)
	switch {
	case ranks == full:
		l.Short = Bill{}
	case l.Short.Cause == "":
		l.Short = Bill{Cause: l.Bill.Cause, Node: l.Bill.Node}
	}
	l.Ranks, l.Full, l.Fewer = ranks, full, 0
	l.Epoch = epoch{ID: id, Began: l.clock()}
}

// maxFewer bounds the steps of a second.
const maxFewer = 1e6

// Slow reports how many steps fewer the newest world makes in a second because of ranks that slow it; 0: none do.
func (l *Ledger) Slow(now time.Time, fewer float64) {
	l.book(now)
	if l.Fewer = 0; fewer > 0 {
		l.Fewer = min(fewer, maxFewer)
	}
}

// Stepped reports the first step of the newest world, which was so long ago, and is the sign that others will be
// reported, too.
func (l *Ledger) Stepped(now time.Time, ago time.Duration) {
	if l.Stepping = true; l.Epoch.Ran {
		return
	}
	l.book(now)
	l.Epoch.Ran = true
	switch ago = max(ago, 0); {
	case l.Class == Starting:
		l.move(Starting, Training, l.share(min(ago, l.Bill.Times[Starting])))
	default: // nobody knew that it would come
		l.move(Training, Starting, l.trained()-min(l.share(ago), l.trained()))
	}
}

// Heard reports how far the workers of a node of the newest world have come. Nodes may report in any order.
func (l *Ledger) Heard(now time.Time, p job.Progress) {
	l.book(now)
	e := &l.Epoch
	e.Silent = e.Silent || p.Stepping && p.Step <= 0
	e.Step = max(e.Step, p.Step)
	if at := now.Add(-p.Idle); p.Step > 0 && p.Idle > 0 && at.After(e.StepAt) {
		e.StepAt = at
	}
	if p.Blocked > e.Blocked {
		l.blocked(p.Blocked-e.Blocked, p.Checkpoint)
		e.Blocked = p.Blocked
	}
	if p.Resumed && !e.Resumed {
		e.Resumed = true
		l.resume(max(p.Loaded, 0))
	}
	if p.Saving {
		l.saved(now, p.Checkpoint, max(p.Kept, 0))
	}
}

// blocked books the time of saves, the last of which has made the checkpoint of a step. If that is marked already, as
// another node has told of it before, it was reached so much earlier by the clock of training.
func (l *Ledger) blocked(d time.Duration, step int64) {
	d = min(l.share(d), l.trained(), l.Times[Training])
	l.move(Training, Saving, d)
	if n := len(l.Marks); n > 0 && l.Marks[n-1].Step == step {
		least := l.Epoch.Began
		if n > 1 {
			least = max(least, l.Marks[n-2].At)
		}
		m := &l.Marks[n-1]
		m.At = min(m.At, max(m.At-d, least))
	}
}

// saved marks a checkpoint that was taken so long ago.
func (l *Ledger) saved(now time.Time, step int64, ago time.Duration) {
	if n := len(l.Marks); step <= 0 || n > 0 && l.Marks[n-1].Step >= step {
		return
	}
	if at := l.Epoch.BrokeAt; !at.IsZero() {
		ago -= now.Sub(at) // the clock has stood still
	}
	at := max(l.clock()-l.share(max(ago, 0)), l.Epoch.Began)
	if n := len(l.Marks); n > 0 {
		at = max(at, l.Marks[n-1].At)
	}
	l.Marks = append(l.Marks, mark{step, at})
	l.thin()
}

// thin leaves out every second mark when there are too many, but neither the first nor the newest: the run went about
// evenly between the others.
func (l *Ledger) thin() {
	last := len(l.Marks) - 1
	if last < maxMarks {
		return
	}
	kept := l.Marks[:1]
	for i, m := range l.Marks[1:] {
		if (last-i-1)%2 == 0 {
			kept = append(kept, m)
		}
	}
	l.Marks = kept
}

// resume books that the newest world has begun with the checkpoint of a step: the training since then is lost.
func (l *Ledger) resume(step int64) {
	began := l.Epoch.Began
	earlier := l.Times[Training] - l.trained() // none of it is lost yet
	l.move(Training, Lost, min(began-l.reached(step), earlier))
	i := sort.Search(len(l.Marks), func(i int) bool { return l.Marks[i].Step >= step })
	l.Marks = append(l.Marks[:i:i], mark{step, began})
	l.thin()
}

// reached is when, by the clock of training, the run came to a step. Between two checkpoints it went evenly. Of one
// that is newer than all that are known nothing is lost, and of one that is older, all.
func (l *Ledger) reached(step int64) time.Duration {
	i := sort.Search(len(l.Marks), func(i int) bool { return l.Marks[i].Step >= step })
	if i == len(l.Marks) {
		if i == 0 && step == 0 {
			return 0
		}
		return l.Epoch.Began
	}
	m := l.Marks[i]
	if m.Step == step {
		return m.At
	}
	if i == 0 {
		return 0
	}
	before := l.Marks[i-1]
	part := float64(step-before.Step) / float64(m.Step-before.Step)
	return before.At + time.Duration(part*float64(m.At-before.At))
}

// usual is how many usual steps the workers may take for one without standing still, and least how long in any case.
const (
	usual = 3
	least = time.Second
)

// settle books the end of the newest world, once all of its nodes have reported.
func (l *Ledger) settle() {
	e := &l.Epoch
	switch {
	case e.BrokeAt.IsZero():
	case e.Step == 0 && e.Silent && !e.Ran:
		l.move(Training, Starting, l.trained())
	case !e.StepAt.IsZero() && e.Step > 0:
		idle, each := e.BrokeAt.Sub(e.StepAt), l.trained()/time.Duration(e.Step)
		if idle > least && idle > usual*each {
			l.move(Training, Standing, min(l.share(idle), l.trained()))
		}
	}
	e.BrokeAt = time.Time{}
}

// Until is the report at a time.
func (l *Ledger) Until(now time.Time) Report {
	c := l.Clone()
	c.book(now)
	return c.Report
}

// Clone is a copy that shares nothing with l.
func (l *Ledger) Clone() *Ledger {
	c := *l
	c.Times, c.Bill.Times, c.Marks = maps.Clone(l.Times), maps.Clone(l.Bill.Times), slices.Clone(l.Marks)
	c.Rows = slices.Clone(l.Rows)
	for i := range c.Rows {
		c.Rows[i].Times = maps.Clone(c.Rows[i].Times)
	}
	return &c
}

// Moved shifts the times of l, which are of another clock, so that At is no later than now.
func (l *Ledger) Moved(now time.Time) {
	ahead := max(0, l.At.Sub(now))
	for _, at := range []*time.Time{&l.Since, &l.At, &l.Epoch.StepAt, &l.Epoch.BrokeAt} {
		if !at.IsZero() {
			*at = now.Add(at.Sub(now) - ahead)
		}
	}
}
