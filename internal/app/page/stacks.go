package page

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/merge"
	"dlrover-run/internal/app/answers"
)

// Bounds of the merged stacks of a page. A report has the rest.
const (
	maxFrames   = 300
	maxMerged   = 64 // runs with merged stacks that are kept
	maxRankRuns = 8  // ranges of ranks in the text of a frame
)

// flame is the stacks of all main threads of a run, merged.
type flame struct {
	Frames []frame
	Known  string // of how many ranks
	Left   int    // functions that are not shown: those of the fewest ranks
}

// frame is a function that ranks are in, and the functions that it has called.
type frame struct {
	Func, Place, Ranks string
	Stacks             int
	Tone               answers.Tone
	Calls              []frame
}

// merged keeps the merged stacks of runs until there are others.
type merged struct {
	mu  sync.Mutex
	all map[string]mergedRun
}

type mergedRun struct {
	of   string // the evidence
	busy bool   // a visitor has asked for newer ones
	*flame
}

// mergeTime bounds the wait for the stacks of a run, which are megabytes for 10,000 nodes.
const mergeTime = 5 * time.Second

// stacksOf is nil for a run whose stacks were not collected. One visitor merges newer ones, and the others see the
// older ones meanwhile.
func (p *Page) stacksOf(ctx context.Context, run string, h hang.Picture) *flame {
	if h.Incident == 0 && h.Collection == 0 {
		return nil
	}
	of := fmt.Sprint(h.Epoch, h.Incident, h.Collection, h.Collected, h.Answered, h.Verdict.Line)
	p.merged.mu.Lock()
	kept := p.merged.all[run]
	if kept.of == of || kept.busy {
		p.merged.mu.Unlock()
		return kept.flame
	}
	p.merged.keepLocked(run, mergedRun{kept.of, true, kept.flame})
	p.merged.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, mergeTime)
	defer cancel()
	if found, err := p.cfg.Source.Stacks(ctx, run); err == nil {
		kept.of, kept.flame = of, flameOf(found)
	}
	p.merged.mu.Lock()
	defer p.merged.mu.Unlock()
	p.merged.keepLocked(run, kept)
	return kept.flame
}

func (m *merged) keepLocked(run string, r mergedRun) {
	if _, known := m.all[run]; m.all == nil || !known && len(m.all) >= maxMerged {
		m.all = map[string]mergedRun{}
	}
	m.all[run] = r
}

func flameOf(p hang.Picture) *flame {
	t := merge.Stacks(p.World, p.Evidence, merge.Options{Threads: func(t hang.Thread) bool { return t.Main }})
	if len(t.Roots) == 0 {
		return nil
	}
	var all []*merge.Node
	depth := map[*merge.Node]int{}
	for at := slices.Clone(t.Roots); len(at) > 0; at = at[1:] {
		all = append(all, at[0])
		for _, c := range at[0].Children {
			depth[c] = depth[at[0]] + 1
			at = append(at, c)
		}
	}
	slices.SortStableFunc(all, func(a, b *merge.Node) int { // a caller is on no fewer stacks than the functions it calls
		return cmp.Or(cmp.Compare(b.Stacks, a.Stacks), cmp.Compare(depth[a], depth[b]))
	})
	shown := map[*merge.Node]bool{}
	for _, n := range all[:min(len(all), maxFrames)] {
		shown[n] = true
	}
	d := drawn{shown: shown, verdict: p.Verdict}
	return &flame{Frames: d.frames(t.Roots), Left: len(all) - len(shown),
		Known: fmt.Sprintf("%d of %d ranks", t.Known.Len(), t.All.Len())}
}

// drawn turns nodes into frames.
type drawn struct {
	shown   map[*merge.Node]bool
	verdict hang.Verdict
}

func (d drawn) frames(nodes []*merge.Node) (fs []frame) {
	suspects := d.verdict.SuspectRanks()
	for _, n := range nodes {
		if !d.shown[n] {
			continue
		}
		f := frame{Func: cmp.Or(n.Frame.Func, hang.Unknown), Place: n.Frame.File, Ranks: n.Ranks.Brief(maxRankRuns),
			Stacks: n.Stacks, Tone: answers.Plain, Calls: d.frames(n.Children)}
		if len(n.Lines) == 1 {
			f.Place += fmt.Sprintf(":%d", n.Lines[0])
		}
		if len(suspects) > 0 && len(n.Ranks.Without(suspects)) == 0 {
			f.Tone = answers.Bad
		}
		fs = append(fs, f)
	}
	return fs
}
