package probe

import (
	"slices"
	"time"

	"dlrover-run/netcheck"
)

// Of every test.
const (
	streams    = 4
	bufferSize = 256 << 10
	interval   = 100 * time.Millisecond
)

// plan is how long a direction is measured.
type plan struct {
	warm    time.Duration // counts for nothing
	measure time.Duration
	early   time.Duration // may end after so much of measure once it is steady; 0: never
}

var (
	fullPlan  = plan{warm: 400 * time.Millisecond, measure: time.Second, early: 600 * time.Millisecond}
	quickPlan = plan{warm: 200 * time.Millisecond, measure: 300 * time.Millisecond}
)

// The rule of an early end: so many intervals in a row differ by no more than this share of their mean.
const (
	steadyIntervals = 5
	steadySpread    = 0.02
)

// sample is a receiver's count since the first byte.
type sample struct {
	at    time.Duration
	bytes [streams]int64
}

func (s sample) total() (n int64) {
	for _, b := range s.bytes {
		n += b
	}
	return n
}

// mbps is a rate in 10^6 bit/s.
func mbps(bytes int64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(bytes) * 8 / d.Seconds() / 1e6
}

// meter turns samples into rates. The first sample ends the warm-up.
type meter struct{ samples []sample }

func (m *meter) add(s sample) { m.samples = append(m.samples, s) }

func (m *meter) measured() time.Duration {
	if len(m.samples) < 2 {
		return 0
	}
	return m.samples[len(m.samples)-1].at - m.samples[0].at
}

// rates are the rates of the intervals, oldest first.
func (m *meter) rates() []float64 {
	var rates []float64
	for i := 1; i < len(m.samples); i++ {
		a, b := m.samples[i-1], m.samples[i]
		rates = append(rates, mbps(b.total()-a.total(), b.at-a.at))
	}
	return rates
}

// steady reports whether the last intervals hardly differ.
func (m *meter) steady() bool {
	rates := m.rates()
	if len(rates) < steadyIntervals {
		return false
	}
	rates = rates[len(rates)-steadyIntervals:]
	low, high, sum := slices.Min(rates), slices.Max(rates), 0.0
	for _, r := range rates {
		sum += r
	}
	return low > 0 && high-low <= steadySpread*sum/steadyIntervals
}

// done reports whether p needs no more data.
func (m *meter) done(p plan) bool {
	d := m.measured()
	return d >= p.measure-interval/2 || p.early > 0 && d >= p.early-interval/2 && m.steady()
}

// flow fills in the received data.
func (m *meter) flow(f *netcheck.Flow) {
	if len(m.samples) < 2 {
		return
	}
	first, last := m.samples[0], m.samples[len(m.samples)-1]
	f.Mbps = mbps(last.total()-first.total(), last.at-first.at)
}

// median is the lower one of two, 0 of none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[(len(values)-1)/2]
}
