package serve

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"

	"dlrover-run/hang"
	"dlrover-run/internal/httperr"
)

// Errors of a Transport.
var (
	// ErrBadRequest: the report cannot be understood. Trying again is useless.
	ErrBadRequest = errors.New("the judge of hangs cannot be spoken to")
	// ErrNotMember: the launcher is not in the run's present world, or its report is of another epoch.
	ErrNotMember = errors.New("no report is asked of this launcher")
	// ErrUnknownRun: no node of the run has reported anything.
	ErrUnknownRun = errors.New("nothing is known of hangs")
	// errLimit and errBusy: the service has too much to do; the latter passes.
	errLimit = errors.New("the service keeps too much of hangs")
	errBusy  = errors.New("the service has too much to do with hangs at once")
	// errClosed: the service is shutting down.
	errClosed = errors.New("the judge of hangs is shutting down")
)

var (
	errOtherEpoch = errors.New("its report is of another epoch than the one that runs")
	errStopped    = errors.New("its workers do not run")
)

func notMember(run string, err error) error {
	return fmt.Errorf("%w in run %q: %w", ErrNotMember, run, err)
}
func unknownRun(run string) error { return fmt.Errorf("%w in run %q", ErrUnknownRun, run) }
func tooMuch(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errLimit}, args...)...)
}

// wireErrors are errors over HTTP. Those that the rendezvous has, too, have its codes.
func wireErrors() httperr.Table {
	return httperr.Table{
		{Err: ErrBadRequest, Status: http.StatusBadRequest, Code: "bad_request"},
		{Err: ErrNotMember, Status: http.StatusNotFound, Code: "unknown_node"},
		{Err: ErrUnknownRun, Status: http.StatusNotFound, Code: "unknown_run"},
		{Err: errLimit, Status: http.StatusTooManyRequests, Code: "limit"},
		{Err: errBusy, Status: http.StatusServiceUnavailable, Code: "busy"},
		{Err: errClosed, Status: http.StatusServiceUnavailable, Code: "closed"},
	}
}

// On the wire stacks and groups, which many workers share, are in tables: evidence has the number of its row, from 1
// on. Equal texts are the same row, so that thousands of them are decoded once. Threads lose their numbers, which
// would make all of them differ.
type wireEvidence struct {
	hang.Evidence
	Stacks int `json:"stacks,omitempty"`
	Groups int `json:"groups,omitempty"`
}

type tables struct {
	Stacks []json.RawMessage `json:"stack_table,omitempty"`
	Groups []json.RawMessage `json:"group_table,omitempty"`
}

type wireReport struct {
	hang.Report
	tables
	Evidence []wireEvidence `json:"evidence,omitempty"`
}

// packer fills tables.
type packer struct {
	tables
	stacks map[*hang.Stacks]int
	rows   map[string]int
	counts [2]int // rows that were sent before: stacks, groups
}

// sent begins new tables, with rows that follow the earlier ones.
func (p *packer) sent() {
	p.counts[0] += len(p.Stacks)
	p.counts[1] += len(p.Groups)
	p.tables = tables{}
}

func newPacker() *packer { return &packer{stacks: map[*hang.Stacks]int{}, rows: map[string]int{}} }

func (p *packer) pack(es []hang.Evidence) ([]wireEvidence, error) {
	out := make([]wireEvidence, len(es))
	for i, e := range es {
		w := wireEvidence{Evidence: e}
		w.Evidence.Stacks, w.Evidence.Groups = nil, nil
		var err error
		if e.Stacks != nil {
			if w.Stacks, err = p.stacksOf(e.Stacks); err != nil {
				return nil, err
			}
		}
		if len(e.Groups) > 0 {
			if w.Groups, err = p.row("groups", &p.Groups, p.counts[1], e.Groups); err != nil {
				return nil, err
			}
		}
		out[i] = w
	}
	return out, nil
}

