// Package exposition writes metrics in version 0.0.4 of Prometheus' text format
// (https://prometheus.io/docs/instrumenting/exposition_formats/). It is for a program that has few and starts often:
// Prometheus' client library takes longer to be initialised than a launcher to start its workers.
package exposition

import (
	"bytes"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// contentType names the format.
const contentType = "text/plain; version=0.0.4; charset=utf-8"

// Label is one dimension of a metric. The name has letters, digits and underscores; the value is any text.
type Label struct{ Name, Value string }

// Scrape gathers the values of one scrape. It is for one goroutine at a time; the zero value is ready for use.
type Scrape struct{ metrics map[string]*metric }

// metric is all values of one name.
type metric struct {
	kind, help string
	values     map[string]float64 // by labels, as they are written
}

// Counter adds the value of a counter, whose name ends in _total. All values of a name have the same help and the
// same names of labels, in the same order. A value replaces an earlier one with the same labels.
func (s *Scrape) Counter(name, help string, value float64, labels ...Label) {
	s.add(name, "counter", help, value, labels)
}

// Gauge is as Counter, for a value that may also go down.
func (s *Scrape) Gauge(name, help string, value float64, labels ...Label) {
	s.add(name, "gauge", help, value, labels)
}

func (s *Scrape) add(name, kind, help string, value float64, labels []Label) {
	m := s.metrics[name]
	if m == nil {
		if s.metrics == nil {
			s.metrics = map[string]*metric{}
		}
		m = &metric{kind: kind, help: help, values: map[string]float64{}}
		s.metrics[name] = m
	}
	m.values[written(labels)] = value
}

var (
	helpEscapes  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	labelEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
)

// written is {name="value",...}, or nothing. Invalid UTF-8 in a value becomes U+FFFD.
func written(labels []Label) string {
	if len(labels) == 0 {
		return ""
	}
	parts := make([]string, len(labels))
	for i, l := range labels {
		parts[i] = l.Name + `="` + labelEscapes.Replace(strings.ToValidUTF8(l.Value, "\uFFFD")) + `"`
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// Text is the metrics, sorted by name and labels.
func (s *Scrape) Text() []byte {
	var b bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(s.metrics)) {
		m := s.metrics[name]
		b.WriteString("# HELP " + name + " " + helpEscapes.Replace(m.help) + "\n")
		b.WriteString("# TYPE " + name + " " + m.kind + "\n")
		for _, labels := range slices.Sorted(maps.Keys(m.values)) {
			b.WriteString(name + labels + " " + strconv.FormatFloat(m.values[labels], 'g', -1, 64) + "\n")
		}
	}
	return b.Bytes()
}

// Handler answers each request with the metrics of collect. It calls collect from the goroutines of the requests.
func Handler(collect func(*Scrape)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		var s Scrape
		collect(&s)
		w.Header().Set("Content-Type", contentType)
		_, _ = w.Write(s.Text()) // a scraper that is gone is not missed
	})
}
