package main

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// masters100 is a run of 100 steps whose master is killed three times.
func masters100() (rs []record, hs []handover) {
	rs = append(rs, start(0, "node-a", 0, 2, 1, 0, ""), start(1, "node-b", 1, 2, 1, 0, ""))
	for rank := range 4 {
		rs = append(rs, record{Event: evUp, Rank: rank})
	}
	for n := range 100 {
		rs = append(rs, step(10*n, 11, 4, n+1, 0.7-0.006*float64(n)))
	}
	for i, killed := range []string{"master-1", "master-2", "master-3"} {
		next, at, step := fmt.Sprint("master-", i+2), 200*(i+1), 20*(i+1)
		hs = append(hs, handover{killed: killed, next: next, at: after(at), served: after(at + 20), whole: after(at + 50),
			stepAtKill: step, stepWhole: step + 5})
	}
	return append(rs, record{Event: evTrained, Step: 100}), hs
}

func TestMasterChecks(t *testing.T) {
	type run = func(rs []record, hs []handover) ([]record, []handover)
	for want, change := range map[string]run{
		"": func(rs []record, hs []handover) ([]record, []handover) { return rs, hs },
		"another master served after each kill: master-1, master-2": func(rs []record, hs []handover) ([]record, []handover) {
			return rs, hs[:2]
		},
		"no rank restarted: 2 launchers have started 5 workers": func(rs []record, hs []handover) ([]record, []handover) {
			return append(rs, record{Event: evUp}), hs
		},
		"no rank restarted: 3 launchers have started 4 workers": func(rs []record, hs []handover) ([]record, []handover) {
			return append(rs, start(900, "node-a", 0, 2, 1, 1, "")), hs
		},
		"the steps went on: none is missing, and none was done twice": func(rs []record,
			hs []handover) ([]record, []handover) {
			return slices.Insert(rs, 60, rs[59]), hs
		},
		"99 of 100 steps are done": func(rs []record, hs []handover) ([]record, []handover) {
			rs[len(rs)-1].Step = 99
			return rs, hs
		},
	} {
		rs, hs := change(masters100())
		var failed []string
		for _, c := range masterChecks(rs, hs, plan{steps: 100}, nil) {
			if !c.ok {
				failed = append(failed, c.what)
			}
		}
		if want == "" {
			require.Empty(t, failed)
		} else {
			require.Equal(t, []string{want}, failed)
		}
	}
	var out bytes.Buffer
	s := newScenario(t.Context(), &screen{w: &out}, plan{steps: 100}, nil)
	require.EqualError(t, s.verdict([]check{{true, "a"}, {false, "b"}}), "1 of the checks above")
	require.Equal(t, "ok      a\nFAILED  b\n", out.String())
}

func TestHandoverTable(t *testing.T) {
	_, hs := masters100()
	require.Contains(t, handoverTable(hs, began),
		"  0.20 s  master-1  master-2        20 ms      50 ms        20        25\n")
}

func TestWithoutEtcd(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	require.ErrorContains(t, playMasters(t.Context(), &screen{}, "", "", plan{}), "install Debian's etcd-server")
}
