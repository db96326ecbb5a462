package service

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/topology"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const secret = "0123456789abcdef"

// serving serves on a port of this machine and returns its address.
func serving(t *testing.T, s *Service) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close(time.Second)
		require.ErrorIs(t, <-done, http.ErrServerClosed)
		http.DefaultClient.CloseIdleConnections()
	})
	return l.Addr().String()
}

func get(t *testing.T, url, token string) (int, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	require.NoError(t, err)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(body)
}

func TestWhatIsServedAndWhoMaySeeIt(t *testing.T) {
	says := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
	}
	extra := http.NewServeMux()
	extra.HandleFunc("GET /readyz", says("ready"))
	s, err := New(Config{Token: secret, Metrics: says("numbers"), Extra: extra, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	at := "http://" + serving(t, s)
	for _, c := range []struct {
		path, token string
		status      int
		want        string
	}{
		{"/healthz", "", 200, "ok"},
		{"/readyz", "", 200, "ready"},
		{"/metrics", "", 401, "unauthorized"},
		{"/metrics", secret, 200, "numbers"},
		{"/v1/runs", "", 401, "unauthorized"},
		{"/v1/runs", secret, 200, "[]"},
		{"/v1/runs/r/checkpoints", "", 401, "unauthorized"},
		{"/v1/runs/r/checkpoints", secret, 200, "saves"},
	} {
		status, body := get(t, at+c.path, c.token)
		require.Equal(t, c.status, status, c.path)
		require.Contains(t, body, c.want, c.path)
	}
}

// Whoever waits for something hears of the end at once, whatever the grace.
func TestCloseAnswersWhoWaits(t *testing.T) {
	s, err := New(Config{Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	require.NoError(t, s.Hub.Join(t.Context(), "r", joining("n0", "10.0.0.1")))
	waits := make(chan error, 1)
	d, err := s.Hub.Watch(t.Context(), "r", "n0", api.Cursor{})
	require.NoError(t, err)
	go func() {
		_, err := s.Hub.Watch(context.Background(), "r", "n0", api.Cursor{Directive: d.Seq})
		waits <- err
	}()
	s.Close(time.Hour)
	require.ErrorIs(t, <-waits, api.ErrClosed)
	require.ErrorIs(t, s.Serve(closedListener(t)), http.ErrServerClosed)
}

func closedListener(t *testing.T) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return l
}

func TestOnlyATopologyFileCostsAGoroutine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "topology")
	require.NoError(t, os.WriteFile(path, []byte("a p 10.0.0.1\n"), 0o600))
	background := func() bool {
		stacks := make([]byte, 1<<20)
		return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("internal/app/service.New"))
	}
	s, err := New(Config{Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	runtime.Gosched() // for whatever New has started
	require.False(t, background())
	s.Close(0)
	s, err = New(Config{TopologyFile: path, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	defer s.Close(0)
	require.Eventually(t, background, 10*time.Second, time.Millisecond)
}

func TestAnUnusableTopologyFile(t *testing.T) {
	_, err := New(Config{TopologyFile: "/nowhere"})
	require.ErrorContains(t, err, "--topology-file")
}

// joining is a node of worlds of two.
func joining(id, ip string) rendezvous.Join {
	return rendezvous.Join{
		Node:   rendezvous.Node{ID: id, Name: id, Rank: -1, Addr: ip, IP: ip, Slots: 1},
		Params: rendezvous.Params{Min: 2, Max: 2},
	}
}

// switches asks, as a checkpoint daemon does, under which switch its node is.
func switches(t *testing.T, s *Service, epoch, ip string) string {
	t.Helper()
	client := coordinator.Client("http://service", "r", nil, &http.Client{Transport: inProcess{s.server.Handler}})
	ps, err := client.Peers(t.Context(), epoch, coordinator.Peer{Addr: ip + ":1"}, 1, time.Minute)
	require.NoError(t, err)
	return ps[0].Switch
}

func TestAChangedTopologyReachesTheCheckpoints(t *testing.T) {
	path := filepath.Join(t.TempDir(), "topology")
	require.NoError(t, os.WriteFile(path, []byte("a p 10.0.0.1\n"), 0o600))
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{TopologyFile: path, Log: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		defer s.Close(0)
		require.Equal(t, "a", switches(t, s, "1", "10.0.0.1"))
		require.NoError(t, os.WriteFile(path, []byte("other p 10.0.0.1\n"), 0o600))
		time.Sleep(3 * topology.Interval)
		synctest.Wait()
		require.Equal(t, "other", switches(t, s, "2", "10.0.0.1"))
	})
}

// The nodes of the next world have other ranks; the world that runs is left alone.
func TestAChangedTopologyReachesTheRanks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "topology")
	require.NoError(t, os.WriteFile(path, []byte("a p 10.0.0.0\na p 10.0.0.1\nb p 10.0.0.2\n"), 0o600))
	synctest.Test(t, func(t *testing.T) {
		s, err := New(Config{TopologyFile: path, Log: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		defer s.Close(0)
		var e job.EpochID
		seal := func() (names []string) {
			for i := range 3 {
				j := joining(fmt.Sprintf("n%d", i), fmt.Sprintf("10.0.0.%d", i))
				j.Params, j.Stopped = rendezvous.Params{Min: 3, Max: 3, MaxRestarts: 1}, e
				require.NoError(t, s.Hub.Join(t.Context(), "r", j))
			}
			lead, err := s.Hub.Watch(t.Context(), "r", "n0", api.Cursor{})
			require.NoError(t, err)
			require.Equal(t, job.Lead, lead.Kind)
			e = lead.EpochID
			require.NoError(t, s.Hub.Report(t.Context(), "r", rendezvous.Ready{ID: "n0", EpochID: e, Addr: "10.0.0.0", Port: 1}))
			world, err := s.Hub.World(t.Context(), "r")
			require.NoError(t, err)
			for _, m := range world {
				names = append(names, m.Node)
			}
			return names
		}
		require.Equal(t, []string{"n0", "n1", "n2"}, seal())
		require.NoError(t, os.WriteFile(path, []byte("a p 10.0.0.0\nother p 10.0.0.1\na p 10.0.0.2\n"), 0o600))
		time.Sleep(3 * topology.Interval)
		synctest.Wait()
		require.Equal(t, "running", s.Hub.Runs(false)[0].Phase)
		require.NoError(t,
			s.Hub.Report(t.Context(), "r", rendezvous.Failing{ID: "n1", EpochID: e, Decision: rendezvous.RestartFree}))
		require.Equal(t, []string{"n0", "n2", "n1"}, seal())
	})
}

// inProcess answers requests without a network.
type inProcess struct{ h http.Handler }

func (p inProcess) RoundTrip(req *http.Request) (*http.Response, error) {
	rec := httptest.NewRecorder()
	p.h.ServeHTTP(rec, req)
	return rec.Result(), nil
}

func TestASealIsLoggedByRankAHundredNodesALine(t *testing.T) {
	var out bytes.Buffer
	note := rendezvous.Note{Event: "seal", Round: 2, Epoch: 1}
	for i := range 250 {
		note.Members = append(note.Members,
			job.Member{GroupRank: i, Node: fmt.Sprintf("n%d", i), Addr: "10.0.0.1", Slots: 8, Ports: []int{4000, 4001}})
	}
	logWorld(slog.New(slog.NewJSONHandler(&out, nil)), "job", note)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 3)
	next := 0
	for _, l := range lines {
		var got struct {
			Run     string `json:"run_id"`
			Nodes   int
			Members []row
		}
		require.NoError(t, json.Unmarshal([]byte(l), &got))
		require.Equal(t, "job", got.Run)
		require.Equal(t, 250, got.Nodes)
		require.LessOrEqual(t, len(got.Members), 100)
		for _, m := range got.Members {
			require.Equal(t, row{next, fmt.Sprintf("n%d", next), "10.0.0.1", 8, []int{4000, 4001}}, m)
			next++
		}
	}
	require.Equal(t, 250, next)

	out.Reset()
	note.Members = note.Members[:1]
	logWorld(slog.New(slog.NewTextHandler(&out, nil)), "job", note)
	require.Contains(t, out.String(), `members="[0=n0@10.0.0.1*8:4000,4001]"`)
	out.Reset()
	logWorld(slog.New(slog.NewTextHandler(&out, nil)), "job", rendezvous.Note{Event: "break"})
	require.Empty(t, out.String())
}

// The checkpoints' hub sees the connections of daemons end.
func TestCheckpointsSeeConnections(t *testing.T) {
	s, err := New(Config{Token: secret, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	seen, connection := make(chan context.Context, 1), s.Checkpoints.Connection
	s.Checkpoints.Connection = func(ctx context.Context) context.Context {
		conn := connection(ctx)
		seen <- conn
		return conn
	}
	client := &http.Client{Transport: &http.Transport{}}
	daemon := coordinator.Client("http://"+serving(t, s), "r", func() []string { return []string{secret} }, client)
	require.NoError(t, daemon.Ages(t.Context(), "7.2", 1, nil))
	conn := <-seen
	require.NoError(t, conn.Err())
	client.CloseIdleConnections()
	<-conn.Done()
}
