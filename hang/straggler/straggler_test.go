package straggler

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
)

const now0 = 1000 * time.Second

// crew are ranks of one node in steps that each rank may prolong.
type crew struct {
	s     Finder
	now   time.Duration
	step  time.Duration
	late  []time.Duration // by how much each rank prolongs a step: everybody waits for the last one
	begin time.Duration
	ends  []time.Duration
}

func newCrew(step time.Duration, late ...time.Duration) *crew {
	return &crew{now: now0, begin: now0, step: step, late: late}
}

func (c *crew) run(d time.Duration) {
	for end := c.now + d; c.now < end; {
		c.now += time.Second
		for c.begin+c.step+slices.Max(c.late) <= c.now {
			c.begin += c.step + slices.Max(c.late)
			c.ends = append(c.ends, c.begin)
		}
		page := &hang.Page{Steps: uint64(len(c.ends)), StepTimes: c.ends[max(0, len(c.ends)-192):]}
		c.s.Look(c.now, []hang.Sample{{Page: page}, {Page: page}})
	}
}

func TestSlowerStepsHaveABegin(t *testing.T) {
	for range 2 {
		c := newCrew(time.Second, 0, 0, 0, 0)
		c.run(20 * time.Minute)
		since := c.now
		c.late[1] = 340 * time.Millisecond
		c.run(10 * time.Minute)
		f, found := c.s.Found()
		require.True(t, found)
		require.InDelta(t, 1, f.Before.Seconds(), 0.01)
		require.InDelta(t, 1.34, f.Step.Seconds(), 0.01)
		require.InDelta(t, since.Seconds(), f.Since.Seconds(), 61)
		line := f.Line(func(time.Duration) string { return "12:03" })
		require.Equal(t, "steps of 1s until 12:03, 1.34s since", line)

		c.late[1] = 0
		c.run(20 * time.Minute)
		_, found = c.s.Found()
		require.False(t, found, "it is over")
	}
}

// Steps are slow for two windows, as in an evaluation, and again; or there is nothing yet to compare them with.
func TestStepsAreSlowForAWhile(t *testing.T) {
	c := newCrew(time.Second, 0, 0)
	for range 3 {
		c.run(20 * time.Minute)
		c.late[1] = 340 * time.Millisecond
		c.run(2 * time.Minute)
		c.late[1] = 0
		c.run(time.Minute)
		_, found := c.s.Found()
		require.False(t, found)
	}
	c = newCrew(time.Second, 0, 0)
	c.run(time.Minute)
	c.late[1] = 340 * time.Millisecond
	c.run(20 * time.Minute)
	_, found := c.s.Found()
	require.False(t, found)
}

func TestStragglerWithoutPages(t *testing.T) {
	var s Finder
	for i := range 300 {
		s.Look(time.Duration(i)*time.Second, []hang.Sample{{Worker: hang.Worker{Rank: 1}}, {Worker: hang.Worker{Rank: 2}}})
	}
	for i := range 300 {
		s.Look(time.Duration(300+i)*time.Second, []hang.Sample{{Page: &hang.Page{}}})
	}
	_, found := s.Found()
	require.False(t, found)
}
