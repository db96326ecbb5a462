package trainjob

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func lookup(env map[string]string) func(string) string {
	return func(name string) string { return env[name] }
}

func TestVariables(t *testing.T) {
	s, err := Read(lookup(nil), 10)
	require.NoError(t, err)
	require.Nil(t, s)
	env := map[string]string{URLVariable: "https://trainer.svc:10443/apis", CAVariable: "ca.crt", TokenVariable: "token"}
	s, err = Read(lookup(env), 10)
	require.NoError(t, err)
	require.Equal(t, &Settings{"https://trainer.svc:10443/apis", "ca.crt", "token", 10}, s)
	for name, wrong := range map[string]string{URLVariable: "http://plain", CAVariable: "", TokenVariable: ""} {
		bad := map[string]string{}
		for k, v := range env {
			bad[k] = v
		}
		bad[name] = wrong
		_, err := Read(lookup(bad), 10)
		require.ErrorContains(t, err, name)
	}
}

func TestStatus(t *testing.T) {
	at := job.Place{WorldSize: 16, RestartCount: 2}
	for name, c := range map[string]struct {
		p    job.Progress
		want string
	}{
		"first step": {job.Progress{Step: 1}, `{"progressPercentage":0,"metrics":[{"name":"step","value":"1"},
			{"name":"restarts","value":"2"},{"name":"world_size","value":"16"}]`},
		"pace": {job.Progress{Step: 101, Ran: 53 * time.Second, Idle: 3 * time.Second},
			`{"progressPercentage":10,"estimatedRemainingSeconds":449,"metrics":[{"name":"step","value":"101"},
			{"name":"seconds_per_step","value":"0.5"},{"name":"restarts","value":"2"},{"name":"world_size","value":"16"}]`},
		"resumed": {job.Progress{Step: 11, Loaded: 500, Resumed: true, Saving: true, Checkpoint: 510, Ran: 10 * time.Second},
			`{"progressPercentage":51,"estimatedRemainingSeconds":489,"metrics":[{"name":"step","value":"511"},
			{"name":"seconds_per_step","value":"1"},{"name":"checkpoint_step","value":"510"},
			{"name":"restarts","value":"2"},{"name":"world_size","value":"16"}]`},
		"more than all": {job.Progress{Step: 2000, Ran: time.Minute}, `{"progressPercentage":99,
			"estimatedRemainingSeconds":0,"metrics":[{"name":"step","value":"2000"},
			{"name":"seconds_per_step","value":"0.030015"},{"name":"restarts","value":"2"},
			{"name":"world_size","value":"16"}]`},
	} {
		text, err := json.Marshal(status(c.p, 1000, at))
		require.NoError(t, err)
		require.JSONEq(t, c.want+`,"lastUpdatedTime":"0001-01-01T00:00:00Z"}`, string(text), name)
	}
	crawling := status(job.Progress{Step: 2, Ran: 1000 * time.Hour}, 1<<40, at)
	require.EqualValues(t, 1<<31-1, *crawling.Remaining)
}

// trainer is a server as Trainer's: it takes reports from who has the token of the moment.
type trainer struct {
	*httptest.Server
	dir     string
	token   string
	reports []map[string]any
}

func serve(t *testing.T, code int) *trainer {
	s := &trainer{dir: t.TempDir(), token: "first"}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+s.token {
			http.Error(w, `{"message":"Forbidden"}`, http.StatusForbidden)
			return
		}
		var body struct{ TrainerStatus map[string]any }
		decoder := json.NewDecoder(r.Body)
		if decoder.Decode(&body) != nil || body.TrainerStatus["lastUpdatedTime"] == nil {
			http.Error(w, "no status", http.StatusUnprocessableEntity)
			return
		}
		s.reports = append(s.reports, body.TrainerStatus)
		w.WriteHeader(code)
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	s.write(t, "ca.crt", string(authority))
	s.write(t, "token", "first\n")
	return s
}

func (s *trainer) write(t *testing.T, name, text string) {
	require.NoError(t, os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600))
}

func (s *trainer) reporter(out io.Writer) *Reporter {
	r := New(Settings{URL: s.URL, CA: filepath.Join(s.dir, "ca.crt"), Token: filepath.Join(s.dir, "token"), Steps: 100},
		nil, slog.New(slog.NewTextHandler(out, nil)))
	r.first = true
	return r
}

func TestReports(t *testing.T) {
	s, out := serve(t, http.StatusOK), &bytes.Buffer{}
	r := s.reporter(out)
	r.report(t.Context(), trainerStatus{Percent: new(int32(7))})
	require.EqualValues(t, 7, s.reports[0]["progressPercentage"])
	s.token = "second"
	for range 2 {
		r.report(t.Context(), trainerStatus{})
	}
	require.Equal(t, 1, bytes.Count(out.Bytes(), []byte("403 Forbidden")), "one warning: %s", out)
	s.write(t, "token", "second")
	r.End(launcher.EndRequest{Budget: time.Minute})
	require.EqualValues(t, 100, s.reports[1]["progressPercentage"])
	require.Len(t, s.reports, 2)

	s.write(t, "ca.crt", "none")
	r.report(t.Context(), trainerStatus{})
	require.Contains(t, out.String(), "ca.crt holds no certificate")
}

func TestOnlySuccessIsComplete(t *testing.T) {
	s := serve(t, http.StatusOK)
	r := s.reporter(io.Discard)
	for _, res := range []launcher.Result{
		{Reason: policy.WorkerFailed}, {Err: context.Canceled}, {Signal: syscall.SIGTERM}, {Left: "drained"},
	} {
		r.End(launcher.EndRequest{Result: res, Budget: time.Minute})
	}
	r.Stop(launcher.StopRequest{CauseKind: job.CauseGrowth}) // it is a spare from then on
	r.End(launcher.EndRequest{Budget: time.Minute})
	require.Empty(t, s.reports)
}

// Nothing is sent while nothing moves, and nothing by other nodes than that of rank 0.
func TestReportsFollowTheSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var step atomic.Int64
		var sent []string
		r := New(Settings{Steps: 100}, func() job.Progress { return job.Progress{Step: step.Load()} }, nil)
		r.send = func(_ context.Context, s trainerStatus) error {
			sent = append(sent, s.Metrics[0].Value)
			return nil
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		step.Store(1)
		r.Run(ctx, launcher.RunRequest{Epoch: launcher.Epoch{Directive: launcher.Directive{Place: job.Place{RankBase: 8}}}})
		step.Store(0)
		go r.Run(ctx, launcher.RunRequest{})
		time.Sleep(time.Hour)
		for range 3 {
			step.Add(5)
			time.Sleep(time.Hour)
		}
		synctest.Wait()
		require.Equal(t, []string{"5", "10", "15"}, sent)
	})
}
