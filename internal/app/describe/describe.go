// Package describe has the sentences in which people are told about runs, for dlroverctl and for the page of the
// master. It is pure.
package describe

import (
	"fmt"
	"strconv"
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
