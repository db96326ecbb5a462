package nodehealth

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/text"
)

// version is that of the records. Fields that are added leave it as it is; older programs skip them.
const version = 1

// MaxSnapshot bounds the data of Restore in bytes.
const MaxSnapshot = 512 << 20

type snapshot struct {
	Version int         `json:"version"`
	Nodes   []savedNode `json:"nodes"`
	Runs    []savedRun  `json:"runs,omitempty"`
	Made    []time.Time `json:"made,omitempty"`
	Swept   time.Time   `json:"swept,omitzero"`
}

type savedNode struct {
	Name     string    `json:"name"`
	Seen     time.Time `json:"seen"`
	Mark     *Mark     `json:"mark,omitempty"`
	Held     *heldMark `json:"held,omitempty"`
	Findings []Finding `json:"findings,omitempty"`
}

type savedRun struct {
	Run      string    `json:"run"`
	Heard    time.Time `json:"heard"`
	Members  []string  `json:"members,omitempty"`
	Failures []failure `json:"failures,omitempty"`
	Blames   []blame   `json:"blames,omitempty"`
}

// saved is a snapshot without runs.
func (g *Registry) saved() snapshot {
	s := snapshot{Version: version, Nodes: make([]savedNode, 0, len(g.nodes.of)), Made: g.marks.made, Swept: g.swept}
	for _, name := range slices.Sorted(maps.Keys(g.nodes.of)) {
		r := g.nodes.of[name]
		s.Nodes = append(s.Nodes, savedNode{name, r.seen, r.mark, r.held, r.findings})
	}
	return s
}

// Keys of records.
const (
	headRecord    = "head" // all but the machines and runs
	machineRecord = "machine/"
	runRecord     = "run/"
)

// maxMade is how many times of marks a record has, the newest, so that it fits into 64 KiB: the breaker of the next
// leader does not count earlier ones of the last hour.
const maxMade = 1024

// Records is what is to be kept, by key: a record for each machine with a mark or findings, one for each run with
// failures, and one for the rest. The same knowledge gives the same bytes. Other machines are left out, and the members
// of runs: they may be many, and are known again after a while.
func (g *Registry) Records() (all map[string][]byte, err error) {
	s, all := g.saved(), map[string][]byte{}
	keep := func(key string, v any) {
		var b bytes.Buffer
		to := json.NewEncoder(&b)
		to.SetEscapeHTML(false) // which may take six times the room
		err = errors.Join(err, to.Encode(v))
		all[key] = bytes.TrimSpace(b.Bytes())
	}
	for _, n := range s.Nodes {
		if n.Mark != nil || n.Held != nil || len(n.Findings) > 0 {
			keep(machineRecord+digest(n.Name), n)
		}
	}
	for run, j := range g.runs.of {
		if n := len(j.failures); n > 0 { // heard of at its newest failure, so that only failures change its record
			keep(runRecord+digest(run), savedRun{Run: run, Heard: j.failures[n-1].At, Failures: j.failures})
		}
	}
	s.Nodes, s.Made = nil, s.Made[max(0, len(s.Made)-maxMade):]
	keep(headRecord, s)
	return all, err
}

// digest makes a name a part of a key.
func digest(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:16])
}

// RestoreRecords returns the Registry of records, which is new if there are none.
func RestoreRecords(cfg Config, records map[string][]byte) (*Registry, error) {
	if len(records) == 0 {
		return New(cfg), nil
	}
	whole := snapshot{}
	if err := json.Unmarshal(records[headRecord], &whole); err != nil {
		return nil, fmt.Errorf("record %s: %w", headRecord, err)
	}
	for _, key := range slices.Sorted(maps.Keys(records)) {
		var err error
		switch {
		case strings.HasPrefix(key, machineRecord):
			whole.Nodes = append(whole.Nodes, savedNode{})
			err = json.Unmarshal(records[key], &whole.Nodes[len(whole.Nodes)-1])
		case strings.HasPrefix(key, runRecord):
			whole.Runs = append(whole.Runs, savedRun{})
			err = json.Unmarshal(records[key], &whole.Runs[len(whole.Runs)-1])
		}
		if err != nil {
			return nil, fmt.Errorf("record %s: %w", key, err)
		}
	}
	data, err := json.Marshal(whole)
	if err != nil {
		return nil, err
	}
	return Restore(cfg, data)
}

// Restore returns the Registry of the file that older programs kept, as JSON. The error describes an invalid one.
func Restore(cfg Config, data []byte) (*Registry, error) {
	var head struct{ Version int }
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, err
	}
	if head.Version != version {
		return nil, fmt.Errorf("version %d: this program reads version %d; use one that is as new as the file's writer",
			head.Version, version)
	}
	var s snapshot
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, err
	}
	if len(s.Nodes) > MaxNodes || len(s.Runs) > maxRuns || len(s.Made) > MaxNodes {
		return nil, fmt.Errorf("%d nodes, %d runs, %d marks made: at most %d, %d and %d are kept", len(s.Nodes),
			len(s.Runs), len(s.Made), MaxNodes, maxRuns, MaxNodes)
	}
	g := New(cfg)
	if err := g.load(s); err != nil {
		return nil, err
	}
	return g, nil
}

