package simulate

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/history"
)

// model executes the commands of histories, one a line, on the whole control plane. Launchers are real Sessions, which
// obey by themselves: what happens depends on the time that passes. Words are those of rendezvous' own model, and:
//
//	run OPTION...           begins a run, job; once more: another one, other, whose launchers' IDs begin with o.
//	                        keep=D of the first is how long runs are kept that have ended
//	order ..., forget, notice [run=other]   to the other run
//	slow ID D               its requests take so long
//	lose ID                 the next answer to it is lost
//	daemon HOW [away=D]     another one; there is none for so long
//	store HOW               writes fail or are late: see faults of decisions
//	settle                  time passes until nothing is under way
type model struct {
	t     rapid.TB
	plane *plane
	job   *cluster
	other *cluster // nil: there is none
	old   *daemon  // deposed, and not aware of it
	until time.Time
	kept  time.Time // until then the store may lack something that launchers know

	mu    sync.Mutex
	lines []string
}

// history are the commands so far.
func (m *model) history() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return strings.Join(m.lines, "\n")
}

// unaware is how long a deposed daemon serves on.
const unaware = 100 * time.Millisecond

// probe is a run that looks what is left of others.
const probe = "probe"

// Do executes a command, and holds the rules.
func (m *model) Do(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	m.mu.Lock()
	m.lines = append(m.lines, line)
	m.mu.Unlock()
	words := strings.Fields(line)
	c, rest := m.job, words[1:]
	if i := slices.Index(rest, "run=other"); i >= 0 {
		c, rest = m.other, slices.Delete(rest, i, i+1)
	}
	arg := func(i int) string { return append(rest, "", "", "")[i] }
	if words[0] != "run" {
		m.plane.moment()
	}
	switch words[0] {
	case "run":
		m.begin(rest)
	case "start":
		m.start(arg(0), rest[1:])
	case "order":
		m.order(c, arg(0), arg(1))
	case "forget":
		if d := m.plane.running(); d != nil {
			_ = d.hub.Forget(c.run)
		}
	case "notice":
		if d := m.plane.running(); d != nil {
			_ = d.hub.Notify(c.run, "", c.run, "hear")
		}
	case "daemon":
		m.daemon(arg(0), strings.TrimPrefix(arg(1), "away="))
	case "store":
		m.plane.store.breaks(arg(0))
		if m.kept = forever(); arg(0) == fine {
			m.kept = time.Now().Add(6 * time.Second) // more than between two tries
		}
	case "pass":
		m.pass(duration(m.t, arg(0)))
	case "settle":
		m.pass(5 * time.Second)
	default:
		n := m.node(arg(0))
		require.NotNil(m.t, n, line)
		m.tell(n, words[0], arg(1))
	}
	m.hold()
}

func duration(t rapid.TB, text string) time.Duration {
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	return d
}

func (m *model) clusters() []*cluster {
	if m.other == nil {
		return []*cluster{m.job}
	}
	return []*cluster{m.job, m.other}
}

func (m *model) of(id string) *cluster {
	if strings.HasPrefix(id, "o") {
		return m.other
	}
	return m.job
}

func (m *model) node(id string) *node { return m.of(id).byID(id) }

// begin begins a run; the first one starts a daemon.
func (m *model) begin(options []string) {
	keep := time.Duration(0)
	options = slices.DeleteFunc(slices.Clone(options), func(o string) bool {
		text, is := strings.CutPrefix(o, "keep=")
		if is {
			keep = duration(m.t, text)
		}
		return is
	})
	data, err := history.Params(options)
	require.NoError(m.t, err)
	var p rendezvous.Params
	require.NoError(m.t, json.Unmarshal(data, &p))
	if m.job != nil {
		m.other = m.plane.cluster("other", p)
		m.other.played = true
		return
	}
	m.plane = newPlane(m.t, keep)
	m.job = m.plane.cluster("job", p)
	m.job.played = true
	m.plane.boot()
}

