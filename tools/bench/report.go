package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// unit is the unit of a value.
type unit string

const (
	duration unit = "seconds"
	size     unit = "bytes"
	percent  unit = "percent"
	yesno    unit = "yes" // 1 is yes, 0 is no
	speed    unit = "GiB/s"
	share    unit = "share" // percent of the possible
	count    unit = "count"
)

// more reports whether a larger value is the better one.
func (u unit) more() bool { return u == speed || u == share || u == yesno }

// compares reports whether the values of two sides have a ratio.
func (u unit) compares() bool { return u != yesno && u != count }

func (u unit) format(v float64) string {
	switch {
	case u == yesno && v == 1:
		return "yes"
	case u == yesno && v == 0:
		return "no"
	case u == yesno:
		return fmt.Sprintf("%.0f %% yes", 100*v)
	case u == speed:
		return fmt.Sprintf("%.3g GiB/s", v)
	case u == share:
		return fmt.Sprintf("%.1f %%", v)
	case u == count:
		return fmt.Sprintf("%.3g", v)
	case u == percent:
		return fmt.Sprintf("%.3f %%", v)
	case u == size && v >= 1e6:
		return fmt.Sprintf("%.1f MB", v/1e6)
	case u == size:
		return fmt.Sprintf("%.1f kB", v/1e3)
	case v >= 10:
		return fmt.Sprintf("%.1f s", v)
	case v >= 1:
		return fmt.Sprintf("%.2f s", v)
	default:
		return fmt.Sprintf("%.1f ms", v*1e3)
	}
}

// cell is one side's values in a line of a row.
type cell struct {
	Side    string
	Values  []float64
	Median  float64
	Min     float64
	Max     float64
	Missing string   // why there are no values
	Errors  []string // repetitions that failed
	Ratio   float64  // of a peer: how many times better ours is
}

// add keeps a value; NaN stands for one that could not be measured.
func (c *cell) add(v float64) {
	if !math.IsNaN(v) {
		c.Values = append(c.Values, v)
	}
}

// result is one line of the table.
type result struct {
	ID    string
	What  string
	Unit  unit
	Goal  float64
	Met   *bool // nil without a goal or a value
	Ours  cell
	Peers []cell
}

type machine struct {
	Date        time.Time
	CPU         string
	Cores       int
	MemoryGiB   float64
	Kernel      string
	OpenFiles   uint64 // that a process may have
	Go          string
	Launcher    string
	Torch       string
	LoadAtStart string
	LoadAtEnd   string
}

type report struct {
	Machine machine
	Results []result
}

// median of an even number of values is the mean of the middle two.
func median(sorted []float64) float64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// finish computes the figures that follow from the values.
func (r *result) finish() {
	r.Ours.finish()
	for i := range r.Peers {
		c := &r.Peers[i]
		c.finish()
		if len(r.Ours.Values) > 0 && len(c.Values) > 0 && r.Unit.compares() && r.Ours.Median > 0 && c.Median > 0 {
			if c.Ratio = c.Median / r.Ours.Median; r.Unit.more() {
				c.Ratio = 1 / c.Ratio
			}
		}
	}
	if r.Goal != 0 && len(r.Ours.Values) > 0 {
		met := r.Ours.Median <= r.Goal
		switch {
		case r.Unit == yesno:
			met = r.Ours.Min >= r.Goal
		case r.Unit.more():
			met = r.Ours.Median >= r.Goal
		}
		r.Met = &met
	}
}

func (c *cell) finish() {
	if len(c.Values) > 0 {
		sorted := slices.Sorted(slices.Values(c.Values))
		c.Median, c.Min, c.Max = median(sorted), sorted[0], sorted[len(sorted)-1]
	}
}

func (c *cell) text(u unit) string {
	switch n := len(c.Values); {
	case n == 0 && c.Missing != "":
		return c.Missing
	case n == 0 && len(c.Errors) > 0:
		text, _, _ := strings.Cut(c.Errors[0], "\n")
		return "failed: " + strings.ReplaceAll(text, "|", "/")
	case n == 0:
		return "-"
	case n == 1 || u == yesno:
		return fmt.Sprintf("%s (n=%d)", u.format(mean(c, u)), n)
	default:
		return fmt.Sprintf("%s (%s to %s, n=%d)", u.format(c.Median), u.format(c.Min), u.format(c.Max), n)
	}
}

