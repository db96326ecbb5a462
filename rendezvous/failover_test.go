package rendezvous

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// deputies are the names in the Failover that the node has got.
func (s *sim) deputies(id string) (names []string) {
	s.t.Helper()
	require.NotNil(s.t, s.runs[id].Failover)
	for _, h := range s.runs[id].Failover.Deputies {
		names = append(names, h.Name)
	}
	return names
}

// served is a run that the launcher "a" serves, which has a place in it.
func served(t *testing.T, p Params) *sim {
	s := newSim(t, p)
	s.r.cfg.Server = &Server{ID: "a", Host: "10.0.0.1", Port: 29400, Term: 1}
	return s
}

// member joins by its own address, with a port at which it can serve.
func (s *sim) peer(id, addr string, serve int) {
	s.t.Helper()
	s.joinNode(Node{ID: id, Name: id, Rank: -1, Slots: 1, Addr: addr, IP: addr, Peer: addr, Via: "10.0.0.1", Serve: serve})
}

func TestDeputiesAreOnHostsOnceAndFirst(t *testing.T) {
	s := served(t, Params{Min: 7, Max: 7})
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "10.0.0.1"})
	s.peer("b", "10.0.0.1", 1) // on the host that may be lost
	s.peer("c", "10.0.0.2", 1)
	s.peer("d", "10.0.0.2", 2)
	s.peer("e", "10.0.0.3", 1)
	s.peer("f", "10.0.0.4", 0) // cannot serve
	s.peer("g", "10.0.0.4", 1)
	s.obey()
	require.Equal(t, []string{"c", "e", "g", "b", "d"}, s.deputies("f"))
	w := s.runs["f"].Failover
	require.Equal(t, Failover{Term: w.Term, Server: "10.0.0.1:29400", Voters: 6, Members: 7, Deputies: w.Deputies,
		Names: []string{"a", "b", "c", "d", "e", "f", "g"}}, *w)
	require.Equal(t, Deputy{ID: "c", Name: "c", Addr: "10.0.0.2:1"}, w.Deputies[0])
	require.Equal(t, w, s.runs["a"].Failover)
	require.True(t, w.ByMember())
	require.Equal(t, []int{w.Voters, w.Members}, []int{w.Electorate(true), w.Electorate(false)})
	w.Alone = true
	require.Equal(t, w.Voters, w.Electorate(false), "silence is death")
}

func TestDeputiesAreUnderOtherSwitches(t *testing.T) {
	s := served(t, Params{Min: 5, Max: 5})
	s.r.cfg.Topology = Topology{"10.0.0.2": "x", "10.0.0.3": "x", "10.0.0.4": "y", "10.0.0.5": "y"}
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "10.0.0.1"})
	for i := 2; i <= 5; i++ {
		s.peer(string(rune('a'+i-1)), fmt.Sprint("10.0.0.", i), 1)
	}
	s.obey()
	require.Equal(t, []string{"b", "d", "c", "e"}, s.deputies("a"))
}

// The server of a run may have no place in its world, and then all members have a vote.
func TestDeputiesOfServerThatIsNoMember(t *testing.T) {
	s := served(t, Params{Min: 2, Max: 2})
	s.peer("b", "10.0.0.2", 1)
	s.peer("c", "10.0.0.3", 1)
	s.obey()
	require.Equal(t, 2, s.runs["b"].Failover.Voters)
	require.Equal(t, "10.0.0.1:29400", s.runs["b"].Failover.Server)
	require.Equal(t, "[fd00::1]:29400", hostPort("fd00::1", 29400))
}

// Launchers that two worlds of a server elect have different terms.
func TestTermsOfWorlds(t *testing.T) {
	worlds := []job.EpochID{{Round: 1}, {Round: 1, Epoch: 1}, {Round: 1, Epoch: 1000}, {Round: 2}, {Round: 1 << 20}}
	for i, id := range worlds[1:] {
		older, newer := epoch{id: worlds[i]}, epoch{id: id}
		require.Greater(t, newer.number(), older.number())
	}
	s := served(t, Params{Min: 2, Max: 2})
	s.peer("b", "10.0.0.2", 1)
	s.peer("c", "10.0.0.3", 1)
	s.obey()
	require.Equal(t, 1+s.r.epoch.number()*(maxDeputies+1), s.runs["b"].Failover.Term)
}

