package api

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// perform carries out actions as if a step had returned them.
func perform(t *testing.T, h *Hub, acts ...rendezvous.Action) {
	r, err := h.existing("r")
	require.NoError(t, err)
	r.mu.Lock()
	for _, a := range acts {
		r.performLocked(time.Now(), a)
	}
	r.unlock()
}

// The gate is called in the order of the steps and without locks, one call at a time, also when it calls the Hub itself.
func TestGateIsToldInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h *Hub
		var mu sync.Mutex
		var told []string
		h = NewHub(HubConfig{Gate: func(run string, ids []string) {
			require.Len(t, h.Runs(true), 1, "no lock is held")
			time.Sleep(time.Second) // others come meanwhile
			mu.Lock()
			told = append(told, run+":"+strings.Join(ids, ","))
			again := len(told) == 1
			mu.Unlock()
			if again {
				perform(t, h, rendezvous.Action{Gate: []string{"inner"}})
			}
		}})
		defer h.Close()
		require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				perform(t, h, rendezvous.Action{Gate: []string{fmt.Sprint(i), "x"}}, rendezvous.Action{Gate: []string{fmt.Sprint(i), "y"}})
			})
		}
		wg.Wait()
		time.Sleep(time.Minute)
		require.Equal(t, []string{"r:0,x", "r:0,y", "r:1,x", "r:1,y", "r:2,x", "r:2,y", "r:inner"}, told)
	})
}

func TestNoGateIsToldNothing(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
	perform(t, h, rendezvous.Action{Gate: []string{"a"}})
	r, err := h.existing("r")
	require.NoError(t, err)
	require.Empty(t, r.gates)
}

// A gate that a closed hub has not told is not told any more.
func TestClosedHubTellsNoGate(t *testing.T) {
	told := 0
	var h *Hub
	h = NewHub(HubConfig{Gate: func(string, []string) { told++; h.Close() }})
	require.NoError(t, h.Join(t.Context(), "r", joinOf("a", rendezvous.Params{Min: 2, Max: 2})))
	perform(t, h, rendezvous.Action{Gate: []string{"a"}}, rendezvous.Action{Gate: []string{"b"}})
	require.Equal(t, 1, told)
}


func TestOrderRules(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	for name, c := range map[string]struct {
		order rendezvous.Order
		want  string
	}{
		"no kind":         {rendezvous.Order{}, "need one of"},
		"unknown kind":    {rendezvous.Order{Kind: "explode"}, `"explode"`},
		"unknown cause":   {rendezvous.Order{Kind: rendezvous.OrderStop, Cause: "node-loss"}, `"node-loss"`},
		"bar of nobody":   {rendezvous.Order{Kind: rendezvous.OrderBar}, "need a node's name"},
		"unbar of nobody": {rendezvous.Order{Kind: rendezvous.OrderUnbar}, "need a node's name"},
		"pause of a node": {rendezvous.Order{Kind: rendezvous.OrderPause, Node: "a"}, "no other order takes one"},
		"hostile node":    {rendezvous.Order{Kind: rendezvous.OrderBar, Node: "\x1b[2J"}, "control characters"},
		"long node":       {rendezvous.Order{Kind: rendezvous.OrderBar, Node: strings.Repeat("n", maxOrderNode+1)}, "at most 256 bytes"},
		"hostile text":    {rendezvous.Order{Kind: rendezvous.OrderStop, Text: "a\nb"}, "control characters"},
		"long text":       {rendezvous.Order{Kind: rendezvous.OrderStop, Text: strings.Repeat("x", maxOrderText+1)}, "at most 4096 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			err := h.Order("r", c.order)
			require.ErrorIs(t, err, ErrBadRequest)
			require.ErrorContains(t, err, c.want)
		})
	}
	for _, kind := range orderKinds {
		o := rendezvous.Order{Kind: kind}
		if kind == rendezvous.OrderBar || kind == rendezvous.OrderUnbar {
			o.Node = "a"
		}
		err := h.Order("no such", o)
		require.ErrorIs(t, err, ErrUnknownRun, kind)
		require.ErrorContains(t, err, `"no such"`)
	}
	require.Empty(t, h.Runs(false), "no run is made for an order")
}
