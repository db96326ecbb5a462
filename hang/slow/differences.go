package slow

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"dlrover-run/hang"
	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
)

// figure is a kind of figure: how it is said, and by how much it must be worse than that of the other node.
type figure struct {
	kind string
	say  string // with the part and the figure
	unit string
	by   float64 // more by so much is worse, of less this share
	all  float64 // a difference that explains everything; 0: less is worse
}

const leastPercent = 10

// figures are all kinds. Shares are those of the examination's time.
var figures = [...]figure{
	{kind: "cpu.count", say: "%s may use %s", unit: " CPUs"},
	{"cpu.quota", "%s used up the CPU quota of its cgroup in %s of all periods", " %", leastPercent, 100},
	{"cpu.waiting", "%s waited for a CPU for %s of the time", " %", leastPercent, 100},
	{"cpu.stopped", "%s was stopped, by a signal or a debugger, for %s of the time", " %", leastPercent, 100},
	{"cpu.blocked", "%s was blocked in the kernel, as by a disk, for %s of the time", " %", leastPercent, 100},
	{"storage.files", "%s for %s of the time", " %", leastPercent, 100},
	{"cpu.others", "%s, not of this job, used %s of the CPUs", " %", leastPercent, 100},
	{"cpu.stolen", "%s took %s of the CPU time", " %", 2, 100},
	{"cpu.hot", "%s were slowed down by their temperature %s", " times", 1, 10},
	{"cpu.memory", "%s waited for memory for %s of the time", " %", leastPercent, 100},
	{"cpu.io", "%s waited for disks for %s of the time", " %", leastPercent, 100},
	{kind: "link.speed", say: "%s runs at %s", unit: " Gb/s"},
	{kind: "link.mtu", say: "%s has an MTU of %s"},
	{"link.resent", "%s sent %s of its segments again", " %", 0.5, 5},
	{"device.clock", "%s runs at %s", " MHz", 0.1, 0},
	{kind: "device.links", say: "%s has %s", unit: " active links"},
	{kind: "device.lanes", say: "%s has %s", unit: " PCIe lanes"},
}

// areas are the beginnings of kinds, in words.
var areas = []struct{ kind, text string }{
	{"cpu.", "CPU"}, {"storage.", "storage"}, {"link.", "links"}, {"device.", "devices"},
}

// maxDifferences is how many are said, in as many bytes.
const (
	maxDifferences = 8
	maxResult      = 1000
)

// byKind are facts by their kinds, each in the order of the node.
type byKind map[string][]hang.Fact

func kinds(facts []hang.Fact) byKind {
	by := byKind{}
	for _, f := range facts {
		by[f.Kind] = append(by[f.Kind], f)
	}
	return by
}

// result says how the node differs from the other one.
func (k *check) result(links bool) string {
	if k.facts[0] == nil {
		return fmt.Sprintf("its node has not answered within %.0f s", answerTime.Seconds())
	}
	own, other := kinds(k.facts[0]), kinds(k.facts[1])
	lines := differences(own, other, k.facts[1] == nil, k.other)
	switch compared := compared(own, other, k.facts[1] == nil); {
	case len(lines) == 0 && k.facts[1] == nil:
		lines = append(lines, "nothing is unusual on its node "+compared)
	case len(lines) == 0:
		lines = append(lines, "nothing differs from "+k.other+" "+compared)
	}
	if k.other != "" && k.facts[1] == nil {
		lines = append(lines, k.other+" has not answered, so its node was compared with none")
	}
	if links && len(k.nodes) > 1 {
		lines = append(lines, k.links()...)
	}
	return text.Line(strings.Join(lines, "; "), maxResult)
}

