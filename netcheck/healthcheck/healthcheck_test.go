package healthcheck

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(cmd *exec.Cmd) (func() error, error) { return cmd.Wait, cmd.Start() }

func TestCommand(t *testing.T) {
	for command, want := range map[string]Answer{
		"true":                         {},
		"echo all is well":             {},
		"echo '{}'":                    {},
		`echo '{"verdict": "OK"}'`:     {},
		`echo '{"verdict": true}'`:     {},
		`echo '{"failed_checks": []}'`: {},
		`echo '{"verdict":"ok","message":"18 links"}'`: {Healthy, "18 links"},
		"exit 3":                             {Unhealthy, "exit status 3"},
		"echo begins; echo bad disk; exit 3": {Unhealthy, "exit status 3: bad disk"},
		"echo first >&2; echo no GPU 3 >&2; exit 1": {Unhealthy, "exit status 1: no GPU 3"},
		"kill -9 $$":                   {Unhealthy, "signal: killed"},
		`echo '{"verdict": "faulty"}'`: {Unhealthy, "its verdict is faulty"},
		`echo '{"verdict": false}'`:    {Unhealthy, "its verdict is false"},
		`echo '{"verdict":"ok","failed_checks":["nvlink","ecc"],"message":"GPU 3"}'`: {
			Unhealthy, "nvlink, ecc; GPU 3",
		},
		`echo '{"failed_checks":["ecc"]}'; exit 1`:     {Unhealthy, "exit status 1: ecc"},
		`echo '{"verdict": "ok"}'; exit 1`:             {Unhealthy, "exit status 1"},
		`echo '{"verdict": "warn", "message": "hot"}'`: {Unclear, "it warns: hot"},
		`echo '{"verdict": "maybe"}'`:                  {Unclear, `its verdict "maybe" is neither ok nor failed`},
		`echo '{"verdict": '`:                          {Unclear, "its answer cannot be read: unexpected end of JSON input"},
		"exit 126":                                     {Unclear, "could not be run: exit status 126"},
	} {
		require.Equal(t, want, Run(t.Context(), start, command, time.Minute), command)
	}
	a := Run(t.Context(), start, "/no/such/file", time.Minute)
	require.Equal(t, Unclear, a.Outcome)
	require.Contains(t, a.Reason, "/no/such/file")
}

func TestCommandThatDoesNotEnd(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	begun := time.Now()
	a := Run(t.Context(), start, "trap '' TERM; sleep 1000 & echo $! > "+pid+"; wait", 300*time.Millisecond)
	require.Equal(t, Answer{Unhealthy, "no answer within 300ms"}, a)
	require.Less(t, time.Since(begun), 30*time.Second)
	requireGone(t, pid)
}

// A check that leaves a process behind with its pipes is not waited for.
func TestCommandThatLeavesAProcess(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	require.Equal(t, Answer{}, Run(t.Context(), start, "sleep 1000 & echo $! > "+pid, time.Minute))
	requireGone(t, pid)
}

func requireGone(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	stat := filepath.Join("/proc", strings.TrimSpace(string(text)), "stat")
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(stat)
		return err != nil || strings.Contains(string(b), ") Z ") // killed; its parent is not ours to be
	}, 30*time.Second, time.Millisecond)
}

func TestMuchOutput(t *testing.T) {
	require.Equal(t, Answer{}, Run(t.Context(), start, "yes | head -c 10000000", time.Minute))
	a := Run(t.Context(), start, "head -c 100000 /dev/zero | tr '\\0' x >&2; exit 1", time.Minute)
	require.Equal(t, Unhealthy, a.Outcome)
	require.LessOrEqual(t, len(a.Reason), maxReason+len("exit status 1: "))
}

func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	require.Equal(t, Unhealthy, Run(ctx, start, "sleep 1000", time.Hour).Outcome, "nobody counts the answer any more")
}

func TestService(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	require.NoError(t, err)
	answer, status := "", http.StatusOK
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		if answer == "hang" {
			<-r.Context().Done()
		}
		_, _ = w.Write([]byte(answer))
	})}
	go s.Serve(l) //nolint:errcheck // ends with Close
	defer s.Close()
	for _, c := range []struct {
		answer string
		status int
		want   Answer
	}{
		{`{"verdict":"healthy"}`, 200, Answer{}},
		{`{"verdict":"unhealthy","message":"row remap\npending"}`, 200, Answer{Unhealthy, "row remap pending"}},
		{"all is well", 200, Answer{Unclear, "its answer is not a JSON object"}},
		{"", 200, Answer{Unclear, "its answer is not a JSON object"}},
		{`{"verdict":"failed"}`, 500, Answer{Unclear, "answered 500 Internal Server Error"}},
		{"hang", 200, Answer{Unhealthy, "no answer within 200ms"}},
	} {
		limit := time.Minute
		if c.answer == "hang" {
			limit = 200 * time.Millisecond
		}
		answer, status = c.answer, c.status
		require.Equal(t, c.want, Run(t.Context(), start, Socket+path, limit), c.answer)
	}
	a := Run(t.Context(), start, Socket+path+".not", time.Minute)
	require.Equal(t, Unclear, a.Outcome)
	require.Contains(t, a.Reason, "could not be asked")
}

func FuzzJudge(f *testing.F) {
	f.Add([]byte(`{"verdict":"ok","failed_checks":["a"],"message":"b"}`), true)
	f.Fuzz(func(t *testing.T, out []byte, silent bool) {
		a := judge(out, silent)
		require.NotContains(t, a.Reason, "\n")
		if a.Outcome == Unhealthy {
			require.NotEmpty(t, a.Reason)
		}
	})
}
