package simulate

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// storm is one kind of trouble. It returns how long the run may take from then on until all nodes have their places.
type storm struct {
	name  string
	keeps bool // no worker is stopped
	blows func(c *cluster) time.Duration
}

// Bounds of the time until all have their places again, without the time in which the cause is found.
const (
	soon   = 2 * time.Second
	broken = rendezvous.BrokenGrace + soon
	silent = 90 * time.Second // a Watch that nobody reads is held for a minute
)

func storms() []storm {
	type limit = time.Duration
	return []storm{
		{"a worker fails", false, func(c *cluster) limit { return c.failures(1) }},
		{"many workers fail at once", false, func(c *cluster) limit { return c.failures(20) }},
		{"a launcher is killed", false, func(c *cluster) limit { return c.kills(1) }},
		{"one in a hundred is killed", false, func(c *cluster) limit { return c.kills(c.share(100)) }},
		{"racks lose their power", false, (*cluster).blackOut},
		{"all connections break", true, func(c *cluster) limit { return c.breaks(len(c.all)) }},
		{"some connections break", true, func(c *cluster) limit { return c.breaks(c.share(10)) }},
		{"nodes are cut off for a second", true, func(c *cluster) limit { return c.cuts(c.share(50), time.Second) }},
		{"nodes are cut off for long", false, func(c *cluster) limit { return c.cuts(c.share(100), 20*time.Second) }},
		{"growth by a tenth", false, (*cluster).grows},
		{"the daemon is killed", true, func(c *cluster) limit { return c.crashes(true, time.Second) }},
		{"the daemon is killed with its disk", true, func(c *cluster) limit { return c.crashes(false, time.Second) }},
		{"the daemon is away for long", true, func(c *cluster) limit { return c.crashes(true, 40*time.Second) }},
		{"the daemon is killed in a restart", false, func(c *cluster) limit { return c.crashesInRestart(true) }},
		{"a daemon is killed with its disk in a restart", false, func(c *cluster) limit { return c.crashesInRestart(false) }},
		{"slow nodes", false, (*cluster).slows},
		{"answers are lost", false, (*cluster).losesAnswers},
		{"a pause", false, (*cluster).pauses},
		{"nodes leave", false, (*cluster).leaves},
		{"a node is drained", false, (*cluster).drains},
	}
}

// share is one of so many nodes.
func (c *cluster) share(of int) int { return len(c.all)/of + 1 }

// failures lets workers of so many nodes fail.
func (c *cluster) failures(count int) time.Duration {
	c.each(c.pick(count), func(n *node) { n.tell(n.fail) })
	return soon
}

// tell has the launcher do something, unless it is busy with four such things.
func (n *node) tell(f func() error) {
	select {
	case n.faults <- f:
	default:
	}
}

func (c *cluster) kills(count int) time.Duration {
	c.each(c.pick(count), func(n *node) {
		c.rules.excuse(n, time.Time{})
		n.kill()
	})
	c.mark("a launcher was killed")
	return broken
}

// blackOut takes two racks of neighbours.
func (c *cluster) blackOut() time.Duration {
	const rack = 32
	for range 2 {
		c.sweep()
		from := c.rnd.IntN(len(c.all))
		c.each(c.all[from:min(from+max(1, min(rack, len(c.all)/20)), len(c.all))], func(n *node) {
			n.link.blackOut()
			c.rules.excuse(n, time.Time{})
			n.kill()
		})
	}
	c.mark("a rack has lost its power")
	return silent + broken
}

func (c *cluster) breaks(count int) time.Duration {
	c.each(c.pick(count), func(n *node) { n.link.hangUp(false) })
	return 5 * time.Second
}

func (c *cluster) cuts(count int, d time.Duration) time.Duration {
	ns := c.pick(count)
	c.each(ns, func(n *node) {
		if d > time.Second {
			c.rules.excuse(n, time.Now().Add(d+time.Minute))
		}
		n.link.hangUp(true)
	})
	time.Sleep(d)
	c.each(ns, func(n *node) { n.link.mend() })
	c.mark(fmt.Sprintf("nodes were cut off for %s", d))
	return 10 * time.Second
}

func (c *cluster) grows() time.Duration {
	c.start(c.share(10), time.Second)
	return 10 * time.Second
}

// crashes kills the daemon, and starts the next one after a time.
func (c *cluster) crashes(keeps bool, away time.Duration) time.Duration {
	c.crash()
	if !keeps {
		c.forget()
	}
	c.mark(fmt.Sprintf("a daemon was killed, its decisions kept: %v", keeps))
	time.Sleep(away)
	c.boot()
	return 20 * time.Second
}

func (c *cluster) crashesInRestart(keeps bool) time.Duration {
	c.failures(1)
	time.Sleep(time.Duration(1+c.rnd.IntN(250)) * time.Millisecond)
	return 20*time.Second + c.crashes(keeps, time.Second)
}

func (c *cluster) slows() time.Duration {
	ns := c.pick(c.share(20))
	c.each(ns, func(n *node) {
		c.rules.excuse(n, time.Now().Add(time.Minute))
		n.lag.Store(int64(5 * time.Second))
		n.link.slow(time.Duration(100+c.rnd.IntN(1500)) * time.Millisecond)
	})
	c.failures(1)
	c.settle("slow nodes", 40*time.Second)
	c.each(ns, func(n *node) {
		n.lag.Store(0)
		n.link.slow(time.Millisecond)
	})
	c.mark("slow nodes have met")
	return soon
}