// mean of yes and no is the share of yes.
func mean(c *cell, u unit) float64 {
	if u != yesno {
		return c.Median
	}
	sum := 0.0
	for _, v := range c.Values {
		sum += v
	}
	return sum / float64(len(c.Values))
}

func (r *result) goal() string {
	if r.Goal == 0 {
		return ""
	}
	text := r.Unit.format(r.Goal)
	switch {
	case r.Unit == yesno:
	case r.Unit.more():
		text = ">= " + text
	default:
		text = "<= " + text
	}
	switch {
	case r.Met == nil:
		return text
	case *r.Met:
		return text + ": met"
	default:
		return text + ": **missed**"
	}
}

func (r *result) ratio() string {
	var texts []string
	for _, c := range r.Peers {
		if c.Ratio != 0 {
			texts = append(texts, fmt.Sprintf("%.3gx", c.Ratio))
		}
	}
	return strings.Join(texts, ", ")
}

// cells are those of all sides.
func (r *result) cells() []cell { return append([]cell{r.Ours}, r.Peers...) }

// tableRow is a line of a table with these in the columns.
func tableRow(columns ...string) string { return "| " + strings.Join(columns, " | ") + " |\n" }

func (r *result) head() string {
	columns := []string{"row", "what", "goal"}
	for _, c := range r.cells() {
		columns = append(columns, c.Side)
	}
	return tableRow(append(columns, "ratio")...) + strings.Repeat("|---", len(columns)+1) + "|\n"
}

func (r *result) markdown() string {
	columns := []string{r.ID, r.What, r.goal()}
	for _, c := range r.cells() {
		columns = append(columns, c.text(r.Unit))
	}
	return tableRow(append(columns, r.ratio())...)
}

func (rep *report) markdown() string {
	var b strings.Builder
	m := rep.Machine
	fmt.Fprintf(&b, "%d cores of %s, %.0f GiB, ulimit -n %d, Linux %s; %s; %s; PyTorch %s; "+
		"load average %s at the start, %s at the end; %s.\n\n",
		m.Cores, m.CPU, m.MemoryGiB, m.OpenFiles, m.Kernel, m.Go, m.Launcher, m.Torch, m.LoadAtStart, m.LoadAtEnd,
		m.Date.Format(time.DateOnly))
	b.WriteString("Medians (minimum to maximum, n repetitions).\n")
	head := ""
	for _, r := range rep.Results {
		if h := r.head(); h != head { // other peers: another table
			head = h
			b.WriteString("\n" + head)
		}
		b.WriteString(r.markdown())
	}
	for _, r := range rep.Results {
		for _, c := range r.cells() {
			for _, e := range c.Errors {
				fmt.Fprintf(&b, "\nfailed: %s, %s: %s\n", r.ID, c.Side, e)
			}
		}
	}
	return b.String()
}

// failed is an error when a repetition of ours failed; the peer's are only reported.
func (rep *report) failed() error {
	var errs []error
	for _, r := range rep.Results {
		if n := len(r.Ours.Errors); n > 0 {
			errs = append(errs, fmt.Errorf("row %s: %d repetitions failed", r.ID, n))
		}
	}
	return errors.Join(errs...)
}

func describeMachine(b *bench) machine {
	m := machine{
		Date: time.Now().UTC(), Cores: runtime.NumCPU(), OpenFiles: openFiles(), Go: runtime.Version(),
		LoadAtStart: loadAverage(), Torch: b.torch, CPU: "unknown CPU",
	}
	if m.Torch == "" {
		m.Torch = "not found"
	}
	if data, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := strings.Cut(string(data), "model name\t: "); ok {
			m.CPU, _, _ = strings.Cut(rest, "\n")
		}
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryGiB = float64(info.Totalram) * float64(info.Unit) / (1 << 30)
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	if out, err := exec.Command(b.ours.command[0], "--version").Output(); err == nil {
		m.Launcher, _, _ = strings.Cut(string(out), "\n")
	}
	return m
}

func loadAverage() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	text, _, _ := strings.Cut(string(data), " ")
	return text
}
