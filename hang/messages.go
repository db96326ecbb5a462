package hang

import (
	"encoding/json"
	"time"

	"dlrover-run/internal/job"
)

// Report is the message of a node to the judge of its run. Every report has the present suspicions of the node; it
// may also have the evidence that the judge asked for.
type Report struct {
	// ID is that of the launcher, which only it and the service know. It proves that the report is its own, and is not
	// kept.
	ID    string      `json:"-"`
	Epoch job.EpochID `json:"epoch"`
	// Suspicions are all that hold now. Without any the workers of the node make progress, or may take their time:
	// earlier suspicions are withdrawn. They are to be repeated every RepeatEvery while they hold.
	Suspicions []Suspicion `json:"suspicions,omitempty"`
	// Paused is the longest time without progress after which a worker of this epoch on the node has resumed.
	Paused time.Duration `json:"paused,omitempty"`
	// Summary is how the workers are doing, see Summaries.
	Summary *Summary `json:"summary,omitempty"`
	// Ask is the Ask.Seq that this report answers, 0: none. Evidence is then of all workers of the node, one for each.
	Ask      uint64     `json:"ask,omitempty"`
	Evidence []Evidence `json:"evidence,omitempty"`
	// Store are the keys that are waited for in the workers' store, if this node serves it; with every answer.
	Store []StoreWait `json:"store,omitempty"`
	// RAS is the report of NCCL's RAS on this node.
	RAS string `json:"ras,omitempty"`
	// Partial is the reason if Evidence is less than was asked for.
	Partial string `json:"partial,omitempty"`
	// Facts are the answer to AskFacts and AskLink.
	Facts []Fact `json:"facts,omitempty"`
	// End is this end of a test of links, if AskFacts wants one: less than 3 KiB for the other end.
	End json.RawMessage `json:"end,omitempty"`
}

// Link is a test of the links between two nodes: what AskLink tells one of them.
type Link struct {
	Test  string          `json:"test"` // unique
	Key   []byte          `json:"key"`  // by which both ends know each other; nobody else has it
	Serve bool            `json:"serve,omitempty"`
	Peer  json.RawMessage `json:"peer"` // Report.End of the other one
}

// Fact is what a node knows of a part of itself while its workers train: a figure, or a fault in words.
type Fact struct {
	Kind  string  `json:"kind"`            // such as link.speed; hang/slow knows them
	Of    string  `json:"of,omitempty"`    // the part, such as eth0
	Value float64 `json:"value,omitempty"` // the figure
	Fault string  `json:"fault,omitempty"` // complete in itself
	Fatal bool    `json:"fatal,omitempty"` // the part is of no use
}

// How often a node reports. Jitter of a tenth spreads the reports of many nodes.
const (
	RepeatEvery  = 10 * time.Second
	SummaryEvery = 10 * time.Second
)

// summarized is how many nodes send a summary every SummaryEvery.
const summarized = 330

// Summaries is how often a node among so many sends a summary without news. The judge gets 33 a second of one run at
// most, because each costs a connection. From them it knows the progress of the foremost ranks, and the slow ones.
func Summaries(nodes int) time.Duration {
	return max(SummaryEvery, SummaryEvery*time.Duration(nodes)/summarized)
}

// Summary is the state of the workers of one node. Unknown values are 0.
type Summary struct {
	Steps    uint64        `json:"steps,omitempty"`     // of the worker that has made the fewest
	StepTime time.Duration `json:"step_time,omitempty"` // the median of the newest ones
	Age      time.Duration `json:"age,omitempty"`       // since the last progress of the worker that waits the longest
	Slow     string        `json:"slow,omitempty"`      // since when steps are slower here, in a line
	Looks    []RankLooks   `json:"looks,omitempty"`     // of workers with a page
}

// RankLooks is how one worker was found, since the node began to watch it.
type RankLooks struct {
	Rank  int    `json:"rank"`
	Steps uint64 `json:"steps"` // of its optimizers
	// For how long the node has watched it, how long the thread that trains was at work, ready or stopped meanwhile, and
	// how long it waited for a batch, all in milliseconds. Of a worker that waits for others both are short.
	Watched uint64       `json:"watched"`
	Busy    uint64       `json:"busy"`
	Data    uint64       `json:"data"`
	Groups  []GroupLooks `json:"groups,omitempty"` // 16 at most
}