func (p *packer) stacksOf(s *hang.Stacks) (int, error) {
	if n := p.stacks[s]; n > 0 {
		return n, nil
	}
	bare := *s
	bare.Threads = make([]hang.Thread, len(s.Threads))
	for i, t := range s.Threads {
		t.TID = 0
		bare.Threads[i] = t
	}
	n, err := p.row("stacks", &p.Stacks, p.counts[0], bare)
	p.stacks[s] = n
	return n, err
}

// row is the number of a value in a table, a new one if need be.
func (p *packer) row(kind string, table *[]json.RawMessage, before int, v any) (int, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return 0, fmt.Errorf("pack %s: %w", kind, err)
	}
	key := kind + string(data)
	if p.rows[key] == 0 {
		*table = append(*table, data)
		p.rows[key] = before + len(*table)
	}
	return p.rows[key], nil
}

// encode returns the wire format of a report; it is compressed if it is not small. Data that exceeds a request is
// left out: first logs and recorders, then stacks.
func encode(r hang.Report) (body []byte, encoding string, err error) {
	r.Evidence = slices.Clone(r.Evidence)
	for i := range r.Evidence {
		r.Evidence[i].Samples = thinned(r.Evidence[i].Samples)
	}
	for _, drop := range []func(*hang.Evidence){
		func(*hang.Evidence) {},
		func(e *hang.Evidence) { e.Log, e.Flight = "", nil },
		func(e *hang.Evidence) { e.Stacks = nil },
	} {
		for i := range r.Evidence {
			drop(&r.Evidence[i])
		}
		if body, encoding, err = encodeAll(r); err != nil || body != nil {
			return body, encoding, err
		}
		r.RAS, r.Partial = "", "more was found on this node than a report can hold"
	}
	return nil, "", fmt.Errorf("%w: a report of %d workers is too large", ErrBadRequest, len(r.Evidence))
}

// thinned is samples without the rings of all pages but the newest, in which there is everything.
func thinned(ss []hang.Sample) []hang.Sample {
	ss = slices.Clone(ss)
	for i := range ss[:max(len(ss)-1, 0)] {
		if p := ss[i].Page; p != nil {
			bare := *p
			bare.StepTimes, bare.Spans = nil, nil
			ss[i].Page = &bare
		}
	}
	return ss
}

// encodeAll returns a nil body if it would be too large.
func encodeAll(r hang.Report) (body []byte, encoding string, err error) {
	p := newPacker()
	w := wireReport{Report: r}
	w.Report.Evidence = nil
	if w.Evidence, err = p.pack(r.Evidence); err != nil {
		return nil, "", err
	}
	w.tables = p.tables
	if body, err = json.Marshal(w); err != nil {
		return nil, "", fmt.Errorf("pack a report: %w", err)
	}
	if len(body) < 1<<10 {
		return body, "", nil
	}
	zipped := zip(body)
	if len(body) > maxPlain || len(zipped) > maxBody {
		return nil, "", nil
	}
	return zipped, "gzip", nil
}

func zip(data []byte) []byte {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	_, _ = z.Write(data) // into memory
	_ = z.Close()
	return b.Bytes()
}

// parcel is a report with its stacks and groups not decoded yet.
type parcel struct {
	report hang.Report
	tables
	refs []ref // of report.Evidence
}

type ref struct{ stacks, groups int }

// size is about how much memory the tables take.
func (p *parcel) size() (n int) {
	for _, t := range [][]json.RawMessage{p.Stacks, p.Groups} {
		for _, row := range t {
			n += len(row) * unpackedShare
		}
	}
	return n
}

// bare leaves the tables out.
func (p *parcel) bare() {
	p.tables = tables{}
	for i := range p.report.Evidence {
		p.report.Evidence[i].Error = "the service keeps too many stacks"
	}
}

// unpack gives evidence its stacks and groups.
func (p *parcel) unpack(shared *interner) {
	for i, ref := range p.refs {
		e := &p.report.Evidence[i]
		if n := ref.stacks; n > 0 && n <= len(p.Stacks) {
			e.Stacks = shared.stacksOf(p.Stacks[n-1])
		}
		if n := ref.groups; n > 0 && n <= len(p.Groups) {
			e.Groups = shared.groupsOf(p.Groups[n-1])
		}
	}
}

