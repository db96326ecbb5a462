package hang

import "dlrover-run/hang/rankset"

// Ranks are all ranks of the world.
func (w World) Ranks() (s rankset.Set) {
	for _, n := range w.Nodes {
		for r := range n.Slots {
			s.Add(n.RankBase + r)
		}
	}
	return s
}

// Working is how many nodes have workers.
func (w World) Working() (n int) {
	for i := range w.Nodes {
		n += min(w.Nodes[i].Slots, 1)
	}
	return n
}

// SuspectRanks are the ranks of the suspects.
func (v Verdict) SuspectRanks() (s rankset.Set) {
	for _, suspect := range v.Suspects {
		s.Add(suspect.Rank)
	}
	return s
}
