package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
	"dlrover-run/rendezvous/pyproto/agents"
)

// serveAgents serves b, and returns the port.
func serveAgents(t testing.TB, b pyproto.Backend) string {
	t.Helper()
	l, err := net.Listen("tcp", "0.0.0.0:0")
	require.NoError(t, err)
	s := &http.Server{Handler: pyproto.Handler(b), Protocols: new(http.Protocols)}
	s.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); <-done })
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return port
}

func testFleet(t testing.TB, n int) *fleet {
	t.Helper()
	hub := api.NewHub(api.HubConfig{})
	t.Cleanup(hub.Close)
	h := agents.New(agents.Config{Service: hub, Run: benchRun, JobUID: agentsUID})
	t.Cleanup(h.Close)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	f, err := meetAgents(ctx, serveAgents(t, h), n)
	require.NoError(t, err)
	t.Cleanup(f.close)
	return f
}

func TestAgentsRush(t *testing.T) {
	f := testFleet(t, 40)
	before := f.agents[8].stream
	answers := f.rush(8)
	require.Eventually(t, func() bool { return answers.Load() > 100 }, 20*time.Second, time.Millisecond)
	f.close()
	require.Empty(t, f.failed)
	require.Equal(t, before, f.agents[8].stream, "who does not rush")
}

