package warm

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/text"
	"dlrover-run/launcher/proc"
)

// resultPatience bounds the wait for the last words of a process that has ended: they are in the socket.
const resultPatience = 100 * time.Millisecond

// parent is an interpreter that imports and forks.
type parent struct {
	conn  conn
	files []file        // imported ones; Spawner.mu
	names []string      // of the modules; Spawner.mu
	took  time.Duration // the imports; Spawner.mu
	env   []string

	mu    sync.Mutex
	proc  *proc.Process // nil: not started yet
	ended bool
}

// end ends it, now or once it is there.
func (p *parent) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	_ = p.conn.Close()
	if p.proc != nil {
		_ = p.proc.SignalOnly(syscall.SIGKILL)
	}
}

// is notes the process of the parent; one that is not wanted any more ends.
func (p *parent) is(started *proc.Process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.proc = started
	if p.ended {
		_ = started.SignalOnly(syscall.SIGKILL)
	}
}

// startParent begins in the background. Spawner.mu is held.
func (s *Spawner) startParent(a action) {
	ours, theirs, err := pair()
	if err != nil {
		s.later(func(p *pool) []action { return p.ParentGone(a.Generation, err.Error()) })
		s.awaited()
		return
	}
	p := &parent{conn: ours, env: a.Recipe.Env}
	s.parents[a.Generation] = p
	s.wg.Go(func() {
		why := s.serveParent(p, theirs, a)
		_ = p.conn.Close()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.do(s.pool.ParentGone(a.Generation, why))
		if delete(s.parents, a.Generation); len(s.parents) == 0 {
			s.awaited() // no other one tries
		}
	})
}

// later passes an event to the pool once Spawner.mu is free.
func (s *Spawner) later(event func(*pool) []action) { s.wg.Go(func() { s.tell(event) }) }

// serveParent lives as long as the parent, and returns why that has ended.
func (s *Spawner) serveParent(p *parent, theirs *os.File, a action) (why string) {
	started, out, err := s.launch(theirs, a.Recipe.Env)
	if err != nil {
		return err.Error()
	}
	p.is(started)
	m := s.request(a.Recipe)
	m.Urgent = s.urgent()
	if err := p.conn.send(m); err == nil {
		s.hearParent(p, a)
	}
	s.tell(func(pool *pool) []action { return pool.ParentLost(a.Generation) })
	_ = p.conn.Close() // a parent with invalid messages is of no use
	_ = started.SignalOnly(syscall.SIGKILL)
	<-started.Done()
	return "the process that imports for warm workers has ended" + lastWords(started.Exit(), out)
}

func (s *Spawner) hearParent(p *parent, a action) {
	for {
		m, err := p.conn.receive()
		if err != nil {
			return
		}
		switch m.Op {
		case opImported:
			s.mu.Lock()
			if s.workersWait() {
				s.do(s.pool.Imported(a.Generation))
			}
			s.mu.Unlock()
		case opPrepared:
			took := s.prepared(m)
			s.mu.Lock()
			p.names, p.took = m.Names, took
			if s.workersWait() {
				s.do(s.pool.Calm(false)) // or one fork would be made carefully before the others
			}
			s.do(s.pool.Prepared(a.Generation))
			s.mu.Unlock()
			s.awaited()
		case opFiles:
			s.mu.Lock()
			p.files = m.Files
			for _, c := range s.children {
				if c != nil && c.files == nil { // it was forked before they were known
					c.files = m.Files
				}
			}
			s.mu.Unlock()
		case opUnsafe:
			s.unsafe(m, a.Generation)
			return
		}
	}
}

// prepared tells of imports, and returns how long they took.
func (s *Spawner) prepared(m answer) time.Duration {
	p := Preparation{PID: m.PID, Modules: m.Modules, Took: time.Duration(m.Seconds * float64(time.Second))}
	for _, f := range m.Failed {
		p.Failed = append(p.Failed, text.EscapeLine(f[0]+": "+f[1]))
	}
	attrs := []any{"pid", p.PID, "modules", p.Modules, "took", p.Took.Round(time.Millisecond).String()}
	if len(p.Failed) > 0 {
		attrs = append(attrs, "failed", p.Failed)
	}
	s.cfg.Log.Info("warm workers: imported what the next workers need", attrs...)
	s.cfg.Prepared(p)
	return p.Took
}

