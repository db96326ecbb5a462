// Package page reads the pages of the shim, in which workers report their progress.
package page

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
)

// Size is the length of a page in bytes.
const Size = 4096

// Wanted is where in a page others ask for a timeline.
const Wanted = 104

// A page is the report of the shim in a worker: the file l<LOCAL_RANK>.page of the epoch's directory, mapped by the
// worker. It consists of 512 words of 8 bytes, little endian. Each is written by one aligned store, so a reader gets
// every word whole, but not all words of the same moment. Times are nanoseconds of CLOCK_MONOTONIC unless noted
// otherwise.
//
//	offset  words
//	     0      1  magic, "DLRHANG1"; the file gets its name when all that does not change is there
//	     8      1  pid
//	    16      1  start of the process in clock ticks since the boot
//	    24      1  rank
//	    32      1  world size
//	    40      1  local rank
//	    48      1  when the page was made
//	    56      1  heartbeat: when the shim's thread last ran; it has ended in PhaseEnd
//	    64      1  steps: how many times an optimizer has stepped
//	    72      1  when it last did, 0: never
//	    80      1  phase: its number in the lowest 8 bits, above them when it began, in microseconds
//	    88      1  spans: how many phases have ended
//	    96      1  the kernel's id of the thread that has made the last step, or the process group before; 0: unknown
//	   104      1  wanted: a timeline, by the word of its request, with the highest bit once it has begun. The client
//	              sets it, and the worker sets it to 0 when it is done
//	   112      1  for how long checkpoints have kept that thread from training since the first step
//	   120      1  how many of the first groups have sums of looks, 0: the shim is an older one, with 80 spans
//	   128    144  48 groups: id (0: an empty slot), sequence number, when that was seen to change
//	  1280    192  192 step times: step n, counted from 0, is at n mod 192
//	  2816    128  64 spans: phase and begin as above, end; span n is at n mod 64
//	  3840     32  16 sums of looks, each two words: steps (high half) and their positions, plus 1 each, in units of
//	              2^-16; squares of the positions (high half), and shares of full looks (16 bits, in units of 2^-6). See
//	              hang.Looks. All of them wrap around
//
// A writer fills in a slot before the counter includes it. A slot of a group is emptied for half a second before
// another one gets it.
const (
	pageMagic = "DLRHANG1"

	offPID       = 8
	offStart     = 16
	offRank      = 24
	offWorldSize = 32
	offLocal     = 40
	offCreated   = 48
	offHeartbeat = 56
	offSteps     = 64
	offLastStep  = 72
	offPhase     = 80
	offSpans     = 88
	offThread    = 96
	offBlocked   = 112
	offLooked    = 120
	offGroups    = 128
	offStepTimes = offGroups + groupSlots*24
	offSpanRing  = offStepTimes + stepSlots*8
	offSums      = offSpanRing + spanSlots*16

	groupSlots = 48
	stepSlots  = 192
	spanSlots  = 64
	sumSlots   = 16
	oldSpans   = 80
)

// Read returns the contents of a page, read from its file in one piece. It may be written meanwhile: values that
// then do not fit together, such as a time in the rings that an even newer one has replaced, are left out. A page
// that no shim has written is an error.
func Read(b []byte) (hang.Page, error) {
	if len(b) != Size {
		return hang.Page{}, fmt.Errorf("a page has %d bytes, not %d", Size, len(b))
	}
	if string(b[:len(pageMagic)]) != pageMagic {
		return hang.Page{}, fmt.Errorf("a page begins with %q, not with %q", pageMagic, b[:len(pageMagic)])
	}
	r := pageReader{b: b}
	p := hang.Page{
		PID:       r.number(offPID, math.MaxInt32, "pid"),
		Start:     r.word(offStart),
		WorldSize: r.number(offWorldSize, rankset.Max, "world size"),
		Local:     r.number(offLocal, rankset.Max, "local rank"),
		Created:   r.time(offCreated, "creation"),
		Heartbeat: r.time(offHeartbeat, "heartbeat"),
		Steps:     r.word(offSteps),
		LastStep:  r.time(offLastStep, "last step"),
		Thread:    r.number(offThread, math.MaxInt32, "thread"),
		Blocked:   r.time(offBlocked, "checkpoints"),
	}
	p.Rank = r.number(offRank, max(p.WorldSize, 1)-1, "rank")
	p.Phase, p.PhaseSince = r.phase(offPhase)
	p.Groups, p.StepTimes, p.Spans = r.groups(), r.stepTimes(), r.spans()
	if p.PID == 0 || p.WorldSize == 0 {
		r.err = errors.Join(r.err, errors.New("a page names a pid and a world size"))
	}
	if r.err != nil {
		return hang.Page{}, r.err
	}
	return p, nil
}

