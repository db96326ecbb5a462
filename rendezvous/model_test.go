package rendezvous

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/history"
)

// model is a run with all that takes part in it: launchers that obey as dlrover-run does, daemons that come and go,
// what they keep, and a network. It executes commands, one a line:
//
//	run OPTION...           begins it; the options are those of options, such as min=1 max=3 gate
//	start ID [OPTION...]    a launcher starts and joins: name=N rank=R slots=S old (of a version that can nothing)
//	hear ID, settle         a launcher, or all until nothing changes, get their directive and obey
//	fail ID DECISION        a worker fails, and succeed ID, step ID: all succeed, or make the first step
//	report ID N             they have made N steps in N s; their saves and loads are some
//	check ID RESULT         its check ends: pass, alone, mute, broken, undecided, or a duration for which it has passed
//	doubt ID                something has happened to the node since
//	leaving ID, leave ID    it will leave, it leaves
//	kill ID, cut ID         it dies, or its connection breaks; mute ID and wake ID: its host is silent, and speaks again
//	delay ID, arrive ID     its next request stays on the way until it arrives; it is sent again meanwhile
//	repeat ID               its newest request arrives once more
//	order KIND [NAME]       an order that is carried out, or refused; charged: a restart that counts
//	daemon HOW [SKEW]       another one: after an ended one has kept all, after a killed one without the newest
//	                        100 ms, or empty of all memory; beside one that was deposed and does not know; its
//	                        clock may be askew
//	pass D, jump D          time passes; the daemon sleeps meanwhile
type model struct {
	t     rapid.TB
	p     Params
	now   time.Time
	lead  *daemon
	old   *daemon // deposed, and not aware of it for 100 ms
	store []byte  // what is kept of the run; nil: nothing
	terms uint64
	ahead time.Duration // the most that the clock of a daemon has been
	procs map[string]*process
	rules *history.Rules
	lines []string
}

// daemon is one life of dlrover-master.
type daemon struct {
	*sim
	skew time.Duration
}

// process is one life of a launcher. Its memory is that of api.Session and launcher.Agent.
type process struct {
	Node
	started time.Time
	home    *daemon // that has its watch; nil: none
	end     string  // how its life has ended
	silent  bool

	params           Params
	seen             job.EpochID
	restarts         int
	spent            *Spent
	paused, excluded *job.Cause
	command          *job.Command
	resume           *Resume
	stopped          job.EpochID
	progress         job.Progress

	dir     Directive
	last    Directive // the newest Run
	works   bool
	leaving bool // it ends its workers, and leaves when it hears

	sent    Event
	delayed bool
	way     []Event
	again   []Event // without an answer
}

func newModel(t rapid.TB) *model {
	return &model{t: t, now: time.Unix(1e6, 0).UTC(), procs: map[string]*process{}}
}

// Do executes a command, and holds the rules.
func (m *model) Do(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	m.lines = append(m.lines, line)
	words := strings.Fields(line)
	if words[0] == "run" {
		m.begin(words[1:])
		return
	}
	before := m.booked()
	m.command(words[0], words[1:])
	m.holdTimes(before, line)
	m.hold()
}

func (m *model) command(verb string, args []string) {
	arg := func(i int) string { return append(args, "", "")[i] }
	switch verb {
	case "start":
		m.start(arg(0), args[1:])
	case "settle":
		m.settle()
	case "order":
		m.order(OrderKind(arg(0)), arg(1))
	case "daemon":
		skew, _ := time.ParseDuration(arg(1))
		m.another(arg(0), skew)
	case "pass", "jump":
		d, err := time.ParseDuration(arg(0))
		require.NoError(m.t, err)
		m.pass(d, verb == "jump")
	default:
		p := m.procs[arg(0)]
		require.NotNil(m.t, p, "%s %s", verb, args)
		if p.end == "" || verb == "arrive" || verb == "repeat" {
			m.tell(p, verb, arg(1))
		}
	}
}