func (m *model) start(id string, options []string) {
	c := m.of(id)
	n := c.node(id, id)
	n.stops = time.Duration(10+37*c.made%200) * time.Millisecond
	n.self.Can = append(n.self.Can, rendezvous.CanCommand, rendezvous.CanNotice)
	n.self.Slots = 2
	for _, o := range options {
		name, value, _ := strings.Cut(o, "=")
		switch i, _ := strconv.Atoi(value); name {
		case "name":
			n.self.Name = value
		case "rank":
			n.self.Rank = i
		case "slots":
			n.self.Slots = i
		case "old":
			n.self.Can = nil
		}
	}
	for _, o := range m.live(func(o *node) bool { return o.c == c && o != n }) {
		if o.self.Name == n.self.Name || c.params.Static && o.self.Rank == n.self.Rank {
			c.rules.rivals(n, o)
		}
	}
	go n.live(0)
}

// tell executes a command about one launcher.
func (m *model) tell(n *node, verb, arg string) {
	switch verb {
	case "fail":
		n.tell(func() error { return n.failing(rendezvous.Decision(arg)) })
	case "succeed":
		n.tell(n.succeed)
	case "step":
		n.tell(n.step)
	case "check":
		n.tell(func() error { return n.checked(arg) })
	case "doubt":
		n.tell(func() error { return n.report(rendezvous.Doubt{ID: n.id, Reason: "a link went down"}) })
	case "leaving":
		n.tell(func() error { return n.leave("spot notice") })
	case "leave":
		n.c.rules.excuse(n, forever())
		n.tell(func() error {
			n.halt()
			_, err := n.session.Leave(n.power, "it was told to", nil)
			return errors.Join(errLeft, err)
		})
	case "kill":
		n.c.rules.excuse(n, forever())
		n.kill()
	case "cut":
		n.link.hangUp(false)
	case "mute":
		n.c.rules.excuse(n, forever())
		n.link.blackOut()
	case "wake":
		n.link.mend()
		n.c.rules.excuse(n, time.Now().Add(time.Minute))
	case "lose":
		n.c.rules.excuse(n, time.Now().Add(time.Minute))
		n.link.loseAnswer()
	case "slow":
		n.c.rules.excuse(n, forever())
		n.link.slow(duration(m.t, arg))
	case "delay":
		n.c.rules.excuse(n, time.Now().Add(time.Minute))
		n.link.hold()
	case "arrive", "repeat":
		for _, f := range n.link.arrivals(verb == "repeat") {
			f()
		}
	default:
		require.Fail(m.t, "unknown command", verb)
	}
}

// daemon has another one follow the present one.
func (m *model) daemon(how, away string) {
	m.endOld()
	switch how {
	case "ended":
		m.plane.shutDown()
	case "killed", "empty":
		m.plane.crash()
	}
	if how == "empty" {
		m.plane.forget()
		defer func() { m.kept = later(m.kept, time.Now().Add(time.Minute)) }() // launchers know more until they are back
	}
	if how == "empty" || !m.safe() {
		m.forgets()
	}
	if away != "" {
		time.Sleep(duration(m.t, away))
	}
	m.old, m.until = m.plane.boot(), time.Now().Add(unaware)
}

// forgets: the next daemon may know nothing of what the launchers know. A new launcher may be the first that comes.
func (m *model) forgets() {
	for _, c := range m.clusters() {
		c.paused = false
		c.rules.forgotten()
	}
	for _, n := range m.live(nil) {
		n.c.rules.excuse(n, time.Now().Add(time.Minute))
	}
}

func (m *model) endOld() {
	m.old.end()
	m.old = nil
}

func (m *model) pass(d time.Duration) {
	if left := time.Until(m.until); m.old != nil && left <= d {
		time.Sleep(max(left, 0))
		m.endOld()
		d -= max(left, 0)
	}
	time.Sleep(d)
}

