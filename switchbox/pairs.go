package switchbox

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Pair is two devices by the ids that people give them: MetaX' socket ids, NVIDIA's indices.
type Pair struct{ A, B int }

// String writes a Pair as in --box-pairs.
func (p Pair) String() string { return strconv.Itoa(p.A) + ":" + strconv.Itoa(p.B) }

// MarshalText writes a Pair as String does.
func (p Pair) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads the text of MarshalText.
func (p *Pair) UnmarshalText(text []byte) error {
	a, b, _ := strings.Cut(string(text), ":")
	x, errX := strconv.ParseUint(a, 10, 16)
	y, errY := strconv.ParseUint(b, 10, 16)
	if errX != nil || errY != nil {
		return fmt.Errorf("%.20q is not a pair of devices such as 0:1", text)
	}
	*p = Pair{int(x), int(y)}
	return nil
}

// same reports whether two Pairs are of the same devices, in either order.
func (p Pair) same(q Pair) bool { return p == q || p == Pair{q.B, q.A} }

// DefaultPairs are the pairs of --box-pairs by default.
var DefaultPairs = []Pair{{0, 1}, {2, 4}, {3, 5}, {6, 7}}

// RingWord is the word for Ring in place of pairs.
const RingWord = "ring"

// Ring joins every device with the next one: each is tested with two others, so that one bad device shows as such.
func Ring(found []int) []Pair {
	var pairs []Pair
	for i := range found {
		if len(found) > 2 || i == 0 && len(found) == 2 {
			pairs = append(pairs, Pair{found[i], found[(i+1)%len(found)]})
		}
	}
	return pairs
}

// Untested are the devices that are in none of pairs.
func Untested(pairs []Pair, found []int) []int {
	return slices.DeleteFunc(slices.Clone(found), func(i int) bool {
		return slices.ContainsFunc(pairs, func(p Pair) bool { return p.A == i || p.B == i })
	})
}

// Rest joins the devices that are in none of pairs, in their order. The last one of an odd number is joined with the
// first other device of all.
func Rest(pairs []Pair, found []int) (rest []Pair) {
	left := Untested(pairs, found)
	for ; len(left) > 1; left = left[2:] {
		rest = append(rest, Pair{left[0], left[1]})
	}
	if len(left) == 1 && len(found) > 1 {
		other := found[0]
		if other == left[0] {
			other = found[1]
		}
		rest = append(rest, Pair{min(other, left[0]), max(other, left[0])})
	}
	return rest
}

// Limits are the criteria for Pairs.
type Limits struct {
	// MinBandwidth in 10^6 byte/s is the least for a pair to pass; 0 measures only.
	MinBandwidth float64
	// MinChannels is the number of pairs that must pass; 0 only reports.
	MinChannels int
	// Given: a user has named the pairs. Default pairs may lack a device, given ones may not.
	Given bool
	// Ring: the pairs are a ring of all devices; their number is known later.
	Ring bool
}

// CheckPairs checks a user's pairs and limits, as far as it can without the devices. Errors name the options.
func CheckPairs(pairs []Pair, l Limits) error {
	for i, p := range pairs {
		if p.A == p.B {
			return fmt.Errorf("--box-pairs: %s names one device twice; a pair is two devices, as in 0:1", p)
		}
		if slices.ContainsFunc(pairs[:i], p.same) {
			return fmt.Errorf("--box-pairs: %s is there twice; name every pair once", p)
		}
	}
	switch {
	case len(pairs) == 0 && !l.Ring:
		return fmt.Errorf("--box-pairs names no pair; write 0:1,2:4, or ring")
	case len(pairs) > MaxPairs:
		return fmt.Errorf("--box-pairs names %d pairs; at most %d can be tested", len(pairs), MaxPairs)
	case l.MinBandwidth < 0 || math.IsNaN(l.MinBandwidth) || math.IsInf(l.MinBandwidth, 0):
		return fmt.Errorf("--min-bandwidth=%v: need a number of MB/s from 0", l.MinBandwidth)
	case l.MinChannels < 0:
		return fmt.Errorf("--min-channels=%d: need a number of pairs from 0", l.MinChannels)
	case l.MinChannels > len(pairs) && !l.Ring:
		return fmt.Errorf("--min-channels=%d is more than the %d pairs that are tested; name more in --box-pairs, or "+
			"ask for fewer", l.MinChannels, len(pairs))
	}
	return nil
}

// SelectPairs divides pairs into those with both devices and those without one of them. A missing device of a given
// pair is an error for the user.
func SelectPairs(pairs []Pair, found []int, given bool) (have, missing []Pair, err error) {
	for _, p := range pairs {
		if slices.Contains(found, p.A) && slices.Contains(found, p.B) {
			have = append(have, p)
		} else {
			missing = append(missing, p)
		}
	}
	if given && len(missing) > 0 {
		return nil, nil, fmt.Errorf("--box-pairs: %s names a device that is not here; this node has %s",
			missing[0], ids(found))
	}
	return have, missing, nil
}

