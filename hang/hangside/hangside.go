// Package hangside finds hangs of workers that another launcher has started: the torchrun in another container of the
// pod. Watcher and judge are in one process, and know the ranks of this pod alone.
package hangside

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"dlrover-run/hang"
	"dlrover-run/hang/hangtell"
	"dlrover-run/hang/page"
	"dlrover-run/hang/pystack"
	"dlrover-run/hang/serve"
	"dlrover-run/hang/sockets"
	"dlrover-run/hang/watch"
	"dlrover-run/internal/job"
	"dlrover-run/internal/retry"
)

// Config is the configuration of hang detection.
type Config struct {
	Run  string // name of the job in reports
	Spec hang.Spec
	Log  *slog.Logger
}

// side watches one set of workers after the other.
type side struct {
	Config
	node    string
	hub     *serve.Hub
	stacks  func() *pystack.Reader
	writing sync.WaitGroup
	unread  sync.Once // the log has the warning that stacks cannot be read

	mu      sync.Mutex
	set     *watch.Set // the newest
	epoch   job.EpochID
	watcher *watch.Watcher // of its workers; nil: they have ended
	heard   hang.Ask       // the newest
	teller  hangtell.Teller
	blamed  []int // ranks, by the newest verdict
}

// Run returns when ctx has ended.
func Run(ctx context.Context, c Config) {
	s := &side{Config: c, stacks: sync.OnceValue(pystack.New)}
	s.node, _ = os.Hostname() // the pod's name
	s.hub = serve.New(serve.Config{
		Spec: func(string) (hang.Spec, error) { return c.Spec, nil }, Seat: s.seat, World: s.world, Log: c.Log,
		Notify: func(_ string, a hang.Ask) { s.hear(a) }, Order: s.act, Doubt: func(string, string) {},
		Note: func(_ string, n job.Note) { c.Log.Debug(string(n.Event), "node", n.Node, "text", n.Text) },
	})
	c.Log.Info("waiting for torchrun's workers, to find their hangs")
	for set := s.next(ctx, nil); set != nil; set = s.next(ctx, set) {
		s.follow(ctx, set)
	}
	s.hub.Close()
	s.writing.Wait()
}

// next waits for other workers than before; nil: ctx has ended.
func (s *side) next(ctx context.Context, before *watch.Set) *watch.Set {
	for {
		if set := watch.FindSet(); set != nil && !set.Same(before) {
			return set
		}
		if !retry.Sleep(ctx, hangtell.Look) {
			return nil
		}
	}
}

// follow watches a set until all of it has ended, or another has taken its place. As long as it is whole nothing else
// is looked for.
func (s *side) follow(ctx context.Context, set *watch.Set) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w := s.begin(set)
	done := make(chan struct{})
	go func() { defer close(done); w.Watch(ctx) }()
	for retry.Sleep(ctx, hangtell.Look) && !set.Over() {
		if set.Lives() {
			continue
		}
		if other := watch.FindSet(); other != nil && !other.Same(set) {
			break
		}
	}
	cancel()
	<-done
	s.end()
}

func (s *side) begin(set *watch.Set) *watch.Watcher {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set, s.epoch = set, job.EpochID{Term: s.epoch.Term, Epoch: s.epoch.Epoch + 1}
	s.watcher = watch.New(s.config(set))
	s.Log.Info("looking for hangs", "first_rank", set.RankBase, "workers", len(set.Workers), "world_size", set.WorldSize,
		"epoch", s.epoch.Epoch)
	return s.watcher
}

func (s *side) end() {
	s.mu.Lock()
	e := s.epoch
	s.watcher = nil
	s.mu.Unlock()
	s.hub.Ended(s.Run, e)
}

func (s *side) config(set *watch.Set) watch.Config {
	pids := make([]int, len(set.Workers))
	for i, w := range set.Workers {
		pids[i] = w.PID
	}
	return watch.Config{
		Epoch: s.epoch, Node: s.node, GroupRank: set.GroupRank, RankBase: set.RankBase, PIDs: pids,
		First: hangtell.First, Every: hangtell.Look, Parse: page.Read, Groups: page.ParseGroups,
		Detector: hang.NewDetector(hang.DetectorConfig{Limit: s.Spec.After, Outside: true}),
		Stacks:   s.read, Traffic: sockets.Traffic(set.MasterPort), Post: s.post, Log: s.Log,
	}
}

