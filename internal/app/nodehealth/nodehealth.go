// Package nodehealth is the record of machines across jobs, and the policy that marks them. A Registry receives
// findings, such as a failed check, the ends of epochs and operators' commands. It returns Acts: a machine is to be
// marked, a mark is to be removed, or one is held back by the breaker. It is pure: no clock, no files, no goroutines. A
// Registry is not safe for use by several goroutines.
package nodehealth

import (
	"fmt"
	"maps"
	"time"

	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
)

// Kind is the class of a finding.
type Kind string

// The kinds of a Finding. One of a hard kind marks its machine at once: CheckFailed, Unkillable, Xid and ECC. A LogRule
// is only reported. All others are soft: Config.Repeats of them, of any soft kinds, mark.
const (
	CheckFailed Kind = "check-failed"     // a check of the node has failed
	Hang        Kind = "hang"             // a hung job waited for its workers
	Slow        Kind = "slow"             // its workers slow a job; once in each run
	Unkillable  Kind = "unkillable"       // its workers survive SIGKILL
	Repeated    Kind = "repeated-failure" // it is often the first to fail; Registry.Failed finds this
	Xid         Kind = "xid"              // its driver reports a broken device
	ECC         Kind = "ecc"              // the memory of a device has errors that nothing corrects
	Device      Kind = "device-error"     // a worker has failed because of its device; that may be the program's fault
	Silent      Kind = "silent"           // it has gone away without a word
	LogRule     Kind = "log-rule"         // a worker's output has matched a rule, for any reason
	operator    Kind = "operator"         // by an operator's command
)

// hard are the kinds that mark with one finding, and their description of a machine.
var hard = map[Kind]string{
	CheckFailed: "a check of the node has failed",
	Unkillable:  "workers on the node cannot be killed",
	Xid:         "a device of the node is broken",
	ECC:         "memory of a device of the node is broken",
}

// aspects are the defaults for findings without an Aspect, by the names that checks report as covered. No check can see
// anything of the other kinds.
var aspects = map[Kind]string{Xid: "xids", ECC: "memory", Device: "copies"}

// Bounds of a Registry.
const (
	MaxNodes    = 100_000 // machines; those that were not seen for longest go, but none that is marked
	MaxPerNode  = 16      // findings of one machine; the oldest go
	maxLogRules = 4       // of kind LogRule among them, so that they displace no other
	maxFindings = 1 << 15 // findings of all; the oldest go
	maxRuns     = 4096    // the one that was not heard of for longest goes
	maxRunsNode = 64      // concurrent runs of one machine
	MaxText     = 1024    // bytes of a text; longer ones are cut
	MaxKind     = 64      // bytes of a kind
)

// byPolicy is Mark.By of a mark that the policy has made.
const byPolicy = "policy"

// Finding is something that was found out about a machine.
type Finding struct {
	Node string    `json:"node"` // the machine's name; the node's where that is unknown
	Run  string    `json:"run,omitempty"`
	Kind Kind      `json:"kind"`
	Text string    `json:"text,omitempty"`
	At   time.Time `json:"at"` // zero: when the Registry hears of it
	// Aspect is the affected part, such as "network": a check that has found it sound disproves the finding. "" is the
	// default of the Kind, or a part that no check can see.
	Aspect string `json:"aspect,omitempty"`
	// Cleared: a check has disproved it, as the Registry has seen. It marks no more.
	Cleared bool `json:"cleared,omitempty"`
	// Mass: it was one of a mass verdict, as the Registry has seen, and does not count among Config.Repeats.
	Mass bool `json:"mass,omitempty"`
}

// Mark means that no new workers should be placed on a machine.
type Mark struct {
	Node     string `json:"node"`
	Kind     Kind   `json:"kind"`
	Aspect   string `json:"aspect,omitempty"`   // of the newest finding
	Reason   string `json:"reason"`             // in a few words
	Evidence string `json:"evidence,omitempty"` // the text of the newest finding
	// Run is the one whose finding has made the mark, which counts for that run's breaker.
	Run   string    `json:"run,omitempty"`
	Since time.Time `json:"since"`
	Until time.Time `json:"until,omitzero"` // zero: until it is cleared
	By    string    `json:"by"`             // byPolicy, or the operator
}

// heldMark is a mark that the breaker has held back.
type heldMark struct {
	Mark
	Why string `json:"why"` // why it was held back
}

// Do is the kind of an Act.
type Do string

// The kinds of an Act.
const (
	Apply  Do = "mark"   // Mark is new, or has changed
	Remove Do = "unmark" // Mark was there, and is not any more
	Hold   Do = "hold"   // Mark would have been made; nothing is to be done
)

// Act is a change to carry out, and to report.
type Act struct {
	Do   Do
	Mark Mark
	// Text is for the log and the timeline of Run, which is "" for an operator's acts.
	Text string
	Run  string
}

