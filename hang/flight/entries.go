package flight

import (
	"errors"
	"fmt"

	"dlrover-run/internal/pickle"
)

var errNoEntries = errors.New("flight: not a dump of the flight recorder: it has no list of entries")

// decodePickle finds the entries in a pickle: a dict with a list of dicts, or, before PyTorch 2.3, that list.
func decodePickle(dump []byte, add func(*raw)) error {
	v, err := pickle.Decode(dump, pickle.Limits{Bytes: maxBytes, Shared: true})
	if err != nil {
		return fmt.Errorf("flight: pickle: %w", err)
	}
	if d, ok := v.(*pickle.Dict); ok {
		v = d.Get("entries")
	}
	l, ok := v.(*pickle.List)
	if !ok {
		return errNoEntries
	}
	for _, item := range l.Items {
		if d, ok := item.(*pickle.Dict); ok && len(d.Pairs) <= maxKeys {
			add(fromDict(d))
		}
	}
	return nil
}

// maxKeys is how many keys an entry may have: Get looks at all of them.
const maxKeys = 128

// fromDict takes the fields with the expected type.
func fromDict(d *pickle.Dict) *raw {
	r := &raw{
		Group:        some(d.Get("process_group"), 2, as[string]),
		InputSizes:   some(d.Get("input_sizes"), maxTensors+1, dims),
		OutputSizes:  some(d.Get("output_sizes"), maxTensors+1, dims),
		InputDTypes:  some(d.Get("input_dtypes"), maxTensors, as[string]),
		OutputDTypes: some(d.Get("output_dtypes"), maxTensors, as[string]),
	}
	r.PGID = as[int64](d.Get("pg_id"))
	r.CollectiveSeq = as[int64](d.Get("collective_seq_id"))
	r.P2PSeq = as[int64](d.Get("p2p_seq_id"))
	r.SeqID = as[int64](d.Get("seq_id"))
	r.Name = as[string](d.Get("profiling_name"))
	r.State = as[string](d.Get("state"))
	r.IsP2P = as[bool](d.Get("is_p2p"))
	r.Retired = as[bool](d.Get("retired"))
	r.Timeout = as[int64](d.Get("timeout_ms"))
	return r
}

// as is the zero value for a value of another type.
func as[T any](v any) T {
	t, _ := v.(T)
	return t
}

// some converts the first items of a list or a tuple: one list may belong to many entries.
func some[T any](v any, most int, convert func(any) T) []T {
	items, ok := v.(pickle.Tuple)
	if l, isList := v.(*pickle.List); isList {
		items, ok = l.Items, true
	}
	if !ok {
		return nil
	}
	out := make([]T, min(len(items), most))
	for i := range out {
		out[i] = convert(items[i])
	}
	return out
}

func dims(v any) []int64 { return some(v, maxDims+1, as[int64]) }