// GroupLooks are the looks at a process group of a worker.
type GroupLooks struct {
	ID    uint64 `json:"id"`
	Begun uint64 `json:"begun"` // how many collectives
	Looks
}

// askKind is a kind of Ask.
type askKind string

// The kinds of an Ask.
const (
	// AskEvidence: three samples two seconds apart, stacks of all threads between them, and all else that is known.
	AskEvidence askKind = "evidence"
	// AskPages: one sample, without stacks.
	AskPages askKind = "pages"
	// AskStacks: one sample, the stacks of all threads and the flight recorder, of workers with or without a
	// suspicion.
	AskStacks askKind = "stacks"
	// AskFacts: the nodes of Ask.Nodes examine themselves, without any load on what the workers use.
	AskFacts askKind = "facts"
	// AskLink: the node To tests its links with another one.
	AskLink askKind = "link"
	// TellVerdict: the incident is decided; Line is the verdict, and Picture has the evidence.
	TellVerdict askKind = "verdict"
	// TellOver: the workers make progress again, or nothing hangs after all.
	TellOver askKind = "over"
)

// Topic is that of the notices that carry an Ask.
const Topic = "hang"

// Ask is a question or a notice of the judge to all nodes of a world at once. It is the body of a notice with the
// topic Topic, as JSON of less than 4 KiB, and the answer to a Report: a node may get it twice, and answers it once.
type Ask struct {
	// Seq grows with every Ask of a run, also from one service to the next, unless the clock of that one is behind.
	Seq      uint64      `json:"seq"`
	Judge    uint64      `json:"judge,omitempty"` // the number with which this service began
	Incident uint64      `json:"case"`            // the number of its incident
	Epoch    job.EpochID `json:"epoch"`
	What     askKind     `json:"what"`
	Nodes    []int       `json:"nodes,omitempty"`  // group ranks, of AskFacts and AskLink
	Listen   bool        `json:"listen,omitempty"` // of AskFacts: an AskLink may follow
	Link     *Link       `json:"link,omitempty"`
	To       string      `json:"-"` // the name of the only node that gets it; "": all do

	// Line is the text for people, of TellVerdict and TellOver.
	Line string `json:"line,omitempty"`
	// Of TellVerdict.
	Kind       Kind          `json:"kind,omitempty"`
	Confidence Confidence    `json:"confidence,omitempty"`
	Age        time.Duration `json:"age,omitempty"`      // since the last progress
	Suspects   []int         `json:"suspects,omitempty"` // their ranks, the first 64
	Waiting    string        `json:"waiting,omitempty"`  // the ranks that wait for them, as 0-1,3; the first of many
	// Action is the automatic consequence of the verdict.
	Action Action `json:"action,omitempty"`
	// Decided: there was no progress for so long that it counts as a hang, and is acted upon. Until then it is only
	// reported.
	Decided bool `json:"decided,omitempty"`
	// Again: all but the decision was reported before.
	Again bool `json:"again,omitempty"`
}

// Follows reports whether a is news to a node that has heard o: any Ask of another judge is.
func (a *Ask) Follows(o *Ask) bool { return a.Seq > o.Seq || a.Judge != o.Judge }

// Counts reports whether the verdict counts as a hang. An older judge sends only its action.
func (a *Ask) Counts() bool { return a.Decided || a.Action == ActRestart || a.Action == ActStop }

// Action is the reaction to a hang.
type Action string

// The actions of a Spec.
const (
	ActReport  Action = "report"  // nothing; people are notified
	ActRestart Action = "restart" // the workers are restarted; that spends a restart
	ActStop    Action = "stop"    // the run ends as failed
	ActCheck   Action = "check"   // Spec.Slow alone: a node that slows the job is compared with another one
	ActDrain   Action = "drain"   // Spec.Slow alone: a node that slows the job leaves
)

// State is the progress of an incident.
type State string

