package simulate

import (
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// chaos is trouble that begins before the trouble before is over.
type chaos struct {
	c     *cluster
	later []appointment
	away  bool // the daemon is
}

type appointment struct {
	at time.Time
	do func()
}

// after has f done once so much time has passed.
func (x *chaos) after(d time.Duration, f func()) {
	x.later = append(x.later, appointment{time.Now().Add(d), f})
}

// due does what is due, or all.
func (x *chaos) due(all bool) {
	slices.SortStableFunc(x.later, func(a, b appointment) int { return a.at.Compare(b.at) })
	for len(x.later) > 0 && (all || !time.Now().Before(x.later[0].at)) {
		f := x.later[0].do
		x.later = x.later[1:]
		f()
	}
}

// reigns lasts for a time. Then all that was broken is mended.
func (x *chaos) reigns(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); x.due(false) {
		x.trouble()
		time.Sleep(time.Duration(x.c.rnd.Int64N(int64(2 * time.Second))))
	}
	x.due(true)
	time.Sleep(20 * time.Second) // a daemon that was started learns of a pause, and of nodes that leave
	x.refill()
	x.c.order(rendezvous.Order{Kind: rendezvous.OrderResume, Cause: job.CauseOperator})
}

// moment is a time that is often short, and sometimes long.
func (x *chaos) moment() time.Duration {
	return time.Duration(1+x.c.rnd.IntN(300)) * time.Millisecond << (x.c.rnd.IntN(3) * 3)
}

func (x *chaos) trouble() {
	c := x.c
	kind := c.rnd.IntN(10)
	c.rules.heard("trouble", kind)
	switch kind {
	case 0, 1:
		c.failures(1 + c.rnd.IntN(3))
	case 2:
		x.replaces(func() { c.kills(1) })
	case 3:
		c.breaks(1 + c.rnd.IntN(len(c.all)))
	case 4:
		x.cut()
	case 5:
		x.crash()
	case 6:
		c.each(c.pick(1+c.rnd.IntN(len(c.all))), func(n *node) {
			c.rules.excuse(n, time.Now().Add(time.Minute)) // a daemon that was started may not wait for so long
			n.link.loseAnswer()
		})
	case 7:
		x.replaces(func() { c.leaves() })
	case 8:
		c.order(rendezvous.Order{Kind: rendezvous.OrderPause, Cause: job.CauseOperator, Text: "maintenance"})
		x.after(x.moment(), func() { c.order(rendezvous.Order{Kind: rendezvous.OrderResume, Cause: job.CauseOperator}) })
	case 9:
		c.order(rendezvous.Order{Kind: rendezvous.OrderRestart, Cause: job.CauseOperator, Text: "again"})
	}
}

// replaces has as many nodes come as go.
func (x *chaos) replaces(goes func()) {
	c := x.c
	if c.sweep(); len(c.all) < c.params.Min+6 {
		return
	}
	goes()
	x.after(x.moment(), x.refill)
}

// refill has the cluster as large as the run can take.
func (x *chaos) refill() {
	if x.c.sweep(); len(x.c.all) < x.c.params.Max {
		x.c.start(x.c.params.Max-len(x.c.all), time.Second)
	}
}

func (x *chaos) cut() {
	ns := x.c.pick(1 + x.c.rnd.IntN(len(x.c.all)/4+1))
	d := x.moment()
	x.c.each(ns, func(n *node) {
		x.c.rules.excuse(n, time.Now().Add(d+time.Minute))
		n.link.hangUp(true)
	})
	x.after(d, func() { x.c.each(ns, func(n *node) { n.link.mend() }) })
}

func (x *chaos) crash() {
	if x.away {
		return
	}
	keeps := x.c.rnd.IntN(2) == 0
	x.away = true
	x.c.crash()
	if !keeps {
		x.c.forget()
	}
	x.after(x.moment(), func() {
		x.away = false
		x.c.boot()
	})
}
