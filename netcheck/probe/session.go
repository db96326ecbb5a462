package probe

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/netcheck"
)

// session is one rail of a test at one end, from the proof on. Its steps follow each other in the same order at both
// ends: offer, ladder, latency, data from the dialer, data from the server, RDMA, bye.
type session struct {
	role    role
	rail    int
	out     outlet
	peer    netip.Addr
	mtu     int // of both interfaces, 0 when it is not known
	mbps    int // of the slower interface, 0 when it is not known
	plan    plan
	pings   int
	limit   time.Time
	limits  limits
	rdma    rdmaEnd
	ctl     *control
	streams []*net.TCPConn
	flow    netcheck.Flow
	more    []netcheck.Flow // of RDMA
	notices []netcheck.Finding
	hole    *fault // found by the ladder
	// How much of its CPUs this process used while it sent or received, the larger.
	busy float64

	readers sync.WaitGroup
}

// offer lists the capabilities of an end other than TCP.
type offer struct {
	UDP  int  `json:"udp,omitempty"` // port of the ladder, 0 for none
	RDMA bool `json:"rdma,omitempty"`
}

// run goes through the test. The measurements are in s.flow, also after a fault.
func (s *session) run(ctx context.Context) *fault {
	brokenOff := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { s.breakOff(ctx); close(brokenOff) })
	err := s.steps(ctx)
	stopped := stop()
	var f *fault
	if err != nil {
		f = asFault(s.explain(err, "test"), "test")
	}
	if ctx.Err() != nil && f != nil {
		f = ended(ctx, f)
	}
	if stopped {
		s.farewell(f)
	} else {
		<-brokenOff // with its words to the other end
	}
	s.close()
	return f
}

// ended replaces a fault if the test had to end: it was cancelled, or too slow.
func ended(ctx context.Context, f *fault) *fault {
	if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		if f.class == netcheck.Reset {
			return faultf(netcheck.Stalled, "the test was not over in time: %s", f.text)
		}
		return f
	}
	return faultf(netcheck.Canceled, "the test was called off")
}

// breakOff ends a session from outside at once.
func (s *session) breakOff(ctx context.Context) {
	s.ctl.bye(ended(ctx, faultf(netcheck.Stalled, "the test was not over in time")), s.limits.bye)
	s.shut()
}

func (s *session) farewell(f *fault) {
	s.ctl.bye(f, s.limits.bye)
	if f != nil {
		return
	}
	// The first end to close must not cut off data that the other still reads: both send a bye.
	_, _, _ = s.ctl.recv(s.limits.answer / 2)
}

// shut closes the connections, which ends all waiting for them.
func (s *session) shut() {
	_ = s.ctl.Close()
	for _, c := range s.streams {
		discard(c)
	}
}

func (s *session) close() {
	s.shut()
	s.readers.Wait()
}

func (s *session) steps(ctx context.Context) error {
	s.flow = netcheck.Flow{Rail: s.rail, NIC: s.out.nic.Name}
	if !s.out.bind {
		s.notice("host.route", s.out.nic.Name, s.out.routeFault(s.peer))
	}
	l, theirs, err := s.offers(ctx)
	if err != nil {
		return err
	}
	if err := s.ladder(l, theirs.UDP); err != nil {
		return err
	}
	if err := s.latency(); err != nil {
		return err
	}
	if err := s.data(); err != nil {
		return err
	}
	if s.rdma.usable() && theirs.RDMA {
		return s.testRDMA(ctx)
	}
	return nil
}

// notice keeps a warning about this node; an empty text is none.
func (s *session) notice(kind, entity, text string) {
	if text != "" {
		s.notices = append(s.notices, netcheck.Finding{Check: "netcheck", Kind: kind, Severity: netcheck.Warn, Entity: entity,
			Text: oneLine(text)})
	}
}

// offers sends the capabilities of this end and receives those of the other.
func (s *session) offers(ctx context.Context) (*ladder, offer, error) {
	l := openLadder(ctx, s)
	mine := offer{RDMA: s.rdma.usable(), UDP: l.port()}
	body, _ := json.Marshal(mine)
	var theirs offer
	if err := s.ctl.send(kindOffer, body); err != nil {
		l.close()
		return nil, theirs, asFault(err, "offer")
	}
	body, err := s.ctl.want(kindOffer, s.limits.answer, "waiting for the other end's offer")
	if err == nil && (json.Unmarshal(body, &theirs) != nil || theirs.UDP < 0 || theirs.UDP > math.MaxUint16) {
		err = faultf(netcheck.Reset, "the other end's offer cannot be read")
	}
	if err != nil {
		l.close()
	}
	return l, theirs, err
}

