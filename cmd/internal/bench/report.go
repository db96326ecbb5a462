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

// unit is what a value means.
type unit string

const (
	duration unit = "seconds"
	size     unit = "bytes"
	percent  unit = "percent"
	yesno    unit = "yes" // 1 is yes, 0 is no
)

func (u unit) format(v float64) string {
	switch {
	case u == yesno && v == 1:
		return "yes"
	case u == yesno && v == 0:
		return "no"
	case u == yesno:
		return fmt.Sprintf("%.0f %% yes", 100*v)
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
	Values  []float64 `json:"values,omitempty"`
	Median  float64   `json:"median"`
	Min     float64   `json:"min"`
	Max     float64   `json:"max"`
	Missing string    `json:"missing,omitempty"` // why there are no values
	Errors  []string  `json:"errors,omitempty"`  // repetitions that failed
}

// add keeps a value; NaN stands for one that could not be taken.
func (c *cell) add(v float64) {
	if !math.IsNaN(v) {
		c.Values = append(c.Values, v)
	}
}

// result is one line of the table.
type result struct {
	ID    string  `json:"id"`
	What  string  `json:"what"`
	Unit  unit    `json:"unit"`
	Goal  float64 `json:"goal,omitempty"`
	Met   *bool   `json:"met,omitempty"` // nil without a goal or a value
	Ours  cell    `json:"dlrover_run"`
	Peer  cell    `json:"torchrun"`
	Ratio float64 `json:"ratio,omitempty"` // peer / ours
}

type machine struct {
	Date        time.Time `json:"date"`
	CPU         string    `json:"cpu"`
	Cores       int       `json:"cores"`
	MemoryGiB   float64   `json:"memory_gib"`
	Kernel      string    `json:"kernel"`
	OpenFiles   uint64    `json:"open_files"` // that a process may have
	Go          string    `json:"go"`
	Launcher    string    `json:"launcher"`
	Torch       string    `json:"torch"`
	LoadAtStart string    `json:"load_at_start"`
	LoadAtEnd   string    `json:"load_at_end"`
}

type report struct {
	Machine machine  `json:"machine"`
	Results []result `json:"results"`
}

// median of an even number of values is the mean of the middle two.
func median(sorted []float64) float64 {
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// finish computes what follows from the values.
func (r *result) finish() {
	for _, c := range []*cell{&r.Ours, &r.Peer} {
		if len(c.Values) > 0 {
			sorted := slices.Sorted(slices.Values(c.Values))
			c.Median, c.Min, c.Max = median(sorted), sorted[0], sorted[len(sorted)-1]
		}
	}
	if len(r.Ours.Values) > 0 && len(r.Peer.Values) > 0 && r.Unit != yesno && r.Ours.Median > 0 {
		r.Ratio = r.Peer.Median / r.Ours.Median
	}
	if r.Goal != 0 && len(r.Ours.Values) > 0 {
		met := r.Ours.Median <= r.Goal
		if r.Unit == yesno {
			met = r.Ours.Min >= r.Goal
		}
		r.Met = &met
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
	if r.Unit != yesno {
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
	if r.Ratio == 0 {
		return ""
	}
	return fmt.Sprintf("%.3gx", r.Ratio)
}

func (rep *report) markdown() string {
	var b strings.Builder
	m := rep.Machine
	fmt.Fprintf(&b, "%d cores of %s, %.0f GiB, ulimit -n %d, Linux %s; %s; %s; PyTorch %s; load average %s at the start, %s at the end; %s.\n\n",
		m.Cores, m.CPU, m.MemoryGiB, m.OpenFiles, m.Kernel, m.Go, m.Launcher, m.Torch, m.LoadAtStart, m.LoadAtEnd, m.Date.Format(time.DateOnly))
	b.WriteString("Medians (minimum to maximum, n repetitions).\n\n| row | what | goal | dlrover-run | torchrun | ratio |\n|---|---|---|---|---|---|\n")
	for _, r := range rep.Results {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", r.ID, r.What, r.goal(), r.Ours.text(r.Unit), r.Peer.text(r.Unit), r.ratio())
	}
	for _, r := range rep.Results {
		for i, c := range []cell{r.Ours, r.Peer} {
			for _, e := range c.Errors {
				fmt.Fprintf(&b, "\nfailed: %s, %s: %s\n", r.ID, []string{"dlrover-run", "torchrun"}[i], e)
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
	m := machine{Date: time.Now().UTC(), Cores: runtime.NumCPU(), OpenFiles: openFiles(), Go: runtime.Version(), LoadAtStart: loadAverage(), Torch: b.torch, CPU: "unknown CPU"}
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
		m.Launcher = strings.TrimSpace(string(out))
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
