package rendezvous

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"dlrover-run/internal/job"
)

// orders are the lasting effects of orders; every directive carries them.
//
// A bar holds for a name, not for a launcher: a node under that name gets no workers until the name is unbarred.
// A pause stops all workers and prevents sealing; the launchers stay, and no limit on waiting counts.
//
// With Params.Hold a run begins held. Worlds are sealed as ever, with ranks and a store, but their nodes get Run
// without workers (Directive.Hold), until an order resumes the run. The command replaces the one with which the nodes
// were started.
//
// Pause and command outlive an abandoned history of the run, bars also the run. Nodes report all three to a restarted
// daemon, each the bar of its own name; those that may serve the run next know all bars.
type orders struct {
	bars      map[string]*job.Cause // by name of nodes; nil: it was barred once
	told      *Bars                 // bars, for directives; nil: they have changed, or there are none
	paused    *job.Cause
	pausedIn  *job.EpochID // newest epoch of the nodes that brought the pause from an earlier daemon; nil: ordered
	hold      *job.Cause   // the run is held; nil: it is not
	command   *job.Command // of the workers; nil: the one with which their nodes were started
	commandIn *job.EpochID // the newest epoch that was known to the node that brought the command; nil: it was ordered
	restart   *Order       // has ended the newest epoch, which Of names; nil: none has
	onResume  *job.Command // becomes the command when the run is first paused, or a hold ends; nil: none was given

	// Epochs in which an order has ended a pause, or a hold; zero: none has. A node knows of a later one only if it has
	// seen a newer epoch.
	unpausedIn, unheldIn job.EpochID
}

// open takes over the settings of the node that opens the run.
func (o *orders) open(e Join, held bool) {
	if held {
		o.hold = &job.Cause{Kind: job.CauseOperator, Text: "the job was started with --hold"}
	}
	if e.OnResume.Validate() == nil {
		o.onResume = e.OnResume
	}
}

// inherit takes over the orders of a history that outlive it; finish leaves the bars. A run that was held because it
// has failed is over when everybody has left.
func (o *orders) inherit(old *orders, failed bool) {
	o.bars, o.told, o.command, o.commandIn = old.bars, nil, old.command, old.commandIn
	if !failed {
		o.paused, o.pausedIn, o.unpausedIn = old.paused, old.pausedIn, old.unpausedIn
	}
}

// pause books a pause, and reports whether it is the first. One that nodes have brought from an earlier daemon is of
// the epoch in, others of none: they end with an order only.
func (o *orders) pause(c *job.Cause, in *job.EpochID) bool {
	o.pausedIn = in
	if o.paused != nil {
		return false
	}
	o.paused = c
	return true
}

// unpause ends a pause by an order in an epoch.
func (o *orders) unpause(in job.EpochID) { o.paused, o.pausedIn, o.unpausedIn = nil, nil, in }

// release ends a hold by an order in an epoch.
func (o *orders) release(in job.EpochID) { o.hold, o.unheldIn = nil, in }

// ended reports whether an order in an epoch has ended what a node knows that has seen another one.
func ended(in, seen job.EpochID) bool { return in != (job.EpochID{}) && !seen.Newer(in) }

// finish drops all that a run that has ended has no use for.
func (o *orders) finish() {
	o.paused, o.pausedIn, o.hold, o.command, o.commandIn, o.onResume, o.restart = nil, nil, nil, nil, nil, nil, nil
	o.unpausedIn, o.unheldIn = job.EpochID{}, job.EpochID{}
}

// Bars are names that are barred, at most maxKeptNames. No launcher of such a name may be left to report its bar.
type Bars struct {
	Names map[string]job.Cause `json:"names,omitempty"`
}

// set bars a name, or ends its bar if why is nil.
func (o *orders) set(name string, why *job.Cause) { o.bars[name], o.told = why, nil }

// directive is the value of Directive.Bars; all nodes that may serve next share it.
func (o *orders) directive() *Bars {
	if o.told == nil && len(o.bars) > 0 {
		bars := o.barred()
		for _, name := range slices.Sorted(maps.Keys(bars))[min(len(bars), maxKeptNames):] {
			delete(bars, name)
		}
		o.told = &Bars{bars}
	}
	return o.told
}

// brought takes over the bars that the launcher which serves now was told by the one before.
func (o *orders) brought(b *Bars) {
	if b == nil {
		return
	}
	for name, c := range b.Names {
		if o.roomForBar(name) {
			o.set(name, bounded(c))
		}
	}
}

