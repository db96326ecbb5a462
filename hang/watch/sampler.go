package watch

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/page"
	"dlrover-run/internal/openfile"
)

// tracked is a worker and its state after a look.
type tracked struct {
	local, rank int
	pid         int
	start       uint64
	blocked     bool // reading it did not end
	// trainer is the process that trains, if it is a descendant of the worker; 0: it is not known to be.
	trainer      int
	trainerStart uint64
	python       bool // one of the two is an interpreter
	last         hang.Sample
	cpu, io      total // of the tree
	net          total // while it is quiet
	moved        time.Duration
}

// quiet is for how long a worker must have made no progress before its connections are looked for, which takes longer
// than all else.
const quiet = 5 * time.Second

// total is a sum over living processes that does not fall when one of them has ended unseen.
type total struct{ raw, sum uint64 }

func (t *total) add(raw uint64) uint64 {
	if raw > t.raw {
		t.sum += raw - t.raw
	}
	t.raw = raw
	return t.sum
}

// sampler looks at workers. It is for one goroutine, but for reading.
type sampler struct {
	fs      *procfs
	now     func() time.Duration
	pages   string                          // directory of the shim's pages; "": there are none
	parse   func([]byte) (hang.Page, error) // of a page
	traffic func(pids []int) uint64         // of processes; nil: unknown
	reading atomic.Int64                    // the pid that is being read, 0 for none
	leads   *leads
}

// leads are the threads that train, of processes with stacks that show another thread than the main one.
type leads struct {
	mu  sync.Mutex
	tid map[int]int // by pid
}

func (l *leads) set(pid, tid int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tid[pid] = tid
}

func (l *leads) of(pid int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tid[pid]
}

// look takes a sample of every worker. A deep one looks at all threads of all processes, too.
func (s *sampler) look(before []tracked, deep bool) []tracked {
	after := make([]tracked, len(before))
	for i, t := range before {
		s.sample(&t, deep)
		after[i] = t
	}
	s.reading.Store(0)
	return after
}

func (s *sampler) sample(t *tracked, deep bool) {
	next := hang.Sample{At: s.now(), Worker: hang.Worker{Rank: t.rank, Local: t.local, PID: t.pid, Start: t.start}}
	defer func() { t.last = next }()
	if t.blocked {
		next.Worker, next.Proc, next.Page = t.last.Worker, t.last.Proc, t.last.Page
		next.Proc.State = 'D' // it holds a lock of the kernel for which a reader waits
		return
	}
	s.reading.Store(int64(t.pid))
	st, err := s.fs.stat(t.pid)
	if err != nil || t.start != 0 && st.start != t.start {
		return // gone
	}
	t.start, next.Start = st.start, st.start
	next.Page = s.page(t.local)
	if pid := s.trainer(t, next.Page, deep); pid != t.pid {
		s.reading.Store(int64(pid))
		if own, err := s.fs.stat(pid); err == nil {
			st, next.PID, next.Start = own, pid, own.start
		}
	}
	next.Proc = s.proc(t, next.PID, st, next.Page, deep)
	next.Proc.Net = s.net(t, &next, deep)
}

// net counts the bytes on the connections of a quiet worker's tree since it has come to rest.
func (s *sampler) net(t *tracked, next *hang.Sample, deep bool) uint64 {
	if hang.Progressed(t.last, *next) {
		t.moved, t.net = next.At, total{}
	}
	if s.traffic == nil || next.At-t.moved < quiet {
		return 0
	}
	raw := s.traffic(append(s.descendants(t.pid, deep), t.pid))
	if t.net.raw == 0 {
		t.net.raw = raw // earlier traffic is no news
	}
	return t.net.add(raw)
}

