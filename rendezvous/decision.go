package rendezvous

// Decision is a policy's answer to a worker's exit.
type Decision string

// The decisions. The budget of restarts is counted here, for the whole run.
const (
	RestartCharged Decision = "restart"
	RestartFree    Decision = "restart-free"
	Permanent      Decision = "permanent"
	// RestartElsewhere is charged, and bars the node's name, so that another node takes its place.
	RestartElsewhere Decision = "elsewhere"
	// Shrink is charged; the world goes on without the node.
	Shrink Decision = "shrink"
	// Hold ends the workers and pauses the run.
	Hold Decision = "hold"
)

// consequence is the effect of a Decision on the run.
type consequence struct {
	charge bool // it spends one of MaxRestarts
	final  bool // the run fails, even with a budget left
	hold   bool // the run is paused
	leave  bool // the world goes on without the node
	bar    bool // no node of that name gets workers
}

// consequence returns the effect of d. A decision of a later version spends a restart.
func (d Decision) consequence() consequence {
	switch d {
	case RestartFree:
		return consequence{}
	case Permanent:
		return consequence{final: true}
	case Hold:
		return consequence{hold: true}
	case RestartElsewhere:
		return consequence{charge: true, leave: true, bar: true}
	case Shrink:
		return consequence{charge: true, leave: true}
	}
	return consequence{charge: true}
}
