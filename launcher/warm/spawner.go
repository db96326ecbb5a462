package warm

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/proc"
)

// variable is set where the Python of this package has work to do: for a worker it names the file that receives its
// imports, once it has made a step.
const variable = "DLROVER_WARM"

const (
	// forkPatience is how long the workers of one start together wait for forks that are on their way: as long as the
	// imports took, for a worker that is started by exec makes them again, but no less and no more than this.
	forkPatience    = time.Second
	maxForkPatience = 15 * time.Second
	// checkPatience is how long they wait for the state of the files that were imported: a thousand of them take
	// milliseconds, except on network storage that does not answer.
	checkPatience = 500 * time.Millisecond
	// earlyFailure is how soon after a warm start, and before a step, a failure is taken for one of ours.
	earlyFailure = 10 * time.Second
	// firstPatience is how long the first workers wait for the imports of their parent.
	firstPatience = time.Minute
	// idleAfter is how long a node without workers waits until it is taken for a spare.
	idleAfter = time.Second
	// worthImporting is how many modules have to be missing for another import of all: some are always, such as those by
	// which a fork becomes a worker.
	worthImporting = 10
	// maxDenied bounds the modules that are found out not to be fit for forks.
	maxDenied = 5
)

// processes starts processes, and makes workers of forked ones; proc.Supervisor is one.
type processes interface {
	Start(proc.Spec) (*proc.Process, error)
	Forking() (done func() (swept bool))
	Adopt(pid int) (*proc.Process, error)
	Employ(*proc.Process) error
}

// Config of a Spawner.
type Config struct {
	Mode  Mode
	Slots int
	// Modules are imported; nil: the imports of a worker up to its first step or, before there is one, the script's
	// imports at its top level.
	Modules []string
	Deny    []string // modules that are not imported
	// Command is the argv of workers; its first Flags words are the interpreter and its options.
	Command []string
	Flags   int
	Path    string // of the interpreter
	Program string // Python that prepares
	Dir     string // a private directory for the workers' reports
	// Env is the environment of workers on a node that has not had any.
	Env       []string
	Processes processes
	Log       *slog.Logger
	// Prepared and Started, which may be nil, are notified of events; any goroutine may call them.
	Prepared func(Preparation)
	Started  func(Start)
}

// Preparation describes modules that have been imported.
type Preparation struct {
	PID     int
	Modules int      // how many there are
	Failed  []string // modules that cannot be imported, and why not
	Took    time.Duration
}

// How a worker was started.
type How string

// The ways to start a worker.
const (
	ByParked  How = "parked"  // from a child that was waiting
	ByFork    How = "forked"  // from one that was forked when it was needed
	ByStandby How = "standby" // from an interpreter that stood by
	ByExec    How = "exec"
)

// Start describes a worker's start.
type Start struct {
	Worker logs.WorkerID
	PID    int
	How    How
	Why    string // not warm
	Took   time.Duration
}

// Spawner starts workers, from prepared processes where it can. Its methods may be called by any goroutine.
type Spawner struct {
	cfg  Config
	wg   sync.WaitGroup
	idle *time.Timer
	// first is closed when the first parent can fork, has ended, or has taken too long; nil: no worker waits for it.
	first     chan struct{}
	firstOnce sync.Once
	patience  time.Duration // with it, from the first Await on

	mu       sync.Mutex // guards the fields below
	pool     *pool
	closed   bool
	until    time.Time       // first is waited for until then
	parents  map[int]*parent // by generation
	children []*child        // by local rank
	denied   []string        // modules that cannot be forked
	reported bool            // a worker has told of itself
	told     string          // why nothing is prepared, as it has been logged

	epoch    int // counts starts
	workers  []*worker
	deadline time.Time // of waiting for forks
	distrust bool      // the next workers are started by exec
	exec     string    // why these are
	stepped  bool      // these have made a step
	excused  bool      // a failure has been
	checked  chan struct{}
}

// worker is one of the present epoch.
type worker struct {
	pid   int
	began time.Time
	env   []string
	child *child // nil: by exec
}