// data measures one direction after the other over the same connections.
func (s *session) data() error {
	first, second := s.send, s.receive
	if s.role == serverRole {
		first, second = s.receive, s.send
	}
	err := first()
	if err == nil {
		err = second()
	}
	if f, ok := errors.AsType[*fault](err); ok && f.class == netcheck.Stalled && s.hole != nil {
		return s.hole
	}
	return err
}

// latency has the dialer send small messages and measure when they come back.
const latencyTime = 50 * time.Millisecond

func (s *session) latency() error {
	if s.role == dialerRole {
		return s.ping()
	}
	for {
		k, body, err := s.ctl.recv(s.limits.answer)
		switch {
		case err != nil:
			return asFault(err, "measuring latency")
		case k == kindBye:
			return peerFault(body, "measuring latency")
		case k != kindPing || len(body) > pingBody:
			return faultf(netcheck.Reset, "measuring latency: the other end sent message %q", k)
		case len(body) == 0: // the last one
			return nil
		}
		if err := s.ctl.send(kindPing, body); err != nil {
			return asFault(err, "measuring latency")
		}
	}
}

func (s *session) ping() error {
	var micros []float64
	body := make([]byte, pingBody)
	for began := time.Now(); len(micros) < s.pings && time.Since(began) < latencyTime; {
		sent := time.Now()
		if err := s.ctl.send(kindPing, body); err != nil {
			return asFault(err, "measuring latency")
		}
		if _, err := s.ctl.want(kindPing, s.limits.answer, "measuring latency"); err != nil {
			return err
		}
		micros = append(micros, float64(time.Since(sent).Nanoseconds())/1e3)
	}
	s.flow.P50 = median(micros)
	if err := s.ctl.send(kindPing, nil); err != nil {
		return asFault(err, "measuring latency")
	}
	return nil
}

// send sends on all streams from the other end's start message to its stop message. It also stops by itself if nothing
// is taken for 2 s, or when the test ends.
func (s *session) send() error {
	if _, err := s.ctl.want(kindGo, s.limits.answer, "waiting for the other end to receive"); err != nil {
		return err
	}
	var (
		sent  atomic.Int64
		pumps sync.WaitGroup
		done  = make(chan struct{})
	)
	usage, before := startUsage(), infoOf(s.streams)
	for _, c := range s.streams {
		pumps.Go(func() {
			if err := pump(c, &sent); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				s.ctl.abort(asFault(err, "sending"))
			}
		})
	}
	pumps.Go(func() { s.watch(&sent, done) })
	_, err := s.ctl.want(kindStop, s.longest(), "waiting for the other end to have enough")
	for _, c := range s.streams {
		_ = c.SetWriteDeadline(time.Unix(1, 0))
	}
	close(done)
	pumps.Wait()
	s.sentFlow(before, infoOf(s.streams))
	s.busy = max(s.busy, usage.share())
	if err != nil {
		return s.explain(err, "sending")
	}
	if err := s.ctl.send(kindSent, nil); err != nil {
		return asFault(err, "sending")
	}
	return nil
}

// pump writes until the connection's deadline.
func pump(c *net.TCPConn, sent *atomic.Int64) error {
	for {
		n, err := c.Write(pattern())
		sent.Add(int64(n))
		if err != nil {
			return err
		}
	}
}

// longest is how long a direction may take: a receiver that gets nothing for 2 s gives up.
func (s *session) longest() time.Duration {
	return s.plan.warm + s.plan.measure + s.limits.answer*3/2
}

// watch gives up on a receiver that takes nothing.
func (s *session) watch(sent *atomic.Int64, done chan struct{}) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	last, moved := int64(0), time.Now()
	for {
		select {
		case <-done:
			return
		case now := <-tick.C:
			if n := sent.Load(); n != last {
				last, moved = n, now
			}
			if now.Sub(moved) >= s.limits.answer {
				s.ctl.abort(faultf(netcheck.Stalled, "sending: nothing was taken for %v", s.limits.answer))
			}
		}
	}
}

// sentFlow fills in this end's knowledge of the sent data.
func (s *session) sentFlow(before, after tcpInfo) {
	segments := after.segments - before.segments
	if segments == 0 {
		return
	}
	s.flow.Segments = int(segments)
	s.flow.Retrans = min(float64(after.retrans-before.retrans)/float64(segments), 1)
}

