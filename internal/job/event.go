package job

// Event names an event of a run, in its timeline and in event logs: docs/reference/run-events.md explains each. The
// kinds of causes with which a node departs and the outcomes of a run are names of events, too.
type Event string

// The events of a rendezvous.
const (
	EventJoin          Event = "join"
	EventLastCall      Event = "last-call"
	EventSeal          Event = "seal"
	EventRun           Event = "run"
	EventTopology      Event = "topology"
	EventRankFailed    Event = "rank-failed"
	EventNodeSucceeded Event = "node-succeeded"
	EventBreak         Event = "break"
	EventBackOff       Event = "back-off"
	EventCost          Event = "cost"
	EventHeld          Event = "held"
	EventLeaving       Event = "leaving"
	EventSuspect       Event = "suspect"
	EventAddress       Event = "address"
	EventRefused       Event = "refused"
	EventOtherRun      Event = "other-run"
	EventTooFew        Event = "too-few"
	EventLate          Event = "late"
	EventResume        Event = "resume"
	EventResumed       Event = "resumed"
	EventOrder         Event = "order"
	EventCommand       Event = "command"
	EventGate          Event = "gate"
	EventGateOpened    Event = "gate-opened"
	EventCleared       Event = "cleared"
	EventRecheck       Event = "recheck"
	EventBarred        Event = "barred"
	EventUndecided     Event = "undecided"  // the check of a node has proved nothing
	EventLateCheck     Event = "late-check" // that of a node which has workers already did not pass

	EventNodeLoss  = Event(CauseLoss)
	EventNodeLeave = Event(CauseLeave)
	EventSucceeded = Event(Succeeded)
	EventFailed    = Event(Failed)
)

// The events of checks of nodes, of log rules, of hangs, of slow ranks, of streams and of marks of nodes.
const (
	EventCheckBegan    Event = "check-began"
	EventCheckRound    Event = "check-round"
	EventCheckVerdict  Event = "check-verdict"
	EventCheckEnded    Event = "check-ended"
	EventDeviceFault   Event = "device-fault"
	EventLogRule       Event = "log-rule"
	EventNodeError     Event = "node-error" // an agent of DLRover blames its own node
	EventHangSuspected Event = "hang-suspected"
	EventHangVerdict   Event = "hang-verdict"
	EventHangDecided   Event = "hang-decided"
	EventHangWithdrawn Event = "hang-withdrawn"
	EventSlowFound     Event = "slow-found"
	EventSlowOver      Event = "slow-over"
	EventSlowChecked   Event = "slow-checked"
	EventExec          Event = "exec"
	EventExecEnded     Event = "exec-ended"
	EventNodeMarked    Event = "node-marked"
	EventNodeUnmarked  Event = "node-unmarked"
	EventNodeMarkHeld  Event = "node-mark-held"
)

// Note is one line of the run's timeline, about checks or hangs.
type Note struct {
	Event Event
	Node  string // name, or ""
	Text  string
}
