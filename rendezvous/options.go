package rendezvous

import (
	"fmt"
	"strings"
)

// option is one field of Params, or two that are typed together, as a user would type it.
type option struct {
	text string
	// shared: every node of a run must bring the same; how explains where to set it.
	shared bool
	how    string
}

// options lists all of p, in one order.
func (p Params) options() []option {
	const same = "use the same option on every node"
	const checks = "use the same --network-check, --precheck, --switchbox-check, --health-check and --check options on " +
		"every node"
	p = p.WithDefaults()
	return append([]option{
		{fmt.Sprintf("--nnodes=%d:%d", p.Min, p.Max), true, same},
		{fmt.Sprintf("--node-unit=%d", p.Unit), true, same},
		{fmt.Sprintf("the %s rendezvous", p.kind()), true, "use the same --rdzv-backend on every node"},
		{text: p.restarts()},
		{text: fmt.Sprintf("--restart-policy=Always: %v", p.Always)},
		{text: fmt.Sprintf("join_timeout=%v", p.JoinTimeout.Seconds())},
		{text: p.lastCall()},
		{text: fmt.Sprintf("growth_delay=%v", p.GrowthDelay.Seconds())},
		{text: p.silence()},
		{text: fmt.Sprintf("gate=%v", p.Gate)},
		{text: fmt.Sprintf("gate_timeout=%v", p.GateTimeout.Seconds())},
		{p.checks(), true, checks},
		{text: p.hangs()},
		{text: p.holds()},
		{p.Group.text(), true, same},
	}, p.Budget.options()...)
}

func (p Params) lastCall() string {
	text := fmt.Sprintf("last_call_timeout=%v", p.LastCall.Seconds())
	if p.Quiet > 0 {
		text += fmt.Sprintf(" or %v after the newest node", p.Quiet.Seconds())
	}
	if p.Promised > 0 {
		text += fmt.Sprintf(" (promised: %d)", p.Promised)
	}
	return text
}

func (p Params) silence() string {
	if p.NodeTimeout == 0 {
		return "no node_timeout"
	}
	return fmt.Sprintf("node_timeout=%v", p.NodeTimeout.Seconds())
}

func (p Params) restarts() string {
	if p.MaxRestarts == Unlimited {
		return "restarts that every node counts by itself"
	}
	return fmt.Sprintf("--max-restarts=%d", p.MaxRestarts)
}

func (p Params) hangs() string {
	if p.Hang == "" {
		return "no hang detection"
	}
	return "hang detection (" + p.Hang + ")"
}

func (p Params) holds() string {
	if p.Hold {
		return "held at first (--hold)"
	}
	return "not held"
}

func (p Params) checks() string {
	switch {
	case p.CheckOnly:
		return "only checks of nodes (" + p.Check + ")"
	case p.Check == "":
		return "no checks of nodes"
	}
	return "checks of nodes (" + p.Check + ")"
}

func (p Params) kind() string {
	if p.Static {
		return "static"
	}
	return "dynamic"
}

// String lists all options, as a user would type them.
func (p Params) String() string {
	var texts []string
	for _, o := range p.options() {
		texts = append(texts, o.text)
	}
	return strings.Join(texts, " ")
}

// conflict names the option, of those that all nodes must share, in which p differs from the run's.
func (p Params) conflict(run Params) error {
	if p == run { // as nearly always; texts would cost more than all else of a Join
		return nil
	}
	theirs := run.options()
	for i, o := range p.options() {
		if o.shared && o.text != theirs[i].text {
			return fmt.Errorf("%s, but the run was opened with %s; %s", o.text, theirs[i].text, o.how)
		}
	}
	return nil
}

// Differences lists the options in which p differs from those of the run that it joined: p's and the run's, as on a
// command line.
func (p Params) Differences(run Params) (own, others string) {
	var a, b []string
	theirs := run.options()
	for i, o := range p.options() {
		if o.text != theirs[i].text {
			a, b = append(a, o.text), append(b, theirs[i].text)
		}
	}
	return strings.Join(a, " "), strings.Join(b, " ")
}
