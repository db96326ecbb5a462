package probe

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

// metered is a meter after intervals with so many bytes of each stream.
func metered(bytes ...int64) *meter {
	m := &meter{}
	s := sample{at: 400 * time.Millisecond, bytes: [streams]int64{7, 7, 7, 7}}
	m.add(s)
	for _, n := range bytes {
		s.at += interval
		for i := range s.bytes {
			s.bytes[i] += n
		}
		m.add(s)
	}
	return m
}

func TestMeter(t *testing.T) {
	var f netcheck.Flow
	m := metered(100e3, 200e3, 0, 100e3)
	m.flow(&f)
	require.InDelta(t, 32, f.Mbps, 1e-9, "400 kB of each of four streams in 0.4 s")

	var none netcheck.Flow
	metered().flow(&none)
	require.Zero(t, none)
}

func TestEarlyEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		bytes []int64
		plan  plan
		done  bool
	}{
		"steady, too early":         {[]int64{1000, 1000, 1000, 1000, 1000}, fullPlan, false},
		"steady":                    {[]int64{5, 1000, 1000, 1000, 1000, 1000}, fullPlan, true},
		"within 2 %":                {[]int64{1000, 1000, 1010, 1020, 1000, 1000}, fullPlan, true},
		"not within 2 %":            {[]int64{1000, 1000, 1000, 1030, 1000, 1000}, fullPlan, false},
		"steady later":              {[]int64{1, 2, 3, 1000, 1000, 1000, 1000, 1000}, fullPlan, true},
		"nothing is not steady":     {[]int64{0, 0, 0, 0, 0, 0, 0}, fullPlan, false},
		"all that was asked for":    {[]int64{1, 2, 1, 2, 1, 2, 1, 2, 1, 2}, fullPlan, true},
		"quick has no early end":    {[]int64{1000, 1000}, quickPlan, false},
		"quick is over after 0.3 s": {[]int64{1, 1000, 7}, quickPlan, true},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tt.done, metered(tt.bytes...).done(tt.plan)) })
	}
}

func TestMedian(t *testing.T) {
	require.Equal(t, 5.0, median([]float64{10, 9, 8, 7, 6, 5, 4, 3, 2, 1}))
	require.Equal(t, 2.0, median([]float64{3, 1, 2}))
	require.Zero(t, median(nil))
}