func (g *Registry) load(s snapshot) error {
	for _, n := range s.Nodes {
		if err := g.loadNode(n); err != nil {
			return fmt.Errorf("node %.100q: %w", n.Name, err)
		}
	}
	if g.nodes.findings > maxFindings {
		return fmt.Errorf("%d findings: at most %d are kept", g.nodes.findings, maxFindings)
	}
	for _, r := range s.Runs {
		if err := g.loadRun(r); err != nil {
			return fmt.Errorf("run %.100q: %w", r.Run, err)
		}
	}
	for i := range s.Made {
		if err := reasonable(&s.Made[i]); err != nil {
			return err
		}
	}
	g.marks.made, g.swept = s.Made, s.Swept
	if s.Swept.IsZero() {
		g.swept = time.Time{}
		return nil
	}
	return reasonable(&g.swept)
}

func (g *Registry) loadNode(n savedNode) error {
	if err := CheckName(n.Name); err != nil {
		return err
	}
	if g.nodes.of[n.Name] != nil {
		return errors.New("it is there twice")
	}
	r := &record{name: n.Name, seen: n.Seen, findings: n.Findings}
	if len(n.Findings) > MaxPerNode {
		return fmt.Errorf("%d findings: at most %d are kept", len(n.Findings), MaxPerNode)
	}
	for i := range r.findings {
		if err := r.findings[i].check(n.Name); err != nil {
			return err
		}
	}
	g.nodes.findings += len(r.findings)
	g.nodes.of[n.Name] = r
	return errors.Join(reasonable(&r.seen), g.loadMark(r, n.Mark), loadHeld(r, n.Held))
}

func (g *Registry) loadMark(r *record, m *Mark) error {
	if m == nil {
		return nil
	}
	if err := m.check(r.name); err != nil {
		return err
	}
	g.marks.set(r, *m)
	return nil
}

func loadHeld(r *record, h *heldMark) error {
	if h == nil {
		return nil
	}
	r.held = h
	return errors.Join(h.check(r.name), checkText(h.Why), ends(h.Until))
}

// ends reports a time that is missing.
func ends(t time.Time) error {
	if t.IsZero() {
		return errors.New("a mark of the policy has no end")
	}
	return nil
}

func (f *Finding) check(node string) error {
	if f.Node != node {
		return fmt.Errorf("a finding is about node %.100q", f.Node)
	}
	f.Aspect = cmp.Or(f.Aspect, aspects[f.Kind]) // of an older program
	return errors.Join(checkRun(f.Run), checkKind(f.Kind), checkAspect(f.Aspect), checkText(f.Text), reasonable(&f.At))
}

func (m *Mark) check(node string) error {
	if m.Node != node {
		return fmt.Errorf("a mark is about node %.100q", m.Node)
	}
	if m.By == byPolicy {
		if err := ends(m.Until); err != nil {
			return err
		}
	}
	if !m.Until.IsZero() {
		if err := reasonable(&m.Until); err != nil {
			return err
		}
	}
	m.Aspect = cmp.Or(m.Aspect, aspects[m.Kind])
	return errors.Join(checkRun(m.Run), checkKind(m.Kind), checkAspect(m.Aspect), checkText(m.Reason),
		checkText(m.Evidence), checkText(m.By), reasonable(&m.Since))
}

func checkText(s string) error {
	if len(s) > MaxText || !text.Printable(s) {
		return fmt.Errorf("text %.100q: %s, at most %d bytes", s, text.PrintableRule, MaxText)
	}
	return nil
}

// reasonable makes t a time as a Registry keeps it, or reports why it cannot.
func reasonable(t *time.Time) error {
	if *t = stamp(*t); t.Year() < 1970 || t.Year() > 9000 {
		return fmt.Errorf("time %s: need a year from 1970 to 9000", t.Format(time.RFC3339))
	}
	return nil
}

func (g *Registry) loadRun(s savedRun) error {
	if err := errors.Join(checkRun(s.Run), reasonable(&s.Heard)); err != nil {
		return err
	}
	if s.Run == "" || g.runs.of[s.Run] != nil {
		return errors.New("it has no name, or is there twice")
	}
	if len(s.Blames) > MaxNodes {
		return fmt.Errorf("%d blames: at most %d are kept", len(s.Blames), MaxNodes)
	}
	j := newJob()
	j.heard, j.blames = s.Heard, s.Blames
	known := func(node string) bool { return g.nodes.of[node] != nil }
	if err := errors.Join(g.runs.load(j, s.Members, known), j.check(s.Failures)); err != nil {
		return err
	}
	j.failures = slices.Clone(s.Failures[max(0, len(s.Failures)-g.cfg.Of):])
	j.count()
	g.runs.of[s.Run] = j
	return nil
}
