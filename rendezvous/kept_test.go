package rendezvous

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/internal/job"
)

// stored is what a Round keeps, as another process reads it.
func stored(t rapid.TB, r *Round) *Kept {
	t.Helper()
	data, err := json.Marshal(r.Kept())
	require.NoError(t, err)
	k := new(Kept)
	require.NoError(t, json.Unmarshal(data, k))
	return k
}

// succession is a new daemon that has what s has kept.
func (s *sim) succession() *revived {
	s.t.Helper()
	v := s.revive()
	v.r = New(Config{Term: s.r.out.seq + 1000, Run: s.r.cfg.Run, Kept: stored(s.t, s.r)})
	return v
}

// A run that has ended stays so: for people, for its own launchers, and for those that come later.
func TestKeptEnd(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 1})
	s.r.cfg.Run = "job"
	for _, id := range []string{"a", "b"} {
		s.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 2}, Params: s.p, Work: "w"})
		s.must(Attach{ID: id})
	}
	s.obey()
	s.fail("a", RestartCharged)
	s.obey()
	s.pass(time.Second)
	s.succeed("a", "b")
	require.Equal(t, finished, s.r.epoch.phase)
	require.Nil(t, s.r.Kept().World, "nobody is waited for")
	require.Nil(t, newSim(t, s.p).r.Kept().World)
	v := s.succession()
	want, got := s.r.Status(), v.r.Status()
	want.Members, want.Waiting = 0, 0
	require.Equal(t, want, got)
	require.Equal(t, s.r.Ended(), v.r.Ended())
	require.Equal(t, s.r.Evidence(), v.r.Evidence())
	v.comeBack("a")
	require.Equal(t, job.Done, v.dirs["a"].Kind, "a launcher that had not heard of it")
	v.pass(time.Second)
	v.must(Join{Node: Node{ID: "c", Name: "c", Rank: -1, Slots: 2}, Params: v.p, Work: "w"})
	require.Equal(t, job.Done, v.dirs["c"].Kind, "a pod that was made again")
	require.Equal(t, job.CauseEnded, v.dirs["c"].Cause.Kind)
	require.Equal(t, v.r.Kept(), s.succession().r.Kept(), "it can be kept again")
}

func TestKeptFailure(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 2}, "a", "b")
	s.fail("a", RestartCharged)
	s.pass(time.Minute)
	require.Equal(t, finished, s.r.epoch.phase)
	v := s.succession()
	v.comeBack("b")
	require.Equal(t, job.Fail, v.dirs["b"].Kind)
	require.Equal(t, "a failed", v.dirs["b"].Cause.Text)
	require.Len(t, v.r.Evidence().Failures, 1)
}

// A run that was opened anew after its end, of which no record could be written, runs on.
func TestNewerLauncherThanTheKeptEnd(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 1}, "a")
	s.succeed("a")
	k := stored(t, s.r)
	s.must(Leave{ID: "a"})
	s.pass(time.Minute)
	s.joinNode(Node{ID: "b", Name: "b", Rank: -1, Slots: 2})
	s.obey()
	require.Contains(t, s.runs, "b")
	v := s.revive()
	v.r = New(Config{Term: s.r.out.seq + 1000, Kept: k})
	v.comeBack("b")
	require.Equal(t, "b", v.order())
	require.Equal(t, running, v.r.epoch.phase)
}

// Nodes that come before those of the newest world get no workers while that may be running.
func TestKeptWorldIsWaitedFor(t *testing.T) {
	p := Params{Min: 1, Max: 4, LastCall: time.Nanosecond}
	s := world(t, p, "a", "b")
	v := s.succession()
	v.join("x")
	v.pass(resumeWindow - time.Second)
	v.obey()
	require.Empty(t, v.runs)
	require.Equal(t, "waiting for 2 nodes of the newest world: a, b", v.noted(job.EventResume))
	v.comeBack("b")
	v.comeBack("a")
	require.Equal(t, running, v.r.epoch.phase)
	require.Equal(t, s.r.epoch.id, v.r.epoch.id)
	require.Equal(t, "a b", v.order())
}