// The states of an incident.
const (
	StateIdle       State = "idle"       // nothing is suspected
	StateSuspected  State = "suspected"  // something is, and evidence will be asked for
	StateAsking     State = "asking"     // evidence is being collected
	StateWaiting    State = "waiting"    // it may take that long; it is looked at again later
	StateConfirming State = "confirming" // there is a verdict, which another look is to confirm
	StateDecided    State = "decided"    // the verdict was reported
	StateCollecting State = "collecting" // a user wants to see stacks; nothing is judged
)

// Picture is the known state of a run's hangs, for people, files and metrics.
type Picture struct {
	Spec  string `json:"spec"`
	State State  `json:"state"`
	// Incident is the newest one, 0 before any; Epoch, World and all below down to Evidence belong to it.
	Incident uint64      `json:"case,omitempty"`
	Epoch    job.EpochID `json:"epoch"`
	World    World       `json:"world"`
	Began    time.Time   `json:"began,omitzero"` // the first suspicion
	Since    time.Time   `json:"since,omitzero"` // the last progress, as the first suspicion had it
	// Suspicions are those that hold now, 64 at most; Suspecting is how many nodes have some.
	Suspicions []nodeSuspicion `json:"suspicions,omitempty"`
	Suspecting int             `json:"suspecting,omitempty"`
	// Verdict is the present result of the evidence; it counts when it is among Verdicts.
	Verdict Verdict `json:"verdict"`
	// Arrivals tell of late ranks in collectives; nil: unknown.
	Arrivals *Arrivals `json:"arrivals,omitempty"`
	// Asked nodes, those that have answered, and the first 64 group ranks of those that have not.
	Asked    int   `json:"asked,omitempty"`
	Answered int   `json:"answered,omitempty"`
	Silent   []int `json:"silent,omitempty"`
	// Collection is the Ask of the newest collection of stacks; Collected is set if Evidence is all of it.
	Collection uint64 `json:"collection,omitempty"`
	Collected  bool   `json:"collected,omitempty"`

	// Verdicts are the verdicts that were reported in this run, the newest last; 16 at most.
	Verdicts []Told `json:"verdicts,omitempty"`
	// Restarts are those for hangs in a row without progress between them.
	Restarts int `json:"restarts,omitempty"`
	// Pace is the progress of the workers; nil: unknown.
	Pace *Pace `json:"pace,omitempty"`
	// Slow tells whose steps are slower than before, as reported by their nodes; 64 at most.
	Slow []nodeText `json:"slow,omitempty"`
	// Slowed are the ranks that the others wait for in most steps; 16 at most.
	Slowed []Slowed `json:"slowed,omitempty"`

	// Evidence is by rank, without ranks that have none. It is left out unless it was asked for.
	Evidence []Evidence  `json:"evidence,omitempty"`
	Store    []StoreWait `json:"store,omitempty"`
	RAS      []nodeText  `json:"ras,omitempty"` // 16 at most
}

// Pace is the progress of an epoch by the newest summary of a node that counts steps.
type Pace struct {
	Epoch    job.EpochID   `json:"epoch"`
	Steps    uint64        `json:"steps"`     // since the start of the workers
	StepTime time.Duration `json:"step_time"` // the median of the newest ones
	At       time.Time     `json:"at"`        // of the last progress
}

// nodeSuspicion is a Suspicion of one node.
type nodeSuspicion struct {
	GroupRank int    `json:"group_rank"`
	Node      string `json:"node"`
	Suspicion
}

// nodeText is a text from one node.
type nodeText struct {
	GroupRank int    `json:"group_rank"`
	Node      string `json:"node"`
	Text      string `json:"text"`
}

// Told is a verdict that was reported.
type Told struct {
	Incident uint64      `json:"case"`
	Epoch    job.EpochID `json:"epoch"`
	At       time.Time   `json:"at"`
	Verdict  Verdict     `json:"verdict"`
	// Action is the consequence of the verdict: an action of the Spec, or stop because restarts did not help.
	Action Action `json:"action"`
	// Decided: it counts as a hang.
	Decided bool `json:"decided,omitempty"`
	// Withdrawn: the workers have made progress since.
	Withdrawn bool `json:"withdrawn,omitempty"`
}
