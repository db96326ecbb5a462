package hang

import (
	"iter"
	"time"

	"dlrover-run/internal/job"
)

// IncidentEvent is something that happened to an Incident.
type IncidentEvent interface{ incidentEvent() }

// The events of an Incident.
type (
	// Begin: the workers of an epoch run on these nodes. It voids all suspicions of the epoch before.
	Begin struct{ World World }
	// Heard: the node has reported. The report belongs to the epoch that has begun, and its evidence to ranks of the node.
	Heard struct {
		GroupRank int
		Report    Report
	}
	// Collect: a user wants to see stacks, with or without a suspicion.
	Collect struct{}
	// Examine: nodes are asked about themselves; the Ask gets its number.
	Examine struct{ Ask Ask }
	// Over: the epoch has ended.
	Over struct{ Epoch job.EpochID }
	// Tick: the time of Next is reached.
	Tick struct{}
)

func (Begin) incidentEvent()   {}
func (Heard) incidentEvent()   {}
func (Collect) incidentEvent() {}
func (Examine) incidentEvent() {}
func (Over) incidentEvent()    {}
func (Tick) incidentEvent()    {}

// Effect is what an Incident wants done: exactly one of Ask, Note, Order and Doubt is set.
type Effect struct {
	// Ask is for all nodes of the world.
	Ask *Ask
	// Note is for the run's timeline: hang-suspected, hang-verdict, hang-decided or hang-withdrawn.
	Note *job.Note
	// Order is to be given to the run.
	Order *Order
	// Doubt: the network of all nodes is to be checked when it is checked next, for this reason.
	Doubt string
}

// Order ends an epoch.
type Order struct {
	Action Action // ActRestart, which spends a restart, or ActStop
	Epoch  job.EpochID
	Text   string
}

// IncidentConfig is the configuration of an Incident.
type IncidentConfig struct {
	Spec Spec
	// Seq is larger than every number that an earlier judge of the run has given.
	Seq uint64
	// Kept is what an earlier judge had to say.
	Kept Kept
	// Judge makes the verdict of evidence, which is made as it is asked for.
	Judge func(World, iter.Seq[Evidence], []StoreWait) Verdict
	// Saved is the run's newest checkpoint; false: none is known. Nil knows none. It must not block.
	Saved func() (step int64, known bool)
}

// How long things take. Times are those between the judge's own events.
const (
	askTime     = 10 * time.Second // for evidence; a node without an answer by then counts as without data
	pagesTime   = 5 * time.Second  // for one sample of every worker
	collectTime = 15 * time.Second // for stacks that a user wants to see
	confirmWait = 10 * time.Second // between the first suspicion and the confirmation, at least
	freshTime   = 15 * time.Second // evidence that is older is asked for again before a verdict is confirmed
	lookAhead   = 6 * time.Second  // before a deadline for a look, to have its evidence in time
	firstWait   = 20 * time.Second // before another look at a rank that may take its time; it doubles with each
	longestWait = 5 * time.Minute
	actLate     = 3 * time.Minute  // without progress, before anything is done about a verdict that may still be wrong
	steadyTime  = 90 * time.Second // likewise, before an unchanged finding is reported, unless the user wants less
	lowWait     = time.Minute      // likewise of low confidence, if the user wants less than actLate
	staleTime   = 35 * time.Second // after which a suspicion that is not repeated counts as withdrawn
	sweepEvery  = 5 * time.Second
	keepTime    = 10 * time.Minute // how long evidence is kept without a reader
	longEpoch   = 10 * time.Minute // workers that lived as long have made some steps, if these are not known
)

// Bounds.
const (
	longestPause  = time.Hour // the most that counts of a pause
	maxFruitless  = 3         // restarts for hangs without progress between them; then the run is stopped
	maxTold       = 16        // verdicts that are kept
	maxRetold     = 3         // verdicts of one incident that are reported
	maxListed     = 64        // entries of a list for people
	maxRAS        = 16
	maxAsks       = 12 // that may follow each other closely
	askEvery      = 15 * time.Second
	maxSamples    = 6 // of one worker
	maxStoreWaits = 256
)
