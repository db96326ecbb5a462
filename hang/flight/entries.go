package flight

// decodePickle finds the entries in a pickle: a dict with a list of dicts, or, before PyTorch 2.3, that list.
func decodePickle(dump []byte, add func(*raw)) error {
	v, err := unpickle(dump)
	if err != nil {
		return err
	}
	if d, ok := v.(*dict); ok {
		v = d.get("entries")
	}
	l, ok := v.(*list)
	if !ok {
		return errNoEntries
	}
	for _, item := range l.items {
		if d, ok := item.(*dict); ok && len(d.items) <= 2*maxKeys {
			add(fromDict(d))
		}
	}
	return nil
}

// maxKeys is how many keys an entry may have: get looks at all of them.
const maxKeys = 128

// fromDict takes what has the expected type.
func fromDict(d *dict) *raw {
	r := &raw{
		Group:        some(d.get("process_group"), 2, as[string]),
		InputSizes:   some(d.get("input_sizes"), maxTensors+1, dims),
		OutputSizes:  some(d.get("output_sizes"), maxTensors+1, dims),
		InputDTypes:  some(d.get("input_dtypes"), maxTensors, as[string]),
		OutputDTypes: some(d.get("output_dtypes"), maxTensors, as[string]),
	}
	r.PGID = as[int64](d.get("pg_id"))
	r.CollectiveSeq = as[int64](d.get("collective_seq_id"))
	r.P2PSeq = as[int64](d.get("p2p_seq_id"))
	r.SeqID = as[int64](d.get("seq_id"))
	r.Name = as[string](d.get("profiling_name"))
	r.State = as[string](d.get("state"))
	r.IsP2P = as[bool](d.get("is_p2p"))
	r.Retired = as[bool](d.get("retired"))
	r.Timeout = as[int64](d.get("timeout_ms"))
	return r
}

// as is the zero value for what has another type.
func as[T any](v value) T {
	t, _ := v.(T)
	return t
}

// some converts the first items of a list: one list may belong to many entries.
func some[T any](v value, most int, convert func(value) T) []T {
	l, ok := v.(*list)
	if !ok {
		return nil
	}
	out := make([]T, min(len(l.items), most))
	for i := range out {
		out[i] = convert(l.items[i])
	}
	return out
}

func dims(v value) []int64 { return some(v, maxDims+1, as[int64]) }
