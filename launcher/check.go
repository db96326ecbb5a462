package launcher

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// check is the examination of this node that a Check asks for. It is over when its goroutine has sent it to
// checks.done; an earlier directive waits in Agent.pending, and the answer does not count.
type check struct {
	cancel context.CancelFunc
	answer CheckInfo
}

// checks examines this node, and knows whether it may get workers.
type checks struct {
	cfg    *Config
	bg     *background
	done   chan *check
	now    *check     // nil when none is under way; without a group
	barred *job.Cause // the Bar that counts
	failed string     // why this node has not passed its newest check
}

// start carries out a Check on a node without workers.
func (k *checks) start(d Directive) {
	if !slices.ContainsFunc(k.cfg.Parts, func(p Part) bool { return p.Check != nil }) {
		k.clear(CheckResult{})
		return
	}
	k.cfg.Logger.Info("checking this node", "cause", d.Cause.Text)
	ctx, cancel := context.WithCancel(k.bg.ctx)
	c := &check{cancel: cancel}
	k.now = c
	k.bg.Go(func() {
		c.answer = k.examine(ctx, d)
		post(k.bg, k.done, c)
	})
}

// examine asks one part after the other until one does not pass.
func (k *checks) examine(ctx context.Context, d Directive) CheckInfo {
	begun := now()
	info := CheckInfo{CheckResult: CheckResult{Passed: true}}
	for _, p := range k.cfg.Parts {
		if p.Check == nil {
			continue
		}
		res := k.ask(ctx, p, d)
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
func (k *checks) ask(ctx context.Context, p Part, d Directive) CheckResult {
	answer := make(chan CheckResult, 1) // a late answer stays in it
	k.cfg.attend(ctx, p.Name, func() {
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

// finished ends a check.
func (k *checks) finished(c *check) {
	k.now = nil
	c.cancel()
}

// report reports the answer of a check that counts.
func (k *checks) report(i CheckInfo) {
	k.cfg.observe(i)
	if i.Passed {
		k.cfg.Logger.Info("the check of this node has passed", "took", rounded(i.Took).String())
		k.clear(i.CheckResult)
		return
	}
	res := i.CheckResult
	if res.Reason = i.reason(); !res.Again {
		k.failed = res.Reason
	}
	k.cfg.Logger.Warn("the check of this node has not passed", "reason", res.Reason, "again", res.Again, "took",
		rounded(i.Took).String())
	k.bg.call("report the check", func(ctx context.Context) error { return k.cfg.Rendezvous.Barred(ctx, res) })
}

// maxReason bounds the reason of a failed check, in bytes.
const maxReason = 1 << 10

// reason returns one line: the check that has not passed, and why.
func (i CheckInfo) reason() string {
	return text.Clip(i.Part+": "+cmp.Or(oneLine(i.Reason), "it does not say why"), maxReason)
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// clear reports that this node may get workers.
func (k *checks) clear(res CheckResult) {
	k.failed = ""
	k.bg.call("report the check", func(ctx context.Context) error { return k.cfg.Rendezvous.Cleared(ctx, res) })
}

// doubtTime is how long a part may take to say whether a check still holds.
const doubtTime = 2 * time.Second

// reportDoubt notifies the rendezvous when the result of the newest check cannot hold any more.
func (k *checks) reportDoubt() error {
	if k.cfg.Doubter.Doubt == nil {
		return nil
	}
	why := k.doubt(k.cfg.Doubter)
	if why == "" {
		return nil
	}
	name := k.cfg.Doubter.Name
	k.cfg.Logger.Warn("the check of this node does not count any more", "part", name, "why", why)
	return k.cfg.Rendezvous.Doubt(k.bg.ctx, text.Clip(name+": "+why, maxReason))
}

// doubt asks d, within a time limit.
func (k *checks) doubt(d Doubter) string {
	ctx, cancel := context.WithTimeout(k.bg.ctx, doubtTime)
	defer cancel()
	said := make(chan string, 1) // a late answer stays in it
	k.cfg.attend(ctx, d.Name, func() { said <- d.Doubt(ctx) })
	select {
	case why := <-said:
		return oneLine(why)
	default:
		return ""
	}
}

// bar carries out a Bar on a node without workers. It notifies the observers once. It reports whether this node has to
// leave: if a check is the cause, unless others depend on this launcher.
func (k *checks) bar(d Directive) (leave bool) {
	if d.Cause.Kind == job.CauseCheck && k.failed == "" {
		k.failed = d.Cause.Text
	}
	if k.barred != nil && *k.barred == d.Cause {
		return false
	}
	k.barred = &d.Cause
	k.cfg.observe(BarInfo{d.Cause})
	switch {
	case d.Cause.Kind != job.CauseCheck:
		k.cfg.Logger.Warn("this node gets no workers", "cause", d.Cause.Text, "kind", d.Cause.Kind)
	case k.cfg.StayWhenBarred:
		k.cfg.Logger.Warn("this node gets no workers; it stays, because other nodes depend on it, and ends with the job",
			"cause", d.Cause.Text, "kind", d.Cause.Kind)
	default:
		return true
	}
	return false
}

// unbar forgets the reason that kept workers from this node, now that it may go on.
func (k *checks) unbar() { k.barred, k.failed = nil, "" }
