package run

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// crowd is the launchers of one run, without workers, over real connections.
type crowd struct {
	t        *testing.T
	params   rendezvous.Params
	sessions []*api.Session
	clients  []*api.Client
	readers  sync.WaitGroup

	released atomic.Int64 // how often a node was told to run
	strange  atomic.Pointer[string]
	epoch    atomic.Pointer[job.EpochID]
}

func gather(t *testing.T, addr string, nodes int) *crowd {
	c := &crowd{t: t, params: rendezvous.Params{Min: nodes, Max: nodes, MaxRestarts: 100, LastCall: time.Second,
		JoinTimeout: 5 * time.Minute, NodeTimeout: 30 * time.Second}}
	t.Cleanup(func() {
		for i := range c.sessions {
			c.sessions[i].Close()
			c.clients[i].Close()
		}
		c.readers.Wait()
	})
	for i := range nodes {
		client := api.NewClient(addr, testToken)
		node := rendezvous.Node{ID: fmt.Sprintf("%016x", i), Name: fmt.Sprint("node", i), Rank: -1, Addr: "127.0.0.1",
			IP: "127.0.0.1", Slots: 1, Role: "default"}
		s, err := api.Open(t.Context(), client, api.SessionConfig{Run: "job", Node: node, Params: c.params, Where: addr,
			Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		c.sessions, c.clients = append(c.sessions, s), append(c.clients, client)
		c.readers.Go(func() { c.follow(s) })
	}
	return c
}

func (c *crowd) follow(s *api.Session) {
	ctx := context.Background()
	for d := range s.Directives() {
		var err error
		switch d.Kind {
		case job.Wait:
		case job.Lead:
			err = s.Report(ctx, rendezvous.Ready{ID: s.ID(), EpochID: d.EpochID, Addr: "127.0.0.1", Port: 29500})
		case job.Run:
			c.epoch.Store(&d.EpochID)
			c.released.Add(1)
			if d.Place.GroupWorldSize != c.params.Max {
				err = fmt.Errorf("a world of %d", d.Place.GroupWorldSize)
			}
		case job.Stop:
			if d.Cause.Kind != job.CauseFailure {
				text := fmt.Sprintf("%s was stopped: %v", s.ID(), d.Cause)
				c.strange.Store(&text)
			}
			err = s.Rejoin(ctx, d.EpochID, nil)
		default:
			err = fmt.Errorf("directive %q: %v", d.Kind, d.Cause)
		}
		if err != nil {
			text := s.ID() + ": " + err.Error()
			c.strange.Store(&text)
		}
	}
}

// run waits until all nodes run for the nth time.
func (c *crowd) run(n int, most time.Duration) time.Duration {
	c.t.Helper()
	began := time.Now()
	require.Eventually(c.t, func() bool {
		return c.released.Load() >= int64(n*len(c.sessions)) || c.strange.Load() != nil
	}, most, time.Millisecond)
	if s := c.strange.Load(); s != nil {
		require.Fail(c.t, *s)
	}
	return time.Since(began)
}

func (c *crowd) restart(n int, most time.Duration) time.Duration {
	c.t.Helper()
	s := c.sessions[0]
	require.NoError(c.t, s.Report(c.t.Context(),
		rendezvous.Failing{ID: s.ID(), EpochID: *c.epoch.Load(), Decision: rendezvous.RestartCharged}))
	return c.run(n, most)
}

// harass sends requests one after the other in each of n goroutines, until stop.
func harass(n int, request func(ctx context.Context, i int) error) (stop func() int64) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var sent atomic.Int64
	for range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				_ = request(ctx, int(sent.Add(1)))
			}
		})
	}
	return func() int64 { cancel(); wg.Wait(); return sent.Load() }
}

func raw(token, method, path, more string) string {
	head := method + " " + path + " HTTP/1.1\r\nHost: x\r\n"
	if token != "" {
		head += "Authorization: Bearer " + token + "\r\n"
	}
	return head + more
}

