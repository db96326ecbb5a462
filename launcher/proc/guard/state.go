package guard

import (
	"errors"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"
)

// stateSize is the size of the shared state and the offset of the arguments: a page, which is written at one go even if
// the writer is killed.
const stateSize = 4096

// The text before the arguments: it marks the memfd as ours. The second means that GOMAXPROCS in the environment is not
// the user's.
const (
	magic  = "arguments of a guarded launcher"
	frugal = "arguments of a guarded launcher, who needs few threads"
)

// newState makes the memfd, with an empty state, the job token and the arguments. Programs that are executed inherit
// it.
func newState(args []string, token string, thrifty bool) (int, error) {
	name := append([]byte(processName), 0)
	r, _, errno := syscall.RawSyscall(sysMemfdCreate(), uintptr(unsafe.Pointer(&name[0])), 0, 0)
	if errno != 0 {
		return -1, os.NewSyscallError("memfd_create", errno)
	}
	fd := int(r)
	text := []byte(magic)
	if thrifty {
		text = []byte(frugal)
	}
	text = append(append(text, 0), token...)
	for _, a := range args {
		text = append(append(text, 0), a...)
	}
	for at := int64(stateSize); len(text) > 0; {
		n, err := syscall.Pwrite(fd, text, at)
		if err != nil {
			syscall.Close(fd)
			return -1, os.NewSyscallError("pwrite", err)
		}
		at, text = at+int64(n), text[n:]
	}
	return fd, nil
}

// sysMemfdCreate is the number of the system call, which package syscall lacks.
func sysMemfdCreate() uintptr {
	switch runtime.GOARCH {
	case "amd64":
		return 319
	case "ppc64", "ppc64le":
		return 360
	case "s390x":
		return 350
	default: // arm64 and all younger ones
		return 279
	}
}

var errForeign = errors.New("not from a guard")

// readArguments also puts the token, if there is one, where the launcher looks for it.
func readArguments(fd int) ([]string, error) {
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFREG || st.Size <= stateSize {
		return nil, errForeign
	}
	b := make([]byte, st.Size-stateSize)
	for n := 0; n < len(b); {
		m, err := syscall.Pread(fd, b[n:], stateSize+int64(n))
		if err != nil || m == 0 {
			return nil, errForeign
		}
		n += m
	}
	words := split(b)
	switch words[0] {
	case magic:
	case frugal:
		_ = os.Unsetenv(maxProcs)
	default:
		return nil, errForeign
	}
	if len(words) < 2 {
		return nil, errForeign
	}
	if words[1] != "" {
		_ = os.Setenv(TokenVariable, words[1])
		concealed = true
	}
	return words[2:], nil
}

// split splits at NULs.
func split(b []byte) (words []string) {
	from := 0
	for i, c := range b {
		if c == 0 {
			words, from = append(words, string(b[from:i])), i+1
		}
	}
	return append(words, string(b[from:]))
}

// numbers returns the decimal numbers in a text.
func numbers(text []byte) (ns []int) {
	for from, i := 0, 0; i <= len(text); i++ {
		if i < len(text) && text[i] >= '0' && text[i] <= '9' {
			continue
		}
		if n, err := strconv.Atoi(string(text[from:i])); err == nil {
			ns = append(ns, n)
		}
		from = i + 1
	}
	return ns
}

func readState(fd int) (cgroup string, survivors map[int]bool) {
	b := make([]byte, stateSize)
	n, _ := syscall.Pread(fd, b, 0)
	words := append(split(b[:max(n, 0)]), "")
	survivors = map[int]bool{}
	for _, pid := range numbers([]byte(words[1])) {
		survivors[pid] = true
	}
	return words[0], survivors
}

func writeState(fd int, cgroup string, survivors []int) {
	text := append([]byte(cgroup), 0)
	for _, pid := range survivors {
		text = append(strconv.AppendInt(text, int64(pid), 10), ' ')
	}
	if len(text) < stateSize {
		_, _ = syscall.Pwrite(fd, append(text, make([]byte, stateSize-len(text))...), 0) // into memory that is there
	}
}
