package rendezvous

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/job"
)

// The fate of a run when checks leave too few nodes. It waits for others, as for nodes that have never come, and
// reports at once which nodes are missing and why. The launcher of a node that has failed its check leaves, so its name
// is kept. A static run does not wait: no other node can have the rank.

// maxNamed bounds the nodes that an error names, and maxGone the names that are kept.
const (
	maxNamed = 4
	maxGone  = 256
)

// staticPatience is how long a static run in which a check has failed waits for other checks, to name all nodes.
const staticPatience = 5 * time.Second

// failed: a check has failed on a node that is here, or was.
func (r *Round) failed() bool {
	if len(r.gone) > 0 || r.members.again+r.members.barred == 0 {
		return len(r.gone) > 0
	}
	for _, n := range r.members.nodes {
		if n.bar != nil {
			return true
		}
	}
	return false
}

// keepBar remembers why a node had no workers that goes away.
func (r *Round) keepBar(n *node) {
	if n.bar != nil && (r.gone[n.Name] != nil || len(r.gone) < maxGone) {
		r.gone[n.Name] = n.bar
	}
}

// barredNodes lists the nodes that get no workers, in order of arrival, and then those that have left for it, by name.
func (r *Round) barredNodes() (names, texts []string) {
	for _, n := range r.members.sorted(func(n *node) bool { return n.state == barred || n.bar != nil }) {
		names = append(names, n.Name)
		texts = append(texts, fmt.Sprintf("%s is barred: %s", n.Name, cmp.Or(r.orders.bars[n.Name], n.bar).Text))
	}
	for _, name := range slices.Sorted(maps.Keys(r.gone)) {
		if !slices.Contains(names, name) {
			names = append(names, name)
			texts = append(texts, fmt.Sprintf("%s has left: %s", name, r.gone[name].Text))
		}
	}
	if more := len(texts) - maxNamed; more > 0 {
		texts = append(texts[:maxNamed-1], fmt.Sprintf("%s and %d more", texts[maxNamed-1], more))
	}
	return names, texts
}

// lack is a Cause that describes the shortage, and the barred nodes.
func (r *Round) lack(kind job.CauseKind, text string) *job.Cause {
	names, texts := r.barredNodes()
	c := &job.Cause{Kind: kind, Text: strings.Join(append([]string{text}, texts...), "; ")}
	if len(names) == 1 {
		c.Node = names[0]
	}
	return c
}

// numbers is a text with the numbers of nodes present and needed.
func (r *Round) numbers() string {
	text := fmt.Sprintf("%d nodes joined, need %d", r.members.waiting+r.members.checking, r.params.Min)
	if r.params.Unit > 1 {
		text += fmt.Sprintf(" in multiples of %d", r.params.Unit)
	}
	return text
}

// shortage is why no world has formed in time: too few have joined, or too few of them may have workers.
func (r *Round) shortage() *job.Cause {
	kind := job.CauseTimeout
	if r.failed() && r.fit(r.members.waiting+r.members.checking+r.members.again+r.members.barred+len(r.gone)) >= r.params.Min {
		kind = job.CauseCheck
	}
	texts := append([]string{fmt.Sprintf("no world within %s: %s", r.params.JoinTimeout, r.numbers())},
		slices.Sorted(maps.Keys(r.refused))...)
	return r.lack(kind, strings.Join(texts[:min(len(texts), 1+maxNamed)], "; "))
}

// tellShortage informs the waiting nodes that checks have left too few nodes for a world, whenever more or fewer are
// barred.
func (r *Round) tellShortage() {
	barred := r.members.again + r.members.barred + len(r.gone)
	if barred == r.lackingFor {
		return
	}
	r.lacking, r.lackingFor = nil, barred
	if r.params.Static || r.params.CheckOnly || !r.failed() { // failStatic does not wait
		return
	}
	r.lacking = r.lack(job.CauseCheck, fmt.Sprintf(
		"too few nodes have passed their checks; waiting up to %s for others: %s",
		r.params.JoinTimeout, r.numbers()))
	r.out.note(job.EventTooFew, "", r.lacking.Text)
	for _, n := range r.members.sorted(func(n *node) bool { return n.state == waiting }) {
		r.out.direct(n, r.wait())
	}
}

// wait is the directive of nodes that may have workers, but not yet.
func (r *Round) wait() Directive {
	return Directive{Kind: job.Wait, Cause: cmp.Or(r.orders.paused, r.lacking)}
}

// failStatic ends a static run in which a check has failed: when no answers are missing, or after staticPatience.
func (r *Round) failStatic(now time.Time) bool {
	switch {
	case r.failAt.IsZero() || r.orders.paused != nil:
		return false
	case !r.failed(), r.params.CheckOnly && r.fit(r.members.waiting+r.members.checking) >= r.params.Min: // it is mended
		r.failAt = time.Time{}
		return false
	case r.members.checking > 0 && now.Before(r.failAt):
		return false
	}
	text := "checks of nodes have failed, and nobody replaces a node of a static run"
	if r.params.CheckOnly {
		text = "too few nodes have passed their checks: " + r.numbers()
	}
	r.finish(now, job.Failed, r.lack(job.CauseCheck, text))
	return true
}
