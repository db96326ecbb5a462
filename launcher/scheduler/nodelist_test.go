package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNodes(t *testing.T) {
	for list, want := range map[string]string{
		"a":                         "a",
		"a,b.example.com":           "a b.example.com",
		"gpu[1-3,7]":                "gpu1 gpu2 gpu3 gpu7",
		"gpu[008-010,1]x,login-1":   "gpu008x gpu009x gpu010x gpu1x login-1",
		"r[0-1]n[8-9]":              "r0n8 r0n9 r1n8 r1n9",
		"[1-2]":                     "1 2",
		"n[9-11]":                   "n9 n10 n11",
		"n[098-101]":                "n098 n099 n100 n101",
		"ip-10-0-0-[1,3]":           "ip-10-0-0-1 ip-10-0-0-3",
		"a[1],a[2-2],a[000000003]":  "a1 a2 a000000003",
		"p-0[1-2]-[a,b]-1 or wrong": "",
		"a[1-2":                     "",
		"a]":                        "",
		"a[1]]":                     "",
		"a[[1]]":                    "",
		"a[2-1]":                    "",
		"a[1-]":                     "",
		"a[-1]":                     "",
		"a[]":                       "",
		"a[1,]":                     "",
		"a[+1]":                     "",
		"a[x]":                      "",
		"a,,b":                      "",
		"":                          "",
		"a b":                       "",
		"a[1000000000]":             "",
		"a[0-100000]":               "",
		"a[0-999]b[0-999]":          "",
		"a[0-99999],b":              "",
	} {
		got, err := nodes(list)
		if want == "" {
			require.Error(t, err, list)
			continue
		}
		require.NoError(t, err, list)
		require.Equal(t, strings.Fields(want), got, list)
	}
}

func FuzzNodes(f *testing.F) {
	for _, seed := range []string{"a", "gpu[1-3,007],b", "r[0-1]n[0-9]x", "a[1-2", "a]", "[[", "a[9-1]",
		",", "a[0-9999]"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, list string) {
		names, err := nodes(list)
		if err != nil {
			require.NotEmpty(t, err.Error())
			return
		}
		require.NotEmpty(t, names)
		require.LessOrEqual(t, len(names), maxNodes)
		require.False(t, slices.ContainsFunc(names, func(n string) bool { return n == "" || strings.Contains(n, "[") }))
		if len(names) < 1000 { // a plain list stands for itself
			again, err := nodes(strings.Join(names, ","))
			require.NoError(t, err)
			require.Equal(t, names, again)
		}
	})
}

// Whatever the variables hold: a message or facts that fit, never a panic.
func FuzzDetect(f *testing.F) {
	f.Add("login1", 0, strings.Join(vars(slurmStep), "\x00"))
	f.Add("h", 2, strings.Join(vars(pyTorchJob), "\x00"))
	f.Add("tj-worker-1", 0, strings.Join(vars(volcanoJob), "\x00"))
	f.Add("job-w-0-3", 4, indexed+"\x00"+podHosts)
	f.Add("j-worker-1", 0, mpiWorker+"\x00"+mpiHosts)
	f.Add("x", 0, strings.Join(vars(sky), "\x00")+"\x00SKYPILOT_NODE_IPS=1 2")
	f.Add("j-worker-2", 0, strings.Join(vars(msJob), "\x00")+"\x00MS_ROLE=MS_WORKER")
	f.Add("h", 0, strings.Join(vars(msJob), "\x00")+"\x00MS_ROLE=MS_PSERVER\x00MS_NODE_ID=j-ps-1")
	f.Add("x", 0, `SM_HOSTS=["a"]`+"\x00SM_CURRENT_HOST=a")
	f.Fuzz(func(t *testing.T, host string, count int, lines string) {
		s := system(host, count, strings.Split(lines, "\x00")...)
		for _, name := range append([]string{Auto}, Names()...) {
			facts, err := Detect(name, s)
			if err != nil || facts.Name == "" {
				require.Equal(t, Facts{}, facts)
				continue
			}
			require.NotEmpty(t, facts.MasterAddr, name)
			require.NotEmpty(t, facts.From, name)
			require.GreaterOrEqual(t, facts.NodeRank, -1)
			require.True(t, facts.NodeRank >= 0 || facts.Share != "")
			if facts.Name != dlroverName {
				require.True(t, facts.Nodes == 0 || facts.NodeRank < facts.Nodes, "%s: %+v", name, facts)
				require.True(t, facts.MasterPort > 0 && facts.MasterPort < 65536, "%s: %+v", name, facts)
			}
			require.True(t, slices.IsSorted(facts.From), fmt.Sprint(facts.From))
		}
	})
}