func TestNoDeputies(t *testing.T) {
	s := served(t, Params{Min: 2, Max: 2})
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "10.0.0.1"})
	s.peer("b", "10.0.0.2", 0)
	s.obey()
	require.Nil(t, s.runs["b"].Failover, "no member can serve")
	s = newSim(t, Params{Min: 1, Max: 1})
	s.peer("b", "10.0.0.2", 1)
	s.obey()
	require.Nil(t, s.runs["b"].Failover, "a daemon serves")
	_, err := s.r.Step(s.now, Join{Node: Node{ID: "x", Name: "x", Serve: 65536}, Params: s.p})
	require.ErrorContains(t, err, "can serve at port 65536")
}

// servedBy is a run of the launcher "a" and others, in a world with all of them.
func servedBy(t *testing.T, others ...string) *sim {
	s := served(t, Params{Min: 1, Max: 8, LastCall: time.Second, MaxRestarts: 9})
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "10.0.0.1"})
	for i, id := range others {
		s.peer(id, fmt.Sprint("10.0.0.", i+2), 1)
	}
	s.pass(time.Second)
	s.obey()
	require.Len(t, s.runs, 1+len(others))
	return s
}

// hush has hosts fall silent, with what runs there.
func (s *sim) hush(ids ...string) {
	for _, id := range ids {
		delete(s.runs, id)
		delete(s.dirs, id)
		s.gone[id] = true
		s.must(Detach{ID: id, Broken: true, Silent: true})
	}
	s.pass(silentGrace)
	s.obey()
}

// The silent half of a world may elect another server only when this one is dead; nobody follows it then.
func TestHalfOfTheWorldIsSilent(t *testing.T) {
	s := servedBy(t, "b", "c", "d")
	s.hush("c", "d")
	require.Equal(t, "a b", s.order())
	require.Nil(t, s.runs["b"].Failover)
	s.joinNode(Node{ID: "e", Name: "c", Rank: -1, Slots: 1, Addr: "10.0.0.4", Serve: 1})
	s.pass(time.Second)
	s.obey()
	require.Len(t, s.runs, 3)
	require.Nil(t, s.runs["b"].Failover, "d may live")
	s.joinNode(Node{ID: "f", Name: "d", Rank: -1, Slots: 1, Addr: "10.0.0.5", Serve: 1})
	s.pass(time.Second)
	s.obey()
	require.Len(t, s.runs["b"].Failover.Deputies, 3)
}

// Most of a world may have elected another server while its hosts are silent.
func TestMostOfTheWorldIsSilent(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	s.vanish("c")
	s.hush("d", "e")
	require.Empty(t, s.runs)
	require.Contains(t, s.dirs["b"].Cause.Text, "3 of the 5 nodes of the newest one are away")
	s.joinNode(Node{ID: "f", Name: "d", Rank: -1, Slots: 1})
	s.pass(time.Minute)
	s.obey()
	require.Empty(t, s.runs, "e may live, and have the votes of those that have died")
	s.joinNode(Node{ID: "g", Name: "e", Rank: -1, Slots: 1})
	s.pass(time.Minute)
	s.obey()
	require.Len(t, s.runs, 4)
}

func TestMostOfTheWorldStaysSilent(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	s.hush("c", "d", "e")
	s.joinNode(Node{ID: "x", Name: "x", Rank: -1, Slots: 1}) // a newcomer is none of them
	s.pass(DefaultJoinTimeout)
	require.Contains(t, s.why(), "--rdzv-conf=alone=true")
}

func TestSilenceThatSealsNothing(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	s.vanish("c", "d", "e")
	s.pass(BrokenGrace)
	s.pass(silentGrace)
	s.obey()
	require.Equal(t, "a b", s.order(), "the dead elect nobody")
	require.NotNil(t, s.runs["b"].Failover)
	s = servedBy(t, "b", "c", "d", "e")
	s.r.cfg.Server.Alone = true
	s.hush("c", "d", "e")
	require.Equal(t, "a b", s.order(), "the user says that they are dead")
	s = servedBy(t, "b")
	s.hush("b")
	require.Equal(t, "a", s.order())
}

