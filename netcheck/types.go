// Package netcheck decides how the nodes of a job test each other before training, and which of them are at fault.
//
// Check is the state machine of the checks of one run. It plans the pairs (plan.go), judges the measurements
// (evidence.go, judge.go, verdict.go), and is pure: time and randomness come from the caller. A phase of pairs
// (pairs.go) tests nodes by TCP or with PyTorch alike. netcheck/probe measures, netcheck/python measures with the job's
// PyTorch, netcheck/node takes part for one node, netcheck/serve is the meeting point over HTTP.
package netcheck

import "time"

// Level is the extent of a check.
type Level string

// The levels of a check. Each includes those before it.
const (
	LevelLocal Level = "local" // every node by itself; nodes are not paired
	LevelHost  Level = "host"  // pairs of nodes test the network by TCP, and RDMA where its tools are
	LevelFull  Level = "full"  // pairs also compute and communicate with the job's PyTorch, where there is one
)

// Spec has the settings that all nodes of a run share. Its text (String, ParseSpec) travels in the rendezvous' Params.
type Spec struct {
	Level Level
	// Comm: when the pairs are done, all nodes that passed run one collective together. Needs LevelFull.
	Comm bool
	// ExcludeStraggler: a node that is slow, but works, is left out like a faulty one.
	ExcludeStraggler bool
	// ReportOnly: everything is measured and reported, and no node is excluded.
	ReportOnly bool
	// TTL is how long a pass holds; 0: as long as the node stays in the run.
	TTL time.Duration
	// Timeout bounds a check without PyTorch's import.
	Timeout time.Duration
}

// Defaults of a Spec, and the time for PyTorch's import in addition to its Timeout.
const (
	DefaultTTL     = 10 * time.Minute
	DefaultTimeout = 60 * time.Second
	ImportTimeout  = 120 * time.Second
)

// Node is one node as it introduces itself to a check, after its local checks.
type Node struct {
	ID   string `json:"id"`   // of the launcher, the rendezvous'
	Name string `json:"name"` // the node's name for people
	Addr string `json:"addr"` // where other nodes reach it
	// NICs are the interfaces to test, in rail order: the i-th of one node is tested against the i-th of the other.
	NICs []NIC `json:"nics,omitempty"`
	// Switch is the label of the leaf switch, and Domain that of the NVLink domain; "" is unknown.
	Switch string `json:"switch,omitempty"`
	Domain string `json:"domain,omitempty"`
	// GPUs is the number of devices that were found, Wants whether the user requires some.
	GPUs  int  `json:"gpus"`
	Wants bool `json:"wants,omitempty"`
	// Bare: no workers run there, so it needs no devices.
	Bare bool `json:"bare,omitempty"`
	// CPU is how much of its CPUs the node may use, in hundredths of one; 0 is unknown.
	CPU int `json:"cpu,omitempty"`
	// Torch is whether PyTorch can be used; NoTorch is the reason if not.
	Torch   bool   `json:"torch,omitempty"`
	NoTorch string `json:"no_torch,omitempty"`
	// RDMA: the tools for RDMA tests are there.
	RDMA bool `json:"rdma,omitempty"`
	// Covered are the aspects that the local checks have looked at.
	Covered []string `json:"covered,omitempty"`
	// Findings of the local checks. A fatal one decides: the node is not paired.
	Findings []Finding `json:"findings,omitempty"`
}

// NIC is one network interface of a node.
type NIC struct {
	Name string `json:"name"`
	Addr string `json:"addr"`               // IP address
	Mbps int    `json:"mbps,omitempty"`     // nominal speed in 10^6 bit/s; 0 is unknown
	MTU  int    `json:"mtu,omitempty"`      // bytes
	HCA  string `json:"hca,omitempty"`      // the RDMA device of the same port
	CC   string `json:"cc,omitempty"`       // TCP congestion control that its tests use
	Lo   int    `json:"loopback,omitempty"` // rate of this node's own loopback, in 10^6 bit/s
}

// Duty is the present task of a node.
type Duty string

// The duties of an Assignment.
const (
	Rest    Duty = "rest"    // nothing now; ask again
	Serve   Duty = "serve"   // open a listener for Peer, send Ready unless Told, take part in the test
	Dial    Duty = "dial"    // connect to Peer at Addrs and take part in the test
	Compute Duty = "compute" // measure this node's devices alone with PyTorch
	Join    Duty = "join"    // take part in a collective of World processes as Rank
	Decided Duty = "decided" // the check of this node is over: Verdict
)

