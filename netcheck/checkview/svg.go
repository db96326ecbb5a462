package checkview

import (
	"bufio"
	"cmp"
	"fmt"
	"html"
	"io"
	"maps"
	"strings"
	"unicode/utf8"

	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
	"dlrover-run/netcheck"
)

// Sizes of the heat map, in pixels.
const (
	bigCell    = 38 // of up to bigTo nodes: with figures
	bigTo      = 16
	cellSize   = 16
	smallCell  = 3 // for more than smallFrom nodes; their names are left out
	smallFrom  = 128
	charWidth  = 5.9 // of the font, about
	lineHeight = 15
	leastWidth = 820
	legendBar  = 240
	maxListed  = 12 // nodes below the map
)

// sheet is a heat map that is being written.
type sheet struct {
	*bufio.Writer
	p                netcheck.Picture
	cells            map[edge]cell
	size, left, top  int
	side, width, end int // of the map; of the sheet; where the next line below the map goes
}

// SVG writes a heat map: senders are rows, receivers columns. Every cell has its figures as a tooltip. Directions that
// were not tested take no space in the file, so that ten thousand nodes fit.
func SVG(w io.Writer, p netcheck.Picture) error {
	s := newSheet(w, p)
	head := wrap(p.Summary, s.width)
	height := s.end + lineHeight*(6+len(s.listed()))
	fmt.Fprintf(s, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" `+
		`font-size="11">`+"\n", s.width, height)
	fmt.Fprintln(s, `<defs><linearGradient id="rate">`+stops()+`</linearGradient><pattern id="out" width="6" height="6" `+
		`patternUnits="userSpaceOnUse"><path d="M0 6L6 0" stroke="#000" stroke-opacity="0.55"/></pattern></defs>`)
	s.rect(0, 0, s.width, height, "#fff")
	for i, line := range head {
		s.text(8, 18+i*lineHeight, "start", "#000", line)
	}
	s.names()
	s.rect(s.left, s.top, s.side, s.side, grey)
	s.rates()
	s.outsiders()
	s.legend()
	fmt.Fprintln(s, "</svg>")
	return s.Flush()
}

func newSheet(w io.Writer, p netcheck.Picture) *sheet {
	s := &sheet{Writer: bufio.NewWriter(w), p: p, cells: cells(p), size: cellSize}
	switch n := len(p.Nodes); {
	case n > smallFrom:
		s.size = smallCell
	case n <= bigTo:
		s.size = bigCell
	}
	across, down := 4, 4 // characters of the longest names of rows and columns
	for _, n := range p.Nodes {
		across = max(across, utf8.RuneCountInString(label(n)))
		down = max(down, utf8.RuneCountInString(short(name(n.Node))))
	}
	if s.size == smallCell {
		across, down = 5, 5 // numbers
	}
	s.side = s.size * len(p.Nodes)
	s.left = 30 + int(charWidth*float64(across))
	s.width = max(s.left+s.side+20, leastWidth)
	s.top = 24 + lineHeight*len(wrap(p.Summary, s.width)) + int(charWidth*float64(down))
	s.end = s.top + s.side + 2*lineHeight
	return s
}

func (s *sheet) rect(x, y, w, h int, fill string) {
	fmt.Fprintf(s, `<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>`+"\n", x, y, w, h, fill)
}

func (s *sheet) text(x, y int, anchor, fill, text string, attributes ...string) {
	fmt.Fprintf(s, `<text x="%d" y="%d" text-anchor="%s" fill="%s"%s>%s</text>`+"\n", x, y, anchor, fill,
		strings.Join(append([]string{""}, attributes...), " "), escape(text))
}

// names writes the names of the rows and columns, or numbers where names would be too small to read.
func (s *sheet) names() {
	s.text(14, s.top+s.side/2, "middle", "#555", "sends", fmt.Sprintf(`transform="rotate(-90 14 %d)"`, s.top+s.side/2))
	s.text(s.left+s.side/2, s.top+s.side+lineHeight, "middle", "#555", "receives")
	every := 1
	if s.size == smallCell {
		every = 50
	}
	for i := 0; i < len(s.p.Nodes); i += every {
		n := s.p.Nodes[i]
		across, down, fill := label(n), short(name(n.Node)), ink(n)
		if every > 1 {
			across, down, fill = fmt.Sprint(i), fmt.Sprint(i), "#000"
		}
		x, y := s.left+i*s.size+s.size/2+4, s.top+i*s.size+s.size/2+4
		s.text(s.left-5, y, "end", fill, across)
		s.text(x, s.top-6, "start", fill, down, fmt.Sprintf(`transform="rotate(-90 %d %d)"`, x, s.top-6))
	}
}