func ids(found []int) string {
	if len(found) == 0 {
		return "none"
	}
	if len(found) == 1 {
		return fmt.Sprintf("only device %d", found[0])
	}
	text := fmt.Sprint(slices.Sorted(slices.Values(found)))
	return strings.ReplaceAll(strings.Trim(text, "[]"), " ", ", ")
}

// Measurement is the result of an active test of one Pair.
type Measurement struct {
	Pair Pair `json:"pair"`
	// MBps is in 10^6 byte/s, of the slower direction where both were measured apart.
	MBps float64 `json:"mbps"`
	// There and Back are the directions from A to B and from B to A, 0 where they were not measured apart.
	There float64 `json:"there,omitempty"`
	Back  float64 `json:"back,omitempty"`
	// Error is the reason why there is no figure, or why it does not count: the tool failed, the data arrived damaged.
	Error string `json:"error,omitempty"`
}

// JudgePairs judges the measurements of pairs. A pair without a measurement lacks a device: it counts neither way, and
// if fewer than MinChannels are left, there is no judgement. The error is that of CheckPairs.
func JudgePairs(pairs []Pair, measured []Measurement, l Limits) (State, string, []Finding, error) {
	if err := CheckPairs(pairs, l); err != nil {
		return "", "", nil, err
	}
	var findings []Finding
	tested, mid := 0, medianRate(measured)
	var failed []string
	for _, p := range pairs {
		i := slices.IndexFunc(measured, func(m Measurement) bool { return m.Pair == p })
		if i < 0 {
			findings = append(findings, missingPair(p))
			continue
		}
		f := judgePair(measured[i], l.MinBandwidth)
		f.Median = mid
		if tested++; f.Severity != Info {
			failed = append(failed, p.String())
		}
		findings = append(findings, f)
	}
	if tested < max(l.MinChannels, 1) {
		return Skipped, TooFew(tested, len(pairs), l.MinChannels), findings, nil
	}
	passed := tested - len(failed)
	reason := fmt.Sprintf("%d of %d pairs reach %s%s; %d must", passed, tested, rate(l.MinBandwidth), butNot(failed),
		l.MinChannels)
	if passed >= l.MinChannels {
		return OK, reason, findings, nil
	}
	return Faulty, reason, append(findings, Finding{
		Check: "switchbox", Kind: "gpu.copy", Severity: Fatal, Metric: "pairs", Value: float64(passed),
		Threshold: float64(l.MinChannels), Text: reason,
	}), nil
}

// butNot names pairs, of many the first ones.
func butNot(pairs []string) string {
	const most = 8
	switch more := len(pairs) - most; {
	case len(pairs) == 0:
		return ""
	case more > 0:
		return fmt.Sprintf(" (not %s and %d more)", strings.Join(pairs[:most], ", "), more)
	}
	return " (not " + strings.Join(pairs, ", ") + ")"
}

// TooFew is the reason why pairs are not judged.
func TooFew(present, all, need int) string {
	if present == all {
		return fmt.Sprintf("there are %d pairs of devices on this node, and %d must pass", all, need)
	}
	return fmt.Sprintf("%d of %d pairs have both devices on this node, and %d must pass", present, all, need)
}

func missingPair(p Pair) Finding {
	return Finding{
		Check: "switchbox", Kind: "gpu.copy", Severity: Info, Entity: p.String(),
		Text: fmt.Sprintf("pair %s is skipped: a device of it is not on this node", p),
	}
}

// judgePair is the Finding of one pair: Info if it passed.
func judgePair(m Measurement, atLeast float64) Finding {
	f := Finding{
		Check: "switchbox", Kind: "gpu.copy", Severity: Info, Entity: m.Pair.String(),
		Metric: "bandwidth", Value: m.MBps, Unit: "MB/s", Threshold: atLeast,
	}
	switch {
	case m.Error != "":
		f.Severity, f.Text = Warn, fmt.Sprintf("pair %s: %s", m.Pair, m.Error)
	case !(m.MBps >= atLeast): // also true for NaN
		f.Severity = Warn
		f.Text = fmt.Sprintf("pair %s reaches %s, less than %s%s", m.Pair, rate(m.MBps), rate(atLeast), directions(m))
	default:
		f.Text = fmt.Sprintf("pair %s reaches %s%s", m.Pair, rate(m.MBps), directions(m))
	}
	return f
}

func directions(m Measurement) string {
	if m.There == 0 && m.Back == 0 {
		return ""
	}
	return fmt.Sprintf(" (%d to %d: %s, back: %s)", m.Pair.A, m.Pair.B, rate(m.There), rate(m.Back))
}

// rate rounds down: a value below a limit must not look as if it reached it.
func rate(mbps float64) string {
	return strconv.FormatFloat(math.Floor(mbps*10)/10, 'f', -1, 64) + " MB/s"
}

func medianRate(measured []Measurement) float64 {
	var rates []float64
	for _, m := range measured {
		if m.Error == "" {
			rates = append(rates, m.MBps)
		}
	}
	if len(rates) == 0 {
		return 0
	}
	slices.Sort(rates)
	n := len(rates)
	return (rates[(n-1)/2] + rates[n/2]) / 2
}
