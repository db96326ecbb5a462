package run

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"dlrover-run/netcheck/probe/starved"
)

// Variables of a test that runs in a process of its own: its name, and where the programs are.
const (
	innerTest = "E2E_INNER"
	innerBin  = "E2E_BIN"
)

// unstarved runs a long test that measures rates in a process of its own. Where the hypervisor gives this machine's
// CPUs to others, everything is slow, and a failure says nothing: it is tried once more, and then skipped.
func unstarved(t *testing.T, test func(*testing.T)) {
	if os.Getenv(innerTest) == t.Name() {
		test(t)
		return
	}
	long(t)
	for range 2 {
		starved.Skip(t)
		before := starved.Stolen(t)
		out, err := apart(t, t.Name(), innerTest+"="+t.Name())
		if err == nil {
			return
		}
		if took := starved.Stolen(t) - before; took < time.Second {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	t.Skipf("SKIPPED: the hypervisor took this machine's CPUs away: %s IS NOT TESTED", t.Name())
}

// apart runs a test in a process of its own, with more variables. It skips this one if that one does.
func apart(t *testing.T, test string, env ...string) (out []byte, err error) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.v", "-test.run=^"+test+"$")
	cmd.Env = append(append(os.Environ(), innerBin+"="+binDir), env...)
	out, err = cmd.CombinedOutput()
	switch {
	case err == nil && strings.Contains(string(out), "--- SKIP: "+test):
		t.Skip(string(out))
	case err == nil && !strings.Contains(string(out), "--- PASS: "+test):
		t.Fatalf("there is no %s", test)
	}
	return out, err
}
