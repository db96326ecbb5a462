package slow

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/job"
	"dlrover-run/internal/testkit"
)

// ofRanks is ofNodes with two ranks on each node.
func ofRanks(nodes int, found ...hang.Slowed) *Judge {
	j := ofNodes(nodes, found...)
	j.nodes = make([]node, nodes)
	for i := range j.nodes {
		j.nodes[i].ranks = make([]rank, 2)
		j.world.Nodes[i].Name = fmt.Sprint("n", i)
	}
	return j
}

func slowed(node int, share float64) hang.Slowed {
	return hang.Slowed{GroupRank: node, Node: fmt.Sprint("n", node), Ranks: fmt.Sprint(2*node + 1), Share: share,
		Doing: computing}
}

func facts(of string, value float64) *hang.Report {
	return &hang.Report{Facts: []hang.Fact{{Kind: "link.speed", Of: of, Value: value}, {Kind: "cpu.count", Value: 8}}}
}

func TestWhichNodesAreCompared(t *testing.T) {
	at, smaller, missed := noon.Add(checkAfter), ofRanks(3, slowed(1, 0.3)), ofRanks(3, slowed(1, 0.3))
	smaller.nodes[2].ranks, missed.found[0].missed = nil, 1
	for name, c := range map[string]struct {
		judge *Judge
		want  []int
	}{
		"nobody is slow":             {ofRanks(3), nil},
		"the next node":              {ofRanks(3, slowed(1, 0.3)), []int{1, 2}},
		"after the last the first":   {ofRanks(3, slowed(2, 0.3)), []int{2, 0}},
		"the slowest":                {ofRanks(3, slowed(1, 0.3), slowed(2, 0.4)), []int{2, 0}},
		"not with a slow one":        {ofRanks(4, slowed(1, 0.4), slowed(2, 0.3)), []int{1, 3}},
		"all are slow":               {ofRanks(2, slowed(0, 0.3), slowed(1, 0.2)), []int{0}},
		"there is only one":          {ofRanks(1, slowed(0, 0.3)), []int{0}},
		"one with as many ranks":     {smaller, []int{1, 0}},
		"not slow any more, perhaps": {missed, nil},
	} {
		var k Checks
		require.Nil(t, k.Next(at.Add(-1), c.judge), "%s: it may pass", name)
		require.Equal(t, c.want, k.Next(at, c.judge), name)
	}
}

func TestEachFindingIsExaminedOnce(t *testing.T) {
	var k Checks
	j, at := ofRanks(4, slowed(1, 0.3), slowed(2, 0.2)), noon.Add(checkAfter)
	require.Equal(t, []int{1, 3}, k.Next(at, j))
	require.Nil(t, k.Next(at.Add(time.Hour), j), "it has not ended")
	k.Heard(0, facts("eth0", 1))
	k.Heard(1, &hang.Report{})
	k.Heard(1, facts("eth0", 10))
	require.Nil(t, k.Done(at, j))
	k.Heard(3, facts("eth0", 100))
	s := k.Done(at, j)
	require.Equal(t, "rank 3 (node 1 n1): eth0 runs at 10 Gb/s, 100 at node 3 n3", s.CheckedLine())
	require.Equal(t, s.Checked, j.found[0].Checked)
	require.Regexp(t, `% of every step; eth0 runs at 10 Gb/s, 100 at node 3 n3$`, j.found[0].Line())
	require.Nil(t, k.Done(at, j), "once")
	require.Nil(t, k.Next(at.Add(nextCheck-1), j))
	require.Equal(t, []int{2, 3}, k.Next(at.Add(nextCheck), j), "the other one")
	k.Heard(2, facts("eth0", 100))
	k.Heard(3, facts("eth0", 100))
	require.Equal(t, "nothing differs from node 3 n3 (CPU, links)", k.Done(at.Add(nextCheck), j).Checked)
	require.Nil(t, k.Next(at.Add(time.Hour), j), "both were")
	j.found = append(j.found[:1], finding{Slowed: slowed(2, 0.2)})
	require.Equal(t, []int{2, 3}, k.Next(at.Add(time.Hour), j), "it is slow again")
}

func TestNodesThatDoNotAnswer(t *testing.T) {
	at := noon.Add(checkAfter)
	for name, c := range map[string]struct {
		answers int
		want    string
	}{
		"none":      {-1, "its node has not answered within 45 s"},
		"the other": {2, "its node has not answered within 45 s"},
		"the suspect": {1, "nothing is unusual on its node (CPU, links); node 2 n2 has not answered, so its node was " +
			"compared with none"},
	} {
		var k Checks
		j := ofRanks(3, slowed(1, 0.3))
		require.Equal(t, []int{1, 2}, k.Next(at, j))
		k.Heard(c.answers, facts("eth0", 10))
		require.Nil(t, k.Done(at.Add(answerTime-1), j), name)
		require.Equal(t, c.want, k.Done(at.Add(answerTime), j).Checked, name)
	}
	var k Checks
	j := ofRanks(3, slowed(1, 0.3))
	require.NotNil(t, k.Next(at, j))
	j.world.Epoch = job.EpochID{Round: 2}
	k.Heard(1, facts("eth0", 10))
	require.Nil(t, k.Done(at.Add(answerTime), j), "its workers are gone")
	require.NotNil(t, k.Next(at.Add(nextCheck), ofRanks(3, slowed(1, 0.3))))
}