// tell executes a command about one launcher.
func (m *model) tell(p *process, verb, arg string) {
	switch verb {
	case "hear":
		m.hear(p)
	case "fail", "succeed", "step", "report":
		m.workers(p, verb, arg)
	case "check":
		m.checked(p, arg)
	case "doubt":
		m.send(p, Doubt{ID: p.ID, Reason: "a link went down"})
	case "leaving":
		if p.works { // else it leaves at once
			p.works, p.leaving = false, true
			m.send(p, Leaving{ID: p.ID, Reason: "spot notice"})
		}
	case "leave":
		m.leave(p, "it was told to")
	case "kill":
		p.end, p.works = "dead", false
		m.cut(p, false)
	case "cut":
		m.cut(p, false)
	case "mute":
		p.silent = true
		m.cut(p, true)
	case "wake":
		p.silent = false
	case "delay":
		p.delayed = true
	case "arrive":
		for _, ev := range p.way {
			_ = m.at(m.lead, ev)
		}
		p.way = nil
	case "repeat":
		if p.sent != nil && p.home == m.lead {
			_ = m.at(m.lead, p.sent)
		}
	default:
		require.Fail(m.t, "unknown command", verb)
	}
}

// begin starts the run's first daemon.
func (m *model) begin(options []string) {
	data, err := history.Params(options)
	require.NoError(m.t, err)
	require.NoError(m.t, json.Unmarshal(data, &m.p))
	require.NoError(m.t, m.p.WithDefaults().Validate())
	m.rules = history.NewRules(m.p.Min, m.p.Max, m.p.Unit)
	m.another("empty", 0)
}

// another daemon follows the present one.
func (m *model) another(how string, skew time.Duration) {
	if how == "ended" {
		m.keep()
	}
	if how == "empty" {
		m.store = nil
		m.rules.Forgotten()
	}
	if m.store == nil {
		skew = m.ahead // its clock alone gives it a later term
	}
	m.ahead = max(m.ahead, skew)
	m.terms += 1_000_003
	d := &daemon{skew: skew, sim: newSim(m.t, m.p)}
	cfg := Config{Term: m.terms + uint64(m.now.UnixNano()) + uint64(skew), Run: "job"}
	cfg.Suspicious = func(e job.Evidence) string {
		if len(e.Losses) > 1 || len(e.Failures) == 2 {
			return "two at once"
		}
		return ""
	}
	cfg.Suspect = func(machine string) bool { return strings.HasSuffix(machine, "3") }
	if m.store != nil {
		cfg.Kept = new(Kept)
		require.NoError(m.t, json.Unmarshal(m.store, cfg.Kept))
		cfg.Kept = cfg.Kept.Steady(m.now.Add(skew))
	}
	d.r = New(cfg)
	m.ends(m.old)
	if m.old = m.lead; how != "beside" {
		m.ends(m.old)
		m.old = nil
	}
	m.lead = d
}

// ends closes the connections of a daemon.
func (m *model) ends(d *daemon) {
	for _, p := range m.procs {
		if p.way = nil; d != nil && p.home == d {
			p.home = nil
		}
	}
}

// keep writes what the daemon has decided.
func (m *model) keep() {
	var err error
	m.store, err = json.Marshal(m.lead.r.Kept())
	require.NoError(m.t, err)
}

// at has an event reach a daemon.
func (m *model) at(d *daemon, ev Event) error {
	d.now = m.now.Add(d.skew)
	return d.step(ev)
}

func (m *model) pass(d time.Duration, asleep bool) {
	if d >= 100*time.Millisecond { // the deposed one has tried to write
		m.ends(m.old)
		m.old = nil
	}
	if asleep {
		m.now = m.now.Add(d)
		_ = m.at(m.lead, Tick{})
	} else {
		m.lead.now = m.now.Add(m.lead.skew)
		m.lead.pass(d)
		m.now = m.now.Add(d)
	}
	if d >= 100*time.Millisecond {
		m.keep()
	}
}

func (m *model) order(kind OrderKind, name string) {
	o := Order{Kind: kind, Node: name}
	if kind == OrderRestart && name == "charged" {
		o.Node, o.Charge = "", true
	}
	if m.at(m.lead, o) == nil {
		m.keep() // before the answer
	}
}

func (m *model) start(id string, options []string) {
	p := &process{started: m.now, params: m.p.WithDefaults()}
	p.Node = Node{ID: id, Name: id, Rank: -1, Slots: 2, Can: []Ability{CanGate, CanLeave, CanHold, CanCommand}}
	for _, o := range options {
		name, value, _ := strings.Cut(o, "=")
		switch n, _ := strconv.Atoi(value); name {
		case "name":
			p.Name = value
		case "rank":
			p.Rank = n
		case "slots":
			p.Slots = n
		case "old":
			p.Can = nil
		}
	}
	m.procs[id] = p
	m.hear(p)
}

