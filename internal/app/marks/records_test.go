package marks

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/testkit"
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
	var log testkit.Buffer
	k := open(t, Config{Store: j, Term: term, Log: slog.New(slog.NewTextHandler(&log, nil))})
	k.Size("r", []string{"n0", "n1", "n2"})
	k.Find(broken("n1"))
	require.NoError(t, k.Mark(t.Context(), "n2", "me", "smoke"))
	stored, err := j.Load(t.Context(), term)
	require.NoError(t, err)
	require.Len(t, stored, 3, "two machines and the head")
	require.NoError(t, j.Resign(t.Context()))
	require.ErrorIs(t, k.Mark(t.Context(), "n0", "me", "smoke"), lead.ErrDeposed)
	require.ErrorIs(t, k.Ready(), lead.ErrDeposed)
	require.Contains(t, k.List().Troubles[0], "not kept yet")
	_, err = k.Clear(t.Context(), "n2", "me", "no smoke")
	require.ErrorIs(t, err, lead.ErrDeposed)
	require.ErrorIs(t, k.Close(), lead.ErrDeposed)
	require.Contains(t, log.String(), `the next one knows what was written before" nodes="[n0 n2]" count=2`)

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

// Every store takes all records, however many marks were made in an hour, and however long what was found is.
func TestRecordsAreBounded(t *testing.T) {
	g := nodehealth.New(nodehealth.Config{JobShare: 1, ClusterShare: 1})
	now := time.Now()
	for i := range 2500 {
		node := fmt.Sprintf("n%d", i)
		g.Size(now, "r"+node, []string{node})
		g.Find(now.Add(time.Duration(i)*time.Millisecond), nodehealth.Finding{Node: node, Run: "r" + node,
			Kind: nodehealth.CheckFailed})
	}
	for i := range nodehealth.MaxPerNode {
		at := now.Add(time.Duration(i) * time.Hour)
		g.Find(at, nodehealth.Finding{Node: "n0", Kind: nodehealth.CheckFailed, At: at,
			Text: strings.Repeat("<", nodehealth.MaxText-1) + string(rune('a'+i))})
	}
	all, err := g.Records()
	require.NoError(t, err)
	require.Len(t, all, 2501)
	for key, value := range all {
		require.NoError(t, lead.Validate([]lead.Record{{Key: recordPrefix + key, Value: value}}))
	}
	next, err := nodehealth.RestoreRecords(nodehealth.Config{}, all)
	require.NoError(t, err)
	again, err := next.Records()
	require.NoError(t, err)
	require.Equal(t, all, again)
}
