package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Level is the treatment of a marked node.
type Level string

// The levels. Every one but None also creates an event about the node, in namespace default.
const (
	None      Level = "none"
	Event     Level = "event"     // nothing else; the node does not remember it
	Condition Level = "condition" // condition ConditionType, for other programs to act on
	Taint     Level = "taint"     // taint Key with effect NoSchedule
	Cordon    Level = "cordon"    // spec.unschedulable

	// ExternalFault has NVSentinel take the node over; the node itself stays as it is.
	ExternalFault Level = "external-fault"
)

// level holds the properties of a Level.
type level struct {
	name   Level
	rights []right // in the order in which Allowed names them; none: it does nothing at all
	// manifest grants the rights.
	manifest string
	// note records in an entry the changes that the node n needs, where before is its record; nil: it leaves nothing to
	// undo on the node.
	note func(e *entry, n *node, before record)
	// apply marks the node, and Withdraw undoes that; nil: note does it, or nothing is to be done.
	apply func(*Client, context.Context, Mark) error
}

// levels are all of them, from the lowest to the highest.
var levels = []level{
	{name: None},
	{name: Event, manifest: "rbac-event.yaml", rights: []right{createEvents}},
	{name: Condition, manifest: "rbac-condition.yaml", rights: []right{getNodes, listNodes, patchStatus, createEvents},
		note: func(*entry, *node, record) {}},
	{name: Taint, manifest: "rbac-taint.yaml", rights: []right{getNodes, listNodes, patchNodes, createEvents},
		note: func(e *entry, n *node, before record) {
			_, present := n.taint()
			e.Tainted = before.any(tainted) || present == nil
		}},
	{name: Cordon, manifest: "rbac-taint.yaml", rights: []right{getNodes, listNodes, patchNodes, createEvents},
		note: func(e *entry, n *node, before record) { e.Cordoned = before.any(cordoned) || !n.Spec.Unschedulable }},
	{name: ExternalFault, manifest: "rbac-external-fault.yaml", apply: (*Client).report,
		rights: []right{listFaults, createFaults, patchFaults, deleteFaults, createEvents}},
}

// Levels are the names of all levels, from the lowest to the highest.
func Levels() (names []string) {
	for _, l := range levels {
		names = append(names, string(l.name))
	}
	return names
}

// ParseLevel returns the level of that name.
func ParseLevel(name string) (Level, error) {
	if l := Level(name); l.properties() != nil {
		return l, nil
	}
	last := len(levels) - 1
	return "", fmt.Errorf("unknown node action %q: want %s or %s", name, strings.Join(Levels()[:last], ", "),
		levels[last].name)
}

// properties returns nil for an unknown level.
func (l Level) properties() *level {
	if i := slices.IndexFunc(levels, func(p level) bool { return p.name == l }); i >= 0 {
		return &levels[i]
	}
	return nil
}

// Manifest names the file in docs/kubernetes with the rights of the level, which ParseLevel has returned.
func (l Level) Manifest() string { return l.properties().manifest }

// Undoable reports whether the level, which ParseLevel has returned, leaves changes that Remove or Withdraw undoes.
func (l Level) Undoable() bool { return l.properties().note != nil || l.properties().apply != nil }