// BenchmarkAgents is of a poll at a master in this process, with what it costs who asks.
func BenchmarkAgents(b *testing.B) {
	f := testFleet(b, agentsBusy)
	b.ReportAllocs()
	answers := f.rush(agentsBusy)
	begin := answers.Load()
	before, err := cpuOfAll(os.Getpid())
	require.NoError(b, err)
	b.ResetTimer()
	for answers.Load()-begin < int64(b.N) {
		if err := f.wait(b.Context(), time.Millisecond); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	after, err := cpuOfAll(os.Getpid())
	require.NoError(b, err)
	b.ReportMetric((after-before)*1e9/float64(b.N), "cpu-ns/op")
	f.close()
}

func TestAgentsPace(t *testing.T) {
	f := testFleet(t, 40)
	end := f.pace(t.Context(), 100)
	require.NoError(t, f.wait(t.Context(), 200*time.Millisecond))
	due, took := end()
	require.Positive(t, due)
	require.NotEmpty(t, took)
	require.LessOrEqual(t, len(took), due)
	require.Positive(t, took[0])
	require.LessOrEqual(t, percentile(took, 0.5), percentile(took, 0.99))
	require.Empty(t, f.failed)
}

// refuses answers nobody.
type refuses struct{}

func (refuses) Get(context.Context, pyproto.Caller, *pyproto.Message) (pyproto.Answer, error) {
	return pyproto.Answer{}, errors.New("no")
}

func (refuses) Admit(context.Context, string) (bool, error) { return true, nil }

func (refuses) Report(context.Context, pyproto.Caller, *pyproto.Message) (bool, error) {
	return false, nil
}

// forgets answers, but not what was asked.
type forgets struct{ refuses }

func (forgets) Report(context.Context, pyproto.Caller, *pyproto.Message) (bool, error) {
	return true, nil
}

func (forgets) Admit(context.Context, string) (bool, error) { return true, nil }

func (forgets) Get(context.Context, pyproto.Caller, *pyproto.Message) (pyproto.Answer, error) {
	return pyproto.Answer{}, nil
}

func TestAgentsOfAMasterThatFails(t *testing.T) {
	for _, b := range []pyproto.Backend{refuses{}, forgets{}} {
		_, err := meetAgents(t.Context(), serveAgents(t, b), 2)
		require.ErrorIs(t, err, errNoAnswer)
	}
	f := testFleet(t, 2)
	_ = f.agents[0].w.Close()
	f.rush(2)
	require.Error(t, f.wait(t.Context(), 20*time.Second))
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(io.ErrClosedPipe)
	require.ErrorIs(t, testFleet(t, 2).wait(ctx, time.Hour), io.ErrClosedPipe)
}

func TestAgentSides(t *testing.T) {
	t.Setenv(dlroverPackages, t.TempDir())
	b := testBench(t)
	got := b.sides(row{agents: true})
	require.Empty(t, got[0].missing)
	require.Contains(t, got[1].missing, dlroverPackages)
	python := filepath.Join(os.Getenv(dlroverPackages), "dlrover-0.6.1", "bin", "python")
	require.NoError(t, os.MkdirAll(python, 0o700))
	require.Empty(t, b.sides(row{agents: true})[1].missing)
}

func TestPercentile(t *testing.T) {
	took := []time.Duration{1 * time.Second, 2 * time.Second, 3 * time.Second, 4 * time.Second}
	require.Equal(t, []float64{2, 4, 4}, []float64{percentile(took, 0.5), percentile(took, 0.99), percentile(took, 1)})
	require.InDelta(t, 1, percentile(took[:1], 0.5), 0)
}

func TestProcessorTimeOfAll(t *testing.T) {
	for began := time.Now(); time.Since(began) < 50*time.Millisecond; { // five of its units
	}
	busy, err := cpuOfAll(os.Getpid())
	require.NoError(t, err)
	require.Positive(t, busy)
	_, err = cpuOfAll(1 << 30)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// discard is a connection that takes what it gets.
type discard struct{ bytes.Buffer }

func (*discard) Close() error { return nil }

func TestReceive(t *testing.T) {
	data := func(flags byte, text string) []byte { return appendFrame(nil, frameData, flags, 1, []byte(text)) }
	settings := appendFrame(nil, frameSettings, 0, 0, make([]byte, 6))
	ping := appendFrame(nil, framePing, 0, 0, []byte("12345678"))
	trailers := appendFrame(nil, frameHeaders, flagEndHeaders|flagEndStream, 1, nil)
	acks := appendFrame(appendFrame(nil, frameSettings, flagAck, 0, nil), framePing, flagAck, 0, []byte("12345678"))
	for name, tt := range map[string]struct {
		in   [][]byte
		body string
		sent string
		err  string
	}{
		"data and trailers":  {in: [][]byte{data(0, "ab"), data(0, "c"), trailers}, body: "abc"},
		"data alone":         {in: [][]byte{data(flagEndStream, "ab")}, body: "ab"},
		"settings and pings": {in: [][]byte{settings, acks[:frameHead], ping, data(1, "x")}, body: "x", sent: string(acks)},
		"what nobody needs":  {in: [][]byte{appendFrame(nil, frameWindow, 0, 0, make([]byte, 4)), data(1, "x")}, body: "x"},
		"padded":             {in: [][]byte{data(flagPadded|1, "x")}, err: "padded"},
		"reset":              {in: [][]byte{appendFrame(nil, frameReset, 0, 1, make([]byte, 4))}, err: "ends the call"},
		"the end":            {in: [][]byte{data(0, "x")}, err: "EOF"},
		"cut":                {in: [][]byte{data(1, "abc")[:11]}, err: "unexpected EOF"},
		"large":              {in: [][]byte{{0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1}}, err: "16777215 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			w := &discard{}
			c := &caller{w: w, r: bufio.NewReader(bytes.NewReader(bytes.Join(tt.in, nil)))}
			body, err := c.receive()
			if tt.err != "" {
				require.ErrorContains(t, err, tt.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tt.body, string(body))
			require.Equal(t, tt.sent, w.String())
		})
	}
}

func FuzzReceive(f *testing.F) {
	f.Add(appendFrame(appendFrame(nil, frameSettings, 0, 0, nil), frameData, flagEndStream, 1, []byte("x")))
	f.Add(appendFrame(appendFrame(nil, framePing, 0, 0, make([]byte, 8)), frameHeaders, flagEndStream, 1, nil))
	f.Fuzz(func(t *testing.T, in []byte) {
		c := &caller{w: &discard{}, r: bufio.NewReader(bytes.NewReader(in))}
		for {
			body, err := c.receive()
			if err != nil {
				break
			}
			if len(body) > len(in) {
				t.Fatalf("%d bytes out of %d", len(body), len(in))
			}
		}
	})
}
