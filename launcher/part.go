package launcher

import (
	"context"
	"fmt"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// Part takes part in the life of a node's workers by its hooks. A nil hook has nothing to do. The agent calls the parts
// in the order of Config.Parts, EndParts in the reverse order.
//
//	check directive        run directive                           the job's verdict
//	       |                     |                                         |
//	       v                     v                                         v
//	   +-------+  passed     +-------+  all workers started  +-----+    +-----+
//	   | Check | ----------> | Start | --------------------> | Run |    | End |
//	   +-------+             +-------+                       +-----+    +-----+
//	                             ^                              |
//	                             |                              | ctx ends: the workers
//	                             |  the next epoch              v have ended, or are stopped
//	                             |                           +------+
//	                             +-------------------------- | Stop |
//	                                                         +------+
//
// Run has a goroutine of its own. Check and End may take time. Start and Stop are called by the agent's loop and must
// return soon.
type Part struct {
	// Name is the part's name in messages; no two parts of one launcher have the same.
	Name string
	// Check examines this node before it gets workers. The parts are asked one after the other, until one does not pass.
	// Check returns soon after ctx ends, which it does when anything else is to be done: its answer does not count any
	// more then. An error means that the node could not be examined, which bars it like a check that did not pass.
	Check func(ctx context.Context, r CheckRequest) (CheckResult, error)
	// Start is called once in an epoch, before its first worker is started, or the run is held.
	Start func(r *StartRequest)
	// Run watches over the running workers of an epoch. It returns soon after ctx ends.
	Run func(ctx context.Context, r RunRequest)
	// Stop is called when all workers have ended. Before that it is called with r.Early if a signal is about to end them:
	// time is short then.
	Stop func(r StopRequest)
	// End finishes the work of the part; see EndParts.
	End func(r EndRequest)
}

// CheckRequest holds the directive that asks for the check.
type CheckRequest struct{ Directive }

// CheckResult is the answer of a Check.
type CheckResult struct {
	// Again, of one that has not passed: nothing is proved. The node waits for another check.
	Again  bool
	Passed bool
	Reason string    // why not, in one line
	Aspect string    // of the node that has failed, in a word; "" is none that a check can disprove
	Until  time.Time // how long a pass holds; zero: for this launcher's life
	// Covered are the aspects of the node that were found to be sound.
	Covered []string
	// Domain labels nodes that are connected better with each other than with the rest, such as by NVLink: the rendezvous
	// makes them neighbours. "" is unknown.
	Domain string
}

// StartRequest announces the workers of an epoch.
type StartRequest struct {
	Epoch
	// Env is laid over the preset's variables: KEY=VALUE for each worker, by local rank.
	Env [][]string
}

// Setenv adds variables, as KEY=VALUE, to the environment of every worker.
func (r *StartRequest) Setenv(vars ...string) {
	for i := range r.Env {
		r.Env[i] = append(r.Env[i], vars...)
	}
}

// RunRequest describes the running workers of an epoch.
type RunRequest struct {
	Epoch Epoch
	PIDs  []int // by local rank
	Control
}

// Control is how Run acts on the epoch that it watches. Its methods do not block and may be called by any goroutine.
type Control interface {
	// Fail ends the epoch as the failure of a worker does that act is the answer to; policy.Succeed counts as
	// policy.RestartCharged. The caller sets Rank, LocalRank, PID and Message of f; the agent fills in other fields that
	// are empty. Only the first failure of an epoch counts, and none of an epoch that is over.
	Fail(f verdict.Failure, act policy.Action)
	// Output is the end of the standard error of a worker of the epoch or, if that is empty, of its standard output: 2 KiB
	// of text at most. It may read a file of the log directory.
	Output(localRank int) string
}

// StopRequest describes the end of an epoch's workers.
type StopRequest struct {
	Epoch     Epoch
	Reason    string        // why they have ended, in a few words
	CauseKind job.CauseKind // of the directive that stopped them; "" if none did
	Early     bool          // they have not ended: a signal is about to end them
	Leaving   bool          // this node leaves the job
}

// EndRequest is the time that is left after the verdict. End may take Budget, or until Enough is closed.
type EndRequest struct {
	Result Result
	Budget time.Duration   // of all parts together when EndParts is called; the remainder when End is
	Enough <-chan struct{} // closed by a signal: no more patience
}

// Epoch is common to the workers of one start on this node.
type Epoch struct {
	Directive // of kind Run
	// World is every node by group rank, this one included; nil without Config.NeedsWorld.
	World []job.Member
}

// EndParts ends the parts, the last one first, after the job's verdict has been reported.
func EndParts(parts []Part, r EndRequest) {
	deadline := now().Add(r.Budget)
	for _, p := range slices.Backward(parts) {
		if p.End != nil {
			r.Budget = max(0, time.Until(deadline))
			p.End(r)
		}
	}
}

// startParts announces e to the parts, and returns their variables for each worker.
func (c *Config) startParts(e Epoch) (env [][]string) {
	r := StartRequest{Epoch: e, Env: make([][]string, c.Slots)}
	for _, p := range c.Parts {
		if p.Start != nil {
			p.Start(&r)
		}
	}
	return r.Env
}

// stopParts notifies the parts of the end of g, if they know of its start.
func (c *Config) stopParts(g *group, r StopRequest) {
	if !g.begun {
		return
	}
	for _, p := range c.Parts {
		if p.Stop != nil {
			p.Stop(r)
		}
	}
}

// validateParts reports the first part that cannot be used together with those before it.
func validateParts(list []Part) error {
	names := map[string]bool{}
	for _, p := range list {
		if names[p.Name] {
			return fmt.Errorf("launcher: two parts are called %q", p.Name)
		}
		names[p.Name] = true
	}
	return nil
}

// Examiner looks at workers before they are stopped because a collective has timed out. A worker that did not take part
// in it may still live, and its end destroys the evidence. No restart for any other reason waits for it.
type Examiner struct {
	Name string // in messages
	// Examine has a goroutine of its own and is called at most once in an epoch, after the contexts of Run have ended.
	// pids are the workers' by local rank, 0 for one that has ended; why is the text of the timeout, which may come from
	// another node. The workers are stopped when Examine returns, and in any case a second after it was called: ctx ends
	// shortly before, and later findings are lost.
	Examine func(ctx context.Context, e Epoch, pids []int, why string)
}

// Doubter knows whether the result of this node's check can still hold.
type Doubter struct {
	Name string // in messages
	// Doubt returns one line about an event on this node since its check, such as a link that was down, or "". It is
	// called after an epoch's workers have ended, before the node joins again, and has two seconds, after which ctx ends.
	Doubt func(ctx context.Context) string
}
