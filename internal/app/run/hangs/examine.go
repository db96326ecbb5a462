package hangs

import (
	"context"
	"fmt"
	"strings"

	"dlrover-run/hang"
	"dlrover-run/hang/merge"
	"dlrover-run/hang/watch"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
)

// Bounds of the text about workers that are about to be stopped.
const (
	saidGroups = 8
	saidFrames = 4
)

// examine logs the activity of the living workers when a collective timed out.
func (h *hangs) examine(ctx context.Context, e launcher.Epoch, pids []int, why string) {
	for _, line := range doing(watch.New(h.config(e, pids)).Once(ctx)) {
		h.log.Warn("before the stop: "+line, "round", e.Round, "epoch", e.Epoch, "why", text.EscapeLine(why))
	}
}

// doing describes the activity of ranks, those in the same functions in one line.
func doing(ev []hang.Evidence) (lines []string) {
	groups := merge.Groups(ev, false)
	for i, g := range groups {
		if i == saidGroups {
			return append(lines, fmt.Sprintf("and %d more groups of ranks", len(groups)-i))
		}
		lines = append(lines, fmt.Sprintf("ranks %s were in %s", g.Ranks.Brief(16), calls(g.Frames)))
	}
	return lines
}

// calls are the innermost frames.
func calls(frames []hang.Frame) string {
	var names []string
	for _, f := range frames[:min(len(frames), saidFrames)] {
		name := f.Func
		if f.File != "" {
			name = fmt.Sprintf("%s at %s", f.Func, f.Source())
		}
		names = append(names, text.EscapeLine(name))
	}
	return strings.Join(names, ", called by ")
}
