package pystack

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
)

// heap is memory that a test lays out.
type heap struct{ b []byte }

const heapBase = 0x10000

func (h *heap) ReadAt(b []byte, addr uint64) error {
	if addr < heapBase || addr-heapBase > uint64(len(h.b)) || copy(b, h.b[addr-heapBase:]) < len(b) {
		return errors.New("not mapped")
	}
	return nil
}

// pad makes the heap end with a page, as memory does.
func (h *heap) pad() { h.alloc((pageSize - uint64(len(h.b))%pageSize) % pageSize) }

// alloc returns the address of n zero bytes.
func (h *heap) alloc(n uint64) uint64 {
	addr := heapBase + uint64(len(h.b))
	h.b = append(h.b, make([]byte, (n+15)/16*16)...)
	return addr
}

func (h *heap) put(addr, v uint64) { binary.LittleEndian.PutUint64(h.b[addr-heapBase:], v) }

func (h *heap) putHalf(addr uint64, v uint32) { binary.LittleEndian.PutUint32(h.b[addr-heapBase:], v) }

func (h *heap) text(l textLayout, s string, shift int) uint64 {
	addr := h.alloc(l.other + uint64(len(s)))
	h.put(addr+l.length, uint64(len(s)))
	h.putHalf(addr+l.state, (1|8|16)<<shift|1) // interned, one byte a character, compact, ASCII
	copy(h.b[addr-heapBase+l.ascii:], s)
	return addr
}

func (h *heap) bytes(l bytesLayout, b []byte) uint64 {
	addr := h.alloc(l.data + uint64(len(b)))
	h.put(addr+l.count, uint64(len(b)))
	copy(h.b[addr-heapBase+l.data:], b)
	return addr
}

// describeTo writes what an interpreter says of itself.
func (h *heap) describeTo(addr uint64, sections []section, version uint64, freeThreaded bool,
	fields map[string]uint64) {
	copy(h.b[addr-heapBase:], cookie)
	h.put(addr+8, version)
	if freeThreaded {
		h.put(addr+16, 1)
	}
	pos := addr + descriptionFields
	for _, s := range sections {
		for field := range strings.FieldsSeq(s.fields) {
			h.put(pos, fields[s.name+"."+field])
			pos += 8
		}
	}
}

// fields314 is a layout as an interpreter might describe it; head is the size of an object's head.
func fields314(head uint64) map[string]uint64 {
	return map[string]uint64{
		"runtime.interps": 2000, "interp.next": 96, "interp.threads": 104, "interp.gil": 112,
		"interp.own": 200, "interp.enabled": 0, "interp.holder": 216, "interp.locked": 224,
		"thread.size": 304, "thread.next": 8, "thread.interp": 16, "thread.frame": 72, "thread.id": 152, "thread.native": 160,
		"frame.size": 96, "frame.back": 8, "frame.instr": 56, "frame.owner": 74, "frame.tlbc": 76,
		"code.size": 224 + head, "code.first": 68, "code.file": 112, "code.name": 120, "code.table": 136,
		"code.tlbc": 200, "code.start": 208 + head,
		"text.length": head, "text.state": head + 16, "text.ascii": head + 24,
		"bytes.count": head, "bytes.data": head + 16,
	}
}

const version314 = 3<<24 | 14<<16 | 2<<8 | 0xf0