// label is the name of a node, with its state unless that is ok.
func label(n netcheck.NodePicture) string {
	name := short(name(n.Node))
	if state := state(n); state != string(netcheck.StateOK) {
		return name + " (" + state + ")"
	}
	return name
}

// ink is the colour of a node's name.
func ink(n netcheck.NodePicture) string {
	switch rank(n) {
	case 0:
		return "#000"
	case 1:
		return "#777"
	case 2:
		return "#a05000"
	}
	return "#c00020"
}

// rates writes the cells.
func (s *sheet) rates() {
	for _, at := range stable.Sorted(maps.Keys(s.cells), byPlace) {
		c := s.cells[at]
		x, y := s.left+at.to*s.size, s.top+at.from*s.size
		fmt.Fprintf(s, `<g><title>%s</title><rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>`,
			escape(title(s.p, at, c)), x, y, s.size, s.size, colour(c, s.p.Median, s.size == smallCell))
		if s.size > smallCell {
			s.signs(c, x, y)
		}
		fmt.Fprintln(s, "</g>")
	}
}

// signs draws the signs of a cell in addition to its colour.
func (s *sheet) signs(c cell, x, y int) {
	middle := s.size / 2
	switch {
	case c.failed():
		fmt.Fprintf(s, `<path d="M%d %dl6 6m0 -6l-6 6" stroke="#fff" stroke-width="1.5"/>`, x+middle-3, y+middle-3)
	case s.size == bigCell:
		fmt.Fprintf(s, `<text x="%d" y="%d" text-anchor="middle" font-size="10">%s</text>`, x+middle, y+middle+4,
			brief(c.mbps))
	}
	if c.lossy {
		fmt.Fprintf(s, `<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="%s" stroke-width="3"/>`, x+2, y+2,
			s.size-4, s.size-4, purple)
	}
}

// brief is a rate in 10^6 bit/s of at most five characters.
func brief(mbps float64) string {
	if mbps >= 1e5 {
		return number(float64(int(mbps/1e3))) + "G"
	}
	return number(float64(int(mbps)))
}

// outsiders hatches the rows and columns of excluded nodes, at any rate.
func (s *sheet) outsiders() {
	for i, n := range s.p.Nodes {
		if s.size > smallCell { // a node is not tested with itself
			s.rect(s.left+i*s.size, s.top+i*s.size, s.size, s.size, "#fff")
		}
		if n.Verdict.Excluded {
			s.rect(s.left, s.top+i*s.size, s.side, s.size, "url(#out)")
			s.rect(s.left+i*s.size, s.top, s.size, s.side, "url(#out)")
		}
	}
}

// legend explains the colours and signs, and lists the nodes that are not ok.
func (s *sheet) legend() {
	y := s.end + lineHeight
	s.scale(y)
	y += 2*lineHeight + 8
	s.samples(y)
	for i, line := range s.listed() {
		s.text(8, y+(i+2)*lineHeight, "start", "#000", line)
	}
}

// scale explains which rates the colours are.
func (s *sheet) scale(y int) {
	const x = 180
	if s.p.Median == 0 {
		s.text(8, y, "start", "#000", "no rate was measured")
		return
	}
	s.text(8, y, "start", "#000", "Mbit/s of TCP, the worst rail:")
	s.rect(x, y-10, legendBar, 12, "url(#rate)")
	fmt.Fprintf(s, `<path d="M%d %dv16" stroke="#000"/>`+"\n", x+legendBar/2, y-12)
	s.text(x, y+lineHeight, "start", "#000", number(s.p.Median/2)+" or less")
	s.text(x+legendBar/2, y+lineHeight, "middle", "#000", "line "+number(s.p.Line))
	s.text(x+legendBar, y+lineHeight, "end", "#000", "median "+number(s.p.Median))
}

