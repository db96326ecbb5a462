package hang

import (
	"time"

	"dlrover-run/internal/job"
)

// Worker is one process that trains. Start distinguishes it from another one that has got its pid.
type Worker struct {
	Rank  int    `json:"rank"`
	Local int    `json:"local"`
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since the boot, field 22 of /proc/PID/stat
}

// Proc is the kernel's data about a process. Times and counts grow.
type Proc struct {
	// Thread is the one that trains, where that is known not to be the process's main thread, which 0 stands for. State
	// (but for the states of whole processes), MainCPU, MainWait, Switches and WChan are of that thread.
	Thread   int           `json:"thread,omitempty"`
	State    byte          `json:"state"`     // of the main thread: R S D T t Z X, I for idle; 0: it is gone
	CPU      time.Duration `json:"cpu"`       // of all its threads, user and system
	MainCPU  time.Duration `json:"main_cpu"`  // of its main thread
	MainWait time.Duration `json:"main_wait"` // for which its main thread was ready and had no CPU
	TreeCPU  time.Duration `json:"tree_cpu"`  // of its descendants, living and reaped
	Switches uint64        `json:"switches"`  // context switches of its main thread, voluntary or not
	IO       uint64        `json:"io"`        // bytes read and written, sockets and pipes included (rchar + wchar)
	TreeIO   uint64        `json:"tree_io"`   // and by its living descendants
	Net      uint64        `json:"net"`       // bytes of TCP connections, while it is quiet; not the store's
	WChan    string        `json:"wchan"`     // where the kernel has put the main thread to sleep; "" if unknown
	Threads  int           `json:"threads"`   // how many it has
	DThreads int           `json:"d_threads"` // how many of them are in uninterruptible sleep
}

// Phase is the work of a worker, as far as the shim or the names in a stack show it.
type Phase uint8

// The phases. Their numbers are part of the page's format.
const (
	PhaseUnknown    Phase = iota
	PhaseTrain            // between two optimizer steps
	PhaseInit             // a process group, a rendezvous
	PhaseData             // a batch is waited for
	PhaseCompile          // torch.compile, Triton
	PhaseBuild            // an extension is built (DeepSpeed's ops, torch.utils.cpp_extension)
	PhaseEval             // evaluation, validation, generation
	PhaseCheckpoint       // a checkpoint is written or read
	PhaseEnd              // the interpreter is ending
	PhaseDebug            // a person looks at it in a debugger
	phases
)

// Page is the report of the shim in a worker. See page.Read for the format.
type Page struct {
	PID       int           `json:"pid"`
	Start     uint64        `json:"start"`
	Rank      int           `json:"rank"`
	WorldSize int           `json:"world_size"`
	Local     int           `json:"local"`
	Created   time.Duration `json:"created"`
	// Heartbeat is when the shim's thread last ran: it cannot while another one holds the interpreter's lock (GIL).
	Heartbeat  time.Duration `json:"heartbeat"`
	Steps      uint64        `json:"steps"`     // of optimizers: events, not the job's own step number
	LastStep   time.Duration `json:"last_step"` // 0: none yet
	Thread     int           `json:"thread"`    // that has made it, or the process group before; 0: unknown
	Phase      Phase         `json:"phase"`
	PhaseSince time.Duration `json:"phase_since"`
	// Blocked is for how long checkpoints have kept that thread from training since the first step.
	Blocked time.Duration `json:"-"`
	Groups  []GroupState  `json:"groups,omitempty"`
	// StepTimes are the ends of the newest steps, and Spans the newest phases that have ended, each the oldest first.
	StepTimes []time.Duration `json:"step_times,omitempty"`
	Spans     []Span          `json:"spans,omitempty"`
}

// GroupState is the progress of a worker in one process group. Seq counts its collectives; it begins anywhere, the
// same for all members, and grows by one with each of them.
type GroupState struct {
	ID    uint64        `json:"id"` // of a Group
	Seq   uint64        `json:"seq"`
	Since time.Duration `json:"since"` // when the shim saw Seq change last
	Looks Looks         `json:"-"`
}

// Looks are sums over the steps of a worker in which the shim has looked at a process group, at random moments. The
// position of a look is the share of the step's collectives that had begun, less the share of the step's time that was
// over. It needs no other clock, so positions of members compare: one that the others wait for is behind.
//
// In a page the sums wrap around, at 2^32 and Full at 2^16; in a RankLooks they are those of the watcher's time.
type Looks struct {
	Steps     uint64 `json:"steps"`     // that had looks, and took about as long as others
	Positions uint64 `json:"positions"` // the mean of each step plus 1, in units of 2^-16
	Squares   uint64 `json:"squares"`   // of the means, in units of 2^-16
	// Full is the share of each step's looks at which all its collectives had begun, in units of 2^-6.
	Full uint64 `json:"full"`
}