// TestAttackersBesideAJob has a job restart while others attack its master, without the token and with it.
func TestAttackersBesideAJob(t *testing.T) {
	slow := "Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{"
	const join = "/v1/runs/job/join"
	for _, size := range []struct {
		nodes, idle int
		reopen      time.Duration
	}{{50, 500, 0}, {1000, 10_000, time.Second}} {
		t.Run(fmt.Sprintf("%d nodes", size.nodes), func(t *testing.T) {
			if size.nodes > 50 {
				long(t)
			}
			b := newBench(t)
			master, addr := b.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
			c := gather(t, addr, size.nodes)
			c.run(1, 2*time.Minute)
			quiet := c.restart(2, time.Minute)
			var stops []func() int64
			defer func() {
				for _, stop := range stops {
					stop()
				}
			}()
			each := func(n int, request func(ctx context.Context, hc *http.Client, i int) error) {
				hc := plainhttp.New(nil)
				stop := harass(n, func(ctx context.Context, i int) error { return request(ctx, hc, i) })
				stops = append(stops, func() int64 { defer hc.CloseIdleConnections(); return stop() })
			}
			post := func(ctx context.Context, hc *http.Client, path, token string, body io.Reader) error {
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, body)
				if err != nil {
					return err
				}
				req.Header.Set("Authorization", "Bearer "+token)
				resp, err := hc.Do(req)
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				return err
			}
			for _, first := range []string{"", raw("", "GET", "/v1/runs", "X: "), raw("", "POST", join, slow)} {
				stops = append(stops, linger(t, addr, size.idle/3, first, true, size.reopen))
			}
			for _, first := range []string{raw(testToken, "POST", join, slow),
				strings.Repeat(raw(testToken, "GET", "/v1/runs", "\r\n"), 100)} {
				stops = append(stops, linger(t, addr, 50, first, false, time.Second))
			}
			each(4, func(ctx context.Context, hc *http.Client, i int) error {
				return post(ctx, hc, join, fmt.Sprint("wrong", i), strings.NewReader("{}"))
			})
			each(2, func(ctx context.Context, hc *http.Client, i int) error {
				return post(ctx, hc, join, testToken, bytes.NewReader(make([]byte, 8<<20)))
			})
			stranger := api.NewClient(addr, testToken)
			defer stranger.Close()
			for _, runs := range []int{8000, 0} { // nodes of random names, in runs of random names and in the job
				each(4, func(ctx context.Context, _ *http.Client, i int) error {
					run := "job"
					if runs > 0 {
						run = fmt.Sprint("run", i%runs)
					}
					return stranger.Join(ctx, run, rendezvous.Join{Params: c.params, Node: rendezvous.Node{
						ID: fmt.Sprintf("random%010d", i), Name: fmt.Sprint("random", i), Rank: -1, Addr: "127.0.0.1", Slots: 1}})
				})
			}
			for n := range 3 {
				took := c.restart(3+n, time.Minute)
				t.Logf("restart of %d nodes: %s; before: %s", size.nodes, took, quiet)
			}
			for _, stop := range stops {
				t.Logf("%d requests", stop())
			}
			stops = nil
			for _, lost := range b.events("node-loss") {
				require.Contains(t, lost["node"], "random", "a node of the job")
			}
			t.Logf("the master has used %s", peak(t, master))
		})
	}
}

// linger keeps n connections open from an address of its own. Each sends first, and reads the answers or not.
// One that is closed is opened again after a pause. Without it thousands fill the kernel's queue of new connections, in
// which those of the job wait, for as long as attackers have the same two processors as the master. stop returns how
// many were opened.
func linger(t *testing.T, addr string, n int, first string, reads bool, reopen time.Duration) (stop func() int64) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}, Timeout: 5 * time.Second}
	var opened atomic.Int64
	defer eventually(t, "attacked", func() bool { return opened.Load() >= int64(n) })
	return harass(n, func(ctx context.Context, _ int) error {
		nc, err := d.DialContext(ctx, "tcp", addr)
		if err == nil {
			defer context.AfterFunc(ctx, func() { nc.Close() })()
			opened.Add(1)
			if _, err = nc.Write([]byte(first)); reads {
				_, _ = io.Copy(io.Discard, nc)
			} else {
				retry.Sleep(ctx, time.Minute)
			}
			nc.Close()
		}
		retry.Sleep(ctx, reopen)
		return err
	})
}

// peak is the most memory that a process has used.
func peak(t *testing.T, l *launched) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", l.cmd.Process.Pid))
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(text), "VmHWM:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}
