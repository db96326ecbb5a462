package netcheck

import (
	"fmt"
	"math/rand/v2"
	"time"

	"dlrover-run/internal/job"
)

// Config of a Check.
type Config struct {
	Spec Spec
	Seed uint64 // of all its random choices
	// Topology names the leaf switch of a node, "" for unknown; nil knows none.
	Topology func(Node) string
}

// phase is the state of a Check.
type phase uint8

const (
	idle      phase = iota
	gathering       // nodes introduce themselves
	inHost          // pairs by TCP
	inCompute       // every node alone, with PyTorch
	inTorch         // pairs with PyTorch
	inComm          // all that passed, together
	closing         // all that came are decided; others are still expected
)

func (p phase) String() string {
	return [...]string{"idle", "gathering", "host", "torch", "torch", "comm", "gathering"}[p]
}

// Check is the state machine of the checks of one run. It is not safe for concurrent use.
//
// One check follows another when nodes are expected: idle, gathering, the phases, idle. Its decisions depend only on
// its events, their times and its seed.
type Check struct {
	cfg Config
	rng *rand.Rand

	phase        phase
	round        int
	began, ended time.Time
	hard         time.Time // when all nodes that came are decided, with the evidence so far
	roster       roster
	pairPhases   []*pairPhase // of this check: host, torch
	computing    computing
	comm         collective
	results      results

	hostNorms, torchNorms norms   // of the run's last check
	matmul                float64 // the same, milliseconds

	timers timers
	now    time.Time
	out    outbox
}

// New returns a Check without nodes.
func New(cfg Config) *Check {
	rng := rand.New(rand.NewPCG(cfg.Seed, 0x6e65746368656b))
	return &Check{cfg: cfg, rng: rng, out: outbox{prefix: rng.Uint32()}, roster: roster{byID: map[string]*node{}}}
}

// Step takes one event and returns the resulting actions, in order.
func (c *Check) Step(now time.Time, ev Event) []Action {
	if now.Before(c.now) {
		now = c.now // time never goes back
	}
	c.now, c.out.actions = now, nil
	c.expire()
	c.take(ev)
	for c.advance() {
	}
	return c.out.actions
}

func (c *Check) take(ev Event) {
	switch ev := ev.(type) {
	case Expect:
		c.expect(ev)
	case Busy:
		c.roster.isBusy(ev.ID, c.now.Add(c.cfg.Spec.Timeout))
	case Arrive:
		c.arrive(ev.Node)
	case Listens:
		c.roster.listens(ev, c.now)
	case Ready:
		c.ready(ev)
	case Report:
		c.report(ev)
	case Gone:
		c.gone(ev.ID)
	}
}

// Next is when the Check next wants a Tick; zero: not before another event.
func (c *Check) Next() time.Time {
	at := c.timers.next()
	if n := c.roster.firstAbsent(); n != nil {
		at = sooner(at, n.due)
	}
	switch c.phase {
	case gathering:
		return sooner(at, c.roster.gatherUntil(c.began, c.cfg.Spec.Timeout))
	case inHost, inTorch:
		return sooner(at, c.hard)
	case inCompute:
		return sooner(at, c.computing.until)
	case inComm:
		return sooner(at, c.comm.until)
	}
	return at
}

// expire ends everything that has timed out.
func (c *Check) expire() {
	for t := c.timers.due(c.now); t != nil; t = c.timers.due(c.now) {
		t.expire(c.now)
		c.finish(t)
	}
	for n := c.roster.firstAbsent(); n != nil && reached(n.due, c.now); n = c.roster.firstAbsent() {
		c.silent(n)
	}
}

// advance goes on to the next phase if it is time, and reports whether it did.
func (c *Check) advance() bool {
	before := c.phase
	switch c.phase {
	case gathering:
		c.advanceGathering()
	case inHost, inTorch:
		c.advancePairs()
	case inCompute:
		if c.computing.waiting == 0 || reached(c.computing.until, c.now) {
			c.endCompute()
		}
	case inComm:
		if c.comm.waiting == 0 || reached(c.comm.until, c.now) {
			c.endComm()
		}
	case closing:
		if c.roster.open == 0 {
			c.end()
		}
	}
	return c.phase != before
}

// Progress is how far a check is, in words; "" while there is none.
func (c *Check) Progress() string {
	if c.phase == idle {
		return ""
	}
	v := c.results.verdicts
	text := fmt.Sprintf("%d of %d nodes passed", v.ok, v.ok+v.excluded+v.others+c.roster.open)
	if c.phase == inHost || c.phase == inTorch {
		text += fmt.Sprintf(", round %d of %d", c.round, max(c.round, c.pairs().judge.base)) // retests are further ones
	}
	return text
}

// end makes the Check idle until nodes are to be checked again. Its results are kept for Picture.
func (c *Check) end() {
	c.phase, c.ended = idle, c.now
	c.out.note(job.EventCheckEnded, "", "%s", c.results.summary(c.roster.open, c.began, c.ended))
}