// New returns a Spawner that has not started anything.
func New(cfg Config) *Spawner {
	if cfg.Prepared == nil {
		cfg.Prepared = func(Preparation) {}
	}
	if cfg.Started == nil {
		cfg.Started = func(Start) {}
	}
	s := &Spawner{cfg: cfg, pool: newPool(cfg.Mode, cfg.Slots), children: make([]*child, cfg.Slots),
		parents: map[int]*parent{}, workers: make([]*worker, cfg.Slots), patience: firstPatience}
	if cfg.Mode == modeFork {
		s.first = make(chan struct{})
	}
	return s
}

// do carries out the pool's actions. mu is held.
func (s *Spawner) do(actions []action) {
	if off := s.pool.Off(); off != s.told && !s.closed {
		s.told = off
		s.cfg.Log.Warn("warm workers are off: workers are started by exec from now on", "why", off)
	}
	for _, a := range actions {
		switch {
		case s.closed && (a.Kind == startParent || a.Kind == park):
		case a.Kind == startParent:
			s.startParent(a)
		case a.Kind == endParent && s.parents[a.Generation] != nil:
			s.parents[a.Generation].end()
		case a.Kind == park:
			s.park(a)
		case a.Kind == discard && s.children[a.Slot] != nil:
			s.children[a.Slot].end()
			s.children[a.Slot] = nil
		}
	}
}

// tell passes an event to the pool, and carries out its actions.
func (s *Spawner) tell(event func(*pool) []action) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.do(event(s.pool))
}

// Joined begins to prepare: at once for the first workers, or if the modules are known, and otherwise after a time
// without other events.
func (s *Spawner) Joined() {
	after := idleAfter
	if s.cfg.Modules != nil || s.first != nil {
		after = 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = time.AfterFunc(after, s.rest)
}

// rest: this node has no workers for a while, or the modules are configured.
func (s *Spawner) rest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pool.Wanted() == nil {
		s.do(s.pool.Want(recipe{Modules: s.cfg.Modules, Env: commonEnv(s.cfg.Env)}))
	}
	s.do(s.pool.Calm(true))
}

// Await waits until the first workers can be forked, or it is known that they cannot. Later workers do not wait. If ctx
// ends before the first ones are started, the next ones wait for the rest of the time.
func (s *Spawner) Await(ctx context.Context) {
	if s.first == nil {
		return
	}
	s.mu.Lock()
	if s.until.IsZero() {
		s.until = time.Now().Add(s.patience)
	}
	late := time.NewTimer(time.Until(s.until))
	s.mu.Unlock()
	defer late.Stop()
	select {
	case <-s.first:
	case <-ctx.Done():
		return // those that follow are the first then
	case <-late.C:
		s.cfg.Log.Info("warm workers: the imports take too long, and the first workers are started by exec", "waited",
			s.patience.String())
	}
	s.awaited()
}

// awaited: the first parent is not waited for any more.
func (s *Spawner) awaited() {
	if s.first != nil {
		s.firstOnce.Do(func() { close(s.first) })
	}
}

// workersWait reports whether the first workers are going to be started as soon as there is a parent. mu is held.
func (s *Spawner) workersWait() bool { return !s.until.IsZero() && s.urgent() }

// urgent reports whether workers wait for a parent.
func (s *Spawner) urgent() bool {
	select {
	case <-s.first:
		return false
	default:
		return s.first != nil
	}
}

// Starting: workers are going to be started.
func (s *Spawner) Starting() {
	s.mu.Lock()
	checked := s.checked
	s.mu.Unlock()
	late := !closes(checked, checkPatience)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle != nil && s.cfg.Modules == nil {
		s.idle.Stop()
	}
	s.epoch++
	s.stepped, s.exec, s.deadline, s.checked = false, "", time.Now().Add(s.forkPatience()), nil
	switch {
	case s.distrust:
		s.distrust, s.exec = false, "the last warm start has failed"
	case late:
		s.exec = "it takes too long to see whether a file has changed since it was imported"
	default:
		s.do(s.pool.Demand())
	}
}

// forkPatience is that with the present parent. mu is held.
func (s *Spawner) forkPatience() time.Duration {
	p := s.parents[s.pool.Parent()]
	if p == nil {
		return forkPatience
	}
	return min(max(p.took, forkPatience), maxForkPatience)
}