// receive requests data, counts it, and sends stop.
func (s *session) receive() error {
	r := &receiver{patience: s.limits.answer, moved: make(chan struct{}, 1), ended: make(chan error, streams)}
	for i, c := range s.streams {
		s.readers.Go(func() { r.read(i, c) })
	}
	usage := startUsage()
	if err := s.ctl.send(kindGo, nil); err != nil {
		return asFault(err, "asking for data")
	}
	m, err := r.measure(s.plan, s.limit)
	s.busy = max(s.busy, usage.share())
	m.flow(&s.flow)
	if err != nil {
		return s.explain(err, "receiving")
	}
	// Data on its way may arrive; further data is not taken.
	r.drain()
	for _, c := range s.streams {
		_ = c.SetReadDeadline(time.Now().Add(drainTime))
	}
	if err := s.ctl.send(kindStop, nil); err != nil {
		return asFault(err, "saying stop")
	}
	_, err = s.ctl.want(kindSent, s.limits.answer, "waiting for the other end to stop")
	return err
}

// explain looks for the other end's own words when its connections ended.
func (s *session) explain(err error, doing string) error {
	f := asFault(err, doing)
	if f.class != netcheck.Reset {
		return f
	}
	s.ctl.cause.Store(nil) // of a stream that cannot be sent to
	if k, body, err := s.ctl.recv(s.limits.why); err == nil && k == kindBye {
		return peerFault(body, doing)
	}
	return f
}

// Limits of the data taken after stop.
const (
	drainTime  = 500 * time.Millisecond
	drainBytes = 16 << 20 // of each stream
)

// receiver counts the received data.
type receiver struct {
	patience time.Duration // without data
	counts   [streams]atomic.Int64
	limits   [streams]atomic.Int64 // of counts, once they are not 0
	moved    chan struct{}         // holds one once something came
	ended    chan error            // of streams
}

func (r *receiver) read(i int, c *net.TCPConn) {
	buf := make([]byte, bufferSize)
	for {
		n, err := c.Read(buf)
		total := r.counts[i].Add(int64(n))
		if n > 0 && total == int64(n) {
			select {
			case r.moved <- struct{}{}:
			default:
			}
		}
		if limit := r.limits[i].Load(); err != nil || limit > 0 && total > limit {
			r.ended <- err
			return
		}
	}
}

func (r *receiver) drain() {
	for i := range r.counts {
		r.limits[i].Store(r.counts[i].Load() + drainBytes)
	}
}

func (r *receiver) sample(since time.Time) sample {
	s := sample{at: time.Since(since)}
	for i := range r.counts {
		s.bytes[i] = r.counts[i].Load()
	}
	return s
}

// measure counts for as long as p requires. It waits out a pause at the end, until it is certain that no data comes.
func (r *receiver) measure(p plan, limit time.Time) (*meter, error) {
	m := &meter{}
	silent := faultf(netcheck.Stalled, "receiving: no data for %v", r.patience)
	if err := r.wait(time.Until(earlier(time.Now().Add(r.patience), limit)), r.moved); err != nil {
		return m, err
	}
	if r.sample(time.Now()).total() == 0 {
		return m, silent
	}
	began := time.Now()
	last, moved := int64(0), began
	if err := r.wait(p.warm, nil); err != nil {
		return m, err
	}
	for {
		s := r.sample(began)
		m.add(s)
		if n := s.total(); n != last {
			last, moved = n, time.Now()
		} else if time.Since(moved) >= r.patience {
			return m, silent
		}
		if m.done(p) && time.Since(moved) < interval/2 {
			return m, nil
		}
		if time.Now().After(limit) {
			return m, faultf(netcheck.Stalled, "receiving: the test was not over in time")
		}
		if err := r.wait(interval-(s.at-p.warm)%interval, nil); err != nil {
			return m, err
		}
	}
}

// wait waits for d or for until. That a stream ends meanwhile is an error.
func (r *receiver) wait(d time.Duration, until <-chan struct{}) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-until:
	case <-timer.C:
	case err := <-r.ended:
		if err == nil || errors.Is(err, io.EOF) {
			return faultf(netcheck.Reset, "receiving: the other end stopped before it was told to")
		}
		return err
	}
	return nil
}

// usage is how much of the CPUs that it can have this process uses.
type usage struct {
	began time.Time
	cpu   time.Duration
}

func startUsage() usage { return usage{time.Now(), cpuTime()} }

// share is 1 when every stream, or every CPU where there are fewer, was used all the time.
func (u usage) share() float64 {
	cores := float64(min(streams, runtime.GOMAXPROCS(0)))
	return float64(cpuTime()-u.cpu) / (float64(time.Since(u.began)) * cores)
}