// A node leaves, and the daemon is lost before the others have a new world: the next one knows why, and who has gone.
func TestKeptBreak(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 3, MaxRestarts: 3}, "a", "b", "c")
	s.leave("a")
	v := s.succession()
	require.Equal(t, s.r.Kept().Broken, v.r.Kept().Broken, "for a third one")
	require.Equal(t, s.r.Kept().Epoch, v.r.Kept().Epoch)
	v.comeBack("b", "c")
	require.Equal(t, s.noted(job.EventBreak), v.noted(job.EventBreak))
	require.Equal(t, s.r.epoch.cause, v.r.epoch.cause)
	v.obey()
	require.Len(t, v.runs, 2)
	require.Len(t, v.ended, 1)
	require.Len(t, v.ended[0].Losses, 1)
	require.Equal(t, "a", v.ended[0].Losses[0].Node)
	require.Nil(t, v.r.Kept().Broken)
}

// A node leaves while a daemon still waits for the others of its world: that daemon knows why, and so does a later one.
func TestLeaveDuringTheReturn(t *testing.T) {
	for name, keeps := range map[string]bool{"of a world that was kept": true, "of another": false} {
		t.Run(name, func(t *testing.T) {
			s := world(t, Params{Min: 2, Max: 3, MaxRestarts: 3}, "a", "b", "c")
			v := s.revive()
			if keeps {
				v = s.succession()
			}
			v.comeBack("a")
			v.must(Leaving{ID: "a", Reason: "SIGTERM"})
			v.must(Leave{ID: "a", Reason: "SIGTERM"})
			delete(v.dirs, "a")
			third := s.revive()
			third.r = New(Config{Term: v.r.out.seq + 1000, Kept: stored(t, v.r)})
			for _, d := range []*revived{v, third} {
				d.comeBack("b", "c")
				if d == third && !keeps { // it does not know that nobody else is missing
					d.pass(resumeWindow)
				}
				require.Equal(t, "node 0 (a) is leaving: SIGTERM", d.noted(job.EventBreak))
				d.obey()
				require.Equal(t, 4, d.r.epoch.workers)
				require.Len(t, d.ended, 1)
				require.Equal(t, "a", d.ended[0].Losses[0].Node)
				require.Zero(t, d.r.account.restarts, "a leave is not charged")
			}
		})
	}
}

// A daemon is lost between the seal that a failure has led to and the start of its workers: the next one does not
// charge for that failure again, if a node or the store knows of the seal.
func TestFailureIsChargedOnce(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 2, MaxRestarts: 3}, "a", "b")
	before := s.r.epoch.id
	s.fail("b", RestartCharged)
	for s.r.epoch.phase != releasing {
		s.obeyOne("a")
		s.obeyOne("b")
	}
	require.Equal(t, 1, s.r.account.restarts)
	for name, v := range map[string]*revived{"the store": s.succession(), "a node": s.revive()} {
		t.Run(name, func(t *testing.T) {
			for rank, id := range []string{"a", "b"} {
				place := job.Place{GroupRank: rank, GroupWorldSize: 2, RankBase: rank, WorldSize: 2}
				j := Join{Node: v.old.r.members.nodes[id].Node, Params: v.p, Stopped: before, Seen: before,
					Resume: &Resume{EpochID: before, Place: place}}
				if id == "b" {
					j.Resume.Decision = RestartCharged
				}
				if d := v.old.dirs[id]; name == "a node" && id == "a" {
					j.Restarts, j.Seen = d.Restarts, d.EpochID
				}
				v.must(j)
				v.must(Attach{ID: id})
			}
			v.obey()
			require.Equal(t, "a b", v.order())
			require.Equal(t, 1, v.runs["a"].Place.RestartCount)
		})
	}
}