// proc returns the data of the process that trains, and of the worker's whole tree.
func (s *sampler) proc(t *tracked, pid int, st stat, page *hang.Page, deep bool) hang.Proc {
	p := hang.Proc{State: st.state, CPU: st.cpu, Threads: st.threads, IO: s.fs.io(pid)}
	lead := pid
	if tid, own := s.lead(pid, page); tid != 0 {
		p.Thread, lead = tid, tid
		if strings.IndexByte("TtZX", st.state) < 0 {
			p.State = own.state
		}
	}
	p.WChan = s.fs.wchan(pid, lead)
	p.MainCPU, p.MainWait, p.Switches = s.fs.thread(pid, lead)
	if p.State == 'D' {
		p.DThreads = 1
	}
	if deep {
		p.DThreads = max(p.DThreads, s.fs.uninterruptible(pid))
	}
	cpu, bytes := s.tree(t, deep)
	p.TreeCPU, p.TreeIO = time.Duration(t.cpu.add(uint64(cpu))), t.io.add(bytes)
	return p
}

// lead is the thread that trains, if it is known not to be the main one and lives; else 0.
func (s *sampler) lead(pid int, p *hang.Page) (tid int, st stat) {
	tid = s.leads.of(pid)
	if tid == 0 && p != nil && p.PID == pid {
		tid = p.Thread
	}
	if tid == 0 || tid == pid {
		return 0, stat{}
	}
	b, err := s.fs.file(pid, task(pid, tid)+"stat")
	if err != nil {
		return 0, stat{}
	}
	st, ok := parseStat(b)
	if !ok {
		return 0, stat{}
	}
	return tid, st
}

// tree sums up the worker's descendants, the one that trains as well if it is among them, and those that they have
// waited for.
func (s *sampler) tree(t *tracked, deep bool) (cpu time.Duration, bytes uint64) {
	if st, err := s.fs.stat(t.pid); err == nil {
		cpu = st.reaped
	}
	bytes = s.fs.io(t.pid)
	for _, pid := range s.descendants(t.pid, deep) {
		if st, err := s.fs.stat(pid); err == nil {
			cpu += st.cpu + st.reaped
		}
		bytes += s.fs.io(pid)
	}
	return cpu, bytes
}

// descendants are the nearest first.
func (s *sampler) descendants(pid int, deep bool) (all []int) {
	level := []int{pid}
	for depth := 0; len(level) > 0 && depth < maxDepth; depth++ {
		var next []int
		for _, p := range level {
			next = append(next, s.fs.children(p, deep)...)
			if len(all)+len(next) >= maxProcesses {
				return append(all, next[:maxProcesses-len(all)]...)
			}
		}
		all, level = append(all, next...), next
	}
	return all
}

// trainer is the process that trains: the one that has claimed the page, or the worker itself. If the worker is no
// Python, but a shell or another wrapper, it is the nearest descendant that is.
func (s *sampler) trainer(t *tracked, p *hang.Page, deep bool) int {
	if p != nil && s.alive(p.PID, p.Start) {
		t.trainer, t.trainerStart = p.PID, p.Start
	}
	if t.trainer != 0 && s.alive(t.trainer, t.trainerStart) {
		return t.trainer
	}
	t.trainer = 0
	if t.python = s.isPython(t.pid); t.python {
		return t.pid
	}
	for _, pid := range s.descendants(t.pid, deep) {
		if st, err := s.fs.stat(pid); err == nil && s.isPython(pid) {
			t.trainer, t.trainerStart, t.python = pid, st.start, true
			return pid
		}
	}
	return t.pid
}

func (s *sampler) alive(pid int, start uint64) bool {
	st, err := s.fs.stat(pid)
	return err == nil && st.start == start
}

func (s *sampler) isPython(pid int) bool {
	exe, err := os.Readlink(s.fs.root + "/" + strconv.Itoa(pid) + "/exe")
	name := filepath.Base(exe)
	return err == nil && (strings.HasPrefix(name, "python") || strings.HasPrefix(name, "pypy"))
}

// page is the report of the shim in a worker; nil without one.
func (s *sampler) page(local int) *hang.Page {
	if s.pages == "" {
		return nil
	}
	b, err := openfile.Read(pageFile(s.pages, local, "page"), page.Size)
	if err != nil {
		return nil
	}
	p, err := s.parse(b)
	if err != nil || p.Local != local {
		return nil
	}
	return &p
}

// pageFile is where the shim of a worker writes its page, or its groups.
func pageFile(dir string, local int, kind string) string {
	return filepath.Join(dir, "l"+strconv.Itoa(local)+"."+kind)
}
