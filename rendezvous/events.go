package rendezvous

import (
	"time"

	"dlrover-run/internal/job"
)

// Event is something that happened to a run. The events are Join, Attach, Detach, Silence, Unreachable, HungUp,
// Refused, Ready, Failing, Success, Stepped, Leaving, Leave, Cleared, Barred, Doubt, Order, Rewire, OtherRun, Slowed
// and Tick.
type Event interface{ event() }

// Join: a launcher has no workers and wants to be part of the next world. A member that got a Stop joins again with the
// same ID.
type Join struct {
	Node   Node   `json:"node"`
	Params Params `json:"params"`
	// Failures are the workers of the ended epoch that failed before they were stopped.
	Failures []job.Failure `json:"failures,omitempty"`
	// Stopped is the epoch whose workers the node has ended on request.
	Stopped job.EpochID `json:"stopped,omitzero"`
	// Seen is the newest epoch that the node knows, and Restarts the run's count by then. They are for a restarted daemon.
	Seen     job.EpochID `json:"seen,omitzero"`
	Restarts int         `json:"restarts,omitempty"`
	// Spent is the run's budget as an earlier daemon had sent it to the node, and Progress that of the workers of Stopped.
	Spent    *Spent       `json:"spent,omitempty"`
	Progress job.Progress `json:"progress,omitzero"`
	// Resume is set when the node has workers, or had some whose end the daemon may not know.
	Resume *Resume `json:"resume,omitempty"`
	// Paused and Barred come from a directive of an earlier daemon.
	Paused *job.Cause `json:"paused,omitempty"`
	Barred *job.Cause `json:"barred,omitempty"`
	// Command comes from a directive of an earlier daemon. OnResume is a command that was given in advance: that of the
	// node which opens the run counts.
	Command  *job.Command `json:"command,omitempty"`
	OnResume *job.Command `json:"on_resume,omitempty"`
	// Work is a digest of the node's own command, of MaxName bytes at most; "" from older launchers.
	Work string `json:"work,omitempty"`
}

// Attach: a request of the node has arrived and is being held open.
type Attach struct{ ID string }

// Detach: a held request has ended. Broken means that the connection closed under it: the kernel of the node, or a
// middlebox, reported that the process is gone.
type Detach struct {
	ID     string
	Broken bool
	// Silent means that the kernel of the node has given no sign of life for SuspectAfter before the connection broke.
	Silent bool
}

// Silence: the connection of the node's last request has broken as in Detach, while no request was open.
type Silence struct{ ID string }

// Unreachable: the host of the node, which is silent, has answered no new connection either since then, although it had
// answered before at the same address.
type Unreachable struct{ ID string }

// HungUp: the connection of the node's last request has closed while no request was open. It dials again if it lives.
type HungUp struct{ ID string }

// Refused: the connection of the node has broken, and its host refuses connections to Node.Life's port, at an address
// where the launcher itself had answered before.
type Refused struct{ ID string }

// Ready: rank 0 has cleared its store and serves it at Addr:Port, or its first worker will, according to the world's
// Place.
type Ready struct {
	ID string `json:"id"`
	job.EpochID
	Addr string `json:"addr,omitempty"`
	Port int    `json:"port,omitempty"`
}

// Failing: a worker of the epoch ended and the node's policy decided.
type Failing struct {
	ID string `json:"id"`
	job.EpochID
	Decision Decision      `json:"decision,omitempty"`
	Failures []job.Failure `json:"failures,omitempty"`
	Progress job.Progress  `json:"progress,omitzero"`
	// Tolerated: only these workers have ended; Left others of the node are left.
	Tolerated bool `json:"tolerated,omitempty"`
	Left      int  `json:"left,omitempty"`
	// Beside: as Tolerated, but of workers whose success is not the run's, so that a restart may follow.
	Beside bool `json:"beside,omitempty"`
}

