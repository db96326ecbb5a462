package flight

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/hang"
	"dlrover-run/internal/pickle"
	"dlrover-run/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func file(t testing.TB, name string) []byte {
	b, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(t, err)
	return b
}

// The dumps in testdata are of rank 0 of three, by PyTorch 2.15 with gloo: three all_reduce, a broadcast and an
// all_gather in a group of two, a send, and an all_reduce that rank 2 does not enter. When the JSON was written, rank 2
// had ended and the last all_reduce failed.
func TestDumpsOfPyTorch(t *testing.T) {
	want := []hang.FlightEntry{
		{Group: "0", Desc: "default_pg", Seq: 3, Op: "all_reduce", State: "completed", Sizes: "3x2", DType: "Float",
			Timeout: 60_000},
		{Group: "1", Desc: "pair", Seq: 2, Op: "all_gather", State: "completed", Sizes: "3x2", DType: "Float",
			Timeout: 1_800_000},
		{Group: "0", Desc: "default_pg", Seq: 4, Op: "all_reduce", State: "scheduled", Sizes: "3x2", DType: "Double",
			Timeout: 60_000},
	}
	for _, name := range []string{"torch2.15-gloo.pickle", "torch2.15-gloo.json"} {
		t.Run(name, func(t *testing.T) {
			got, err := parseDump(file(t, name))
			require.NoError(t, err)
			if filepath.Ext(name) == ".json" {
				want[2].State = "completed"
				want = want[1:]
			}
			require.Equal(t, want, got.Entries)
		})
	}
}

// made is a dump in the shape that PyTorch documents, for json.Marshal and Python.
func made(entries ...map[string]any) string {
	b, err := json.Marshal(map[string]any{"version": "2.4", "entries": entries, "pg_config": map[string]any{}})
	if err != nil {
		panic(err)
	}
	return string(b)
}

func collective(group string, seq int, state string) map[string]any {
	return map[string]any{
		"process_group": []string{group, "desc of " + group}, "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq,
		"profiling_name": "nccl:all_reduce", "state": state, "input_sizes": [][]int{{4, 5}, {}}, "is_p2p": false,
		"input_dtypes": []string{"Float", "Float", "Half"}, "timeout_ms": 600_000, "time_created_ns": 1795354713460804611,
		"time_discovered_started_ns": nil, "retired": false, "frames": []any{map[string]any{"name": "f", "line": 3}},
	}
}

func seqs(f hang.Flight) (out []string) {
	for _, e := range f.Entries {
		out = append(out, fmt.Sprintf("%s %d %s", e.Group, e.Seq, e.State))
	}
	return out
}

func parse(t testing.TB, dump string) hang.Flight {
	f, err := parseDump([]byte(dump))
	require.NoError(t, err)
	return f
}

func TestChoice(t *testing.T) {
	f := parse(t, made(
		collective("0", 1, "completed"), collective("0", 2, "completed"), collective("0", 3, "started"),
		collective("7", 1, "scheduled"), collective("0", 4, "scheduled"), collective("0", 5, "scheduled"),
		collective("0", 6, "scheduled"), collective("0", 7, "scheduled"), collective("8", 9, "completed"),
	))
	require.Equal(t, []string{
		"0 2 completed", "0 3 started", "7 1 scheduled", "0 4 scheduled", "0 5 scheduled", "0 6 scheduled", "8 9 completed",
	}, seqs(f))
	require.Equal(t, hang.FlightEntry{
		Group: "0", Desc: "desc of 0", Seq: 2, Op: "all_reduce", State: "completed", Sizes: "4x5, ()", DType: "Float, Half",
		Timeout: 600_000,
	}, f.Entries[0])
}

// Collectives of a group end in their order, so an older one that seems to go on has ended.
func TestAnOlderCollectiveHasEnded(t *testing.T) {
	f := parse(t, made(collective("0", 1, "scheduled"), collective("0", 2, "completed"), collective("0", 3, "scheduled")))
	require.Equal(t, []string{"0 2 completed", "0 3 scheduled"}, seqs(f))
}