// Assignment is the present duty of one node. Only the newest one counts.
type Assignment struct {
	Seq   uint64 `json:"seq"` // grows with every assignment of the node
	Duty  Duty   `json:"duty"`
	Round int    `json:"round,omitempty"` // from 1
	Test  string `json:"test,omitempty"`  // unique; both ends and their results name it
	Peer  Peer   `json:"peer,omitzero"`
	// Key is the secret that only the two ends of this test have got: each proves to the other that it has it.
	Key []byte `json:"key,omitempty"`
	// Left is how long the test may take from now. After it nothing of the test may be open any more.
	Left time.Duration `json:"left,omitempty"`
	// Quick: a shorter measurement will do.
	Quick bool `json:"quick,omitempty"`
	// Torch: the test is a collective of two (Serve is rank 0 and has the store), not one of TCP.
	Torch bool `json:"torch,omitempty"`
	// Told: the other end was given the addresses at which the serving one listens already, at the same time.
	Told bool `json:"told,omitempty"`
	// Of Join: the store is at Addrs[0] of the node with Rank 0, which gets Duty Join with Rank 0 first.
	Rank  int      `json:"rank,omitempty"`
	World int      `json:"world,omitempty"`
	Allow []string `json:"allow,omitempty"` // addresses of the others, for rank 0's store
	// Verdict is set for Decided.
	Verdict *Verdict `json:"verdict,omitempty"`
}

// Peer is the other end of a test.
type Peer struct {
	ID    string   `json:"id,omitempty"`
	Name  string   `json:"name,omitempty"`
	Addr  string   `json:"addr,omitempty"` // the only address from which it may come, in addition to those of NICs
	NICs  []NIC    `json:"nics,omitempty"`
	Addrs []string `json:"addrs,omitempty"` // host:port by rail, from the Ready of the serving end
}

// Class is the result of a test in one word.
type Class string

// The classes of a test's end. Those of Blameless are no evidence about the network or the other node.
const (
	OK          Class = ""
	Refused     Class = "refused"     // the connection was refused
	Unreachable Class = "unreachable" // no route, or no answer to the connection attempt
	Auth        Class = "auth"        // the other end did not prove the key
	Stalled     Class = "stalled"     // accepted, then no data for 2 s
	Reset       Class = "reset"       // the connection broke
	MTU         Class = "mtu"         // large packets get lost, small ones do not
	Silent      Class = "silent"      // this end did not report in time (made by the Check)
	Slow        Class = "slow"        // judged, not measured: below the line
	Lossy       Class = "lossy"       // judged: too many retransmissions
	Failed      Class = "failed"      // PyTorch's collective failed
	Own         Class = "own"         // the reporting end could not do its part: no file descriptors, no such address
	Canceled    Class = "canceled"    // something newer was to be done
)

// Result is the report of one end about one test.
type Result struct {
	Test  string `json:"test"`
	Class Class  `json:"class,omitempty"`
	Text  string `json:"text,omitempty"` // the error in words, one line, at most 512 bytes
	// Flows, by rail, count the data that this end has *received*, and its own knowledge of the data that it has sent.
	Flows []Flow `json:"flows,omitempty"`
	// Torch is of PyTorch's tests.
	Torch *TorchResult `json:"torch,omitempty"`
	// Findings are observations of this end about its own node so far: counters that have grown, tools that failed.
	Findings []Finding `json:"findings,omitempty"`
}

// AfterVerdict is the Test of a Result that has nothing but Findings: the node's observations at the time of its
// verdict.
const AfterVerdict = "verdict"

// Flow is one direction over one rail. Rates are in 10^6 bit/s of payload.
type Flow struct {
	Rail int    `json:"rail"`
	NIC  string `json:"nic"`
	Kind string `json:"kind,omitempty"` // "" TCP, "rdma"
	// Received by this end.
	Mbps float64 `json:"mbps,omitempty"` // mean after the warm-up
	// About the data that this end has sent.
	Retrans  float64 `json:"retrans,omitempty"` // share of segments that were sent again, 0 to 1
	Segments int     `json:"segments,omitempty"`
	CPUBound bool    `json:"cpu_bound,omitempty"` // this end's CPU was the limit, not the link
	// Median latency of 64 bytes there and back, in microseconds, and the largest datagram of the ladder that went through
	// undivided, in bytes (0: not tested).
	P50 float64 `json:"p50,omitempty"`
	MTU int     `json:"mtu,omitempty"`
}

