package watch

import (
	"context"
	"slices"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/page"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/retry"
)

// The evidence of a node.
const (
	budget    = 9 * time.Second // for all evidence: the judge waits for ten
	apart     = 2 * time.Second // between two samples
	looks     = 3
	readers   = 8               // processes with stacks that are read at the same time
	stackTime = 4 * time.Second // for one of them
	restTime  = 5 * time.Second // for requests to NCCL and PyTorch
	silent    = 3 * time.Second // a shim thread that has not run for so long does not get the interpreter's lock
)

// answer collects the evidence that the judge asks for.
func (w *Watcher) answer(ctx context.Context, own *looker, a hang.Ask) {
	limited, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	r := hang.Report{Ask: a.Seq}
	switch a.What {
	case hang.AskEvidence:
		r.Evidence, r.RAS = w.collect(limited, own)
	case hang.AskStacks:
		r.Evidence = w.collectOnce(limited, own, w.readFamilies, w.readOutput, w.readFlights)
	case hang.AskPages:
		r.Evidence = w.collectOnce(limited, own)
	default:
		return
	}
	if ctx.Err() != nil {
		return
	}
	if limited.Err() != nil {
		r.Partial = "not everything could be read within " + budget.String()
	}
	w.works(r.Evidence)
	if w.cfg.Collected != nil && a.What != hang.AskPages {
		w.cfg.Collected(r.Evidence)
	}
	r.Store = w.store()
	w.send(ctx, r)
}

// gathering is the evidence that is collected at the same time. Its goroutines may be abandoned, so each of them
// sends its result over a channel.
type gathering struct {
	ctx   context.Context
	parts []func() // put an answer to its place, when it is there
}

// alongside begins f. When gather is called, place gets its result, unless ctx ends before.
func alongside[T any](g *gathering, f func() T, place func(T)) {
	done := make(chan T, 1)
	go func() { done <- f() }()
	g.parts = append(g.parts, func() {
		select {
		case v := <-done:
			place(v)
			return
		default:
		}
		select {
		case v := <-done:
			place(v)
		case <-g.ctx.Done():
		}
	})
}

func (g *gathering) gather() {
	for _, p := range g.parts {
		p()
	}
}

// collect takes all samples, and meanwhile everything else.
func (w *Watcher) collect(ctx context.Context, own *looker) (ev []hang.Evidence, ras string) {
	series := [][]hang.Sample{own.look(ctx, true)}
	if series[0] == nil {
		return nil, ""
	}
	ev = w.blank(series[0])
	g := &gathering{ctx: ctx}
	w.readFamilies(g, ev, own)
	w.readOutput(g, ev, own)
	w.readFlights(g, ev, own)
	w.readRest(g, ev, &ras)
	for len(series) < looks && retry.Sleep(ctx, apart) {
		if next := own.look(ctx, true); next != nil {
			series = append(series, next)
		}
	}
	g.gather()
	w.readExceptions(ev)
	for _, samples := range series {
		for i := range ev {
			ev[i].Samples = append(ev[i].Samples, samples[i])
		}
	}
	return ev, ras
}

// collectOnce takes one sample of every worker, and the other evidence that is wanted.
func (w *Watcher) collectOnce(ctx context.Context, own *looker, read ...func(*gathering, []hang.Evidence, *looker),
) []hang.Evidence {
	samples := own.look(ctx, len(read) > 0)
	if samples == nil {
		return nil
	}
	ev := w.blank(samples)
	w.readGroups(ev)
	g := &gathering{ctx: ctx}
	for _, r := range read {
		r(g, ev, own)
	}
	g.gather()
	w.readExceptions(ev)
	for i := range ev {
		ev[i].Samples = samples[i : i+1]
	}
	return ev
}

// Once reads samples and stacks of the workers, of those that can be read until ctx ends. It is called instead of
// Watch.
func (w *Watcher) Once(ctx context.Context) []hang.Evidence {
	w.begin()
	return w.collectOnce(ctx, w.looker, w.readStacks, w.readOutput)
}

func (w *Watcher) blank(samples []hang.Sample) []hang.Evidence {
	ev := make([]hang.Evidence, len(samples))
	for i, s := range samples {
		ev[i] = hang.Evidence{Worker: s.Worker, Node: w.cfg.Node, GroupRank: w.cfg.GroupRank}
	}
	return ev
}

// readStacks reads some workers at a time. One that cannot be read costs stackTime, the others nothing.
func (w *Watcher) readStacks(g *gathering, ev []hang.Evidence, own *looker) {
	w.readAll(g, ev, own, false)
}

