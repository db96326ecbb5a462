package watch

import (
	"context"
	"encoding/json"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/hang"
	"dlrover-run/hang/straggler"
	"dlrover-run/internal/job"
)

// detector is hang.Detector.
type detector interface {
	// Look returns all that are suspected now.
	Look(now time.Duration, workers []hang.Sample, store []hang.StoreWait) []hang.Suspicion
	// Work is the observed work of a rank since its last progress.
	Work(rank int) hang.Work
	// Paused is the longest time without progress after which a worker has resumed.
	Paused() time.Duration
}

// Config is an epoch on this node. Functions may be nil.
type Config struct {
	Epoch     job.EpochID
	Node      string
	GroupRank int
	RankBase  int
	PIDs      []int // of the workers, by local rank
	// First is when the first look is due, Every how often one is after that.
	First, Every time.Duration
	// Summaries is how often this node reports to the judge that nothing has changed; 0: never. Workers that become slow
	// are reported within hang.SummaryEvery.
	Summaries time.Duration
	Pages     string // directory of the shim's pages; "": there are none
	Parse     func([]byte) (hang.Page, error)
	Groups    func([]byte) ([]hang.Group, error)
	Detector  detector
	// Store are the keys that are waited for, if this node has the workers' store.
	Store func() []hang.StoreWait
	// Stacks reads one process, Flight its flight recorder. They may be called by several goroutines.
	Stacks func(ctx context.Context, pid int) (hang.Stacks, error)
	// Trace takes the place of Stacks for workers that are suspected: it may stop them for a moment.
	Trace  func(ctx context.Context, pid int) (hang.Stacks, error)
	Flight func(ctx context.Context, rank int) (*hang.Flight, error)
	// Sockets are the connections of processes to the workers' store, by pid.
	Sockets func(pids []int) map[int][]string
	RAS     func(ctx context.Context) string
	// Traffic is how many bytes the present TCP connections of processes have carried, both ways.
	Traffic func(pids []int) uint64
	// Facts is what this node knows of itself but for its workers' processes. It must return when ctx is done.
	Facts func(ctx context.Context) []hang.Fact
	// End is this node's end of a test of links, and Test carries out the one that follows.
	End  func(ctx context.Context) json.RawMessage
	Test func(ctx context.Context, l hang.Link) []hang.Fact
	// Output is the end of a worker's output.
	Output func(local int) string
	// Exception finds in such a text the Python exception that its worker has ended by.
	Exception func(output string) string
	// Post delivers a report to the judge; it is tried again for a while when it fails.
	Post func(context.Context, hang.Report) error
	// Looked, if not nil, is called after every look.
	Looked func([]hang.Sample, []hang.Suspicion)
	// Collected, if not nil, sees the evidence with stacks that the judge gets. It must not keep it.
	Collected func([]hang.Evidence)
	Log       *slog.Logger

	root string               // of /proc, in tests
	now  func() time.Duration // in tests
}

// Watcher watches over the workers of one epoch.
type Watcher struct {
	cfg    Config
	looker *looker
	asks   chan hang.Ask
	outbox *outbox
	wg     sync.WaitGroup

	straggler straggler.Finder
	tally     tally
	newest    []hang.Sample
	progress  []time.Duration // when each worker was last seen to make some
	told      time.Duration   // when the last report was sent
	next      time.Duration   // when a summary is due if there is news
	due       time.Duration   // and when in any case
	slow      string          // the newest one's description of a straggler

	mu        sync.Mutex
	suspected []hang.Suspicion // by the newest look
	work      []hang.Work      // of each worker
	paused    time.Duration
}

// New prepares to watch; nothing is read yet.
func New(cfg Config) *Watcher {
	if cfg.root == "" {
		cfg.root = "/proc"
	}
	if cfg.now == nil {
		cfg.now = Monotonic
	}
	w := &Watcher{cfg: cfg, asks: make(chan hang.Ask, 4)}
	w.outbox = newOutbox(cfg.Post, cfg.Log)
	return w
}

// Monotonic is the clock of the shim's pages.
func Monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // never fails
	return time.Duration(ts.Nano())
}

// Ask has the Watcher answer the judge, apart from its other work. Any goroutine may call it. An Ask is dropped while
// several others have not begun yet: the judge has forgotten the first of them by then.
func (w *Watcher) Ask(a hang.Ask) {
	select {
	case w.asks <- a:
	default:
	}
}

