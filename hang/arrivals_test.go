package hang

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// came is a rank whose page was read at one o'clock: the number and the age of its newest collective, by group.
func came(rank int, groups ...GroupState) Evidence {
	for i := range groups {
		groups[i].Since = time.Hour - groups[i].Since
	}
	return Evidence{Worker: Worker{Rank: rank}, Samples: []Sample{{At: time.Minute},
		{At: time.Hour, Page: &Page{Groups: groups}}, {At: time.Hour + time.Second}}}
}

func arrivalsOf(all ...Evidence) *Arrivals {
	a := arrivals{meetings: map[uint64]*meeting{}}
	for _, e := range all {
		a.add(&e)
	}
	return a.result(dawn)
}

func seen(id, seq uint64, since time.Duration) GroupState {
	return GroupState{ID: id, Seq: seq, Since: since}
}

func TestArrivalsOfRanks(t *testing.T) {
	s := time.Second
	require.Nil(t, arrivalsOf())
	require.Nil(t, arrivalsOf(Evidence{}, came(1), came(2, seen(7, 5, s))), "nobody to meet")

	// Rank 2 does not come, and rank 3 has come 9 s after the first.
	got := arrivalsOf(came(0, seen(7, 5, 20*s)), came(1, seen(7, 5, 20*s)),
		came(2, seen(7, 4, 31*s)), came(3, seen(7, 5, 11*s)), Evidence{Worker: Worker{Rank: 4}})
	require.Equal(t, &Arrivals{At: dawn, Late: []Lateness{{Ranks: "2", Late: 20 * s, Absent: true},
		{Ranks: "3", Late: 9 * s}, {Ranks: "0-1"}}}, got)

	// Rank 0 is late for its pair (group 1), so its pair waits, and cannot come to the others of its kind (group 3).
	got = arrivalsOf(
		came(0, seen(1, 8, 30*s), seen(2, 4, 40*s)),
		came(1, seen(1, 9, 20*s), seen(3, 4, 40*s)),
		came(2, seen(4, 9, 20*s), seen(2, 5, 10*s)),
		came(3, seen(4, 9, 20*s), seen(3, 5, 10*s)))
	require.Equal(t, []Lateness{{Ranks: "0", Late: 20 * s, Absent: true}, {Ranks: "1-3"}}, got.Late)
}

func TestArrivalsAreBounded(t *testing.T) {
	var all []Evidence
	for r := range 5000 {
		all = append(all, came(r, seen(7, 5, time.Duration(r)*time.Second)))
	}
	got := arrivalsOf(all...)
	require.LessOrEqual(t, len(got.Late), maxLateness)
	require.Greater(t, len(got.Late), maxLateness/4)
	require.Equal(t, "4999", got.Late[len(got.Late)-1].Ranks[len("4955-"):])
}

// The newest summary with steps is the pace of its epoch.
func TestPicturesHaveThePace(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.c.Step(s.now, Begin{World: s.world})
	tell := func(node int, sum Summary) *Pace {
		s.c.Step(s.now, Heard{GroupRank: node, Report: Report{Epoch: s.world.Epoch, Summary: &sum}})
		return s.c.Picture(false).Pace
	}
	require.Nil(t, tell(0, Summary{Age: time.Second}), "it counts no steps")
	first := tell(1, Summary{Steps: 7, StepTime: time.Second, Age: 3 * time.Second})
	require.Equal(t, &Pace{s.world.Epoch, 7, time.Second, s.now.Add(-3 * time.Second)}, first)
	require.EqualValues(t, 9, tell(0, Summary{Steps: 9}).Steps)
	require.EqualValues(t, 7, first.Steps, "a picture does not change")
}

// A Picture has them with a verdict, and after a collection.
func TestPicturesHaveArrivals(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.c.Step(s.now, Begin{World: s.world})
	require.Nil(t, s.c.Picture(false).Arrivals)
	s.c.Step(s.now, Collect{})
	seq, _ := s.c.Collection()
	for node := range 2 {
		late := seen(7, 5, time.Duration(node)*time.Second)
		s.c.Step(s.now, Heard{GroupRank: node, Report: Report{Epoch: s.world.Epoch, Ask: seq,
			Evidence: []Evidence{came(2*node, late), came(2*node+1, late)}}})
	}
	require.Equal(t, []Lateness{{Ranks: "0-1", Late: time.Second}, {Ranks: "2-3"}}, s.c.Picture(false).Arrivals.Late)

	big := crowd(128, 5)
	in := NewIncident(IncidentConfig{Judge: Judge})
	in.Step(dawn, Begin{World: big.world})
	suspected := []Suspicion{{Rank: 5, Age: time.Minute}}
	in.Step(dawn, Heard{GroupRank: 0, Report: Report{Epoch: big.world.Epoch, Suspicions: suspected}})
	for node := range big.world.Nodes {
		in.Step(dawn, Heard{GroupRank: node, Report: Report{Epoch: big.world.Epoch, Ask: in.Pending(node).Seq,
			Suspicions: suspected, Evidence: big.ev[8*node : 8*node+8]}})
	}
	got := in.Picture(false)
	require.Equal(t, KindBehind, got.Verdict.Kind)
	require.Equal(t, "5", got.Arrivals.Late[0].Ranks)
	require.True(t, got.Arrivals.Late[0].Absent)
}
