package main

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"dlrover-run/rendezvous/api"
)

// elasticWorld changes a world of n nodes. The goals are two seconds and the time that the rendezvous waits on purpose:
// 1.5 s for a node whose connection has broken, and 1 s for further newcomers.
func elasticWorld(n int) row {
	all := "until all others have their places again"
	return row{id: "elastic", limit: 4 * time.Minute, maxReps: 3, noPeer: "not run", files: n + n/10 + 1000,
		run: func(ctx context.Context, l *lab) ([]float64, error) { return l.change(ctx, n) },
		lines: []line{
			{what: fmt.Sprintf("one of %d nodes is lost, %s", n, all), unit: duration, goal: 3.5},
			{what: "of that, processor time of the daemon", unit: duration},
			{what: "1 % are lost, " + all, unit: duration, goal: 3.5},
			{what: "of that, processor time of the daemon", unit: duration},
			{what: "a tenth more come, from the last one's arrival until all have their places", unit: duration, goal: 3},
			{what: "of that and of their arrival, processor time of the daemon", unit: duration},
			{what: "all connections are cut, until all nodes have connected again", unit: duration, goal: 5},
			{what: "of that, processor time of the daemon", unit: duration},
			{what: "no node is lost by that, and no worker stopped", unit: yesno, goal: 1},
		}}
}

func (l *lab) change(ctx context.Context, n int) (values []float64, err error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	d, err := l.daemon(ctx, "0.0.0.0:"+port, l.secrets()...)
	if err != nil {
		return nil, err
	}
	w := &elasticRun{lab: l, port: port, n: n, m: &meeting{pid: d.cmd.Process.Pid}}
	defer func() {
		for _, s := range w.mine {
			s.close()
		}
	}()
	begin := len(l.procs)
	rest := n - n/100 // one of them is in this process
	if w.m.crowd, err = l.crowd(ctx, port, rest, elastic); err != nil {
		return nil, err
	}
	for _, more := range []int{1, n / 100} {
		if err := w.comes(ctx, more); err != nil {
			return nil, err
		}
	}
	if _, err := w.meets(ctx, "released"); err != nil {
		return nil, err
	}
	for _, step := range []func() (float64, error){
		func() (float64, error) { return w.loses(ctx) },
		func() (float64, error) { return w.loses(ctx) },
		func() (float64, error) { return w.grows(ctx) },
		func() (float64, error) { return w.isCut(ctx, l.procs[begin:len(l.procs)]) },
	} {
		if err := pause(ctx, 2*time.Second); err != nil {
			return nil, err
		}
		took, cpu, err := w.m.timed(step)
		if err != nil {
			return nil, err
		}
		values = append(values, took, cpu)
	}
	same, err := w.unchanged(ctx)
	return append(values, same), err
}

// elasticRun is a run whose nodes come and go: those of the crowd stay, and those of this process go first.
type elasticRun struct {
	*lab
	port   string
	n      int
	m      *meeting
	mine   []*simulation
	opened int
}

// comes has more nodes join.
func (w *elasticRun) comes(ctx context.Context, count int) error {
	s, err := openNodes(ctx, w.port, w.token, w.n-w.n/100, w.n-w.n/100-1+w.opened, count, elastic)
	if err == nil {
		w.mine, w.opened = append(w.mine, s), w.opened+count
	}
	return err
}

// meets returns when the last node got its place.
func (w *elasticRun) meets(ctx context.Context, step string) (at int64, err error) {
	for _, c := range w.m.crowd {
		t, err := expect(c, step)
		if err != nil {
			return 0, err
		}
		at = max(at, t)
	}
	for _, s := range w.mine {
		t, err := s.collect(ctx, s.released)
		if err != nil {
			return 0, err
		}
		at = max(at, t)
	}
	return at, nil
}

// loses ends the nodes that came first, without a word.
func (w *elasticRun) loses(ctx context.Context) (float64, error) {
	began := now()
	w.mine[0].close()
	w.mine = w.mine[1:]
	at, err := w.meets(ctx, "restarted")
	return seconds(began, at), err
}

func (w *elasticRun) grows(ctx context.Context) (float64, error) {
	if err := w.comes(ctx, w.n/10); err != nil {
		return 0, err
	}
	began := now()
	at, err := w.meets(ctx, "restarted")
	return seconds(began, at), err
}

// isCut breaks the connections of all nodes of the crowd.
func (w *elasticRun) isCut(ctx context.Context, crowd []*process) (float64, error) {
	began := now()
	for _, p := range crowd {
		if err := p.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
			return 0, err
		}
	}
	last := began
	for _, c := range w.m.crowd {
		at, err := expect(c, "back")
		if err != nil {
			return 0, err
		}
		last = max(last, at)
	}
	return seconds(began, last), nil
}

// unchanged: 1 if the world is the one after the growth, when a node that is missed would have been lost.
func (w *elasticRun) unchanged(ctx context.Context) (float64, error) {
	if err := pause(ctx, 3*time.Second); err != nil {
		return 0, err
	}
	layer, err := layerOf(w.token)
	if err != nil {
		return 0, err
	}
	c := api.NewClient(daemonAddr(0, w.port), w.token).Over(layer)
	defer c.Close()
	rs, err := c.Runs(ctx)
	if err != nil {
		return 0, err
	}
	mine := w.mine[len(w.mine)-1]
	mine.mu.Lock()
	defer mine.mu.Unlock()
	same := len(rs) == 1 && rs[0].Round == mine.epoch.Round && rs[0].Epoch == mine.epoch.Epoch
	if same && rs[0].Phase == "running" && rs[0].Members == w.n-w.n/100-1+w.n/10 {
		return 1, nil
	}
	return 0, nil
}