// readFamilies reads the children, too, of those that do not wait for other ranks.
func (w *Watcher) readFamilies(g *gathering, ev []hang.Evidence, own *looker) {
	w.readAll(g, ev, own, true)
}

func (w *Watcher) readAll(g *gathering, ev []hang.Evidence, own *looker, families bool) {
	if w.cfg.Stacks == nil {
		return
	}
	room := make(chan struct{}, readers)
	for i := range ev {
		e := &ev[i]
		switch {
		case own.state[i].blocked:
			e.Error = "reading this process does not return; it was not tried again"
			continue
		case own.state[i].last.Proc.State == 0:
			e.Error = "the process is gone"
			continue
		}
		e.Error = "its stacks could not be read in time"
		f := &family{sampler: own.sampler.another(), pid: e.PID, children: families, own: w.cfg.Stacks, child: w.cfg.Stacks}
		suspected := func(s hang.Suspicion) bool { return s.Rank == e.Rank }
		if families && w.cfg.Trace != nil && slices.ContainsFunc(w.suspicions(), suspected) {
			f.own = w.cfg.Trace
		}
		if p := own.state[i].last.Page; p != nil && p.PID == e.PID {
			f.steps = p.Thread
		}
		alongside(g, func() *hang.Stacks { return f.stacks(g.ctx, room) }, func(s *hang.Stacks) {
			if s != nil {
				e.Stacks, e.Error = s, ""
			}
		})
	}
}

// readOutput takes the ends of the workers' output.
func (w *Watcher) readOutput(g *gathering, ev []hang.Evidence, _ *looker) {
	if w.cfg.Output == nil {
		return
	}
	for i := range ev {
		e, local := &ev[i], ev[i].Local
		alongside(g, func() string { return w.cfg.Output(local) }, func(text string) { e.Log = text })
	}
}

// readExceptions finds the exceptions that ended the main threads of processes with other running threads.
func (w *Watcher) readExceptions(ev []hang.Evidence) {
	for i := range ev {
		if e := &ev[i]; w.cfg.Exception != nil && e.Stacks != nil && e.Stacks.Ending() {
			e.Exception = w.cfg.Exception(e.Log)
		}
	}
}

// readFlights asks PyTorch's flight recorders. Where there is none that costs nothing.
func (w *Watcher) readFlights(g *gathering, ev []hang.Evidence, own *looker) {
	if w.cfg.Flight == nil {
		return
	}
	for i, mute := range mutes(own) {
		if mute {
			continue
		}
		e := &ev[i]
		alongside(g, func() *hang.Flight { return w.flight(g.ctx, e.Rank) }, func(f *hang.Flight) { e.Flight = f })
	}
}

// readRest reads evidence that belongs to no single process.
func (w *Watcher) readRest(g *gathering, ev []hang.Evidence, ras *string) {
	if w.cfg.Sockets != nil {
		pids := make([]int, len(ev))
		for i := range ev {
			pids[i] = ev[i].PID
		}
		alongside(g, func() map[int][]string { return w.cfg.Sockets(pids) }, func(by map[int][]string) {
			for i := range ev {
				ev[i].Sockets = by[ev[i].PID]
			}
		})
	}
	if w.cfg.RAS != nil {
		alongside(g, func() string {
			ctx, cancel := context.WithTimeout(g.ctx, restTime)
			defer cancel()
			return w.cfg.RAS(ctx)
		}, func(s string) { *ras = s })
	}
	w.readGroups(ev)
}

// mutes are the workers that cannot write a dump, because a thread keeps the interpreter's lock, or all are stopped.
// Older PyTorch takes a request at that time for a hang of its own.
func mutes(own *looker) []bool {
	list := make([]bool, len(own.state))
	for i, t := range own.state {
		s := t.last
		list[i] = t.blocked || s.Proc.State == 'T' || s.Proc.State == 't' || s.Page != nil && s.At-s.Page.Heartbeat > silent
	}
	return list
}

// flight returns nil if there is no recorder, or it does not answer.
func (w *Watcher) flight(ctx context.Context, rank int) *hang.Flight {
	ctx, cancel := context.WithTimeout(ctx, restTime)
	defer cancel()
	f, err := w.cfg.Flight(ctx, rank)
	if err != nil {
		return nil
	}
	return f
}

func (w *Watcher) readGroups(ev []hang.Evidence) {
	if w.cfg.Pages == "" {
		return
	}
	for i := range ev {
		path := pageFile(w.cfg.Pages, ev[i].Local, "groups")
		b, err := openfile.Read(path, page.GroupsSize)
		if err != nil {
			continue
		}
		ev[i].Groups, _ = w.cfg.Groups(b) // half written: the shim writes it again
	}
}
