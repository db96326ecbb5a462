package ledger

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/stable"
)

// String is a run in one line: "trained 96.2 % of 3 d 4 h (slowed 2.5 %: 3,100 steps a day fewer); lost: hangs 1.9 %,
// saves 0.3 %". It is "" for a run of less than a second. Time in pauses is in no share.
func (r Report) String() string {
	whole := r.Times.Sum() - r.Times[Paused]
	if whole < time.Second {
		return ""
	}
	verb, unknown := "trained", ""
	if !r.Stepping {
		verb, unknown = "workers ran", " (steps unknown)"
	}
	line := fmt.Sprintf("%s %s of %s%s%s", verb, Percent(r.Times[Training], whole), Span(whole), unknown, r.slowed(whole))
	if lost := r.lost(whole); len(lost) > 0 {
		line += "; lost: " + strings.Join(lost, ", ")
	}
	if p := r.Times[Paused]; p >= time.Second {
		line += "; paused for " + Span(p)
	}
	return line
}

// slowed is the share of the time in which ranks slowed the job, and its price while they did; "" below 0.05 %.
func (r Report) slowed(whole time.Duration) string {
	if 2000*r.Slowed < whole || r.Slowed <= 0 {
		return ""
	}
	cost := ""
	if fewer := rough(r.Missed / r.Slowed.Hours() * 24); fewer > 0 {
		cost = ": " + grouped(fewer) + " steps a day fewer"
	}
	return " (slowed " + Percent(r.Slowed, whole) + cost + ")"
}

// rough is n with its first two digits.
func rough(n float64) int64 {
	unit := 1.0
	for n >= 100*unit {
		unit *= 10
	}
	return int64(math.Round(n/unit) * unit)
}

// grouped is a number such as 3,100.
func grouped(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// plurals are causes as String names them.
func plurals() map[string]string {
	return map[string]string{
		Start: "start", Others: "others", string(job.CauseFailure): "failures", string(job.CauseLoss): "node losses",
		string(job.CauseLeave): "leaving nodes", string(job.CauseHang): "hangs", string(job.CauseOperator): "orders",
		string(job.CauseCheck): "failed checks", string(job.CauseGrowth): "growth",
	}
}

// lost are the shares of all that was not training, the largest first; none is below 0.05 %.
func (r Report) lost(whole time.Duration) (parts []string) {
	type part struct {
		name string
		d    time.Duration
	}
	all := []part{{"checks", r.Times[Checking]}, {"saves", r.Times[Saving]}}
	for _, row := range r.Rows {
		name, d := cmp.Or(plurals()[row.Cause], row.Cause), row.Times.Sum()-row.Times[Checking]
		i := slices.IndexFunc(all, func(p part) bool { return p.name == name })
		if i < 0 {
			all = append(all, part{name, d})
		} else {
			all[i].d += d
		}
	}
	stable.Sort(all, func(a, b part) int { return cmp.Compare(b.d, a.d) })
	for _, p := range all {
		if 2000*p.d >= whole {
			parts = append(parts, p.name+" "+Percent(p.d, whole))
		}
	}
	return parts
}

// String is a bill in one line.
func (b Bill) String() string {
	line := b.Cause
	if b.Node != "" {
		line += " of " + b.Node
	}
	line += " has cost " + Span(b.Times.Sum())
	var parts []string
	for _, c := range Classes() {
		if d := b.Times[c]; d > 0 {
			parts = append(parts, fmt.Sprintf("%s %s", c, Span(d)))
		}
	}
	if len(parts) > 0 {
		line += ": " + strings.Join(parts, ", ")
	}
	return line
}

// Percent is the share of d.
func Percent(d, whole time.Duration) string {
	if whole <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(d)/float64(whole))
}

// Span is a time in its two largest units.
func Span(d time.Duration) string {
	two := func(unit time.Duration, name string, less time.Duration, rest string) string {
		if n := d % unit / less; n > 0 {
			return fmt.Sprintf("%d %s %d %s", d/unit, name, n, rest)
		}
		return fmt.Sprintf("%d %s", d/unit, name)
	}
	const day = 24 * time.Hour
	if d < 10*time.Second {
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	switch d = d.Round(time.Second); {
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return two(time.Minute, "min", time.Second, "s")
	case d < day:
		return two(time.Hour, "h", time.Minute, "min")
	}
	return two(day, "d", time.Hour, "h")
}
