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
	return netcheck.Picture{
		Summary: "1 of 4 nodes is left out", Paths: []string{"path a > b: 400 Mbit/s"}, Median: 940, Line: 705,
		Nodes: []netcheck.NodePicture{
			node("a", netcheck.Verdict{State: netcheck.StateOK, Partners: 1}),
			node("b", netcheck.Verdict{State: netcheck.StateOK}),
			node("c\x1b[2J", netcheck.Verdict{
				State: netcheck.StateFaulty, Excluded: true, Partners: 3, Reason: "sends slowly", Findings: []netcheck.Finding{
					slow, {Severity: netcheck.Info, Text: "not shown"},
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
`, out.String())
	require.Error(t, Table(broken{}, picture()))
}

func TestMatrix(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, Matrix(&out, picture()))
	require.Equal(t, `  Mbit/s from \ to     0     1        2  3
               0 a     -  400*  1234567  .
               1 b   mtu     -        .  .
        2 c\x1b[2J  472*     .        -  .
            3 id-d     .     .        .  -
median 940, line 705 Mbit/s; * below the line, a word is how a test failed, . not tested
`, out.String())
	p := picture()
	p.Nodes = make([]netcheck.NodePicture, MaxMatrix+1)
	require.ErrorContains(t, Matrix(&out, p), "use --svg or --json")
	require.Error(t, Matrix(broken{}, picture()))
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.00123456: "0.00123", 1: "1", 1.001: "1.00", 12.345: "12.3", 999.6: "1000", -4.5678: "-4.57",
	} {
		require.Equal(t, want, Number(v))
	}
}

func TestSVG(t *testing.T) {
	var out bytes.Buffer
	p := picture()
	require.NoError(t, SVG(&out, p))
	text := out.String()
	require.Equal(t, 1+4, strings.Count(text, "<rect"), "the ground, and what was tested")
	require.Contains(t, text, `fill="#000000"><title>b to a: mtu</title>`)
	require.Contains(t, text, `fill="#c80040"><title>a to b: 400 Mbit/s</title>`, "below half of the median")
	require.Contains(t, text, `fill="#00b440"><title>a to c\x1b[2J: 1234567 Mbit/s</title>`)
	requireXML(t, text)
	p.Nodes = append(p.Nodes, make([]netcheck.NodePicture, smallFrom)...)
	p.Nodes[0].Node.Name = "<script>&\x00\xff"
	out.Reset()
	require.NoError(t, SVG(&out, p))
	requireXML(t, out.String())
	require.NotContains(t, out.String(), "<script>")
	require.Error(t, SVG(broken{}, picture()))
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