// roomForBar forgets which names were unbarred when there is no room for another one that is barred.
func (o *orders) roomForBar(name string) bool {
	if o.bars[name] == nil && len(o.bars) >= maxBars {
		maps.DeleteFunc(o.bars, func(_ string, c *job.Cause) bool { return c == nil })
	}
	return o.bars[name] != nil || len(o.bars) < maxBars
}

// barred are the names with a bar, or nil.
func (o *orders) barred() map[string]job.Cause {
	var bars map[string]job.Cause
	for name, c := range o.bars {
		if c != nil && bars == nil {
			bars = map[string]job.Cause{}
		}
		if c != nil {
			bars[name] = *c
		}
	}
	return bars
}

// cannotFollow returns why a newcomer would start workers of another command, or workers that are held back.
func (o *orders) cannotFollow(n Node) error {
	switch {
	case o.hold != nil && !n.can(CanHold):
		return errors.New("the run is held, and this launcher is of a version that starts workers all the same")
	case o.command != nil && !n.can(CanCommand):
		return errors.New("the run executes another command than its nodes were started with, and this launcher takes " +
			"none: it has no job token, or is of an older version")
	}
	return nil
}

// setCommand has workers execute c from their next start on; nil changes nothing. Arguments alone apply to the present
// command.
func (o *orders) setCommand(c *job.Command, out *outbox) {
	if c == nil {
		return
	}
	if len(c.Program) == 0 && o.command != nil {
		c = &job.Command{Program: o.command.Program, Args: c.Args}
	}
	o.command, o.commandIn, o.onResume = c, nil, nil
	out.note(job.EventCommand, "", c.String())
}

// commandAhead makes the command that was given in advance count, unless another one does.
func (o *orders) commandAhead(out *outbox) {
	if o.command == nil {
		o.setCommand(o.onResume, out)
	}
}

// restoreCommand takes over the command that an earlier daemon had sent to the node, unless this history knows a newer
// one.
func (o *orders) restoreCommand(e Join) {
	known := o.command != nil && (o.commandIn == nil || !e.Seen.Newer(*o.commandIn))
	if e.Command == nil || known || e.Command.Validate() != nil {
		return
	}
	seen := e.Seen // a pointer into e would have every Join allocated
	o.command, o.commandIn, o.onResume = e.Command, &seen, nil
}

// restoreHold: a world that is being rebuilt has workers, or is held.
func (o *orders) restoreHold(held bool, in job.EpochID) {
	switch {
	case !held:
		o.hold = nil
	case !ended(o.unheldIn, in) && o.hold == nil:
		o.hold = &job.Cause{Kind: job.CauseOperator, Text: "it was held before the rendezvous daemon was started again"}
	}
}

// commandRefusal is why a command cannot be given.
func (m *members) commandRefusal(c *job.Command) error {
	if c == nil {
		return nil
	}
	for _, n := range m.sorted(everyNode) {
		if !n.can(CanCommand) {
			return fmt.Errorf("%w: node %q takes no other command: its launcher has no job token, or is of an older version",
				ErrBadOrder, n.Name)
		}
	}
	return nil
}

// refusal is why an order cannot be carried out now.
func (o *orders) refusal(by Order, e *epoch, m *members, rebuilding bool) error {
	sealed := !e.collecting() || rebuilding
	switch {
	case e.phase == finished:
		return ErrFinished
	case by.Kind == OrderRestart && !sealed:
		return ErrNotRunning
	case by.Of != (job.EpochID{}) && (by.Of != e.id || !sealed):
		return fmt.Errorf("%w any more in that epoch", ErrNotRunning)
	case by.Kind == OrderResume && o.paused == nil && o.hold == nil:
		return ErrNotPaused
	case by.Kind == OrderDrain && len(m.named(by.Node)) == 0:
		return fmt.Errorf("%w: no node named %q is here", ErrUnknownNode, by.Node)
	case (by.Kind == OrderBar || by.Kind == OrderDrain) && !o.roomForBar(by.Node):
		return fmt.Errorf("%w: %d names are barred already; unbar some", ErrBadOrder, maxBars)
	case by.Kind == OrderUnbar && o.bars[by.Node] == nil && len(m.barredAs(by.Node)) == 0:
		return fmt.Errorf("%w: no node named %q is barred", ErrUnknownNode, by.Node)
	}
	return m.commandRefusal(by.Command)
}