// A daemon is lost before it could keep what its nodes have seen: the next one notes that, and once.
func TestWorldThatWasNotKept(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 3})
	s.join("a")
	opened := stored(t, s.r)
	s.join("b")
	s.obey()
	first := stored(t, s.r)
	s.fail("a", RestartCharged)
	s.obeyOne("a")
	broken := stored(t, s.r)
	require.NotNil(t, broken.Broken)
	for s.r.epoch.phase != releasing {
		s.obeyOne("a")
		s.obeyOne("b")
	}
	sealed := stored(t, s.r)
	s.obey()
	for name, c := range map[string]struct {
		kept  *Kept
		notes []job.Event
	}{
		"nothing":    {nil, nil},
		"no world":   {opened, []job.Event{"seal", "run"}},
		"another":    {first, []job.Event{"break", "seal", "run"}},
		"its end":    {broken, []job.Event{"seal", "run"}},
		"its seal":   {sealed, []job.Event{"run"}},
		"everything": {stored(t, s.r), nil},
	} {
		t.Run(name, func(t *testing.T) {
			v := s.revive()
			v.r = New(Config{Term: s.r.out.seq + 1000, Kept: c.kept})
			if c.kept != nil { // for a third one, before any node is back
				require.Equal(t, c.kept.Unrun, v.r.Kept().Unrun)
			}
			v.comeBack("a")
			k := stored(t, v.r)
			v.comeBack("b")
			require.Equal(t, c.notes, v.events("break", "seal", "run"))
			third := s.revive()
			third.r = New(Config{Term: v.r.out.seq + 1000, Kept: k})
			third.comeBack("a", "b")
			require.Empty(t, third.events("break", "seal", "run"))
		})
	}
}

// events are those of the kinds that were noted.
func (s *sim) events(kinds ...job.Event) (all []job.Event) {
	for _, n := range s.log {
		if slices.Contains(kinds, n.Event) {
			all = append(all, n.Event)
		}
	}
	return all
}

