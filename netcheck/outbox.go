package netcheck

import (
	"fmt"

	"dlrover-run/internal/job"
)

// outbox has the actions of a step. It numbers assignments and names tests.
type outbox struct {
	prefix  uint32 // of the names of tests; a Check of an earlier service has another
	seq     uint64 // of assignments
	tests   uint64 // begun
	actions []Action
}

// assign gives a node its duty.
func (o *outbox) assign(n *node, a Assignment) {
	o.seq++
	a.Seq = o.seq
	o.actions = append(o.actions, Action{To: n.ID, Assign: &a})
}

func (o *outbox) note(event job.Event, name, format string, args ...any) {
	o.actions = append(o.actions, Action{Note: &job.Note{Event: event, Node: name, Text: fmt.Sprintf(format, args...)}})
}

// verdict notes the verdict of a node.
func (o *outbox) verdict(n *node) {
	o.note(job.EventCheckVerdict, n.name(), "%s: %s", n.verdict.State, n.verdict.Reason)
	o.faults(n)
}

// maxFaults bounds the faults of one node's devices in the timeline.
const maxFaults = 4

// faults notes devices that their driver reports as broken, if the verdict does not exclude the node.
func (o *outbox) faults(n *node) {
	told := 0
	for _, f := range n.Findings {
		if what := f.fault(); what != "" && !n.verdict.Excluded && told < maxFaults {
			o.note(job.EventDeviceFault, n.name(), "%s: %s", what, f.Text)
			told++
		}
	}
}

func (o *outbox) testName() string {
	o.tests++
	return fmt.Sprintf("%08x-%d", o.prefix, o.tests)
}

// stop ends the test that a node runs alone, if one is running.
func (o *outbox) stop(n *node) {
	if n.busy && n.present() {
		o.assign(n, Assignment{Duty: Rest})
	}
	n.busy = false
}