// spent releases the tables, which are not needed any more.
func (p *parcel) spent() {
	if p.size() <= maxBody {
		spare.Put(&tables{p.Stacks[:0], p.Groups[:0]})
	}
	p.tables = tables{}
}

// interner has one copy of everything that many workers share.
type interner struct {
	file   uint64 // of the incident that it belongs to
	stacks map[string]*hang.Stacks
	groups map[string][]hang.Group
	size   int // bytes, about
}

// unpackedShare is about how much memory a byte of a row's text takes.
const unpackedShare = 3

// of forgets everything unless it belongs to the same incident.
func (n *interner) of(file uint64) {
	if n.file != file || n.stacks == nil {
		*n = interner{file: file, stacks: map[string]*hang.Stacks{}, groups: map[string][]hang.Group{}}
	}
}

func (n *interner) stacksOf(row []byte) *hang.Stacks {
	if s := n.stacks[string(row)]; s != nil {
		return s
	}
	s := new(hang.Stacks)
	if err := json.Unmarshal(row, s); err != nil {
		s = &hang.Stacks{Error: "the node has sent no stacks"}
	}
	fitStacks(s)
	n.stacks[string(row)] = s
	n.size += len(row) * unpackedShare
	return s
}

func (n *interner) groupsOf(row []byte) []hang.Group {
	if gs, known := n.groups[string(row)]; known {
		return gs
	}
	var gs []hang.Group
	if err := json.Unmarshal(row, &gs); err != nil {
		gs = nil
	}
	gs = fitGroups(gs)
	n.groups[string(row)] = gs
	n.size += len(row) * unpackedShare
	return gs
}

// unzippers are gzip.Readers, which are large, rooms bytes.Buffers for their output, and spare tables with rows that
// are overwritten.
var (
	unzippers = sync.Pool{New: func() any { return new(gzip.Reader) }}
	rooms     = sync.Pool{New: func() any { return new(bytes.Buffer) }}
	spare     = sync.Pool{New: func() any { return new(tables) }}
)

func release(room *bytes.Buffer) {
	if room.Reset(); room.Cap() <= maxBody {
		rooms.Put(room)
	}
}

// decode understands a body but for its tables.
func decode(body []byte, encoding string) (*parcel, error) {
	plain := body
	switch encoding {
	case "", "identity":
	case "gzip":
		room := rooms.Get().(*bytes.Buffer)
		defer release(room)
		if err := unzip(room, body); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
		}
		plain = room.Bytes() // nothing refers to it later
	default:
		return nil, fmt.Errorf("%w: the encoding %.40q of a report: need gzip, or none", ErrBadRequest, encoding)
	}
	w := wireReport{tables: *spare.Get().(*tables)}
	if err := json.Unmarshal(plain, &w); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	p := &parcel{report: w.Report, tables: w.tables}
	p.report.Evidence = make([]hang.Evidence, 0, min(len(w.Evidence), maxWorkers))
	for _, e := range w.Evidence[:min(len(w.Evidence), maxWorkers)] {
		p.report.Evidence = append(p.report.Evidence, e.Evidence)
		p.refs = append(p.refs, ref{e.Stacks, e.Groups})
	}
	p.trim()
	fit(&p.report)
	return p, nil
}

// trim drops rows beyond the limit of one node.
func (p *parcel) trim() {
	for _, t := range []*[]json.RawMessage{&p.Stacks, &p.Groups} {
		size := 0
		for i, row := range *t {
			if size += len(row); size > maxTable {
				*t = (*t)[:i]
				break
			}
		}
	}
}

func unzip(room *bytes.Buffer, body []byte) error {
	z := unzippers.Get().(*gzip.Reader)
	defer unzippers.Put(z)
	if err := z.Reset(bytes.NewReader(body)); err != nil {
		return err
	}
	if n, err := room.ReadFrom(io.LimitReader(z, maxPlain+1)); err != nil {
		return err
	} else if n > maxPlain {
		return fmt.Errorf("the report has more than %d MiB when it is unpacked", maxPlain>>20)
	}
	return nil
}
