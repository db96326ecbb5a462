package marks

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/lead"
	"dlrover-run/rendezvous/lead/journal"
)

// The next leader knows the findings of the one before, which cannot write any more.
func TestTheNextLeaderKnowsTheNodes(t *testing.T) {
	dir := t.TempDir()
	leader := func() (*journal.Journal, lead.Term) {
		j, err := journal.Open(dir, quiet())
		require.NoError(t, err)
		term, _, err := j.Campaign(t.Context(), "a:1")
		require.NoError(t, err)
		return j, term
	}
	j, term := leader()
	k := open(t, Config{Store: j, Term: term})
	k.Size("r", []string{"n0", "n1", "n2"})
	k.Find(broken("n1"))
	require.NoError(t, k.Mark(t.Context(), "n2", "me", "smoke"))
	stored, err := j.Load(t.Context(), term)
	require.NoError(t, err)
	require.Len(t, stored, 3, "two machines and the head")
	require.NoError(t, j.Resign(t.Context()))
	require.ErrorIs(t, k.Mark(t.Context(), "n0", "me", "smoke"), lead.ErrDeposed)
	require.ErrorIs(t, k.Ready(), lead.ErrDeposed)
	require.ErrorIs(t, k.Close(), lead.ErrDeposed)

	j, term = leader()
	k = open(t, Config{Store: j, Term: term})
	require.Equal(t, []string{"n1", "n2"}, names(k))
	known, err := k.Clear(t.Context(), "n2", "me", "no smoke")
	require.NoError(t, err)
	require.True(t, known)
	require.NoError(t, k.Close())
	require.NoError(t, j.Resign(t.Context()))
	j, term = leader()
	k = open(t, Config{Store: j, Term: term})
	require.Equal(t, []string{"n1"}, names(k))
	require.NoError(t, k.Close())
	require.NoError(t, j.Resign(t.Context()))
}