// read reads the stacks of a process. A missing permission is logged once: hardly any hang can be found then. It does
// not use eu-stack, which opens files by their names: in this container they are other files.
func (s *side) read(ctx context.Context, pid int) (hang.Stacks, error) {
	st, err := s.stacks().Read(ctx, pid, pystack.Native)
	if errors.Is(err, fs.ErrPermission) {
		s.unread.Do(func() {
			s.Log.Warn("the stacks of the workers cannot be read, so hangs are not found: run this container as their user, "+
				"and if that is not enough, with the capability SYS_PTRACE", "pid", pid, "err", err)
		})
	}
	return st, err
}

func (s *side) seat(string, string) (serve.Seat, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return serve.Seat{Epoch: s.epoch, GroupRank: s.set.GroupRank, Name: s.node, Running: s.watcher != nil}, nil
}

// world is this pod's ranks. The torchruns of lower group ranks are there without workers, so that this one has its
// own group rank.
func (s *side) world(string) (hang.World, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := hang.World{Epoch: s.epoch, Nodes: make([]hang.WorldNode, s.set.GroupRank+1),
		Elsewhere: s.set.WorldSize - len(s.set.Workers)}
	w.Nodes[s.set.GroupRank] = hang.WorldNode{Name: s.node, RankBase: s.set.RankBase, Slots: len(s.set.Workers)}
	return w, nil
}

func (s *side) post(ctx context.Context, r hang.Report) error {
	a, err := s.hub.Post(ctx, s.Run, r)
	if errors.Is(err, serve.ErrNotMember) {
		return nil // these workers have ended
	}
	if err == nil {
		s.hear(a)
	}
	return err
}

// hear handles an Ask, which may arrive twice.
func (s *side) hear(a hang.Ask) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !a.Follows(&s.heard) {
		return
	}
	s.heard = a
	switch {
	case a.What == hang.TellVerdict:
		s.teller.Verdict(s.Log, a)
		s.blamed = a.Suspects
		if !a.Again {
			s.writing.Go(func() { s.keep(a.Incident) })
		}
	case a.What == hang.TellOver:
		s.teller.Over(s.Log, a)
	case s.watcher != nil && a.Epoch == s.epoch:
		s.watcher.Ask(a)
	}
}

func (s *side) keep(number uint64) {
	ctx, cancel := context.WithTimeout(context.Background(), hangtell.KeepTime)
	defer cancel()
	if dir := hangtell.Directory(s.Log, false, ""); dir != "" {
		hangtell.Keep(ctx, s.Log, s.hub, s.Run, dir, number)
	}
}

// act ends the culprits. torchrun then restarts all workers, as often as its --max-restarts allows. To stop the job
// torchrun itself is terminated.
func (s *side) act(_ string, o hang.Order) {
	s.mu.Lock()
	set, blamed, current := s.set, slices.Clone(s.blamed), s.watcher != nil && o.Epoch == s.epoch
	s.mu.Unlock()
	if !current {
		return
	}
	if len(blamed) == 0 && set.WorldSize > len(set.Workers) {
		s.Log.Warn("nothing is done about the hang: its cause may be in another pod")
		return
	}
	s.hub.Ended(s.Run, o.Epoch) // or it would be withdrawn when the workers are gone
	if o.Action == hang.ActStop {
		s.signal(set.Parent, unix.SIGTERM, "torchrun is told to end because of the hang")
		return
	}
	for i, w := range set.Workers {
		if rank := set.RankBase + i; len(blamed) == 0 || slices.Contains(blamed, rank) {
			s.signal(w, unix.SIGKILL, "a worker is killed because of the hang", "rank", rank)
		}
	}
}

// signal reaches the process that was found, and no other that has got its pid.
func (s *side) signal(p watch.Process, sig syscall.Signal, what string, attrs ...any) {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if err == nil {
		defer unix.Close(fd)
		if !p.Lives() {
			return
		}
		err = unix.PidfdSendSignal(fd, sig, nil, 0)
	}
	attrs = append(attrs, "pid", p.PID)
	if err != nil {
		s.Log.Warn("a process cannot be ended", append(attrs, "err", err)...)
		return
	}
	s.Log.Warn(what, attrs...)
}
