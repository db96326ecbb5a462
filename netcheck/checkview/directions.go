package checkview

import (
	"cmp"
	"maps"

	"dlrover-run/internal/stable"
	"dlrover-run/netcheck"
)

// Direction is one direction between two nodes of a picture that was tested: the worst of its rails.
type Direction struct {
	From, To int
	Mbps     float64 // 0: no rate was measured
	Problem  string  // in a few words; "": there is none
	Text     string  // with the names of the nodes
}

// Directions are those of a picture, the worst first.
func Directions(p netcheck.Picture) (ds []Direction) {
	all := cells(p)
	order := stable.Sorted(maps.Keys(all), func(a, b edge) int {
		if c, d := all[a], all[b]; worse(c, d) != worse(d, c) {
			return before(worse(c, d))
		}
		return byPlace(a, b)
	})
	for _, at := range order {
		c := all[at]
		d := Direction{From: at.from, To: at.to, Mbps: c.mbps, Text: title(p, at, c)}
		switch {
		case c.failed():
			d.Mbps, d.Problem = 0, cmp.Or(string(c.class), "failed")
		case c.lossy:
			d.Problem = "segments lost"
		case c.low:
			d.Problem = "below the line"
		}
		ds = append(ds, d)
	}
	return ds
}

func before(first bool) int {
	if first {
		return -1
	}
	return 1
}

// Row is a node of a table.
type Row struct {
	Name, State, Partners, Reason string
	Serious                       int // from 0, all is well, to 4, left out
}

// Rows are the nodes of a picture, the most serious verdicts first.
func Rows(p netcheck.Picture) (rows []Row) {
	for _, n := range worstFirst(p.Nodes) {
		rows = append(rows, Row{Name: name(n.Node), State: state(n), Partners: partners(n.Verdict),
			Reason: cmp.Or(n.Verdict.Reason, "-"), Serious: rank(n)})
	}
	return rows
}

// Names are the nodes of a picture, in its order.
func Names(p netcheck.Picture) (names []string) {
	for _, n := range p.Nodes {
		names = append(names, name(n.Node))
	}
	return names
}
