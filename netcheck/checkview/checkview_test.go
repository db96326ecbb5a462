package checkview

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

func picture() netcheck.Picture {
	node := func(name string, v netcheck.Verdict) netcheck.NodePicture {
		return netcheck.NodePicture{Node: netcheck.Node{ID: "id-" + name, Name: name}, Verdict: v}
	}
	slow := netcheck.Finding{
		Severity: netcheck.Fatal, Text: "sends at half the rate of the others", Metric: "rate", Value: 472.31, Unit: "Mbit/s",
		Threshold: 705, Median: 940, Peer: "b",
	}
	skipped := netcheck.Finding{Severity: netcheck.Warn, Kind: "rdma.skipped",
		Text: "ib_write_bw ended early: exit status 1"}
	return netcheck.Picture{
		Summary: "1 of 4 nodes is left out", Paths: []string{"path a > b: 400 Mbit/s"}, Median: 940, Line: 705,
		Nodes: []netcheck.NodePicture{
			node("a", netcheck.Verdict{State: netcheck.StateOK, Partners: 1, Findings: []netcheck.Finding{skipped}}),
			node("b", netcheck.Verdict{State: netcheck.StateOK}),
			node("c\x1b[2J", netcheck.Verdict{
				State: netcheck.StateFaulty, Excluded: true, Partners: 3, Reason: "sends slowly", Findings: []netcheck.Finding{
					slow, {Severity: netcheck.Info, Text: "not shown"}, skipped,
				},
			}),
			{Node: netcheck.Node{ID: "id-d"}, Open: true},
		},
		Pairs: []netcheck.Pair{
			{From: 0, To: 1, Mbps: 943.6}, {From: 0, To: 1, Rail: 1, Mbps: 400}, {From: 1, To: 0, Class: netcheck.MTU},
			{From: 1, To: 0, Rail: 1, Mbps: 900}, {From: 2, To: 0, Mbps: 472.31, Class: netcheck.Slow},
			{From: 0, To: 2, Mbps: 1234567, Class: netcheck.Lossy}, {From: 0, To: 3, Torch: true, Mbps: 5},
			{From: 0, To: 4, Mbps: 1}, {From: -1, To: 0, Mbps: 1},
		},
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, Table(&out, picture()))
	require.Equal(t, `1 of 4 nodes is left out
  path a > b: 400 Mbit/s
NODE      VERDICT           SAID BY  REASON
c\x1b[2J  faulty, left out  3 nodes  sends slowly
id-d      being checked     -        -
a         ok                1 node   -
b         ok                -        -
c\x1b[2J: fatal: sends at half the rate of the others (rate 472 Mbit/s, threshold 705, median 940) with b
c\x1b[2J, a: not tested: ib_write_bw ended early: exit status 1
`, out.String())
	require.Error(t, Table(broken{}, picture()))
}

// What could not be found out about a node is a state like any other. Many nodes with the same finding are one line.
func TestStatesOfATable(t *testing.T) {
	p := netcheck.Picture{Summary: "no node is ok"}
	for i, v := range []netcheck.Verdict{
		{State: netcheck.StateNotTested, Reason: "the time was over"},
		{State: netcheck.StateUndecided, Excluded: true, Again: true, Reason: "3 of its 3 tests have failed"},
		{State: netcheck.StateUnreachable, Excluded: true, Reason: "it has not answered"},
		{State: netcheck.StateSlow}, {State: netcheck.StateOK}, {State: netcheck.StateOK},
	} {
		v.Findings = []netcheck.Finding{{Severity: netcheck.Warn, Kind: "gpu.skipped", Text: "devices were not checked"}}
		p.Nodes = append(p.Nodes, netcheck.NodePicture{Node: netcheck.Node{Name: string(rune('a' + i))}, Verdict: v})
	}
	var out bytes.Buffer
	require.NoError(t, Table(&out, p))
	require.Equal(t, `no node is ok
NODE  VERDICT                SAID BY  REASON
b     not decided, waits     -        3 of its 3 tests have failed
c     unreachable, left out  -        it has not answered
a     not tested             -        the time was over
d     slow                   -        -
e     ok                     -        -
f     ok                     -        -
b, c, a, d and 2 more: not tested: devices were not checked
`, out.String())
}

