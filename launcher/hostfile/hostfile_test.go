package hostfile

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]Host{
		"worker-0 slots=4\nworker-1 slots=8\n":          {{"worker-0", 4, 1}, {"worker-1", 8, 2}},
		"# all\r\n\r\n  a\tslots=1  # one\r\nb slots=2": {{"a", 1, 3}, {"b", 2, 4}},
		"\ufeffa:3\nb:1 ifhn=ib0":                       {{"a", 3, 1}, {"b", 1, 2}},
		"a slots=2 max_slots=4\nb max-slots=4\nc":       {{"a", 2, 1}, {"b", 0, 2}, {"c", 0, 3}},
		"a slots=2 gpu=A100":                            {{"a", 2, 1}},
		"10.0.0.1 slots=2\nfe80::1 slots=1\n[::1]:4":    {{"10.0.0.1", 2, 1}, {"fe80::1", 1, 2}, {"::1", 4, 3}},
		"job-worker-0.job-worker.ns.svc:8":              {{"job-worker-0.job-worker.ns.svc", 8, 1}},
	} {
		got, err := Parse(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
}

func TestParseErrors(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                              "no line names a host",
		"# nobody\n\n":                  "no line names a host",
		"a slots=1\nb slot=4":           `line 2: "slot=4" is not understood; write "b slots=4"`,
		"a slots=four":                  `line 1: "slots=four": the number of slots must be from 1 to 4096`,
		"a slots=0":                     "from 1 to 4096",
		"a slots=-1":                    "from 1 to 4096",
		"a slots=4097":                  "from 1 to 4096",
		"a slots=99999999999999999999":  "from 1 to 4096",
		"a:":                            "from 1 to 4096",
		"a:2 slots=2":                   `"a:2" and "slots=2" both give the number of slots`,
		"a slots=2 slots=3":             "both give the number of slots",
		"a slots = 2":                   `"slots" is not understood`,
		"a slots=2 b":                   `"b" is not understood`,
		"aslots=2":                      `"aslots=2" is not a host`,
		"a, slots=2":                    `"a," is not a host`,
		"me@a slots=2":                  `"me@a" is not a host`,
		":2":                            `"" is not a host`,
		"[::1 slots=2":                  "is not a host",
		"[::1]4 slots=2":                "is not a host",
		"wörker slots=1":                "is not a host",
		"a\x1b[2J slots=1":              `"a\x1b[2J" is not a host`,
		"a slots=1\n\nb:2\n a slots=2":  "line 4: host a is on line 1 already",
		strings.Repeat("x", 254) + ":1": "is not a host",
	} {
		_, err := Parse(text)
		require.ErrorContains(t, err, want, text)
		require.NotContains(t, err.Error(), "\n")
	}
}

func TestFind(t *testing.T) {
	t.Parallel()
	hosts := []Host{{Name: "w-0"}, {Name: "w-1.svc.ns"}, {Name: "10.0.0.3"}, {Name: "x.a"}, {Name: "x.b"}}
	for names, want := range map[string]int{
		"w-0": 0, "W-0": 0, "w-0.svc.ns": 0, "w-1": 1, "w-1.svc.ns": 1, "w-1.svc": -1, "w-2": -1, "": -1,
		"node 10.0.0.3": 2, "10": -1, "10.0.0.4": -1,
		"x": -1, "x.b": 4, "x x.a": 3, // one short name of two hosts is nobody's
	} {
		require.Equal(t, want, Find(hosts, strings.Fields(names)...), names)
	}
}

func TestFormat(t *testing.T) {
	t.Parallel()
	require.Equal(t, "a slots=2\nb\n", Format([]Host{{Name: "a", Slots: 2}, {Name: "b"}}))
}

func TestChoose(t *testing.T) {
	t.Parallel()
	nodes := Nodes([]Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 4}, {Name: "c", Slots: 1}})
	require.Equal(t, []Node{{"a", []int{0, 1}}, {"b", []int{0, 1, 2, 3}}, {"c", []int{0}}}, nodes)
	for list, want := range map[string][]Node{
		"b:2,0@a":     {{"a", []int{0, 1}}, {"b", []int{0, 2}}},
		"b:1@b:3@b:1": {{"b", []int{1, 3}}},
		"c":           {{"c", []int{0}}},
	} {
		got, err := Include(nodes, list)
		require.NoError(t, err)
		require.Equal(t, want, got, list)
	}
	got, err := Exclude(nodes, "a@b:0,3")
	require.NoError(t, err)
	require.Equal(t, []Node{{"b", []int{1, 2}}, {"c", []int{0}}}, got)
	require.Equal(t, []int{0, 1, 2, 3}, nodes[1].Slots, "the caller's nodes stay as they are")
	require.Len(t, First(nodes, 2), 2)
	require.Len(t, First(nodes, 9), 3)
	require.Len(t, First(nodes, 0), 3)
}

func TestChooseErrors(t *testing.T) {
	t.Parallel()
	nodes := Nodes([]Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 4}})
	for list, want := range map[string]string{
		"":      `"": there is no such host; there are a, b`,
		"a@":    "no such host",
		"x":     `"x": there is no such host`,
		"a:2":   "host a has no slot 2; it has 0, 1",
		"b:7":   "host b has no slot 7; it has 0 to 3",
		"a:":    `"a:": need numbers of slots`,
		"a:0;1": "need numbers of slots",
		"a:0:1": "no such host",
		"a,b":   "no such host",
	} {
		_, err := Include(nodes, list)
		require.ErrorContains(t, err, want, list)
	}
	_, err := Exclude(nodes, "a@b")
	require.ErrorContains(t, err, "nothing is left")
	_, err = Include(Nodes(make([]Host, 7)), "q")
	require.ErrorContains(t, err, "and 2 more")
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{"a slots=4\nb:2 # x\n\n[::1]:3", "a\tslots=1 max_slots=2",
		"a b", "\ufeff::\n=", "a:1:2"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		hosts, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(Format(hosts))
		require.NoError(t, err)
		require.Len(t, again, len(hosts))
		for i, h := range hosts {
			require.Equal(t, [2]any{h.Name, h.Slots}, [2]any{again[i].Name, again[i].Slots})
			require.Equal(t, i, Find(hosts, h.Name))
		}
	})
}

func FuzzChoose(f *testing.F) {
	for _, seed := range []string{"a@b:0,2", "b:", "@", "a:0@a:1", "[a]:1", "b:-1,+1, 1"} {
		f.Add(seed)
	}
	nodes := Nodes([]Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 4}})
	total := func(nodes []Node) (n int) {
		for _, node := range nodes {
			n += len(node.Slots)
		}
		return n
	}
	f.Fuzz(func(t *testing.T, list string) {
		in, err := Include(nodes, list)
		out, err2 := Exclude(nodes, list)
		if err != nil {
			require.Error(t, err2)
			return
		}
		require.Equal(t, total(nodes), total(in)+total(out), "each slot is in one of them: "+strconv.Quote(list))
	})
}
