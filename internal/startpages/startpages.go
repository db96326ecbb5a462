// Package startpages releases memory that this process needed for its start only (Linux).
package startpages

import (
	"bytes"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Release takes the pages of the program file out of the memory of this process. They stay in the page cache, where
// the kernel may reclaim them like any unused file's, and are read again one by one when they are needed. A launcher
// does not need most pages of its startup again. Memory that the process has written is left alone. It is no error
// that pages are locked, or that /proc is not there: then they stay.
func Release() {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return
	}
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	for line := range bytes.Lines(maps) {
		if start, size := readOnly(string(line), exe); size > 0 {
			release(start, size)
		}
	}
}

// readOnly reads a line of /proc/PID/maps (https://man7.org/linux/man-pages/man5/proc_pid_maps.5.html). It returns a
// size of 0 unless the line is of a mapping of exe that is never written: "00400000-00adc000 r-xp 00000000 08:01
// 1234 /usr/local/bin/dlrover-run".
func readOnly(line, exe string) (start, size uintptr) {
	fields := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 6)
	if len(fields) < 6 || strings.Contains(fields[1], "w") || strings.TrimLeft(fields[5], " ") != exe {
		return 0, 0
	}
	from, to, _ := strings.Cut(fields[0], "-")
	begin, err := strconv.ParseUint(from, 16, 64)
	if err != nil {
		return 0, 0
	}
	end, err := strconv.ParseUint(to, 16, 64)
	if err != nil || end < begin {
		return 0, 0
	}
	return uintptr(begin), uintptr(end - begin)
}

// release is madvise(2) of addresses that are no Go memory.
func release(start, size uintptr) {
	_, _, _ = unix.Syscall(unix.SYS_MADVISE, start, size, unix.MADV_DONTNEED)
}