// A member that was given up gives up its vote, too, before it asks for a place again. It is told to wait then, and
// stops its workers without another request.
func TestMembersThatComeBackHaveNoVote(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	place := *s.runs["e"].Place
	s.hush("c", "d", "e")
	require.Empty(t, s.runs)
	delete(s.gone, "e")
	s.must(Join{Node: Node{ID: "e", Name: "e", Rank: -1, Slots: 1}, Params: s.p,
		Resume: &Resume{EpochID: s.worked["e"].EpochID, Place: place}, Seen: s.worked["e"].EpochID})
	s.must(Attach{ID: "e"})
	s.pass(time.Second)
	s.obey()
	require.Len(t, s.runs, 3)
	require.NotNil(t, s.runs["e"].Failover)
}

// An elected server counts the members that have come back to it.
func TestElectedServerNeedsMembers(t *testing.T) {
	for name, c := range map[string]struct {
		ofDead bool
		back   []string
		seals  bool
	}{
		"two of five":          {back: []string{"b", "c"}},
		"three of five":        {back: []string{"b", "c", "d"}, seals: true},
		"one of the four left": {ofDead: true, back: []string{"b"}},
		"two of the four left": {ofDead: true, back: []string{"b", "c"}, seals: true},
	} {
		t.Run(name, func(t *testing.T) {
			v := servedBy(t, "b", "c", "d", "e").revive()
			v.r.cfg.Server = &Server{ID: "b", Term: 7, Elected: true, OfDead: c.ofDead}
			v.comeBack(c.back...)
			v.pass(resumeWindow)
			v.obey()
			v.pass(time.Minute)
			v.obey()
			require.Equal(t, c.seals, len(v.runs) == len(c.back), v.runs)
		})
	}
}

// Members that die while the elected server waits for the others are not silent.
func TestDeathsWhileAWorldIsRebuilt(t *testing.T) {
	for _, dead := range [][]string{{"c", "d", "e"}, {"c", "d"}} {
		v := servedBy(t, "b", "c", "d", "e").revive()
		v.r.cfg.Server = &Server{ID: "b", Term: 7, Elected: true, OfDead: true}
		v.comeBack("b", "c", "d")
		v.vanish("c", "d")
		if len(dead) == 3 {
			v.comeBack("e")
			v.vanish("e")
		}
		v.pass(resumeWindow)
		v.obey()
		v.pass(time.Minute)
		v.obey()
		require.Equal(t, len(dead) == 3, len(v.runs) == 1, "e may live unless it is dead, too: %v", v.runs)
	}
}

// A member that goes while its world is rebuilt, and is back before that is done, is not away.
func TestBackWhileAWorldIsRebuilt(t *testing.T) {
	s := servedBy(t, "b", "c")
	v := s.revive()
	v.r.cfg.Server = &Server{ID: "a", Term: 7, Elected: true}
	v.comeBack("a", "b")
	v.must(Detach{ID: "b", Broken: true})
	v.pass(BrokenGrace)
	require.Len(t, v.r.epoch.away, 1)
	v.comeBack("b", "c")
	require.Equal(t, running, v.r.epoch.phase)
	absent, silent := v.r.sealer.absent()
	require.Equal(t, [2]int{}, [2]int{absent, silent})
}

// In a world that the elected server has sealed itself, every vote counts, also after a launcher has come that knows a
// later term.
func TestWorldOfAnElectedServer(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	s.r.cfg.Server.Elected, s.r.cfg.Server.OfDead = true, true
	later := job.EpochID{Term: s.r.epoch.id.Term + 1, Round: 1}
	s.must(Join{Node: Node{ID: "x", Name: "x", Rank: -1, Slots: 1}, Params: s.p, Seen: later})
	require.True(t, s.r.epoch.adopted)
	s.hush("c", "d", "e")
	s.pass(time.Minute)
	s.obey()
	require.Empty(t, s.runs)
}

// A dead server that was no member of its world has no vote that is missing.
func TestDeadServerWithoutAPlace(t *testing.T) {
	s := served(t, Params{Min: 1, Max: 8, LastCall: time.Second, MaxRestarts: 9})
	for i, id := range []string{"b", "c", "d", "e", "f"} {
		s.peer(id, fmt.Sprint("10.0.0.", i+2), 1)
	}
	s.pass(time.Second)
	s.obey()
	v := s.revive()
	v.r.cfg.Server = &Server{ID: "b", Term: 7, Elected: true, OfDead: s.runs["b"].Failover.ByMember()}
	v.comeBack("b", "c")
	v.pass(resumeWindow)
	v.obey()
	v.pass(time.Minute)
	v.obey()
	require.Empty(t, v.runs, "three of five may have elected another server since")
}

