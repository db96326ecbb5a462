package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"dlrover-run/netcheck"
	"dlrover-run/netcheck/node"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

const (
	benchRun = "bench"
	// hostRounds is how often every node of a large healthy run is tested.
	hostRounds = 3
	// testTime is the duration of a simulated test, which takes half as much again at most.
	testTime = time.Second
)

func hostCheck() gating {
	s := netcheck.Spec{Level: netcheck.LevelHost, TTL: netcheck.DefaultTTL, Timeout: netcheck.DefaultTimeout}
	return gating(s.String())
}

// checkedWorld is a rendezvous of nodes that test each other in pairs first; only the tests themselves are made up. A
// node takes two of the daemon's descriptors then, so that there are at most as many nodes as these allow.
func checkedWorld(n int) row {
	const other = 1500
	n = min(n, max(int(openFiles())-other, 0)/2)
	return row{id: "checks", limit: 4 * time.Minute, maxReps: 3, noPeer: "not run", files: 2 * n,
		run: func(ctx context.Context, l *lab) ([]float64, error) { return l.meetChecked(ctx, n) },
		lines: []line{
			{what: fmt.Sprintf("rendezvous of %d nodes that test each other, %d rounds of %s to %s",
				n, hostRounds, testTime, testTime*3/2), unit: duration, goal: 10},
			{what: "more processor time of the daemon than without tests, a round", unit: duration, goal: 1},
			{what: "more peak resident memory of the daemon, a node", unit: size, goal: 10e3},
			{what: "99th percentile of an assignment: one end has it until the other one has", unit: duration, goal: 1},
		}}
}

func (l *lab) meetChecked(ctx context.Context, n int) ([]float64, error) {
	plain, err := l.meetOnce(ctx, n, alone)
	if err != nil {
		return nil, err
	}
	checked, err := l.meetOnce(ctx, n, hostCheck())
	if err != nil {
		return nil, err
	}
	cpu := (checked.cpu - plain.cpu) / hostRounds
	return []float64{checked.wall, cpu, (checked.peak - plain.peak) / float64(n), checked.assigned}, nil
}

// costs of a rendezvous: seconds, processor seconds, bytes, and seconds of the slowest in a hundred assignments.
type costs struct{ wall, cpu, peak, assigned float64 }

// meetOnce has n nodes join a daemon of their own.
func (l *lab) meetOnce(ctx context.Context, n int, gate gating) (c costs, err error) {
	port, err := freePort()
	if err != nil {
		return c, err
	}
	begin := len(l.procs)
	defer func() {
		for _, p := range l.procs[begin:] {
			_ = p.cmd.Process.Kill() // so that they do not disturb the next measurement
			<-p.done
		}
	}()
	d, err := l.daemon(ctx, "0.0.0.0:"+port, "DLROVER_TOKEN="+l.token)
	if err != nil {
		return c, err
	}
	m, err := l.gather(ctx, d.cmd.Process.Pid, port, n, gate)
	if err != nil {
		return c, err
	}
	defer m.last.close()
	c.wall, c.cpu = m.wall, m.cpu
	if gate != alone {
		for _, crowd := range m.crowd {
			p99, err := expect(crowd, "assigned")
			if err != nil {
				return c, err
			}
			c.assigned = max(c.assigned, seconds(0, p99))
		}
	}
	c.peak, err = memory(m.pid, "status", "VmHWM")
	return c, err
}

// passGate does the checks of a simulated node before it gets its place.
func (s *simulation) passGate(ctx context.Context, session *api.Session, c *api.Client, n rendezvous.Node) error {
	if s.gate == alone {
		return session.Report(ctx, rendezvous.Cleared{ID: n.ID, Until: time.Now().Add(netcheck.DefaultTTL)})
	}
	return s.check(ctx, session, c, n)
}

// check takes part in the check of a run.
func (s *simulation) check(ctx context.Context, session *api.Session, c *api.Client, n rendezvous.Node) error {
	v, err := node.Run(ctx, node.Config{
		Run: benchRun, Transport: node.Over(c), Prober: &fakeProber{n.Addr, &s.waits}, Final: api.Final,
		Node: netcheck.Node{ID: n.ID, Name: n.Name, Addr: n.Addr, NICs: []netcheck.NIC{
			{Name: "eth0", Addr: n.Addr, Mbps: 100_000, MTU: 9000, CC: "cubic", Lo: 50_000},
		}},
	})
	switch {
	case err != nil:
		return fmt.Errorf("check: %w", err)
	case v.State != netcheck.StateOK:
		return fmt.Errorf("a healthy node is %s: %s", v.State, v.Reason)
	}
	return session.Report(ctx, rendezvous.Cleared{ID: n.ID, Until: time.Now().Add(netcheck.DefaultTTL)})
}

// fakeProber tests nothing, in the time of a test.
type fakeProber struct {
	addr  string
	waits *latencies
}

// Serve implements node.Prober.
func (p *fakeProber) Serve(ctx context.Context, a netcheck.Assignment, ready func([]string) error) netcheck.Result {
	p.waits.has(a.Test)
	if err := ready([]string{p.addr + ":4000"}); err != nil {
		return netcheck.Result{Class: netcheck.Canceled}
	}
	return measured(ctx)
}

// Listen implements node.Prober.
func (p *fakeProber) Listen(context.Context) []string { return []string{p.addr + ":4000"} }

// Close implements node.Prober.
func (*fakeProber) Close() {}

// Dial implements node.Prober.
func (p *fakeProber) Dial(ctx context.Context, a netcheck.Assignment) netcheck.Result {
	p.waits.has(a.Test)
	return measured(ctx)
}

// measured is the result of a test on a healthy network of 100 Gbit/s.
func measured(ctx context.Context) netcheck.Result {
	if pause(ctx, testTime+rand.N(testTime/2)) != nil {
		return netcheck.Result{Class: netcheck.Canceled}
	}
	mbps := 90_000 + 5000*rand.Float64()
	return netcheck.Result{Flows: []netcheck.Flow{{
		NIC: "eth0", Mbps: mbps, Segments: 1_000_000, Retrans: 1e-6, P50: 20, MTU: 9000,
	}}}
}

// latencies are the times from one end's assignment to a test until the other one's. Both are nodes of one process; the
// unit is nanoseconds.
type latencies struct {
	mu    sync.Mutex
	began map[string]int64
	took  []int64
}

// has notes that one end has its assignment.
func (l *latencies) has(test string) {
	at := now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.began == nil {
		l.began = map[string]int64{}
	}
	if from, ok := l.began[test]; ok {
		l.took = append(l.took, at-from)
		delete(l.began, test)
	} else {
		l.began[test] = at
	}
}

// high is the 99th percentile, 0 without any.
func (l *latencies) high() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.took) == 0 {
		return 0
	}
	slices.Sort(l.took)
	return l.took[len(l.took)*99/100]
}
