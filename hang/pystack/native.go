package pystack

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sort"
	"strconv"
	"strings"

	"dlrover-run/hang"
)

// Bounds of a search for native frames.
const (
	maxNativeThreads = 512
	maxNativeFrames  = 64
	maxStackSearch   = 32 << 10 // bytes from the stack pointer on
)

// native finds the native frames of threads that are blocked: the current instruction of each, and values on its
// stack that look like return addresses. A frame that has been left may still be there, so the further from the
// first, the less is certain.
func (s *survey) native() {
	u := unwinder{mem: s.mem, exec: executable(s.maps), maps: s.maps, calls: map[uint64]bool{}}
	stacks := map[int][]uint64{}
	for _, t := range s.tasks[:min(len(s.tasks), maxNativeThreads)] {
		if th := s.byTID[t.tid]; th != nil && len(th.Native) > 0 {
			continue
		}
		if sp, pc, ok := blockedAt(s.pid, t.tid); ok {
			stacks[t.tid] = u.search(sp, pc)
		}
	}
	names := s.nameAll(u.exec, stacks)
	for _, t := range s.tasks {
		if len(stacks[t.tid]) == 0 {
			continue
		}
		th := s.thread(t, true)
		th.Approximate = true
		for i, addr := range stacks[t.tid] {
			if i > 0 {
				addr-- // a call at the end of a function returns behind it
			}
			th.Native = append(th.Native, names[addr])
		}
		th.Native = fold(th.Native)
	}
}

// fold gives functions without a name the name of their file in brackets, as perf does. Of several in a row in the
// same file one is left: the others add nothing.
func fold(frames []hang.Frame) []hang.Frame {
	for i := range frames {
		if f := &frames[i]; f.Func == "" && f.File != "" {
			f.Func = "[" + filepath.Base(f.File) + "]"
		} else if f.Func == "" {
			f.Func = "[unknown]"
		}
	}
	return slices.CompactFunc(frames, func(a, b hang.Frame) bool { return a == b && a.Func[0] == '[' })
}

// blockedAt is where a thread is that sleeps in the kernel, or is stopped.
func blockedAt(pid, tid int) (sp, pc uint64, ok bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", pid, tid))
	if err != nil {
		return 0, 0, false
	}
	return parseSyscall(string(b))
}

// parseSyscall reads a syscall file: the number, six arguments, stack pointer and instruction; -1 and the last two
// outside of a system call; or running.
func parseSyscall(s string) (sp, pc uint64, ok bool) {
	f := strings.Fields(s)
	if len(f) < 3 {
		return 0, 0, false
	}
	sp, spErr := strconv.ParseUint(f[len(f)-2], 0, 64)
	pc, pcErr := strconv.ParseUint(f[len(f)-1], 0, 64)
	return sp, pc, spErr == nil && pcErr == nil && pc != 0
}

// executable are the mappings with code, by address.
func executable(maps []mapping) (exec []mapping) {
	for _, m := range maps {
		if m.exec && !strings.HasPrefix(m.path, "[vsyscall") {
			exec = append(exec, m)
		}
	}
	return exec
}

// mappingAt is the one that an address lies in; they are sorted.
func mappingAt(maps []mapping, addr uint64) (mapping, bool) {
	i := sort.Search(len(maps), func(i int) bool { return maps[i].end > addr })
	if i == len(maps) || maps[i].start > addr {
		return mapping{}, false
	}
	return maps[i], true
}

// unwinder searches stacks for return addresses.
type unwinder struct {
	mem   memory
	exec  []mapping
	maps  []mapping
	calls map[uint64]bool // which addresses follow a call
}

// search returns addresses of code, the innermost first.
func (u *unwinder) search(sp, pc uint64) []uint64 {
	found := []uint64{pc}
	stack, ok := mappingAt(u.maps, sp)
	if !ok {
		return found
	}
	b, err := read(u.mem, sp, min(stack.end-sp, maxStackSearch))
	if err != nil {
		return found
	}
	for off := uint64(0); off+8 <= uint64(len(b)) && len(found) < maxNativeFrames; off += 8 {
		if addr := b.word(off); u.returns(addr) {
			found = append(found, addr)
		}
	}
	return found
}

// returns reports whether a call could return to addr.
func (u *unwinder) returns(addr uint64) bool {
	m, ok := mappingAt(u.exec, addr)
	if !ok || addr-m.start < 8 {
		return false
	}
	follows, known := u.calls[addr]
	if !known {
		b, err := read(u.mem, addr-8, 8)
		follows = err == nil && endsInCall(runtime.GOARCH, b)
		u.calls[addr] = follows
	}
	return follows
}

// endsInCall reports whether the last of the 8 bytes may be the end of a call.
func endsInCall(arch string, b []byte) bool {
	if arch == "arm64" {
		w := binary.LittleEndian.Uint32(b[4:])
		return w&0xfc000000 == 0x94000000 || w&0xfefff800 == 0xd63f0000 // BL, BLR
	}
	if arch != "amd64" {
		return false
	}
	if b[3] == 0xe8 { // with a distance of 4 bytes
		return true
	}
	// FF /2, by the length of the rest: a register or an address in one, with SIB, with 1 or 4 bytes of distance.
	for _, n := range []int{2, 3, 4, 6, 7} {
		if op := b[8-n:]; op[0] == 0xff && op[1]>>3&7 == 2 && indirectLength(op[1]) == n {
			return true
		}
	}
	return false
}

// indirectLength is how long an FF instruction with that ModRM byte is.
func indirectLength(modrm byte) int {
	mode, reg := modrm>>6, modrm&7
	n := 2
	if mode != 3 && reg == 4 {
		n++ // SIB
	}
	switch {
	case mode == 1:
		n++
	case mode == 2, mode == 0 && reg == 5:
		n += 4
	}
	return n
}

// nameAll names the functions of all stacks, with one look at each file.
func (s *survey) nameAll(exec []mapping, stacks map[int][]uint64) map[uint64]hang.Frame {
	wanted := map[uint64]bool{}
	for _, stack := range stacks {
		for i, addr := range stack {
			wanted[addr-uint64(min(i, 1))] = true
		}
	}
	names := map[uint64]hang.Frame{}
	byPath := map[string][]uint64{}
	for addr := range wanted {
		m, ok := mappingAt(exec, addr)
		names[addr] = hang.Frame{File: m.path}
		if ok && strings.HasPrefix(m.path, "/") {
			byPath[m.path] = append(byPath[m.path], addr)
		}
	}
	for path, addrs := range byPath {
		for addr, name := range s.reader.functions(s.tid, exec, addrs) {
			names[addr] = hang.Frame{Func: name, File: strings.TrimSuffix(path, " (deleted)")}
		}
	}
	return names
}
