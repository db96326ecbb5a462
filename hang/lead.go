package hang

import (
	"slices"
	"strings"
)

// shimThread is the name of the shim's own thread.
const shimThread = "dlrover-hang"

// Lead makes the thread that trains the main one (Thread.Main) and returns its id; 0: it is the process's own main
// thread. by is the id of the thread that the shim has seen making a step, 0: none. If this thread, or the main
// thread, only waits for other threads, Lead takes one of these: a thread in PyTorch or, where a thread is joined, in
// the user's code. The shim's own thread is left out, unless it keeps the interpreter's lock.
func (s *Stacks) Lead(by int) (tid int) {
	s.Threads = slices.DeleteFunc(s.Threads, func(t Thread) bool { return t.Name == shimThread && !t.GIL && !t.Main })
	main := slices.IndexFunc(s.Threads, func(t Thread) bool { return t.Main })
	if main < 0 {
		return 0
	}
	lead := slices.IndexFunc(s.Threads, func(t Thread) bool { return by != 0 && t.TID == by && len(t.Python) > 0 })
	if lead < 0 {
		lead = main
	}
	lead = s.awaited(lead)
	if lead == main {
		return 0
	}
	t := s.Threads[lead]
	t.Main, s.Threads[main].Main = true, false
	s.Threads = slices.Insert(slices.Delete(s.Threads, lead, lead+1), 0, t)
	return t.TID
}

// awaited is the thread that another one waits for, or waiter itself if it does not wait or the other is unknown.
func (s *Stacks) awaited(waiter int) int {
	least, ok := s.Threads[waiter].awaits()
	if !ok {
		return waiter
	}
	best, most, tied := waiter, 0, false
	for i := range s.Threads {
		switch score := s.Threads[i].trains(); {
		case i == waiter || score < least || score < most:
		case score == most:
			tied = tied || score < inTorch
		default:
			best, most, tied = i, score, false
		}
	}
	if tied {
		return waiter
	}
	return best
}

// Weights of the signs that a thread trains: its frames that are the user's own, and more if it is in PyTorch, or in
// a collective.
const (
	inTorch      = 1 << 16
	inCollective = 1 << 17
)

func (t *Thread) trains() int {
	score := t.Own()
	switch {
	case score == 0:
		return 0
	case waitOfThread(t).op != "":
		return score | inCollective
	case t.inTorch():
		return score | inTorch
	}
	return score
}

// Own is how many frames of a thread are the user's own code.
func (t *Thread) Own() (n int) {
	for _, f := range t.Python {
		if !inLibrary(f.File) {
			n++
		}
	}
	return n
}

func (t *Thread) inTorch() bool {
	return slices.ContainsFunc(t.Python, func(f Frame) bool { return strings.Contains(f.File, "/torch/") })
}

// awaits reports whether a thread waits for other threads, and the least work that those must do to be meant. A
// thread that joins another waits for nothing else; a thread that waits for an event may wait for anything.
func (t *Thread) awaits() (least int, ok bool) {
	if len(t.Python) == 0 || t.inTorch() {
		return 0, false
	}
	switch f := t.Python[0]; {
	case isFile(f, "/threading.py") && slices.Contains([]string{"join", "_wait_for_tstate_lock", "_shutdown"}, f.Func):
		return 1, true
	case isFile(f, "/threading.py", "/queue.py", "/selectors.py"), strings.Contains(f.File, "/concurrent/futures/"):
		return inTorch, true
	}
	return 0, false
}

// Ending reports whether the main thread has done its work, or has failed, and Python waits for the other threads to
// end.
func (s *Stacks) Ending() bool {
	return slices.ContainsFunc(s.Threads, func(t Thread) bool {
		return slices.ContainsFunc(t.Python[:min(len(t.Python), 2)], func(f Frame) bool {
			return f.Func == "_shutdown" && isFile(f, "/threading.py")
		})
	})
}

// Waits reports whether the thread that trains is seen to wait for other ranks.
func (s *Stacks) Waits() bool {
	w, sure := waitOf(s)
	return sure && w.op != ""
}
