package probe

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"dlrover-run/netcheck"
)

// The ladder finds the largest packets that pass: each end sends datagrams of growing sizes with fragmentation
// forbidden, and the other answers those that arrive. A datagram carries the MAC of this test. Its answer is always the
// shorter of the two, and every datagram is answered once, so the ladder cannot be used to flood a third host.
const (
	ladderTries = 3
	smallest    = 576 // bytes; every path carries them
	largest     = 65535
	answerLen   = 3 + frameMAC
	maxRungs    = 16
)

// rungs are the sizes of IP packets to try, in bytes, ascending.
func rungs(mtu int) []int {
	mtu = min(mtu, largest)
	sizes := []int{smallest}
	for _, s := range []int{1500, 4200, 9000, mtu} {
		if s > smallest && s <= mtu {
			sizes = append(sizes, s)
		}
	}
	slices.Sort(sizes)
	return slices.Compact(sizes)
}

// ladder is one end of it. conn is nil when this end cannot take part.
type ladder struct {
	s     *session
	off   <-chan struct{} // closed when the test is called off
	conn  *net.UDPConn
	sizes []int

	mu     sync.Mutex
	acked  [][ladderTries]bool // by rung and try
	served map[[2]byte]bool    // rung and try that were answered
	most   int                 // largest packet that came in
	news   chan struct{}
}

func openLadder(ctx context.Context, s *session) *ladder {
	l := &ladder{s: s, off: ctx.Done(), news: make(chan struct{}, 1), served: map[[2]byte]bool{}}
	if s.mtu < smallest {
		return l
	}
	l.sizes = rungs(s.mtu)
	l.acked = make([][ladderTries]bool, len(l.sizes))
	if c, err := s.out.packets(ctx); err == nil {
		_ = c.SetDeadline(s.limit)
		l.conn = c
	}
	return l
}

func (l *ladder) port() int {
	if l.conn == nil {
		return 0
	}
	return l.conn.LocalAddr().(*net.UDPAddr).Port
}

func (l *ladder) close() {
	if l.conn != nil {
		_ = l.conn.Close()
	}
}

// climbed is the result of an end for its own datagrams.
type climbed struct {
	Most   int `json:"most"`   // bytes; 0: nothing was answered, which is no evidence
	Failed int `json:"failed"` // the smallest that was never answered, though smaller ones always were; 0 for none
}

// ladder goes through the ladder in both directions at once.
func (s *session) ladder(l *ladder, port int) error {
	defer l.close()
	var mine climbed
	if l.conn != nil && port != 0 {
		to := netip.AddrPortFrom(s.peer, uint16(port))
		var reader sync.WaitGroup
		reader.Go(func() { l.read(to) })
		mine = l.climb(to)
		defer reader.Wait()
		defer l.close() // before the wait
	}
	body, _ := json.Marshal(mine)
	if err := s.ctl.send(kindMTU, body); err != nil {
		return asFault(err, "finding the path's MTU")
	}
	body, err := s.ctl.want(kindMTU, s.limits.answer, "finding the path's MTU")
	if err != nil {
		return err
	}
	var theirs climbed
	if json.Unmarshal(body, &theirs) != nil {
		return faultf(netcheck.Reset, "the other end's ladder cannot be read")
	}
	l.mu.Lock()
	s.flow.MTU = l.most
	l.mu.Unlock()
	s.hole = holeOf(mine, theirs)
	return nil
}

// holeOf puts in words that large packets get lost, nil when they do not.
func holeOf(mine, theirs climbed) *fault {
	text := ""
	if mine.Failed != 0 {
		text = fmt.Sprintf("of what this end sent, packets of %d bytes get through, of %d bytes none", mine.Most, mine.Failed)
	}
	if theirs.Failed != 0 {
		if text != "" {
			text += "; "
		}
		text += fmt.Sprintf("of what the other end sent, packets of %d bytes get through, of %d bytes none",
			theirs.Most, theirs.Failed)
	}
	if text == "" {
		return nil
	}
	return faultf(netcheck.MTU, "MTU: %s, and TCP's data does not arrive", text)
}