// Half of a world was silent, and some of that is back before the next one forms, such as in the time of checks.
func TestHalfThatIsBackInTime(t *testing.T) {
	s := servedBy(t, "b", "c", "d")
	place := *s.runs["c"].Place
	s.r.orders.paused = &job.Cause{}
	s.hush("c", "d")
	require.False(t, s.r.sealer.outvoted())
	delete(s.gone, "c")
	s.must(Join{Node: Node{ID: "c", Name: "c", Rank: -1, Slots: 1}, Params: s.p,
		Resume: &Resume{EpochID: s.worked["c"].EpochID, Place: place}, Seen: s.worked["c"].EpochID})
	s.must(Attach{ID: "c"})
	s.r.orders.paused = nil
	s.pass(time.Second)
	s.obey()
	require.Len(t, s.runs, 3)
	require.NotNil(t, s.runs["b"].Failover, "most of the old world is in this one")
}

// A pod of a later generation proves that the one before has ended, also if that was not known to be away.
func TestLaterGenerationsHaveNoVoteLeft(t *testing.T) {
	s := served(t, Params{Min: 1, Max: 5, MaxRestarts: 9})
	join := func(id string, rank, generation int) {
		s.joinNode(Node{ID: id, Name: id, Rank: rank, Slots: 1, Addr: fmt.Sprint("10.0.0.", rank+1), Serve: 1,
			Generation: generation})
	}
	for i, id := range []string{"a", "b", "c", "d", "e"} {
		join(id, i, 1)
	}
	s.obey()
	require.True(t, s.r.epoch.votes)
	for _, id := range []string{"c", "d", "e"} {
		s.must(Detach{ID: id})
		delete(s.dirs, id)
		delete(s.runs, id)
		s.gone[id] = true
	}
	for i, id := range []string{"c2", "d2", "e2"} {
		join(id, i+2, 2)
	}
	s.obey()
	require.Equal(t, "a b c2 d2 e2", s.order())
}

// The members of a world that has not been released know no deputies, and so have elected nobody.
func TestWorldThatWasNotReleased(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	s.fail("b", RestartCharged)
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		s.obeyOne(id)
	}
	require.Equal(t, releasing, s.r.epoch.phase)
	for _, id := range []string{"c", "d", "e"} {
		s.gone[id] = true
		delete(s.dirs, id)
		delete(s.runs, id)
		s.must(Detach{ID: id, Broken: true, Silent: true})
	}
	s.pass(silentGrace)
	s.obey()
	require.Equal(t, "a b", s.order())
}

// What is known of members that have gone is not kept where nobody elects a server.
func TestAbsenceInADaemon(t *testing.T) {
	s := newSim(t, Params{Min: 1, Max: 3, LastCall: time.Second})
	s.join("a", "b", "c")
	s.obey()
	s.succeed("a", "b", "c")
	for _, id := range []string{"a", "b", "c"} {
		s.must(Leave{ID: id})
	}
	require.Equal(t, finished, s.r.epoch.phase)
	require.Empty(t, s.r.epoch.away)
}

// A launcher that was started again proves that the one before has ended, also when it is gone itself.
func TestSilentHostIsStartedAgainTwice(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	s.hush("c", "d", "e")
	for _, id := range []string{"c", "d"} {
		s.joinNode(Node{ID: id + "2", Name: id, Rank: -1, Slots: 1})
	}
	s.vanish("c2")
	s.joinNode(Node{ID: "e2", Name: "e", Rank: -1, Slots: 1})
	s.pass(time.Second)
	s.obey()
	require.Len(t, s.runs, 4)
}

// Members that fall silent after an elected server has given up on others of its world may still elect another server.
func TestSilenceAfterAnIncompleteReturn(t *testing.T) {
	v := servedBy(t, "b", "c", "d", "e").revive()
	v.r.cfg.Server = &Server{ID: "b", Term: 7, Elected: true, OfDead: true}
	v.comeBack("b", "c", "d", "e")
	v.pass(resumeWindow)
	v.hush("c", "d", "e")
	v.pass(time.Minute)
	v.obey()
	require.Empty(t, v.runs, "three of the four that live may elect another one")
}

