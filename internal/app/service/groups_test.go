package service

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

func ask(id, name string) GroupRequest {
	return GroupRequest{ID: id, Name: name, Wish: -1, Size: 1, Group: rendezvous.Group{Count: 2, Min: 1}}
}

func (s *Service) enters(t *testing.T, q GroupRequest) int {
	t.Helper()
	a, err := s.Place("job", q)
	require.NoError(t, err)
	if a.Index < 0 {
		return -1
	}
	require.NoError(t, s.Hub.Join(t.Context(), rendezvous.GroupRun("job", a.Index), rendezvous.Join{
		Node: rendezvous.Node{ID: q.ID, Name: q.Name, Rank: -1, Slots: 1},
		Params: rendezvous.Params{Min: q.Size, Max: q.Size, Group: rendezvous.Group{
			Of: "job", Index: a.Index, Count: q.Group.Count, Min: q.Group.Min}},
	}))
	return a.Index
}

func TestPlacesArePromised(t *testing.T) {
	s := newService(t)
	for range 2 { // an answer that was lost is given again
		a, err := s.Place("job", ask("1", "a"))
		require.NoError(t, err)
		require.Equal(t, 0, a.Index)
	}
	require.Equal(t, 1, s.enters(t, ask("2", "b")))
	require.Equal(t, -1, s.enters(t, ask("3", "c")))
	require.Equal(t, 0, s.enters(t, ask("1", "a")))
	_, err := s.Hub.Leave(t.Context(), "job.g1", rendezvous.Leave{ID: "2", Reason: "test"})
	require.NoError(t, err)
	require.Equal(t, 1, s.enters(t, ask("3", "c")), "the promise to the node that left is void")
	require.Equal(t, 1, s.enters(t, ask("3", "c")), "it is there already")
}

func TestGroupsOfARunAreTheSame(t *testing.T) {
	s := newService(t)
	require.Equal(t, 0, s.enters(t, ask("1", "a")))
	q := ask("2", "b")
	q.Group.Min = 2
	_, err := s.Place("job", q)
	require.ErrorIs(t, err, rendezvous.ErrRefused)
	require.ErrorContains(t, err, "2 groups are needed, but the run was opened with 2, 1 and 1")
	q.Group = rendezvous.Group{Count: 3, Min: 1}
	_, err = s.Place("job", q)
	require.ErrorIs(t, err, rendezvous.ErrRefused)
	require.ErrorContains(t, err, `--replica-groups=3, but run "job" was opened with 2; use the same`)
	for _, bad := range []func(*GroupRequest){
		func(q *GroupRequest) { q.Group.Count = 1 },
		func(q *GroupRequest) { q.Group = rendezvous.Group{} },
		func(q *GroupRequest) { q.Size = 0 },
		func(q *GroupRequest) { q.Size = rendezvous.MaxNodes },
		func(q *GroupRequest) { q.ID = "" },
		func(q *GroupRequest) { q.Name = "a\n" },
	} {
		q = ask("2", "b")
		bad(&q)
		_, err = s.Place("job", q)
		require.ErrorIs(t, err, api.ErrBadRequest)
	}
}

func TestGroupThatHasEndedTakesNoNodes(t *testing.T) {
	s := newService(t)
	require.Equal(t, 0, s.enters(t, ask("1", "a")))
	require.Equal(t, 1, s.enters(t, ask("2", "b")))
	require.NoError(t, s.Hub.Order("job.g1", rendezvous.Order{Kind: rendezvous.OrderStop}))
	_, err := s.Hub.Leave(t.Context(), "job.g1", rendezvous.Leave{ID: "2", Reason: "the job failed"})
	require.NoError(t, err)
	require.Equal(t, -1, s.enters(t, ask("3", "c")))
	require.NoError(t, s.Hub.Forget("job.g1"))
	other := ask("3", "c")
	other.Group.Count = 3
	_, err = s.Place("job", other)
	require.ErrorIs(t, err, rendezvous.ErrRefused)
	require.Equal(t, -1, s.enters(t, ask("3", "c")), "also once its run is forgotten")
	st, err := s.Hub.Run("job.g0")
	require.NoError(t, err)
	require.Empty(t, st.Outcome, "one group is enough")
}

