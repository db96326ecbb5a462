package traces

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// receiver is a collector.
type receiver struct {
	mu    sync.Mutex
	spans []*otlp.Span
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	var m collector.ExportTraceServiceRequest
	if err != nil || req.URL.Path != "/v1/traces" || proto.Unmarshal(body, &m) != nil {
		http.Error(w, "no traces", http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, of := range m.ResourceSpans {
		for _, s := range of.ScopeSpans {
			r.spans = append(r.spans, s.Spans...)
		}
	}
}

// told are the spans, as "name: attributes".
func (r *receiver) told() (all []string) {
	for _, s := range r.spans {
		text := s.Name + ":"
		for _, a := range s.Attributes {
			text += fmt.Sprintf(" %s=%s%s", strings.TrimPrefix(a.Key, "dlrover."), a.Value.GetStringValue(),
				strings.TrimPrefix(fmt.Sprint(a.Value.GetIntValue()), "0"))
		}
		all = append(all, text)
	}
	return all
}

func TestARunIsATrace(t *testing.T) {
	r := &receiver{}
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	e, err := New(server.URL, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	for _, n := range []rendezvous.Note{
		{Event: job.EventJoin},
		{Event: job.EventSeal, Round: 1, Nodes: 2, World: 16},
		{Event: job.EventRun},
		{Event: job.EventBreak, Cause: job.CauseFailure, Node: "gpu-7", Text: "rank 9 (node 1 gpu-7) failed: exit code 1"},
		{Event: job.EventSeal, Round: 1, Epoch: 1, Nodes: 2, World: 16},
		{Event: job.EventRun},
		{Event: job.EventFailed, Text: "no restarts are left"},
		{Event: job.EventNodeLeave},
	} {
		e.Hear("llm", n)
	}
	e.Hear("other", rendezvous.Note{Event: job.EventJoin})
	e.Close()
	require.ElementsMatch(t, []string{
		"run: run=llm text=no restarts are left",
		"world: round=1 epoch= nodes=2 world_size=16 text=rank 9 (node 1 gpu-7) failed: exit code 1 cause=worker-failure " +
			"node=gpu-7 rank=9",
		"stop: text=rank 9 (node 1 gpu-7) failed: exit code 1 cause=worker-failure node=gpu-7 rank=9",
		"world: round=1 epoch=1 nodes=2 world_size=16",
		"run: run=other text=the master has ended, the run goes on in another trace",
	}, r.told())
	var whole *otlp.Span
	for _, s := range r.spans {
		if s.Status.GetCode() == otlp.Status_STATUS_CODE_ERROR {
			whole = s
		}
	}
	require.NotNil(t, whole, "the run that failed")
	below := 0
	for _, s := range r.spans {
		if string(s.ParentSpanId) == string(whole.SpanId) && string(s.TraceId) == string(whole.TraceId) {
			below++
		}
	}
	require.Equal(t, 3, below)
	require.Zero(t, e.Lost())
}

// A collector that is away costs one warning and a number.
func TestACollectorThatIsAway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	var log strings.Builder
	e, err := New("http://"+l.Addr().String(), slog.New(slog.NewTextHandler(&log, nil)))
	require.NoError(t, err)
	began := time.Now()
	for i := range 3 * maxQueue {
		e.Hear(fmt.Sprint(i), rendezvous.Note{Event: job.EventJoin})
	}
	require.Less(t, time.Since(began), 5*time.Second, "nobody waits")
	require.LessOrEqual(t, len(e.runs), maxRuns)
	e.Close()
	require.Less(t, time.Since(began), 10*time.Second)
	require.Positive(t, e.Lost())
	require.Equal(t, 1, strings.Count(log.String(), "does not take spans"))
}

func TestEndpoints(t *testing.T) {
	for _, wrong := range []string{"collector:4318", "http://", "ftp://collector", "://"} {
		_, err := New(wrong, slog.Default())
		require.ErrorContains(t, err, "need http://HOST:PORT", wrong)
	}
	var off *Exporter
	off.Hear("x", rendezvous.Note{Event: job.EventJoin})
	off.Close()
}

// One that takes connections and answers nothing keeps a master that ends for a second.
func TestACollectorThatHangs(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	e, err := New("http://"+l.Addr().String(), slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	for i := range 3 * maxQueue {
		e.Hear(fmt.Sprint(i), rendezvous.Note{Event: job.EventJoin})
	}
	began := time.Now()
	e.Close()
	require.Less(t, time.Since(began), 5*time.Second)
}