// elected is b's rendezvous of the world of servedBy, whose server is lost.
func elected(s *sim, ofDead bool) *revived {
	v := s.revive()
	run := s.runs["b"]
	v.r.cfg.Server = &Server{ID: "b", Term: 7, Elected: true, OfDead: ofDead, World: run.Failover, Epoch: run.EpochID}
	return v
}

// A launcher that was started again before the silent one is given up proves as much as a later one.
func TestSilentHostIsStartedAgainAtOnce(t *testing.T) {
	for _, at := range []time.Duration{0, silentGrace / 2, 2 * silentGrace} {
		s := servedBy(t, "b", "c", "d", "e")
		s.pass(time.Minute)
		again := func() {
			for _, id := range []string{"c", "d", "e"} {
				s.joinNode(Node{ID: id + "2", Name: id, Rank: -1, Slots: 1, Uptime: time.Second})
			}
		}
		for _, id := range []string{"c", "d", "e"} {
			delete(s.runs, id)
			delete(s.dirs, id)
			s.gone[id] = true
			s.must(Detach{ID: id, Broken: true, Silent: true})
		}
		s.pass(at)
		again()
		s.pass(2 * silentGrace)
		s.obey()
		s.pass(time.Second)
		s.obey()
		require.Len(t, s.runs, 5, "they come after %s", at)
		require.NotNil(t, s.runs["b"].Failover)
	}
	s := servedBy(t, "b", "c", "d", "e")
	s.pass(time.Hour)
	s.hush("c", "d", "e")
	for _, id := range []string{"c", "d", "e"} { // a second launcher of each host, which waited all the time
		s.joinNode(Node{ID: id + "2", Name: id, Rank: -1, Slots: 1, Uptime: time.Hour})
	}
	s.pass(time.Minute)
	s.obey()
	require.Empty(t, s.runs, "others of these names do not prove that they have ended")
}

// An elected server says which members have not come back. It goes on when launchers of their names are started, or
// when they come late.
func TestElectedServerKnowsWhoIsMissing(t *testing.T) {
	begin := func(ofDead bool, back ...string) (*sim, *revived) {
		s := servedBy(t, "b", "c", "d", "e", "f", "g")
		v := elected(s, ofDead)
		v.comeBack(back...)
		v.pass(resumeWindow)
		v.obey()
		v.pass(time.Minute)
		v.obey()
		return s, v
	}
	start := func(v *revived, names ...string) {
		for _, name := range names {
			v.joinNode(Node{ID: name + "2", Name: name, Rank: -1, Slots: 1})
		}
		v.pass(time.Minute)
		v.obey()
	}
	late := func(s *sim, v *revived, ids ...string) {
		for _, id := range ids {
			run := s.worked[id]
			v.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 1, Uptime: time.Hour}, Params: v.p, Seen: run.EpochID,
				Resume: &Resume{EpochID: run.EpochID, Place: *run.Place}})
			v.must(Attach{ID: id})
		}
		v.pass(time.Minute)
		v.obey()
	}
	_, v := begin(false, "b", "c", "d") // of seven; a, e, f and g are silent
	require.Empty(t, v.runs)
	require.Contains(t, v.why(), "did not come back after the rendezvous daemon was started again: a, e, f, g")
	start(v, "e", "f", "g")
	require.Empty(t, v.runs, "a may live, and have the votes of those")
	start(v, "a")
	require.Len(t, v.runs, 7)

	s, v := begin(false, "b", "c", "d")
	late(s, v, "g")
	require.Len(t, v.runs, 4, "more than half of the world")

	s, v = begin(true, "b", "c") // a is dead
	start(v, "a", "e", "f")
	require.Empty(t, v.runs, "d and g may have chosen another server")
	start(v, "d")
	late(s, v, "g")
	require.Len(t, v.runs, 7)
}

