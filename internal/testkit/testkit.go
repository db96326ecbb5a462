// Package testkit has helpers for the tests of several packages. Only tests import it.
package testkit

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"pgregory.net/rapid"
)

// Long skips a test with -short. The reason completes a sentence: it takes ten seconds.
func Long(t testing.TB, reason string) {
	t.Helper()
	if testing.Short() {
		t.Skipf("SKIPPED: %s IS NOT RUN with -short: %s", t.Name(), reason)
	}
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
