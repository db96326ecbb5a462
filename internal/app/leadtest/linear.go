package leadtest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/lead"
)

// decisions is the model of a store: a log that refuses a stale term, from the first request of a later one on. An
// Append whose answer is lost may count or not.
type decisions struct {
	elected, term lead.Term // the newest, and the newest that has asked for something
	values        [3]string // by key
}

// request is one of decisions, and answer is what a process was told.
type request struct {
	kind  string // campaign, append or load
	term  lead.Term
	key   int
	value string
}

type answer struct {
	term   lead.Term // elected
	values [3]string // loaded
	err    string    // deposed, or unknown
}

func (d decisions) step(q request, a answer) (next []any) {
	if a.err == "unknown" {
		next = append(next, d)
	}
	switch {
	case a.err == "deposed": // perhaps nobody leads
		return []any{d}
	case q.kind == "campaign" && a.term > d.elected:
		d.elected = a.term
		return []any{d}
	case q.kind == "campaign" || q.term > d.elected || q.term < d.term:
		return next
	}
	if d.term = q.term; q.kind == "append" {
		d.values[q.key] = q.value
	} else if a.values != d.values {
		return nil
	}
	return append(next, d)
}

var model = porcupine.NondeterministicModel{
	Init: func() []any { return []any{decisions{}} },
	Step: func(state, input, output any) []any {
		return state.(decisions).step(input.(request), output.(answer))
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v: %+v", input, output) },
}

// history records what processes ask of a store at the same time.
type history struct {
	begun time.Time
	leads atomic.Uint64 // the newest term
	asked atomic.Uint64 // the newest term whose leader has had an answer
	deaf  atomic.Int64  // how often a leader has asked that did not know of its successor

	mu  sync.Mutex
	ops []porcupine.Operation
}

func (h *history) do(client int, q request, ask func() answer) answer {
	call := time.Since(h.begun)
	a := ask()
	op := porcupine.Operation{ClientId: client, Input: q, Call: int64(call), Output: a,
		Return: int64(time.Since(h.begun))}
	if a.err == "unknown" {
		op.Return = math.MaxInt64
	}
	if a.err == "" && q.kind != "campaign" && uint64(q.term) > h.asked.Load() {
		h.asked.Store(uint64(q.term))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if a.err != "unknown" || q.kind == "append" { // a load without an answer tells nothing
		h.ops = append(h.ops, op)
	}
	return a
}

// failure is the answer of a store that has returned an error.
func failure(err error) answer {
	switch {
	case errors.Is(err, lead.ErrDeposed):
		return answer{err: "deposed"}
	case err != nil:
		return answer{err: "unknown"}
	}
	return answer{}
}

func (h *history) load(ctx context.Context, client int, p lead.Store, term lead.Term) {
	h.do(client, request{kind: "load", term: term}, func() answer {
		records, err := p.Load(ctx, term)
		a := failure(err)
		for _, r := range records {
			a.values[r.Key[0]-'a'] = string(r.Value)
		}
		return a
	})
}

// append reports whether the process may still lead. If it does not since then, the record may count.
func (h *history) append(ctx context.Context, client int, p lead.Store, term lead.Term, value string) (leads bool) {
	q := request{kind: "append", term: term, key: rand.IntN(3), value: value}
	leads = true
	h.do(client, q, func() answer {
		a := failure(p.Append(ctx, term, record(string(rune('a'+q.key)), value)))
		if leads = a.err != "deposed"; !leads {
			a.err = "unknown"
		}
		return a
	})
	return leads
}

// linearizable: however elections, losses and lost answers meet, all that happens is as if it had happened one by one.
func linearizable(t *testing.T, s Suite) {
	h := &history{begun: time.Now()}
	var processes sync.WaitGroup
	for i := range 3 {
		p := s.Open(t)
		processes.Go(func() { h.terms(t, s, i, p) })
	}
	over := make(chan struct{})
	go func() { processes.Wait(); close(over) }()
	rude := s.Open(t)
	for open := true; open; {
		select {
		case <-over:
			open = false
		case <-time.After(time.Duration(rand.IntN(20)) * time.Millisecond):
			if s.Deposes {
				_ = rude.Depose(t.Context(), lead.Leader{Term: lead.Term(h.leads.Load())})
			}
		}
	}
	if s.Deafen != nil {
		require.NotZero(t, h.deaf.Load(), "no leader was deaf")
	}
	result, info := porcupine.CheckOperationsVerbose(model.ToModel(), h.ops, time.Minute)
	if result == porcupine.Illegal {
		t.Log(h.stuck(info))
	}
	require.Equal(t, porcupine.Ok, result, "of %d requests", len(h.ops))
}

// stuck are the last requests of the longest part of the history that can be put in order, and those that follow.
func (h *history) stuck(info porcupine.LinearizationInfo) string {
	longest := slices.MaxFunc(info.PartialLinearizationsOperations()[0], func(a, b []porcupine.Operation) int {
		return len(a) - len(b)
	})
	known, text := map[int64]bool{}, "" // by time of the call
	for i, op := range longest {
		if known[op.Call] = true; i >= len(longest)-12 {
			text += fmt.Sprintf("\n%d-%d %d %+v: %+v", op.Call, op.Return, op.ClientId, op.Input, op.Output)
		}
	}
	text += "\nand not"
	rest := slices.DeleteFunc(slices.Clone(h.ops), func(op porcupine.Operation) bool { return known[op.Call] })
	slices.SortFunc(rest, func(a, b porcupine.Operation) int { return int(a.Return - b.Return) })
	for _, op := range rest[:min(len(rest), 6)] {
		text += fmt.Sprintf("\n%d-%d %d %+v: %+v", op.Call, op.Return, op.ClientId, op.Input, op.Output)
	}
	return text
}

// terms has a process lead five times.
func (h *history) terms(t *testing.T, s Suite, i int, p lead.Store) {
	for n := range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), 6*soon)
		a := h.do(4*i, request{kind: "campaign"}, func() answer {
			term, _, err := p.Campaign(ctx, fmt.Sprintf("host:%d", i))
			a := failure(err)
			a.term = term
			return a
		})
		cancel()
		if !assertNoFailure(t, a) {
			return
		}
		h.leads.Store(uint64(a.term))
		h.term(t, i, p, a.term, fmt.Sprint(i, ".", n))
		if s.Deafen != nil && n > 0 && n < 4 {
			h.outlive(t, s, i, p, a.term)
		}
		_ = p.Resign(t.Context()) // it may have been deposed
		late := fmt.Sprint(i, ".", n, ".late")
		h.do(4*i, request{kind: "append", term: a.term, value: late}, func() answer {
			return failure(p.Append(t.Context(), a.term, record("a", late)))
		})
	}
}

