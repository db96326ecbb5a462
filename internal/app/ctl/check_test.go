package ctl

import (
	"encoding/json"
	"encoding/xml"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
	"dlrover-run/netcheck/node"
	"dlrover-run/rendezvous"
)

// gated brings a launcher into a run of one node that is to be checked first, by itself.
func (d *served) gated(run, id string) {
	d.t.Helper()
	spec := netcheck.Spec{Level: netcheck.LevelLocal, TTL: netcheck.DefaultTTL, Timeout: netcheck.DefaultTimeout}
	require.NoError(d.t, d.hub.Join(d.t.Context(), run, rendezvous.Join{
		Node: rendezvous.Node{
			ID: id, Name: id, Rank: -1, Addr: "10.0.0.1", Slots: 2,
			Can: []rendezvous.Ability{rendezvous.CanGate, rendezvous.CanNotice},
		},
		Params: rendezvous.Params{Min: 1, Max: 1, Gate: true, Check: spec.String()},
	}))
}

// checked is a run of one node, whose GPU has failed its check.
func (d *served) checked(run, id string) {
	d.t.Helper()
	d.gated(run, id)
	v, err := node.Run(d.t.Context(), node.Config{
		Run: run, Transport: d.checks, Node: netcheck.Node{
			ID: id, Name: id, Addr: "10.0.0.1", Findings: []netcheck.Finding{{
				Check: "nvml", Kind: "gpu.lost", Severity: netcheck.Fatal, Entity: "GPU 3", Text: "GPU 3 is lost \x1b[2J\u202e",
			}},
		},
	})
	require.NoError(d.t, err)
	require.True(d.t, v.Excluded)
}

func TestCheck(t *testing.T) {
	d := newServed(t)
	d.checked("job", "gpu-01")
	out := d.ok("check", "job")
	require.Regexp(t, `(?m)^NODE +VERDICT +SAID BY +REASON$`, out)
	require.Regexp(t, `(?m)^gpu-01 +faulty, left out +- +GPU 3 is lost`, out)
	require.Regexp(t, `(?m)^gpu-01: fatal: GPU 3 is lost`, out)

	var p netcheck.Picture
	require.NoError(t, json.Unmarshal([]byte(d.ok("check", "job", "--json")), &p))
	require.Len(t, p.Nodes, 1)
	require.Equal(t, netcheck.StateFaulty, p.Nodes[0].Verdict.State)
	require.NotEqual(t, "gpu-01", p.Nodes[0].Node.ID, "the ID is what proves who a launcher is")

	require.Regexp(t, `(?m)^ +0 gpu-01 \(faulty, left out\) +- *$`, d.ok("check", "--matrix", "job"))

	svg := xml.NewDecoder(strings.NewReader(d.ok("check", "job", "--svg")))
	first, err := svg.Token()
	require.NoError(t, err)
	require.Equal(t, "svg", first.(xml.StartElement).Name.Local)
	for err == nil {
		_, err = svg.Token()
	}
	require.ErrorIs(t, err, io.EOF)
}

// A node that has not yet said anything is being checked.
func TestCheckThatGoesOn(t *testing.T) {
	d := newServed(t)
	d.gated("job", "gpu-01")
	r := d.ctl("check", "job")
	require.Zero(t, r.code, r.err)
}

func TestCheckErrors(t *testing.T) {
	d := newServed(t)
	d.fails(1, `keeps no run "jib"; it keeps none`, "check", "jib")
	d.join("job", "n0", 2)
	d.fails(1, `keeps no run "jib"; it keeps job`, "check", "jib", "--json")
	d.fails(1, `run "job" has made no check: none of its launchers was given --network-check`, "check", "job")
	const oneView = "--json, --matrix and --svg are different ways to print: use one of them"
	d.fails(2, oneView, "check", "job", "--json", "--svg")
	d.fails(2, oneView, "check", "--matrix", "--svg", "job")
	d.fails(2, oneView, "check", "job", "--json", "--matrix", "--svg")
	d.fails(2, "check takes RUN, but was given nothing", "check")
	d.fails(2, `check takes RUN, but was given "a" "b"`, "check", "a", "b")
	d.fails(2, "check: unknown option --table", "check", "job", "--table")
	d.fails(2, "status: unknown option --matrix", "status", "job", "--matrix")
}