func TestPointToPointHasItsOwnNumbers(t *testing.T) {
	send := collective("0", 4, "completed")
	send["is_p2p"], send["p2p_seq_id"], send["profiling_name"] = true, 2, "nccl:send 0->1"
	f := parse(t, made(collective("0", 4, "completed"), send, collective("0", 5, "scheduled")))
	require.Equal(t, []string{"0 4 completed", "0 2 completed", "0 5 scheduled"}, seqs(f))
	require.Equal(t, "send 0->1", f.Entries[1].Op)
	require.True(t, f.Entries[1].IsP2P)
}

func TestOlderDumps(t *testing.T) {
	f := parse(t, `{"version": "1.5", "entries": [
		{"pg_id": 3, "seq_id": 17, "profiling_name": "nccl:broadcast", "state": "started", "output_sizes": [[2]]}]}`)
	require.Equal(t, []hang.FlightEntry{{Group: "3", Seq: 17, Op: "broadcast", State: "started", Sizes: "2"}}, f.Entries)
}

func TestManyGroups(t *testing.T) {
	var entries []map[string]any
	for i := range 3 * maxEntries {
		entries = append(entries, collective(fmt.Sprint(i), 1, "completed"), collective(fmt.Sprint(i), 2, "started"))
	}
	f := parse(t, made(entries...))
	require.Len(t, f.Entries, maxEntries)
	for _, e := range f.Entries {
		require.Equal(t, "started", e.State, "what is not completed matters most")
	}
	require.Equal(t, "0", f.Entries[0].Group)
}

func TestLongThings(t *testing.T) {
	e := collective(strings.Repeat("x", 1000), 1, strings.Repeat("é", 1000))
	e["input_sizes"] = make([][]int, 1000)
	e["input_dtypes"] = strings.Split(strings.Repeat("ab", 1000), "b")
	f := parse(t, made(e))
	require.Len(t, f.Entries, 1)
	require.Less(t, len(fmt.Sprint(f.Entries[0])), 1000)
	require.Equal(t, strings.Repeat("(), ", maxTensors)+"...", f.Entries[0].Sizes)
}

func TestRefused(t *testing.T) {
	for name, c := range map[string]struct{ dump, why string }{
		"empty":            {"", "neither a pickle"},
		"text":             {"hello", "neither a pickle"},
		"no entries":       {`{"version": "2.4"}`, "no list of entries"},
		"entries no list":  {`{"entries": 3}`, "no list of entries"},
		"a list":           {`[]`, "no list of entries"},
		"cut JSON":         {`{"entries": [`, "JSON"},
		"wrong type":       {`{"entries": [{"state": 3}]}`, "cannot unmarshal"},
		"protocol 0":       {"(dp0\n.", "neither a pickle"},
		"protocol 9":       {"\x80\x09N.", "protocol 9"},
		"class":            {"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00idtR.", "opcode 0x63"},
		"reduce":           {"\x80\x02NNR.", "opcode 0x52"},
		"persistent":       {"\x80\x02NQ.", "opcode 0x51"},
		"stack global":     {"\x80\x04NN\x93.", "opcode 0x93"},
		"extension":        {"\x80\x02\x82\x01.", "opcode 0x82"},
		"out of band":      {"\x80\x05\x97.", "opcode 0x97"},
		"no value":         {"\x80\x02.", "one value"},
		"no mark":          {"\x80\x02Nt.", "a mark is missing"},
		"below a mark":     {"\x80\x02]N(a.", "a value is missing"},
		"half a pair":      {"\x80\x02}(Nu.", "pairs without a dict"},
		"items of nothing": {"\x80\x02N(Ne.", "items without a list"},
		"pairs of nothing": {"\x80\x02](NNu.", "pairs without a dict"},
		"memo":             {"\x80\x02h\x05.", "no entry 5"},
		"far memo":         {"\x80\x02Nr\xff\xff\xff\xff.", "comes too early"},
		"cut":              {"\x80\x02X\xff\xff\xff\xffabc", "ends too early"},
		"cut long text":    {"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc", "ends too early"},
		"no stop":          {"\x80\x02N", "ends too early"},
		"a number":         {"\x80\x02K\x01.", "no list of entries"},
		"other dict":       {"\x80\x02}.", "no list of entries"},
		"large":            {strings.Repeat("\x80", maxBytes+1), "at most"},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := parseDump([]byte(c.dump))
			require.ErrorContains(t, err, c.why)
			require.Empty(t, f)
		})
	}
}

