package netcheck

import "fmt"

// figures are the measurements of a lane besides its rate, by their places in measures.
type figures [3]float32

// The places.
const (
	loss = iota
	latency
	packet
)

// measure is a figure of a Flow besides the rate. A new one needs its field in Flow, netcheck/probe to measure it, and
// a row in measures. If pictures have it, it also needs its field in Pair.
type measure struct {
	name   string                                          // in the error of a report that is refused
	most   float64                                         // of a report
	of     func(*Flow) float64                             // 0 is unknown
	counts func(*Flow) bool                                // nil: always
	sent   bool                                            // it is about the data that the reporting end has sent
	zero   bool                                            // 0 counts for the median
	show   func(*Pair, float64)                            // nil: pictures do not have it
	warn   func(w words, m *member, f capability) *Finding // if all tests have shown a bad value
}

var measures = [len(figures{})]measure{
	loss: {name: "retrans", most: 1, of: func(f *Flow) float64 { return f.Retrans }, sent: true, zero: true,
		counts: func(f *Flow) bool { return f.Segments >= minSegments },
		show:   func(p *Pair, x float64) { p.Loss = x }, warn: words.warnLoss},
	latency: {name: "a figure of a flow", most: 1e12, of: func(f *Flow) float64 { return f.P50 },
		show: func(p *Pair, x float64) { p.P50 = x }, warn: words.warnLatency},
	packet: {name: "a figure of a flow", most: 1e12, of: func(f *Flow) float64 { return float64(f.MTU) },
		warn: words.warnMTU},
}

// take takes the figures of f about the data that its end has sent, or has received.
func (x *figures) take(f *Flow, sent bool) {
	for i, m := range measures {
		if m.sent == sent && (m.counts == nil || m.counts(f)) {
			x[i] = positive(m.of(f))
		}
	}
}

// show enters the figures of a picture.
func (x *figures) show(p *Pair) {
	for i, m := range measures {
		if m.show != nil {
			m.show(p, float64(x[i]))
		}
	}
}

// Bound is the largest value that a figure of a report may have. The least one is 0.
type Bound struct {
	Name        string
	Value, Most float64
}

// Bounds are those of all figures of f besides its rate.
func (f *Flow) Bounds() (bounds [len(figures{}) + 1]Bound) {
	bounds[0] = Bound{"a figure of a flow", float64(f.Segments), 1e12}
	for i, m := range measures {
		bounds[i+1] = Bound{m.name, m.of(f), m.most}
	}
	return bounds
}

// Limits of the figures.
const (
	minSegments  = 1000  // fewer are no evidence about a share of 0.1 %
	lossWarn     = 0.001 // share of segments sent again
	latencyShare = 5     // times the median of the latencies
)

// least is the smallest value of figure i that tests of f of m have shown, and the usual one. n counts these tests.
func (w words) least(i int, m *member, f capability) (least, usual float32, n int) {
	for _, t := range m.tests {
		y := t.of(m, f)
		if y == nil || y.mbps == 0 {
			continue
		}
		if n++; n == 1 || y.figures[i] < least {
			least, usual = y.figures[i], w.rates.normOf(f, t.cross).figures[i]
		}
	}
	return least, usual, n
}

// warnLoss reports losses that all tests of a lane have shown.
func (w words) warnLoss(m *member, f capability) *Finding {
	least, _, _ := w.least(loss, m, f)
	if f.receives() || least <= lossWarn {
		return nil
	}
	return &Finding{Kind: "net.loss", Direction: "tx", Metric: "retransmissions", Unit: "share", Value: float64(least),
		Threshold: lossWarn, Text: fmt.Sprintf("sends %.2g of the segments again, more than %.2g", least, lossWarn)}
}

// warnLatency reports a latency that all tests of a lane have shown.
func (w words) warnLatency(m *member, f capability) *Finding {
	least, usual, n := w.least(latency, m, f)
	if f.receives() || n < 2 || usual == 0 || least <= latencyShare*usual {
		return nil
	}
	return &Finding{Kind: "net.latency", Metric: "latency p50", Unit: "us", Value: float64(least),
		Threshold: float64(latencyShare * usual), Median: float64(usual),
		Text: fmt.Sprintf("answers after %.0f us, the median is %.0f", least, usual)}
}

// warnMTU reports that packets as large as the MTU of both ends arrived in no test.
func (w words) warnMTU(m *member, f capability) *Finding {
	l := w.rates.lanes[f.lane()]
	most, want := float32(0), float32(0)
	for _, t := range m.tests {
		if y := t.of(m, f); y != nil && y.figures[packet] > 0 {
			most, want = max(most, y.figures[packet]), max(want, min(m.mtu(l), t.other(m).mtu(l)))
		}
	}
	if most >= min(want, maxPacket) {
		return nil
	}
	verb := "sends"
	if f.receives() {
		verb = "receives"
	}
	return &Finding{Kind: "net.mtu", Metric: "packet, " + verb, Unit: "bytes", Value: float64(most),
		Threshold: float64(want), Text: fmt.Sprintf("%s packets of at most %.0f bytes, though the MTU is %.0f at both ends",
			verb, most, want)}
}

// maxPacket is the largest packet of IP.
const maxPacket = 65535

// mtu is that of the interface of a lane, 0 if unknown.
func (m *member) mtu(l lane) float32 {
	if l.rail >= len(m.n.NICs) {
		return 0
	}
	return float32(m.n.NICs[l.rail].MTU)
}