// Since are the looks since an earlier page.
func (l Looks) Since(o Looks) Looks {
	return Looks{uint64(uint32(l.Steps - o.Steps)), uint64(uint32(l.Positions - o.Positions)),
		uint64(uint32(l.Squares - o.Squares)), uint64(uint16(l.Full - o.Full))}
}

// Plus are both looks.
func (l Looks) Plus(o Looks) Looks {
	return Looks{l.Steps + o.Steps, l.Positions + o.Positions, l.Squares + o.Squares, l.Full + o.Full}
}

// Span is a phase that has ended.
type Span struct {
	Phase Phase         `json:"phase"`
	From  time.Duration `json:"from"`
	To    time.Duration `json:"to"`
}

// Group is a process group as one of its members knows it.
type Group struct {
	ID      uint64 `json:"id"`   // a hash of name and members, the same in all of them
	Name    string `json:"name"` // c10d's
	Desc    string `json:"desc,omitempty"`
	Backend string `json:"backend"`
	Ranks   string `json:"ranks"` // the global ranks of its members, as 0-3,8
}

// Sample is one look at a worker.
type Sample struct {
	Worker
	At   time.Duration `json:"at"`
	Proc Proc          `json:"proc"`
	Page *Page         `json:"page,omitempty"` // nil: there is no shim, or it has not claimed a page
}

// Frame is one function of a stack. Unknown fields are "" or 0.
type Frame struct {
	Func string `json:"func"`
	File string `json:"file,omitempty"` // of native code the library, unless the source is known
	Line int    `json:"line,omitempty"`
}

// Thread is one thread of a process. Frames begin with the innermost.
type Thread struct {
	TID    int     `json:"tid"`
	Name   string  `json:"name,omitempty"`
	State  byte    `json:"state,omitempty"`
	Main   bool    `json:"main,omitempty"` // it trains: the process's main thread, unless Stacks.Lead knows better
	GIL    bool    `json:"gil,omitempty"`  // it holds the interpreter's lock
	Python []Frame `json:"python,omitempty"`
	Native []Frame `json:"native,omitempty"`
	// Approximate: Native was found by a search of the stack for return addresses; lower frames may be old ones.
	Approximate bool `json:"approximate,omitempty"`
}

// Stacks are all threads of a process, the main one first.
type Stacks struct {
	Interpreter string   `json:"interpreter,omitempty"` // such as CPython 3.11.2; "" is no Python
	Threads     []Thread `json:"threads,omitempty"`
	// Children are the main threads of descendants, such as those that load data, with their pids and names. Of a
	// process that waits for other ranks they are not read.
	Children []Thread `json:"children,omitempty"`
	Error    string   `json:"error,omitempty"` // why there is nothing, or not all
}

// Work is the repeated work of a worker since its last progress, although its main thread rests.
type Work string

// The kinds of Work.
const (
	workNone  Work = ""
	workWakes Work = "wakes"   // its main thread looks for something, time and again
	workIO    Work = "io"      // it reads or writes
	workNet   Work = "network" // it sends or receives
	workChild Work = "child"   // a descendant computes, reads or writes
)

// Evidence is one node's data about one worker for an Incident.
type Evidence struct {
	Worker
	Node      string   `json:"node"` // its name for people
	GroupRank int      `json:"group_rank"`
	Samples   []Sample `json:"samples,omitempty"` // seconds apart, the oldest first
	Work      Work     `json:"work,omitempty"`
	Groups    []Group  `json:"groups,omitempty"`
	Stacks    *Stacks  `json:"stacks,omitempty"`  // shared between workers that have the same; nil: not collected
	Sockets   []string `json:"sockets,omitempty"` // its ends, host:port, of connections to the workers' store
	Flight    *Flight  `json:"flight,omitempty"`  // PyTorch's flight recorder; nil: there is none
	Log       string   `json:"log,omitempty"`     // the end of its output, as far as the launcher keeps it
	// Exception has ended its main thread, as ValueError: text, and its other threads go on.
	Exception string `json:"exception,omitempty"`
	Error     string `json:"error,omitempty"` // why there is nothing, or not all
}

// StoreWait is a key of the workers' store that is waited for and not set.
type StoreWait struct {
	Key     string        `json:"key"`
	Age     time.Duration `json:"age"`     // since the first of Waiters began
	Waiters []string      `json:"waiters"` // host:port of their connections; 64 at most
	More    int           `json:"more,omitempty"`
}

// Flight is the end of one rank's flight recorder: its collectives that are not completed, and the newest that is, by
// process group.
type Flight struct {
	Entries []FlightEntry `json:"entries,omitempty"`
}

// FlightEntry is one collective as PyTorch's flight recorder has it.
type FlightEntry struct {
	Group   string `json:"group"` // c10d's name of the process group
	Desc    string `json:"desc,omitempty"`
	Seq     uint64 `json:"seq"`
	Op      string `json:"op"`    // such as all_reduce
	State   string `json:"state"` // scheduled, started or completed
	Sizes   string `json:"sizes,omitempty"`
	DType   string `json:"dtype,omitempty"`
	IsP2P   bool   `json:"p2p,omitempty"`
	Timeout int64  `json:"timeout_ms,omitempty"`
}