// links says what a test of the links between the nodes has found: each end knows what it has received.
func (k *check) links() (lines []string) {
	own, other := kinds(k.rates[0]), kinds(k.rates[1])
	failed := append(own["test.failed"], other["test.failed"]...)
	switch {
	case len(failed) > 0:
		return []string{"the test of its links has failed: " + failed[0].Fault}
	case !k.tested || k.waits():
		return []string{"its links were not tested"}
	}
	for i, f := range own["test.received"] {
		if i < len(other["test.received"]) {
			lines = append(lines, text.Line(fmt.Sprintf("%s sends %s Gb/s to %s, and gets %s", f.Of,
				number(other["test.received"][i].Value), k.other, number(f.Value)), maxLine))
		}
	}
	return lines[:min(len(lines), maxDifferences)]
}

// compared lists the areas in which both nodes have facts.
func compared(own, other byKind, alone bool) string {
	var names []string
	for _, a := range areas {
		has := func(by byKind) bool {
			for kind := range by {
				if strings.HasPrefix(kind, a.kind) {
					return true
				}
			}
			return false
		}
		if has(own) && (alone || has(other)) {
			names = append(names, a.text)
		}
	}
	return "(" + strings.Join(names, ", ") + ")"
}

// difference is a line, and how much of the time it may explain.
type difference struct {
	line   string
	weight float64
}

// differences are the lines about what is worse on a node, of each kind the worst one; those that explain the most come
// first. Alone, a figure is compared with the median of its kind.
func differences(own, other byKind, alone bool, at string) (lines []string) {
	var found []difference
	for kind, facts := range own {
		d, n := worstFigure(facts, other[kind], alone, at)
		if facts[0].Fault != "" {
			d, n = difference{facts[0].Fault, 0.3}, len(facts)-len(other[kind])
			if facts[0].Fatal {
				d.weight = 1
			}
		}
		if n > 1 {
			d.line += fmt.Sprintf(" (and %d more)", n-1)
		}
		if n > 0 {
			found = append(found, d)
		}
	}
	stable.Sort(found, func(a, b difference) int {
		return cmp.Or(-cmp.Compare(a.weight, b.weight), cmp.Compare(a.line, b.line))
	})
	for _, d := range found[:min(len(found), maxDifferences)] {
		lines = append(lines, d.line)
	}
	if more := len(found) - len(lines); more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return lines
}

// worstFigure is that of the part which is worse by the most; n parts are worse.
func worstFigure(own, other []hang.Fact, alone bool, at string) (worst difference, n int) {
	i := slices.IndexFunc(figures[:], func(k figure) bool { return k.kind == own[0].Kind })
	if i < 0 || len(other) == 0 && !alone {
		return worst, 0
	}
	k, where, usual := &figures[i], " at "+at, 0.0
	if alone {
		where, usual = " is usual on its node", median(own, func(f hang.Fact) float64 { return f.Value })
	}
	for i, f := range own {
		if !alone {
			usual = like(other, f.Of, i).Value
		}
		w := k.worse(f.Value, usual)
		if w > 0 {
			n++
		}
		if w > worst.weight {
			said := fmt.Sprintf(k.say+", %s%s", f.Of, number(f.Value)+k.unit, number(usual), where)
			worst = difference{text.Line(said, maxLine), w}
		}
	}
	return worst, n
}

// like is the part of the same name, or else that of the same number, as ranks are.
func like(facts []hang.Fact, of string, i int) hang.Fact {
	if k := slices.IndexFunc(facts, func(f hang.Fact) bool { return f.Of == of }); k >= 0 {
		return facts[k]
	}
	return facts[min(i, len(facts)-1)]
}

// maxLine is how many bytes of a figure are said.
const maxLine = 200

// worse is how much of the time it may explain that a figure is not the usual one: 0 to 1.
func (k *figure) worse(is, usual float64) float64 {
	switch {
	case k.all > 0 && is-usual >= k.by:
		return min((is-usual)/k.all, 1)
	case k.all == 0 && usual > 0 && is < usual*(1-k.by):
		return min(1-is/usual, 1)
	}
	return 0
}

// number has two digits, and all before the point.
func number(v float64) string {
	if v >= 10 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2g", v)
}
