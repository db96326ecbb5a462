// Package starved detects, for tests that measure rates, that a hypervisor gives the CPUs of this machine to others.
// Everything is slow then, and a failure proves nothing. Only tests import it.
package starved

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Stolen is for how long CPUs of this machine have been given to others since it was booted.
func Stolen(t testing.TB) time.Duration {
	t.Helper()
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line) // cpu user nice system idle iowait irq softirq steal, in hundredths of a second
	if len(fields) < 9 {
		t.Fatalf("/proc/stat begins with %q", line)
	}
	ticks, err := strconv.Atoi(fields[8])
	if err != nil {
		t.Fatalf("/proc/stat: %v", err)
	}
	return time.Duration(ticks) * time.Second / 100
}

// Skip skips t if others have got more than 0.1 s of CPU within half a second.
func Skip(t testing.TB) {
	t.Helper()
	const sample, most = 500 * time.Millisecond, 100 * time.Millisecond
	before := Stolen(t)
	time.Sleep(sample) // of which the counters tell
	if took := Stolen(t) - before; took > most {
		t.Skipf("SKIPPED: the hypervisor took %s of CPU within %s: %s IS NOT TESTED", took, sample, t.Name())
	}
}
