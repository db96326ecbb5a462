package ctl

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
	"dlrover-run/hang/serve"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/job"
	"dlrover-run/internal/table"
	"dlrover-run/internal/text"
)

func (c *call) showHang() error {
	p, err := serve.Over(c.daemon.client).Picture(c, c.run(), false)
	if err != nil {
		if _, unknown := c.daemon.status(c); unknown != nil {
			return unknown
		}
		return c.daemon.noHangs(err)
	}
	if c.args.Bool("json") {
		return c.json(p)
	}
	describeHang(c.stdout, c.run(), c.now(), p)
	listSuspicions(c.stdout, p)
	listVerdicts(c.stdout, p.Verdicts)
	return nil
}

func describeHang(w io.Writer, run string, now time.Time, p hang.Picture) {
	t := table.New(w)
	t.Row("run", run)
	t.Row("action", hangAction(p.Spec))
	t.Row("state", hangState(p))
	if p.Incident > 0 {
		t.Row("epoch", epochText(p.Epoch))
	}
	if p.State != hang.StateIdle && p.State != hang.StateCollecting {
		t.Row("suspected", fmt.Sprintf("%s ago; nodes that suspect it now: %d", describe.Age(now.Sub(p.Began)), p.Suspecting))
		t.Row("last progress", describe.Age(now.Sub(p.Since))+" ago")
	}
	if p.Verdict.Line != "" && p.State != hang.StateDecided && p.State != hang.StateIdle {
		t.Row("so far", p.Verdict.Line)
	}
	if len(p.Silent) > 0 && p.Asked > 0 {
		t.Row("no answer", "nodes "+rankset.Of(p.Silent...).String())
	}
	if p.Restarts > 0 {
		t.Row("restarts", fmt.Sprintf("%d for hangs, without progress between them", p.Restarts))
	}
	for _, s := range p.Slowed {
		t.Row("slow", s.Line())
	}
	for _, s := range p.Slow {
		t.Row("slow", fmt.Sprintf("node %d %s: %s", s.GroupRank, s.Node, s.Text))
	}
	_ = t.Flush()
}

// hangAction describes the action on a hang.
func hangAction(spec string) string {
	s, err := hang.ParseSpec(spec)
	if err != nil {
		return spec
	}
	switch s.Action {
	case hang.ActRestart:
		return "the workers are started anew"
	case hang.ActStop:
		return "the run is stopped"
	}
	return "report only"
}

func hangState(p hang.Picture) string {
	answers := fmt.Sprintf("%d of %d nodes have answered", p.Answered, p.Asked)
	switch p.State {
	case hang.StateIdle:
		return "nothing is suspected"
	case hang.StateSuspected:
		return "something is suspected; the nodes will be asked"
	case hang.StateAsking:
		return "evidence is being collected: " + answers
	case hang.StateWaiting:
		return "not certain yet; the nodes will be asked again"
	case hang.StateConfirming:
		return "the verdict is being confirmed: " + answers
	case hang.StateDecided:
		return "decided"
	case hang.StateCollecting:
		return "stacks are being collected, because somebody wants to see them"
	}
	return string(p.State)
}

func epochText(e job.EpochID) string { return fmt.Sprintf("round %d, epoch %d", e.Round, e.Epoch) }

func listSuspicions(w io.Writer, p hang.Picture) {
	if len(p.Suspicions) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := table.New(w, "RANK", "NODE", "NO PROGRESS FOR", "NORMAL", "WHY")
	for _, s := range p.Suspicions {
		why := s.Why
		if s.Starved >= time.Second {
			why += fmt.Sprintf(" (its observer did not run for %s)", describe.Age(s.Starved))
		}
		t.Row(strconv.Itoa(s.Rank), s.Node, describe.Age(s.Age), "up to "+describe.Age(s.Limit), why)
	}
	_ = t.Flush()
}

// listVerdicts prints them, the newest first, with the evidence about the suspects.
func listVerdicts(w io.Writer, told []hang.Told) {
	for _, v := range slices.Backward(told) {
		end := string(v.Action)
		if v.Decided {
			end += "; it counts as a hang"
		}
		if v.Withdrawn {
			end = "withdrawn: the workers made progress later"
		}
		fmt.Fprintf(w, "\n%s, %s: %s\n", v.At.Local().Format(time.DateTime), epochText(v.Epoch),
			text.EscapeLine(v.Verdict.Line))
		t := table.New(w)
		t.Row("  kind", string(v.Verdict.Kind)+", confidence "+cmp.Or(string(v.Verdict.Confidence), "unknown"))
		t.Row("  action", end)
		for _, s := range v.Verdict.Suspects[:min(len(v.Verdict.Suspects), maxSuspects)] {
			t.Row("  suspect", suspectText(s))
		}
		if more := len(v.Verdict.Suspects) - maxSuspects; more > 0 {
			t.Row("", fmt.Sprintf("and %d more", more))
		}
		if v.Verdict.Waiting != "" {
			t.Row("  waiting", fmt.Sprintf("ranks %s in %s", v.Verdict.Waiting, cmp.Or(v.Verdict.In, "a collective")))
		}
		if v.Verdict.NoData != "" {
			t.Row("  no data", "ranks "+v.Verdict.NoData)
		}
		_ = t.Flush()
	}
}

// maxSuspects bounds the suspects that are shown of a verdict.
const maxSuspects = 16

func suspectText(s hang.Suspect) string {
	text := fmt.Sprintf("rank %d, node %d %s, pid %d: %s", s.Rank, s.GroupRank, s.Node, s.PID, s.Doing)
	if s.Where.Func != "" {
		text += " in " + s.Where.Func
	}
	if s.Where.File != "" {
		text += " at " + s.Where.Source()
	}
	if s.Exception != "" {
		text += ", after its main thread has ended by " + s.Exception
	}
	return text
}