// Success: all workers of the node's epoch exited with 0 or, with Ranks, only those of these ranks.
type Success struct {
	ID string `json:"id"`
	job.EpochID
	Ranks []int `json:"ranks,omitempty"`
}

// Stepped: a worker of the epoch has made its first step. Progress is zero from older launchers; others repeat it with
// news of checkpoints, also where nobody counts steps.
type Stepped struct {
	ID string `json:"id"`
	job.EpochID
	Progress job.Progress `json:"progress,omitzero"`
}

// Trains reports that the epoch has made a step.
func (e Stepped) Trains() bool { return e.Progress.Step > 0 || e.Progress == (job.Progress{}) }

// Aged is an event that is sent so long after it was made.
func Aged(ev Event, d time.Duration) Event {
	switch e := ev.(type) {
	case Failing:
		e.Progress = e.Progress.Aged(d)
		return e
	case Stepped:
		e.Progress = e.Progress.Aged(d)
		return e
	}
	return ev
}

// Leaving: the launcher will go away on purpose. Its workers still run, if it has any: those of all nodes are stopped
// at once, and the others go on without it. A Leave follows.
type Leaving struct {
	ID     string `json:"id"`
	Reason string `json:"reason,omitempty"`
	// Grace is how long it will be there at most.
	Grace time.Duration `json:"grace,omitempty"`
}

// Leave: the launcher goes away on purpose, or was killed, according to another process that knows.
type Leave struct {
	ID       string        `json:"id"`
	Reason   string        `json:"reason,omitempty"`
	Failures []job.Failure `json:"failures,omitempty"`
	// Killed: it is a loss, of a launcher alone and not of its host.
	Killed bool `json:"killed,omitempty"`
}

// Cleared: the check of a node has passed. It counts until Until, for as long as this launcher lives if that is zero.
type Cleared struct {
	ID    string    `json:"id"`
	Until time.Time `json:"until,omitzero"`
	// Domain labels nodes that are connected better with each other than with the rest, such as by NVLink: where no
	// topology is known they become neighbours in rank. "" is unknown; at most MaxName bytes count.
	Domain string `json:"domain,omitempty"`
	// Covered are the aspects of the node that the check has found to be sound, such as "network".
	Covered []string `json:"covered,omitempty"`
	// Unchecked: the node was let through without a check.
	Unchecked bool `json:"-"`
}

// Barred: the check of a node has failed. The bar ends with a check that passes.
type Barred struct {
	ID     string `json:"id"`
	Reason string `json:"reason,omitempty"`
	// Again: the check has proved nothing. The node waits, and is checked again where there is no world without it.
	Again bool `json:"again,omitempty"`
	// Aspect is the failed part, in a word, such as "network"; "" is one that no check can disprove.
	Aspect string `json:"aspect,omitempty"`
}

// Doubt: something has happened to a node that its check did not know of, so that it no longer counts.
type Doubt struct {
	ID     string `json:"id"`
	Reason string `json:"reason,omitempty"`
}

// OrderKind is the effect of an Order.
type OrderKind string

// The kinds of an Order.
const (
	OrderRestart OrderKind = "restart" // stop the workers of the world and start them anew
	OrderStop    OrderKind = "stop"    // end the run as failed
	OrderBar     OrderKind = "bar"     // no workers on the nodes of one name
	OrderUnbar   OrderKind = "unbar"   // end the bar of a name
	OrderPause   OrderKind = "pause"   // stop the workers; the launchers stay
	OrderResume  OrderKind = "resume"  // end a pause or a hold
	OrderDrain   OrderKind = "drain"   // have the nodes of one name leave, and bar the name
)

