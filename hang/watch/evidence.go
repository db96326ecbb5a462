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
	if a.What == hang.AskFacts || a.What == hang.AskLink {
		if slices.Contains(a.Nodes, w.cfg.GroupRank) {
			w.examine(ctx, own, a)
		}
		return
	}
	limited, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	r, g := hang.Report{Ask: a.Seq}, w.gathering(limited, own)
	switch a.What {
	case hang.AskEvidence:
		r.Evidence, r.RAS = g.all()
	case hang.AskStacks:
		r.Evidence = g.once((*gathering).readFamilies, (*gathering).readOutput, (*gathering).readFlights)
	case hang.AskPages:
		r.Evidence = g.once()
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

// Once reads samples and stacks of the workers, of those that can be read until ctx ends. It is called instead of
// Watch.
func (w *Watcher) Once(ctx context.Context) []hang.Evidence {
	w.begin()
	return w.gathering(ctx, w.looker).once((*gathering).readStacks, (*gathering).readOutput)
}

func (w *Watcher) gathering(ctx context.Context, own *looker) *gathering {
	return &gathering{ctx: ctx, cfg: &w.cfg, own: own, suspected: w.suspicions()}
}

// gathering is the evidence that is collected at the same time. Its goroutines may be abandoned, so each of them
// sends its result over a channel.
type gathering struct {
	ctx       context.Context
	cfg       *Config
	own       *looker
	suspected []hang.Suspicion
	ev        []hang.Evidence // of each worker
	parts     []func()        // put an answer to its place, when it is there
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
	g.readExceptions()
}

// all takes all samples, and meanwhile everything else.
func (g *gathering) all() (ev []hang.Evidence, ras string) {
	series := [][]hang.Sample{g.own.look(g.ctx, true)}
	if series[0] == nil {
		return nil, ""
	}
	g.begin(series[0])
	g.readFamilies()
	g.readOutput()
	g.readFlights()
	g.readRest(&ras)
	for len(series) < looks && retry.Sleep(g.ctx, apart) {
		if next := g.own.look(g.ctx, true); next != nil {
			series = append(series, next)
		}
	}
	g.gather()
	for _, samples := range series {
		for i := range g.ev {
			g.ev[i].Samples = append(g.ev[i].Samples, samples[i])
		}
	}
	return g.ev, ras
}

// once takes one sample of every worker, and the other evidence that is wanted.
func (g *gathering) once(read ...func(*gathering)) []hang.Evidence {
	samples := g.own.look(g.ctx, len(read) > 0)
	if samples == nil {
		return nil
	}
	g.begin(samples)
	for _, r := range read {
		r(g)
	}
	g.gather()
	for i := range g.ev {
		g.ev[i].Samples = samples[i : i+1]
	}
	return g.ev
}

// begin makes evidence without content.
func (g *gathering) begin(samples []hang.Sample) {
	g.ev = make([]hang.Evidence, len(samples))
	for i, s := range samples {
		g.ev[i] = hang.Evidence{Worker: s.Worker, Node: g.cfg.Node, GroupRank: g.cfg.GroupRank}
	}
	g.readGroups()
}

// readStacks reads some workers at a time. One that cannot be read costs stackTime, the others nothing.
func (g *gathering) readStacks() {
	g.readAll(false)
}

// readFamilies reads the children, too, of those that do not wait for other ranks.
func (g *gathering) readFamilies() {
	g.readAll(true)
}

func (g *gathering) readAll(families bool) {
	if g.cfg.Stacks == nil {
		return
	}
	room := make(chan struct{}, readers)
	for i := range g.ev {
		e := &g.ev[i]
		switch {
		case g.own.state[i].blocked:
			e.Error = "reading this process does not return; it was not tried again"
			continue
		case g.own.state[i].last.Proc.State == 0:
			e.Error = "the process is gone"
			continue
		}
		e.Error = "its stacks could not be read in time"
		f := &family{sampler: g.own.sampler.another(), pid: e.PID, children: families, own: g.cfg.Stacks, child: g.cfg.Stacks}
		suspected := func(s hang.Suspicion) bool { return s.Rank == e.Rank }
		if families && g.cfg.Trace != nil && slices.ContainsFunc(g.suspected, suspected) {
			f.own = g.cfg.Trace
		}
		if p := g.own.state[i].last.Page; p != nil && p.PID == e.PID {
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
func (g *gathering) readOutput() {
	if g.cfg.Output == nil {
		return
	}
	for i := range g.ev {
		e, local := &g.ev[i], g.ev[i].Local
		alongside(g, func() string { return g.cfg.Output(local) }, func(text string) { e.Log = text })
	}
}

// readExceptions finds the exceptions that ended the main threads of processes with other running threads.
func (g *gathering) readExceptions() {
	for i := range g.ev {
		if e := &g.ev[i]; g.cfg.Exception != nil && e.Stacks != nil && e.Stacks.Ending() {
			e.Exception = g.cfg.Exception(e.Log)
		}
	}
}

// readFlights asks PyTorch's flight recorders. Where there is none that costs nothing.
func (g *gathering) readFlights() {
	if g.cfg.Flight == nil {
		return
	}
	for i, mute := range mutes(g.own) {
		if mute {
			continue
		}
		e := &g.ev[i]
		alongside(g, func() *hang.Flight { return g.flight(e.Rank) }, func(f *hang.Flight) { e.Flight = f })
	}
}

// readRest reads evidence that belongs to no single process.
func (g *gathering) readRest(ras *string) {
	if g.cfg.Sockets != nil {
		pids := make([]int, len(g.ev))
		for i := range g.ev {
			pids[i] = g.ev[i].PID
		}
		alongside(g, func() map[int][]string { return g.cfg.Sockets(pids) }, func(by map[int][]string) {
			for i := range g.ev {
				g.ev[i].Sockets = by[g.ev[i].PID]
			}
		})
	}
	if g.cfg.RAS != nil {
		alongside(g, func() string {
			ctx, cancel := context.WithTimeout(g.ctx, restTime)
			defer cancel()
			return g.cfg.RAS(ctx)
		}, func(s string) { *ras = s })
	}
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
func (g *gathering) flight(rank int) *hang.Flight {
	ctx, cancel := context.WithTimeout(g.ctx, restTime)
	defer cancel()
	f, err := g.cfg.Flight(ctx, rank)
	if err != nil {
		return nil
	}
	return f
}

func (g *gathering) readGroups() {
	if g.cfg.Pages == "" {
		return
	}
	for i := range g.ev {
		path := pageFile(g.cfg.Pages, g.ev[i].Local, "groups")
		b, err := openfile.Read(path, page.GroupsSize)
		if err != nil {
			continue
		}
		g.ev[i].Groups, _ = g.cfg.Groups(b) // half written: the shim writes it again
	}
}
