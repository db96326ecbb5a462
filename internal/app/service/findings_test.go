package service

import (
	"fmt"
	"log/slog"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

const nvrm = `rank 3: log rule gpu: it says "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"`

// told are the findings of a timeline.
func told(t *testing.T, s *Service) (lines []string) {
	t.Helper()
	es, err := s.Hub.Events(t.Context(), "r", 0)
	require.NoError(t, err)
	for _, e := range es.Events {
		if e.Event == "device-fault" || e.Event == "log-rule" {
			lines = append(lines, fmt.Sprintf("%s %s %s", e.Event, e.Node, e.Text))
		}
	}
	return lines
}

func joinAs(t *testing.T, s *Service, names ...string) {
	t.Helper()
	for _, name := range names {
		require.NoError(t, s.Hub.Join(t.Context(), "r", rendezvous.Join{Params: rendezvous.Params{Min: 1, Max: 10},
			Node: rendezvous.Node{ID: "id-" + name, Name: name, Rank: -1, Slots: 1, Addr: "10.0.0.1"}}))
	}
}

// What a launcher posts is in the timeline, under the name of its node, whatever it says.
func TestFindingsOfLaunchers(t *testing.T) {
	s, err := New(Config{Log: slog.New(slog.DiscardHandler), Token: "0123456789abcdef"})
	require.NoError(t, err)
	defer s.Close(0)
	joinAs(t, s, "n0")
	server := httptest.NewServer(s.handler())
	defer server.Close()
	post := func(token string, f Finding) error {
		c := api.NewClient(strings.TrimPrefix(server.URL, "http://"), token)
		defer c.Close()
		return c.Call(t.Context(), "r", "findings", f, nil)
	}
	c := api.NewClient(strings.TrimPrefix(server.URL, "http://"), "0123456789abcdef")
	defer c.Close()
	require.ErrorContains(t, c.Mounted(t.Context(), "r", "findings", nil), "need POST")
	const loss = `rank 0: log rule loss: nan is no number in "loss=nan"`
	require.ErrorIs(t, post("", Finding{"id-n0", nvrm}), api.ErrUnauthorized)
	require.ErrorIs(t, post("0123456789abcdef", Finding{"n0", nvrm}), rendezvous.ErrUnknownNode, "a name is no proof")
	for _, text := range []string{nvrm, "uncorrectable ECC error encountered", loss, "Xid 13", "a\x1b[31m\nb",
		strings.Repeat("x", 5000)} {
		require.NoError(t, post("0123456789abcdef", Finding{"id-n0", text}))
	}
	require.Equal(t, []string{"device-fault n0 xid: " + nvrm, "device-fault n0 ecc: uncorrectable ECC error encountered",
		"log-rule n0 " + loss, "log-rule n0 Xid 13", "log-rule n0 a [31m b", "log-rule n0 " + strings.Repeat("x", 997) + "…",
	}, told(t, s))
}

func TestFindingsAreFew(t *testing.T) {
	s := newService(t)
	joinAs(t, s, "n0", "n1")
	for _, name := range []string{"n0", "n1"} {
		for i := range 20 {
			require.NoError(t, s.Found("r", Finding{"id-" + name, fmt.Sprint("loss ", i)}))
		}
		require.NoError(t, s.Found("r", Finding{"id-" + name, nvrm}))
	}
	require.Len(t, told(t, s), 2*8+2, "what is no fault takes no room of one")
}

// A check that leaves nobody out tells which devices are broken, and that it has let their node through is no pass.
func TestAFaultyNodeThatIsLetThrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var passed []string
		s, err := New(Config{Log: slog.New(slog.DiscardHandler), Cleared: func(_, id string, covered []string) {
			mu.Lock()
			defer mu.Unlock()
			passed = append(passed, fmt.Sprint(id, covered))
		}})
		require.NoError(t, err)
		defer s.Close(0)
		p := checking(3, 3)
		p.Check = netcheck.Spec{Level: netcheck.LevelHost, ReportOnly: true, TTL: time.Hour,
			Timeout: netcheck.DefaultTimeout}.String()
		l := newLaunchers(s, p)
		l.findings = map[string][]netcheck.Finding{"n1": {
			{Kind: "gpu.driver", Severity: netcheck.Fatal, Metric: "xid", Value: 79, Text: "GPU 3 had Xid 79"},
		}}
		require.Equal(t, map[string]string{"n0": "run", "n1": "run", "n2": "run"}, l.meet(t, 3))
		synctest.Wait()
		require.Equal(t, []string{"device-fault n1 xid: GPU 3 had Xid 79"}, told(t, s))
		slices.Sort(passed)
		require.Equal(t, []string{"id-n0[interfaces network]", "id-n1[]", "id-n2[interfaces network]"}, passed)
	})
}