// Config are the rules of a Registry. Zero values are replaced by the defaults in brackets.
type Config struct {
	Expiry time.Duration // how long a mark of the policy lasts after its newest finding [4 h]
	Keep   time.Duration // how long findings, failures and unseen machines are remembered [7 days]
	// JobShare and JobLeast bound the marks that are there by findings of one run: a share of its machines, but at least
	// so many [0.05, 2].
	JobShare float64
	JobLeast int
	// ClusterShare and ClusterLeast bound the marks that are made in Window: a share of all machines that are known, but
	// at least so many [0.1, 2, 1 h].
	ClusterShare float64
	ClusterLeast int
	Window       time.Duration
	// MassWithin: when findings of one kind come within it about more than half of a run's machines, two at least, it is
	// not they that are broken: none is marked [2 min].
	MassWithin time.Duration
	// Repeats is the number of soft findings that mark. It is also how often a machine is the culprit of the last Of
	// failures of a run before it is suspect [3, 10].
	Repeats int
	Of      int
}

func (c Config) withDefaults() Config {
	orDefault(&c.Expiry, 4*time.Hour)
	orDefault(&c.Keep, 7*24*time.Hour)
	orDefault(&c.JobShare, 0.05)
	orDefault(&c.JobLeast, 2)
	orDefault(&c.ClusterShare, 0.1)
	orDefault(&c.ClusterLeast, 2)
	orDefault(&c.Window, time.Hour)
	orDefault(&c.MassWithin, 2*time.Minute)
	orDefault(&c.Repeats, 3)
	orDefault(&c.Of, 10)
	return c
}

func orDefault[T int | float64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// renewable reports whether a mark of the policy was renewed so long ago that a repeated finding renews it. Repetitions
// are not reported each time, but the mark may not expire meanwhile.
func (c Config) renewable(now time.Time, m *Mark) bool {
	return now.Sub(m.Until.Add(-c.Expiry)) >= min(sameWithin, c.Expiry/2)
}

// bound keeps a mark of the policy from lasting longer than it may, after a clock that was wrong.
func (c Config) bound(now time.Time, m *Mark) {
	if most := now.Add(c.Expiry); m.By == byPolicy && m.Until.After(most) {
		m.Until = most
	}
	if m.Since.After(now) {
		m.Since = now
	}
}

// Registry is the record of all machines. New and Restore make one.
type Registry struct {
	cfg   Config
	nodes nodeTable
	marks markTable
	runs  runTable
	swept time.Time // time of the last sweep; zero in an empty Registry
}

// New returns a Registry that knows nothing.
func New(cfg Config) *Registry {
	return &Registry{cfg: cfg.withDefaults(), nodes: newNodeTable(), marks: newMarkTable(), runs: newRunTable()}
}

// CheckName reports why a machine cannot be called so; nil: it can.
func CheckName(node string) error {
	if node == "" || len(node) > rendezvous.MaxName || !text.Printable(node) {
		return fmt.Errorf("node %.100q: need a name, %s, at most %d bytes", node, text.PrintableRule,
			rendezvous.MaxName)
	}
	return nil
}

// Line is of on one line of at most MaxText bytes.
func Line(of string) string { return text.Line(of, MaxText) }

// stamp is t as a Registry keeps it, so that a snapshot can hold it.
func stamp(t time.Time) time.Time { return t.UTC().Round(0) }

// node returns the record of a machine that was heard of now; nil: the name cannot be one, or there is no room.
func (g *Registry) node(now time.Time, name string) *record {
	r, gone := g.nodes.touch(now, name)
	g.runs.forget(gone)
	if r != nil {
		g.begin(now)
	}
	return r
}

// run returns a run that was heard of now. run must not be "".
func (g *Registry) run(now time.Time, run string) *job {
	g.begin(now)
	return g.runs.touch(now, run)
}

// begin starts the sweeps.
func (g *Registry) begin(now time.Time) {
	if g.swept.IsZero() {
		g.swept = now
	}
}

// Size sets the machines that take part in a run now, spares and those without workers included. None: the run is over.
// A run that lives longer than Config.Keep must be reported again in that time.
func (g *Registry) Size(now time.Time, run string, nodes []string) {
	now = stamp(now)
	if checkRun(run) != nil || run == "" || len(nodes) == 0 && g.runs.of[run] == nil {
		return
	}
	j := g.run(now, run)
	in := make(map[string]bool, len(nodes))
	for _, name := range nodes {
		r := g.node(now, name)
		if r != nil && (j.members[name] || g.runs.in[name] < maxRunsNode) {
			in[name] = true
		}
	}
	maps.DeleteFunc(in, func(name string, _ bool) bool { return g.nodes.of[name] == nil }) // forgotten to make room
	g.runs.setMembers(j, in)
}

// checkRun reports why a run cannot be called so. "" is not a run, and right for a finding that is of none.
func checkRun(run string) error {
	if len(run) > rendezvous.MaxName || !text.Printable(run) {
		return fmt.Errorf("run %.100q: %s, at most %d bytes", run, text.PrintableRule, rendezvous.MaxName)
	}
	return nil
}
