package top

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/table"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/api"
)

// Bounds of a picture without a terminal, and of the events.
const (
	maxEvents   = 8
	maxRows     = 200
	questions   = 25 // columns of the questions
	leastAnswer = 20 // columns that are worth folding
)

// row is a line of the picture.
type row struct {
	text   string
	tone   answers.Tone
	strong bool
	chosen bool
}

// View is the picture: a line for each row of the terminal, or as many as there are.
func (s State) View() string {
	var rows []row
	switch {
	case s.text != nil:
		for _, l := range s.text[min(s.line, len(s.text)):] {
			rows = append(rows, row{text: l})
		}
	case s.open == "":
		rows = s.list()
	default:
		rows = s.run()
	}
	foot := s.foot()
	rows = s.cut(rows, s.Rows-len(foot))
	for len(rows)+len(foot) < s.Rows {
		rows = append(rows, row{})
	}
	var b strings.Builder
	for _, r := range append(rows, foot...) {
		b.WriteString(s.paint(r) + "\n")
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// cut keeps the first rows, if the terminal has a size.
func (s State) cut(rows []row, most int) []row {
	if s.Rows == 0 {
		return rows
	}
	return rows[:max(0, min(len(rows), most))]
}

// paint is the only way of a text to the terminal: without anything that acts on it.
func (s State) paint(r row) string {
	line := text.EscapeLine(strings.ReplaceAll(r.text, "\t", "    "))
	if runes := []rune(line); s.Columns > 0 && len(runes) > s.Columns {
		line = string(runes[:s.Columns-1]) + "…"
	}
	if !s.Colour {
		return line
	}
	codes := map[answers.Tone]string{answers.Good: "32", answers.Waits: "33", answers.Bad: "31"}[r.tone]
	if r.strong {
		codes += ";1"
	}
	if r.chosen {
		codes += ";7"
	}
	if codes == "" {
		return line
	}
	return "\x1b[" + strings.TrimPrefix(codes, ";") + "m" + line + "\x1b[0m"
}

// head is the first line.
func (s State) head(title string, tone answers.Tone) row {
	if s.since.IsZero() {
		title += "  ..."
	} else {
		title += "  " + s.since.Local().Format(time.TimeOnly)
	}
	if s.trouble != nil {
		title, tone = title+"  NO ANSWER: "+s.trouble.Error(), answers.Bad
	}
	return row{text: title, tone: tone, strong: true}
}

func (s State) list() []row {
	l := s.layout([]string{"RUN", "NODES", "WANTED", "WORKERS", "RESTARTS", "STATE"}, 0, len(s.seen.Runs), s.Rows-2)
	for _, r := range s.seen.Runs[l.from:l.to] {
		l.add(answers.OfRun(r), r.Run, strconv.Itoa(r.Members+r.Waiting), describe.Size(r.Params),
			strconv.Itoa(describe.Workers(r.Status)), describe.Restarts(r.Status), describe.Phase(r.Status))
	}
	return append([]row{s.head(fmt.Sprintf("%d runs", len(s.seen.Runs)), answers.Plain)}, l.rows()...)
}

func (s State) run() []row {
	f := s.seen.Facts
	if f.Run.Run != s.open {
		return []row{s.head(s.open, answers.Plain)}
	}
	all := f.All()
	rows := []row{s.head(s.open+": "+all[0].Lines[0], all[0].Tone)}
	rows = append(rows, s.cut(s.answers(all), s.Rows/2)...)
	rows = append(rows, row{})
	events := s.events(f.Events)
	if s.Rows > 0 {
		events = events[:max(0, min(len(events), (s.Rows-len(rows))/3))]
	}
	nodes := s.nodes()
	l := s.layout([]string{"RANK", "NODE", "WORKERS", "ADDRESS", "MACHINE", "STATE"}, 1, len(nodes),
		s.Rows-len(rows)-len(events)-2)
	for _, n := range nodes[l.from:l.to] {
		l.add(answers.OfNode(n), describe.Rank(n), n.Name, strconv.Itoa(n.Slots), n.Addr, n.Machine, describe.Node(n))
	}
	rows = append(rows, l.rows()...)
	if more := len(nodes) - l.to; more > 0 && s.Rows == 0 {
		rows = append(rows, row{text: fmt.Sprintf("and %d more: dlroverctl nodes %s", more, s.open)})
	}
	return append(append(rows, row{}), events...)
}

// answers are the questions, with their answers beside them.
func (s State) answers(all []answers.Answer) (rows []row) {
	for _, a := range all {
		lines := slices.Clone(a.Lines)
		for _, d := range a.Due {
			lines = append(lines, fmt.Sprintf("in %s: %s", describe.Age(d.At.Sub(s.seen.Facts.Now)), d.Text))
		}
		question := a.Question
		for _, line := range lines {
			for _, part := range fold(line, s.Columns-questions) {
				rows = append(rows, row{text: fmt.Sprintf("%-*s%s", questions, question, part), tone: a.Tone})
				question = ""
			}
		}
	}
	return rows
}

// events are the newest, the newest first.
func (s State) events(all []api.Event) (rows []row) {
	for _, e := range slices.Backward(all[max(0, len(all)-maxEvents):]) {
		rows = append(rows, row{tone: answers.OfEvent(e.Event), text: fmt.Sprintf("%s  %3d.%-3d %-14s  %s",
			e.At.Local().Format(time.TimeOnly), e.Round, e.Epoch, e.Event, describe.Event(e))})
	}
	return rows
}

// foot are the last lines.
func (s State) foot() (rows []row) {
	switch {
	case s.ask != nil:
		for _, part := range fold(s.question+" y: yes; any other key: no", s.Columns) {
			rows = append(rows, row{text: part, tone: answers.Bad, strong: true})
		}
		return rows
	case s.said != "":
		return []row{{text: s.said, tone: answers.Waits}}
	case s.Rows == 0:
		return nil
	case s.text != nil:
		return []row{{text: "up, down: more   esc: back   q: quit", strong: true}}
	case s.open == "":
		return []row{{text: "enter: open   ?: keys   q: quit", strong: true}}
	}
	return []row{{text: "d: drain   s: stacks   ?: keys   esc: all runs   q: quit", strong: true}}
}

// keys explains the keys.
func keys() string {
	var b bytes.Buffer
	t := table.New(&b)
	for _, k := range [][2]string{{"up, down", "choose a run or a node; also k, j, page up, page down, home, end"},
		{"enter", "open the chosen run"}, {"esc", "back"}, {"s", "the stacks of all workers; nothing is stopped for that"}} {
		t.Row(k[0], k[1])
	}
	for _, k := range orderKeys {
		t.Row(k.key, k.does+"; asks first, and says what it costs")
	}
	t.Row("q", "quit")
	_ = t.Flush() // a buffer takes all
	return b.String()
}

// layout is a table of the rows from from to to, those around the chosen one.
type layout struct {
	from, to, chosen int // chosen is none of them without a terminal
	text             *bytes.Buffer
	table            table.Table
	tones            []answers.Tone
}

// layout begins a table of n rows, and shows as many as fit.
func (s State) layout(headings []string, which, n, room int) *layout {
	l := &layout{to: min(n, maxRows), chosen: -1, text: new(bytes.Buffer), tones: []answers.Tone{answers.Plain}}
	if room = max(1, room-1); s.Rows > 0 {
		l.chosen = s.row(which, n)
		l.from = max(0, min(l.chosen-room/2, n-room))
		l.to = min(n, l.from+room)
	}
	l.table = table.New(l.text, headings...)
	return l
}

func (l *layout) add(tone answers.Tone, cells ...string) {
	l.table.Row(cells...)
	l.tones = append(l.tones, tone)
}

func (l *layout) rows() (rows []row) {
	_ = l.table.Flush() // a buffer takes all
	for i, line := range strings.Split(strings.TrimSuffix(l.text.String(), "\n"), "\n") {
		rows = append(rows, row{line, l.tones[i], i == 0, i > 0 && l.from+i-1 == l.chosen})
	}
	return rows
}

// fold breaks a line between words. It does not if there is hardly any room.
func fold(line string, columns int) (parts []string) {
	runes := []rune(line)
	for columns >= leastAnswer && len(runes) > columns {
		at := columns
		for at > columns/2 && runes[at] != ' ' {
			at--
		}
		parts = append(parts, string(runes[:at]))
		runes = []rune(strings.TrimPrefix(string(runes[at:]), " "))
	}
	return append(parts, string(runes))
}

// Line is a run on a line, for output that is no terminal.
func Line(r api.RunStatus) string {
	return fmt.Sprintf("%s: %s; %d nodes, %d workers, %s restarts", r.Run, describe.Phase(r.Status), r.Members+r.Waiting,
		describe.Workers(r.Status), describe.Restarts(r.Status))
}