// TorchResult is the result of PyTorch's tests on one node.
type TorchResult struct {
	Backend string `json:"backend,omitempty"` // nccl, gloo, ...
	Torch   string `json:"torch,omitempty"`   // versions
	Device  string `json:"device,omitempty"`  // cuda or cpu
	// Matmul is milliseconds a multiplication, by device.
	Matmul []float64 `json:"matmul,omitempty"`
	// AllReduce is milliseconds of one allreduce of Bytes, BusMBps the bus bandwidth in 10^6 byte/s.
	AllReduce float64 `json:"allreduce,omitempty"`
	Bytes     int64   `json:"bytes,omitempty"`
	BusMBps   float64 `json:"bus_mbps,omitempty"`
	// Latency is milliseconds of one allreduce of 1 MiB (256 KiB with gloo).
	Latency   float64 `json:"latency,omitempty"`
	Transport string  `json:"transport,omitempty"` // which NET NCCL chose
}

// State is a node's state after a check.
type State string

// The states of a verdict, and of a single probe. A node that could have been tested with others is OK only if it has
// passed with one.
const (
	StateOK             State = "ok"
	StateSlow           State = "slow" // it works, and is not left out
	StateFaulty         State = "faulty"
	StatePath           State = "path"   // the node is fine, a path from or to it is not
	StateLeaf           State = "leaf"   // its switch is cut off from the others
	StateIsland         State = "island" // it reaches only some others: a partition of the network
	StateUnattributable State = "unattributable"
	StateNotTested      State = "not tested"
	StateUndecided      State = "not decided" // tested, without a result that proves anything
	StateUnreachable    State = "unreachable" // no connection to it
)

// Severity of a Finding.
type Severity string

// The severities: a fatal finding excludes its node, a warning is only reported.
const (
	Info  Severity = "info"
	Warn  Severity = "warn"
	Fatal Severity = "fatal"
)

// Finding is one measurement or observation, with the value that it was compared with.
type Finding struct {
	Check     string   `json:"check"` // netcheck, switchbox, nvml, host, health, torch
	Kind      string   `json:"kind"`  // net.tx net.rx net.both net.loss net.mtu net.silent gpu.link ... host.nic compute
	Severity  Severity `json:"severity"`
	Entity    string   `json:"entity,omitempty"` // eth0, GPU 3, 0:1
	Metric    string   `json:"metric,omitempty"`
	Value     float64  `json:"value,omitempty"`
	Unit      string   `json:"unit,omitempty"`
	Threshold float64  `json:"threshold,omitempty"`
	Median    float64  `json:"median,omitempty"`
	Peer      string   `json:"peer,omitempty"`      // name of the node that measured with it
	Direction string   `json:"direction,omitempty"` // tx, rx
	Round     int      `json:"round,omitempty"`
	Text      string   `json:"text"` // in one line, for people, complete without the other fields
}

// Verdict is the result of a check for one node.
type Verdict struct {
	State      State   `json:"state"`
	Kind       string  `json:"kind,omitempty"`
	Confidence float64 `json:"confidence,omitempty"` // 0 to 1
	Partners   int     `json:"partners,omitempty"`   // number of other nodes with this evidence
	Excluded   bool    `json:"excluded,omitempty"`   // it is left out of the job
	// Again, with Excluded: nothing is proved against it. It waits to be checked once more, and is not marked.
	Again bool `json:"again,omitempty"`
	// Covered are the aspects of the node that were found to be sound.
	Covered []string `json:"covered,omitempty"`
	// Paired: it was tested against another node. A node is ok without that when there was none, or at LevelLocal.
	Paired   bool      `json:"paired,omitempty"`
	Reason   string    `json:"reason,omitempty"`   // in one line
	Findings []Finding `json:"findings,omitempty"` // at most MaxFindings
}

// Reaches reports whether the node has passed with another one, or had none to be tested with.
func (v Verdict) Reaches() bool {
	switch v.State {
	case StateOK, StateSlow:
		return true
	case StatePath:
		return v.Partners > 0
	}
	return false
}

// MaxFindings bounds the findings of a node.
const MaxFindings = 64
