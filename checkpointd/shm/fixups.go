package shm

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"sort"
)

// fix asks for the CRC-32 of a payload to be stored twice. Offsets are from the start of the file that all of it lies
// in.
type fix struct {
	off, len int64
	dst      [2]int64 // < 0: none
}

func (f fix) end() int64 { return f.off + f.len }

func byOffset(a, b File) int { return cmp.Or(cmp.Compare(a.Off, b.Off), cmp.Compare(a.Len, b.Len)) }

// parseFixes reads the fix-up table and returns its rows by file. Payloads ascend and do not overlap; a target lies in
// the file of its payload, outside of all payloads and other targets. Rows without a target are left out.
func parseFixes(b []byte, files []File, imageLen int64) ([][]fix, error) {
	if len(b)%fixSize != 0 {
		return nil, fmt.Errorf("%w: fix-up table of %d bytes", ErrDamaged, len(b))
	}
	for _, f := range files {
		if f.Off+f.Len > imageLen {
			return nil, fmt.Errorf("%w: file %q ends behind the image", ErrDamaged, f.Path)
		}
	}
	order := fileOrder(files)
	rows := make([][]fix, len(files))
	payloads := make([]fix, 0, len(b)/fixSize)
	targets := make([]int64, 0, len(b)/fixSize*2)
	for i := 0; i < len(b); i += fixSize {
		var v [4]int64
		for k := range v {
			v[k] = int64(binary.LittleEndian.Uint64(b[i+8*k:]))
			if v[k] < 0 || v[k] > imageLen {
				return nil, fmt.Errorf("%w: fix-up %d leaves the image", ErrDamaged, i/fixSize)
			}
		}
		f := fix{off: v[0], len: v[1], dst: [2]int64{v[2], v[3]}}
		if n := len(payloads); f.end() > imageLen || n > 0 && payloads[n-1].end() > f.off {
			return nil, fmt.Errorf("%w: payload of fix-up %d overlaps or leaves the image", ErrDamaged, i/fixSize)
		}
		payloads = append(payloads, f)
		at, ok := fileOf(&f, files, order)
		if !ok {
			return nil, fmt.Errorf("%w: fix-up %d does not lie in one file", ErrDamaged, i/fixSize)
		}
		if at < 0 {
			continue
		}
		rows[at] = append(rows[at], f)
		for _, d := range f.dst {
			if d >= 0 {
				targets = append(targets, d+files[at].Off)
			}
		}
	}
	return rows, checkTargets(targets, payloads)
}

// fileOrder is the indices of the files that are not empty, by offset.
func fileOrder(files []File) []int {
	var order []int
	for i, f := range files {
		if f.Len > 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return byOffset(files[a], files[b]) })
	return order
}

// fileOf finds the file of a fix-up by its targets and makes the offsets relative to it; -1: it has no target.
func fileOf(f *fix, files []File, order []int) (at int, ok bool) {
	at = -1
	for k, d := range f.dst {
		if d == 0 {
			f.dst[k] = -1
			continue
		}
		if at < 0 {
			i := sort.Search(len(order), func(i int) bool { return files[order[i]].Off > d }) - 1
			if i < 0 {
				return -1, false
			}
			at = order[i]
		}
		if f.dst[k] = d - files[at].Off; f.dst[k] < 0 || f.dst[k]+4 > files[at].Len {
			return -1, false
		}
	}
	if at >= 0 {
		if f.off -= files[at].Off; f.off < 0 || f.end() > files[at].Len {
			return -1, false
		}
	}
	return at, true
}

// checkTargets checks that no target shares a byte with another one or with a payload. The payloads are in order.
func checkTargets(targets []int64, payloads []fix) error {
	slices.Sort(targets)
	k := 0
	for i, d := range targets {
		if i > 0 && targets[i-1]+4 > d {
			return fmt.Errorf("%w: two fix-ups change the bytes at %d", ErrDamaged, d)
		}
		for k < len(payloads) && (payloads[k].end() <= d || payloads[k].len == 0) {
			k++
		}
		if k < len(payloads) && payloads[k].off < d+4 {
			return fmt.Errorf("%w: a fix-up changes the payload at %d", ErrDamaged, payloads[k].off)
		}
	}
	return nil
}