// World is the set of workers of an epoch.
type World struct {
	Epoch job.EpochID `json:"epoch"`
	Nodes []WorldNode `json:"nodes"` // by group rank
	// Elsewhere is how many other ranks the job has. They never have data.
	Elsewhere int `json:"elsewhere,omitempty"`
}

// WorldNode is one node of a World: its workers have the ranks from RankBase to RankBase+Slots-1.
type WorldNode struct {
	Name     string `json:"name"`
	RankBase int    `json:"rank_base"`
	Slots    int    `json:"slots"`
}

// Suspicion is that a worker makes no progress.
type Suspicion struct {
	Rank int `json:"rank"`
	// Age is how long it has made none, and Limit the normal time for it.
	Age   time.Duration `json:"age"`
	Limit time.Duration `json:"limit"`
	Why   string        `json:"why"` // in a few words
	// Starved: the observer itself did not run for a good part of Age.
	Starved time.Duration `json:"starved,omitempty"`
}

// age leaves out the time without a look.
func (s Suspicion) age() time.Duration { return max(max(s.Age, 0)-max(s.Starved, 0), 0) }

// Kind is the subject of a Verdict.
type Kind string

// The kinds of verdicts.
const (
	KindNone     Kind = ""         // nothing hangs, or there is no result
	KindMissing  Kind = "missing"  // a rank has not joined the process group that the others wait in
	KindBehind   Kind = "behind"   // a rank does not enter the collective that the others wait in, and does nothing
	KindStopped  Kind = "stopped"  // as behind: it is stopped, by a signal or a debugger
	KindBlocked  Kind = "blocked"  // as behind: it sleeps in the kernel, uninterruptibly
	KindBusy     Kind = "busy"     // as behind: it computes, reads or writes, longer than its phase may
	KindMismatch Kind = "mismatch" // ranks are in different collectives at the same place
	KindComm     Kind = "comm"     // all are in the same collective, and it does not end: network, device or library
	KindDeadlock Kind = "deadlock" // process groups wait for each other in a circle
	KindAlone    Kind = "alone"    // a worker without waiters makes no progress beyond its phase's deadline
	KindSlow     Kind = "slow"     // progress is made, far slower than before; it is only reported
)

// Confidence is how far a Verdict can be trusted: that the others wait for these ranks. Only time shows whether they
// go on again, unless the verdict is Certain.
type Confidence string

// The confidences.
const (
	High Confidence = "high"
	Low  Confidence = "low" // Verdict.Doubt has the reason
)

// Verdict is the result of Judge.
type Verdict struct {
	Kind       Kind          `json:"kind"`
	Confidence Confidence    `json:"confidence,omitempty"`
	Doubt      string        `json:"doubt,omitempty"`
	Age        time.Duration `json:"age,omitempty"` // since the last progress, by the node that suspected first
	Suspects   []Suspect     `json:"suspects,omitempty"`
	// Waiting are the ranks that wait for the suspects, as 0-1,3; In is their operation, such as all_reduce #246.
	Waiting string `json:"waiting,omitempty"`
	In      string `json:"in,omitempty"`
	Group   string `json:"group,omitempty"` // the process group's name, if it is not the default one
	// Elsewhere is World.Elsewhere.
	Elsewhere int    `json:"elsewhere,omitempty"`
	NoData    string `json:"no_data,omitempty"` // ranks without data
	Phase     Phase  `json:"phase,omitempty"`
	// Deadline is when, counted from the last progress, the verdict may be acted upon; longer for phases that may last.
	Deadline time.Duration `json:"deadline,omitempty"`
	// Tell is when, counted likewise, it may be reported if it is confirmed: never later than Deadline. A rank that
	// may be at work, or may recover, is reported long before any action.
	Tell time.Duration `json:"tell,omitempty"`
	// Certain: it cannot end by itself, so nothing is gained by waiting beyond Deadline.
	Certain bool `json:"certain,omitempty"`
	// Line is the whole verdict in one line, for people: rank 2 (node 1 gpu-07) hung for 31 s: asleep in load_batch
	// at data.py:12; ranks 0-1,3 wait in all_reduce #246.
	Line string `json:"line"`
}

// Suspect is a rank that the others wait for.
type Suspect struct {
	Rank      int    `json:"rank"`
	Node      string `json:"node"`
	GroupRank int    `json:"group_rank"`
	PID       int    `json:"pid"`
	Doing     string `json:"doing"`               // asleep, stopped, computing, waiting in all_gather ...
	Where     Frame  `json:"where"`               // the innermost frame that is the user's own, if there is one
	Exception string `json:"exception,omitempty"` // see Evidence
	Phase     Phase  `json:"phase,omitempty"`
}
