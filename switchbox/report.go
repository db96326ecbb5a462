package switchbox

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
)

// schema is the version of Report.
const schema = 1

// The bounds of a Report.
const (
	MaxReport   = 1 << 20 // bytes of its JSON
	maxText     = 512     // bytes of a string
	maxDevices  = 64
	MaxFindings = 64
	MaxPairs    = 512
)

// Severity of a Finding.
type Severity string

// The severities: a fatal finding fails the node, a warning is only reported.
const (
	Info  Severity = "info"
	Warn  Severity = "warn"
	Fatal Severity = "fatal"
)

// Finding is one measurement or observation, with the value that it was compared with.
type Finding struct {
	Check     string   `json:"check"` // nvml, switchbox
	Kind      string   `json:"kind"`  // gpu. and clocks, copy, driver, fabric, link, lost, memory, p2p, pcie or reset
	Severity  Severity `json:"severity"`
	Entity    string   `json:"entity,omitempty"` // GPU 3, 0:1
	Metric    string   `json:"metric,omitempty"`
	Value     float64  `json:"value,omitempty"`
	Unit      string   `json:"unit,omitempty"`
	Threshold float64  `json:"threshold,omitempty"`
	Median    float64  `json:"median,omitempty"`
	Text      string   `json:"text"` // in one line, for people, complete without the other fields
}

// State is a Report's state of its node.
type State string

// The states of a Report.
const (
	OK      State = "ok"
	Faulty  State = "faulty"
	Skipped State = "skipped" // nothing, or too little, could be checked here, for the reason in Reason
)

// Report is the result of one adaptor on one node. `gpucheck --json` prints it and the launcher reads it.
type Report struct {
	Schema  int    `json:"schema"`
	Adaptor string `json:"adaptor"` // nvml, metax
	State   State  `json:"state"`
	Reason  string `json:"reason,omitempty"` // in one line
	Driver  string `json:"driver,omitempty"` // versions
	// Domain names the NVLink domain that the node's devices share, as cluster UUID and clique; "" is none or unknown.
	Domain   string        `json:"domain,omitempty"`
	Devices  []Facts       `json:"devices,omitempty"`
	Pairs    []Measurement `json:"pairs,omitempty"`
	Findings []Finding     `json:"findings,omitempty"` // worst first
}

// Skip is the Report of an adaptor that could not check anything.
func Skip(adaptor, reason string) Report {
	return Report{Schema: schema, Adaptor: adaptor, State: Skipped, Reason: oneLine(reason)}
}

// Conclude brings the Report within its bounds and derives the rest from Devices and Findings: the Domain, the order,
// and the State where none is set. A fatal finding makes any Report faulty.
func (r *Report) Conclude() {
	r.Schema = schema
	r.Domain = cmp.Or(r.Domain, domain(r.Devices))
	stable.Sort(r.Findings, func(a, b Finding) int { return weight(b.Severity) - weight(a.Severity) })
	if len(r.Findings) > 0 && r.Findings[0].Severity == Fatal {
		r.State, r.Reason = Faulty, fatalTexts(r.Findings)
	}
	r.State = cmp.Or(r.State, OK)
	r.Reason, r.Driver = oneLine(r.Reason), oneLine(r.Driver)
	r.Findings = r.Findings[:min(len(r.Findings), MaxFindings)]
	for i := range r.Findings {
		r.Findings[i].Text = oneLine(r.Findings[i].Text)
	}
}

// fatalTexts joins the first few fatal findings of a sorted list.
func fatalTexts(findings []Finding) string {
	var texts []string
	for _, f := range findings {
		if f.Severity == Fatal {
			texts = append(texts, f.Text)
		}
	}
	if more := len(texts) - 3; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(texts[:3], "; "), more)
	}
	return strings.Join(texts, "; ")
}

func weight(s Severity) int { return slices.Index([]Severity{Info, Warn, Fatal}, s) }

// domain is the NVLink domain of devices that all are in the same one.
func domain(devices []Facts) string {
	var domains []string
	for _, d := range devices {
		if d.Fabric == nil || d.Fabric.State != FabricCompleted || strings.Trim(d.Fabric.Cluster, "0-") == "" {
			return ""
		}
		domains = with(domains, fmt.Sprintf("%s.%d", d.Fabric.Cluster, d.Fabric.Clique))
	}
	if len(domains) != 1 {
		return ""
	}
	return domains[0]
}

// ParseReport reads a Report as Conclude leaves it: it comes from another program, which may be older or newer. Fields
// that are unknown here are left out.
func ParseReport(text []byte) (Report, error) {
	if len(text) > MaxReport {
		return Report{}, fmt.Errorf("the report is longer than %d bytes", MaxReport)
	}
	if err := plain(text); err != nil {
		return Report{}, fmt.Errorf("the report is not as it should be: %w", err)
	}
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		return Report{}, fmt.Errorf("the report is not as it should be: %w", err)
	}
	if err := r.check(); err != nil {
		return Report{}, fmt.Errorf("the report is not as it should be: %w", err)
	}
	return r, nil
}

// plain returns an error unless text is one JSON value that can be shown in one line.
func plain(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	for depth := 0; ; {
		t, err := d.Token()
		if err != nil {
			return err
		}
		switch t := t.(type) {
		case json.Delim:
			if depth++; t == ']' || t == '}' {
				depth -= 2
			}
		case string:
			if t != oneLine(t) {
				return fmt.Errorf("a text is longer than %d bytes or not printable: %.40q", maxText, t)
			}
		}
		if depth == 0 {
			break
		}
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows it")
	}
	return nil
}

func (r *Report) check() error {
	switch {
	case r.Schema != schema:
		return fmt.Errorf("schema %d, need %d: the programs are of different versions", r.Schema, schema)
	case r.Adaptor == "":
		return errors.New("no adaptor")
	case r.State != OK && r.State != Faulty && r.State != Skipped:
		return fmt.Errorf("state %q", r.State)
	case r.State != OK && r.Reason == "":
		return fmt.Errorf("state %s without a reason", r.State)
	case len(r.Devices) > maxDevices, len(r.Findings) > MaxFindings, len(r.Pairs) > MaxPairs:
		return fmt.Errorf("%d devices, %d findings, %d pairs", len(r.Devices), len(r.Findings), len(r.Pairs))
	}
	for _, f := range r.Findings {
		if weight(f.Severity) < 0 || f.Check == "" || f.Text == "" {
			return fmt.Errorf("finding %q of check %q has severity %q", f.Text, f.Check, f.Severity)
		}
		if f.Severity == Fatal && r.State != Faulty {
			return fmt.Errorf("a fatal finding, and state %s", r.State)
		}
	}
	return nil
}

// oneLine makes s one line of at most maxText bytes that a terminal shows as it is.
func oneLine(s string) string { return strings.TrimSpace(text.Line(s, maxText)) }
