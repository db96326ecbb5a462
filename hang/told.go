package hang

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// toldVerdicts are the verdicts that were reported in a run.
type toldVerdicts struct {
	list   []Told // the newest last
	lapsed uint64 // the incident that was reported, and then lapsed; 0: none
}

// newest is nil if there is none.
func (t *toldVerdicts) newest() *Told {
	if len(t.list) == 0 {
		return nil
	}
	return &t.list[len(t.list)-1]
}

func (t *toldVerdicts) add(v Told) {
	t.list = append(t.list, v)
	t.list = slices.Delete(t.list, 0, max(len(t.list)-maxTold, 0))
}

// tell reports the verdict of f to nodes and people. again: all but the decision was reported before.
func (t *toldVerdicts) tell(now time.Time, f *file, again bool) []Effect {
	f.told++
	v := f.verdict
	a := v.ask(f.id)
	a.Again = again
	if again {
		t.newest().Verdict = v
		return []Effect{{Ask: &a}}
	}
	t.add(Told{Incident: f.id, Epoch: f.world.Epoch, At: now, Verdict: v, Action: ActReport})
	return []Effect{{Ask: &a}, noteOf(job.EventHangVerdict, v.node(), v.Line)}
}

// decided reports that the verdict counts as a hang, and the action that follows now.
func (t *toldVerdicts) decided(now time.Time, f *file, again bool, action Action) []Effect {
	es := t.tell(now, f, again)
	es[0].Ask.Decided, es[0].Ask.Action = true, action
	told := t.newest()
	told.Decided = true
	if !again {
		told.Action = action
	}
	es = append(es, noteOf(job.EventHangDecided, f.verdict.node(), f.verdict.Line))
	if f.verdict.Kind == KindComm {
		es = append(es, Effect{Doubt: f.verdict.Line})
	}
	return es
}

// order acts upon the newest verdict. why is the reason of an action that was not wanted.
func (t *toldVerdicts) order(f *file, action Action, why string) Effect {
	t.newest().Action = action
	line := f.verdict.Line
	if why != "" {
		line = why + ": " + line
	}
	return Effect{Order: &Order{Action: action, Epoch: f.world.Epoch, Text: line}}
}

// retract withdraws the reports of an incident.
func (t *toldVerdicts) retract(incident uint64, line string) []Effect {
	for i := range t.list {
		t.list[i].Withdrawn = t.list[i].Withdrawn || t.list[i].Incident == incident
	}
	return []Effect{{Ask: &Ask{What: TellOver, Incident: incident, Line: line}}, noteOf(job.EventHangWithdrawn, "", line)}
}

// speaks withdraws a lapsed incident: a node of a suspect reports again, and suspects nothing.
func (t *toldVerdicts) speaks(groupRank int, name string) []Effect {
	if t.lapsed == 0 {
		return nil
	}
	i := slices.IndexFunc(t.list, func(v Told) bool { return v.Incident == t.lapsed })
	if i < 0 {
		return nil
	}
	ss := t.list[i].Verdict.Suspects
	if len(ss) > 0 && !slices.ContainsFunc(ss, func(s Suspect) bool { return s.GroupRank == groupRank }) {
		return nil
	}
	lapsed := t.lapsed
	t.lapsed = 0
	return t.retract(lapsed, fmt.Sprintf("node %d %s speaks again: its workers make progress", groupRank, name))
}

func noteOf(event job.Event, node, text string) Effect {
	return Effect{Note: &job.Note{Event: event, Node: node, Text: text}}
}

// node is that of the first suspect.
func (v *Verdict) node() string {
	if len(v.Suspects) == 0 {
		return ""
	}
	return v.Suspects[0].Node
}

// maxLine bounds a Line that is sent, in bytes: a notice has 4 KiB.
const maxLine = 1 << 10

// ask is the notice of a verdict that is only reported.
func (v *Verdict) ask(incident uint64) Ask {
	a := Ask{What: TellVerdict, Incident: incident, Line: text.Head(v.Line, maxLine), Kind: v.Kind,
		Confidence: v.Confidence, Age: v.Age, Action: ActReport, Waiting: clipRanks(v.Waiting, maxLine/2)}
	for _, s := range v.Suspects[:min(len(v.Suspects), maxListed)] {
		a.Suspects = append(a.Suspects, s.Rank)
	}
	return a
}

// clipRanks leaves the first ranks of a text such as 0-1,3, in so many bytes.
func clipRanks(ranks string, room int) string {
	if len(ranks) <= room {
		return ranks
	}
	return ranks[:max(strings.LastIndexByte(ranks[:room+1], ','), 0)]
}

// decisive verdicts are reported, and acted upon.
func decisive(k Kind) bool { return k != KindNone && k != KindSlow }

// tell is when v may be reported, counted from the last progress.
func (v *Verdict) tell() time.Duration {
	if v.Tell == 0 {
		return v.Deadline
	}
	return min(v.Tell, v.Deadline)
}

// sameSuspects reports whether two verdicts name the same ranks.
func sameSuspects(a, b Verdict) bool {
	return slices.EqualFunc(a.Suspects, b.Suspects, func(x, y Suspect) bool { return x.Rank == y.Rank })
}

// sameVerdict reports whether nothing has changed that people want to know.
func sameVerdict(a, b Verdict) bool {
	return a.Kind == b.Kind && a.Confidence == b.Confidence && sameSuspects(a, b)
}

func seconds(d time.Duration) string {
	return fmt.Sprintf("%d s", max(d, 0).Round(time.Second)/time.Second)
}
