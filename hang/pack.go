package hang

import (
	"bytes"
	"encoding/binary"
	"iter"
	"slices"
	"time"
)

// packed is the evidence of one node's workers in a tenth of its size: that of 80,000 is kept for as long as its
// incident. It is never changed.
type packed struct {
	text   []byte
	shared []shared
}

// shared is data that many workers have in common, all of it or none.
type shared struct {
	stacks *Stacks
	groups []Group
}

// pack leaves out Node and GroupRank, which are the same for all.
func pack(es []Evidence) packed {
	if len(es) == 0 {
		return packed{}
	}
	c := coder{text: make([]byte, 0, 256*len(es))}
	c.evidence(&es)
	c.flush()
	return packed{bytes.Clone(c.text), slices.Clip(c.shared)}
}

func (p packed) empty() bool { return len(p.text) == 0 }

// size is about how many bytes p takes, without the data that many workers share.
func (p packed) size() int { return len(p.text) + 32*len(p.shared) }

// unpack makes new Evidence of it, that of the node with a name and a group rank.
func (p packed) unpack(node string, groupRank int) (es []Evidence) {
	if p.empty() {
		return nil
	}
	c := coder{text: p.text, shared: p.shared, reading: true}
	c.evidence(&es)
	for i := range es {
		es[i].Node, es[i].GroupRank = node, groupRank
	}
	return es
}

// all is the present evidence, by rank, without the ranks that have none.
func (f *file) all() iter.Seq[Evidence] {
	kept := make([]packed, len(f.nodes))
	for i := range f.nodes {
		kept[i] = f.nodes[i].evidence
	}
	return func(yield func(Evidence) bool) {
		for i, p := range kept {
			for _, e := range p.unpack(f.world.Nodes[i].Name, i) {
				if !yield(e) {
					return
				}
			}
		}
	}
}

// coder appends values to its text, or reads them from there in the same order. It writes the difference of a value
// from a similar one: from the sample before, or from another worker.
type coder struct {
	text    []byte
	shared  []shared
	reading bool
	zeros   uint64          // that are still to be written, or have been read
	ring    []time.Duration // the newest StepTimes: workers of one job take about the same time for a step
}

// number has a run of zeros written as one zero and their number.
func number[T ~int | ~int64 | ~uint64 | ~uint8](c *coder, v *T, base T) {
	if c.reading {
		*v = T(uint64(base) + uint64(c.next()))
		return
	}
	by := int64(uint64(*v) - uint64(base))
	if by == 0 {
		c.zeros++
		return
	}
	c.flush()
	c.text = binary.AppendVarint(c.text, by)
}

func (c *coder) flush() {
	if c.zeros > 0 {
		c.text = binary.AppendUvarint(append(c.text, 0), c.zeros)
		c.zeros = 0
	}
}

func (c *coder) next() int64 {
	if c.zeros == 0 {
		by, n := binary.Varint(c.text)
		if c.text = c.text[n:]; by != 0 {
			return by
		}
		c.zeros, n = binary.Uvarint(c.text)
		c.text = c.text[n:]
	}
	c.zeros--
	return 0
}

func (c *coder) flag(v *bool) {
	var is uint8
	if *v {
		is = 1
	}
	number(c, &is, 0)
	*v = is == 1
}

// string is written as its length, from 1 on, and its bytes; 0 is the base.
func (c *coder) string(v *string, base string) {
	n := 0
	if *v != base {
		n = 1 + len(*v)
	}
	number(c, &n, 0)
	switch {
	case !c.reading && n > 0:
		c.text = append(c.text, *v...)
	case c.reading && n > 0:
		*v, c.text = string(c.text[:n-1]), c.text[n-1:]
	case c.reading:
		*v = base
	}
}

// list has each handle an element, with the one before it, or a zero one.
func list[T any](c *coder, v *[]T, each func(c *coder, v, before *T)) {
	n := len(*v)
	number(c, &n, 0)
	if c.reading && n > 0 {
		*v = make([]T, n)
	}
	before := new(T)
	for i := range *v {
		each(c, &(*v)[i], before)
		before = &(*v)[i]
	}
}

func (c *coder) evidence(es *[]Evidence) {
	list(c, es, func(c *coder, e, before *Evidence) {
		c.worker(&e.Worker, &before.Worker)
		c.share(e)
		c.string((*string)(&e.Work), string(before.Work))
		c.string(&e.Log, "")
		c.string(&e.Exception, "")
		c.string(&e.Error, before.Error)
		list(c, &e.Sockets, func(c *coder, v, before *string) { c.string(v, *before) })
		recorded := e.Flight != nil
		if c.flag(&recorded); recorded {
			if c.reading {
				e.Flight = new(Flight)
			}
			list(c, &e.Flight.Entries, (*coder).flight)
		}
		first := &Sample{}
		if len(before.Samples) > 0 {
			first = &before.Samples[0]
		}
		list(c, &e.Samples, func(c *coder, s, before *Sample) {
			if s == &e.Samples[0] {
				before = first
			}
			c.sample(s, before, &e.Worker)
		})
	})
}