// Nobody waits for the node of a server that is dead, or for that of a silent one alone. Other members may come back,
// and so may a silent server where the run has a time for that.
func TestDeadServerIsNotAwaited(t *testing.T) {
	for name, c := range map[string]struct {
		ofDead  bool
		timeout time.Duration
		back    []string
		waits   time.Duration
		cause   string
	}{
		"dead": {true, 0, []string{"b", "c", "d"}, 0,
			"node 0 (a) is gone: its launcher, which served the rendezvous, has died"},
		"silent": {false, 0, []string{"b", "c", "d"}, 0,
			"node 0 (a) is gone: its host, where the rendezvous was served, is silent"},
		"silent, for a time":              {false, time.Minute, []string{"b", "c", "d"}, resumeWindow, "1 of 4 nodes did"},
		"dead, and another one is away":   {true, 0, []string{"b", "c"}, resumeWindow, "2 of 4 nodes did not come back"},
		"silent, and another one is away": {false, 0, []string{"b", "c"}, resumeWindow, "2 of 4 nodes did not come back"},
	} {
		t.Run(name, func(t *testing.T) {
			v := elected(servedBy(t, "b", "c", "d"), c.ofDead)
			v.p.NodeTimeout = c.timeout
			v.comeBack(c.back...)
			if c.waits > 0 {
				v.pass(c.waits - 1)
				require.NotEqual(t, job.Stop, v.dirs["b"].Kind)
				v.pass(1)
			}
			require.Equal(t, job.Stop, v.dirs["b"].Kind)
			require.Contains(t, v.dirs["b"].Cause.Text, c.cause)
			require.Equal(t, job.CauseLoss, v.dirs["b"].Cause.Kind)
			v.obey()
			v.pass(time.Minute)
			v.obey()
			require.Len(t, v.runs, len(c.back))
			require.Zero(t, v.r.Status().Restarts)
		})
	}
}

// A server that had left the world that it sealed has no place in it: node 0 is another one, and is awaited.
func TestServerOutsideOfTheWorld(t *testing.T) {
	v := elected(servedBy(t, "b", "c", "d"), false)
	v.r.cfg.Server.World.Voters = v.r.cfg.Server.World.Members
	v.comeBack("b", "c", "d")
	v.pass(resumeWindow - 1)
	require.NotEqual(t, job.Stop, v.dirs["b"].Kind)
}

// Of a large world the names are not known.
func TestDeadServerOfALargeWorld(t *testing.T) {
	s := servedBy(t, "b", "c")
	s.runs["b"].Failover.Names = nil
	v := elected(s, true)
	v.comeBack("b", "c")
	require.Equal(t, "node 0 (whose name is not known) is gone: its launcher, which served the rendezvous, has died",
		v.dirs["b"].Cause.Text)
}

// Names that the elected server has of another world count for nothing.
func TestNamesOfAnotherWorld(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	v := elected(s, false)
	v.r.cfg.Server.Epoch.Round++
	v.comeBack("b", "c")
	v.pass(resumeWindow)
	for _, name := range []string{"a", "d", "e"} {
		v.joinNode(Node{ID: name + "2", Name: name, Rank: -1, Slots: 1})
	}
	v.pass(time.Minute)
	v.obey()
	require.Empty(t, v.runs)
}

// A member that has come back to an elected server twice, and fallen silent twice, is one member.
func TestSilentTwiceWhileAWorldIsRebuilt(t *testing.T) {
	v := elected(servedBy(t, "b", "c", "d"), false)
	v.comeBack("b")
	for range 2 {
		v.comeBack("c")
		v.must(Detach{ID: "c", Broken: true, Silent: true})
		v.pass(time.Millisecond)
		require.Nil(t, v.r.members.nodes["c"])
	}
	v.pass(resumeWindow)
	absent, silent := v.r.sealer.absent()
	require.Equal(t, []int{3, 3}, []int{absent, silent}, "a, c and d")
}

// Members that may serve next know all bars at once, also those of names that no launcher has any more. Others do not
// need them.
func TestDeputiesKnowBars(t *testing.T) {
	s := servedBy(t, "b", "c", "d")
	require.Nil(t, s.dirs["b"].Bars)
	plan, epoch := s.dirs["b"].Failover, s.runs["b"].EpochID
	s.ordered(OrderBar, "x")
	require.Equal(t, []string{"x"}, sortedKeys(s.dirs["b"].Bars.Names))
	require.Nil(t, s.dirs["a"].Bars, "it serves already")
	require.Equal(t, job.Run, s.dirs["b"].Kind)
	require.Equal(t, plan, s.dirs["b"].Failover)
	s.obey()
	require.Equal(t, epoch, s.runs["b"].EpochID, "nobody is stopped")
	s.ordered(OrderBar, "y")
	s.ordered(OrderUnbar, "y")
	require.Equal(t, []string{"x"}, sortedKeys(s.dirs["c"].Bars.Names))

	v := elected(s, true)
	server := *v.r.cfg.Server
	server.Bars = s.dirs["b"].Bars
	v.r = New(Config{Term: s.r.out.seq + 1000, Server: &server})
	require.Equal(t, s.r.Status().Bars, v.r.Status().Bars)
	v.comeBack("b", "c", "d")
	require.Equal(t, []string{"x"}, sortedKeys(v.dirs["c"].Bars.Names), "for a third one")
	v.obey()
	require.Len(t, v.runs, 3)
	v.joinNode(Node{ID: "x2", Name: "x", Rank: -1, Slots: 1, Can: []Ability{CanGate}})
	require.Equal(t, job.Bar, v.dirs["x2"].Kind)
	v.ordered(OrderUnbar, "x")
	require.Equal(t, &Bars{}, v.dirs["c"].Bars, "the end of a bar is news, too")
}

