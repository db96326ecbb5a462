package netcheck

import "time"

// roster has the nodes of a check.
type roster struct {
	nodes   []*node          // of the present or last check, in order of first contact; including those that have gone
	byID    map[string]*node // without those that have gone
	open    int              // nodes that are here, or are expected to be checked, and not decided
	missing [2]int           // expected nodes: to be checked, helpers
	local   int              // of these, those that are known to do their local checks
	absent  fifo[*node]      // expected after gathering, by due
	changed time.Time        // the set of nodes that are expected or here, while gathering
}

// successor is the roster of the next check: nodes that this one still expects stay expected.
func (r *roster) successor(now time.Time) roster {
	next := roster{byID: map[string]*node{}, changed: now}
	for _, n := range r.nodes {
		if n.state == expected && !n.helper {
			n.due = time.Time{}
			next.enlist(n)
		}
	}
	return next
}

// enlist adds a node to the check.
func (r *roster) enlist(n *node) *node {
	r.nodes = append(r.nodes, n)
	r.byID[n.ID] = n
	r.count(n, +1)
	return n
}

// count keeps the numbers of nodes that the check waits for. It is not over before they are decided, except helpers
// that have not come.
func (r *roster) count(n *node, by int) {
	if n.state == expected && n.local {
		r.local += by
	}
	switch {
	case n.state == expected && n.helper:
		r.missing[1] += by
	case n.state == expected:
		r.missing[0] += by
		r.open += by
	case n.state == here:
		r.open += by
	}
}

// become changes the state of a node.
func (r *roster) become(n *node, state nodeState) {
	r.count(n, -1)
	n.state = state
	r.count(n, +1)
}

// here are the nodes that have come and are not decided, and fit.
func (r *roster) here(fit func(*node) bool) (nodes []*node) {
	for _, n := range r.nodes {
		if n.present() && fit(n) {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// firstAbsent is the next expected node to become silent, or nil.
func (r *roster) firstAbsent() *node {
	for r.absent.len() > 0 {
		if n := r.absent.items[r.absent.head]; n.state == expected && !n.due.IsZero() {
			return n
		}
		r.absent.pop()
	}
	return nil
}

// await gives an expected node its time.
func (r *roster) await(n *node, gathering bool, now time.Time) {
	if gathering {
		r.changed = now
	} else if !n.helper {
		r.makeAbsent(n, now.Add(gatherMost+absentTime))
	}
}

// makeAbsent waits until due for an expected node, after gathering.
func (r *roster) makeAbsent(n *node, due time.Time) {
	n.due = due
	r.absent.push(n)
}

// isBusy gives an expected node the time that local checks may take: it is not silent.
func (r *roster) isBusy(id string, due time.Time) {
	n := r.byID[id]
	if n == nil || n.state != expected || n.local {
		return
	}
	n.local = true
	r.local++
	if !n.due.IsZero() {
		n.due = due
	}
}

// withHelpers reports whether a helper takes part.
func (r *roster) withHelpers() bool {
	for _, n := range r.nodes {
		if n.helper && n.state != expected {
			return true
		}
	}
	return false
}

// gatherUntil is when gathering, which has begun at began, ends if no other node comes. It waits for nodes that are
// known to do their local checks, which take at most local.
func (r *roster) gatherUntil(began time.Time, local time.Duration) time.Time {
	if r.local > 0 {
		return began.Add(max(gatherMost, local+absentTime))
	}
	wait := gatherQuiet
	switch {
	case r.missing == [2]int{}:
		wait = 0
	case r.missing[0] == 0:
		wait = helperTime
	}
	return sooner(began.Add(gatherMost), r.changed.Add(wait))
}

// listens notes where a node listens for its next test.
func (r *roster) listens(ev Listens, now time.Time) {
	if n := r.byID[ev.ID]; n != nil && len(ev.Addrs) > 0 {
		n.listens, n.heard = ev.Addrs, now
	}
}