// interpreter314 lays out an interpreter of one thread: inner, called by outer from the interpreter's own frames.
func interpreter314(freeThreaded bool) (*heap, uint64) {
	h := &heap{}
	head, shift := uint64(16), 2
	if freeThreaded {
		head, shift = 32, 8
	}
	f := fields314(head)
	runtime := h.alloc(2048)
	h.describeTo(runtime, described314, version314, freeThreaded, f)
	interp, thread := h.alloc(512), h.alloc(f["thread.size"])
	h.put(runtime+f["runtime.interps"], interp)
	h.put(interp+f["interp.threads"], thread)
	h.put(interp+f["interp.gil"], interp+f["interp.own"])
	h.put(interp+f["interp.holder"], thread)
	h.putHalf(interp+f["interp.locked"], 1)
	h.put(thread+f["thread.interp"], interp)
	h.putHalf(thread+f["thread.native"], 42)

	text := textLayout{length: f["text.length"], state: f["text.state"], ascii: f["text.ascii"], other: f["text.ascii"] +
		16}
	// One code unit of the first line, and two that are five lines further.
	table := h.bytes(bytesLayout{count: head, data: head + 16}, []byte{0x80 | 13<<3, 0, 0x80 | 13<<3 | 1, 10})
	newCode := func(name string) uint64 {
		c := h.alloc(f["code.size"] + 64)
		h.putHalf(c+f["code.first"], 100)
		h.put(c+f["code.name"], h.text(text, name, shift))
		h.put(c+f["code.file"], h.text(text, "train.py", shift))
		h.put(c+f["code.table"], table)
		return c
	}
	newFrame := func(code, back, instr uint64, owner byte, copied uint32) uint64 {
		a := h.alloc(f["frame.size"])
		h.put(a, code|1) // a tagged reference
		h.put(a+f["frame.back"], back)
		h.put(a+f["frame.instr"], instr)
		h.b[a-heapBase+f["frame.owner"]] = owner
		h.putHalf(a+f["frame.tlbc"], copied)
		return a
	}
	outer, inner := newCode("outer"), newCode("inner")
	copies := h.alloc(32)
	h.put(copies, 2)
	other := h.alloc(64)
	h.put(copies+16, other)
	h.put(inner+f["code.tlbc"], copies)
	instr, copied := inner+f["code.start"]+2, uint32(0)
	if freeThreaded {
		instr, copied = other+2, 1
	}
	entry := newFrame(0, 0, 0, 4, 0)
	frame := newFrame(outer, entry, outer+f["code.start"], 0, 0)
	frame = newFrame(0xdead0, frame, 0, 3, 0)
	frame = newFrame(inner, frame, instr, 1, copied)
	h.put(thread+f["thread.frame"], frame)
	h.pad()
	return h, runtime
}

// CPython 3.14 as it describes itself, with and without GIL, although none may be installed.
func TestInterpreterThatDescribesItself(t *testing.T) {
	for _, freeThreaded := range []bool{false, true} {
		h, runtime := interpreter314(freeThreaded)
		p, name, err := identify(h, &image{runtime: runtime}, 0)
		require.NoError(t, err)
		require.Equal(t, "CPython 3.14.2"+map[bool]string{true: " free-threaded"}[freeThreaded], name)
		threads, err := p.threads()
		require.NoError(t, err)
		require.Len(t, threads, 1)
		require.Equal(t, !freeThreaded, threads[0].gil)
		require.Equal(t, 42, threads[0].native)
		r := stackReader{mem: h, layout: p.layout, codes: map[uint64]*code{}}
		frames, err := r.walk(threads[0].frame)
		require.NoError(t, err)
		require.Equal(t, []hang.Frame{
			{Func: "inner", File: "train.py", Line: 105}, {Func: "outer", File: "train.py", Line: 100},
		}, frames)
	}
}

func TestInterpreterOfUnknownVersion(t *testing.T) {
	for _, c := range []struct {
		version uint64
		want    string
	}{
		{3<<24 | 15<<16 | 0xf0, "CPython 3.15 is not supported: 3.8 to 3.14 are"},
		{3<<24 | 7<<16 | 0xf0, "CPython 3.7 is not supported: 3.8 to 3.14 are"},
		{4<<24 | 0xf0, "CPython 4.0.0 is not supported: 3.8 to 3.14 are"},
	} {
		h, runtime := interpreter314(false)
		h.put(runtime+8, c.version)
		_, _, err := identify(h, &image{runtime: runtime}, 0)
		require.EqualError(t, err, c.want)
	}
	h, runtime := interpreter314(false)
	h.put(runtime+descriptionFields+16, 1<<40)
	_, _, err := identify(h, &image{runtime: runtime}, 0)
	require.EqualError(t, err, "its description of itself has runtime.interps = 1099511627776")
	_, _, err = identify(h, &image{runtime: runtime + 8}, 0)
	require.EqualError(t, err, "it is a CPython before 3.11, and does not say which")
}

func TestVersions(t *testing.T) {
	require.Equal(t, "3.13.0", versionOf(3<<24|13<<16|0xf0))
	require.Equal(t, "3.14.0rc2", versionOf(3<<24|14<<16|0xc2))
	require.Equal(t, "3.14.1a1", versionOf(3<<24|14<<16|1<<8|0xa1))
}

