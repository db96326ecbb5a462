package launcher

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
)

// mapped is an agent that needs the world, with a diary of its starts.
func mapped() (*bare, *diary) {
	d := &diary{}
	b := newBare(Part{Name: "mapped", Start: func(r *StartRequest) { d.write("start with %d nodes", len(r.World)) }})
	b.cfg.NeedsWorld = true
	return b, d
}

func TestWorldThatCannotBeFetchedFailsTheEpoch(t *testing.T) {
	good := []job.Member{{GroupRank: 0, Slots: 4}, {GroupRank: 1, Node: "b", RankBase: 4, Slots: 2}}
	spoil := func(f func(ms []job.Member)) []job.Member {
		ms := slices.Clone(good)
		f(ms)
		return ms
	}
	for name, tt := range map[string]struct {
		world []job.Member
		err   error
		want  string
	}{
		"an error":      {nil, errors.New("gone"), "gone"},
		"another size":  {good[:1], nil, "it has 1 nodes instead of 2: another world has been sealed meanwhile"},
		"another order": {spoil(func(ms []job.Member) { ms[0].GroupRank = 1 }), nil, "its node 0 () has rank 1"},
		"another base": {spoil(func(ms []job.Member) { ms[1].RankBase = 2 }), nil,
			"its node 1 (b) has rank 1 and 2 workers from rank 2 on"},
		"another node": {spoil(func(ms []job.Member) { ms[1].Slots = 3 }), nil,
			"its node 1 (b) has rank 1 and 3 workers"},
		"others may differ": {spoil(func(ms []job.Member) { ms[0].Slots, ms[0].RankBase = 9, 9 }), nil, ""},
	} {
		bubble(t, name, func(t *testing.T) {
			e := Epoch{Directive: Directive{Place: job.Place{GroupRank: 1, GroupWorldSize: 2, RankBase: 4}}, World: tt.world}
			if tt.want == "" {
				require.NoError(t, e.checkWorld(2))
				return
			}
			b, p := mapped()
			b.world, b.worldErr, b.max = tt.world, tt.err, 1
			b.begin(t, Directive{Kind: job.Run, EpochID: job.EpochID{Round: 7, Epoch: 2}, Place: e.Place})
			require.Equal(t, []string{"world", "failing: restart", "rejoin", "ready", "world"}, b.said()[:5], "%s", b.log)
			require.Contains(t, b.failures[0].Message,
				"cannot fetch the world of round 7, epoch 2 from the rendezvous: "+tt.want)
			require.Equal(t, 4, b.failures[0].Rank)
			require.Empty(t, p.read(), "nothing is started")
			require.Equal(t, policy.WorkerFailed, (<-b.done).Reason)
		})
	}
}

// silent is a rendezvous that does not tell the world until ctx ends.
type silent struct{ *bare }

func (s silent) World(ctx context.Context) ([]job.Member, error) {
	<-ctx.Done()
	s.note("gave up")()
	return nil, ctx.Err()
}

func TestNewerDirectiveDropsTheFetchOfAWorld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _ := mapped()
		b.cfg.Rendezvous = silent{b}
		run := Directive{Kind: job.Run, EpochID: job.EpochID{Round: 1}, Place: job.Place{GroupWorldSize: 1}}
		b.begin(t, run, run)
		require.Empty(t, b.said(), "a confirmation changes nothing")
		b.tell(Directive{Kind: job.Wait})
		require.Equal(t, []string{"gave up"}, b.said())
		b.tell(Directive{Kind: job.Fail, Cause: job.Cause{Text: "over"}})
		require.Equal(t, "over", (<-b.done).Verdict)
	})
}

func TestSignalEndsTheFetchOfAWorld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _ := mapped()
		b.cfg.Rendezvous = silent{b}
		signals := make(chan os.Signal, 1)
		b.cfg.Signals, b.cfg.Terminate = signals, func(os.Signal) bool { return true }
		b.begin(t, Directive{Kind: job.Run, EpochID: job.EpochID{Round: 1}})
		signals <- syscall.SIGINT
		require.Equal(t, policy.Signaled(2), (<-b.done).Reason)
	})
}

func TestOldAnswerOfAFetchIsDropped(t *testing.T) {
	a := &Agent{}
	a.onWorld(&fetch{cancel: func() { t.Error("not ours") }})
}