func TestKeptWorldThatDoesNotComeBack(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 3, MaxRestarts: 3}, "a", "b", "c")
	s.fail("a", RestartCharged)
	s.obey()
	t.Run("some do", func(t *testing.T) {
		v := s.succession()
		v.comeBack("b", "c")
		v.pass(resumeWindow)
		require.Equal(t, "1 of 3 nodes did not come back after the rendezvous daemon was started again: a",
			v.noted(job.EventBreak))
		v.obey()
		require.Len(t, v.runs, 2)
		require.Equal(t, 1, v.runs["b"].Place.RestartCount)
	})
	t.Run("none does", func(t *testing.T) {
		v := s.succession()
		v.p.MaxRestarts = 7
		v.join("x", "y")
		v.pass(resumeWindow + v.p.WithDefaults().LastCall)
		v.obey()
		require.Equal(t, "x y", v.order())
		require.Equal(t, 0, v.runs["x"].Place.RestartCount, "it is another run")
		require.Equal(t, 7, v.r.params.MaxRestarts)
		require.Equal(t, 7, v.runs["x"].Params.MaxRestarts)
		require.Contains(t, v.noted(job.EventResumed), "none of the 3 nodes")
	})
	t.Run("new launchers have the names", func(t *testing.T) {
		for _, ids := range [][]string{{"x", "y"}, {"x", "y", "z"}} { // the last of them completes the world
			v := s.succession()
			for i, id := range ids {
				v.joinNode(Node{ID: id, Name: string("abc"[i]), Rank: -1, Slots: 2})
			}
			v.pass(resumeWindow + v.p.WithDefaults().LastCall)
			v.obey()
			require.Len(t, v.runs, len(ids))
			require.Equal(t, 0, v.runs["x"].Place.RestartCount, "it is another run")
			require.Contains(t, v.noted(job.EventResumed), "none of the 3 nodes")
		}
	})
	t.Run("one of them has run in it", func(t *testing.T) {
		v := s.succession()
		v.joinNode(Node{ID: "x", Name: "a", Rank: -1, Slots: 2})
		v.comeBack("b")
		v.joinNode(Node{ID: "z", Name: "c", Rank: -1, Slots: 2})
		v.pass(resumeWindow + v.p.WithDefaults().LastCall)
		v.obey()
		require.Len(t, v.runs, 3)
		require.Equal(t, 1, v.runs["x"].Place.RestartCount)
	})
	t.Run("agents do not say whether they have", func(t *testing.T) {
		v := s.succession()
		for _, name := range []string{"a", "b", "c"} {
			v.joinNode(Node{ID: name, Name: name, Rank: -1, Slots: 2, Agent: AgentDLRover})
		}
		v.obey()
		require.Len(t, v.runs, 3)
		require.Equal(t, 1, v.runs["a"].Place.RestartCount)
	})
	t.Run("some agents do", func(t *testing.T) {
		v := s.succession()
		for _, name := range []string{"a", "c"} {
			v.joinNode(Node{ID: name, Name: name, Rank: -1, Slots: 2, Agent: AgentDLRover})
		}
		v.pass(resumeWindow)
		require.Equal(t, "1 of the 3 nodes of the newest world have not come back: b", v.noted(job.EventResumed))
	})
	t.Run("agents and others do", func(t *testing.T) {
		v := s.succession()
		for _, name := range []string{"x", "a", "b", "c"} {
			v.joinNode(Node{ID: name, Name: name, Rank: -1, Slots: 2, Agent: AgentDLRover})
		}
		v.obey()
		require.Len(t, v.runs, 3, "nobody is waited for")
		require.Equal(t, 1, v.runs["a"].Place.RestartCount)
	})
	t.Run("none does before the deadline", func(t *testing.T) {
		s := world(t, Params{Min: 2, Max: 2, Budget: Budget{Deadline: time.Hour}}, "a", "b")
		v := s.succession()
		v.pass(2 * time.Hour)
		v.join("x", "y")
		require.Equal(t, forming, v.r.epoch.phase)
		v.pass(resumeWindow)
		v.obey()
		require.Equal(t, "x y", v.order())
		v.pass(time.Hour + time.Second)
		require.Equal(t, finished, v.r.epoch.phase, "of its own")
		v = s.succession()
		v.pass(2 * time.Hour)
		v.comeBack("a")
		require.Equal(t, finished, v.r.epoch.phase, "it is the same run")
	})
	t.Run("none does of a run that is held because it has failed", func(t *testing.T) {
		s := world(t, Params{Min: 2, Max: 2, Budget: Budget{HoldFailed: true, HoldFor: time.Hour}}, "a", "b")
		s.fail("a", Permanent)
		s.pass(attributionWindow)
		require.True(t, s.r.account.spent.Held)
		v := s.succession()
		v.pass(2 * time.Hour)
		v.join("x", "y")
		v.pass(resumeWindow)
		v.obey()
		require.Equal(t, "x y", v.order())
	})
	t.Run("nobody comes for long", func(t *testing.T) {
		v := s.succession()
		v.pass(time.Hour)
		v.comeBack("a", "b", "c")
		require.Equal(t, "a b c", v.order())
	})
	t.Run("another job by that name", func(t *testing.T) {
		v := s.succession()
		v.p.Min, v.p.Max = 1, 1
		x := Join{Node: Node{ID: "x", Name: "x", Rank: -1, Slots: 2}, Params: v.p}
		require.ErrorIs(t, v.step(x), ErrReturning)
		v.pass(resumeWindow - time.Second)
		err := v.step(x)
		require.ErrorIs(t, err, ErrReturning)
		require.ErrorContains(t, err, "nnodes", "it says in what it differs")
		v.pass(time.Second)
		v.join("x")
		v.obey()
		require.Equal(t, "x", v.order())
	})
	t.Run("another job by that name, while the run goes on", func(t *testing.T) {
		v := s.succession()
		p := v.p
		p.Min, p.Max = 1, 1
		x := Join{Node: Node{ID: "x", Name: "x", Rank: -1, Slots: 2}, Params: p}
		require.ErrorIs(t, v.step(x), ErrReturning)
		v.comeBack("a", "b", "c")
		require.ErrorIs(t, v.step(x), ErrRefused)
		v.obey()
		require.Equal(t, "a b c", v.order())
		require.Equal(t, 1, v.runs["a"].Place.RestartCount)
	})
}

func TestLargeKeptWorld(t *testing.T) {
	ids := nodes(maxKeptNames + 1)
	s := newSim(t, Params{Min: len(ids), Max: len(ids)})
	s.join(ids...)
	s.pass(defaultLastCall)
	k := s.r.Kept()
	require.Equal(t, len(ids), k.World.Size)
	require.Nil(t, k.World.Names)
	v := s.succession()
	v.comeBack(ids...)
	v.obey()
	require.Len(t, v.runs, len(ids), "all are back, and nobody is waited for")

	v = s.succession()
	for _, name := range append(ids[1:], "stranger") {
		v.joinNode(Node{ID: name, Name: name, Rank: -1, Slots: 2, Agent: AgentDLRover})
	}
	v.obey()
	require.Empty(t, v.runs, "one is missing")
	v.joinNode(Node{ID: ids[0], Name: ids[0], Rank: -1, Slots: 2, Agent: AgentDLRover})
	v.obey()
	require.Empty(t, v.runs, "which of so many are here is not known")
	v.pass(resumeWindow)
	v.obey()
	require.Len(t, v.runs, len(ids))
}

