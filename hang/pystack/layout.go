package pystack

import "fmt"

// layout has the places of CPython's data for a walk: offsets in bytes into its structs, and how much of them to
// read.
type layout struct {
	runtime      runtimeLayout
	interp       interpLayout
	gil          gilLayout
	thread       threadLayout
	frame        frameLayout
	code         codeLayout
	text         textLayout
	bytes        bytesLayout
	lines        lineFormat
	freeThreaded bool
}

const none = ^uint64(0)

// runtimeLayout is of _PyRuntime.
type runtimeLayout struct {
	interps uint64 // the newest interpreter
	main    uint64 // the main thread's pthread_t; none: not known
	gil     uint64 // the lock of all interpreters; none: each has its own
}

// interpLayout is of PyInterpreterState.
type interpLayout struct {
	next, threads uint64
	gil           uint64 // a pointer to its lock; none: it is the runtime's
}

// gilLayout is of struct _gil_runtime_state.
type gilLayout struct {
	holder, locked uint64
	enabled        uint64 // none: always
}

// threadLayout is of PyThreadState.
type threadLayout struct {
	next, interp uint64
	frame        uint64 // the innermost frame, or the pointer to a struct that has it
	cframe       uint64 // in that struct; none: there is none
	id           uint64 // a pthread_t
	native       uint64 // the kernel's thread id; none: not kept
	size         uint64
}

// frameLayout is of PyFrameObject up to 3.10, of _PyInterpreterFrame later.
type frameLayout struct {
	back, code uint64
	// instr is an index into the code up to 3.10, an address later.
	instr uint64
	line  uint64 // the line, where trace is set, or where it is not 0 itself; none: it is always computed
	trace uint64
	owner uint64 // none: all are Python's. From 3 on, a frame is the interpreter's own
	tlbc  uint64 // which copy of the code runs; none: there is one
	size  uint64
}

// codeLayout is of PyCodeObject.
type codeLayout struct {
	file, name, first, table uint64
	start                    uint64 // where the instructions begin, in the object itself; none: instr is not an address
	tlbc                     uint64 // a pointer to its copies for threads; none: there are none
	size                     uint64
}

// textLayout is of PyASCIIObject and PyCompactUnicodeObject, where the characters of a str that is ASCII, or is not,
// begin.
type textLayout struct{ length, state, ascii, other uint64 }

// bytesLayout is of PyBytesObject.
type bytesLayout struct{ count, data uint64 }

// lineFormat is the format of a code object's table of lines.
type lineFormat uint8

const (
	lnotab    lineFormat = iota // up to 3.9
	lineDelta                   // 3.10
	locations                   // since 3.11
)

// frameInterpreter is the smallest frameLayout.owner that is not a frame of Python code.
const frameInterpreter = 3

// The tables hold for all builds on 64-bit machines but those with Py_TRACE_REFS.
var (
	gil38   = gilLayout{holder: 8, locked: 16, enabled: none}
	text38  = textLayout{length: 16, state: 32, ascii: 48, other: 72}
	text312 = textLayout{length: 16, state: 32, ascii: 40, other: 56}
	bytes38 = bytesLayout{count: 16, data: 32}

	interp38 = interpLayout{next: 0, threads: 8, gil: none}
	thread38 = threadLayout{next: 8, interp: 16, frame: 24, cframe: none, id: 176, native: none, size: 184}
	code38   = codeLayout{first: 40, file: 104, name: 112, table: 120, start: none, tlbc: none, size: 128}
)

// table is the layout of a version that does not describe itself.
func table(minor int) (layout, error) {
	l := layout{interp: interp38, gil: gil38, thread: thread38, code: code38, text: text38, bytes: bytes38}
	switch minor {
	case 8, 9:
		l.runtime = runtimeLayout{interps: 32, main: 72, gil: 352}
		l.frame = frameLayout{back: 24, code: 32, trace: 80, instr: 104, line: 108, owner: none, tlbc: none, size: 112}
		l.lines = lnotab
		if minor == 8 {
			l.runtime.gil = 1152
		}
	case 10:
		l.runtime = runtimeLayout{interps: 32, main: 72, gil: 352}
		l.frame = frameLayout{back: 24, code: 32, trace: none, instr: 96, line: 100, owner: none, tlbc: none, size: 104}
		l.lines = lineDelta
	case 11:
		l.runtime = runtimeLayout{interps: 40, main: 80, gil: 360}
		l.interp.threads = 16
		l.thread = threadLayout{next: 8, interp: 16, frame: 56, cframe: 8, id: 152, native: 160, size: 168}
		l.frame = frameLayout{code: 32, back: 48, instr: 56, line: none, owner: none, tlbc: none, size: 72}
		l.code = codeLayout{first: 72, file: 112, name: 120, table: 136, start: 184, tlbc: none, size: 144}
		l.lines = locations
	case 12:
		l.runtime = runtimeLayout{interps: 40, main: 64, gil: none}
		l.interp = interpLayout{next: 0, threads: 72, gil: 384}
		l.thread = threadLayout{next: 8, interp: 16, frame: 56, cframe: 0, id: 136, native: 144, size: 152}
		l.frame = frameLayout{code: 0, back: 8, instr: 56, line: none, owner: 70, tlbc: none, size: 72}
		l.code = codeLayout{first: 68, file: 112, name: 120, table: 136, start: 192, tlbc: none, size: 144}
		l.text, l.lines = text312, locations
	default:
		return layout{}, fmt.Errorf("CPython 3.%d is not supported: 3.8 to 3.%d are", minor, newestMinor)
	}
	return l, nil
}