// pageReader reads words of a page. err is the first that is out of range.
type pageReader struct {
	b   []byte
	err error
}

func (r *pageReader) word(off int) uint64 { return binary.LittleEndian.Uint64(r.b[off:]) }

// number returns a word that is at most top.
func (r *pageReader) number(off, top int, what string) int {
	w := r.word(off)
	if w > uint64(top) {
		if r.err == nil {
			r.err = fmt.Errorf("%s %d of a page: at most %d is possible", what, w, top)
		}
		return 0
	}
	return int(w)
}

func (r *pageReader) time(off int, what string) time.Duration {
	return time.Duration(r.number(off, math.MaxInt64, what))
}

// phase returns a phase and its begin. Phases of a later version are unknown ones.
func (r *pageReader) phase(off int) (hang.Phase, time.Duration) {
	w := r.word(off)
	phase, since := hang.Phase(w), min(w>>8, math.MaxInt64/uint64(time.Microsecond))
	if phase > hang.PhaseDebug {
		phase = hang.PhaseUnknown
	}
	return phase, time.Duration(since) * time.Microsecond
}

// groups leaves out empty slots.
func (r *pageReader) groups() []hang.GroupState {
	var out []hang.GroupState
	looked := min(r.word(offLooked), sumSlots)
	for i := range groupSlots {
		off := offGroups + 24*i
		if id := r.word(off); id != 0 {
			g := hang.GroupState{ID: id, Seq: r.word(off + 8), Since: r.time(off+16, "time of a group")}
			if uint64(i) < looked {
				g.Looks = r.looks(i)
			}
			out = append(out, g)
		}
	}
	return out
}

// looks are the sums of the group in a slot.
func (r *pageReader) looks(slot int) hang.Looks {
	a, b := r.word(offSums+16*slot), r.word(offSums+16*slot+8)
	return hang.Looks{Steps: a >> 32, Positions: a & math.MaxUint32, Squares: b >> 32, Full: b & math.MaxUint16}
}

// newest yields the numbers of the entries in a ring of so many slots, with n entries in all, the newest first. The
// slot of the next entry may be in the making.
func newest(n uint64, slots int) func(yield func(uint64) bool) {
	return func(yield func(uint64) bool) {
		for k := range min(n, uint64(slots)-1) {
			if !yield(n - 1 - k) {
				return
			}
		}
	}
}

// stepTimes returns the newest times, the oldest first, as far back as they grow.
func (r *pageReader) stepTimes() []time.Duration {
	var out []time.Duration
	for n := range newest(r.word(offSteps), stepSlots) {
		w := r.word(offStepTimes + 8*int(n%stepSlots))
		if w == 0 || w > math.MaxInt64 || len(out) > 0 && time.Duration(w) > out[len(out)-1] {
			break // replaced while we read
		}
		out = append(out, time.Duration(w))
	}
	slices.Reverse(out)
	return out
}

// spans returns the newest spans in the order of their ends, as far back as that grows.
func (r *pageReader) spans() []hang.Span {
	var out []hang.Span
	slots := spanSlots
	if r.word(offLooked) == 0 {
		slots = oldSpans
	}
	for n := range newest(r.word(offSpans), slots) {
		off := offSpanRing + 16*int(n%uint64(slots))
		phase, from := r.phase(off)
		to := time.Duration(min(r.word(off+8), math.MaxInt64))
		if to < from || to == 0 || len(out) > 0 && to > out[len(out)-1].To {
			break // replaced while we read
		}
		out = append(out, hang.Span{Phase: phase, From: from, To: to})
	}
	slices.Reverse(out)
	return out
}
