// Package testkit has helpers for the tests of several packages. Only tests and tools import it.
package testkit

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Long skips a test with -short. The reason completes a sentence: it takes ten seconds.
func Long(t testing.TB, reason string) {
	t.Helper()
	if testing.Short() {
		t.Skipf("SKIPPED: %s IS NOT RUN with -short: %s", t.Name(), reason)
	}
}

// Seed is that of a variable, or a new one. It is logged.
func Seed(t testing.TB, variable string) uint64 {
	t.Helper()
	seed, err := strconv.ParseUint(os.Getenv(variable), 10, 64)
	if err != nil {
		seed = rand.Uint64()
	}
	t.Logf("%s=%d", variable, seed)
	return seed
}

// SideBySide lets up to n parallel tests run at the same time, also on a machine of fewer CPUs. It is for packages
// whose tests wait more than they compute, and belongs into TestMain. The flag -parallel overrides it.
func SideBySide(n int) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		_ = f.Value.Set(strconv.Itoa(n)) // a number
	}
}

// Histories checks a property of random histories: the same hundred in each run of the tests. The environment has more,
// or others: RAPID_CHECKS is their number, RAPID_SEED where they begin.
func Histories(t *testing.T, holds func(t *rapid.T)) {
	t.Helper()
	if seed := flag.Lookup("rapid.seed"); seed.Value.String() == "0" {
		_ = seed.Value.Set("1")
	}
	_ = flag.Set("rapid.nofailfile", "true") // a history is printed in words
	rapid.Check(t, holds)
}

// WriteProgram writes a file that can be executed at once: a process that another test starts meanwhile does not
// inherit the open file, which would make it busy.
func WriteProgram(path, text string) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, []byte(text), 0o755)
}

// Deaf is an address of this machine that answers no SYN, as if the host were silent: its queue is full. The function
// ends that.
func Deaf() (addr string, end func(), err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	var queue []net.Conn
	end = func() {
		_ = syscall.Close(fd)
		for _, c := range queue {
			_ = c.Close()
		}
	}
	err = errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0))
	at, _ := syscall.Getsockname(fd)
	if own, ok := at.(*syscall.SockaddrInet4); ok {
		addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(own.Port))
	}
	for err == nil {
		var c net.Conn
		if c, err = net.DialTimeout("tcp", addr, time.Second); err == nil {
			queue = append(queue, c)
		}
	}
	if late, ok := errors.AsType[net.Error](err); !ok || !late.Timeout() {
		end()
		return "", nil, err
	}
	return addr, end, nil
}

// Gone reports whether a process has ended. A zombie has: an orphan's new parent may not have reaped it yet.
func Gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// Buffer is a bytes.Buffer that one goroutine may write, and another read at the same time.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write appends p.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// String returns everything that was written.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
