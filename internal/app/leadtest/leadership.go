package leadtest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/lead"
)

// RunLeadership runs the suite of lead.Leadership, each test with a fresh election.
func RunLeadership(t *testing.T, fresh func(t *testing.T) Elections) {
	for name, test := range map[string]func(t *testing.T, s Elections){
		"TermsRise":             termsRise,
		"OneLeads":              oneLeads,
		"OneLeadsAtATime":       oneLeadsAtATime,
		"WatchersSeeLeaders":    watchersSeeLeaders,
		"DeposedIsRefused":      deposedIsRefused,
		"DeafLeaderIsRefused":   deafLeaderIsRefused,
		"LateDeposeIsHarmless":  lateDeposeIsHarmless,
		"CampaignCanBeEnded":    campaignCanBeEnded,
		"ResignWithoutAnything": resignWithoutAnything,
		"MinorityElectsNobody":  minorityElectsNobody,
	} {
		t.Run(name, func(t *testing.T) { test(t, fresh(t)) })
	}
}

// candidate is a campaign under way.
type candidate struct {
	t    *testing.T
	over chan struct{} // closed when there is a result
	end  context.CancelFunc
	term lead.Term
	lost <-chan struct{}
	err  error
}

// stand begins a campaign that counts.
func (s Elections) stand(t *testing.T, p lead.Leadership, addr string) *candidate {
	t.Helper()
	ctx, end := context.WithCancel(t.Context())
	c := &candidate{t: t, over: make(chan struct{}), end: end}
	go func() {
		defer close(c.over)
		c.term, c.lost, c.err = p.Campaign(ctx, addr)
	}()
	if s.Stands != nil {
		s.Stands(t, p)
	}
	return c
}

// leads waits until c is elected.
func (c *candidate) leads() (term lead.Term, lost <-chan struct{}) {
	c.t.Helper()
	select {
	case <-c.over:
		require.NoError(c.t, c.err)
	case <-time.After(soon):
		require.Fail(c.t, "nobody leads")
	}
	return c.term, c.lost
}

// waits has c lead nobody for so long.
func (c *candidate) waits(d time.Duration, why string) {
	c.t.Helper()
	select {
	case <-c.over:
		require.Fail(c.t, why, "elected in term %d: %v", c.term, c.err)
	case <-time.After(d):
	}
}

func termsRise(t *testing.T, s Elections) {
	leader, next := s.Open(t), s.Open(t)
	term, lost := campaign(t, leader, "host:0")
	for i := range 4 {
		c := s.stand(t, next, fmt.Sprintf("host:%d", i+1))
		require.NoError(t, s.Word(t, leader, term))
		leads(t, lost)
		require.NoError(t, leader.Resign(t.Context()))
		isLost(t, lost)
		later, laterLost := c.leads()
		require.Greater(t, later, term)
		require.ErrorIs(t, s.Word(t, leader, term), lead.ErrDeposed)
		require.NoError(t, s.Word(t, next, later))
		leader, next, term, lost = next, leader, later, laterLost
	}
}

func oneLeads(t *testing.T, s Elections) {
	a, b := s.Open(t), s.Open(t)
	term, lost := campaign(t, a, "a:1")
	c := s.stand(t, b, "b:1")
	c.waits(time.Second, "two lead")
	leads(t, lost)
	require.NoError(t, s.Word(t, a, term))
	require.NoError(t, a.Resign(t.Context()))
	later, _ := c.leads()
	require.NoError(t, s.Word(t, b, later))
}