// climb sends the unanswered datagrams, up to three times.
func (l *ladder) climb(to netip.AddrPort) climbed {
	skipped := make([]bool, len(l.sizes))
	for try := range ladderTries {
		for i, size := range l.sizes {
			// The smallest goes along every time: it shows that a loss is one of size.
			if i == 0 || !l.answered(i) {
				_, err := l.conn.WriteToUDPAddrPort(l.datagram(i, try, size-l.overhead()), to)
				skipped[i] = skipped[i] || err != nil // larger than the interface takes, by now
			}
		}
		if l.await(skipped) {
			break
		}
	}
	return l.outcome(skipped)
}

// overhead is that of the headers of IP and UDP, in bytes.
func (l *ladder) overhead() int {
	if l.s.peer.Is4() {
		return 28
	}
	return 48
}

func (l *ladder) answered(rung int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Contains(l.acked[rung][:], true)
}

// await waits until every rung was answered, or the try's time is over. It reports whether no other try is needed.
func (l *ladder) await(skipped []bool) bool {
	timer := time.NewTimer(min(l.s.limits.rung, time.Until(l.s.limit)))
	defer timer.Stop()
	for {
		all := true
		for i := range l.sizes {
			all = all && (skipped[i] || l.answered(i))
		}
		if all {
			return true
		}
		select {
		case <-l.news:
		case <-l.off:
			return true
		case <-timer.C:
			return false
		}
	}
}

func (l *ladder) outcome(skipped []bool) climbed {
	l.mu.Lock()
	defer l.mu.Unlock()
	var c climbed
	for i, tries := range l.acked {
		switch {
		case slices.Contains(tries[:], true):
			c.Most = l.sizes[i]
		case c.Failed == 0 && !skipped[i]:
			c.Failed = l.sizes[i]
		}
	}
	// Unless the smallest came through every time, this is loss of any size, or a firewall.
	if len(l.acked) == 0 || slices.Contains(l.acked[0][:], false) || c.Failed < c.Most {
		c.Failed = 0
	}
	return c
}

// A datagram is: 'q' or 'a', rung, try, MAC, and for 'q' padding.
func (l *ladder) datagram(rung, try, size int) []byte {
	d := make([]byte, max(size, answerLen))
	copy(d, l.answer('q', l.s.role, byte(rung), byte(try)))
	return d
}

func (l *ladder) answer(what byte, r role, rung, try byte) []byte {
	d := []byte{what, rung, try}
	h := hmac.New(sha256.New, l.s.ctl.key)
	h.Write([]byte("ladder "))
	h.Write([]byte(r))
	h.Write(d)
	return append(d, h.Sum(nil)[:frameMAC]...)
}

// read answers the other end's datagrams and notes the answers to this one's, until the socket is closed.
func (l *ladder) read(peer netip.AddrPort) {
	buf := make([]byte, largest)
	for {
		n, from, err := l.conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		if netip.AddrPortFrom(from.Addr().Unmap(), from.Port()) == peer && n >= answerLen {
			if reply := l.take(buf[:n]); reply != nil {
				_, _ = l.conn.WriteToUDPAddrPort(reply, peer)
			}
		}
	}
}

// take notes a datagram and returns its answer, nil for none.
func (l *ladder) take(d []byte) []byte {
	what, rung, try := d[0], d[1], d[2]
	theirs := l.s.role.other()
	known := what == 'q' && rung < maxRungs || what == 'a' && int(rung) < len(l.sizes)
	if !known || try >= ladderTries ||
		!hmac.Equal(d[3:answerLen], l.answer(what, theirs, rung, try)[3:]) {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if what == 'a' {
		l.acked[rung][try] = true
		select {
		case l.news <- struct{}{}:
		default:
		}
		return nil
	}
	if l.served[[2]byte{rung, try}] {
		return nil
	}
	l.served[[2]byte{rung, try}] = true
	l.most = max(l.most, len(d)+l.overhead())
	return l.answer('a', l.s.role, rung, try)
}
