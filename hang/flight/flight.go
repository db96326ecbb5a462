// Package flight asks PyTorch's flight recorder for the collectives of a worker's process groups.
//
// The recorder is a ring of the newest collectives in every process of NCCL. It is dumped into a file when a
// collective times out, or when something is written to a fifo: a thread of PyTorch looks at that once a second. Gloo
// has the recorder, too, but no fifo. See https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
//
// A dump is a pickle of protocol 2 without classes, or JSON. Only plain data is accepted from it.
package flight

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/hang"
	"dlrover-run/internal/pickle"
	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
)

// Bounds of a dump, and of the result of parseDump.
const (
	maxBytes   = 64 << 20 // of a dump
	maxLanes   = 1024     // process groups, and point-to-point operations of them
	maxActive  = 4        // collectives that are not completed, of a process group
	maxEntries = 64       // of all process groups
	maxText    = 128      // bytes of a name
	maxTensors = 8        // with their sizes
	maxDims    = 8
)

// parseDump reads a dump: a pickle of protocol 2 to 5, or JSON. Of every process group it returns the oldest 4
// collectives that are not completed and the newest one that is, in the order of the calls. Point-to-point operations
// are numbered by themselves and count as another group. It returns 64 entries at most, and leaves out completed ones
// first.
func parseDump(dump []byte) (hang.Flight, error) {
	if len(dump) > maxBytes {
		return hang.Flight{}, fmt.Errorf("flight: a dump of %d bytes: at most %d are read", len(dump), maxBytes)
	}
	decode := decodeJSON
	if len(dump) > 0 && dump[0] == pickle.Proto {
		decode = decodePickle
	}
	c := chooser{lanes: make(map[lane]*tail)}
	if err := decode(dump, c.add); err != nil {
		return hang.Flight{}, err
	}
	return hang.Flight{Entries: c.chosen()}, nil
}

// chooser keeps the part of all collectives that parseDump returns. It gets the oldest first.
type chooser struct {
	lanes map[lane]*tail
	added int
}

// lane is a sequence with its own numbers.
type lane struct {
	group string
	p2p   bool
}

// tail is the end of a lane.
type tail struct {
	active []numbered
	newest *numbered // that is completed
}

type numbered struct {
	hang.FlightEntry
	place int // among all
}

func (c *chooser) add(r *raw) {
	e := numbered{r.entry(), c.added}
	c.added++
	l := lane{e.Group, e.IsP2P}
	t := c.lanes[l]
	if t == nil {
		if len(c.lanes) == maxLanes {
			return
		}
		t = &tail{}
		c.lanes[l] = t
	}
	if e.State == completed {
		t.newest = &e
		if !l.p2p { // they end in their order: gloo leaves some as they began
			t.active = nil
		}
	} else if len(t.active) < maxActive {
		t.active = append(t.active, e)
	}
}

func (c *chooser) chosen() []hang.FlightEntry {
	var active, done []numbered
	for _, t := range c.lanes {
		active = append(active, t.active...)
		if t.newest != nil {
			done = append(done, *t.newest)
		}
	}
	byPlace := func(a, b numbered) int { return cmp.Compare(a.place, b.place) }
	stable.Sort(active, byPlace)
	stable.Sort(done, byPlace)
	all := append(active, done...)
	all = all[:min(len(all), maxEntries)]
	stable.Sort(all, byPlace)
	entries := make([]hang.FlightEntry, len(all))
	for i, e := range all {
		entries[i] = e.FlightEntry
	}
	return entries
}

// op is the name of a collective without the backend's: nccl:all_reduce.
func op(name string) string {
	if _, after, ok := strings.Cut(name, ":"); ok {
		name = after
	}
	return short(name)
}

// short bounds a text and copies it, so that it does not hold the whole dump.
func short(s string) string { return strings.Clone(text.Clip(s, maxText)) }

// sizes writes the sizes of tensors as 3x2, 5; a scalar has none: ().
func sizes(of [][]int64) string {
	text := make([]string, min(len(of), maxTensors), maxTensors+1)
	for i := range text {
		text[i] = size(of[i])
	}
	if len(of) > maxTensors {
		text = append(text, "...")
	}
	return strings.Join(text, ", ")
}

func size(dims []int64) string {
	if len(dims) == 0 {
		return "()"
	}
	text := make([]string, min(len(dims), maxDims), maxDims+1)
	for i := range text {
		text[i] = strconv.FormatInt(dims[i], 10)
	}
	if len(dims) > maxDims {
		text = append(text, "...")
	}
	return strings.Join(text, "x")
}

// dtypes names the types of tensors.
func dtypes(of []string) string {
	of = slices.Compact(slices.Clone(of[:min(len(of), maxTensors)]))
	return short(strings.Join(of, ", "))
}

const completed = "completed"

// raw is an entry in the words of the dump. SeqID is that of PyTorch before 2.3, which counts everything alike.
type raw struct {
	Group         []string  `json:"process_group"` // name and description
	PGID          int64     `json:"pg_id"`
	CollectiveSeq int64     `json:"collective_seq_id"`
	P2PSeq        int64     `json:"p2p_seq_id"`
	SeqID         int64     `json:"seq_id"`
	Name          string    `json:"profiling_name"`
	State         string    `json:"state"`
	InputSizes    [][]int64 `json:"input_sizes"`
	OutputSizes   [][]int64 `json:"output_sizes"`
	InputDTypes   []string  `json:"input_dtypes"`
	OutputDTypes  []string  `json:"output_dtypes"`
	IsP2P         bool      `json:"is_p2p"`
	Retired       bool      `json:"retired"`
	Timeout       int64     `json:"timeout_ms"`
}

func (r *raw) entry() hang.FlightEntry {
	e := hang.FlightEntry{
		Group: strconv.FormatInt(r.PGID, 10), Op: op(r.Name), State: short(r.State), IsP2P: r.IsP2P, Timeout: r.Timeout,
		Sizes: cmp.Or(sizes(r.InputSizes), sizes(r.OutputSizes)),
		DType: cmp.Or(dtypes(r.InputDTypes), dtypes(r.OutputDTypes)),
	}
	if r.Retired { // its process group has seen its end: with gloo the state stays scheduled
		e.State = completed
	}
	if len(r.Group) > 0 {
		e.Group = short(r.Group[0])
	}
	if len(r.Group) > 1 {
		e.Desc = short(r.Group[1])
	}
	seq := cmp.Or(r.CollectiveSeq, r.SeqID)
	if r.IsP2P {
		seq = cmp.Or(r.P2PSeq, r.SeqID)
	}
	e.Seq = uint64(max(seq, 0))
	return e
}
