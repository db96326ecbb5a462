// Package flame draws stacks of many ranks as one picture: an SVG file that is complete without its script, which adds
// a search (Ctrl-F) and a magnifying glass (click). It loads nothing from elsewhere.
package flame

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"dlrover-run/hang/merge"
	"dlrover-run/hang/rankset"
	"dlrover-run/internal/stable"
)

// maxSize is how large a picture becomes, in bytes.
const maxSize = 1 << 20

// Picture is the input of SVG.
type Picture struct {
	Title, Subtitle string
	Sections        []Section   // from top to bottom; those without stacks are left out
	NoData          rankset.Set // named below the title
	Suspects        rankset.Set // their functions are first, and only these have a frame
}

// Section is one flame graph of a picture. The width of a function is how many stacks it is on, the outermost one is at
// the bottom.
type Section struct {
	Title string
	Tree  *merge.Tree
}

// Sizes in pixels.
const (
	width     = 1600
	margin    = 10
	rowHeight = 16
	fontSize  = 12
	charWidth = fontSize * 0.59 // of Verdana, about
	minWidth  = 0.1             // a narrower box is not drawn, unless a suspect is in it
)

// spare is the room that a picture needs apart from its boxes: the head with the script, and the titles.
const spare = 48 << 10

// SVG writes the picture. However many ranks and functions there are it is below maxSize: the widest functions and
// the suspects' are drawn first, and the bottom line counts the functions that were left out.
func SVG(w io.Writer, p Picture) error {
	p.Sections = slices.DeleteFunc(slices.Clone(p.Sections), func(s Section) bool { return len(s.Tree.Roots) == 0 })
	d := drawing{Picture: p, room: maxSize - spare, y: 3 * rowHeight}
	d.heading()
	for i, s := range p.Sections {
		d.section(s, d.room/(len(p.Sections)-i))
	}
	if len(p.Sections) == 0 {
		d.line("", "no stacks were collected")
	}
	if d.left > 0 {
		d.line("", fmt.Sprintf("%d functions that are too narrow are left out; the folded stacks have them", d.left))
	}
	d.y += rowHeight
	if _, err := fmt.Fprintf(w, head, width, d.y, width, d.y, style, script); err != nil {
		return err
	}
	if _, err := w.Write(d.body.Bytes()); err != nil {
		return err
	}
	_, err := io.WriteString(w, "</svg>\n")
	return err
}

const head = `<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="Verdana, sans-serif" ` +
	`font-size="12">
<style>%s</style>
<script><![CDATA[%s]]></script>
<rect width="100%%" height="100%%" fill="#f8f8f8"/>
`

const style = `text{pointer-events:none;white-space:pre}.t{font-size:17px;text-anchor:middle}.h{font-weight:bold}` +
	`.k{fill:#666}` +
	`.a>rect{fill-opacity:.45;stroke:#999;stroke-dasharray:4 3}` +
	`.s>rect{stroke:#c00000;stroke-width:2}g.m>rect{fill:#e600e6}`

type drawing struct {
	Picture
	body bytes.Buffer
	room int // bytes that boxes may still take
	left int // boxes without room
	y    int
}

func (d *drawing) heading() {
	fmt.Fprintf(&d.body, `<text class="t" x="%d" y="24">%s</text>`+"\n", width/2, escape(clip(d.Title, 150)))
	d.line("", clip(d.Subtitle, 220))
	d.line("k", d.legend())
	if len(d.NoData) > 0 {
		d.line("", fmt.Sprintf("no data: %s (%s)", d.NoData.Brief(20), count(d.NoData.Len(), "rank")))
	}
	d.line("found", "") // results of a search
}

// legend explains the picture.
func (d *drawing) legend() string {
	text := "Boxes: function@file:line@stuck|leak (ranks in it|others), as wide as its stacks; what it called is above."
	if len(d.Suspects) > 0 {
		text += " Red frame: suspects only."
	}
	if slices.ContainsFunc(d.Sections, func(s Section) bool { return slices.ContainsFunc(s.Tree.Roots, approximate) }) {
		text += " Dashed: approximate, found by a search of the stack; may be left over from earlier calls."
	}
	return text + " Click: magnify. Ctrl-F: search."
}

// approximate reports whether a function, or one that it has called, is not for certain on a stack.
func approximate(n *merge.Node) bool {
	return guessed(n) || slices.ContainsFunc(n.Children, approximate)
}

func guessed(n *merge.Node) bool { return !n.Exact && !n.State }

