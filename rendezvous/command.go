package rendezvous

import (
	"dlrover-run/internal/job"
	"errors"
	"fmt"
	"time"
)

// Holds and commands. With Params.Hold a run begins held. Worlds are sealed as ever, with ranks and a store, but their
// nodes get Run without workers (Directive.Hold), until an order resumes the run. The run's Command replaces the
// command with which the nodes were started. An order sets it, and every directive carries it. Nodes that join later,
// and a restarted daemon, learn of it as of a pause.

// commands is a Round's state of holds and commands.
type commands struct {
	hold      *job.Cause   // the run is held; nil: it is not
	unheld    bool         // an order has ended a hold; the nodes' state is older
	command   *job.Command // of the workers; nil: the one with which their nodes were started
	commandIn *job.EpochID // the newest epoch that was known to the node that brought the command; nil: it was ordered
	onResume  *job.Command // becomes the command when the run is first paused, or a hold ends; nil: none was given
}

// opened takes over the settings of the node that opens the run.
func (r *Round) opened(e Join) {
	if r.params.Hold {
		r.hold = &job.Cause{Kind: job.CauseOperator, Text: "the job was started with --hold"}
	}
	if e.OnResume.Validate() == nil {
		r.onResume = e.OnResume
	}
}

// commandRefusal is why a command cannot be given.
func (r *Round) commandRefusal(c *job.Command) error {
	if c == nil {
		return nil
	}
	for _, n := range r.members.sorted(everyNode) {
		if !n.can(CanCommand) {
			return fmt.Errorf("%w: node %q takes no other command: its launcher has no job token, or is of an older version",
				ErrBadOrder, n.Name)
		}
	}
	return nil
}

// cannotFollow returns why a newcomer would start workers of another command, or workers that are held back.
func (r *Round) cannotFollow(n Node) error {
	switch {
	case r.hold != nil && !n.can(CanHold):
		return errors.New("the run is held, and this launcher is of a version that starts workers all the same")
	case r.command != nil && !n.can(CanCommand):
		return errors.New("the run executes another command than its nodes were started with, and this launcher takes " +
			"none: it has no job token, or is of an older version")
	}
	return nil
}

// setCommand has workers execute c from their next start on; nil changes nothing. Arguments alone apply to the present
// command.
func (r *Round) setCommand(c *job.Command) {
	if c != nil {
		if len(c.Program) == 0 && r.command != nil {
			c = &job.Command{Program: r.command.Program, Args: c.Args}
		}
		r.command, r.commandIn, r.onResume = c, nil, nil
		r.note(job.EventCommand, "", c.String())
	}
}

// commandAhead makes the command that was given in advance count, unless another one does.
func (r *Round) commandAhead() {
	if r.command == nil {
		r.setCommand(r.onResume)
	}
}

// resumeRun ends a pause, a hold, or both.
func (r *Round) resumeRun(now time.Time, o Order) {
	if r.hold != nil {
		r.commandAhead()
	}
	r.setCommand(o.Command)
	r.hold, r.unheld = nil, true
	if r.paused != nil {
		r.unpause(now)
	} else if !r.epoch.collecting() && r.epoch.held {
		r.breakWorld(now, *o.cause())
	} else {
		r.repeat(everyNode)
	}
}

// restoreCommand takes over the command that an earlier daemon had sent to the node, unless this history knows a newer
// one.
func (r *Round) restoreCommand(e Join) {
	known := r.command != nil && (r.commandIn == nil || !e.Seen.Newer(*r.commandIn))
	if e.Command == nil || known || e.Command.Validate() != nil {
		return
	}
	r.command, r.commandIn, r.onResume = e.Command, &e.Seen, nil
}

// restoreHold: a world that is being rebuilt has workers, or is held.
func (r *Round) restoreHold(e *Resume) {
	r.epoch.held = e.Hold
	switch {
	case !e.Hold:
		r.hold = nil
	case !r.unheld && r.hold == nil:
		r.hold = &job.Cause{Kind: job.CauseOperator, Text: "it was held before the rendezvous daemon was started again"}
	}
}

// startHeld ends a world that runs without workers although the run is not held any more.
func (r *Round) startHeld(now time.Time) {
	if r.epoch.held && r.hold == nil && !r.epoch.collecting() {
		r.breakWorld(now, job.Cause{Kind: job.CauseOperator, Text: "the hold has ended"})
	}
}