// oneLeadsAtATime: of several that campaign at once, each leads once, in a term of its own.
func oneLeadsAtATime(t *testing.T, s Elections) {
	var all []*candidate
	var those []lead.Leadership
	first := s.Open(t)
	term, _ := campaign(t, first, "first:1")
	for i := range 3 {
		p := s.Open(t)
		those = append(those, p)
		all = append(all, s.stand(t, p, fmt.Sprintf("host:%d", i)))
	}
	require.NoError(t, first.Resign(t.Context()))
	var mu sync.Mutex
	leading, terms := 0, []lead.Term{term}
	var over sync.WaitGroup
	for i, c := range all {
		over.Go(func() {
			select {
			case <-c.over:
			case <-time.After(2 * soon):
			}
			mu.Lock()
			leading++
			if c.err != nil || c.lost == nil || leading > 1 {
				t.Errorf("%d lead at once: %v", leading, c.err)
			}
			terms = append(terms, c.term)
			mu.Unlock()
			if err := s.Word(t, those[i], c.term); err != nil {
				t.Errorf("the word of the leader of term %d: %v", c.term, err)
			}
			mu.Lock()
			leading--
			mu.Unlock()
			if err := those[i].Resign(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	over.Wait()
	for i := range terms[1:] {
		require.Greater(t, terms[i+1], terms[i])
	}
}

func watchersSeeLeaders(t *testing.T, s Elections) {
	a, b := s.Open(t), s.Open(t)
	ctx, cancel := context.WithCancel(t.Context())
	leaders := s.Open(t).Watch(ctx)
	sees := func(want lead.Leader) {
		t.Helper()
		for late := time.After(soon); ; {
			select {
			case l := <-leaders:
				if l == want {
					return
				}
			case <-late:
				require.Fail(t, "not seen", "%v", want)
			}
		}
	}
	sees(lead.Leader{})
	term, _ := campaign(t, a, "a:1")
	sees(lead.Leader{Term: term, Addr: "a:1"})
	require.NoError(t, a.Resign(t.Context()))
	sees(lead.Leader{})
	term, _ = campaign(t, b, "b:1")
	sees(lead.Leader{Term: term, Addr: "b:1"})
	cancel()
	require.Eventually(t, func() bool { _, open := <-leaders; return !open }, soon, time.Millisecond)
}

func deposedIsRefused(t *testing.T, s Elections) {
	if !s.Deposes {
		t.Skip("nobody ends the leadership of a process that lives here")
	}
	a, b := s.Open(t), s.Open(t)
	term, lost := campaign(t, a, "a:1")
	require.NoError(t, b.Depose(t.Context(), lead.Leader{Term: term, Addr: "a:1"}))
	require.ErrorIs(t, s.Word(t, a, term), lead.ErrDeposed)
	isLost(t, lost)
	later, _ := campaign(t, b, "b:1")
	require.Greater(t, later, term)
	require.ErrorIs(t, s.Word(t, a, term), lead.ErrDeposed)
}

// deafLeaderIsRefused: a leader that hears nothing of its successor has no followers left.
func deafLeaderIsRefused(t *testing.T, s Elections) {
	if s.Deafen == nil {
		t.Skip("news of the election cannot be kept from a process here")
	}
	a, b := s.Open(t), s.Open(t)
	term, lost := campaign(t, a, "a:1")
	c := s.stand(t, b, "b:1")
	hear := s.Deafen(a)
	later, _ := c.leads()
	require.Greater(t, later, term)
	require.ErrorIs(t, s.Word(t, a, term), lead.ErrDeposed)
	require.NoError(t, s.Word(t, b, later))
	hear()
	require.ErrorIs(t, s.Word(t, a, term), lead.ErrDeposed)
	isLost(t, lost)
	require.NoError(t, s.Word(t, b, later))
}

func lateDeposeIsHarmless(t *testing.T, s Elections) {
	a, b := s.Open(t), s.Open(t)
	old, _ := campaign(t, a, "a:1")
	require.NoError(t, a.Resign(t.Context()))
	term, lost := campaign(t, a, "a:1")
	require.NoError(t, b.Depose(t.Context(), lead.Leader{Term: old, Addr: "a:1"}))
	require.NoError(t, b.Depose(t.Context(), lead.Leader{}))
	require.NoError(t, s.Word(t, a, term))
	leads(t, lost)
}

func campaignCanBeEnded(t *testing.T, s Elections) {
	a, b := s.Open(t), s.Open(t)
	term, _ := campaign(t, a, "a:1")
	c := s.stand(t, b, "b:1")
	c.waits(300*time.Millisecond, "two lead")
	c.end()
	<-c.over
	require.ErrorIs(t, c.err, context.Canceled)
	require.NoError(t, s.Word(t, a, term))
	require.NoError(t, a.Resign(t.Context()))
	later, _ := campaign(t, a, "a:1") // b does not stand in the way
	require.Greater(t, later, term)
	require.NoError(t, s.Word(t, a, later))
}

func resignWithoutAnything(t *testing.T, s Elections) {
	a := s.Open(t)
	require.NoError(t, a.Resign(t.Context()))
	term, lost := campaign(t, a, "a:1")
	require.NoError(t, s.Open(t).Resign(t.Context()))
	leads(t, lost)
	require.NoError(t, s.Word(t, a, term))
}

func minorityElectsNobody(t *testing.T, s Elections) {
	if s.Mute == nil {
		t.Skip("nobody votes here: a store decides")
	}
	a, b := s.Open(t), s.Open(t)
	campaign(t, a, "a:1")
	c := s.stand(t, b, "b:1")
	speak := s.Mute()
	require.NoError(t, a.Resign(t.Context()))
	c.waits(time.Second, "elected by a minority")
	speak()
	term, _ := c.leads()
	require.NoError(t, s.Word(t, b, term))
}
