package checkview

import (
	"bufio"
	"cmp"
	"fmt"
	"html"
	"io"
	"maps"
	"slices"
	"strings"

	"dlrover-run/launcher/printable"
	"dlrover-run/netcheck"
)

// Sizes of the heat map, in pixels.
const (
	cellSize   = 14
	smallCell  = 3 // of more than smallFrom nodes, whose names are left out
	smallFrom  = 128
	leftMargin = 140
	topMargin  = 40
)

// SVG writes a heat map: senders are rows, receivers columns, green is the median, red half of it and less, black a
// test that failed, grey not tested. Every cell says its figures to a mouse that rests on it. Directions that were not
// tested take no space in the file, so that ten thousand nodes fit.
func SVG(w io.Writer, p netcheck.Picture) error {
	out := bufio.NewWriter(w)
	size, left := cellSize, leftMargin
	if len(p.Nodes) > smallFrom {
		size, left = smallCell, topMargin
	}
	side := size * len(p.Nodes)
	fmt.Fprintf(out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" `+
		`font-size="10">`+"\n", left+side+20, topMargin+side+20)
	fmt.Fprintf(out, `<text x="4" y="14">%s</text>`+"\n", escape(p.Summary))
	fmt.Fprintf(out, `<rect x="%d" y="%d" width="%d" height="%d" fill="#e0e0e0"/>`+"\n", left, topMargin, side, side)
	if size == cellSize {
		for i, n := range p.Nodes {
			fmt.Fprintf(out, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n",
				left-4, topMargin+i*size+size-3, escape(short(name(n.Node))))
		}
	}
	cells := cells(p)
	for _, at := range slices.SortedFunc(maps.Keys(cells), byPlace) {
		c := cells[at]
		fmt.Fprintf(out, `<rect x="%d" y="%d" width="%d" height="%d" fill="%s"><title>%s</title></rect>`+"\n",
			left+at.to*size, topMargin+at.from*size, size, size, colour(c, p.Median), escape(title(p, at, c)))
	}
	fmt.Fprintln(out, "</svg>")
	return out.Flush()
}

func byPlace(a, b edge) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to)) }

// colour goes from red at half of the median to green at the median.
func colour(c cell, median float64) string {
	if c.failed() {
		return "#000000"
	}
	share := 1.0
	if median > 0 {
		share = min(max(2*c.mbps/median-1, 0), 1)
	}
	return fmt.Sprintf("#%02x%02x40", int(200*(1-share)), int(180*share))
}

func title(p netcheck.Picture, at edge, c cell) string {
	text := fmt.Sprintf("%s to %s: ", name(p.Nodes[at.from].Node), name(p.Nodes[at.to].Node))
	if c.failed() {
		return text + string(c.class)
	}
	return text + Number(c.mbps) + " Mbit/s"
}

func short(s string) string {
	const most = 22
	if r := []rune(s); len(r) > most {
		return "…" + string(r[len(r)-most+1:])
	}
	return s
}

// escape makes text of XML, in which neither control characters nor two others may be.
func escape(s string) string {
	return html.EscapeString(strings.NewReplacer("\ufffe", " ", "\uffff", " ").Replace(printable.Line(s)))
}
