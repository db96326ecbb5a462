package hang

import (
	"fmt"
	"strings"
	"time"

	"dlrover-run/hang/rankset"
	"dlrover-run/internal/job"
)

// Slowed is a finding: ranks of one node slow the job.
type Slowed struct {
	GroupRank int       `json:"group_rank"`
	Node      string    `json:"node"`
	Ranks     string    `json:"ranks"` // as 0-3,8
	All       bool      `json:"all"`   // they are all ranks of the node
	Share     float64   `json:"share"` // of every step, for which the others wait for them: 0 to 0.99
	Doing     string    `json:"doing"` // computing, loading data, or asleep
	Since     time.Time `json:"since"` // by the clock of the judge
	// Checked is how the node differs from another one, in a line; "": it was not compared.
	Checked string `json:"checked,omitempty"`
}

// Drain has a node leave whose ranks slow the job.
type Drain struct {
	Slowed
	Epoch job.EpochID // of the ranks
	Least int         // nodes of the world that follows, or it is not worth it
}

// Repeats reports whether line is the Line of a finding about some of the same ranks, of any node.
func (s *Slowed) Repeats(line string) bool {
	named, _, _ := strings.Cut(line, " (")
	_, ranks, _ := strings.Cut(named, " ")
	return rankset.Named(s.Ranks).Meets(rankset.Named(ranks))
}

// Factor is how many times as long as without these ranks a step takes: 1 to 100.
func (s *Slowed) Factor() float64 { return 1 / (1 - min(max(s.Share, 0), 0.99)) }

// Line is the finding for people, with times in the zone of this process.
func (s *Slowed) Line() string {
	line := fmt.Sprintf("%s: %.1fx since %s, %s, %.0f %% of every step", s.subject("slows", "slow"), s.Factor(),
		s.Since.Local().Format(time.TimeOnly), s.Doing, 100*s.Share)
	if s.Checked != "" {
		line += "; " + s.Checked
	}
	return line
}

// CheckedLine is how the node differs from another one.
func (s *Slowed) CheckedLine() string { return s.who() + ": " + s.Checked }

// OverLine says that the finding does not hold any more.
func (s *Slowed) OverLine() string {
	return fmt.Sprintf("%s no more; it did so since %s", s.subject("slows", "slow"), s.Since.Local().Format(time.TimeOnly))
}

func (s *Slowed) subject(one, several string) string {
	verb := one
	if s.several() {
		verb = several
	}
	return s.who() + " " + verb + " the job"
}

func (s *Slowed) several() bool { return strings.ContainsAny(s.Ranks, ",-") }

// who are the ranks, and their node.
func (s *Slowed) who() string {
	ranks, all := "rank ", ""
	if s.several() {
		ranks = "ranks "
	}
	if s.All {
		all = "all of "
	}
	return fmt.Sprintf("%s%s (%snode %d %s)", ranks, s.Ranks, all, s.GroupRank, s.Node)
}