func (m *model) order(c *cluster, kind, arg string) {
	o := rendezvous.Order{Kind: rendezvous.OrderKind(kind), Node: arg}
	switch arg {
	case "charged":
		o.Node, o.Charge = "", true
	case "command":
		o.Node, o.Command = "", &job.Command{Args: []string{c.run}}
	}
	for _, n := range m.live(func(n *node) bool { return n.c == c && n.self.Name == arg && kind == "drain" }) {
		c.rules.excuse(n, forever()) // the others do not wait for its workers
	}
	safe := m.safe()
	if m.old != nil && safe {
		require.Error(m.t, m.old.hub.Order(c.run, o), "a deposed daemon has carried out an order")
	}
	d := m.plane.running()
	if d == nil {
		return
	}
	before, _ := d.hub.Run(c.run)
	if err := d.hub.Order(c.run, o); err != nil {
		c.mark("an order was refused")
		return
	}
	c.mark("an order was carried out")
	switch o.Kind {
	case rendezvous.OrderPause:
		c.paused = safe && m.safe() && before.Paused == nil // else it is held because it has failed, and that ends
	case rendezvous.OrderResume, rendezvous.OrderStop: // others may begin the run anew
		c.paused = false
	}
}

// safe: the store has all that anybody was told.
func (m *model) safe() bool { return time.Now().After(m.kept) }

// hold holds the rules between two commands.
func (m *model) hold() {
	synctest.Wait()
	require.Empty(m.t, m.plane.leaks, "notes of runs that nobody has begun")
	for _, c := range m.clusters() {
		m.known(c)
		c.rules.mu.Lock()
		broken := slices.Clone(c.rules.broken)
		c.rules.mu.Unlock()
		if len(broken) > 0 {
			require.Fail(m.t, broken[0], "in run %s: %v\n%s", c.run, broken, m.State())
		}
	}
}

// known: the daemon knows nodes of the run alone, and a pause that it, or one before it, has confirmed.
func (m *model) known(c *cluster) {
	d := m.plane.running()
	if d == nil {
		return
	}
	for _, id := range d.hub.IDs(c.run) {
		require.NotNil(m.t, c.byID(id), "%s is in run %s", id, c.run)
	}
	s, err := d.hub.Run(c.run)
	if err != nil || s.Outcome != "" {
		c.paused = false
	}
	require.True(m.t, !c.paused || s.Paused != nil, "an order to pause run %s is forgotten\n%s", c.run, m.State())
}

// State describes the runs for people.
func (m *model) State() string {
	var lines []string
	for _, c := range m.clusters() {
		lines = append(lines, c.state())
	}
	return strings.Join(lines, "\n")
}

func (c *cluster) state() string {
	lines := []string{"no daemon"}
	if d := c.running(); d != nil {
		s, err := d.hub.Run(c.run)
		lines[0] = fmt.Sprintf("%s %d/%d, %d restarts", s.Phase, s.Round, s.Epoch, s.Restarts)
		if err != nil {
			lines[0] = "no run"
		}
		if s.Outcome != "" {
			lines[0] += ", " + string(s.Outcome)
			if s.Cause != nil {
				lines[0] += ": " + s.Cause.Text
			}
		}
	}
	for _, id := range c.ids() {
		n := c.byID(id)
		d := n.hear(nil)
		text := string(d.Kind)
		_, works := n.running()
		switch {
		case n.killed():
			text = "dead"
		case n.why() != nil:
			text = strings.Split(n.why().Error(), "\n")[0]
		case works:
			text = fmt.Sprintf("runs %d/%d as %d of %d", n.ran().Round, n.ran().Epoch, n.ran().Place.GroupRank,
				n.ran().Place.GroupWorldSize)
		case d.Cause != nil:
			text += ": " + d.Cause.Text
		}
		lines = append(lines, id+" "+text)
	}
	return strings.Join(lines, "\n")
}

// ids are those of all launchers, in order.
func (c *cluster) ids() (ids []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id := range c.nodes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// live are the launchers that live, in order.
func (m *model) live(f func(*node) bool) (ns []*node) {
	for _, c := range m.clusters() {
		for _, id := range c.ids() {
			if n := c.byID(id); !n.killed() && n.why() == nil && (f == nil || f(n)) {
				ns = append(ns, n)
			}
		}
	}
	return ns
}
