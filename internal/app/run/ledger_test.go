package run

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/ledger"
)

// The ledger of a real training has what the workers have measured of a failure: the steps that were lost, the time for
// which they stood still before, and for which the save blocked them.
func TestTorchTimeLedger(t *testing.T) {
	long(t)
	b := newTraining(t, 0)
	d, addr := b.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
	env := []string{"DLROVER_MASTER_ADDR=" + addr, "DLROVER_TOKEN=" + testToken}
	script, err := filepath.Abs("testdata/ledger.py")
	require.NoError(t, err)
	args := []string{"--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job", "--max-restarts=1", "--hang=auto",
		"--ckpt-shm-dir=" + b.shm, script, b.dir, b.ckpts}
	began := time.Now()
	l1, l2 := b.start("dlrover-run", env, args...), b.start("dlrover-run", env, args...)
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l2.wait(), l2.err.String())
	wall := time.Since(began)
	ctl := exec.Command(filepath.Join(binDir, "dlroverctl"), "cost", "job", "--json")
	ctl.Env = append(b.env, env...)
	out, err := ctl.Output()
	require.NoError(t, err)
	for _, l := range []*launched{l1, l2} {
		require.Regexp(t, `"msg":"trained [0-9.]+ % of [^"]+; lost: [^"]+"`, l.err.String())
	}
	var got ledger.Report
	require.NoError(t, json.Unmarshal(out, &got))
	t.Log(string(out), b.rows("marks"))

	at := map[string][]time.Duration{}
	for _, line := range b.rows("marks") {
		var what string
		var seconds float64
		_, err := fmt.Sscan(line, &what, &seconds)
		require.NoError(t, err)
		at[what] = append(at[what], time.Duration(seconds*float64(time.Second)))
	}
	broken := regexp.MustCompile(`"time":"([^"]+)","level":"INFO","msg":"break"`).FindStringSubmatch(d.err.String())
	require.NotNil(t, broken)
	broke, err := time.Parse(time.RFC3339Nano, broken[1])
	require.NoError(t, err)
	near := func(want, have time.Duration, what string) {
		t.Helper()
		require.InDelta(t, want.Seconds(), have.Seconds(), 0.4+want.Seconds()/20, what)
	}
	require.True(t, got.Stepping)
	require.InEpsilon(t, got.At.Sub(got.Since), got.Times.Sum(), 0.01)
	near(wall, got.Times.Sum(), "all of it")
	near(at["last"][0]-at["saved"][0], got.Times[ledger.Lost], "lost")
	near(broke.Sub(time.Unix(0, int64(at["last"][0]))), got.Times[ledger.Standing], "standing")
	near(at["saved"][0]-at["save"][0], got.Times[ledger.Saving], "saving")
	require.Len(t, got.Rows, 2)
	require.Equal(t, string(job.CauseFailure), got.Rows[1].Cause)
	near(at["step"][1]-at["saved"][0], got.Rows[1].Times.Sum(), "the bill of the failure")
}
