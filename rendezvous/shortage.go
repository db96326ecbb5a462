package rendezvous

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"dlrover-run/internal/job"
)

// shortage explains why there are too few nodes for a world.
//
// When checks leave too few nodes, a run waits for others, as for nodes that have never come. It reports at once which
// nodes are missing and why. The launcher of a node that has failed its check leaves, so its name is kept. A static run
// does not wait: no other node can have the rank.
type shortage struct {
	params  *Params
	members *members
	epoch   *epoch
	orders  *orders
	out     *outbox

	refused    map[string]bool       // texts of tellWaiting
	gone       map[string]*job.Cause // checks' bars of nodes that have left since the last seal, by name
	lacking    *job.Cause            // checks have left too few nodes, as sent to waiting nodes; or nil
	lackingFor int                   // how many were barred, or had left for it, when that was last looked at
}

// Bounds of the texts about a shortage.
const (
	maxNamed   = 4   // nodes that an error names
	maxGone    = 256 // names that are kept
	maxRefused = 64  // texts of tellWaiting in one run
)

// failed: a check has failed on a node that is here, or was.
func (s *shortage) failed() bool {
	if len(s.gone) > 0 {
		return true
	}
	for _, n := range s.members.nodes {
		if n.bar != nil {
			return true
		}
	}
	return false
}

// keepBar remembers why a node that goes away had no workers.
func (s *shortage) keepBar(n *node) {
	if n.bar != nil && (s.gone[n.Name] != nil || len(s.gone) < maxGone) {
		s.gone[n.Name] = n.bar
	}
}

// barredNodes lists the nodes that get no workers, in order of arrival, and then those that have left for it, by name.
func (s *shortage) barredNodes() (names, texts []string) {
	for _, n := range s.members.sorted(func(n *node) bool { return n.state == barred || n.bar != nil }) {
		names = append(names, n.Name)
		texts = append(texts, fmt.Sprintf("%s is barred: %s", n.Name, cmp.Or(s.orders.bars[n.Name], n.bar).Text))
	}
	for _, name := range slices.Sorted(maps.Keys(s.gone)) {
		if !slices.Contains(names, name) {
			names = append(names, name)
			texts = append(texts, fmt.Sprintf("%s has left: %s", name, s.gone[name].Text))
		}
	}
	if more := len(texts) - maxNamed; more > 0 {
		texts = append(texts[:maxNamed-1], fmt.Sprintf("%s and %d more", texts[maxNamed-1], more))
	}
	return names, texts
}

// lack is a Cause that describes the shortage, and the barred nodes.
func (s *shortage) lack(kind job.CauseKind, text string) *job.Cause {
	names, texts := s.barredNodes()
	c := &job.Cause{Kind: kind, Text: strings.Join(append([]string{text}, texts...), "; ")}
	if len(names) == 1 {
		c.Node = names[0]
	}
	return c
}

// numbers is a text with the numbers of nodes present and needed.
func (s *shortage) numbers() string {
	text := fmt.Sprintf("%d nodes joined, need %d", s.members.waiting+s.members.checking, s.params.Min)
	if s.params.Unit > 1 {
		text += fmt.Sprintf(" in multiples of %d", s.params.Unit)
	}
	return text
}

// cause is why no world has formed in time: too few have joined, or too few of them may have workers.
func (s *shortage) cause() *job.Cause {
	kind := job.CauseTimeout
	if s.failed() && s.params.fit(s.members.idle()+len(s.gone)) >= s.params.Min {
		kind = job.CauseCheck
	}
	texts := append([]string{fmt.Sprintf("no world within %s: %s", s.params.JoinTimeout, s.numbers())},
		slices.Sorted(maps.Keys(s.refused))...)
	return s.lack(kind, strings.Join(texts[:min(len(texts), 1+maxNamed)], "; "))
}

// tell informs the waiting nodes that checks have left too few nodes for a world, whenever more or fewer are
// barred.
func (s *shortage) tell() {
	barred := s.members.again + s.members.barred + len(s.gone)
	if barred == s.lackingFor {
		return
	}
	s.lacking, s.lackingFor = nil, barred
	if s.params.Static || s.params.CheckOnly || !s.failed() { // gate.fate does not wait
		return
	}
	s.lacking = s.lack(job.CauseCheck, fmt.Sprintf(
		"too few nodes have passed their checks; waiting up to %s for others: %s",
		s.params.JoinTimeout, s.numbers()))
	s.out.note(job.EventTooFew, "", s.lacking.Text)
	for _, n := range s.members.sorted(func(n *node) bool { return n.state == waiting }) {
		s.out.direct(n, s.wait())
	}
}

// wait is the directive of nodes that may have workers, but not yet.
func (s *shortage) wait() Directive {
	return Directive{Kind: job.Wait, Cause: cmp.Or(s.orders.paused, s.lacking)}
}

// back forgets that a node of the name had left with a bar.
func (s *shortage) back(name string) { delete(s.gone, name) }

// over forgets a shortage that has ended.
func (s *shortage) over() { s.lacking, s.lackingFor = nil, 0 }

// tellRefused informs the waiting nodes why another one will not come.
func (s *shortage) tellRefused(refused Node, err error) {
	s.tellWaiting(job.EventRefused, refused.Name,
		fmt.Sprintf("node %q was refused: %s", refused.Name, strings.TrimPrefix(err.Error(), ErrRefused.Error()+": ")))
}

// tellOtherRun informs the nodes of a run without a world that they may be looking for each other under two names.
func (s *shortage) tellOtherRun(e OtherRun) {
	if !s.lacks().lonely() {
		return
	}
	s.tellWaiting(job.EventOtherRun, "", fmt.Sprintf(
		"nodes also wait in run %q of this rendezvous, and together there would "+
			"be enough: is --rdzv-id the same on all nodes?", e.ID))
}

// tellWaiting informs the waiting nodes, once, why others do not come.
func (s *shortage) tellWaiting(event job.Event, name, text string) {
	if s.members.waiting == 0 || s.refused[text] || len(s.refused) >= maxRefused {
		return
	}
	s.refused[text] = true
	s.out.note(event, name, text)
	for _, n := range s.members.sorted(func(n *node) bool { return n.state == waiting && !n.optional }) {
		s.out.direct(n, Directive{Kind: job.Wait, Cause: &job.Cause{Kind: job.CauseRefusal, Node: name, Text: text}})
	}
}

// lacks describes the nodes that the run waits for.
func (s *shortage) lacks() Lack {
	if !s.epoch.fresh() || s.epoch.phase != forming || s.orders.paused != nil || s.members.waiting >= s.params.Min {
		return Lack{}
	}
	return Lack{s.members.waiting, s.params.Min, s.params.Max}
}

// Lack is how many nodes wait in a run that has had no world yet, and how many it needs. It is zero in any other run.
type Lack struct{ Joined, Min, Max int }

func (l Lack) lonely() bool { return l.Joined > 0 }

// With reports whether two runs would have a world if their nodes had used one name.
func (l Lack) With(o Lack) bool {
	return l.lonely() && o.lonely() && l.Min == o.Min && l.Max == o.Max && l.Joined+o.Joined >= l.Min
}