// join is api.Session's.
func (m *model) join(p *process) Join {
	n := p.Node
	n.Uptime = m.now.Sub(p.started)
	return Join{Node: n, Params: p.params, Stopped: p.stopped, Seen: p.seen, Restarts: p.restarts, Resume: p.resume,
		Paused: p.paused, Barred: p.excluded, Spent: p.spent, Command: p.command, Work: "script",
		Progress: p.progress}
}

// send delivers a request, sooner or later.
func (m *model) send(p *process, ev Event) {
	p.sent = ev
	if p.delayed {
		p.delayed = false
		p.way = append(p.way, ev)
		p.again = append(p.again, ev)
		return
	}
	if m.at(cmp.Or(p.home, m.lead), ev) != nil {
		p.again = append(p.again, ev)
	}
}

// hear has the launcher get its present directive, and obey. It reports whether anything happened.
func (m *model) hear(p *process) (news bool) {
	if p.end != "" || p.silent {
		return false
	}
	if p.leaving {
		m.leave(p, "has left")
		return true
	}
	d := p.home
	if d != nil {
		if _, err := d.r.Member(p.ID); err != nil {
			p.home, d = nil, nil
		}
	}
	if d == nil && !m.attach(p) {
		return false
	}
	news = d == nil
	d = p.home
	for _, ev := range p.again {
		_ = m.at(d, ev)
		news = true
	}
	p.again = nil
	n, err := d.r.Member(p.ID)
	if err != nil {
		return news
	}
	ends := n.Directive.Kind == job.Done || n.Directive.Kind == job.Fail
	if n.Directive.Seq == p.dir.Seq || ends && d == m.old { // which cannot keep that, and says nothing
		return news
	}
	m.deliver(p, n.Directive)
	return true
}

// attach opens the watch of a launcher, which introduces itself if it has to.
func (m *model) attach(p *process) bool {
	err := m.at(m.lead, Attach{ID: p.ID})
	if err != nil {
		p.dir.Seq = 0
		p.sent = m.join(p)
		err = m.at(m.lead, p.sent)
		if errors.Is(err, ErrRefused) {
			p.end, p.works = "refused: "+err.Error(), false
		}
		if err == nil {
			err = m.at(m.lead, Attach{ID: p.ID})
		}
	}
	if err == nil {
		p.home = m.lead
	}
	return err == nil
}

// deliver is what api.Session and launcher.Agent do with a directive.
func (m *model) deliver(p *process, d Directive) {
	if d.Params != nil {
		p.params = *d.Params
	}
	require.NoError(m.t, m.rules.Told(history.Told{ID: p.ID, Kind: d.Kind, EpochID: d.EpochID, Place: d.Place,
		Restarts: d.Restarts, Cause: d.Cause, Paused: d.Paused, Barred: d.Barred}))
	p.dir = d
	if d.Round > 0 {
		p.seen, p.restarts, p.spent = d.EpochID, d.Restarts, d.Spent
	}
	p.paused, p.excluded, p.command = d.Paused, d.Barred, d.Command
	if d.Kind == job.Bar {
		p.excluded = d.Cause
	}
	if out := d.Kind != job.Stop && d.Kind != job.Run; out && p.resume != nil && p.resume.EpochID != p.stopped {
		p.resume = nil
	}
	if d.Kind == job.Run && d.EpochID == p.last.EpochID {
		return // confirmed by another daemon
	}
	if p.works = false; d.Leave != nil {
		m.leave(p, "drained")
		return
	}
	m.obey(p, d)
}

// obey is what a launcher without workers does.
func (m *model) obey(p *process, d Directive) {
	switch d.Kind {
	case job.Lead:
		m.send(p, Ready{ID: p.ID, EpochID: d.EpochID, Addr: p.ID, Port: 1})
	case job.Run:
		p.last, p.works, p.progress = d, !d.Hold, job.Progress{}
		p.resume = &Resume{EpochID: d.EpochID, Place: *d.Place, Hold: d.Hold}
	case job.Stop:
		p.stopped = d.EpochID
		m.send(p, m.join(p))
	case job.Done, job.Fail:
		m.rules.Over(p.ID, d.Kind)
		m.keep() // before the answer
		for _, o := range m.procs {
			if o.seen.Round > 0 && o.home == p.home { // else only the clock knows
				m.rules.Over(o.ID, d.Kind)
			}
		}
		m.leave(p, string(d.Kind))
	}
}