// outlive has a leader append once more after its successor, which it does not know, has done something.
func (h *history) outlive(t *testing.T, s Suite, i int, p lead.Store, term lead.Term) {
	defer s.Deafen(p)()
	for until := time.Now().Add(3 * time.Second); h.asked.Load() <= uint64(term); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			return
		}
	}
	h.deaf.Add(1)
	h.append(t.Context(), 4*i, p, term, fmt.Sprint(i, ".", term, ".deaf"))
}

func assertNoFailure(t *testing.T, a answer) bool {
	if a.err != "" {
		t.Errorf("a process cannot campaign: %s", a.err)
	}
	return a.err == ""
}

// term has a leader ask for several things at once. Some answers are lost.
func (h *history) term(t *testing.T, i int, p lead.Store, term lead.Term, value string) {
	var asks sync.WaitGroup
	for c := range 2 {
		asks.Go(func() {
			for n, leads := 0, true; n < 5 && leads; n++ {
				ctx, cancel := context.WithCancel(t.Context())
				if rand.IntN(8) == 0 {
					time.AfterFunc(time.Duration(rand.IntN(2000))*time.Microsecond, cancel)
				}
				if rand.IntN(3) == 0 {
					h.load(ctx, 4*i+1+c, p, term)
				} else {
					leads = h.append(ctx, 4*i+1+c, p, term, fmt.Sprint(value, ".", c, ".", n))
				}
				cancel()
			}
		})
	}
	asks.Wait()
}
