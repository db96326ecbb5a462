// Package describe has the sentences in which people are told about runs, for dlroverctl and for the page of the
// master. It is pure.
package describe

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Age writes a duration in its two largest units.
func Age(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// Phase describes the activity of a run.
func Phase(s rendezvous.Status) string {
	switch {
	case s.Outcome != "" && s.Cause != nil:
		return s.Outcome + ": " + s.Cause.Text
	case s.Outcome != "":
		return s.Outcome
	case s.Paused != nil:
		return "paused: " + s.Paused.Text
	case s.Hold != nil && s.Phase == "running":
		return "held: " + s.Hold.Text
	}
	switch s.Phase {
	case "forming":
		return "waiting for nodes"
	case "gating":
		return "checking nodes"
	case "releasing":
		return "starting"
	}
	return s.Phase
}

// maxNamed bounds the nodes that a sentence names.
const maxNamed = 8

// Waits are the things that a run without workers waits for, as words after "waiting for". checks is how far the checks
// of its nodes are, or "".
func Waits(s api.RunStatus, checks string, now time.Time) (things []string) {
	if s.Outcome != "" || s.Phase == "running" {
		return nil
	}
	if missing := s.Params.Min - len(s.Nodes); missing > 0 {
		things = append(things, fmt.Sprintf("%d of %d nodes", missing, s.Params.Min))
	}
	for _, l := range s.Missing {
		things = append(things, fmt.Sprintf("%s (node %d), gone %s ago: %s", l.Node, l.GroupRank, Age(now.Sub(l.At)),
			strings.TrimSuffix(l.Reason, ".")))
	}
	var checking, stopping, silent []string
	for _, n := range s.Nodes {
		switch {
		case n.Suspect:
			silent = append(silent, n.Name)
		case n.State == "checking":
			checking = append(checking, n.Name)
		case n.State == "stopping":
			stopping = append(stopping, n.Name)
		}
	}
	if len(checking) > 0 {
		text := "checks of " + names(checking)
		if checks != "" {
			text += " (" + checks + ")"
		}
		things = append(things, text)
	}
	if len(stopping) > 0 {
		things = append(things, "workers to end on "+names(stopping))
	}
	if len(silent) > 0 {
		things = append(things, "a word from "+names(silent))
	}
	return things
}

// names lists the first of many names.
func names(all []string) string {
	if more := len(all) - maxNamed; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(all[:maxNamed], ", "), more)
	}
	return strings.Join(all, ", ")
}

// Waiting is a line for a launcher that was told w some time ago.
func Waiting(w api.Waiting, ago time.Duration) string {
	line := "waiting"
	if w.For != "" {
		line += " for " + w.For
	}
	if w.Due != "" {
		line += fmt.Sprintf("; in %s: %s", Age(w.In-ago), w.Due)
	}
	return line
}

// Workers is how many run, or are being started.
func Workers(s rendezvous.Status) int {
	if s.Hold == nil && (s.Phase == "running" || s.Phase == "releasing") {
		return s.WorldSize
	}
	return 0
}

// Size is the value of --nnodes.
func Size(p rendezvous.Params) string {
	switch {
	case p.Max == 0: // no node is here that knows it
		return "-"
	case p.Min == p.Max:
		return strconv.Itoa(p.Min)
	}
	return fmt.Sprintf("%d to %d", p.Min, p.Max)
}

// Restarts are those of a run, of the allowed ones.
func Restarts(s rendezvous.Status) string {
	return fmt.Sprintf("%d of %d", s.Restarts, s.Params.MaxRestarts)
}

// Budget describes the restarts that are left before a run ends, and the delay of the next one.
func Budget(b rendezvous.BudgetStatus, now time.Time) string {
	text := fmt.Sprintf("%d restarts in a row without progress", b.Streak)
	switch {
	case b.SumCounts && b.Limit >= 0:
		text = fmt.Sprintf("%d of %d restarts in all", b.Sum, b.Limit)
	case b.SumCounts:
		text = fmt.Sprintf("%d restarts in all", b.Sum)
	case b.Limit >= 0:
		text = fmt.Sprintf("%d of %d restarts in a row without progress", b.Streak, b.Limit)
	}
	if until := b.BackoffUntil.Sub(now); until > 0 {
		text += "; the next start is in " + until.Round(time.Millisecond).String()
	} else {
		text += "; the next restart waits " + b.NextWait.Round(time.Millisecond).String()
	}
	if !b.Deadline.IsZero() {
		text += "; the deadline is in " + Age(b.Deadline.Sub(now))
	}
	if !b.HeldUntil.IsZero() {
		text += "; held for another " + Age(b.HeldUntil.Sub(now))
	}
	return text
}

// Node is the state of a node.
func Node(n rendezvous.NodeStatus) string {
	switch {
	case n.Barred != nil && n.State == "barred":
		return "barred: " + n.Barred.Text
	case n.Barred != nil:
		return n.State + ", barred: " + n.Barred.Text
	case n.Suspect:
		return n.State + ", silent"
	}
	return n.State
}

// Rank is the group rank of a node, or "-" outside of the world.
func Rank(n rendezvous.NodeStatus) string {
	if n.GroupRank < 0 {
		return "-"
	}
	return strconv.Itoa(n.GroupRank)
}

// Event is the text of an event, with its subject.
func Event(e api.Event) string {
	text := e.Text
	if e.Event == job.EventSeal {
		text = fmt.Sprintf("%d nodes, %d workers", e.Nodes, e.World)
	}
	switch {
	case e.Node == "":
		return text
	case text == "":
		return e.Node
	}
	return e.Node + ": " + text
}

// Checkpoint is the newest state that a run could restore: the oldest of the ranks' newest saves.
type Checkpoint struct {
	MemoryStep int64     `json:"memory_step"`
	MemoryAt   time.Time `json:"memory_at,omitzero"`
	DiskStep   int64     `json:"disk_step"`
	DiskAt     time.Time `json:"disk_at,omitzero"`
}

// CheckpointOf is nil for a run that saves nothing.
func CheckpointOf(ages []coordinator.Age) *Checkpoint {
	if len(ages) == 0 {
		return nil
	}
	first := ages[0]
	out := &Checkpoint{first.MemoryStep, first.MemoryAt, first.DurableStep, first.DurableAt}
	for _, a := range ages[1:] {
		if a.MemoryAt.Before(out.MemoryAt) {
			out.MemoryStep, out.MemoryAt = a.MemoryStep, a.MemoryAt
		}
		// a rank whose state another one writes has none on disk
		if out.DiskAt.IsZero() || !a.DurableAt.IsZero() && a.DurableAt.Before(out.DiskAt) {
			out.DiskStep, out.DiskAt = a.DurableStep, a.DurableAt
		}
	}
	return out
}

// Text describes where the state is, and how old.
func (s *Checkpoint) Text(now time.Time) string {
	part := func(where string, step int64, at time.Time) string {
		if at.IsZero() {
			return "none " + where
		}
		return fmt.Sprintf("step %d %s, %s old", step, where, Age(now.Sub(at)))
	}
	return part("in memory", s.MemoryStep, s.MemoryAt) + "; " + part("on disk", s.DiskStep, s.DiskAt)
}