// With Links both ends are told of each other, once, and the rates that each has received are said.
func TestLinksAreTested(t *testing.T) {
	at := noon.Add(checkAfter)
	begin := func(links bool, ends ...string) (*Checks, *Judge, []hang.Ask) {
		k, j := &Checks{Links: links}, ofRanks(3, slowed(1, 0.3))
		for i, node := range k.Next(at, j) {
			r := facts("eth0", 10)
			if ends[i] != "" {
				r.End = json.RawMessage(ends[i])
			}
			k.Heard(node, r)
		}
		return k, j, k.Test(at)
	}
	received := func(rates ...float64) *hang.Report {
		r := &hang.Report{}
		for i, v := range rates {
			r.Facts = append(r.Facts, is("test.received", fmt.Sprint("eth", i), v))
		}
		return r
	}
	const same = "nothing differs from node 2 n2 (CPU, links); "
	k, j, asks := begin(true, `"a"`, `"b"`)
	require.Equal(t, []hang.Ask{
		{What: hang.AskLink, To: "n1", Nodes: []int{1}, Link: &hang.Link{Peer: json.RawMessage(`"b"`)}},
		{What: hang.AskLink, To: "n2", Nodes: []int{2}, Link: &hang.Link{Serve: true, Peer: json.RawMessage(`"a"`)}},
	}, asks)
	require.Empty(t, k.Test(at))
	k.Heard(1, received(9.4, 9.3))
	require.Nil(t, k.Done(at.Add(testTime-1), j))
	k.Heard(2, received(3.1))
	require.Equal(t, same+"eth0 sends 3.1 Gb/s to node 2 n2, and gets 9.4", k.Done(at, j).Checked)

	k, j, _ = begin(true, `"a"`, `"b"`)
	k.Heard(1, received(9.4))
	k.Heard(2, &hang.Report{Facts: []hang.Fact{fault("test.failed", "refused: by a firewall", false)}})
	require.Equal(t, same+"the test of its links has failed: refused: by a firewall", k.Done(at, j).Checked)

	k, j, _ = begin(true, `"a"`, `"b"`)
	require.Equal(t, same+"its links were not tested", k.Done(at.Add(testTime), j).Checked, "they are silent")
	k, j, asks = begin(true, `"a"`, "")
	require.Empty(t, asks, "one cannot listen")
	require.Equal(t, same+"its links were not tested", k.Done(at, j).Checked)
	k, j, asks = begin(false, `"a"`, `"b"`)
	require.Empty(t, asks, "nobody wants it")
	require.Equal(t, "nothing differs from node 2 n2 (CPU, links)", k.Done(at, j).Checked)
}

// A later window keeps what is known of a finding.
func TestWhatWasFoundIsKept(t *testing.T) {
	s := newJob(testkit.Seed(t, "SLOW_SEED"), 2, 4, async, 0.1)
	s.slow = at(600, 2, 5)
	s.run(s.begin(t, 600) + within(0.2))
	require.Len(t, s.judge.found, 1)
	s.judge.found[0].Checked, s.judge.found[0].examined = "hot", true
	s.run(s.now + 60)
	require.Len(t, s.judge.found, 1)
	require.Equal(t, "hot", s.judge.Slowed()[0].Checked)
	require.True(t, s.judge.found[0].examined)
}

// is is a fact with one value, or a fault.
func is(kind, of string, value float64) hang.Fact { return hang.Fact{Kind: kind, Of: of, Value: value} }
func fault(kind, text string, fatal bool) hang.Fact {
	return hang.Fact{Kind: kind, Fault: text, Fatal: fatal}
}

