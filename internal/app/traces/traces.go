// Package traces tells a collector of OpenTelemetry what happens in runs. A run is a trace; below it are spans of its
// worlds, each from its seal to its break, and of its stops, each from a break until workers run again.
package traces

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// Bounds of what is kept for a collector.
const (
	maxRuns   = 1024 // open traces
	maxQueue  = 2048 // spans that have ended
	closeTime = time.Second
)

// Exporter sends spans in the background. The methods of nil do nothing.
type Exporter struct {
	sink     *sink
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer

	mu   sync.Mutex
	runs map[string]*run
}

// run is the open spans of one; world and stop may be nil.
type run struct {
	ctx                context.Context
	whole, world, stop trace.Span
}

// New sends to the endpoint, a URL; its path is /v1/traces if it has none. It does not connect yet.
func New(endpoint string, log *slog.Logger) (*Exporter, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("--otlp-endpoint=%.200q: need http://HOST:PORT or https://HOST:PORT, of a collector's OTLP "+
			"over HTTP, such as http://collector:4318", endpoint)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	client, err := otlptracehttp.New(context.Background(), otlptracehttp.WithEndpointURL(u.String()))
	if err != nil {
		return nil, fmt.Errorf("--otlp-endpoint=%s: %w", endpoint, err)
	}
	s := &sink{SpanExporter: client, log: log}
	p := sdktrace.NewTracerProvider(sdktrace.WithBatcher(s, sdktrace.WithMaxQueueSize(maxQueue)),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", "dlrover-master"))))
	return &Exporter{sink: s, provider: p, tracer: p.Tracer("dlrover-run"), runs: map[string]*run{}}, nil
}

// Lost is how many spans the collector did not take.
func (e *Exporter) Lost() int64 { return e.sink.lost.Load() }

// Hear takes a note of a run. It does not block.
func (e *Exporter) Hear(id string, n rendezvous.Note) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch n.Event {
	case job.EventJoin:
		e.openLocked(id)
	case job.EventSeal:
		r := e.openLocked(id)
		end(&r.world)
		_, r.world = e.tracer.Start(r.ctx, "world", trace.WithAttributes(attribute.Int("dlrover.round", n.Round),
			attribute.Int("dlrover.epoch", n.Epoch), attribute.Int("dlrover.nodes", n.Nodes),
			attribute.Int("dlrover.world_size", n.World)))
	case job.EventRun:
		end(&e.openLocked(id).stop)
	case job.EventBreak:
		r := e.openLocked(id)
		end(&r.stop)
		_, r.stop = e.tracer.Start(r.ctx, "stop", trace.WithAttributes(about(n)...))
		end(&r.world, about(n)...)
	case job.EventSucceeded, job.EventFailed:
		e.endLocked(id, n)
	}
}

// openLocked is the run of a name; one more than fit takes the place of another one.
func (e *Exporter) openLocked(id string) *run {
	if r := e.runs[id]; r != nil {
		return r
	}
	for other := range e.runs {
		if len(e.runs) < maxRuns {
			break
		}
		e.endLocked(other, rendezvous.Note{Rank: -1})
	}
	r := &run{}
	r.ctx, r.whole = e.tracer.Start(context.Background(), "run", trace.WithAttributes(attribute.String("dlrover.run", id)))
	e.runs[id] = r
	return r
}

func (e *Exporter) endLocked(id string, n rendezvous.Note) {
	r := e.runs[id]
	if r == nil {
		return
	}
	delete(e.runs, id)
	end(&r.world)
	end(&r.stop)
	switch n.Event {
	case job.EventSucceeded:
		r.whole.SetStatus(codes.Ok, "")
	case job.EventFailed:
		r.whole.SetStatus(codes.Error, n.Text)
	}
	end(&r.whole, about(n)...)
}

func end(s *trace.Span, more ...attribute.KeyValue) {
	if *s != nil {
		(*s).SetAttributes(more...)
		(*s).End()
		*s = nil
	}
}

// about is why a run or its workers ended. The rank is in front of the text, if the fault is a worker's.
func about(n rendezvous.Note) (all []attribute.KeyValue) {
	if n.Text != "" {
		all = append(all, attribute.String("dlrover.text", n.Text))
	}
	if n.Cause != "" {
		all = append(all, attribute.String("dlrover.cause", string(n.Cause)))
	}
	if n.Node != "" {
		all = append(all, attribute.String("dlrover.node", n.Node))
	}
	rank := 0
	if _, err := fmt.Sscanf(n.Text, "rank %d ", &rank); err == nil {
		all = append(all, attribute.Int("dlrover.rank", rank))
	}
	return all
}

// Close ends all spans, as the next master knows nothing of them, and sends what is left within a second.
func (e *Exporter) Close() {
	if e == nil {
		return
	}
	e.mu.Lock()
	for id := range e.runs {
		e.endLocked(id, rendezvous.Note{Text: "the master has ended, the run goes on in another trace"})
	}
	e.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	_ = e.provider.Shutdown(ctx) // what is lost has been counted
}

// sink counts what the collector does not take, and says when that begins and ends.
type sink struct {
	sdktrace.SpanExporter
	log     *slog.Logger
	lost    atomic.Int64
	failing bool // the batcher exports one batch at a time
}

// ExportSpans implements sdktrace.SpanExporter.
func (s *sink) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := s.SpanExporter.ExportSpans(ctx, spans)
	if err != nil {
		s.lost.Add(int64(len(spans)))
	}
	switch failing := err != nil; {
	case failing && !s.failing:
		s.log.Warn("the collector of --otlp-endpoint does not take spans, which are lost; runs go on", "err", err)
	case !failing && s.failing:
		s.log.Info("the collector of --otlp-endpoint takes spans again", "lost", s.lost.Load())
	}
	s.failing = err != nil
	return nil // it has been said
}
