package rendezvous

// Event is something that happened to a run. The events are Join, Attach, Detach,
// Ready, Failing, Success, Leave and Tick.
type Event interface{ event() }

// Join: a launcher has no workers and wants to be part of the next world. A member
// that was told to Stop joins again with the same ID.
type Join struct {
	Node   Node
	Params Params
	// Failures are the workers of the ended epoch that failed before they were stopped.
	Failures []Failure
	// Stopped is the epoch whose workers the node has ended as it was told to.
	Stopped EpochID
	// Seen is the newest epoch that the node has heard of, and Restarts what the run
	// had spent by then. They are for a daemon that was started again.
	Seen     EpochID
	Restarts int
	// Resume is set when the node has workers, or had some whose end the daemon may
	// not have heard of.
	Resume *Resume
}

// Attach: a request of the node has arrived and is being held open.
type Attach struct{ ID string }

// Detach: a held request has ended. Broken means that the connection closed under
// it: the kernel of the node, or of something between, said that nobody is there.
type Detach struct {
	ID     string
	Broken bool
}

// Ready: rank 0 has cleared its store and serves it at Addr:Port.
type Ready struct {
	ID string
	EpochID
	Addr string
	Port int
}

// Failing: a worker of the epoch ended and the node's policy decided.
type Failing struct {
	ID string
	EpochID
	Decision Decision
	Failures []Failure
}

// Success: all workers of the node's epoch exited with 0.
type Success struct {
	ID string
	EpochID
}

// Leave: the launcher goes away on purpose.
type Leave struct {
	ID       string
	Reason   string
	Failures []Failure
}

// Tick: time has passed; due when Round.Next says so.
type Tick struct{}

func (Join) event()    {}
func (Attach) event()  {}
func (Detach) event()  {}
func (Ready) event()   {}
func (Failing) event() {}
func (Success) event() {}
func (Leave) event()   {}
func (Tick) event()    {}

// Action is what the shell around a Round must carry out: either a new Directive
// for a node, or a Note for the log.
type Action struct {
	Node      string
	Directive *Directive
	Note      *Note
}

// Note is one line of the event log.
type Note struct {
	Event string `json:"event"`
	Round int    `json:"round"`
	Epoch int    `json:"epoch"`
	Node  string `json:"node,omitempty"`
	Text  string `json:"text,omitempty"`
	Nodes int    `json:"nodes,omitempty"`
	World int    `json:"world_size,omitempty"`
	// Term and Rank tell which member of the round's world departs; Rank is -1 in every other note.
	Term uint64 `json:"-"`
	Rank int    `json:"-"`
}
