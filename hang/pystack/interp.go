package pystack

import (
	"errors"
	"fmt"
)

// Bounds of a walk, against memory that is not an interpreter's.
const (
	maxInterps = 64
	maxThreads = 1024
)

// pyThread is a thread state.
type pyThread struct {
	addr   uint64
	frame  uint64 // the innermost frame; 0: no Python code runs in it
	id     uint64 // a pthread_t
	native int    // as the process counts its threads; 0: not kept
	gil    bool   // it holds the lock
}

// errTorn is of a list that changed while it was read.
var errTorn = errors.New("its threads changed while they were read")

// interpreter is the CPython in a process.
type interpreter struct {
	mem     memory
	layout  *layout
	runtime uint64 // the address of _PyRuntime
}

// threads returns the threads of all (sub)interpreters. With an error it returns the threads until then.
func (p *interpreter) threads() ([]pyThread, error) {
	state, err := pointer(p.mem, p.runtime+p.layout.runtime.interps)
	if err != nil {
		return nil, err
	}
	var all []pyThread
	for n := 0; state != 0; n++ {
		if n == maxInterps {
			return all, fmt.Errorf("more than %d interpreters", maxInterps)
		}
		if all, err = p.threadsOf(state, all); err != nil {
			return all, err
		}
		if state, err = pointer(p.mem, state+p.layout.interp.next); err != nil {
			return all, err
		}
	}
	return all, nil
}

func (p *interpreter) threadsOf(interp uint64, all []pyThread) ([]pyThread, error) {
	holder, err := p.holder(interp)
	if err != nil {
		return all, err
	}
	addr, err := pointer(p.mem, interp+p.layout.interp.threads)
	for err == nil && addr != 0 {
		if len(all) == maxThreads {
			return all, fmt.Errorf("more than %d threads", maxThreads)
		}
		var b block
		if b, err = read(p.mem, addr, p.layout.thread.size); err != nil {
			break
		}
		if b.word(p.layout.thread.interp) != interp {
			return all, errTorn
		}
		t := pyThread{addr: addr, id: b.word(p.layout.thread.id), gil: addr == holder}
		if p.layout.thread.native != none {
			t.native = int(int32(b.half(p.layout.thread.native)))
		}
		t.frame, err = p.innermost(b)
		all = append(all, t)
		addr = b.word(p.layout.thread.next)
	}
	return all, err
}

// innermost is the address of the innermost frame of a thread state.
func (p *interpreter) innermost(thread block) (uint64, error) {
	l := &p.layout.thread
	frame := thread.word(l.frame)
	if l.cframe == none || frame == 0 {
		return frame, nil
	}
	return pointer(p.mem, frame+l.cframe)
}

// frameOf reads again which frame of a thread is the innermost.
func (p *interpreter) frameOf(t pyThread) (uint64, error) {
	b, err := read(p.mem, t.addr, p.layout.thread.size)
	if err != nil {
		return 0, err
	}
	return p.innermost(b)
}

// holder is the thread state that holds the lock; 0: none does.
func (p *interpreter) holder(interp uint64) (uint64, error) {
	gil := p.runtime + p.layout.runtime.gil
	if p.layout.runtime.gil == none {
		var err error
		if gil, err = pointer(p.mem, interp+p.layout.interp.gil); gil == 0 || err != nil {
			return 0, err
		}
	}
	l := &p.layout.gil
	b, err := read(p.mem, gil, max(l.holder, l.locked)+8)
	if err != nil || int32(b.half(l.locked)) != 1 || l.enabled != none && b.half(l.enabled) == 0 {
		return 0, err
	}
	return b.word(l.holder), nil
}

// mainThread is the pthread_t of the main thread; 0: not known.
func (p *interpreter) mainThread() uint64 {
	if p.layout.runtime.main == none {
		return 0
	}
	id, _ := pointer(p.mem, p.runtime+p.layout.runtime.main)
	return id
}
