package hang

import (
	"fmt"
	"slices"
	"time"
)

// play follows a simulated job as all parts do together: the detectors of its nodes, which report and answer as
// launchers do, the Incident and the judge.
type play struct {
	job       *simJob
	c         *Incident
	detectors []*Detector
	now       time.Duration
	deaf      func(now time.Duration) bool // launchers and the judge do not run

	samples []Sample
	pages   []Page
	found   [][]Suspicion   // by node
	said    []time.Duration // when each node has reported last
	ask     Ask             // that nodes answer now
	asked   int
	begun   time.Duration // when they were asked
	ev      []Evidence

	suspicions int
	suspected  time.Duration // first
	told       []Ask
	at         []time.Duration // when that was
	orders     []Order
	acted      time.Duration
}

func newPlay(j *simJob, action Action) *play {
	p := &play{job: j, now: now0, pages: make([]Page, j.ranks), samples: make([]Sample, j.ranks)}
	for range j.world.Nodes {
		p.detectors = append(p.detectors, NewDetector(DetectorConfig{Outside: j.outside}))
	}
	p.found, p.said = make([][]Suspicion, len(p.detectors)), make([]time.Duration, len(p.detectors))
	p.c = NewIncident(IncidentConfig{Spec: Spec{Action: action}, Judge: Judge})
	p.step(Begin{World: j.world})
	return p
}

// run goes on second by second for as long as that is wanted.
func (p *play) run(on func() bool) {
	for ; on(); p.now += time.Second {
		p.job.advance(p.now)
		if p.deaf != nil && p.deaf(p.now) {
			continue
		}
		period := lookPeriod
		if p.job.outside {
			period = outsidePeriod
		}
		if (p.now-now0)%period == 0 {
			p.look()
		}
		p.answer()
		if next := p.c.Next(); !next.IsZero() && !next.After(p.clock()) {
			p.step(Tick{})
		}
	}
}

func (p *play) clock() time.Time { return dawn.Add(p.now - now0) }

func (p *play) look() {
	for r := range p.samples {
		p.samples[r], _ = p.job.sample(r, p.now, &p.pages[r])
	}
	for n, d := range p.detectors {
		before := p.found[n]
		p.found[n] = d.Look(p.now, p.samples[2*n:2*n+2], nil)
		same := slices.EqualFunc(before, p.found[n], func(a, b Suspicion) bool { return a.Rank == b.Rank })
		if !same || len(before) > 0 && p.now-p.said[n] >= RepeatEvery {
			p.report(n, Report{})
		}
	}
}

func (p *play) report(n int, r Report) {
	p.said[n] = p.now
	r.Epoch, r.Suspicions, r.Paused = p.job.world.Epoch, p.found[n], p.detectors[n].Paused()
	p.step(Heard{n, r})
}

// answer takes the samples that are due, and sends them when there are all.
func (p *play) answer() {
	looks := map[askKind]int{AskEvidence: 3, AskPages: 1}[p.ask.What]
	if looks == 0 || p.now-p.begun < time.Duration(2*p.taken())*time.Second {
		return
	}
	for r := range p.job.ranks {
		s, does := p.job.sample(r, p.now, &Page{})
		if len(p.ev) <= r {
			g := []Group{{ID: 1, Name: "0", Ranks: fmt.Sprintf("0-%d", p.job.ranks-1)}}
			e := Evidence{Worker: s.Worker, Groups: g}
			if p.ask.What == AskEvidence {
				e.Stacks = does.stack
			}
			p.ev = append(p.ev, e)
		}
		p.ev[r].Samples = append(p.ev[r].Samples, s)
		p.ev[r].Work = p.detectors[r/2].Work(r)
	}
	if p.taken() < looks {
		return
	}
	ask, ev := p.ask, p.ev
	p.ask, p.ev = Ask{}, nil
	for n := range p.detectors {
		p.report(n, Report{Ask: ask.Seq, Evidence: ev[2*n : 2*n+2]})
	}
}

func (p *play) taken() int {
	if len(p.ev) == 0 {
		return 0
	}
	return len(p.ev[0].Samples)
}

func (p *play) step(ev IncidentEvent) {
	for _, a := range p.c.Step(p.clock(), ev) {
		switch {
		case a.Ask != nil && a.Ask.What == TellVerdict:
			p.told, p.at = append(p.told, *a.Ask), append(p.at, p.now)
		case a.Ask != nil && (a.Ask.What == AskEvidence || a.Ask.What == AskPages):
			p.ask, p.begun, p.ev = *a.Ask, p.now, nil
			p.asked++
		case a.Note != nil && a.Note.Event == "hang-suspected":
			if p.suspicions++; p.suspicions == 1 {
				p.suspected = p.now
			}
		case a.Order != nil:
			p.orders, p.acted = append(p.orders, *a.Order), p.now
		}
	}
}

// decided is how many lines of level ERROR there were.
func (p *play) decided() (n int) {
	for _, a := range p.told {
		n += count(a.Decided)
	}
	return n
}
