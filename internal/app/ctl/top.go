package ctl

import (
	"bytes"
	"fmt"
	"os"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/app/answers/remote"
	"dlrover-run/internal/app/ctl/top"
	"dlrover-run/internal/console"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

const topAbout = `It shows what the page of the master shows, and follows it. Keys that change something ask
first, and say what it costs; ? lists all keys. Without a terminal it prints a line
for each change of a run.`

func onceOption() cli.Flag { return &cli.BoolFlag{Name: "once", Usage: "print one picture, and exit"} }

// looks is the least time between two pictures. For the list of all runs, which is megabytes for 10,000 nodes, the
// daemon is asked for no more than a twentieth of the time.
const (
	looks    = 2 * time.Second
	idleness = 20
)

// showTop shows runs until the user has enough.
func (c *call) showTop() error {
	m := screen{call: c, state: top.New(c.run())}
	first := m.look()
	if first.err == nil && c.run() != "" && first.Facts.Run.Run == "" {
		first.err = api.ErrUnknownRun
	}
	if first.err != nil {
		return first.err
	}
	no, _ := c.env("NO_COLOR")
	m.state, m.pause = m.state.Told(c.now(), first.Seen, nil), first.pause
	m.state.Colour = c.terminal && no == ""
	if c.args.Bool("once") {
		m.state.Columns, _ = console.Columns(c.stdout)
		_, err := fmt.Fprintln(c.stdout, m.state.View())
		return err
	}
	in, isFile := c.stdin.(*os.File)
	if term, _ := c.env("TERM"); !c.terminal || !isFile || !console.IsTerminal(in) || term == "" || term == "dumb" {
		return m.plain(first.Runs)
	}
	_, err := tea.NewProgram(m, tea.WithContext(c), tea.WithInput(in), tea.WithOutput(c.stdout),
		tea.WithoutSignalHandler()).Run()
	if c.Err() != nil {
		return nil // enough
	}
	return err
}

// screen is a terminal, or a file that gets lines.
type screen struct {
	*call
	state top.State
	pause time.Duration // between two looks
}

// plain prints a line for each run that has changed, until it is interrupted or the daemon is gone.
func (m screen) plain(runs []api.RunStatus) (err error) {
	said := map[string]string{}
	for {
		for _, r := range runs {
			if line := top.Line(r); said[r.Run] != line && (m.run() == "" || m.run() == r.Run) {
				said[r.Run] = line
				fmt.Fprintln(m.stdout, m.now().Format(time.TimeOnly)+"  "+text.EscapeLine(line))
			}
		}
		select {
		case <-time.After(m.pause):
		case <-m.Done():
			return nil
		}
		if runs, err = m.daemon.client.Runs(m); err != nil && m.Err() == nil {
			return err
		}
	}
}

// look asks the daemon for all runs, and for more of the open one.
func (m screen) look() (s seen) {
	began := time.Now()
	s.Runs, s.err = m.daemon.client.Runs(m)
	took := time.Since(began)
	s.pause = max(looks, idleness*took)
	for _, r := range s.Runs {
		if r.Run == m.state.Open() {
			s.Facts, s.err = m.facts(r, m.state.Events(), 2*took+100*time.Millisecond)
		}
	}
	return s
}

// keptEvents bounds the events that are kept for the answers.
const keptEvents = 1000

// facts are those of a run, with the newest events.
func (m screen) facts(r api.RunStatus, events []api.Event, inTime time.Duration) (answers.Facts, error) {
	f, err := remote.Facts(m, m.daemon.client, answers.Facts{Now: m.now(), Run: r, Events: events}, inTime)
	f.Events = f.Events[max(0, len(f.Events)-keptEvents):]
	return f, err
}

// Messages to a screen besides keys.
type (
	seen struct {
		top.Seen
		err   error
		pause time.Duration // until the next look
		again bool          // which follows
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
		m.state, m.pause = m.state.Told(m.now(), msg.Seen, msg.err), msg.pause
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
		s := m.look()
		s.err, s.again = m.explain(s.err), again
		return s
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
func (m screen) of(run string) *call {
	d, other := *m.daemon, *m.call
	d.run, other.daemon = run, &d
	return &other
}

func (m screen) stacksOf(run string) tea.Msg {
	found, err := m.of(run).daemon.collect(m, m.now())
	if err != nil {
		return said(m.of(run).explain(err).Error())
	}
	var b bytes.Buffer
	if err := found.WriteText(&b); err != nil {
		return said(err.Error())
	}
	return stacks(b.String())
}

// give gives an order that was confirmed, and returns the result in words.
func (m screen) give(run string, o rendezvous.Order) string {
	o.Text = m.reason(o.Kind)
	if err := m.daemon.client.Order(m, run, o); err != nil {
		return m.explain(m.of(run).refused(o, err)).Error()
	}
	return "Ordered: " + string(o.Kind) + " " + o.Node
}