// A circle ends, and a deep stack keeps both of its ends.
func TestDeepStacks(t *testing.T) {
	h, runtime := interpreter314(false)
	p, _, err := identify(h, &image{runtime: runtime}, 0)
	require.NoError(t, err)
	threads, err := p.threads()
	require.NoError(t, err)
	h.put(threads[0].frame+8, threads[0].frame)
	r := stackReader{mem: h, layout: p.layout, codes: map[uint64]*code{}}
	frames, err := r.walk(threads[0].frame)
	require.ErrorIs(t, err, errCircle)
	require.Len(t, frames, keepInner+1+keepOuter)
	require.Equal(t, "... 3841 frames ...", frames[keepInner].Func)
	h.put(threads[0].addr+8, threads[0].addr)
	_, err = p.threads()
	require.EqualError(t, err, "more than 1024 threads")
}

// endless is memory full of the same bytes: every pointer leads somewhere.
type endless struct{ b []byte }

func (m endless) ReadAt(b []byte, addr uint64) error {
	if len(m.b) == 0 {
		return errors.New("not mapped")
	}
	if addr > maxAddr {
		return errAddr
	}
	for i := range b {
		b[i] = m.b[(addr+uint64(i))%uint64(len(m.b))]
	}
	return nil
}

// Whatever is in a process's memory, a walk ends, and is no larger than it may be.
func FuzzMemory(f *testing.F) {
	h, _ := interpreter314(false)
	f.Add(h.b, uint8(14))
	f.Add(bytes.Repeat([]byte{0x10, 0, 0, 0, 0, 0, 0, 0}, 64), uint8(11))
	f.Add([]byte("xdebugpy"), uint8(13))
	f.Fuzz(func(t *testing.T, b []byte, minor uint8) {
		mem := &bounded{memory: endless{b}, ctx: context.Background(), left: 1 << 20}
		l, err := table(int(minor))
		if err != nil {
			var head block
			if head, err = read(mem, 0, maxDescription); err == nil {
				l, err = layoutOf(head, int(minor))
			}
		}
		if err != nil {
			return
		}
		p := &interpreter{mem: mem, layout: &l}
		threads, _ := p.threads()
		require.LessOrEqual(t, len(threads), maxThreads)
		tasks := []task{{tid: 1, inner: 1}, {tid: 16, inner: 16}}
		identifyThreads(mem, threads, tasks, p.mainThread())
		r := stackReader{mem: mem, layout: &l, codes: map[uint64]*code{}}
		for _, th := range threads[:min(len(threads), 8)] {
			frames, _ := stackOf(p, &r, th)
			require.LessOrEqual(t, len(frames), keepInner+1+keepOuter)
		}
		u := unwinder{mem: mem, calls: map[uint64]bool{}}
		u.maps = []mapping{{start: 0, end: 1 << 20}}
		u.exec = u.maps
		require.LessOrEqual(t, len(u.search(0, 1)), maxNativeFrames)
		identify(mem, &image{runtime: 1, version: 2}, 0)
	})
}

// No table of lines leads a reader astray.
func FuzzLines(f *testing.F) {
	f.Add(uint8(0), []byte{2, 1, 4, 0xff}, 3, 4)
	f.Add(uint8(1), []byte{2, 1, 4, 0x80}, 3, 4)
	f.Add(uint8(2), []byte{0x80 | 14<<3, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f}, 3, 0)
	f.Fuzz(func(t *testing.T, format uint8, table []byte, first, addr int) {
		line := lineOf(lineFormat(format%3), slices.Clone(table), first, addr)
		require.True(t, line >= 0 || addr < 0 && line == first)
	})
}

// What the kernel and eu-stack say, and names in files, are read whatever they are.
func FuzzTexts(f *testing.F) {
	for _, s := range []string{
		"7f00-7f01 r-xp 00000000 08:01 42    /lib/libc.so.6", "42 (a) b) S 1 2", "0 0x1 0x2 0x3 0x4 0x5 0x6 0x7ffc 0x7f12",
		"TID 7:\n#0  0x01 f@@V - /lib/l.so\n", "_ZN4c10d7Reducer17finalize_backwardEv", "_ZZN3foo3barEvENKUlvE_clEv",
		"_ZNSt6vectorIiSaIiEE9push_backEOi", "_ZN1aIXadL_Z1fvEEE1bE", "_ZSt4sortIPiEvT_S1_",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		parseMapping(s)
		parseStat(s)
		parseSyscall(s)
		for _, frames := range parseTool(s) {
			require.LessOrEqual(t, len(frames), maxNativeFrames)
		}
		require.NotPanics(t, func() { demangle("_Z" + s) })
	})
}
