// Package pagetest makes pages as the shim does, for tests that have no Python.
package pagetest

import (
	"encoding/binary"

	"dlrover-run/hang"
	"dlrover-run/hang/page"
)

// Where things are, and how many: see page.Read.
const (
	groups, stepTimes, stepSlots, spans, spanSlots = 128, 1280, 192, 2816, 64
	looked, sums                                   = 120, 3840
)

// Bytes returns a page that page.Read reads as p. p must not have more entries than a page, or more step times
// than steps. Times of phases are whole microseconds.
func Bytes(p hang.Page) []byte {
	b := make([]byte, page.Size)
	copy(b, "DLRHANG1")
	put := func(off int, words ...uint64) {
		for i, w := range words {
			binary.LittleEndian.PutUint64(b[off+8*i:], w)
		}
	}
	put(8, uint64(p.PID), p.Start, uint64(p.Rank), uint64(p.WorldSize), uint64(p.Local), uint64(p.Created),
		uint64(p.Heartbeat), p.Steps, uint64(p.LastStep), uint64(p.PhaseSince/1000)<<8|uint64(p.Phase),
		uint64(len(p.Spans)), uint64(p.Thread), 0, uint64(p.Blocked))
	put(looked, 16)
	for i, g := range p.Groups {
		put(groups+24*i, g.ID, g.Seq, uint64(g.Since))
		if l := g.Looks; i < 16 {
			put(sums+16*i, l.Steps<<32|l.Positions, l.Squares<<32|l.Full)
		}
	}
	for i, at := range p.StepTimes {
		n := p.Steps - uint64(len(p.StepTimes)) + uint64(i)
		put(stepTimes+8*int(n%stepSlots), uint64(at))
	}
	for i, s := range p.Spans {
		put(spans+16*(i%spanSlots), uint64(s.From/1000)<<8|uint64(s.Phase), uint64(s.To))
	}
	return b
}
