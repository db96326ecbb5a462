package verdict

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// TestBlockIsTorchs compares Block with the text of torch's own exception.
func TestBlockIsTorchs(t *testing.T) {
	python := torchpython.Require(t, "THE FAILURE REPORT AGAINST TORCH'S IS")
	type failure struct {
		Rank      int    `json:"rank"`
		LocalRank int    `json:"local_rank"`
		PID       int    `json:"pid"`
		ExitCode  int    `json:"exit_code"`
		Time      int64  `json:"time"`
		File      string `json:"file"`
		ErrorFile string `json:"error_file"`
	}
	type input struct {
		Entrypoint string    `json:"entrypoint"`
		Failures   []failure `json:"failures"`
	}
	const path = "/var/log/job/b2c8_x1/attempt_0/0/error.json"
	recorded := `{"message": {"message": "ValueError: b", "extraInfo": {"py_callstack": ` +
		`"Traceback (most recent call last):\n` +
		`  File \"train.py\", line 3, in <module>\nValueError: b\n", "timestamp": "1700000001"}}}`
	plain := `{"message": "two\nlines and ünïcode", "timestamp": 1700000005}`
	cases := map[string]input{
		"exception first, then signals": {"train.py", []failure{
			{8, 0, 31, 1, 0, recorded, path}, {9, 1, 32, -11, 1700000002, "", ""}, {10, 2, 33, -34, 1700000002, "", ""}}},
		"same second: the first given": {"train.py", []failure{
			{3, 3, 31, -9, 1700000001, "", ""}, {0, 0, 32, 1, 0, recorded, path}}},
		"plain message": {"train.py", []failure{{0, 0, 31, 7, 0, plain, path}}},
		"no error file": {"train.py", []failure{{0, 0, 31, 3, 1700000000, "", ""}}},
		"narrow":        {"x", []failure{{0, 0, 1, -9, 1700000000, "", ""}}},
		"wide title":    {"a-script-with-a-name-longer-than-its-failures.py", []failure{{0, 0, 1, -9, 1700000000, "", ""}}},
	}
	stdin, err := json.Marshal(cases)
	require.NoError(t, err)
	cmd := exec.Command(python, filepath.Join("testdata", "block.py"))
	cmd.Env = append(os.Environ(), "TZ=UTC", "TMPDIR="+t.TempDir())
	cmd.Stdin = bytes.NewReader(stdin)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdout, err := cmd.Output()
	require.NoError(t, err, stderr.String())
	var blocks map[string]string
	require.NoError(t, json.Unmarshal(stdout, &blocks))

	for name, in := range cases {
		t.Run(name, func(t *testing.T) {
			var failures []Failure
			for _, f := range in.Failures {
				ours := Failure{Host: "host-a.example.com", Rank: f.Rank, LocalRank: f.LocalRank, PID: f.PID,
					ExitCode: f.ExitCode, ErrorFile: f.ErrorFile, At: time.Unix(f.Time, 0).UTC()}
				if f.File != "" {
					r, err := ParseErrorFile([]byte(f.File))
					require.NoError(t, err)
					ours.Message, ours.Traceback, ours.ErrorTime = r.Message, r.Traceback, r.Time.UTC()
				}
				failures = append(failures, ours)
			}
			want, got := blocks[name], Block(in.Entrypoint, failures, -1)
			if !regexp.MustCompile(`\(pid: \d+\) `).MatchString(want) {
				want, got = beforeSignalNames(want), beforeSignalNames(got)
			}
			require.Equal(t, want, got)
		})
	}
}

// beforeSignalNames is a block as torch before 2.11 printed it, without the width that follows from the longest line.
func beforeSignalNames(block string) string {
	block = regexp.MustCompile(`(\(pid: \d+\)) .*`).ReplaceAllString(block, "$1")
	return regexp.MustCompile(`(?m)^[=-]+$`).ReplaceAllString(block, "--")
}

// TestJudgeOfARealJob lets rank 1 of a gloo job fail and collects what the peers then say.
func TestJudgeOfARealJob(t *testing.T) {
	python := torchpython.Require(t, "THE FAILURE REPORT AGAINST TORCH'S IS")
	for how, want := range map[string]string{
		"raise": "rank 1 (node 1 host-b, local rank 0, pid 1001) failed first: ValueError: bad batch (exit code 1); " +
			"2 ranks followed: 2 with exit code 1; restarts used 0 of 0",
		"kill": "rank 1 (node 1 host-b, local rank 0, pid 1001) failed first: SIGKILL, not sent by the launcher; " +
			"2 ranks followed: 2 with exit code 1; restarts used 0 of 0",
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			failures := runRanks(t, python, how)
			v := Judge(Evidence{Failures: failures, WorldSize: 3})
			require.Equal(t, want, withoutClass(v.Line()))

			// Whatever is seen first, the cause is the same.
			for i := range failures {
				failures[i].At = failures[1].At.Add(time.Duration(i-1) * -time.Second)
				failures[i].ErrorTime = time.Time{}
			}
			require.Equal(t, 1, Judge(Evidence{Failures: failures}).Root.Rank)

			// The same without @record: only the output tells.
			for i := range failures {
				failures[i].Message, failures[i].Traceback = "", ""
			}
			require.Equal(t, 1, Judge(Evidence{Failures: failures}).Root.Rank)
		})
	}
}

func runRanks(t *testing.T, python, how string) []Failure {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	dir := t.TempDir()
	cmd := exec.CommandContext(ctx, python, filepath.Join("testdata", "gloo.py"), dir, how)
	cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	output, err := cmd.Output()
	require.NoError(t, err)
	var ends []struct {
		Rank, Code int
		At         int64 // nanoseconds since 1970
	}
	require.NoError(t, json.Unmarshal(output, &ends))
	failures := make([]Failure, len(ends))
	for _, end := range ends {
		name := filepath.Join(dir, strconv.Itoa(end.Rank))
		output, err := os.ReadFile(name + ".log")
		require.NoError(t, err)
		f := Failure{Node: end.Rank, Host: "host-" + string(rune('a'+end.Rank)), Rank: end.Rank,
			PID: 1000 + end.Rank, ExitCode: end.Code, At: time.Unix(0, end.At), LastLines: string(output)}
		if data, err := os.ReadFile(name + ".json"); err == nil {
			r, err := ParseErrorFile(data)
			require.NoError(t, err, "rank %d", end.Rank)
			f.ErrorFile, f.Message, f.Traceback, f.ErrorTime = name+".json", r.Message, r.Traceback, r.Time
		}
		failures[end.Rank] = f
	}
	return failures
}
