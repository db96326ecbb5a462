package probe

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

func TestRungs(t *testing.T) {
	require.Equal(t, []int{576, 1500, 4200, 9000}, rungs(9000))
	require.Equal(t, []int{576, 1400}, rungs(1400))
	require.Equal(t, []int{576, 1500, 4200, 9000, 65520}, rungs(65520))
	require.Equal(t, []int{576, 1500, 4200, 9000, 65535}, rungs(65536), "no packet is larger")
	require.Equal(t, []int{576}, rungs(576))
}

func newLadder(r role, sizes ...int) *ladder {
	s := &session{role: r, limits: unhurried, peer: netip.MustParseAddr("10.0.0.2"),
		ctl: &control{key: []byte("0123456789abcdef")}}
	return &ladder{s: s, sizes: sizes, acked: make([][ladderTries]bool, len(sizes)), served: map[[2]byte]bool{},
		news: make(chan struct{}, 1)}
}

func TestWhatALadderMeans(t *testing.T) {
	all, none, one := [ladderTries]bool{true, true, true}, [ladderTries]bool{}, [ladderTries]bool{false, true, false}
	for name, tt := range map[string]struct {
		acked [][ladderTries]bool
		want  climbed
	}{
		"everything at once":      {[][ladderTries]bool{{true}, {true}, {true}}, climbed{Most: 9000}},
		"a black hole":            {[][ladderTries]bool{all, all, none}, climbed{Most: 1500, Failed: 9000}},
		"hole for all but small":  {[][ladderTries]bool{all, none, none}, climbed{Most: 576, Failed: 1500}},
		"no UDP at all":           {[][ladderTries]bool{none, none, none}, climbed{}},
		"loss of any size":        {[][ladderTries]bool{one, one, none}, climbed{Most: 1500}},
		"a large one got through": {[][ladderTries]bool{all, none, one}, climbed{Most: 9000}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLadder(dialerRole, 576, 1500, 9000)
			l.acked = tt.acked
			require.Equal(t, tt.want, l.outcome(make([]bool, 3)))
		})
	}
	// What the interface itself refuses says nothing about the path.
	l := newLadder(dialerRole, 576, 1500, 9000)
	l.acked = [][ladderTries]bool{all, all, none}
	require.Equal(t, climbed{Most: 1500}, l.outcome([]bool{false, false, true}))
}

func TestHole(t *testing.T) {
	require.Nil(t, holeOf(climbed{Most: 9000}, climbed{}))
	f := holeOf(climbed{Most: 1500, Failed: 9000}, climbed{Most: 9000})
	require.Equal(t, netcheck.MTU, f.class)
	require.Contains(t, f.text, "of what this end sent, packets of 1500 bytes get through, of 9000 bytes none")
	require.NotContains(t, f.text, "the other end sent")
	f = holeOf(climbed{Most: 1500, Failed: 4200}, climbed{Most: 576, Failed: 1500})
	require.Contains(t, f.text, "of what the other end sent, packets of 576 bytes get through")
}

func TestLadderAnswers(t *testing.T) {
	dialer, server := newLadder(dialerRole, 576, 1500), newLadder(serverRole, 576, 1500)
	q := dialer.datagram(1, 0, 1472)
	require.Len(t, q, 1472)
	a := server.take(q)
	require.NotNil(t, a)
	require.LessOrEqual(t, len(a), len(q), "an answer is never longer than what it answers")
	require.Equal(t, 1500, server.most)
	require.Nil(t, server.take(q), "what comes twice is answered once")
	require.Nil(t, dialer.take(a))
	require.True(t, dialer.answered(1))
	require.False(t, dialer.answered(0))

	require.Nil(t, server.take(server.datagram(0, 0, 548)), "its own, sent back")
	require.Nil(t, dialer.take(q))
	forged := dialer.datagram(0, 0, 548)
	forged[5]++
	require.Nil(t, server.take(forged))
	other := newLadder(dialerRole, 576, 1500)
	other.s.ctl.key = []byte("another test's..")
	require.Nil(t, server.take(other.datagram(0, 0, 548)))
}

func FuzzLadder(f *testing.F) {
	l := newLadder(dialerRole, 576, 1500)
	f.Add(l.datagram(0, 0, 548))
	f.Add(l.answer('a', dialerRole, 1, 2))
	f.Fuzz(func(t *testing.T, d []byte) {
		if len(d) < answerLen {
			return
		}
		server := newLadder(serverRole, 576, 1500)
		require.LessOrEqual(t, len(server.take(d)), len(d))
	})
}