// unsafe leaves the module that is to blame to the workers, if one is; else there are no warm workers, or those that
// there are stay as they are.
func (s *Spawner) unsafe(m answer, generation int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	why := text.EscapeLine(m.Why)
	if m.First {
		s.cfg.Log.Info("warm workers: the first workers are started by exec", "why", why)
		s.do(s.pool.Forget())
		return
	}
	if m.Module == "" || len(s.denied) == maxDenied || slices.Contains(s.denied, m.Module) {
		if generation != s.pool.Parent() {
			if do, ok := s.pool.Settle(); ok {
				s.cfg.Log.Info("warm workers: what the workers have imported since the start cannot be forked", "why", why)
				s.do(do)
				return
			}
		}
		s.do(s.pool.Stop("not safe to fork: " + why))
		return
	}
	s.denied = append(s.denied, m.Module)
	s.awaited()
	s.cfg.Log.Info("warm workers: a module cannot be forked, and is left to the workers", "module", m.Module, "why", why)
	s.do(s.pool.Unfit(generation))
}

func (s *Spawner) request(r *recipe) request {
	m := request{Op: opPrepare, Python: s.cfg.Command[0], Modules: r.Modules, Env: map[string]string{},
		Launcher: os.Getpid(), Standby: s.cfg.Mode == modeStandby}
	s.mu.Lock()
	defer s.mu.Unlock()
	m.Deny = slices.Concat([]string{}, s.cfg.Deny, s.denied)
	for _, kv := range r.Set {
		name, value, _ := strings.Cut(kv, "=")
		m.Env[name] = value
	}
	m.Learned, m.Only, m.AtImport, m.Later = s.reported, s.cfg.Modules != nil, readAtImport, readLater
	if rest := s.cfg.Command[s.cfg.Flags:]; len(rest) > 0 {
		m.Script = rest[0]
		switch m.Module = rest[0] == "-m"; {
		case rest[0] == "-m":
			m.Script = rest[1]
		case rest[0] == "-c" && len(rest) > 2:
			m.Script = rest[2] // of --run-path
		}
	}
	return m
}

// launch starts an interpreter that prepares.
func (s *Spawner) launch(socket *os.File, env []string) (*proc.Process, *output, error) {
	defer socket.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer w.Close()
	argv := append(slices.Clone(s.cfg.Command[:s.cfg.Flags]), s.cfg.Program)
	p, err := s.cfg.Processes.Start(proc.Spec{Path: s.cfg.Path, Args: argv, Env: append(slices.Clone(env), variable+"=1"),
		Helper: true, Stdin: socket, Stdout: w, Stderr: w})
	if err != nil {
		r.Close()
		return nil, nil, err
	}
	out := &output{done: make(chan struct{})}
	s.wg.Go(func() { out.read(r) })
	return p, out, nil
}

// output keeps the end of a process's output.
type output struct {
	tail []byte // to be read when done is closed
	done chan struct{}
}

const outputRoom = 4 << 10

// read ends when no process has the other end any more.
func (o *output) read(r *os.File) {
	defer close(o.done)
	defer r.Close()
	buf := make([]byte, outputRoom)
	for {
		n, err := r.Read(buf)
		if err != nil {
			return
		}
		o.tail = append(o.tail, buf[:n]...)
		o.tail = slices.Clone(o.tail[max(0, len(o.tail)-outputRoom):])
	}
}

// lastWords is how a process has ended, and the last line that it has printed. Its forks may hold the pipe for longer.
func lastWords(e proc.Exit, out *output) string {
	how := fmt.Sprintf(" with status %d", e.Code)
	if e.Signal != 0 {
		how = " by " + proc.SignalName(e.Signal)
	}
	select {
	case <-out.done:
	case <-time.After(resultPatience):
		return how
	}
	lines := strings.Split(strings.TrimSpace(string(out.tail)), "\n")
	if line := lines[len(lines)-1]; line != "" {
		how += ": " + text.EscapeLine(line)
	}
	return how
}

// child is a process that becomes a worker.
type child struct {
	parent     // its own socket and process
	generation int
	how        How
	employed   atomic.Bool         // it is a worker
	parked     chan struct{}       // closed when it waits, or cannot any more
	over       chan struct{}       // closed after its last message
	forked     func() (swept bool) // it was adopted, or will not be

	saidMu  sync.Mutex
	ran     bool   // it has begun with the script
	refused string // why it could not
}

// park begins in the background. Spawner.mu is held.
func (s *Spawner) park(a action) {
	ours, theirs, err := pair()
	if err != nil {
		s.later(func(p *pool) []action { return p.ChildGone(a.Slot, a.Generation, err.Error()) })
		return
	}
	c := &child{parent: parent{conn: ours, env: a.Recipe.Env}, generation: a.Generation, how: ByParked,
		parked: make(chan struct{}), over: make(chan struct{}), forked: func() bool { return false }}
	s.children[a.Slot] = c
	serve := func() string { return s.serveStandby(c, theirs, a) }
	if s.cfg.Mode == modeFork {
		if a.Urgent {
			c.how = ByFork
		}
		p := s.parents[s.pool.Parent()]
		c.env, c.files = p.env, p.files
		from := p.conn
		serve = func() string { return s.serveFork(c, from, theirs, a) }
	} else {
		c.how = ByStandby
	}
	s.wg.Go(func() {
		why := serve()
		_ = c.conn.Close()
		close(c.over)
		c.ready()
		s.tell(func(p *pool) []action { return p.ChildGone(a.Slot, a.Generation, why) })
	})
}

