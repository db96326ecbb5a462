package conns

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// mostSenders bounds those of whom Rates keeps something, by a half: more senders, or ones that invent addresses, are
// forgotten when as many newer ones have come.
const mostSenders = 4096

// Rates bounds how many requests each of several senders makes.
type Rates struct {
	limit rate.Limit
	burst int

	mu          sync.Mutex
	now, before map[string]*rate.Limiter // by sender
}

// NewRates lets each sender make a burst of requests at once, and so many in a second in the long run.
func NewRates(perSecond, burst int) *Rates {
	return &Rates{limit: rate.Limit(perSecond), burst: burst, now: map[string]*rate.Limiter{}}
}

// Allow counts a request, and reports whether it is within the bound.
func (r *Rates) Allow(sender string, at time.Time) bool {
	r.mu.Lock()
	l := r.now[sender]
	if l == nil {
		if l = r.before[sender]; l == nil {
			l = rate.NewLimiter(r.limit, r.burst)
		}
		if len(r.now) >= mostSenders {
			r.now, r.before = map[string]*rate.Limiter{}, r.now
		}
		r.now[sender] = l
	}
	r.mu.Unlock()
	return l.AllowN(at, 1)
}

// Origin is the part of an address that tells senders apart: of IPv6 a host chooses the last 64 bits as it likes. What
// is no address is its own origin.
func Origin(addr string) string {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return addr
	}
	if a = a.Unmap().WithZone(""); a.Is4() {
		return a.String()
	}
	p, _ := a.Prefix(64) // of an IPv6 address there is one
	return p.String()
}
