package journal

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/app/leadtest"
	"dlrover-run/rendezvous/lead"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestStore(t *testing.T) {
	leadtest.Run(t, func(t *testing.T) leadtest.Suite {
		dir := t.TempDir()
		return leadtest.Suite{Open: func(t *testing.T) lead.Store {
			j, err := Open(dir, quiet())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, j.Resign(t.Context())) })
			return j
		}}
	})
}