func TestMatrix(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, Matrix(&out, picture()))
	require.Equal(t, `               Mbit/s from \ to     0     1         2  3
                            0 a     -  400*  1234567!  .
                            1 b   mtu     -         .  .
  2 c\x1b[2J (faulty, left out)  472*     .         -  .
         3 id-d (being checked)     .     .         .  -
median 940, line 705 Mbit/s; * below the line, ! segments lost, a word is how a test failed, . not tested
`, out.String())
	p := picture()
	p.Nodes = make([]netcheck.NodePicture, maxMatrix+1)
	require.ErrorContains(t, Matrix(&out, p), "use --svg or --json")
	require.Error(t, Matrix(broken{}, picture()))
}

func TestDirections(t *testing.T) {
	require.Equal(t, []Direction{
		{From: 1, To: 0, Problem: "mtu", Text: "b to a: mtu"},
		{From: 0, To: 1, Mbps: 400, Problem: "below the line", Text: "a to b: 400 Mbit/s"},
		{From: 2, To: 0, Mbps: 472.31, Problem: "below the line", Text: "c\x1b[2J to a: 472 Mbit/s"},
		{From: 0, To: 2, Mbps: 1234567, Problem: "segments lost",
			Text: "a to c\x1b[2J: 1234567 Mbit/s, 0 % of the segments lost"},
	}, Directions(picture()))
	require.Equal(t, []string{"a", "b", "c\x1b[2J", "id-d"}, Names(picture()))
	serious := map[string]int{}
	for _, r := range Rows(picture()) {
		serious[r.Name] = r.Serious
	}
	require.Equal(t, map[string]int{"a": 0, "b": 0, "c\x1b[2J": 4, "id-d": 1}, serious)
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.00123456: "0.00123", 1: "1", 1.001: "1.00", 12.345: "12.3", 999.6: "1000", -4.5678: "-4.57",
	} {
		require.Equal(t, want, number(v))
	}
}

func TestSVG(t *testing.T) {
	var out bytes.Buffer
	p := picture()
	p.Pairs[5].Loss = 0.0123
	require.NoError(t, SVG(&out, p))
	text := out.String()
	requireXML(t, text)
	require.Equal(t, 4, strings.Count(text, "<title>"), "what was tested")
	require.Regexp(t, `<title>b to a: mtu</title><rect [^>]* fill="#000"/><path [^>]* stroke="#fff"`, text)
	require.Regexp(t, `<title>a to b: 400 Mbit/s</title><rect [^>]* fill="#c02020"/>.*>400</text></g>`, text)
	require.Regexp(t, `<title>a to c\\x1b\[2J: 1234567 Mbit/s, 1.23 % of the segments lost</title><rect [^>]* `+
		`fill="#30a850"/>.*>1234G</text><rect [^>]* stroke="#c000c0"`, text, "fast, and lossy")
	for _, legend := range []string{"470 or less", "line 705", "median 940", "failed", "segments lost", "not tested",
		"the node is left out, or waits", "sends", "receives"} {
		require.Contains(t, text, ">"+legend+"</text>")
	}
	require.Equal(t, 3, strings.Count(text, `fill="url(#out)"`), "the row and the column of a node, and the legend")
	require.Equal(t, 2, strings.Count(text, ">a</text>"), "names at rows and columns")
	require.Contains(t, text, `>c\x1b[2J (faulty, left out)</text>`)
	require.Contains(t, text, `>c\x1b[2J: faulty, left out: sends slowly</text>`)
}

func TestLargeSVG(t *testing.T) {
	var out bytes.Buffer
	p := picture()
	p.Nodes = append(p.Nodes, make([]netcheck.NodePicture, smallFrom)...)
	for i := range p.Nodes[4:] {
		p.Nodes[4+i].Verdict = netcheck.Verdict{State: netcheck.StateNotTested, Reason: strings.Repeat("long ", 100)}
	}
	p.Nodes[0].Node.Name = "<script>&\x00\xff"
	p.Summary = strings.Repeat("long ", 400)
	require.NoError(t, SVG(&out, p))
	requireXML(t, out.String())
	require.NotContains(t, out.String(), "<script>")
	require.Regexp(t, `segments lost</title><rect [^>]* fill="#c000c0"/></g>`, out.String(), "there is no room for a sign")
	require.Contains(t, out.String(), ">and more: the table has all of them</text>")
	require.Error(t, SVG(broken{}, picture()))
	out.Reset()
	require.NoError(t, SVG(&out, netcheck.Picture{}))
	requireXML(t, out.String())
	require.Contains(t, out.String(), "no rate was measured")
}

func requireXML(t *testing.T, text string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(text)); ; {
		if _, err := d.Token(); err == io.EOF {
			return
		} else {
			require.NoError(t, err)
		}
	}
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("broken") }