func (c *cluster) losesAnswers() time.Duration {
	c.each(c.pick(c.share(4)), func(n *node) { n.link.loseAnswer() })
	c.failures(1)
	time.Sleep(c.half())
	c.each(c.pick(c.share(4)), func(n *node) { n.link.loseAnswer() })
	return 10 * time.Second
}

func (c *cluster) half() time.Duration { return time.Duration(c.rnd.IntN(200)) * time.Millisecond }

// order gives the run an order; a daemon that is away does not get it.
func (c *cluster) order(o rendezvous.Order) {
	c.moment()
	if d := c.running(); d != nil {
		if err := d.hub.Order(c.run, o); err != nil {
			c.mark("an order was refused: " + err.Error())
		}
	}
}

func (c *cluster) pauses() time.Duration {
	c.order(rendezvous.Order{Kind: rendezvous.OrderPause, Cause: job.CauseOperator, Text: "maintenance"})
	time.Sleep(3 * time.Second)
	_, _, works := c.rules.epochOf()
	require.Zero(c.t, works, "workers run in a pause")
	c.sweep()
	for _, n := range c.all {
		d := n.hear(nil)
		require.True(c.t, d.Kind == job.Wait && d.Cause != nil && d.Cause.Kind == job.CauseOperator,
			"node %s waits in a pause, and was told %+v", n.id, d)
	}
	if c.rnd.IntN(2) == 0 {
		c.crashes(true, time.Second)
		c.mark("the daemon was killed in a pause")
		time.Sleep(20 * time.Second)
	}
	_, _, works = c.rules.epochOf()
	require.Zero(c.t, works, "workers run in a pause")
	c.order(rendezvous.Order{Kind: rendezvous.OrderResume, Cause: job.CauseOperator})
	c.mark("a run was paused")
	return 20 * time.Second
}

func (c *cluster) leaves() time.Duration {
	c.each(c.pick(3), func(n *node) { n.tell(func() error { return n.leave("preempted") }) })
	return soon
}

func (c *cluster) drains() time.Duration {
	n := c.pick(1)[0]
	c.rules.excuse(n, time.Time{}) // the others do not wait for its workers
	c.order(rendezvous.Order{Kind: rendezvous.OrderDrain, Node: "node-" + n.id, Cause: job.CauseOperator, Text: "repair"})
	time.Sleep(soon)
	require.True(c.t, n.hasLeft(), "a node was drained, and stays")
	return soon
}

// settle waits until all that live have their places, or know why not.
func (c *cluster) settle(after string, limit time.Duration) {
	time.Sleep(time.Second) // the trouble is known
	var why string
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		if why = c.unsettled(); why == "" {
			c.holds(after)
			return
		}
		if time.Since(begin) >= limit {
			break
		}
	}
	require.Fail(c.t, "it does not settle", "%s, %s, after %s: %s\n%s", c.clock(), after, limit, why, c.picture())
}

func (c *cluster) unsettled() string {
	c.sweep()
	want := min(len(c.all), c.params.Max) / c.params.Unit * c.params.Unit
	if e, size, works := c.rules.epochOf(); size != want || works != want {
		return fmt.Sprintf("epoch %v of %d nodes, of which %d work; %d live", e, size, works, len(c.all))
	}
	for _, n := range c.all {
		if d := n.hear(nil); d.Kind != job.Run && d.Kind != job.Wait && d.Kind != job.Stop { // a spare waits
			return fmt.Sprintf("node %s was told %+v", n.id, d)
		}
	}
	return ""
}

// holds fails the test if a rule is broken.
func (c *cluster) holds(after string) {
	c.rules.mu.Lock()
	defer c.rules.mu.Unlock()
	require.Empty(c.t, c.rules.broken, after)
	for _, n := range c.all {
		require.NoError(c.t, n.ended, after)
	}
}

// picture is the state of the run, for people.
func (c *cluster) picture() string {
	var b strings.Builder
	if d := c.running(); d != nil {
		s, err := d.hub.Run(c.run)
		nodes := s.Nodes
		s.Nodes = nil
		fmt.Fprintf(&b, "%+v %v\n", s.Status, err)
		for _, n := range nodes[:min(len(nodes), 40)] {
			fmt.Fprintf(&b, "  %+v\n", n)
		}
	}
	for _, n := range c.all[:min(len(c.all), 40)] {
		d := n.hear(nil)
		e, works := n.running()
		fmt.Fprintf(&b, "%s: works %v in %v, heard %s %v %v, ended %v\n", n.id, works, e, d.Kind, d.EpochID, d.Cause, n.ended)
	}
	fmt.Fprintln(&b, c.rules.broken)
	return b.String()
}

// weather has storms blow one after the other, and the run settle after each.
func (c *cluster) weather(all []storm) {
	for _, s := range all {
		before, _, _ := c.rules.epochOf()
		began := time.Now()
		limit := s.blows(c)
		c.settle(s.name, limit)
		if s.keeps {
			time.Sleep(20 * time.Second)
			after, _, _ := c.rules.epochOf()
			require.Equal(c.t, before, after, "%s: workers were stopped", s.name)
			c.t.Logf("%-50s no worker was stopped", s.name)
			continue
		}
		c.t.Logf("%-50s %s", s.name, c.rules.newestStart().Sub(began).Round(time.Millisecond))
	}
}

func (c *cluster) shuffled(all []storm) []storm {
	all = slices.Clone(all)
	c.rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}
