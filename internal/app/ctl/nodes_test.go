package ctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/app/service"
)

// servedWithMarks is a daemon that keeps what is known of nodes.
func servedWithMarks(t *testing.T) (*served, *marks.Manager) { return servedBy(t, marks.Config{}) }

func servedBy(t *testing.T, cfg marks.Config) (*served, *marks.Manager) {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	cfg.Log = quiet
	k, err := marks.Open(cfg)
	require.NoError(t, err)
	s, err := service.New(service.Config{Token: secret, Log: quiet,
		Global: map[string]http.Handler{"nodes": k.Handler()}})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { require.NoError(t, k.Close()); s.Close(time.Second); <-done })
	env := map[string]string{"DLROVER_MASTER_ADDR": l.Addr().String(), "DLROVER_TOKEN": secret, "USER": "ann"}
	return &served{t: t, hub: s.Hub, checks: s.Checks, hangs: s.Hangs, addr: l.Addr().String(), env: env}, k
}

func TestMachines(t *testing.T) {
	d, k := servedWithMarks(t)
	require.Contains(t, d.ok("nodes"), "knows nothing against any node")
	k.Size("r", []string{"gpu-01", "gpu-02", "gpu-03", "gpu-04"})
	k.Find(nodehealth.Finding{Node: "gpu-01", Run: "r", Kind: nodehealth.CheckFailed, Text: "its link is slow"})
	k.Find(nodehealth.Finding{Node: "gpu-02", Run: "r", Kind: nodehealth.Hang, Text: "rank 2 hung"})
	for range 3 {
		k.Failed("r", "gpu-03", "exit code 1")
	}
	k.Find(nodehealth.Finding{Node: "gpu-04", Run: "r", Kind: nodehealth.ECC, Text: "row 7"})
	k.Find(nodehealth.Finding{Node: "gpu-05", Run: "r", Kind: nodehealth.ECC, Text: "row 8"})
	require.Equal(t, "node gpu-07 is marked; to end it: dlroverctl node clear gpu-07\n",
		d.ok("node", "mark", "gpu-07", "--reason", "smoke"))

	out := d.ok("nodes")
	for _, row := range []string{
		`gpu-01 +check-failed +\d+s +in 3h59m +policy +1 +- +a check of the node has failed: its link is slow`,
		`gpu-02 +- +- +- +- +1 +- +\d+s ago: hang: rank 2 hung`,
		`gpu-03 +suspect +- +- +- +1 +- +\d+s ago: repeated-failure: to blame for 3 of the last 3 failures`,
		`gpu-04 +ecc `,
		`gpu-05 +held back +\d+s +- +- +1 +- +2 nodes are marked .*; ecc: row 8`,
		`gpu-07 +operator +\d+s +when cleared +dlroverctl on .+ as ann +0 +- +smoke`,
	} {
		require.Regexp(t, row, out)
	}
	var known marks.Known
	require.NoError(t, json.Unmarshal([]byte(d.ok("nodes", "--json")), &known))
	require.Equal(t, []string{"gpu-01", "gpu-04", "gpu-07"}, known.Avoid)
	require.Len(t, known.Nodes, 6)

	require.Equal(t, "node gpu-07 is cleared\n", d.ok("node", "clear", "gpu-07", "--reason=repaired"))
	require.NotContains(t, d.ok("nodes"), "gpu-07")
	d.fails(1, "nothing is known of node \"gpu-07\"", "node", "clear", "gpu-07")
	d.fails(2, "needs --reason=TEXT", "node", "mark", "gpu-07")
	d.fails(1, "need a name", "node", "mark", "a\nb", "--reason=x")
	d.fails(2, "node clear takes NODE", "node", "clear")
	d.fails(2, `node takes mark\|clear, but was given "burn"`, "node", "burn", "gpu-07")
	d.fails(2, `node takes mark\|clear, but was given nothing`, "node")

	d.join("r", "n0", 1)
	require.Regexp(t, "n0 ", d.ok("nodes", "r"), "the nodes of a run are listed as before")
}

func TestADaemonThatKeepsNothingOfMachines(t *testing.T) {
	d := newServed(t)
	d.fails(1, "start dlrover-master with --data-dir or --node-action", "nodes")
	d.fails(1, "start dlrover-master with --data-dir", "node", "mark", "n", "--reason=x")
}

// stubborn is an Actor to whom one machine is not known.
type stubborn struct{}

func (stubborn) Apply(_ context.Context, m nodehealth.Mark) error {
	switch m.Node {
	case "gpu-08":
		return errors.New("the cluster is away")
	case "gpu-09":
		return fmt.Errorf("no such node: %w", marks.ErrFinal)
	}
	return nil
}

func (stubborn) Remove(context.Context, nodehealth.Mark) error {
	return errors.New("the cluster is away")
}

func (stubborn) Sweep(context.Context, func(string) bool) error {
	return errors.New("no right to look")
}

func TestWhatIsDoneToMachines(t *testing.T) {
	d, k := servedBy(t, marks.Config{Actor: stubborn{}, Action: "taint"})
	for _, name := range []string{"gpu-06", "gpu-07", "gpu-08", "gpu-09"} {
		require.NoError(t, k.Mark(t.Context(), name, "me", "smoke"))
	}
	shows := func(pattern string) {
		t.Helper()
		require.Eventually(t, func() bool {
			return regexp.MustCompile(pattern).MatchString(d.ok("nodes"))
		}, 20*time.Second, 20*time.Millisecond, pattern)
	}
	shows(`gpu-07 +operator .* taint: applied +smoke`)
	_, err := k.Clear(t.Context(), "gpu-07", "me", "")
	require.NoError(t, err)
	for _, pattern := range []string{
		`gpu-06 +operator .* taint: applied +smoke`,
		`gpu-07 +- .* unmark: pending`,
		`gpu-08 +operator .* taint: pending +smoke`,
		`gpu-09 +operator .* taint: given-up +smoke`,
		`gpu-08: mark is pending: the cluster is away`,
		`gpu-09: mark is given-up: no such node`,
		`not done: marks that earlier daemons have left: no right to look`,
	} {
		shows(pattern)
	}
}
