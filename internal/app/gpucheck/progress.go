package gpucheck

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"dlrover-run/switchbox"
)

// adaptor is the name of this one in Reports.
const adaptor = "nvml"

// progress records the running steps, in case one hangs, and prints one Report: the check's or, if that is late, the
// watchdog's.
type progress struct {
	print func(switchbox.Report)

	mu     sync.Mutex
	done   bool
	report switchbox.Report // the certain part so far
	steps  map[string]step  // running steps, by their owners
}

// step is one call into a driver, or some that belong together.
type step struct {
	what  string
	since time.Time
}

func newProgress(print func(switchbox.Report)) *progress {
	return &progress{
		print: print, steps: map[string]step{}, report: switchbox.Report{Adaptor: adaptor},
	}
}

// doing notes the present step of who; "" ends it.
func (p *progress) doing(who, what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.steps, who)
	if what != "" {
		p.steps[who] = step{what, time.Now()}
	}
}

// keep notes a Report that needs the rest of the check no more.
func (p *progress) keep(r switchbox.Report) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.Findings, r.Pairs = slices.Clone(r.Findings), slices.Clone(r.Pairs) // the check goes on with its own
	p.report = r
}

// finish prints the check's Report, unless the watchdog was faster: then it waits for the end of the process.
func (p *progress) finish(r switchbox.Report) {
	p.mu.Lock()
	if p.done {
		p.mu.Unlock()
		select {}
	}
	defer p.mu.Unlock()
	p.done = true
	p.print(r)
}

// watch gives up after timeout: it prints the known part and ends the process, because nothing else ends a call that
// hangs.
func (p *progress) watch(timeout time.Duration, exit func(int)) (stop func()) {
	t := time.AfterFunc(timeout, func() {
		p.mu.Lock()
		if p.done {
			p.mu.Unlock()
			return
		}
		p.done = true
		r := p.late(timeout, time.Now())
		p.print(r)
		p.mu.Unlock()
		exit(exitTimeout)
	})
	return func() { t.Stop() }
}

// late is the Report at the timeout. A step that took at least half of the time is a driver that hangs, which fails the
// node; many short steps are a check that asks for too much.
func (p *progress) late(timeout time.Duration, now time.Time) switchbox.Report {
	r := p.report
	oldest := p.oldest()
	lasted := now.Sub(oldest.since)
	switch {
	case oldest.what == "":
		r.State, r.Reason = switchbox.Skipped, fmt.Sprintf("not done within %s", timeout)
	case lasted < timeout/2:
		r.State, r.Reason = switchbox.Skipped, fmt.Sprintf("not done within %s; at the end: %s", timeout, oldest.what)
	default:
		r.Findings = append(r.Findings, switchbox.Finding{
			Check: adaptor, Kind: "gpu.driver", Severity: switchbox.Fatal, Metric: "hang", Value: lasted.Seconds(), Unit: "s",
			Threshold: (timeout / 2).Seconds(),
			Text: fmt.Sprintf("the driver does not answer: %s takes more than %s", oldest.what,
				lasted.Round(100*time.Millisecond)),
		})
	}
	r.Conclude()
	return r
}

func (p *progress) oldest() (o step) {
	for _, s := range p.steps {
		if o.what == "" || s.since.Before(o.since) {
			o = s
		}
	}
	return o
}