func TestDifferences(t *testing.T) {
	for name, c := range map[string]struct {
		own, other []hang.Fact
		alone      bool
		want       []string
	}{
		"less by a tenth": {[]hang.Fact{is("device.clock", "GPU 1", 1780)}, []hang.Fact{is("device.clock", "GPU 1", 1980)},
			false, []string{"GPU 1 runs at 1780 MHz, 1980 at node 0 n0"}},
		"one link less": {[]hang.Fact{is("device.links", "GPU 1", 17)}, []hang.Fact{is("device.links", "GPU 1", 18)},
			false, []string{"GPU 1 has 17 active links, 18 at node 0 n0"}},
		"hardly less":    {[]hang.Fact{is("device.clock", "", 1790)}, []hang.Fact{is("device.clock", "", 1980)}, false, nil},
		"better":         {[]hang.Fact{is("link.mtu", "", 9000)}, []hang.Fact{is("link.mtu", "", 1500)}, false, nil},
		"unknown there":  {[]hang.Fact{is("link.speed", "", 10)}, []hang.Fact{is("link.speed", "", 0)}, false, nil},
		"nothing there":  {[]hang.Fact{is("link.speed", "", 10)}, nil, false, nil},
		"a kind to come": {[]hang.Fact{is("moon.phase", "", 1)}, []hang.Fact{is("moon.phase", "", 9)}, false, nil},
		"more by a tenth": {[]hang.Fact{is("cpu.waiting", "rank 5", 11)}, []hang.Fact{is("cpu.waiting", "rank 0", 1)}, false,
			[]string{"rank 5 waited for a CPU for 11 % of the time, 1 at node 0 n0"}},
		"hardly more": {[]hang.Fact{is("cpu.waiting", "rank 5", 10)}, []hang.Fact{is("cpu.waiting", "rank 1", 1)}, false,
			nil},
		"of the same name": {[]hang.Fact{is("link.speed", "eth1", 100), is("link.speed", "eth0", 10)},
			[]hang.Fact{is("link.speed", "eth0", 10), is("link.speed", "eth1", 100)}, false, nil},
		"of the same number": {[]hang.Fact{is("cpu.quota", "rank 4", 50), is("cpu.quota", "rank 5", 0)},
			[]hang.Fact{is("cpu.quota", "rank 0", 50), is("cpu.quota", "rank 1", 0)}, false, nil},
		"the worst of several": {
			[]hang.Fact{is("cpu.stopped", "rank 4", 30), is("cpu.stopped", "rank 5", 50), is("cpu.stopped", "rank 6", 5)},
			[]hang.Fact{is("cpu.stopped", "rank 0", 0), is("cpu.stopped", "rank 1", 0)}, false,
			[]string{"rank 5 was stopped, by a signal or a debugger, for 50 % of the time, 0 at node 0 n0 (and 1 more)"}},
		"those that explain the most come first": {
			[]hang.Fact{is("link.resent", "TCP", 1), is("cpu.count", "it", 4), fault("link.x", "lossy", false),
				fault("device.x", "lost", true)},
			[]hang.Fact{is("link.resent", "TCP", 0), is("cpu.count", "it", 64)}, false,
			[]string{"lost", "it may use 4 CPUs, 64 at node 0 n0", "lossy",
				"TCP sent 1 % of its segments again, 0 at node 0 n0"}},
		"both have a fault": {[]hang.Fact{fault("link.x", "lossy", false)}, []hang.Fact{fault("link.x", "bad", false)}, false,
			nil},
		"it has more of them": {
			[]hang.Fact{fault("link.x", "a", false), fault("link.x", "b", false), fault("link.x", "c", false)},
			[]hang.Fact{fault("link.x", "d", false)}, false, []string{"a (and 1 more)"}},
		"alone it is compared with itself": {
			[]hang.Fact{is("device.clock", "GPU 0", 1980), is("device.clock", "GPU 1", 900), is("device.clock", "GPU 2", 1980),
				is("cpu.count", "it", 1), fault("link.x", "lossy", false)}, nil, true,
			[]string{"GPU 1 runs at 900 MHz, 1980 is usual on its node", "lossy"}},
	} {
		require.Equal(t, c.want, differences(kinds(c.own), kinds(c.other), c.alone, "node 0 n0"), name)
	}
}

// All kinds of figures are said in a sentence that has the part, and both figures with two digits.
func TestEveryFigureIsSaid(t *testing.T) {
	for _, k := range figures {
		own, other := []hang.Fact{is(k.kind, "PART", 99.4)}, []hang.Fact{is(k.kind, "PART", 0.125)}
		if k.all == 0 {
			own, other = other, own
		}
		lines := differences(kinds(own), kinds(other), false, "node 0 n0")
		require.Len(t, lines, 1, k.kind)
		require.Regexp(t, `^PART.* (99|0\.12).*, (99|0\.12) at node 0 n0$`, lines[0])
		require.NotEqual(t, "()", compared(kinds(own), nil, true), k.kind)
	}
}

func FuzzResult(f *testing.F) {
	f.Add(`[{"kind":"link.speed","of":"eth0","value":10}]`, `[{"kind":"link.speed","of":"eth1","value":100}]`)
	f.Add(`[{"kind":"cpu.quota","fault":"x","value":1e308},{"kind":"cpu.quota","value":-1e308}]`, `[{"kind":"cpu.quota"}]`)
	f.Add(`[{"kind":"a","fault":"x"},{"kind":"b","fault":"x"},{"fault":"x"}]`, ``)
	f.Fuzz(func(t *testing.T, own, other string) {
		k := check{slowed: slowed(1, 0.3), other: "node 0 n0"}
		_ = json.Unmarshal([]byte(own), &k.facts[0])
		_ = json.Unmarshal([]byte(other), &k.facts[1])
		text := k.result(false)
		require.NotEmpty(t, text)
		require.LessOrEqual(t, len(text), maxResult)
		require.NotContains(t, text, "NaN")
	})
}