// What is kept of a run without its rules, which no program writes, is of no use, and does no harm.
func TestKeptWorldWithoutParams(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1})
	s.r = New(Config{Kept: &Kept{World: &KeptWorld{Size: 1, Names: []string{"x"}}}})
	s.join("a")
	s.pass(resumeWindow)
	s.obey()
	require.Equal(t, "a", s.order())
}

func TestKeptOrders(t *testing.T) {
	p := Params{Min: 2, Max: 2, MaxRestarts: 3}
	stop := job.Cause{Kind: job.CauseOperator, Text: "lunch"}
	t.Run("pause without nodes", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.must(Order{Kind: OrderPause, Text: "lunch"})
		v := s.succession()
		require.Equal(t, &stop, v.r.Status().Paused)
		v.pass(time.Hour)
		v.join("x", "y")
		v.pass(time.Hour)
		v.obey()
		require.Empty(t, v.runs)
		v.must(Order{Kind: OrderResume})
		v.obey()
		require.Equal(t, "x y", v.order())
	})
	t.Run("pause that has ended since", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.must(Order{Kind: OrderPause})
		s.obey()
		k := stored(t, s.r)
		s.must(Order{Kind: OrderResume})
		s.obey()
		v := s.revive()
		v.r = New(Config{Term: s.r.out.seq + 1000, Kept: k})
		v.comeBack("a", "b")
		require.Equal(t, "a b", v.order())
		require.Nil(t, v.r.Status().Paused)
	})
	t.Run("pause after the end of one that is kept", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.must(Order{Kind: OrderPause})
		s.obey()
		s.must(Order{Kind: OrderResume})
		s.obey()
		k := stored(t, s.r)
		s.must(Order{Kind: OrderPause, Text: "once more"})
		s.obey()
		v := s.revive()
		v.r = New(Config{Term: s.r.out.seq + 1000, Kept: k})
		v.comeBack("a", "b")
		require.Equal(t, "once more", v.r.Status().Paused.Text)
		v.obey()
		require.Empty(t, v.runs)
		v.must(Order{Kind: OrderResume})
		w := v.revive()
		w.r = New(Config{Term: v.r.out.seq + 1000, Kept: stored(t, v.r)})
		w.comeBack("a", "b")
		require.Nil(t, w.r.Status().Paused, "its end is newer than what nodes know")
	})
	t.Run("hold of a run that was opened anew since", func(t *testing.T) {
		s := newSim(t, Params{Min: 1, Max: 1, Hold: true})
		s.can = []Ability{CanHold}
		s.join("a")
		s.obey()
		s.must(Order{Kind: OrderResume})
		s.obey()
		k := stored(t, s.r)
		s.must(Leave{ID: "a"})
		s.join("b")
		s.obey()
		require.True(t, s.runs["b"].Hold)
		v := s.revive()
		v.r = New(Config{Term: s.r.out.seq + 1000, Kept: k})
		v.comeBack("b")
		v.pass(resumeWindow)
		v.obey()
		require.True(t, v.runs["b"].Hold)
	})
	t.Run("bars", func(t *testing.T) {
		s := world(t, p, "a", "b")
		s.must(Order{Kind: OrderBar, Node: "x", Text: "smoke"})
		s.must(Order{Kind: OrderBar, Node: "y"})
		s.must(Order{Kind: OrderUnbar, Node: "y"})
		v := s.succession()
		require.Equal(t, s.r.orders.bars, v.r.orders.bars)
		v.joinNode(Node{ID: "x", Name: "x", Rank: -1, Slots: 2, Can: []Ability{CanGate}})
		require.Equal(t, job.Bar, v.dirs["x"].Kind)
	})
	t.Run("hold and command", func(t *testing.T) {
		s := newSim(t, Params{Min: 2, Max: 2, Hold: true})
		s.can = []Ability{CanHold, CanCommand}
		s.join("a", "b")
		s.obey()
		s.must(Order{Kind: OrderResume, Command: &job.Command{Args: []string{"--lr=2"}}})
		v := s.succession()
		require.Nil(t, v.r.Status().Hold, "it has ended")
		v.comeBack("a", "b")
		v.obey()
		require.Equal(t, "a b", v.order())
		require.False(t, v.runs["a"].Hold)
		require.Equal(t, []string{"--lr=2"}, v.runs["a"].Command.Args)
	})
	t.Run("a new run that is held", func(t *testing.T) {
		s := newSim(t, Params{Min: 2, Max: 2, Hold: true})
		s.can = []Ability{CanHold}
		s.join("a")
		v := s.succession()
		require.NotNil(t, v.r.Status().Hold)
	})
}

