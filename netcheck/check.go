package netcheck

import "time"

// Config of a Check.
type Config struct {
	Spec Spec
	Seed uint64 // of all its random choices
	// Topology names the leaf switch of a node, "" for unknown; nil knows none.
	Topology func(Node) string
}

// Check is the state machine of the checks of one run. It is not safe for concurrent use.
type Check struct{}

// New returns a Check without nodes.
func New(cfg Config) *Check { panic("to be written") }

// Step takes one event and returns what is to be done, in order.
func (c *Check) Step(now time.Time, ev Event) []Action { panic("to be written") }

// Next is when the Check next wants a Tick; zero: not before another event.
func (c *Check) Next() time.Time { panic("to be written") }

// Picture shows the present state.
func (c *Check) Picture() Picture { panic("to be written") }