// Once no node is in any group, the run may begin anew with other groups.
func TestARunWithoutNodesMayHaveOtherGroups(t *testing.T) {
	s := newService(t)
	require.Equal(t, 0, s.enters(t, ask("1", "a")))
	_, err := s.Hub.Leave(t.Context(), "job.g0", rendezvous.Leave{ID: "1", Reason: "test"})
	require.NoError(t, err)
	q := ask("2", "b")
	q.Group.Count = 3
	require.Equal(t, 0, s.enters(t, q))
}

func TestRunsWithGroupsAreBounded(t *testing.T) {
	s := newService(t)
	for i := range maxDivisions {
		_, err := s.Place(fmt.Sprint("job", i), ask("1", "a"))
		require.NoError(t, err)
	}
	_, err := s.Place("another", ask("1", "a"))
	require.ErrorContains(t, err, "there are 1024 runs with replica groups")
	for _, d := range s.groups.of {
		d.used = d.used.Add(-2 * promise)
	}
	_, err = s.Place("another", ask("1", "a"))
	require.NoError(t, err, "those without nodes are forgotten")
	require.Less(t, len(s.groups.of), 2)
	require.WithinDuration(t, time.Now(), s.groups.of["another"].used, time.Minute)
}

func TestLighthouseServesReplicasOfGroups(t *testing.T) {
	s := newService(t)
	replica := func(id string, group int, number string) LighthouseRequest {
		return LighthouseRequest{id, rendezvous.QuorumAsk{
			Replica: "r" + id, Group: group, Number: number, Member: []byte(id)}}
	}
	_, err := s.Lighthouse("job", replica("1", 0, "n"))
	require.ErrorIs(t, err, rendezvous.ErrUnknownNode)
	s.enters(t, ask("1", "a"))
	s.enters(t, ask("2", "b"))
	for _, q := range []LighthouseRequest{replica("1", 1, "n"), replica("1", 2, "n"), replica("1", -1, "n")} {
		_, err = s.Lighthouse("job", q)
		require.ErrorIs(t, err, rendezvous.ErrUnknownNode, "it is in another group")
	}
	for _, bad := range []func(*LighthouseRequest){
		func(q *LighthouseRequest) { q.Replica = "" },
		func(q *LighthouseRequest) { q.Replica = "\n" },
		func(q *LighthouseRequest) { q.Member = make([]byte, maxMember+1) },
	} {
		q := replica("1", 0, "n")
		bad(&q)
		_, err = s.Lighthouse("job", q)
		require.ErrorIs(t, err, api.ErrBadRequest)
	}
	first := make(chan LighthouseAnswer)
	go func() {
		a, _ := s.Lighthouse("job", replica("1", 0, "n"))
		first <- a
	}()
	b, err := s.Lighthouse("job", replica("2", 1, "n"))
	require.NoError(t, err)
	require.Equal(t, [][]byte{[]byte("1"), []byte("2")}, b.Quorum.Members)
	require.Equal(t, b, <-first)
	b, err = s.Lighthouse("job", replica("2", 1, ""))
	require.NoError(t, err)
	require.Nil(t, b.Quorum, "a sign of life")
	_, err = s.Hub.Leave(t.Context(), "job.g0", rendezvous.Leave{ID: "1", Reason: "test"})
	require.NoError(t, err)
	b, err = s.Lighthouse("job", replica("2", 1, "m"))
	require.NoError(t, err)
	require.Equal(t, [][]byte{[]byte("2")}, b.Quorum.Members, "the other group has left")
}

func TestAsksThatWaitEndWithTheService(t *testing.T) {
	s := newService(t)
	s.enters(t, ask("1", "a"))
	held := make(chan error)
	go func() {
		_, err := s.Lighthouse("job", LighthouseRequest{"1", rendezvous.QuorumAsk{Replica: "r", Number: "n"}})
		held <- err
	}()
	s.Close(0)
	require.ErrorIs(t, <-held, api.ErrClosed)
}
