package hostfile

import (
	"io"
	"log/slog"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/hostfile"
)

func TestLiveHostfileOfKnownHosts(t *testing.T) {
	t.Parallel()
	h, err := open("auto", slog.New(slog.NewTextHandler(io.Discard, nil)))
	require.NoError(t, err)
	h.known = []hostfile.Host{{Name: "w-0.svc"}, {Name: "10.0.0.2"}}
	world := []job.Member{{Node: "w-2", Addr: "10.0.0.3", Slots: 4}, {Node: "w-0", Addr: "10.0.0.1", Slots: 1},
		{Node: "w-1", Addr: "10.0.0.2", Slots: 2}}
	h.start(&launcher.StartRequest{Epoch: launcher.Epoch{World: world}})
	text, err := os.ReadFile(h.path)
	require.NoError(t, err)
	require.Equal(t, "10.0.0.3 slots=4\nw-0.svc slots=1\n10.0.0.2 slots=2\n", string(text))
	h.fixed = true
	require.Equal(t, "w-0.svc slots=4\n10.0.0.2 slots=1\n", h.text(world[:2]))
	require.NoError(t, h.close())
	require.NoFileExists(t, h.path)

	_, err = open("/proc/none/hosts", nil)
	require.Error(t, err)
}
