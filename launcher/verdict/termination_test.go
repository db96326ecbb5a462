package verdict

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTermination(t *testing.T) {
	rank, code, zero := 3, -11, 0
	failed := Termination{
		Line: "job a failed: rank 3", RunID: "a", Node: "n0", Reason: "worker-failed", ExitCode: 1,
	}
	root := Failure{Rank: 3, NodeName: "n1", ExitCode: -11, At: at(1)}
	failed.Judged(Judge(Evidence{Failures: []Failure{root}, RestartsUsed: 2, MaxRestarts: 2}))
	require.Equal(t, [2]*int{&rank, &code}, [2]*int{failed.RootRank, failed.RootExit})
	require.Equal(t, "job a failed: rank 3\n"+
		`{"run_id":"a","node":"n0","reason":"worker-failed","exit_code":1,"class":"segfault","rule":"first-exit",`+
		`"root_rank":3,"root_node":"n1","root_exit_code":-11,"restarts":2}`+"\n", string(failed.Message()))

	lost := Termination{Reason: "node-lost", ExitCode: 1}
	lost.Judged(Judge(Evidence{Losses: []Loss{{Node: 1, NodeName: "n1"}}}))
	require.Equal(t, "node-lost\n"+
		`{"reason":"node-lost","exit_code":1,"class":"node-lost","rule":"node-lost","root_node":"n1","restarts":0}`+"\n",
		string(lost.Message()))

	first := Termination{Reason: "worker-failed", RootRank: &zero}
	require.Contains(t, string(first.Message()), `"root_rank":0`, "rank 0 is not left out")
	require.Equal(t, "success\n"+`{"reason":"success","exit_code":0,"restarts":0}`+"\n",
		string(Termination{Reason: "success"}.Message()))
}

func FuzzTermination(f *testing.F) {
	f.Add("job a failed", "a", "n0")
	f.Add("two\nlines\x00\xff", "<b>", `"\`)
	f.Add(strings.Repeat("é", 5000), strings.Repeat(`"`, 5000), strings.Repeat("\x1b", 5000))
	f.Fuzz(func(t *testing.T, line, run, node string) {
		in := Termination{Line: line, RunID: run, Node: node, RootNode: node, Reason: run, Signal: node}
		m := in.Message()
		require.LessOrEqual(t, len(m), MaxTermination)
		human, rest, ok := bytes.Cut(m, []byte("\n"))
		require.True(t, ok)
		require.NotContains(t, string(human), "\r")
		var back Termination
		require.NoError(t, json.Unmarshal(rest, &back))
		require.True(t, bytes.HasSuffix(rest, []byte("}\n")))
	})
}
