// Package leadtest has two suites of tests: one that every lead.Leadership passes, and one that every lead.Decisions
// does. An implementation names the abilities that it lacks, and the tests of these are skipped.
package leadtest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/lead"
)

// soon is the longest that an elected process may take, with a leadership that expires by time.
const soon = 20 * time.Second

// Suite is one kind of store.
type Suite struct {
	// Open returns the store as another process sees it.
	Open func(t *testing.T) lead.Store
	// Deposes is set if Depose ends the leadership of a process that lives.
	Deposes bool
	// Deafen keeps all news of the election from a process, until hear is called: it goes on as the leader for as long as
	// it may. Its records reach the store. Nil: there is no such thing.
	Deafen func(p lead.Store) (hear func())
}

// Elections is one kind of leadership.
type Elections struct {
	// Open returns the leadership as another process sees it.
	Open func(t *testing.T) lead.Leadership
	// Word has p give its word, as the leader of a term, to those that follow the present leader: ErrDeposed if they
	// refuse it.
	Word func(t *testing.T, p lead.Leadership, term lead.Term) error
	// Stands waits until the campaign of p, which has begun, counts if the leader is lost. Nil: it does at once.
	Stands func(t *testing.T, p lead.Leadership)
	// Deposes and Deafen are as in Suite.
	Deposes bool
	Deafen  func(p lead.Leadership) (hear func())
	// Mute keeps most of those that vote from voting, until speak is called. Nil: nobody votes.
	Mute func() (speak func())
}

// Run runs both suites, each test with a fresh store.
func Run(t *testing.T, fresh func(t *testing.T) Suite) {
	t.Run("Leadership", func(t *testing.T) {
		RunLeadership(t, func(t *testing.T) Elections { return fresh(t).elections() })
	})
	t.Run("Decisions", func(t *testing.T) {
		for name, test := range map[string]func(t *testing.T, s Suite){
			"LeadersKnowEarlierOnes":  leadersKnowEarlierOnes,
			"NewestRecordCounts":      newestRecordCounts,
			"RecordsHaveBounds":       recordsHaveBounds,
			"ManyAppendAtOnce":        manyAppendAtOnce,
			"DeposedWritesNothing":    deposedWritesNothing,
			"NobodyWritesWithoutTerm": nobodyWritesWithoutTerm,
			"Linearizable":            linearizable,
		} {
			t.Run(name, func(t *testing.T) { test(t, fresh(t)) })
		}
	})
}

// elections are those of a store: the word of a leader is a record.
func (s Suite) elections() Elections {
	e := Elections{
		Open:    func(t *testing.T) lead.Leadership { return s.Open(t) },
		Deposes: s.Deposes,
		Word: func(t *testing.T, p lead.Leadership, term lead.Term) error {
			return p.(lead.Store).Append(t.Context(), term, record("word", ""))
		},
	}
	if s.Deafen != nil {
		e.Deafen = func(p lead.Leadership) (hear func()) { return s.Deafen(p.(lead.Store)) }
	}
	return e
}

// campaign makes p lead.
func campaign(t *testing.T, p lead.Leadership, addr string) (lead.Term, <-chan struct{}) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	term, lost, err := p.Campaign(ctx, addr)
	require.NoError(t, err)
	return term, lost
}

func isLost(t *testing.T, lost <-chan struct{}) {
	t.Helper()
	select {
	case <-lost:
	case <-time.After(soon):
		require.Fail(t, "the leadership is not lost")
	}
}

func leads(t *testing.T, lost <-chan struct{}) {
	t.Helper()
	select {
	case <-lost:
		require.Fail(t, "the leadership is lost")
	default:
	}
}
