package netcheck

import (
	"time"

	"dlrover-run/internal/job"
)

// Event is something that happened to a Check.
type Event interface{ event() }

// The events of a Check.
type (
	// Expect: the rendezvous has told these nodes to be checked. Helpers hold a pass; they only help to test
	// the others, and are released as soon as no test needs them.
	Expect struct {
		IDs     []string
		Helpers []string
		Names   map[string]string // by ID, of known nodes: the name of a node that never comes
	}
	// Busy: an expected node is there and does its local checks, which may take as long as the Spec's Timeout.
	Busy struct{ ID string }
	// Arrive: a node begins a check. A node that arrives again has begun anew: its earlier work is void and blames
	// nobody.
	Arrive struct{ Node Node }
	// Listens: the node listens at Addrs, host:port by rail, for the next test in which it serves. Both ends of a test
	// that have said so lately get their assignments at once: the other end does not wait for Ready.
	Listens struct {
		ID    string
		Addrs []string
	}
	// Ready: the serving end of a test listens at Addrs, host:port by rail.
	Ready struct {
		ID, Test string
		Addrs    []string
	}
	// Report: one end's result. One that belongs to no open test is dropped.
	Report struct {
		ID     string
		Result Result
	}
	// Gone: the node has left the run, or has another directive than to be checked.
	Gone struct{ ID string }
	// Tick: the time that Next named has come.
	Tick struct{}
)

func (Expect) event()  {}
func (Busy) event()    {}
func (Arrive) event()  {}
func (Listens) event() {}
func (Ready) event()   {}
func (Report) event()  {}
func (Gone) event()    {}
func (Tick) event()    {}

// Action is one request of a Check: exactly one of Assign (for To), Silent (with Verdict) and Note is set.
type Action struct {
	// Assign gives the node To a new assignment. Key is left to the caller, which gives both ends of a test the same.
	Assign *Assignment
	To     string
	// Silent names a node that was expected and did not take part: it is to be barred without its help, for Verdict.
	Silent  string
	Verdict *Verdict
	// Note is for the run's timeline: check-began, check-round, check-verdict, device-fault or check-ended.
	Note *job.Note
}

// Picture is the state of a run's checks, for people and metrics.
type Picture struct {
	Spec    string        `json:"spec"`
	Phase   string        `json:"phase"` // idle, gathering, host, torch, comm
	Round   int           `json:"round"`
	Began   time.Time     `json:"began,omitzero"`
	Ended   time.Time     `json:"ended,omitzero"`
	Summary string        `json:"summary"` // in one line
	Nodes   []NodePicture `json:"nodes"`
	Pairs   []Pair        `json:"pairs"` // newest test of every pair and direction
	// Median is that of all pairs, in 10^6 bit/s; Line the rate below which a pair counts against its ends.
	Median float64 `json:"median_mbps,omitempty"`
	Line   float64 `json:"line_mbps,omitempty"`
	// Paths and groups that are at fault rather than a node.
	Paths []string `json:"paths,omitempty"`
}

// NodePicture is one node of a Picture.
type NodePicture struct {
	Node    Node    `json:"node"`
	Open    bool    `json:"open"` // not decided yet
	Verdict Verdict `json:"verdict"`
}

// Pair is one direction between two nodes, by their places in Picture.Nodes.
type Pair struct {
	From  int     `json:"from"`
	To    int     `json:"to"`
	Rail  int     `json:"rail,omitempty"`
	Round int     `json:"round"`
	Class Class   `json:"class,omitempty"`
	Mbps  float64 `json:"mbps,omitempty"`
	Loss  float64 `json:"loss,omitempty"`
	P50   float64 `json:"p50,omitempty"`
	Torch bool    `json:"torch,omitempty"` // Mbps is the bus bandwidth of the collective, times 8
}