// line writes one line of text at the left.
func (d *drawing) line(class, text string) {
	fmt.Fprintf(&d.body, `<text class="%s" x="%d" y="%d">%s</text>`+"\n", class, margin, d.y, escape(text))
	d.y += rowHeight
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// box is a function in its place.
type box struct {
	*merge.Node
	x, w    float64
	depth   int
	suspect bool
	// The escaped texts: shown to a mouse that rests on the box, and in it.
	title, label string
}

func (d *drawing) section(s Section, room int) {
	l := layout{drawing: d, all: counts(s.Tree.All), known: counts(s.Tree.Known), stated: counts(s.Tree.Stated)}
	if len(d.NoData) > 0 {
		l.noData = "; no data: " + d.NoData.Brief(8)
	}
	total := 0
	for _, n := range s.Tree.Roots {
		total += n.Stacks
	}
	l.scale = float64(width-2*margin) / float64(max(total, 1))
	l.place(s.Tree.Roots, margin, 1)
	stable.Sort(l.boxes, func(a, b box) int {
		if a.suspect != b.suspect {
			return before(a.suspect)
		}
		return cmp.Or(cmp.Compare(b.w, a.w), cmp.Compare(a.depth, b.depth))
	})
	l.fit(room)
	l.draw(s, total)
}

// before orders true before false.
func before(first bool) int {
	if first {
		return -1
	}
	return 1
}

// layout is a section on its way to the picture.
type layout struct {
	*drawing
	scale         float64 // pixels for a stack
	all           counted // the ranks that the section is about
	known, stated counted // ranks with a stack, or a state
	noData        string  // the end of every title
	boxes         []box   // those before others can be drawn without them
	rows          int
}

// counted is a set of ranks that knows its size.
type counted struct {
	rankset.Set
	n int
}

func counts(s rankset.Set) counted { return counted{s, s.Len()} }

// place puts the functions in a row, and the functions that they have called above them.
func (l *layout) place(nodes []*merge.Node, x float64, depth int) {
	for _, b := range l.sorted(nodes) {
		b.x, b.depth = x, depth
		x += b.w
		l.boxes = append(l.boxes, b)
		l.place(b.Children, b.x, depth+1)
	}
}

// sorted leaves out boxes that are too narrow, puts the suspects first, and the rest in the order of the names, as
// flame graphs are.
func (l *layout) sorted(nodes []*merge.Node) (out []box) {
	for _, n := range nodes {
		b := box{Node: n, w: float64(n.Stacks) * l.scale, suspect: n.Ranks.Meets(l.Suspects)}
		if b.w < minWidth && !b.suspect {
			l.left++
			continue
		}
		out = append(out, b)
	}
	stable.Sort(out, func(a, b box) int {
		if a.suspect != b.suspect {
			return before(a.suspect)
		}
		return cmp.Or(cmp.Compare(a.Frame.Func, b.Frame.Func), cmp.Compare(a.Frame.File, b.Frame.File))
	})
	return out
}

// maxLabel is how many characters the text in a box has at most.
const maxLabel = 90

// boxSize is the size of a box without its texts, in bytes, at most.
const boxSize = 190

// fit keeps as many boxes as there is room for. A box without the one below it would have no support: the order ensures
// that the one below is first.
func (l *layout) fit(room int) {
	for i := range l.boxes {
		b := &l.boxes[i]
		b.title, b.label = escape(l.title(b)), l.label(b)
		size := boxSize + len(b.title) + len(b.label)
		if size > room {
			l.left += len(l.boxes) - i
			l.boxes = l.boxes[:i]
			return
		}
		room, l.room = room-size, l.room-size
		l.rows = max(l.rows, b.depth)
	}
}

// title is the text for a mouse that rests on the box, and for the search.
func (l *layout) title(b *box) string {
	known := l.known
	if b.State {
		known = l.stated
	}
	n, are := b.Ranks.Len(), "ranks"
	if n == 1 {
		are = "rank"
	}
	text := fmt.Sprintf("%s@%s (%d %s, %.2f%%): %s", name(b.Node), l.folded(b.Node, 16), n, are,
		100*float64(n)/float64(max(known.n, 1)), b.Ranks.Brief(16))
	if b.Stacks != n {
		text += fmt.Sprintf("; %d threads", b.Stacks)
	}
	if leak := known.n - n; leak > 0 {
		first := known.FirstWithout(b.Ranks, 8)
		text += "; not here: " + first.String()
		if more := leak - first.Len(); more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
	}
	return text + l.noData
}

// folded is stuck|leak as xpu_timer writes it, each with at most that many runs.
func (l *layout) folded(n *merge.Node, runs int) string {
	in := n.Ranks.Len()
	return slashed(n.Ranks[:min(len(n.Ranks), runs)], in) + "|" + slashed(l.all.FirstWithout(n.Ranks, runs), l.all.n-in)
}

// slashed are the first of so many ranks.
func slashed(first rankset.Set, total int) string {
	text := strings.ReplaceAll(first.String(), ",", "/")
	if more := total - first.Len(); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// name is func@source with all lines.
func name(n *merge.Node) string {
	text := clip(merge.Foldable(n.Frame.Func), 160) + "@" + clip(merge.Foldable(n.Frame.Source()), 160)
	for i, line := range n.Lines {
		text += fmt.Sprintf("%c%d", ":,"[min(i, 1)], line)
	}
	return text
}

func (l *layout) draw(s Section, total int) {
	l.y += rowHeight / 2
	l.line("h", s.Title)
	bottom := l.y - fontSize + l.rows*rowHeight // of the section's root
	l.body.WriteString("<g>\n")
	all := escape(fmt.Sprintf("all (%s)", count(total, "stack")))
	l.rect("", &box{x: margin, w: width - 2*margin, title: all, label: all}, bottom, "#d0d0d0")
	for _, b := range l.boxes {
		l.rect(l.class(&b), &b, bottom, colour(b.Node))
	}
	l.body.WriteString("</g>\n")
	l.y = bottom + 2*rowHeight + fontSize/2
}

// class is how a box is drawn, as an attribute.
func (l *layout) class(b *box) string {
	var names []string
	if b.suspect && len(b.Ranks.FirstWithout(l.Suspects, 1)) == 0 {
		names = append(names, "s")
	}
	if guessed(b.Node) {
		names = append(names, "a")
	}
	if len(names) == 0 {
		return ""
	}
	return ` class="` + strings.Join(names, " ") + `"`
}

// label is func@source@stuck|leak, escaped. If it does not fit, directories of the path are left out first, then all
// of it. The ranks that are not in the function are next, so that the ranks in it remain.
func (l *layout) label(b *box) string {
	fits := int(b.w / charWidth)
	if fits < 3 {
		return ""
	}
	source := merge.Foldable(b.Frame.Source())
	if len(b.Lines) == 1 {
		source += fmt.Sprintf(":%d", b.Lines[0])
	}
	return escape(shorten(merge.Foldable(b.Frame.Func), source, "@"+l.folded(b.Node, 8), min(fits, maxLabel)))
}

// shorten puts them together in so many characters.
func shorten(name, source, ranks string, fits int) string {
	left := fits - utf8.RuneCountInString(name+ranks) - 1
	for rest := source; rest != ""; {
		if utf8.RuneCountInString(rest) <= left {
			return name + "@" + rest + ranks
		}
		_, after, more := strings.Cut(strings.TrimPrefix(rest, "../"), "/")
		if !more {
			break
		}
		rest = "../" + after
	}
	stuck, _, _ := strings.Cut(ranks, "|")
	for _, shown := range []string{ranks, stuck} {
		if n := fits - utf8.RuneCountInString(shown); n >= minName || n >= utf8.RuneCountInString(name) {
			return clip(name, n) + shown
		}
	}
	return clip(name+ranks, fits)
}

// minName is how much of a name is shown next to the ranks.
const minName = 6

func (l *layout) rect(class string, b *box, bottom int, fill string) {
	y := bottom - b.depth*rowHeight
	fmt.Fprintf(&l.body, `<g%s><title>%s</title><rect x="%.2f" y="%d" width="%.2f" height="%d" fill="%s" rx="1"/>`,
		class, b.title, b.x, y, max(b.w, minWidth), rowHeight-1, fill)
	if b.label != "" {
		fmt.Fprintf(&l.body, `<text x="%.2f" y="%d">%s</text>`, b.x+2, y+fontSize, b.label)
	}
	l.body.WriteString("</g>\n")
}

// clip shortens a text to that many characters.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-2]) + ".."
}

// escape makes text of foreign data: no markup, no characters that XML does not have.
func escape(s string) string {
	return markup().Replace(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffe || r == 0xffff {
			return '_'
		}
		return r
	}, strings.ToValidUTF8(s, "\ufffd")))
}

// markup replaces the characters that mean something in XML. It is made when the first picture is drawn.
func markup() *strings.Replacer {
	replacer.Do(func() { replaced = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;") })
	return replaced
}

var (
	replacer sync.Once
	replaced *strings.Replacer
)
