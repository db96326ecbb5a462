package pystack

import (
	"errors"
	"fmt"

	"dlrover-run/hang"
)

// Of a deeper stack the innermost and the outermost frames are kept, and between them one with the count of the
// others.
const (
	maxFrames = 4096 // beyond, a stack is taken for a circle: errCircle
	keepInner = 192
	keepOuter = 63
)

// maxInstr is more bytes than the instructions of a function have.
const maxInstr = 1 << 26

var errCircle = errors.New("more than 4096 frames")

// stackReader walks the stacks of one process. Code objects are read once.
type stackReader struct {
	mem    memory
	layout *layout
	codes  map[uint64]*code
}

// walk returns the frames from the innermost one on. With an error it returns the frames before it.
func (r *stackReader) walk(frame uint64) ([]hang.Frame, error) {
	var frames []hang.Frame
	pages := &paged{memory: r.mem}
	for n := 0; frame != 0; n++ {
		if n == maxFrames {
			return shorten(frames), errCircle
		}
		b, err := read(pages, frame, r.layout.frame.size)
		if err != nil {
			return shorten(frames), err
		}
		if !r.internal(b) {
			f, err := r.frame(b)
			if err != nil {
				return shorten(frames), err
			}
			frames = append(frames, f)
		}
		frame = b.word(r.layout.frame.back)
	}
	return shorten(frames), nil
}

// internal reports whether a frame is the interpreter's own.
func (r *stackReader) internal(b block) bool {
	owner := r.layout.frame.owner
	return owner != none && b.byte(owner) >= frameInterpreter
}

func (r *stackReader) frame(b block) (hang.Frame, error) {
	const tags = 7 // low bits of a reference that are not part of the address, since 3.14
	c, err := r.code(b.word(r.layout.frame.code) &^ tags)
	if err != nil {
		return hang.Frame{}, err
	}
	line, err := r.line(b, c)
	return hang.Frame{Func: c.name, File: c.file, Line: line}, err
}

func (r *stackReader) code(addr uint64) (*code, error) {
	if c := r.codes[addr]; c != nil {
		return c, nil
	}
	c, err := readCode(r.mem, r.layout, addr)
	if err != nil {
		return nil, err
	}
	r.codes[addr] = c
	return c, nil
}

func (r *stackReader) line(b block, c *code) (int, error) {
	l := &r.layout.frame
	if l.line != none {
		if line := int(int32(b.half(l.line))); line > 0 && (l.trace == none || b.word(l.trace) != 0) {
			return line, nil
		}
	}
	addr, err := r.instr(b, c)
	return lineOf(r.layout.lines, c.table, c.first, addr), err
}

// instr is the byte offset of the instruction that a frame is at.
func (r *stackReader) instr(b block, c *code) (int, error) {
	l := &r.layout.frame
	if c.start == none {
		index := int(int32(b.half(l.instr)))
		if r.layout.lines == lineDelta {
			index *= 2 // it counts code units
		}
		return index, nil
	}
	start := c.start
	if l.tlbc != none {
		var err error
		if start, err = c.copyStart(r.mem, b.half(l.tlbc)); err != nil {
			return 0, err
		}
	}
	d := int64(b.word(l.instr) - start)
	if d < -2 || d > maxInstr {
		return 0, errors.New("a frame is outside of its code")
	}
	return int(d), nil
}

func shorten(frames []hang.Frame) []hang.Frame {
	if len(frames) <= keepInner+1+keepOuter {
		return frames
	}
	left := len(frames) - keepInner - keepOuter
	short := append(frames[:keepInner:keepInner], hang.Frame{Func: fmt.Sprintf("... %d frames ...", left)})
	return append(short, frames[len(frames)-keepOuter:]...)
}
