package main

import (
	"fmt"
	"strings"
	"time"
)

// check is one thing that must hold.
type check struct {
	ok   bool
	what string
}

// checks judges the whole run.
func checks(rs []record, recs []recovery, p plan, left []process) []check {
	first, last := losses(rs)
	var worlds []string
	resumed := true
	for i, r := range recs {
		worlds = append(worlds, fmt.Sprint(r.World))
		resumed = resumed && (i == 0 || r.Step > 1 && r.Step > r.StepBefore-p.checkpointEvery && r.Step <= r.StepBefore+1)
	}
	sizes := strings.Join(worlds, ", ")
	return []check{
		{resumed, fmt.Sprintf("after each fault the training went on from its checkpoint (one every %d steps)",
			p.checkpointEvery)},
		{sizes == "4, 4, 2, 4", "the world sizes were " + sizes},
		{trainedSteps(rs) == p.steps, fmt.Sprintf("%d of %d steps are done", trainedSteps(rs), p.steps)},
		{last < first/2, fmt.Sprintf("the loss fell from %.3f to %.3f", first, last)},
		{len(left) == 0, "no process is left" + names(left)},
	}
}

func trainedSteps(rs []record) (n int) {
	for _, r := range rs {
		if r.Event == evTrained {
			n = r.Step
		}
	}
	return n
}

func names(ps []process) (text string) {
	for _, p := range ps {
		text += fmt.Sprintf(", but %s (pid %d)", p.name, p.pid)
	}
	return text
}

// table is the timeline: a row for each recovery.
func table(recs []recovery, began time.Time) string {
	var b strings.Builder
	row := "%8s  %-20s %10s %12s  %-7s %9s %9s\n"
	fmt.Fprintf(&b, row, "", "", "launchers", "training", "world", "had done", "went on")
	fmt.Fprintf(&b, row, "at", "what happened", "restarted", "again", "size", "step", "at step")
	for _, r := range recs {
		fmt.Fprintf(&b, row, fmt.Sprintf("%.2f s", r.At.Sub(began).Seconds()), r.What,
			fmt.Sprintf("%d ms", r.Launchers.Milliseconds()), fmt.Sprintf("%.2f s", r.Training.Seconds()),
			fmt.Sprintf("%d -> %d", r.WorldBefore, r.World), fmt.Sprint(r.StepBefore), fmt.Sprint(r.Step))
	}
	return b.String()
}
