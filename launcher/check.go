package launcher

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// check is the examination of this node that a Check asks for. It is over when its goroutine has sent it to
// Agent.checked; a directive that comes before that waits in Agent.pending, and the answer does not count.
type check struct {
	cancel context.CancelFunc
	answer CheckInfo
}

// startCheck carries out a Check on a node without workers.
func (a *Agent) startCheck(d Directive) {
	if len(a.parts.checkers) == 0 {
		a.clear(time.Time{})
		return
	}
	a.log.Info("checking this node", "cause", d.Cause)
	ctx, cancel := context.WithCancel(a.ctx)
	c := &check{cancel: cancel}
	a.check = c
	a.wg.Go(func() {
		c.answer = a.examine(ctx, d)
		select {
		case a.checked <- c:
		case <-a.over:
		}
	})
}

// examine asks one Checker after the other until one does not pass.
func (a *Agent) examine(ctx context.Context, d Directive) CheckInfo {
	begun := now()
	info := CheckInfo{CheckResult: CheckResult{Passed: true}}
	for _, c := range a.parts.checkers {
		res := a.ask(ctx, c, d)
		if !res.Passed {
			info.Part, info.CheckResult = c.name, res
			break
		}
		info.Until = earlier(info.Until, res.Until)
	}
	info.Took = now().Sub(begun)
	return info
}

// ask is one Checker's answer. One that is given up has none that passes.
func (a *Agent) ask(ctx context.Context, c named[Checker], d Directive) CheckResult {
	answer := make(chan CheckResult, 1) // one that comes late stays in it
	a.attend(ctx, c.name, func() {
		res, err := c.part.Check(ctx, d)
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
	a.observe(func(o Observer) { o.Checked(c.answer) })
	if c.answer.Passed {
		a.log.Info("the check of this node has passed", "took", rounded(c.answer.Took).String())
		a.clear(c.answer.Until)
		return
	}
	reason := c.answer.reason()
	a.failedCheck = reason
	a.log.Warn("the check of this node has not passed", "reason", reason, "took", rounded(c.answer.Took).String())
	a.call("report the check", func() error { return a.cfg.Rendezvous.Barred(a.ctx, reason) })
}

// maxReason bounds what is told of a check that did not pass, in bytes.
const maxReason = 1 << 10

// reason says in one line which check has not passed, and why.
func (i CheckInfo) reason() string {
	why := strings.Join(strings.Fields(i.Reason), " ")
	if why == "" {
		why = "it does not say why"
	}
	why = i.Part + ": " + why
	return strings.ToValidUTF8(why[:min(len(why), maxReason)], "")
}

// clear reports that this node may get workers.
func (a *Agent) clear(until time.Time) {
	a.failedCheck = ""
	a.call("report the check", func() error { return a.cfg.Rendezvous.Cleared(a.ctx, until) })
}

// bar carries out a Bar on a node without workers: there is nothing to do but to say it, once.
func (a *Agent) bar(d Directive) {
	info := BarInfo{d.Cause, d.CauseKind}
	if d.CauseKind == CauseCheck && a.failedCheck == "" {
		a.failedCheck = d.Cause
	}
	if a.barred != nil && *a.barred == info {
		return
	}
	a.barred = &info
	a.log.Warn("this node gets no workers", "cause", d.Cause, "kind", d.CauseKind)
	a.observe(func(o Observer) { o.Barred(info) })
}

// unbar forgets what kept workers from this node, now that it is told to go on.
func (a *Agent) unbar() { a.barred, a.failedCheck = nil, "" }

// maxStrange bounds how many unknown kinds of directives are told apart.
const maxStrange = 16

// strange reports whether k is of a later version of the rendezvous, which is said once. Such a duty changes nothing.
func (a *Agent) strange(k Kind) bool {
	if slices.Contains([]Kind{Wait, Lead, Run, Stop, Done, Fail, Check, Bar}, k) {
		return false
	}
	if len(a.unknown) < maxStrange && !slices.Contains(a.unknown, k) {
		a.unknown = append(a.unknown, k)
		a.log.Warn("the rendezvous gives a directive that this version does not know; it is ignored", "directive", string(k))
	}
	return true
}