// Order comes from outside of the run: from an operator, or from a supervisor of the run.
type Order struct {
	Kind OrderKind `json:"kind"`
	// Node is the name of a node, for OrderBar, OrderUnbar and OrderDrain.
	Node string `json:"node,omitempty"`
	// Cause is one of CauseHang, CauseCheck, CauseOperator, CauseDeadline, CauseNoStep and CauseSlow; Text has the
	// details.
	Cause job.CauseKind `json:"cause,omitempty"`
	Text  string        `json:"text,omitempty"`
	// Charge: a restart spends one of the run's restarts; without one left the run fails.
	Charge bool `json:"charge,omitempty"`
	// Of, for OrderRestart, OrderStop and OrderDrain, is the epoch whose workers are meant: workers of another epoch are
	// left alone. Zero means any.
	Of job.EpochID `json:"of,omitzero"`
	// Least, for OrderDrain, refuses the order if the world that follows would have fewer nodes. It is not sent. 0 means
	// that a shortage is no reason.
	Least int `json:"-"`
	// Command, for OrderRestart, OrderPause and OrderResume, is the workers' command from their next start on.
	Command *job.Command `json:"command,omitempty"`
}

// Rewire: the topology has changed. It counts from the next seal.
type Rewire struct{ Topology Topology }

// OtherRun: the run with this ID waits for nodes at the same time; see Lack.With.
type OtherRun struct{ ID string }

// Slowed: the world of the epoch makes so many steps fewer in a second because of ranks that slow it; 0: none do.
type Slowed struct {
	job.EpochID
	Fewer float64
}

// Tick: time has passed; due at Round.Next.
type Tick struct{}

func (Join) event()        {}
func (Attach) event()      {}
func (Detach) event()      {}
func (Silence) event()     {}
func (HungUp) event()      {}
func (Unreachable) event() {}
func (Refused) event()     {}
func (Ready) event()       {}
func (Failing) event()     {}
func (Success) event()     {}
func (Stepped) event()     {}
func (Leave) event()       {}
func (Cleared) event()     {}
func (Barred) event()      {}
func (Doubt) event()       {}
func (Leaving) event()     {}
func (Order) event()       {}
func (Rewire) event()      {}
func (OtherRun) event()    {}
func (Slowed) event()      {}
func (Tick) event()        {}

// Action is a task for the shell around a Round: a new Directive for a node, a Note for the log, nodes to be checked,
// or the evidence about an ended epoch.
type Action struct {
	Node      string
	Directive *Directive
	Note      *Note
	// Gate are the IDs of nodes that have just got a Check; every one has to be answered with Cleared or Barred, by the
	// node itself or by the shell.
	Gate []string
	// Helpers are IDs of cleared nodes that have got a Check with those of Gate, only to help in examining them. They
	// are not waited for.
	Helpers []string
	// Released are IDs of nodes whose Check has just been replaced by another directive, before they answered. Nodes that
	// have gone are not included.
	Released []string
	// Ended is the evidence of an epoch that is over, once for each.
	Ended *EpochEvidence
}

// EpochEvidence is all that is known about the end of one epoch.
type EpochEvidence struct {
	job.EpochID
	job.Evidence
}

// Note is one line of the event log.
type Note struct {
	Event job.Event `json:"event"`
	Round int       `json:"round"`
	Epoch int       `json:"epoch"`
	Node  string    `json:"node,omitempty"`
	Text  string    `json:"text,omitempty"`
	Nodes int       `json:"nodes,omitempty"`
	World int       `json:"world_size,omitempty"`
	// Cause is that of a break.
	Cause job.CauseKind `json:"-"`
	// Aspect is that of a check that has failed, as in Barred.
	Aspect string `json:"-"`
	// Machine is that of the node, in the note of its join, and in that of an agent that may not have joined.
	Machine string `json:"-"`
	// ID is that of the launcher which departs, and "" in every other note. Term and Rank identify the member of the
	// round's world; Rank is -1 in every other note.
	ID   string `json:"-"`
	Term uint64 `json:"-"`
	Rank int    `json:"-"`
	// Members is the world by rank, in the note of its seal.
	Members []job.Member `json:"-"`
}
