package launcher

import (
	"context"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// group is the workers of one epoch on this node.
type group struct {
	epoch      Epoch
	attempt    *logs.Attempt
	workers    []*worker
	path       string        // of the executed program
	meanwhile  *proc.Process // of --hold; nil: none
	sides      []*side       // side processes
	env        [][]string    // of the workers, by local rank; nil once all have been started
	left       int           // workers that have not exited
	succeeded  int           // workers that have exited with 0
	stopping   bool
	stopSignal syscall.Signal
	signaledAt atomic.Pointer[time.Time] // when stopSignal was sent; nil: not yet, though stopping
	hurry      context.CancelFunc        // ends the examination before the stop; nil without one
	oomKills   int64                     // of this container when the group started
	failures   []verdict.Failure
	reported   policy.Action // the strongest that the rendezvous has received
	timers     timers

	endWatch context.CancelFunc // of the parts' Run; nil without any
	watchers sync.WaitGroup
	faults   chan fault  // from the parts' Run
	again    atomic.Bool // workers are to follow these, as far as it is known
	fault    string      // why a part has ended the epoch

	before    *before            // nil without one
	begun     bool               // the parts know of its start
	hadFailed bool               // when it was stopped
	endAfter  context.CancelFunc // ends a Config.After under way; nil without one
}

type worker struct {
	id    logs.WorkerID
	proc  *proc.Process
	out   *logs.Worker
	timer string // the file timer that it was killed for
}

// pids lists the workers' process ids by local rank.
func (g *group) pids() []int {
	pids := make([]int, len(g.workers))
	for i, w := range g.workers {
		pids[i] = w.proc.PID()
	}
	return pids
}

// exited is the event that a worker of a group has ended.
type exited struct {
	g *group
	w *worker
}