// The rules are those of the node that has opened the run, whoever comes back first.
func TestKeptParams(t *testing.T) {
	s := world(t, Params{Min: 2, Max: 2, MaxRestarts: 3}, "a", "b")
	v := s.succession()
	v.p.MaxRestarts = 7
	v.comeBack("b", "a")
	require.Equal(t, *s.r.params, *v.r.params)
	require.Equal(t, 3, v.dirs["a"].Params.MaxRestarts)
}

// What was spent counts, also if no launcher has heard of it; a newer launcher is right.
func TestKeptSpent(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 1, MaxRestarts: 9, Budget: Budget{
		Sum: true, Deadline: time.Hour, Windows: [MaxWindows]Window{{Scope: windowJob, Max: 9, Per: time.Hour}}}})
	s.join("a")
	s.obey()
	for range 3 {
		s.fail("a", RestartCharged)
		s.pass(time.Minute)
		s.obey()
	}
	require.Equal(t, 3, s.r.account.spent.Sum)
	for name, change := range map[string]func(*Directive){
		"as it is":            func(*Directive) {},
		"a launcher of old":   func(d *Directive) { d.Spent, d.Restarts, d.Epoch = &Spent{Sum: 1}, 1, d.Epoch-1 },
		"nothing of its own":  func(d *Directive) { d.Spent, d.Restarts = nil, 0 },
		"less of one's epoch": func(d *Directive) { d.Spent, d.Restarts = &Spent{Sum: 1}, 1 },
	} {
		v := s.succession()
		d := s.dirs["a"]
		change(&d)
		v.old = &sim{r: s.r, dirs: map[string]Directive{"a": d}, runs: s.runs, worked: s.worked}
		v.comeBack("a")
		require.Equal(t, s.r.account.spent, v.r.account.spent, name)
		require.Equal(t, 3, v.r.account.restarts, name)
		require.Equal(t, "a", v.order(), name)
	}
	v := s.succession()
	d := s.dirs["a"]
	d.Spent, d.Epoch = &Spent{Sum: 5}, d.Epoch+1
	v.old = &sim{r: s.r, dirs: map[string]Directive{"a": d}, runs: s.runs, worked: s.worked}
	v.comeBack("a")
	require.Equal(t, 5, v.r.account.spent.Sum)
}

func TestLargerSpent(t *testing.T) {
	at := time.Unix(1, 0)
	a := Spent{Since: at, Streak: 1, Sum: 5, Same: 2, Alike: "x", Best: job.Progress{Step: 9, Stepping: true}}
	b := Spent{Since: at.Add(1), Streak: 3, Fruitless: 4, Same: 1, Alike: "y", Held: true, HeldUntil: at,
		Recent: []restarted{{At: at}}, Best: job.Progress{Step: 4, Stepping: true}}
	want := Spent{Since: at, Streak: 3, Fruitless: 4, Sum: 5, Same: 2, Alike: "x", Held: true, HeldUntil: at,
		Recent: b.Recent, Best: a.Best}
	require.Equal(t, want, a.larger(b))
	require.Equal(t, want, b.larger(a))
	require.Equal(t, a, a.larger(Spent{}))
	require.Equal(t, a, Spent{}.larger(a))
}