// closes waits for c to close; false: it does not in time. Nil counts as closed.
func closes(c <-chan struct{}, patience time.Duration) bool {
	if c == nil {
		return true
	}
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case <-c:
		return true
	case <-late.C:
		return false
	}
}

// Running: the first workers have been started. If that was by exec, known modules are prepared at once, next to them;
// others first make their first step.
func (s *Spawner) Running() {
	s.mu.Lock()
	defer s.mu.Unlock()
	byExec := slices.ContainsFunc(s.workers, func(w *worker) bool { return w != nil && w.child == nil })
	if s.epoch == 1 && s.cfg.Modules != nil && byExec {
		s.do(s.pool.Calm(true))
	}
}

// Environ is for the worker of a local rank.
func (s *Spawner) Environ(localRank int) []string {
	if localRank != 0 {
		return nil
	}
	return []string{variable + "=" + s.learnFile()}
}

func (s *Spawner) learnFile() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return filepath.Join(s.cfg.Dir, fmt.Sprintf("%d.json", s.epoch))
}

// Spawn is the launcher's Config.Spawn.
func (s *Spawner) Spawn(spec proc.Spec, id logs.WorkerID) (*proc.Process, error) {
	began := time.Now()
	c, why := s.take(spec, id.LocalRank)
	w := &worker{began: began, env: spec.Env, child: c}
	var p *proc.Process
	how := ByExec
	if c != nil {
		p, how = c.proc, c.how
	} else {
		var err error
		if p, err = s.cfg.Processes.Start(spec); err != nil {
			return nil, err
		}
	}
	w.pid = p.PID()
	s.mu.Lock()
	s.workers[id.LocalRank] = w
	s.mu.Unlock()
	s.cfg.Started(Start{Worker: id, PID: w.pid, How: how, Why: why, Took: time.Since(began)})
	return p, nil
}

// take makes a worker of the child that waits for a slot; nil: there is none that can become this one, and why.
func (s *Spawner) take(spec proc.Spec, slot int) (*child, string) {
	c, why := s.candidate(slot)
	if c == nil {
		return nil, why
	}
	select {
	case <-c.parked:
	case <-time.After(time.Until(s.deadline)): // written by Starting, which runs before
	}
	if why := compatible(c.env, spec.Env); why != "" {
		return nil, why
	}
	s.mu.Lock()
	if generation, ready := s.pool.Usable(slot); !ready || generation != c.generation {
		s.mu.Unlock()
		return nil, "no process is ready"
	}
	s.pool.Take(slot)
	s.children[slot] = nil
	s.mu.Unlock()
	if err := c.become(spec, s.cfg.Processes); err != nil {
		c.end()
		return nil, err.Error()
	}
	return c, ""
}

func (s *Spawner) candidate(slot int) (*child, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.children[slot]
	generation, _ := s.pool.Usable(slot)
	switch {
	case s.exec != "":
		return nil, s.exec
	case s.pool.Off() != "":
		return nil, s.pool.Off()
	case generation == 0 || c == nil:
		return nil, "no process is ready"
	}
	return c, ""
}

// Stopping checks, during the end of the workers, whether imported files have changed since.
func (s *Spawner) Stopping() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var files []file
	if p := s.parents[s.pool.Parent()]; p != nil {
		files = p.files
	}
	for _, c := range s.children {
		if c != nil && len(files) == 0 {
			files = c.files
		}
	}
	if s.closed || len(files) == 0 || s.checked != nil {
		return
	}
	done := make(chan struct{})
	s.checked = done
	s.wg.Go(func() {
		defer close(done)
		if name := changed(files); name != "" {
			s.cfg.Log.Info("warm workers: a file has changed since it was imported", "path", name)
			s.tell((*pool).Changed)
		}
	})
}

// changed names the first file that has changed since its import.
func changed(files []file) string {
	for _, f := range files {
		info, err := os.Stat(f.Path)
		if err != nil || info.Size() != f.Size || info.ModTime().UnixNano() != f.MTime {
			return f.Path
		}
	}
	return ""
}

