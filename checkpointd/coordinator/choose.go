package coordinator

import (
	"maps"
	"slices"
	"time"
)

// choice is a complete save, and the writer of each shard.
type choice struct {
	Save, Dir string
	Step      int64
	Writers   map[int]int // shard -> node
}

// candidate is a save while its holders are counted.
type candidate struct {
	choice
	shards int
	saved  time.Time
	copies map[int]bool // the shards that only a copy of another node can supply
	torn   bool         // the holders disagree about the save's step, directory or number of shards
}

// choose returns the newest complete save: all of its shards are held. Newest is by the time when the last holder saved
// it, then by step. A shard is written by the lowest node that holds it as its own, else by the lowest node with a
// copy. A save about which the holders disagree is left out. The result depends on the content of byNode only.
func choose(byNode map[int][]Holding) (choice, bool) {
	var best *candidate
	for _, c := range candidates(byNode) {
		if !c.torn && len(c.Writers) == c.shards && (best == nil || c.newer(best)) {
			best = c
		}
	}
	if best == nil {
		return choice{}, false
	}
	return best.choice, true
}

func candidates(byNode map[int][]Holding) map[string]*candidate {
	all := map[string]*candidate{}
	for _, node := range slices.Sorted(maps.Keys(byNode)) {
		for _, h := range byNode[node] {
			c := all[h.Save]
			if c == nil {
				c = &candidate{choice: choice{Save: h.Save, Dir: h.Dir, Step: h.Step, Writers: map[int]int{}},
					shards: h.Shards, copies: map[int]bool{}}
				all[h.Save] = c
			}
			c.add(node, h)
		}
	}
	return all
}

// add counts a holding; nodes come in ascending order.
func (c *candidate) add(node int, h Holding) {
	if h.Shards != c.shards || h.Step != c.Step || h.Dir != c.Dir || h.Shard < 0 || h.Shard >= h.Shards {
		c.torn = true
		return
	}
	if h.Saved.After(c.saved) {
		c.saved = h.Saved
	}
	if _, taken := c.Writers[h.Shard]; !taken || c.copies[h.Shard] && !h.Copy {
		c.Writers[h.Shard] = node
		if h.Copy {
			c.copies[h.Shard] = true
		} else {
			delete(c.copies, h.Shard)
		}
	}
}

func (c *candidate) newer(o *candidate) bool {
	if !c.saved.Equal(o.saved) {
		return c.saved.After(o.saved)
	}
	if c.Step != o.Step {
		return c.Step > o.Step
	}
	return c.Save > o.Save
}

// alone is an agreement of one node with itself.
func alone(node int, hs []Holding) (Plan, bool) {
	c, ok := choose(map[int][]Holding{node: hs})
	if !ok {
		return Plan{}, false
	}
	return plans(c)[node], true
}