// Watch returns soon after ctx has ended.
func (w *Watcher) Watch(ctx context.Context) {
	defer w.wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	timer := time.NewTimer(w.cfg.First)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			w.look(ctx)
			timer.Reset(w.cfg.Every)
		case a := <-w.asks:
			w.begin()
			own := w.looker.clone()
			w.wg.Go(func() { w.answer(ctx, own, a) })
		}
	}
}

func (w *Watcher) suspicions() []hang.Suspicion {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.suspected
}

// begin prepares for the first look.
func (w *Watcher) begin() {
	if w.looker != nil {
		return
	}
	c := &w.cfg
	w.looker = &looker{
		patient: stuckAfter,
		sampler: &sampler{
			fs: newProcfs(c.root), now: c.now, pages: c.Pages, parse: c.Parse, traffic: c.Traffic,
			leads: &leads{tid: map[int]int{}},
		},
		blocked: func(pid int) {
			c.Log.Warn("reading a worker's state does not return: it is not read any more", "pid", pid)
		},
	}
	for i, pid := range c.PIDs {
		w.looker.state = append(w.looker.state, tracked{local: i, rank: c.RankBase + i, pid: pid})
	}
	now := c.now()
	w.next, w.due = now+jittered(hang.SummaryEvery), now+rand.N(max(c.Summaries-hang.SummaryEvery, 0)+1)
}

// look takes samples, and reports to the judge if other ranks are suspected, or if a repetition is due.
func (w *Watcher) look(ctx context.Context) {
	w.begin()
	samples := w.looker.look(ctx, false)
	if samples == nil {
		return
	}
	now, store := w.cfg.now(), w.store()
	w.follow(now, samples)
	w.straggler.Look(now, samples)
	w.tally.look(samples)
	suspected, before := w.credible(w.cfg.Detector.Look(now, samples, store), store), w.suspicions()
	w.note(samples, suspected)
	if w.cfg.Looked != nil {
		w.cfg.Looked(samples, suspected)
	}
	switch {
	case !sameRanks(suspected, before), len(suspected) > 0 && now-w.told >= hang.RepeatEvery:
		w.say(ctx, now, hang.Report{Store: store})
	case now >= w.next:
		w.sum(ctx, now)
	}
}

// note keeps the result of the newest look, for answers to the judge.
func (w *Watcher) note(samples []hang.Sample, suspected []hang.Suspicion) {
	work := make([]hang.Work, len(samples))
	for i := range samples {
		work[i] = w.cfg.Detector.Work(samples[i].Rank)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.suspected, w.work, w.paused = suspected, work, w.cfg.Detector.Paused()
}

// works adds the results of earlier looks to evidence.
func (w *Watcher) works(ev []hang.Evidence) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range ev[:min(len(ev), len(w.work))] {
		ev[i].Work = w.work[i]
	}
}

// credible leaves out suspicions that evidence could not confirm: without pages only stacks of Python, and the store,
// show that a worker waits for others.
func (w *Watcher) credible(found []hang.Suspicion, store []hang.StoreWait) []hang.Suspicion {
	return slices.DeleteFunc(slices.Clone(found), func(s hang.Suspicion) bool {
		i := s.Rank - w.cfg.RankBase
		return w.cfg.Pages == "" && len(store) == 0 && i >= 0 && i < len(w.looker.state) && !w.looker.state[i].python
	})
}

// say puts the suspicions into a report and sends it.
func (w *Watcher) say(ctx context.Context, now time.Duration, r hang.Report) {
	w.told, w.next = now, now+jittered(hang.SummaryEvery)
	w.send(ctx, r)
}

func (w *Watcher) send(ctx context.Context, r hang.Report) {
	r.Epoch = w.cfg.Epoch
	w.mu.Lock()
	r.Suspicions, r.Paused = w.suspected, w.paused
	w.mu.Unlock()
	w.outbox.put(ctx, &w.wg, r)
}

func (w *Watcher) store() []hang.StoreWait {
	if w.cfg.Store == nil {
		return nil
	}
	return w.cfg.Store()
}

// sameRanks reports whether the same workers are suspected.
func sameRanks(a, b []hang.Suspicion) bool {
	return slices.EqualFunc(a, b, func(x, y hang.Suspicion) bool { return x.Rank == y.Rank })
}

// jittered keeps the nodes of a large job from speaking at the same moment.
func jittered(d time.Duration) time.Duration { return d*9/10 + rand.N(d/5) }
