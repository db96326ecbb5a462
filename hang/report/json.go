package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"dlrover-run/hang"
	"dlrover-run/hang/merge"
	"dlrover-run/hang/trace"
)

// document is hang_report.json. Stacks and process groups that are the same are there once.
type document struct {
	Incident
	NoData string  `json:"no_data,omitempty"` // ranks without any stack, as 0-3,8
	Groups []group `json:"groups"`            // of ranks with their main threads in the same functions, the largest first
	Ranks  []rank  `json:"ranks"`
	// ProcessGroups are the groups of all ranks.
	ProcessGroups []hang.Group `json:"process_groups"`
	// Stacks begin with the innermost frame.
	Stacks [][]hang.Frame `json:"stacks"`
}

type group struct {
	Ranks  string   `json:"ranks"`
	States string   `json:"states,omitempty"`
	Phases []string `json:"phases,omitempty"`
	Top    string   `json:"top"` // the innermost function
}

// rank is the evidence of one, its threads without their stacks, its process groups as ids.
type rank struct {
	hang.Evidence
	Groups []uint64 `json:"groups,omitempty"` // the ids of document.ProcessGroups
	Stacks *threads `json:"stacks,omitempty"`
}

type threads struct {
	Interpreter string   `json:"interpreter,omitempty"`
	Error       string   `json:"error,omitempty"`
	Threads     []thread `json:"threads,omitempty"`
	Children    []thread `json:"children,omitempty"`
}

// thread refers to document.Stacks.
type thread struct {
	hang.Thread
	Python *int `json:"python,omitempty"`
	Native *int `json:"native,omitempty"`
}

// WriteJSON writes hang_report.json, which ReadJSON reads. Of the rings of steps and phases it writes the newest of
// each rank, and none of ranks behind the first trace.MaxRanks.
func (c Incident) WriteJSON(w io.Writer) error {
	d := document{Incident: c, NoData: c.noData().String(), Groups: []group{}, Ranks: []rank{},
		ProcessGroups: []hang.Group{}}
	for _, g := range merge.Groups(c.Evidence, false) {
		d.Groups = append(d.Groups, newGroup(g))
	}
	s := interned{index: map[string]int{}}
	known := map[uint64]bool{}
	for i, e := range c.Evidence {
		row := rank{Evidence: thin(e, i < trace.MaxRanks), Stacks: s.threads(e.Stacks)}
		for _, g := range e.Groups {
			row.Groups = append(row.Groups, g.ID)
			if !known[g.ID] {
				known[g.ID] = true
				d.ProcessGroups = append(d.ProcessGroups, g)
			}
		}
		d.Ranks = append(d.Ranks, row)
	}
	d.Stacks = slices.Concat([][]hang.Frame{}, s.stacks)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(d)
}

func newGroup(g merge.Group) group {
	out := group{Ranks: g.Ranks.String(), States: g.States, Top: g.Frames[0].Func}
	for _, p := range g.Phases {
		out.Phases = append(out.Phases, p.String())
	}
	return out
}

// thin is evidence without the rings of its older pages, and without output, which is for readers of the logs only.
func thin(e hang.Evidence, rings bool) hang.Evidence {
	e.Log = ""
	e.Samples = slices.Clone(e.Samples)
	for i := range e.Samples {
		s := &e.Samples[i]
		if s.Page == nil || rings && i == len(e.Samples)-1 {
			continue
		}
		p := *s.Page
		p.StepTimes, p.Spans = nil, nil
		s.Page = &p
	}
	return e
}

// interned are stacks, each once.
type interned struct {
	stacks [][]hang.Frame
	index  map[string]int
	key    strings.Builder
}

func (in *interned) threads(s *hang.Stacks) *threads {
	if s == nil {
		return nil
	}
	return &threads{
		Interpreter: s.Interpreter, Error: s.Error, Threads: in.rows(s.Threads), Children: in.rows(s.Children),
	}
}

func (in *interned) rows(threads []hang.Thread) (rows []thread) {
	for _, t := range threads {
		row := thread{t, in.add(t.Python), in.add(t.Native)}
		row.Thread.Python, row.Thread.Native = nil, nil
		rows = append(rows, row)
	}
	return rows
}

func (in *interned) add(frames []hang.Frame) *int {
	if len(frames) == 0 {
		return nil
	}
	in.key.Reset()
	for _, f := range frames {
		fmt.Fprintf(&in.key, "%s\x00%s\x00%d\x00", f.Func, f.File, f.Line)
	}
	key := in.key.String()
	i, ok := in.index[key]
	if !ok {
		i = len(in.stacks)
		in.index[key], in.stacks = i, append(in.stacks, frames)
	}
	return &i
}

// maxJSON is how large a hang_report.json may be that is read.
const maxJSON = 256 << 20

// ReadJSON reads the output of WriteJSON.
func ReadJSON(r io.Reader) (Incident, error) {
	var d document
	if err := json.NewDecoder(io.LimitReader(r, maxJSON)).Decode(&d); err != nil {
		return Incident{}, fmt.Errorf("no %s: %w", JSONFile, err)
	}
	c := d.Incident
	groups := map[uint64]hang.Group{}
	for _, g := range d.ProcessGroups {
		groups[g.ID] = g
	}
	for _, r := range d.Ranks {
		e := r.Evidence
		for _, id := range r.Groups {
			if g, ok := groups[id]; ok {
				e.Groups = append(e.Groups, g)
			}
		}
		if r.Stacks != nil {
			var err error
			if e.Stacks, err = r.Stacks.resolve(d.Stacks); err != nil {
				return Incident{}, fmt.Errorf("no %s: rank %d: %w", JSONFile, e.Rank, err)
			}
		}
		c.Evidence = append(c.Evidence, e)
	}
	return c, c.validate()
}

func (t *threads) resolve(stacks [][]hang.Frame) (*hang.Stacks, error) {
	s := &hang.Stacks{Interpreter: t.Interpreter, Error: t.Error}
	var threads, children error
	s.Threads, threads = resolve(t.Threads, stacks)
	s.Children, children = resolve(t.Children, stacks)
	return s, errors.Join(threads, children)
}

func resolve(rows []thread, stacks [][]hang.Frame) (threads []hang.Thread, err error) {
	for _, row := range rows {
		out := row.Thread
		for of, to := range map[*int]*[]hang.Frame{row.Python: &out.Python, row.Native: &out.Native} {
			if of == nil {
				continue
			}
			if *of < 0 || *of >= len(stacks) {
				return nil, fmt.Errorf("it has no stack %d", *of)
			}
			*to = stacks[*of]
		}
		threads = append(threads, out)
	}
	return threads, nil
}

// maxRanks is how many ranks a world may have.
const maxRanks = 1 << 20

// validate refuses incidents that would take hours, or all memory, to show.
func (c Incident) validate() error {
	ranks := 0
	for _, n := range c.World.Nodes {
		if n.Slots < 0 || n.RankBase < 0 || n.Slots > maxRanks || n.RankBase > maxRanks {
			return errors.New("no " + JSONFile + ": its world has no such ranks")
		}
		ranks += n.Slots
	}
	if ranks > maxRanks {
		return fmt.Errorf("no %s: its world has more than %d ranks", JSONFile, maxRanks)
	}
	return nil
}
