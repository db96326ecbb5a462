package pystack

import (
	"fmt"
	"slices"
	"strings"

	"dlrover-run/hang"
)

// survey is one look at a process.
type survey struct {
	reader *Reader
	pid    int
	tid    int // of a thread that lives
	tasks  []task
	maps   []mapping
	mem    *bounded

	interpreter string
	byTID       map[int]*hang.Thread
	unknown     []*hang.Thread // of the interpreter's threads, those that are no task
	problems    []string
}

// attempts is how often a list or a stack is read that changes meanwhile.
const attempts = 4

func (s *survey) problem(format string, args ...any) {
	const maxProblems = 8
	if len(s.problems) < maxProblems {
		s.problems = append(s.problems, fmt.Sprintf(format, args...))
	}
}

// python reads the interpreter's stacks, if there is one.
func (s *survey) python() {
	p, name, err := s.reader.findInterpreter(s.tid, s.mem, s.maps)
	s.interpreter = name
	if err != nil {
		s.problem("no Python stacks: %v", err)
	}
	if p == nil || err != nil {
		return
	}
	var threads []pyThread
	for range attempts {
		if threads, err = p.threads(); err == nil {
			break
		}
	}
	if err != nil {
		s.problem("not all threads of the interpreter: %v", err)
	}
	found := identifyThreads(s.mem, threads, s.tasks, p.mainThread())
	walk := stackReader{mem: s.mem, layout: p.layout, codes: map[uint64]*code{}}
	for _, t := range threads {
		task, known := found[t.addr]
		th := s.thread(task, known)
		th.GIL = th.GIL || t.gil
		frames, err := stackOf(p, &walk, t)
		if err != nil {
			s.problem("thread %d: %v", th.TID, err)
		}
		// A thread has a state in each interpreter that it is in. The newest, called last, is first.
		th.Python = shorten(append(th.Python, frames...))
	}
}

// stackOf reads a stack until it has been the same from the first frame to the last, or often enough.
func stackOf(p *interpreter, walk *stackReader, t pyThread) (frames []hang.Frame, err error) {
	for range attempts {
		if frames, err = walk.walk(t.frame); err != nil {
			clear(walk.codes) // one of them may have been something else
		}
		now, moved := p.frameOf(t)
		if moved != nil {
			return frames, err
		}
		if now == t.frame && err == nil {
			break
		}
		t.frame = now
	}
	return frames, err
}

// thread is the result for a task; that of no task is a new one.
func (s *survey) thread(t task, known bool) *hang.Thread {
	if !known {
		th := &hang.Thread{}
		s.unknown = append(s.unknown, th)
		return th
	}
	th := s.byTID[t.tid]
	if th == nil {
		th = &hang.Thread{TID: t.tid, Name: t.name, State: t.state, Main: t.tid == s.pid}
		s.byTID[t.tid] = th
	}
	return th
}

// stacks puts the results together.
func (s *survey) stacks() hang.Stacks {
	out := hang.Stacks{Interpreter: s.interpreter, Error: strings.Join(s.problems, "; ")}
	for _, t := range s.tasks { // the main one is the first
		th := s.byTID[t.tid]
		switch {
		case th != nil && (th.Main || th.GIL || len(th.Python)+len(th.Native) > 0):
			out.Threads = append(out.Threads, *th)
		case t.tid == s.pid:
			out.Threads = append(out.Threads, *s.thread(t, true))
		}
	}
	for _, th := range s.unknown {
		if len(th.Python) > 0 {
			out.Threads = append(out.Threads, *th)
		}
	}
	out.Threads = slices.Clip(out.Threads)
	return out
}