func (m *model) leave(p *process, why string) {
	p.works = false
	m.send(p, Leave{ID: p.ID, Reason: why})
	p.end = why
	m.cut(p, false)
}

// cut breaks the connection of a launcher.
func (m *model) cut(p *process, silent bool) {
	if p.home != nil {
		_ = m.at(p.home, Detach{ID: p.ID, Broken: true, Silent: silent})
	}
	p.home = nil
}

// workers reports what the workers of a launcher do, as api.Session keeps it.
func (m *model) workers(p *process, verb, arg string) {
	if !p.works || p.resume == nil {
		return
	}
	r := *p.resume
	p.resume = &r
	switch verb {
	case "fail":
		p.works = false
		d := p.last
		r.Decision = Decision(arg)
		r.Failures = []job.Failure{{Rank: d.Place.RankBase, GroupRank: d.Place.GroupRank, Text: p.ID + " failed", At: m.now}}
		m.send(p, Failing{ID: p.ID, EpochID: r.EpochID, Decision: r.Decision, Failures: r.Failures,
			Progress: p.progress})
	case "succeed":
		p.works, r.Done = false, true
		m.send(p, Success{ID: p.ID, EpochID: r.EpochID})
	case "step":
		r.Stepped = true
		m.send(p, Stepped{ID: p.ID, EpochID: r.EpochID})
	case "report":
		n, _ := strconv.ParseInt(arg, 10, 64)
		d := time.Duration(n) * time.Second
		p.progress = job.Progress{Step: n, Stepping: true, Ran: d, Idle: d / 2, Saving: n%2 == 1, Checkpoint: n, Kept: d / 4,
			Resumed: n%3 > 0, Loaded: n / 2, Blocked: d / 8}
		m.send(p, Stepped{ID: p.ID, EpochID: r.EpochID, Progress: p.progress})
	}
}

// checked ends the check of a launcher.
func (m *model) checked(p *process, result string) {
	if p.dir.Kind != job.Check {
		return
	}
	switch d, err := time.ParseDuration(result); {
	case err == nil:
		m.send(p, Cleared{ID: p.ID, Until: m.now.Add(d)})
	case result == "alone":
		m.send(p, Cleared{ID: p.ID, Until: m.now})
	case result == "broken", result == "undecided":
		m.send(p, Barred{ID: p.ID, Reason: "gpu 3 is gone", Again: result == "undecided"})
	case result == "pass":
		m.send(p, Cleared{ID: p.ID})
	}
}

// settle has all launchers hear and obey until nothing changes.
func (m *model) settle() {
	for n, changed := 0, true; changed; n++ {
		require.Less(m.t, n, 100, "the launchers never rest: %s", m.State())
		changed = false
		for _, id := range sortedKeys(m.procs) {
			changed = m.hear(m.procs[id]) || changed
		}
	}
}

// State describes the run for people.
func (m *model) State() string {
	s := m.lead.r.Status()
	lines := []string{fmt.Sprintf("%s %d/%d, %d restarts", s.Phase, s.Round, s.Epoch, s.Restarts)}
	if s.Outcome != "" {
		lines[0] += ", " + s.Outcome
		if s.Cause != nil {
			lines[0] += ": " + s.Cause.Text
		}
	}
	for _, id := range sortedKeys(m.procs) {
		p := m.procs[id]
		text := string(p.dir.Kind)
		switch {
		case p.end != "":
			text = p.end
		case p.works:
			text = fmt.Sprintf("runs %d/%d as %d of %d", p.last.Round, p.last.Epoch, p.last.Place.GroupRank,
				p.last.Place.GroupWorldSize)
		case p.dir.Cause != nil:
			text += ": " + p.dir.Cause.Text
		}
		lines = append(lines, id+" "+text)
	}
	return strings.Join(lines, "\n")
}

// alive are the IDs of the launchers that live, in order.
func (m *model) alive(f func(p *process) bool) (ids []string) {
	for id, p := range m.procs {
		if p.end == "" && f(p) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}
