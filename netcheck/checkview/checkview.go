// Package checkview shows the results of a check of nodes: as a table, as a matrix of the pairs, and as a heat map.
package checkview

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/stable"
	"dlrover-run/internal/table"
	"dlrover-run/internal/text"
	"dlrover-run/netcheck"
)

// Table writes a line for every node and one for every finding that is more than information, worst nodes first, below
// the summary. Nodes with the same finding share a line.
func Table(w io.Writer, p netcheck.Picture) error {
	fmt.Fprintln(w, text.EscapeLine(p.Summary))
	for _, path := range p.Paths {
		fmt.Fprintln(w, "  "+text.EscapeLine(path))
	}
	t := table.New(w, "NODE", "VERDICT", "SAID BY", "REASON")
	for _, r := range Rows(p) {
		t.Row(r.Name, r.State, r.Partners, r.Reason)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	return Findings(w, worstFirst(p.Nodes))
}

// Findings writes the findings that are more than information, each once, in the order of the nodes.
func Findings(w io.Writer, nodes []netcheck.NodePicture) (err error) {
	of := map[string][]string{} // names, by line
	var lines []string
	for _, n := range nodes {
		for _, f := range n.Verdict.Findings {
			line := fmt.Sprintf("%s: %s", found(f), finding(f))
			if f.Severity == netcheck.Info {
				continue
			}
			if of[line] == nil {
				lines = append(lines, line)
			}
			of[line] = append(of[line], name(n.Node))
		}
	}
	for _, line := range lines {
		_, err = fmt.Fprintln(w, text.EscapeLine(several(of[line])+": "+line))
	}
	return err
}

// found is the severity of a finding. A skipped test is neither good nor bad.
func found(f netcheck.Finding) string {
	if strings.HasSuffix(f.Kind, ".skipped") {
		return string(netcheck.StateNotTested)
	}
	return string(f.Severity)
}

// several are names, of many the first few and how many.
func several(names []string) string {
	const most = 4
	if more := len(names) - most; more > 1 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}

func worstFirst(nodes []netcheck.NodePicture) []netcheck.NodePicture {
	return stable.Sorted(slices.Values(nodes), func(a, b netcheck.NodePicture) int {
		return cmp.Compare(rank(b), rank(a))
	})
}

func name(n netcheck.Node) string { return cmp.Or(n.Name, n.ID) }

// rank orders verdicts from the least to the most serious.
func rank(n netcheck.NodePicture) int {
	switch {
	case n.Verdict.Excluded:
		return 4
	case n.Verdict.State == netcheck.StateFaulty:
		return 3
	case n.Open:
		return 1
	case n.Verdict.State == netcheck.StateOK:
		return 0
	}
	return 2
}

func state(n netcheck.NodePicture) string {
	switch {
	case n.Open:
		return "being checked"
	case n.Verdict.Excluded && n.Verdict.Again:
		return string(n.Verdict.State) + ", waits"
	case n.Verdict.Excluded:
		return string(n.Verdict.State) + ", left out"
	}
	return string(n.Verdict.State)
}

func partners(v netcheck.Verdict) string {
	switch v.Partners {
	case 0:
		return "-"
	case 1:
		return "1 node"
	}
	return strconv.Itoa(v.Partners) + " nodes"
}

// finding is a finding in one line, with its figures.
func finding(f netcheck.Finding) string {
	text := f.Text
	if f.Metric != "" {
		text += strings.TrimRight(fmt.Sprintf(" (%s %s %s", f.Metric, number(f.Value), f.Unit), " ")
		if f.Threshold != 0 {
			text += fmt.Sprintf(", threshold %s", number(f.Threshold))
		}
		if f.Median != 0 {
			text += fmt.Sprintf(", median %s", number(f.Median))
		}
		text += ")"
	}
	if f.Peer != "" && !strings.Contains(f.Text, f.Peer) {
		text += " with " + f.Peer
	}
	return text
}

// number writes a figure with three digits that count, and one without a fraction as it is.
func number(v float64) string {
	if v == math.Trunc(v) && math.Abs(v) < 1e15 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return strconv.FormatFloat(v, 'g', -1, 64)
	}
	digits := max(0, 2-int(math.Floor(math.Log10(math.Abs(v)))))
	return strconv.FormatFloat(v, 'f', digits, 64)
}

// maxMatrix is how many nodes a matrix of text can have.
const maxMatrix = 40

// Matrix writes the rate of every direction that was tested, in 10^6 bit/s: senders are rows, receivers columns.
func Matrix(w io.Writer, p netcheck.Picture) error {
	if len(p.Nodes) > maxMatrix {
		return fmt.Errorf("a matrix of %d nodes does not fit on a terminal, of which it takes at most %d; "+
			"use --svg or --json", len(p.Nodes), maxMatrix)
	}
	cells := cells(p)
	t := table.Numbers(w)
	head := []string{"Mbit/s from \\ to"}
	for i := range p.Nodes {
		head = append(head, strconv.Itoa(i))
	}
	t.Row(head...)
	for i, n := range p.Nodes {
		line := []string{fmt.Sprintf("%d %s", i, label(n))}
		for j := range p.Nodes {
			line = append(line, cellText(cells, i, j))
		}
		t.Row(line...)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "median %s, line %s Mbit/s; * below the line, ! segments lost, a word is how a test failed, "+
		". not tested\n",
		number(p.Median), number(p.Line))
	return err
}

type edge struct{ from, to int }

// cell is one direction between two nodes: the worst of its rails.
type cell struct {
	class netcheck.Class
	mbps  float64
	low   bool    // below the line
	lossy bool    // on any rail
	loss  float64 // share of the segments
}

// cells leaves out PyTorch's collectives, whose rates have another line, and pairs with nodes outside the picture.
func cells(p netcheck.Picture) map[edge]cell {
	m := map[edge]cell{}
	for _, t := range p.Pairs {
		at := edge{t.From, t.To}
		c := cell{class: t.Class, mbps: t.Mbps, low: t.Class == netcheck.Slow || p.Line > 0 && t.Mbps < p.Line,
			lossy: t.Class == netcheck.Lossy, loss: t.Loss}
		known := min(t.From, t.To) >= 0 && max(t.From, t.To) < len(p.Nodes)
		if !known || t.Torch {
			continue
		}
		if old, ok := m[at]; ok {
			c = c.with(old)
		}
		m[at] = c
	}
	return m
}

// with is the worse of two rails, with the larger loss.
func (c cell) with(old cell) cell {
	worst := old
	if worse(c, old) {
		worst = c
	}
	worst.lossy, worst.loss = c.lossy || old.lossy, max(c.loss, old.loss)
	return worst
}

func worse(a, b cell) bool {
	if a.failed() != b.failed() {
		return a.failed()
	}
	return a.mbps < b.mbps
}

// failed reports whether no rate was measured.
func (c cell) failed() bool {
	return c.class != netcheck.OK && c.class != netcheck.Slow && c.class != netcheck.Lossy
}

func cellText(m map[edge]cell, i, j int) string {
	c, ok := m[edge{i, j}]
	switch {
	case i == j:
		return "-"
	case !ok:
		return "."
	case c.failed():
		return strings.Replace(string(c.class), "unreachable", "unreach", 1) // narrow columns
	}
	text := number(c.mbps)
	if c.low {
		text += "*"
	}
	if c.lossy {
		text += "!"
	}
	return text
}