// A node that has passed its check is not checked again because the daemon is another one.
func TestKeptPasses(t *testing.T) {
	s := newSim(t, Params{Min: 2, Max: 2, MaxRestarts: 3, Gate: true})
	s.can = []Ability{CanGate}
	s.join("a", "b")
	for _, id := range []string{"a", "b"} {
		s.must(Cleared{ID: id, Until: s.now.Add(time.Minute)})
	}
	s.obey()
	require.Equal(t, "a b", s.order())
	s.pass(time.Hour) // the clock of a pass stands still meanwhile
	v := s.succession()
	v.now = v.now.Add(time.Hour)
	v.comeBack("a", "b")
	v.fail("a", RestartCharged)
	v.obey()
	require.Equal(t, "a b", v.order())
	require.Empty(t, v.checked)

	s.join("spare", "good", "unchecked")
	s.must(Cleared{ID: "spare", Until: s.now.Add(time.Minute)})
	s.must(Cleared{ID: "good"})
	passes := map[string]KeptPass{"a": {Left: time.Minute}, "b": {Left: time.Minute}, // their clocks stand still
		"spare": {Until: s.now.Add(time.Minute)}, "good": {}}
	require.Equal(t, passes, s.r.Kept().Passes)
	v = s.succession()
	v.comeBack("spare", "good", "a", "b")
	require.Equal(t, passes, v.r.Kept().Passes)
}

// Terms rise, also if the clock of the later daemon is behind.
func TestKeptTerm(t *testing.T) {
	s := world(t, Params{Min: 1, Max: 1}, "a")
	r := New(Config{Term: 1, Kept: stored(t, s.r)})
	require.Greater(t, r.epoch.id.Term, s.r.epoch.id.Term)
}

// The clock of the next daemon is an hour behind: restarts grow old all the same, and neither a window nor the deadline
// is longer or shorter by that hour.
func TestKeptTimesOfTheFuture(t *testing.T) {
	b := Budget{BackoffMax: -1, BackoffLimit: -1, Deadline: 2 * time.Hour}
	b.Windows[0] = Window{windowJob, 2, 10 * time.Minute}
	s := newSim(t, unbounded(1, b))
	s.join("a")
	s.obey()
	for range 2 {
		_, ok := s.crashes("a", RestartCharged)
		require.True(t, ok)
		s.runsFor(time.Minute)
	}
	for name, kept := range map[string]bool{"in the store": true, "brought by launchers": false} {
		t.Run(name, func(t *testing.T) {
			v := s.revive()
			v.now = s.now.Add(-time.Hour)
			if kept {
				v.r = New(Config{Term: s.r.out.seq + 1000, Kept: stored(t, s.r).Steady(v.now)})
			}
			v.comeBack("a")
			require.Equal(t, 1, v.r.account.spent.within(v.now, Window{windowJob, 2, time.Minute}, cost{}), "the newest")
			require.Equal(t, 2, v.r.account.spent.within(v.now, b.Windows[0], cost{}))
			require.InDelta(t, 2*time.Hour, v.r.Status().Budget.Deadline.Sub(v.now), float64(3*time.Minute))
			v.runsFor(10 * time.Minute)
			require.Equal(t, 0, v.r.account.spent.within(v.now, b.Windows[0], cost{}))
		})
	}
}

// A run keeps little, however large it is.
func TestKeptIsSmall(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: MaxNodes, LastCall: time.Nanosecond, MaxRestarts: 1, Gate: true})
	s.can = []Ability{CanGate}
	for i := range 2000 {
		s.joinNode(Node{ID: fmt.Sprintf("%032d", i), Name: fmt.Sprintf("worker-%d", i), Rank: -1, Slots: 8, Can: s.can})
	}
	for id := range s.dirs {
		s.must(Cleared{ID: id, Until: s.now.Add(time.Hour)})
	}
	s.pass(time.Minute)
	s.obey()
	require.Len(t, s.runs, 2000)
	data, err := json.Marshal(s.r.Kept())
	require.NoError(t, err)
	require.Less(t, len(data), 4<<10)
}

// noted is the text of the newest note of a kind.
func (s *sim) noted(event job.Event) (text string) {
	for _, n := range s.log {
		if n.Event == event {
			text = n.Text
		}
	}
	return text
}
