// Package top is dlroverctl top without its terminal and its daemon: the state of the screen, the keys that change it,
// and its picture. It is pure.
package top

import (
	"maps"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// State is a screen: the list of all runs, or one run with its nodes, or a text in front of them.
type State struct {
	Columns, Rows int // of the terminal; 0: any
	Colour        bool

	seen     Seen
	since    time.Time // of what is seen
	trouble  error     // why nothing newer is seen
	open     string    // the run that is shown; "": all are listed
	chosen   [2]int    // the row of the list, and that of the open run's nodes
	text     []string  // shown instead, from line on; nil: none
	line     int
	ask      *rendezvous.Order // waits for a yes
	question string            // about ask
	said     string            // about the last key
}

// Seen is a picture of the daemon's runs at one moment.
type Seen struct {
	Runs  []api.RunStatus
	Facts answers.Facts // of the open run; zero: none is open
}

// Want is the wish behind a key.
type Want struct {
	Quit, Look, Stacks bool
	Order              *rendezvous.Order
}

// New shows a run, or all of them for "".
func New(run string) State { return State{open: run} }

// Open is the run that is shown; "": all are listed.
func (s State) Open() string { return s.open }

// Events are the known ones of the open run.
func (s State) Events() []api.Event {
	if s.seen.Facts.Run.Run != s.open {
		return nil
	}
	return s.seen.Facts.Events
}

// Told takes a new picture, or the reason why there is none.
func (s State) Told(now time.Time, seen Seen, err error) State {
	if s.trouble = err; err == nil {
		// those that have not ended first
		slices.SortStableFunc(seen.Runs, func(a, b api.RunStatus) int { return len(a.Outcome) - len(b.Outcome) })
		s.seen, s.since = seen, now
	}
	return s
}

// Said shows the result of an order, or of a failed one.
func (s State) Said(text string) State {
	s.said = text
	return s
}

// Show puts a text in front.
func (s State) Show(text string) State {
	s.text, s.line, s.said = strings.Split(strings.TrimRight(text, "\n"), "\n"), 0, ""
	return s
}

// orderKeys are the keys of orders. Each needs a yes, and a node if the order is about one.
var orderKeys = []struct {
	key  string
	kind rendezvous.OrderKind
	does string
}{
	{"d", rendezvous.OrderDrain, "drain the chosen node: it saves, leaves and is barred"},
	{"b", rendezvous.OrderBar, "bar the chosen node: it gets no workers"},
	{"u", rendezvous.OrderUnbar, "unbar the chosen node"},
	{"r", rendezvous.OrderRestart, "restart the workers"},
	{"p", rendezvous.OrderPause, "pause the run"},
	{"c", rendezvous.OrderResume, "continue it: resume"},
}

// Press is the effect of a key.
func (s State) Press(key string) (State, Want) {
	s.said = ""
	switch {
	case key == "ctrl+c", key == "q" && s.ask == nil:
		return s, Want{Quit: true}
	case s.ask != nil:
		return s.decide(key)
	case s.text != nil:
		return s.leaf(key), Want{}
	}
	switch key {
	case "?":
		return s.Show(keys()), Want{}
	case "up", "k", "down", "j", "pgup", "pgdown", "home", "end":
		return s.choose(key), Want{}
	case "enter":
		if s.open == "" && len(s.seen.Runs) > 0 {
			s.open, s.chosen[1] = s.seen.Runs[s.row(0, len(s.seen.Runs))].Run, 0
			return s, Want{Look: true}
		}
	case "esc":
		s.open = ""
	case "s":
		if s.open == "" {
			return s.Said("Open a run first: Enter."), Want{}
		}
		return s.Said("The stacks of " + s.open + " are being collected. Nothing is stopped for that."), Want{Stacks: true}
	}
	for _, k := range orderKeys {
		if k.key == key {
			return s.about(k.kind), Want{}
		}
	}
	return s, Want{}
}

// about asks whether an order is meant, with its cost.
func (s State) about(kind rendezvous.OrderKind) State {
	if s.open == "" {
		return s.Said("Open a run first: Enter.")
	}
	for _, p := range s.seen.Facts.Presses() {
		if p.Kind != kind || s.seen.Facts.Run.Run != s.open {
			continue
		}
		o := rendezvous.Order{Kind: kind, Cause: job.CauseOperator}
		s.question = p.Label + " of " + s.open
		if p.Node {
			nodes := s.nodes()
			if len(nodes) == 0 {
				return s.Said("There is no node.")
			}
			o.Node = nodes[s.row(1, len(nodes))].Name
			s.question = string(kind) + " " + o.Node + " in " + s.open
		}
		s.ask, s.question = &o, s.question+"? "+p.Cost
		return s
	}
	return s.Said("No " + string(kind) + " is possible now.")
}

func (s State) decide(key string) (State, Want) {
	o := s.ask
	if s.ask = nil; key != "y" {
		return s.Said("Nothing was ordered."), Want{}
	}
	return s, Want{Order: o}
}

// leaf turns the pages of a text.
func (s State) leaf(key string) State {
	if key == "esc" || key == "enter" || key == "?" {
		s.text = nil
		return s
	}
	s.line = moved(key, s.line, max(1, len(s.text)-s.space()+1), s.space())
	return s
}

// space is how many lines a text may have.
func (s State) space() int { return max(1, s.Rows-1) }

func (s State) choose(key string) State {
	which, n := 0, len(s.seen.Runs)
	if s.open != "" {
		which, n = 1, len(s.nodes())
	}
	s.chosen[which] = moved(key, s.row(which, n), n, max(1, s.Rows/2))
	return s
}

// row is the chosen one of n rows.
func (s State) row(which, n int) int { return max(0, min(s.chosen[which], n-1)) }

// moved is a row of n after a key.
func moved(key string, row, n, page int) int {
	row += map[string]int{"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -page, "pgdown": page, "home": -n, "end": n}[key]
	return max(0, min(row, n-1))
}

// nodes are those of the open run, and then the barred ones that are not here.
func (s State) nodes() []rendezvous.NodeStatus {
	r := s.seen.Facts.Run
	all := r.Nodes
	if r.Outcome != "" && len(all) == 0 {
		all = r.Ended
	}
	if len(r.Bars) == 0 {
		return all
	}
	all = slices.Clone(all)
	here := map[string]bool{}
	for _, n := range all {
		here[n.Name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(r.Bars)) {
		if why := r.Bars[name]; !here[name] {
			all = append(all, rendezvous.NodeStatus{Name: name, State: "barred", GroupRank: -1, Barred: &why})
		}
	}
	return all
}
