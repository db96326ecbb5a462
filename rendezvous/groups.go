package rendezvous

import (
	"fmt"
	"slices"

	"dlrover-run/internal/text"
)

// MaxGroups bounds the replica groups of one run.
const MaxGroups = 256

// Group is a run's place among the replica groups of a larger run. Each group is a run of its own, with its own worlds
// and budget. The zero value is a run that is no such group.
type Group struct {
	Of    string `json:"of"`    // the ID of the larger run, at most MaxName bytes
	Index int    `json:"index"` // from 0
	Count int    `json:"count"` // of groups, from 2 to MaxGroups
	// Min is the number of groups without which the larger run cannot go on: if fewer are left, all end.
	Min int `json:"min"`
}

// GroupRun is the ID of the run of a group.
func GroupRun(of string, index int) string { return fmt.Sprintf("%s.g%d", of, index) }

func (g Group) validate() error {
	switch {
	case g == Group{}:
		return nil
	case g.Of == "" || len(g.Of) > MaxName || !text.Printable(g.Of):
		return fmt.Errorf("replica group of run %.100q: %s, 1 to %d bytes", g.Of, text.PrintableRule, MaxName)
	case g.Count < 2 || g.Count > MaxGroups || g.Index < 0 || g.Index >= g.Count || g.Min < 1 || g.Min > g.Count:
		return fmt.Errorf("replica group %d of %d, at least %d: need 2 to %d groups, counted from 0, and at least 1 of them",
			g.Index, g.Count, g.Min, MaxGroups)
	}
	return nil
}

func (g Group) text() string {
	if g.Of == "" {
		return "no replica groups"
	}
	return fmt.Sprintf("--replica-groups=%d, of which %d are needed", g.Count, g.Min)
}

// Occupied is what is known of a group when a node looks for one.
type Occupied struct {
	Nodes   int      // that are here, or on their way
	Gone    []string // names of nodes that have gone, and whose places nobody has taken
	Suspect []string // names of those of Nodes whose connections broke
	Over    bool     // the group takes no nodes any more
}

// PlaceIn chooses the group of a node, of which each has size nodes. A launcher that was started again comes back into
// the group of its node's name. Any other gets the group that it wishes (-1: none) if that lacks a node, else the group
// that lacks the fewest nodes. False: none lacks a node.
func PlaceIn(groups []Occupied, size int, name string, wish int) (index int, found bool) {
	best := -1
	for i, g := range groups {
		replaced := 0
		for _, s := range g.Suspect {
			if s == name {
				replaced++
			}
		}
		switch lacks := size - g.Nodes; {
		case g.Over:
		case replaced > 0 && lacks+replaced > 0, lacks > 0 && slices.Contains(g.Gone, name):
			return i, true
		case lacks <= 0 || best >= 0 && best == wish:
		case i == wish || best < 0 || lacks < size-groups[best].Nodes:
			best = i
		}
	}
	return max(best, 0), best >= 0
}