// share is about Stacks and Groups; the text has their number.
func (c *coder) share(e *Evidence) {
	i := 0
	if !c.reading {
		if i = slices.IndexFunc(c.shared, e.has); i < 0 {
			i, c.shared = len(c.shared), append(c.shared, shared{e.Stacks, e.Groups})
		}
	}
	number(c, &i, 0)
	e.Stacks, e.Groups = c.shared[i].stacks, c.shared[i].groups
}

func (e *Evidence) has(s shared) bool {
	same := len(s.groups) == len(e.Groups) && (len(s.groups) == 0 || &s.groups[0] == &e.Groups[0])
	return same && s.stacks == e.Stacks
}

func (c *coder) worker(w, base *Worker) {
	number(c, &w.Rank, base.Rank)
	number(c, &w.Local, base.Local)
	number(c, &w.PID, base.PID)
	number(c, &w.Start, base.Start)
}

func (c *coder) flight(e, base *FlightEntry) {
	c.string(&e.Group, base.Group)
	c.string(&e.Desc, base.Desc)
	number(c, &e.Seq, base.Seq)
	c.string(&e.Op, base.Op)
	c.string(&e.State, base.State)
	c.string(&e.Sizes, base.Sizes)
	c.string(&e.DType, base.DType)
	c.flag(&e.IsP2P)
	number(c, &e.Timeout, base.Timeout)
}

func (c *coder) sample(s, base *Sample, w *Worker) {
	c.worker(&s.Worker, w)
	number(c, &s.At, base.At)
	c.proc(&s.Proc, &base.Proc)
	paged := s.Page != nil
	if c.flag(&paged); !paged {
		return
	}
	if c.reading {
		s.Page = new(Page)
	}
	similar := base.Page
	if similar == nil {
		similar = new(Page)
	}
	c.page(s.Page, similar)
}

func (c *coder) proc(p, base *Proc) {
	number(c, &p.Thread, base.Thread)
	number(c, &p.State, base.State)
	number(c, &p.CPU, base.CPU)
	number(c, &p.MainCPU, base.MainCPU)
	number(c, &p.MainWait, base.MainWait)
	number(c, &p.TreeCPU, base.TreeCPU)
	number(c, &p.Switches, base.Switches)
	number(c, &p.IO, base.IO)
	number(c, &p.TreeIO, base.TreeIO)
	number(c, &p.Net, base.Net)
	c.string(&p.WChan, base.WChan)
	number(c, &p.Threads, base.Threads)
	number(c, &p.DThreads, base.DThreads)
}

func (c *coder) page(p, base *Page) {
	number(c, &p.PID, base.PID)
	number(c, &p.Start, base.Start)
	number(c, &p.Rank, base.Rank)
	number(c, &p.WorldSize, base.WorldSize)
	number(c, &p.Local, base.Local)
	number(c, &p.Created, base.Created)
	number(c, &p.Heartbeat, base.Heartbeat)
	number(c, &p.Steps, base.Steps)
	number(c, &p.LastStep, base.LastStep)
	number(c, &p.Thread, base.Thread)
	number(c, &p.Phase, base.Phase)
	number(c, &p.PhaseSince, base.PhaseSince)
	i := 0
	list(c, &p.Groups, func(c *coder, g, _ *GroupState) {
		var similar GroupState
		if i < len(base.Groups) {
			similar = base.Groups[i]
		}
		i++
		number(c, &g.ID, similar.ID)
		number(c, &g.Seq, similar.Seq)
		number(c, &g.Since, similar.Since)
	})
	c.steps(&p.StepTimes)
	list(c, &p.Spans, func(c *coder, s, before *Span) {
		number(c, &s.Phase, before.Phase)
		number(c, &s.From, before.To)
		number(c, &s.To, s.From)
	})
}

func (c *coder) steps(ends *[]time.Duration) {
	i := 0
	list(c, ends, func(c *coder, end, before *time.Duration) {
		expected := *before
		if i > 0 && i < len(c.ring) {
			expected += c.ring[i] - c.ring[i-1]
		}
		i++
		number(c, end, expected)
	})
	if len(*ends) > 0 {
		c.ring = *ends
	}
}