// Stopped: nothing is left of the workers.
func (s *Spawner) Stopped() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && s.idle != nil {
		s.idle.Reset(idleAfter)
	}
	_ = os.Remove(filepath.Join(s.cfg.Dir, fmt.Sprintf("%d.json", s.epoch))) // there may be none
}

// Stepped: the workers have made a step, so that there is time to prepare the next ones; or it is unknown when they do.
func (s *Spawner) Stepped() { s.began(learned{}) }

// began takes a worker's report, if there is one.
func (s *Spawner) began(l learned) {
	s.Stopping()
	s.mu.Lock()
	checked := s.checked
	s.mu.Unlock()
	if checked != nil {
		<-checked
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stepped, s.checked = l.Why != atExit, nil
	s.reported = s.reported || l.Why != ""
	if want := s.recipe(l); want != nil {
		s.do(s.pool.Want(*want))
	}
	s.do(s.pool.Calm(true))
}

// recipe is the required imports after a worker's report; nil: as before.
func (s *Spawner) recipe(l learned) *recipe {
	var envs [][]string
	for _, w := range s.workers {
		if w != nil {
			envs = append(envs, w.env)
		}
	}
	want := recipe{Modules: s.cfg.Modules, Env: commonEnv(envs...), Set: l.set()}
	if want.Modules == nil {
		want.Modules = l.Modules
	}
	old := s.pool.Wanted()
	if old == nil {
		return &want
	}
	if w := s.workers[0]; s.cfg.Modules == nil && w != nil && w.child != nil { // it tells of nothing that it began with
		want.Modules = union(old.Modules, want.Modules)
	} else if s.cfg.Modules == nil {
		want.Modules = union(want.Modules, old.Modules)
	}
	want.Set = union(want.Set, old.Set)
	have := old.Modules // some of which cannot be imported
	if p := s.parents[s.pool.Parent()]; p != nil {
		have = union(have, p.names)
	}
	few := have != nil && len(without(want.Modules, have)) < worthImporting
	if few && contains(old.Set, want.Set) && compatible(old.Env, want.Env) == "" {
		return nil
	}
	s.cfg.Log.Debug("warm workers: more is imported", "modules", without(want.Modules, have),
		"variables", without(want.Set, old.Set), "environment", compatible(old.Env, want.Env))
	return &want
}

func without(all, some []string) []string {
	known := map[string]bool{}
	for _, m := range some {
		known[m] = true
	}
	return slices.DeleteFunc(slices.Clone(all), func(m string) bool { return known[m] })
}

func contains(all, some []string) bool {
	return len(without(some, all)) == 0
}

// union has those of the first list first.
func union(first, rest []string) []string {
	return append(slices.Clone(first), without(rest, first)...)
}

// Excuse returns why the end of a worker may be a fault of its warm start and not of the job's; "" if it cannot be. The
// workers that are started next are started by exec then.
func (s *Spawner) Excuse(localRank, pid, code int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[localRank]
	if w == nil || w.pid != pid || w.child == nil {
		return ""
	}
	s.mu.Unlock()
	said, refused := w.child.result(resultPatience)
	l, _ := readLearned(s.learnFile()) // there is none yet
	s.mu.Lock()
	why := ""
	switch early := time.Since(w.began) < earlyFailure && !s.stepped && l.Why != firstStep; {
	case refused != "":
		why = "it could not become the worker: " + refused
	case !said:
		why = "it has ended before it ran the script"
	case code == 0 || !early || code > 0 && s.epoch == 1: // a script that has never run is more often to blame
		return ""
	default:
		why = fmt.Sprintf("it has ended within %s of a warm start, before the first step", earlyFailure)
	}
	s.distrust = true
	if s.excused && refused == "" {
		return ""
	}
	s.excused = true
	return why
}

// Close ends the prepared processes, and waits for them.
func (s *Spawner) Close() {
	s.mu.Lock()
	s.closed = true
	if s.idle != nil {
		s.idle.Stop()
	}
	s.do(s.pool.Stop("the job is over"))
	s.mu.Unlock()
	s.wg.Wait()
}