// samples explains the signs.
func (s *sheet) samples(y int) {
	lost := "#fff"
	if s.size == smallCell {
		lost = purple
	}
	x, one := 8, *s
	one.size = cellSize
	for _, item := range []struct {
		fill, text string
		sign       cell
	}{
		{"#000", "failed", cell{class: netcheck.Failed}}, {lost, "segments lost", cell{lossy: true}},
		{grey, "not tested", cell{}}, {"url(#out)", "the node is left out, or waits", cell{}},
	} {
		s.rect(x, y-11, cellSize, cellSize, item.fill)
		if item.sign != (cell{}) {
			one.signs(item.sign, x, y-11)
		}
		s.text(x+cellSize+5, y+2, "start", "#000", item.text)
		x += cellSize + 30 + int(charWidth*float64(len(item.text)))
	}
}

// listed are lines about the nodes that are not ok, the worst first.
func (s *sheet) listed() (lines []string) {
	for _, n := range worstFirst(s.p.Nodes) {
		if rank(n) == 0 {
			continue
		}
		if len(lines) == maxListed {
			return append(lines, "and more: the table has all of them")
		}
		lines = append(lines, cut(name(n.Node)+": "+state(n)+": "+cmp.Or(n.Verdict.Reason, "-"), s.width))
	}
	return lines
}

func byPlace(a, b edge) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to)) }

// Colours of cells without a rate.
const (
	grey   = "#e0e0e0"
	purple = "#c000c0"
)

// ramp are the colours of half of the median and less, of the line, and of the median and more.
var ramp = [3][3]int{{0xc0, 0x20, 0x20}, {0xff, 0xe0, 0x70}, {0x30, 0xa8, 0x50}}

func stops() string {
	var b strings.Builder
	for i, c := range ramp {
		fmt.Fprintf(&b, `<stop offset="%d%%" stop-color="#%02x%02x%02x"/>`, 50*i, c[0], c[1], c[2])
	}
	return b.String()
}

// colour of a cell. Where there is no room for a sign, losses have a colour.
func colour(c cell, median float64, small bool) string {
	switch {
	case c.failed():
		return "#000"
	case c.lossy && small:
		return purple
	}
	share := 1.0
	if median > 0 {
		share = min(max(2*c.mbps/median-1, 0), 1)
	}
	at := min(int(2*share), 1)
	part := 2*share - float64(at)
	var mixed [3]int
	for i := range mixed {
		mixed[i] = ramp[at][i] + int(part*float64(ramp[at+1][i]-ramp[at][i]))
	}
	return fmt.Sprintf("#%02x%02x%02x", mixed[0], mixed[1], mixed[2])
}

func title(p netcheck.Picture, at edge, c cell) string {
	text := fmt.Sprintf("%s to %s: ", name(p.Nodes[at.from].Node), name(p.Nodes[at.to].Node))
	if c.failed() {
		return text + string(c.class)
	}
	text += number(c.mbps) + " Mbit/s"
	if c.lossy {
		text += fmt.Sprintf(", %s %% of the segments lost", number(100*c.loss))
	}
	return text
}

func short(s string) string {
	const most = 22
	if r := []rune(s); len(r) > most {
		return "…" + string(r[len(r)-most+1:])
	}
	return s
}

// cut is text that fits into a line of so many pixels.
func cut(text string, width int) string {
	most := int(float64(width-16) / charWidth)
	if r := []rune(text); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return text
}

// wrap divides text into at most three lines of so many pixels.
func wrap(text string, width int) (lines []string) {
	most := int(float64(width-16) / charWidth)
	for len(lines) < 2 && utf8.RuneCountInString(text) > most {
		r := []rune(text)
		at := most
		for at > most/2 && r[at] != ' ' {
			at--
		}
		lines, text = append(lines, string(r[:at])), strings.TrimSpace(string(r[at:]))
	}
	return append(lines, cut(text, width))
}

// escape makes text of XML, in which neither control characters nor two others may be.
func escape(s string) string {
	return html.EscapeString(strings.NewReplacer("\ufffe", " ", "\uffff", " ").Replace(text.EscapeLine(s)))
}
