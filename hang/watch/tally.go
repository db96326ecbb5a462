package watch

import (
	"slices"
	"strings"
	"time"

	"dlrover-run/hang"
)

// maxTold bounds the process groups of a worker that the judge hears of.
const maxTold = 16

// tally adds up what looks have found, for the judge of slow ranks.
type tally []tallied // by local rank

type tallied struct {
	last   hang.Sample // without its page
	sum    hang.RankLooks
	page   hang.Page // the one before
	groups []hang.GroupLooks

	watched, busy, data time.Duration // since the last look that found a new step
}

// look takes samples of all workers. Those of another process than before begin anew.
func (t *tally) look(samples []hang.Sample) {
	if *t == nil {
		*t = make(tally, len(samples))
	}
	for i := range samples {
		if s := &samples[i]; s.Page != nil {
			(*t)[i].add(s)
		}
	}
}

func (t *tallied) add(s *hang.Sample) {
	if t.last.Worker != s.Worker {
		*t = tallied{last: *s, page: *s.Page, sum: hang.RankLooks{Rank: s.Rank}}
	}
	t.spend(s)
	t.groups = slices.DeleteFunc(t.groups, func(g hang.GroupLooks) bool { _, there := s.Page.Group(g.ID); return !there })
	for _, g := range s.Page.Groups {
		if was, known := t.page.Group(g.ID); known && g.Seq >= was.Seq {
			t.group(g.ID, g.Seq-was.Seq, g.Looks.Since(was.Looks))
		}
	}
	t.settle(s)
	t.sum.Steps += s.Page.Steps - t.page.Steps
	t.page = hang.Page{Steps: s.Page.Steps, Groups: s.Page.Groups}
	t.last = *s
	t.last.Page = nil
}

// spend adds the time since the last look. A thread that is stopped, or waits for a disk, is not seen to use a CPU.
func (t *tallied) spend(s *hang.Sample) {
	took := s.At - t.last.At
	if took <= 0 || s.Proc.Thread != t.last.Proc.Thread {
		return
	}
	busy := s.Proc.MainCPU - t.last.Proc.MainCPU + s.Proc.MainWait - t.last.Proc.MainWait
	switch {
	case s.Page.Phase == hang.PhaseData:
		t.data, busy = t.data+took, 0
	case strings.IndexByte("TtD", s.Proc.State) >= 0:
		busy = took
	}
	t.watched, t.busy = t.watched+took, t.busy+min(max(busy, 0), took)
}

// settle takes the time since the last step into the sums, unless a step since then took far longer than others do: an
// evaluation or a checkpoint on one rank keeps all of them waiting.
func (t *tallied) settle(s *hang.Sample) {
	if s.Page.Steps == t.page.Steps {
		return
	}
	if usual(s.Page.StepTimes, int(min(s.Page.Steps-t.page.Steps, recent))) {
		t.sum.Watched += uint64(t.watched.Milliseconds())
		t.sum.Busy += uint64(t.busy.Milliseconds())
		t.sum.Data += uint64(t.data.Milliseconds())
	}
	t.watched, t.busy, t.data = 0, 0, 0
}

// recent is how many steps others are compared with; the shim does the same.
const recent = 16

// usual reports whether none of the newest steps, which end at these times, took far longer than steps do.
func usual(ends []time.Duration, newest int) bool {
	if len(ends) <= recent {
		return false
	}
	var took [recent]time.Duration
	for i := range took {
		at := len(ends) - recent + i
		took[i] = ends[at] - ends[at-1]
	}
	longest := slices.Max(took[recent-newest:])
	slices.Sort(took[:])
	return 2*longest <= 3*took[recent*3/4]
}

// group adds to the sums of a group. Those that have none, and no collectives, are left out.
func (t *tallied) group(id, begun uint64, l hang.Looks) {
	i := slices.IndexFunc(t.groups, func(g hang.GroupLooks) bool { return g.ID == id })
	if i < 0 {
		if l.Steps == 0 || len(t.groups) == maxTold {
			return
		}
		t.groups, i = append(t.groups, hang.GroupLooks{ID: id}), len(t.groups)
	}
	t.groups[i].Begun += begun
	t.groups[i].Looks = l.Plus(t.groups[i].Looks)
}

// all is what the judge hears, by rank; nil without pages that have sums.
func (t tally) all() (list []hang.RankLooks) {
	for i := range t {
		if r := t[i].sum; len(t[i].groups) > 0 {
			r.Groups = slices.Clone(t[i].groups)
			list = append(list, r)
		}
	}
	return list
}
