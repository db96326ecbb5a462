package rendezvous

import (
	"dlrover-run/internal/job"
	"errors"
	"fmt"
	"time"
)

// Holds and commands. With Params.Hold a run begins held: worlds are sealed as ever, with ranks and a store, but their
// nodes are told to Run without workers (Directive.Hold), until an order resumes the run. What the workers execute
// instead of what their nodes were started with is the run's Command: an order brings it, every directive says it, and
// nodes that join later, or a daemon that is started again, hear of it as of a pause.

// commands is what a Round knows of holds and commands.
type commands struct {
	hold      *job.Cause   // the run is held; nil: it is not
	unheld    bool         // an order has ended a hold; what nodes bring is older
	heldWorld bool         // the members of the newest world were told to run without workers
	command   *job.Command // what workers execute; nil: what their nodes were started with
	commandIn *job.EpochID // the newest epoch that the node had seen who brought the command; nil: it was ordered
	onResume  *job.Command // becomes the command when the run is first paused, or a hold ends; nil: none was given
}

// opened takes over what the node that opens the run has asked for.
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
	for _, n := range r.sorted(everyNode) {
		if !n.can(CanCommand) {
			return fmt.Errorf("%w: node %q takes no other command: its launcher has no job token, or is of an older version",
				ErrBadOrder, n.Name)
		}
	}
	return nil
}

// cannotFollow says why a newcomer would start workers of another command, or workers that are held back.
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

// setCommand has workers execute c from their next start on; nil changes nothing. Arguments alone are for what is
// executed now.
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
	} else if !r.collecting() && r.heldWorld {
		r.breakWorld(now, *o.cause())
	} else {
		r.repeat(everyNode)
	}
}

// recallCommand takes over the command that an earlier daemon had told the node, unless this history knows a newer one.
func (r *Round) recallCommand(e Join) {
	known := r.command != nil && (r.commandIn == nil || !e.Seen.Newer(*r.commandIn))
	if e.Command == nil || known || e.Command.Validate() != nil {
		return
	}
	r.command, r.commandIn, r.onResume = e.Command, &e.Seen, nil
}

// recallHold: a world that is being rebuilt has workers, or is held.
func (r *Round) recallHold(e *Resume) {
	r.heldWorld = e.Hold
	switch {
	case !e.Hold:
		r.hold = nil
	case !r.unheld && r.hold == nil:
		r.hold = &job.Cause{Kind: job.CauseOperator, Text: "it was held before the rendezvous daemon was started again"}
	}
}

// startHeld ends a world that runs without workers although the run is not held any more.
func (r *Round) startHeld(now time.Time) {
	if r.heldWorld && r.hold == nil && !r.collecting() {
		r.breakWorld(now, job.Cause{Kind: job.CauseOperator, Text: "the hold has ended"})
	}
}
