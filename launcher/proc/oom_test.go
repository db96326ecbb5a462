package proc

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/launcher/proc/family"
)

// TestOOMKill lets the kernel kill a worker in a cgroup of 64 MiB.
func TestOOMKill(t *testing.T) {
	own, err := ownMemory("", "")
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	dir := filepath.Join(own.Path(), "proc-test-"+strconv.Itoa(os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("SKIPPED: needs a writable memory cgroup: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, family.RemoveCgroup(dir, patience)) })
	limit := filepath.Join(dir, "memory.limit_in_bytes")
	if own.v2 {
		limit = filepath.Join(dir, "memory.max")
	}
	if err := os.WriteFile(limit, []byte(fmt.Sprint(64<<20)), 0); err != nil {
		t.Skipf("SKIPPED: the memory controller is not delegated here: %v", err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"=oom", "OOM_CGROUP="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	var r oomResult
	require.NoError(t, json.Unmarshal(out, &r))
	require.Equal(t, -int(unix.SIGKILL), r.Code)
	require.Zero(t, r.Before.OOMKills)
	require.EqualValues(t, 1, r.After.OOMKills)
	require.EqualValues(t, 64<<20, r.After.Limit)
	require.InDelta(t, 64<<20, r.After.Peak, 8<<20)
}

type oomResult struct {
	Before, After MemoryState
	Code          int
}

// helperOOM is a launcher in a small cgroup with a worker that needs too much.
func helperOOM() int {
	procs := filepath.Join(os.Getenv("OOM_CGROUP"), "cgroup.procs")
	if err := os.WriteFile(procs, []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	var r oomResult
	m, err := ownMemory("", "")
	if err == nil {
		r.Before, err = m.Read()
	}
	s, err2 := New(Config{Logger: quiet()})
	if err != nil || err2 != nil {
		fmt.Fprintln(os.Stderr, err, err2)
		return 1
	}
	p, err := s.Start(Spec{Path: "/proc/self/exe", Env: append(os.Environ(), helperEnv+"=eat")})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	<-p.Done()
	r.Code = p.Exit().Code
	r.After, err = m.Read()
	if err := errors.Join(err, s.Close()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	json.NewEncoder(os.Stdout).Encode(r)
	return 0
}

// helperEat touches memory until it is killed, or 512 MiB.
func helperEat() {
	var all [][]byte
	for range 512 {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		all = append(all, b)
	}
	fmt.Fprintln(os.Stderr, "not killed with", len(all), "MiB")
	os.Exit(1)
}