// A server that has not sealed the world that it serves tells the deputies of that, as far as it knows them.
func TestBarsInARebuiltWorld(t *testing.T) {
	s := servedBy(t, "b", "c", "d")
	v := elected(s, false)
	v.comeBack("a", "b", "c", "d")
	v.ordered(OrderBar, "x")
	require.Contains(t, v.dirs["c"].Bars.Names, "x")
	require.Nil(t, v.dirs["c"].Failover, "that of the world counts on")
}

func TestBarsThatDeputiesKnowAreBounded(t *testing.T) {
	s := servedBy(t, "b", "c")
	for i := range maxKeptNames + 1 {
		s.ordered(OrderBar, fmt.Sprintf("x%03d", i))
	}
	require.Len(t, s.dirs["b"].Bars.Names, maxKeptNames)
	require.NotContains(t, s.dirs["b"].Bars.Names, fmt.Sprintf("x%03d", maxKeptNames))
	long := job.Cause{Text: fmt.Sprintf("%02000d", 0)}
	r := New(Config{Server: &Server{Bars: &Bars{map[string]job.Cause{"x": long}}}})
	require.Len(t, r.Status().Bars["x"].Text, maxOrderText)
}

// A server is killed when some of its members have heard of the run's success, and have left. The others, and the next
// server, do not know of it: the world starts again without those.
func TestSuccessThatSomeHaveNotHeardOf(t *testing.T) {
	s := servedBy(t, "b", "c", "d", "e")
	v := elected(s, true)
	for _, id := range []string{"b", "d", "e"} {
		run := s.worked[id]
		v.must(Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 1}, Params: v.p, Seen: run.EpochID,
			Resume: &Resume{EpochID: run.EpochID, Place: *run.Place, Done: true}})
		v.must(Attach{ID: id})
	}
	v.pass(resumeWindow)
	v.obey()
	require.Len(t, v.runs, 3)
	require.Contains(t, v.noted(job.EventBreak), "2 of 5 nodes did not come back")
}

// Nodes beside a world know who may serve next, so that they can follow. Members that wait for the next world know it
// already, and are told nothing new.
func TestSparesKnowDeputies(t *testing.T) {
	s := served(t, Params{Min: 3, Max: 3, MaxRestarts: 9})
	s.joinNode(Node{ID: "a", Name: "a", Rank: -1, Slots: 1, Addr: "10.0.0.1"})
	s.peer("b", "10.0.0.2", 1)
	require.Nil(t, s.dirs["b"].Failover, "nobody votes yet")
	s.peer("c", "10.0.0.3", 1)
	s.peer("d", "10.0.0.4", 1) // before the workers of the others start
	s.obey()
	s.peer("e", "10.0.0.5", 1)
	first := s.runs["b"].Failover
	require.NotNil(t, first)
	for _, id := range []string{"d", "e"} {
		require.Equal(t, job.Wait, s.dirs[id].Kind)
		require.Equal(t, first, s.dirs[id].Failover)
		require.Nil(t, s.dirs[id].Bars)
	}
	s.fail("b", RestartCharged)
	s.obeyOne("a")
	require.Equal(t, job.Wait, s.dirs["a"].Kind)
	require.Nil(t, s.dirs["a"].Failover)
	s.obey()
	require.Greater(t, s.runs["b"].Failover.Term, first.Term)
	require.Equal(t, s.runs["b"].Failover, s.dirs["e"].Failover)
	s.ordered(OrderBar, "e")
	require.NotNil(t, s.dirs["e"].Barred)
	require.NotNil(t, s.dirs["e"].Failover)
}
