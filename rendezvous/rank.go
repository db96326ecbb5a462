package rendezvous

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"dlrover-run/internal/text"
)

// choose picks the size nodes that form the next world, and puts them in order: those of the last world first, by rank,
// then by wished rank and arrival. A suspect node is picked late, and one whose check has not been answered last.
// The others stay as spares.
func choose(ws []*node, size int, suspect func(*node) bool) []*node {
	slices.SortFunc(ws, seniority)
	if size == len(ws) {
		return ws
	}
	doubt := make(map[*node]int, len(ws))
	for _, n := range ws {
		if n.state == checking { // the gate has stopped waiting for its answer
			doubt[n] = 2
		}
		if suspect(n) {
			doubt[n]++
		}
	}
	slices.SortStableFunc(ws, func(a, b *node) int { return cmp.Compare(doubt[a], doubt[b]) })
	slices.SortFunc(ws[:size], seniority)
	return ws[:size]
}

func seniority(a, b *node) int {
	return cmp.Or(
		cmp.Compare(order(a.rank), order(b.rank)),
		cmp.Compare(order(a.Rank), order(b.Rank)),
		cmp.Compare(a.arrival, b.arrival))
}

// order sorts "none" (-1) behind every rank.
func order(rank int) int {
	if rank < 0 {
		return MaxNodes
	}
	return rank
}

// rank puts the chosen nodes into group rank order.
//
// When every node wishes for a rank of its own (NODE_RANK of a DLRover pod, which a replacement inherits), the wishes
// decide. Otherwise a node keeps its rank, if that still exists, and newcomers fill the gaps in order of arrival. With
// a topology, nodes under one access switch become neighbours, and without one those of one domain.
func rank(chosen []*node, topo Topology, static bool) []*node {
	ranked := slices.Clone(chosen)
	if static || wishesDiffer(ranked) {
		slices.SortFunc(ranked, func(a, b *node) int { return cmp.Compare(a.Rank, b.Rank) })
	} else {
		ranked = sticky(ranked)
	}
	if static {
		return ranked
	}
	return group(ranked, topo.leafOf)
}

func wishesDiffer(ns []*node) bool {
	seen := make(map[int]bool, len(ns))
	for _, n := range ns {
		if n.Rank < 0 || seen[n.Rank] {
			return false
		}
		seen[n.Rank] = true
	}
	return true
}

// sticky expects the order that choose made.
func sticky(ns []*node) []*node {
	ranked := make([]*node, len(ns))
	var rest []*node
	for _, n := range ns {
		if n.rank >= 0 && n.rank < len(ns) && ranked[n.rank] == nil {
			ranked[n.rank] = n
		} else {
			rest = append(rest, n)
		}
	}
	for i := range ranked {
		if ranked[i] == nil {
			ranked[i], rest = rest[0], rest[1:]
		}
	}
	return ranked
}

// Topology maps a node's IP to the name of its access switch. Nodes that it does not
// know share one unnamed switch.
type Topology map[string]string

// leafOf is the label of a node's switch, and without a topology that of its domain; "" is unknown.
func (t Topology) leafOf(n *node) string {
	if len(t) == 0 {
		return n.domain
	}
	return text.Clip(t[n.IP], MaxName)
}

// group keeps the nodes with one label, such as their access switch, together: the label of rank 0 first, the others as
// they first appear, and the given order inside each. This is the order of the node-topology-config that DLRover users
// on MetaX machines know.
func group(ranked []*node, label func(*node) string) []*node {
	var names []string
	buckets := map[string][]*node{}
	for _, n := range ranked {
		name := label(n)
		if _, ok := buckets[name]; !ok {
			names = append(names, name)
		}
		buckets[name] = append(buckets[name], n)
	}
	out := make([]*node, 0, len(ranked))
	for _, name := range names {
		out = append(out, buckets[name]...)
	}
	return out
}

// ParseTopology reads lines of `asw psw ip`: access switch, pod switch, node IP.
// Empty lines and lines that start with # are skipped; any other line that does not
// have exactly three fields, or that gives an IP a second switch, is an error.
func ParseTopology(rd io.Reader) (Topology, error) {
	t := Topology{}
	sc := bufio.NewScanner(rd)
	for line := 1; sc.Scan(); line++ {
		f := strings.Fields(sc.Text())
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		if len(f) != 3 {
			return nil, fmt.Errorf("topology line %d: %q has %d fields; need three: asw psw ip", line, sc.Text(), len(f))
		}
		if old, ok := t[f[2]]; ok && old != f[0] {
			return nil, fmt.Errorf("topology line %d: %s is already under switch %s, cannot be under %s too",
				line, f[2], old, f[0])
		}
		t[f[2]] = f[0]
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	return t, nil
}
