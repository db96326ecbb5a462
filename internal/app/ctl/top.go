package ctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/urfave/cli/v2"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/hang/serve"
	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/app/ctl/top"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/console"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

const topAbout = `It shows what the page of the master shows, and follows it. Keys that change something ask
first, and say what it costs; ? lists all keys. Without a terminal it prints a line
for each change of a run.`

func onceOption() cli.Flag { return &cli.BoolFlag{Name: "once", Usage: "print one picture, and exit"} }

// looks is the least time between two pictures. The daemon is not asked for more than a twentieth of the time.
const (
	looks    = 2 * time.Second
	idleness = 20
)

// showTop shows runs until the user has enough.
func (c *call) showTop() error {
	s := top.New(c.run())
	began := time.Now()
	seen, err := c.look(s)
	if err == nil && c.run() != "" && seen.Facts.Run.Run == "" {
		err = api.ErrUnknownRun
	}
	if err != nil {
		return err
	}
	s = s.Told(c.now(), seen, nil)
	if c.args.Bool("once") {
		s.Columns, _ = console.Columns(c.stdout)
		s.Colour = c.terminal && c.colours()
		_, err := fmt.Fprintln(c.stdout, s.View())
		return err
	}
	if term, _ := c.env("TERM"); !c.terminal || !terminal(c.stdin) || term == "" || term == "dumb" {
		return c.plainTop(s, seen)
	}
	s.Colour = c.colours()
	m := screen{c, s, pauseAfter(time.Since(began))}
	_, err = tea.NewProgram(m, tea.WithContext(c), tea.WithInput(c.stdin), tea.WithOutput(c.stdout),
		tea.WithoutSignalHandler()).Run()
	if c.Err() != nil {
		return nil // enough
	}
	return err
}

func terminal(r any) bool {
	f, ok := r.(*os.File)
	return ok && console.IsTerminal(f)
}

func (c *call) colours() bool {
	no, _ := c.env("NO_COLOR")
	return no == ""
}

// plainTop prints a line for each run that has changed, until it is interrupted or the daemon is gone.
func (c *call) plainTop(s top.State, seen top.Seen) (err error) {
	said := map[string]string{}
	for {
		began := time.Now()
		for _, r := range seen.Runs {
			if line := top.Line(r); said[r.Run] != line && (c.run() == "" || c.run() == r.Run) {
				said[r.Run] = line
				fmt.Fprintln(c.stdout, c.now().Format(time.TimeOnly)+"  "+text.EscapeLine(line))
			}
		}
		select {
		case <-time.After(looks):
		case <-c.Done():
			return nil
		}
		if seen, err = c.look(s); err != nil && c.Err() == nil {
			return err
		}
		time.Sleep(pauseAfter(time.Since(began)) - looks)
	}
}

func pauseAfter(took time.Duration) time.Duration { return max(looks, idleness*took) }

// look asks the daemon for all runs, and for more of the open one.
func (c *call) look(s top.State) (seen top.Seen, err error) {
	began := time.Now()
	if seen.Runs, err = c.daemon.client.Runs(c); err != nil {
		return seen, err
	}
	for _, r := range seen.Runs {
		if r.Run == s.Open() {
			seen.Facts, err = c.facts(r, s.Events(), 2*time.Since(began)+100*time.Millisecond)
		}
	}
	return seen, err
}

// keptEvents bounds the events that are kept for the answers.
const keptEvents = 1000

// facts are those of a run. Only events after the known ones are asked for: if there are none in time, there are none.
func (c *call) facts(r api.RunStatus, events []api.Event, inTime time.Duration) (f answers.Facts, err error) {
	d := daemon{client: c.daemon.client, run: r.Run}
	f = answers.Facts{Now: c.now(), Run: r}
	after := uint64(0)
	if len(events) > 0 {
		after = events[len(events)-1].Seq
	} else {
		inTime = noEvents
	}
	ctx, cancel := context.WithTimeout(c, inTime)
	defer cancel()
	es, err := d.client.Events(ctx, r.Run, after)
	if err != nil && ctx.Err() == nil && !errors.Is(err, api.ErrNothingNew) {
		return f, err
	}
	f.Events = append(events[:len(events):len(events)], es.Events...)
	f.Events = f.Events[max(0, len(f.Events)-keptEvents):]
	var v service.Verdict
	if d.client.Mounted(c, r.Run, "verdict", &v) == nil { // else no epoch has ended
		f.Verdict = &v
	}
	f.Hang, _ = serve.Over(d.client).Picture(c, r.Run, false) // without reports there is none
	var saves coordinator.Summary
	if err := d.client.Mounted(c, r.Run, "checkpoints", &saves); err == nil {
		f.Keep(saves)
	}
	_ = d.client.Global(c, "nodes", nil, &f.Machines) // not every daemon keeps them
	return f, nil
}

// screen is the terminal of top.
type screen struct {
	*call
	state top.State
	pause time.Duration
}

// What happens to a screen besides keys.
type (
	seen struct {
		top.Seen
		err   error
		took  time.Duration
		again bool // another look follows
	}
	due    struct{}
	said   string
	stacks string
)

// Init implements tea.Model.
func (m screen) Init() tea.Cmd { return m.later() }

// Update implements tea.Model.
func (m screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.state.Columns, m.state.Rows = msg.Width, msg.Height
	case tea.KeyPressMsg:
		var w top.Want
		m.state, w = m.state.Press(msg.String())
		return m, m.perform(w)
	case due:
		return m, m.see(true)
	case seen:
		m.state, m.pause = m.state.Told(m.now(), msg.Seen, msg.err), pauseAfter(msg.took)
		if msg.again {
			return m, m.later()
		}
	case said:
		m.state = m.state.Said(string(msg))
		return m, m.see(false)
	case stacks:
		m.state = m.state.Show(string(msg))
	}
	return m, nil
}

// View implements tea.Model.
func (m screen) View() tea.View {
	v := tea.NewView(m.state.View())
	v.AltScreen = true
	return v
}

func (m screen) later() tea.Cmd { return tea.Tick(m.pause, func(time.Time) tea.Msg { return due{} }) }

func (m screen) see(again bool) tea.Cmd {
	return func() tea.Msg {
		began := time.Now()
		s, err := m.look(m.state)
		return seen{s, m.explain(err), time.Since(began), again}
	}
}

func (m screen) perform(w top.Want) tea.Cmd {
	run := m.state.Open()
	switch {
	case w.Quit:
		return tea.Quit
	case w.Look:
		return m.see(false)
	case w.Stacks:
		return func() tea.Msg { return m.stacksOf(run) }
	case w.Order != nil:
		return func() tea.Msg { return said(m.give(run, *w.Order)) }
	}
	return nil
}

// of is the call for another run.
func (c *call) of(run string) *call {
	d, other := *c.daemon, *c
	d.run, other.daemon = run, &d
	return &other
}

func (c *call) stacksOf(run string) tea.Msg {
	found, err := c.of(run).daemon.collect(c, serve.Over(c.daemon.client), c.now())
	if err != nil {
		return said(c.of(run).explain(err).Error())
	}
	var b bytes.Buffer
	if err := found.WriteText(&b); err != nil {
		return said(err.Error())
	}
	return stacks(b.String())
}

// give gives an order that was confirmed, and returns the result in words.
func (c *call) give(run string, o rendezvous.Order) string {
	o.Text = c.reason(o.Kind)
	if err := c.daemon.client.Order(c, run, o); err != nil {
		return c.explain(c.of(run).refused(o, err)).Error()
	}
	return "Ordered: " + string(o.Kind) + " " + o.Node
}
