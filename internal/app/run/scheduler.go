package run

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/scheduler"
)

// startPatience is how long a node waits for node 0 of a scheduler: pods of a job may start minutes apart.
const startPatience = 10 * time.Minute

// findScheduler reads the scheduler's variables. An option that sets the meeting point wins: then nothing is read.
func findScheduler(o *options, called *invocation) (f scheduler.Facts, err error) {
	name, given := o.String("scheduler"), o.IsSet("scheduler")
	if name == "none" || !given && (called.Name == "torchrun" || called.command.Alone) {
		return f, nil
	}
	most := 0
	if o.IsSet("nnodes") {
		if _, most, err = argv.ParseNNodes(o.String("nnodes")); err != nil {
			return f, err
		}
	}
	if name == scheduler.Auto && (most == 1 || o.namesRendezvous()) {
		return f, nil
	}
	s := o.system(most)
	f, err = scheduler.Detect(name, s)
	if v := scheduler.Alone(s); err == nil && f.Name == "" && most == 0 && v != "" {
		o.Warn("%s, but nothing says how many nodes there are, and where they meet: this one trains alone; give --nnodes "+
			"(1, if that is meant)", v)
	}
	return f, err
}

// scheduled reports whether a scheduler sets anything that the rendezvous has no variables of its own for.
func scheduled(f *scheduler.Facts) bool { return f.Name != "" && f.Name != "dlrover" }

// readNamed reads a file that an option or a variable names, at most 16 MiB.
func readNamed(name string) ([]byte, error) { return openfile.ReadNamed(name, 16<<20) }

// scheduledText describes the scheduler's values in use; "" if there are none.
func (s *settings) scheduledText() string {
	f := &s.scheduler
	switch {
	case !scheduled(f):
		return ""
	case s.rdzv.backend == local && s.size.why != f.Name:
		return ""
	case s.rdzv.backend == local:
		return fmt.Sprintf("%s: one node, workers: %d (from %s)", f.Name, s.size.slots, strings.Join(f.From, ", "))
	}
	who := fmt.Sprintf("node %d", f.NodeRank)
	if f.NodeRank < 0 {
		who = "a node"
	}
	if f.Share != "" {
		who += " (" + f.Share + ")"
	}
	text := fmt.Sprintf("%s: %s of %s, which meet at %s (from %s)", f.Name, who, nodesText(s), s.rdzv.where(),
		strings.Join(f.From, ", "))
	if s.auth.from != "" {
		text += "; no DLROVER_TOKEN: the job token is derived from " + s.auth.from + ", which all nodes must share"
	}
	return text
}

func nodesText(s *settings) string {
	if s.params.Min == s.params.Max {
		return strconv.Itoa(s.params.Max)
	}
	return fmt.Sprintf("%d to %d", s.params.Min, s.params.Max)
}

// planScheduler holds the scheduler's values, even if an option overrides them.
type planScheduler struct {
	Name     string   `json:"name"`
	Nodes    int      `json:"nodes,omitempty"`
	NodeRank int      `json:"node_rank"`
	Workers  int      `json:"workers,omitempty"`
	Share    string   `json:"share,omitempty"`
	Restart  int      `json:"restart,omitempty"`
	From     []string `json:"from"`
}

func (s *settings) planScheduler() *planScheduler {
	f := &s.scheduler
	if f.Name == "" {
		return nil
	}
	return &planScheduler{Name: f.Name, Nodes: f.Nodes, NodeRank: f.NodeRank, Workers: f.Slots, Share: f.Share,
		Restart: f.Restart, From: f.From}
}