func TestTooManyValues(t *testing.T) {
	testkit.Long(t, "it takes two seconds with the race detector")
	_, err := parseDump([]byte("\x80\x02" + strings.Repeat("N", pickle.MaxValues+1) + "."))
	require.ErrorContains(t, err, "more than")
}

// A few kilobytes that mean a lot: lists in themselves, and one long list in many entries.
func TestSharedValues(t *testing.T) {
	long := "](" + strings.Repeat("N", 30_000) + "eq\x01"
	entry := "}(X\x0b\x00\x00\x00input_sizesh\x01X\x05\x00\x00\x00stateX\x00\x00\x00\x00uq\x02"
	f := parse(t, "\x80\x02]q\x00(h\x00"+long+entry+strings.Repeat("h\x02", 30_000)+"e.")
	require.Len(t, f.Entries, maxActive)

	self := parse(t, "\x80\x02}q\x00(X\x07\x00\x00\x00entries](h\x00eu.")
	require.Len(t, self.Entries, 1)
}

// pythons are the interpreters at hand.
func pythons(t *testing.T) []string {
	home, _ := os.UserHomeDir()
	found, _ := filepath.Glob(filepath.Join(home, ".pyenv/versions/3.*/bin/python"))
	if system, err := exec.LookPath("python3"); err == nil {
		found = append(found, system)
	}
	if len(found) == 0 {
		t.Skip("SKIPPED: PICKLES OF PYTHON ARE NOT TESTED: there is no python3")
	}
	return found
}

// TestPicklesOfPython reads what every Python at hand writes with every protocol, by the writer in C and that in
// Python.
func TestPicklesOfPython(t *testing.T) {
	const script = `
import json, pickle, sys
dump = json.load(sys.stdin)
for e in dump["entries"]: e["process_group"] = tuple(e["process_group"]); e["x"] = [1.5, -1, 70000, 2**40, -2**40, 300,
	"é"*300]
out = []
for dumps in (pickle.dumps, pickle._dumps):
    for protocol in range(2, min(pickle.HIGHEST_PROTOCOL, 5) + 1):
        if protocol > 2: dump["bytes"] = [b"x", b"y" * 300]
        else: dump.pop("bytes", None)
        out.append(dumps(dump, protocol=protocol).hex())
json.dump(out, sys.stdout)`
	var entries []map[string]any
	for i := range 300 { // more than fit one-byte memo numbers
		entries = append(entries, collective("0", i+1, "completed"))
	}
	dump := made(append(entries, collective("0", 301, "started"))...)
	want := parse(t, dump)
	found := pythons(t)
	if testing.Short() {
		found = found[len(found)-1:] // a second each
	}
	for _, python := range found {
		t.Run(filepath.Base(filepath.Dir(filepath.Dir(python))), func(t *testing.T) {
			cmd := exec.Command(python, "-c", script)
			cmd.Stdin = strings.NewReader(dump)
			out, err := cmd.Output()
			require.NoError(t, err)
			var pickles []string
			require.NoError(t, json.Unmarshal(out, &pickles))
			require.GreaterOrEqual(t, len(pickles), 4)
			for _, p := range pickles {
				var b []byte
				_, err := fmt.Sscanf(p, "%x", &b)
				require.NoError(t, err)
				require.Equal(t, want, parse(t, string(b)))
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add(file(f, "torch2.15-gloo.pickle"))
	f.Add(file(f, "torch2.15-gloo.json"))
	f.Add([]byte("\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x07entries]\x94}\x94(\x8c\x05stateNuau."))
	f.Add([]byte("\x80\x02}q\x00(X\x07\x00\x00\x00entries](h\x00eu."))
	f.Fuzz(func(t *testing.T, dump []byte) {
		got, err := parseDump(dump)
		require.True(t, err == nil || got.Entries == nil)
		require.LessOrEqual(t, len(got.Entries), maxEntries)
		_, err = json.Marshal(got)
		require.NoError(t, err)
	})
}

func BenchmarkParse(b *testing.B) {
	var entries []map[string]any
	for i := range 2000 {
		entries = append(entries, collective("0", i+1, "completed"))
	}
	dump := []byte(made(entries...))
	b.SetBytes(int64(len(dump)))
	b.ReportAllocs()
	for b.Loop() {
		_, err := parseDump(dump)
		require.NoError(b, err)
	}
}