// ready wakes the waiting goroutines. It is for the goroutine of the child.
func (c *child) ready() {
	select {
	case <-c.parked:
	default:
		close(c.parked)
	}
}

func (s *Spawner) serveFork(c *child, from conn, theirs *os.File, a action) (why string) {
	c.forked = s.cfg.Processes.Forking()
	defer c.forked()
	err := from.send(request{Op: opFork, Urgent: a.Urgent}, theirs)
	theirs.Close()
	if err != nil {
		return "" // the parent is to blame
	}
	s.hearChild(c, a)
	if c.forked() {
		return "" // it was in the way when the workers before were cleared away
	}
	return "cannot fork (is the limit on processes, ulimit -u, reached?)"
}

func (s *Spawner) serveStandby(c *child, theirs *os.File, a action) (why string) {
	started, out, err := s.launch(theirs, a.Recipe.Env)
	if err != nil {
		return err.Error()
	}
	c.is(started)
	if err := c.conn.send(s.request(a.Recipe)); err == nil {
		s.hearChild(c, a)
	}
	if !c.employed.Load() {
		_ = started.SignalOnly(syscall.SIGKILL)
		<-started.Done()
		return "the process that imports for a warm worker has ended" + lastWords(started.Exit(), out)
	}
	return ""
}

// hearChild returns when the child's messages have ended.
func (s *Spawner) hearChild(c *child, a action) {
	for {
		m, err := c.conn.receive()
		if err != nil {
			return
		}
		switch m.Op {
		case opPrepared:
			s.prepared(m)
			if s.cfg.Mode == modeStandby {
				s.parked(c, m.PID, a)
			}
		case opFiles:
			s.mu.Lock()
			c.files = m.Files
			s.mu.Unlock()
		case opParked:
			if !s.parked(c, m.PID, a) {
				return
			}
		case opUnsafe:
			s.unsafe(m, a.Generation)
			return
		case opRunning, opRefused:
			c.say(m)
			return
		}
	}
}

// parked takes in a child that waits.
func (s *Spawner) parked(c *child, pid int, a action) bool {
	if c.proc == nil {
		adopted, err := s.cfg.Processes.Adopt(pid)
		c.forked()
		if err != nil {
			s.cfg.Log.Debug("a forked process cannot be used", "err", err)
			return false
		}
		c.is(adopted)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.do(s.pool.Parked(a.Slot, a.Generation))
	c.ready()
	return true
}

func (c *child) say(m answer) {
	c.saidMu.Lock()
	defer c.saidMu.Unlock()
	c.ran = m.Op == opRunning
	if m.Op == opRefused {
		c.refused = text.EscapeLine(m.Why)
	}
}

// result is whether it has run its script, and why it could not, once it has ended.
func (c *child) result(patience time.Duration) (ran bool, refused string) {
	select {
	case <-c.over:
	case <-time.After(patience):
	}
	c.saidMu.Lock()
	defer c.saidMu.Unlock()
	return c.ran, c.refused
}

// become makes it a worker. It is not waited for.
func (c *child) become(spec proc.Spec, procs processes) error {
	dir := spec.Dir
	if dir == "" {
		var err error
		if dir, err = os.Getwd(); err != nil {
			return err
		}
	}
	o := order{Argv: spec.Args, Env: last(spec.Env), Dir: dir, CPUs: spec.CPUs, Memory: memoryOf(spec.Memory)}
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	body, err := inMemory("order", text)
	if err != nil {
		return err
	}
	defer body.Close()
	files := []*os.File{body, spec.Stdin, spec.Stdout, spec.Stderr}
	for i, f := range files {
		if f == nil {
			if files[i], err = os.OpenFile(os.DevNull, os.O_RDWR, 0); err != nil {
				return err
			}
			defer files[i].Close()
		}
	}
	if err := procs.Employ(c.proc); err != nil {
		return fmt.Errorf("a prepared process has ended: %w", err)
	}
	c.employed.Store(true)
	if err := c.conn.write([]byte(`{"op":"`+opRun+`"}`), files); err != nil {
		return fmt.Errorf("a prepared process has ended: %w", err)
	}
	return nil
}
