package run

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// A collector gets the worlds and stops of a job that fails once, and the run when it has ended.
func TestTracesOfARealJob(t *testing.T) {
	var mu sync.Mutex
	spans := map[string][]string{} // causes by name
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		var m collector.ExportTraceServiceRequest
		body, err := io.ReadAll(req.Body)
		if err != nil || proto.Unmarshal(body, &m) != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		for _, s := range m.ResourceSpans[0].ScopeSpans[0].Spans {
			cause := ""
			for _, a := range s.Attributes {
				if a.Key == "dlrover.cause" {
					cause = a.Value.GetStringValue()
				}
			}
			spans[s.Name] = append(spans[s.Name], cause)
		}
	}))
	t.Cleanup(server.Close)
	b := newBench(t)
	d := b.start("dlrover-master", nil, "--listen=127.0.0.1:0", "--otlp-endpoint="+server.URL)
	l := b.start("dlrover-run", []string{"DLROVER_MASTER_ADDR=" + b.served(d)},
		b.sh(`exit $((1 - TORCHELASTIC_RESTART_COUNT))`, "--nnodes=1", "--nproc-per-node=1", "--max-restarts=1")...)
	require.Zero(t, l.wait(), l.err.String())
	d.signal(15)
	require.Zero(t, d.wait(), d.err.String())
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, map[string][]string{"run": {""}, "stop": {"worker-failure"}, "world": {"worker-failure", ""}}, spans)

	wrong := b.start("dlrover-master", nil, "--otlp-endpoint=collector:4318")
	require.Equal(t, 2, wrong.wait())
	require.Contains(t, wrong.err.String(), `--otlp-endpoint="collector:4318": need http://HOST:PORT`)
}
