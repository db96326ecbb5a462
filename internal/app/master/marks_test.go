package master

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/marks"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

const secret = "0123456789abcdef"

// made is a daemon of these options; the caller closes it.
func made(t *testing.T, args ...string) (d *daemon, err error) {
	t.Helper()
	t.Setenv("DLROVER_TOKEN", secret)
	a := app(io.Discard)
	a.Action = func(c *cli.Context) error {
		d, err = newDaemon(c, nil)
		return nil
	}
	require.NoError(t, a.Run(append([]string{"dlrover-master"}, args...)))
	return d, err
}

// served is a daemon of these options, its address, and what ends it.
func served(t *testing.T, args ...string) (d *daemon, client *api.Client, at string, end func()) {
	t.Helper()
	d, err := made(t, args...)
	require.NoError(t, err)
	l, err := api.Listen(t.Context(), "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- d.service.Serve(l) }()
	client = api.NewClient(l.Addr().String(), secret)
	return d, client, "http://" + l.Addr().String(), func() {
		client.Close()
		d.close(0)
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	}
}

func ready(t *testing.T, at string) (int, string) {
	t.Helper()
	resp, err := http.Get(at + "/readyz")
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(body)
}

// A node fails its check, by the wire of launchers: its machine is marked and shown, and the next daemon knows of it.
func TestMarksOfADaemon(t *testing.T) {
	dir, events := filepath.Join(t.TempDir(), "data"), filepath.Join(t.TempDir(), "events")
	_, c, at, end := served(t, "--data-dir="+dir, "--event-log="+events)
	status, _ := ready(t, at)
	require.Equal(t, http.StatusOK, status)
	for _, id := range []string{"n0", "n1", "n2"} {
		require.NoError(t, c.Join(t.Context(), "r", rendezvous.Join{
			Node: rendezvous.Node{ID: id, Name: id, Machine: "gpu-0" + id[1:], Rank: -1, Slots: 1, Addr: "10.0.0.1",
				Can: []rendezvous.Ability{rendezvous.CanGate}},
			Params: rendezvous.Params{Min: 1, Max: 3, Gate: true},
		}))
	}
	require.NoError(t, c.Report(t.Context(), "r", rendezvous.Barred{ID: "n1", Reason: "its link is slow"}))
	known := func(c *api.Client) (k marks.Known) {
		require.NoError(t, c.Global(t.Context(), "nodes", nil, &k))
		return k
	}
	require.Eventually(t, func() bool { return len(known(c).Avoid) > 0 }, 20*time.Second, 20*time.Millisecond)
	require.Equal(t, []string{"gpu-01"}, known(c).Avoid)
	require.Equal(t, "its link is slow", known(c).Nodes[0].Mark.Evidence)
	require.NoError(t, c.Global(t.Context(), "nodes/gpu-07", marks.Change{Action: "mark", Reason: "smoke"}, nil))

	_, err := made(t, "--data-dir="+dir)
	require.ErrorContains(t, err, "another dlrover-master uses it")
	end()
	log, err := os.ReadFile(events)
	require.NoError(t, err)
	require.Contains(t, string(log), `"event":"node-marked"`)

	_, c, _, end = served(t, "--data-dir="+dir)
	require.Equal(t, []string{"gpu-01", "gpu-07"}, known(c).Avoid)
	var done marks.Changed
	require.NoError(t, c.Global(t.Context(), "nodes/gpu-01", marks.Change{Action: "clear"}, &done))
	require.True(t, done.Known)
	require.Equal(t, []string{"gpu-07"}, known(c).Avoid)
	end()
}

func TestWithoutADataDirectoryNothingIsKept(t *testing.T) {
	d, c, at, end := served(t)
	defer end()
	require.Nil(t, d.marks)
	require.ErrorIs(t, c.Global(t.Context(), "nodes", nil, nil), api.ErrNotFound)
	status, body := ready(t, at)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "ready\n", body)
}
