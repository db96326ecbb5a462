package launcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/policy"
)

// check is the examination of this node that a Check asks for. It is over when its goroutine has sent it to
// Agent.checked; an earlier directive waits in Agent.pending, and the answer does not count.
type check struct {
	cancel context.CancelFunc
	answer CheckInfo
}

// startCheck carries out a Check on a node without workers.
func (a *Agent) startCheck(d Directive) {
	if !slices.ContainsFunc(a.cfg.Parts, func(p Part) bool { return p.Check != nil }) {
		a.clear(CheckResult{})
		return
	}
	a.log.Info("checking this node", "cause", d.Cause.Text)
	ctx, cancel := context.WithCancel(a.bg.ctx)
	c := &check{cancel: cancel}
	a.check = c
	a.bg.Go(func() {
		c.answer = a.examine(ctx, d)
		post(a.bg, a.checked, c)
	})
}

// examine asks one part after the other until one does not pass.
func (a *Agent) examine(ctx context.Context, d Directive) CheckInfo {
	begun := now()
	info := CheckInfo{CheckResult: CheckResult{Passed: true}}
	for _, p := range a.cfg.Parts {
		if p.Check == nil {
			continue
		}
		res := a.ask(ctx, p, d)
		if !res.Passed {
			info.Part, info.CheckResult = p.Name, res
			break
		}
		info.Until, info.Domain = earlier(info.Until, res.Until), cmp.Or(info.Domain, res.Domain)
		info.Covered = append(info.Covered, res.Covered...)
	}
	info.Took = now().Sub(begun)
	return info
}

// ask is one part's answer. A part that is given up has none that passes.
func (a *Agent) ask(ctx context.Context, p Part, d Directive) CheckResult {
	answer := make(chan CheckResult, 1) // a late answer stays in it
	a.cfg.attend(ctx, p.Name, func() {
		res, err := p.Check(ctx, CheckRequest{d})
		if err != nil {
			res = CheckResult{Reason: fmt.Sprintf("could not check: %s", err)}
		}
		answer <- res
	})
	select {
	case res := <-answer:
		return res
	default:
		return CheckResult{}
	}
}

// earlier is the earlier of two times, of which zero is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// onChecked reports the answer, unless something else is to be done by now.
func (a *Agent) onChecked(c *check) {
	a.check = nil
	c.cancel()
	if d := a.pending; d != nil {
		a.pending = nil
		a.apply(*d)
		return
	}
	a.cfg.observe(c.answer)
	if c.answer.Passed {
		a.log.Info("the check of this node has passed", "took", rounded(c.answer.Took).String())
		a.clear(c.answer.CheckResult)
		return
	}
	res := c.answer.CheckResult
	if res.Reason = c.answer.reason(); !res.Again {
		a.failedCheck = res.Reason
	}
	a.log.Warn("the check of this node has not passed", "reason", res.Reason, "again", res.Again, "took",
		rounded(c.answer.Took).String())
	a.bg.call("report the check", func(ctx context.Context) error { return a.cfg.Rendezvous.Barred(ctx, res) })
}

// maxReason bounds the reason of a failed check, in bytes.
const maxReason = 1 << 10

// reason returns one line: the check that has not passed, and why.
func (i CheckInfo) reason() string {
	return text.Clip(i.Part+": "+cmp.Or(oneLine(i.Reason), "it does not say why"), maxReason)
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// clear reports that this node may get workers.
func (a *Agent) clear(res CheckResult) {
	a.failedCheck = ""
	a.bg.call("report the check", func(ctx context.Context) error { return a.cfg.Rendezvous.Cleared(ctx, res) })
}

// doubtTime is how long a part may take to say whether a check still holds.
const doubtTime = 2 * time.Second

// reportDoubt notifies the rendezvous when the result of the newest check cannot hold any more.
func (a *Agent) reportDoubt() error {
	if a.cfg.Doubter.Doubt == nil {
		return nil
	}
	why := a.doubt(a.cfg.Doubter)
	if why == "" {
		return nil
	}
	name := a.cfg.Doubter.Name
	a.log.Warn("the check of this node does not count any more", "part", name, "why", why)
	return a.cfg.Rendezvous.Doubt(a.bg.ctx, text.Clip(name+": "+why, maxReason))
}

// doubt asks d, within a time limit.
func (a *Agent) doubt(d Doubter) string {
	ctx, cancel := context.WithTimeout(a.bg.ctx, doubtTime)
	defer cancel()
	said := make(chan string, 1) // a late answer stays in it
	a.cfg.attend(ctx, d.Name, func() { said <- d.Doubt(ctx) })
	select {
	case why := <-said:
		return oneLine(why)
	default:
		return ""
	}
}

// bar carries out a Bar on a node without workers. It notifies the observers once. It leaves if a check is the cause,
// unless others depend on this launcher.
func (a *Agent) bar(d Directive) {
	if d.Cause.Kind == job.CauseCheck && a.failedCheck == "" {
		a.failedCheck = d.Cause.Text
	}
	if a.barred != nil && *a.barred == d.Cause {
		return
	}
	a.barred = &d.Cause
	a.cfg.observe(BarInfo{d.Cause})
	switch {
	case d.Cause.Kind != job.CauseCheck:
		a.log.Warn("this node gets no workers", "cause", d.Cause.Text, "kind", d.Cause.Kind)
	case a.cfg.StayWhenBarred:
		a.log.Warn("this node gets no workers; it stays, because other nodes depend on it, and ends with the job",
			"cause", d.Cause.Text, "kind", d.Cause.Kind)
	default:
		a.leaveBarred()
	}
}

// leaveBarred ends this node's part of the job for its check. The others go on, if they are enough.
func (a *Agent) leaveBarred() {
	ctx, cancel := context.WithTimeout(a.bg.ctx, leaveBudget)
	defer cancel()
	if _, err := a.cfg.Rendezvous.Leave(ctx, "its check has not passed", nil); err != nil {
		a.log.Debug("leave", "err", err)
	}
	why := "this node has not passed its check and is left out of the job: " + a.failedCheck
	a.end(Result{Reason: policy.NodeCheckFailed, Err: errors.New(why), Verdict: why})
}

// unbar forgets the reason that kept workers from this node, now that it may go on.
func (a *Agent) unbar() { a.barred, a.failedCheck = nil, "" }

// maxStrange bounds how many unknown kinds of directives are distinguished.
const maxStrange = 16

// strange reports whether k is of a later version of the rendezvous, which is logged once. Such a duty changes nothing.
func (a *Agent) strange(k job.Kind) bool {
	if slices.Contains([]job.Kind{job.Wait, job.Lead, job.Run, job.Stop, job.Done, job.Fail, job.Check, job.Bar}, k) {
		return false
	}
	if len(a.unknown) < maxStrange && !slices.Contains(a.unknown, k) {
		a.unknown = append(a.unknown, k)
		a.log.Warn("the rendezvous gives a directive that this version does not know; it is ignored", "directive", string(k))
	}
	return true
}
