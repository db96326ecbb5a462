package probe

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"dlrover-run/internal/testkit"
	"dlrover-run/netcheck"
)

// listener on loopback that hands every connection to serve, and is closed with all of them at the test's end.
func listener(t *testing.T, serve func(*net.TCPConn)) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var all sync.WaitGroup
	var mu sync.Mutex
	var held []net.Conn
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			held = append(held, c)
			mu.Unlock()
			all.Go(func() { serve(c.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, c := range held {
			c.Close()
		}
		mu.Unlock()
		all.Wait()
	})
	return ln.Addr().String()
}

func (c *couple) dialTo(addr string) netcheck.Result {
	c.dial.Peer.Addrs = []string{addr}
	return c.dialer.Dial(c.dialCtx, c.dial)
}

func TestRefused(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ln.Close()
	r := newCouple(t).dialTo(ln.Addr().String())
	require.Equal(t, netcheck.Refused, r.Class, r.Text)
	require.Contains(t, r.Text, "connecting to "+ln.Addr().String()+" from 127.0.0.1: ")
}

func TestAcceptedAndThenNothing(t *testing.T) {
	t.Parallel()
	c := newCouple(t)
	c.dialer.limits.proof = usual.proof
	began := time.Now()
	r := c.dialTo(listener(t, func(*net.TCPConn) {}))
	require.Equal(t, netcheck.Stalled, r.Class, r.Text)
	require.Greater(t, time.Since(began), usual.proof-100*time.Millisecond)
	require.Less(t, time.Since(began), long)
}

func TestNoProof(t *testing.T) {
	t.Parallel()
	var all together
	hello := append([]byte(magic), make([]byte, nonceLen)...)
	for name, tt := range map[string]struct {
		serve func(*net.TCPConn)
		class netcheck.Class
	}{
		"another protocol": {func(c *net.TCPConn) {
			_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\nA: bbbbbbbbbbbbbbbbbbbbbbbbb\r\n\r\n"))
		}, netcheck.Auth},
		"closed without a word": {func(c *net.TCPConn) { c.Close() }, netcheck.Reset},
		"closed after the proof": {func(c *net.TCPConn) {
			_, _ = c.Write(hello)
			_, _ = io.ReadFull(c, make([]byte, 1+nonceLen+macLen))
			c.Close()
		}, netcheck.Auth},
		"a wrong proof": {func(c *net.TCPConn) {
			_, _ = c.Write(hello)
			_, _ = io.ReadFull(c, make([]byte, 1+nonceLen+macLen))
			_, _ = c.Write(make([]byte, macLen))
		}, netcheck.Auth},
		"the dialer's own proof": {func(c *net.TCPConn) {
			_, _ = c.Write(hello)
			msg := make([]byte, 1+nonceLen+macLen)
			_, _ = io.ReadFull(c, msg)
			_, _ = c.Write(msg[1+nonceLen:])
		}, netcheck.Auth},
	} {
		all.add(name, func() func(*testing.T) {
			c := newCouple(t)
			c.dialer.limits.retry = usual.retry
			began := time.Now()
			r := c.dialTo(listener(t, tt.serve))
			took := time.Since(began)
			return func(t *testing.T) {
				require.Equal(t, tt.class, r.Class, r.Text)
				require.Less(t, took, long)
				require.Empty(t, r.Flows)
			}
		})
	}
	all.check(t)
}

// together runs cases that mostly wait at the same time, and says then what came of each.
type together struct {
	running sync.WaitGroup
	checks  sync.Map
}

func (g *together) add(name string, run func() func(*testing.T)) {
	g.running.Go(func() { g.checks.Store(name, run()) })
}

func (g *together) check(t *testing.T) {
	g.running.Wait()
	g.checks.Range(func(name, check any) bool { return t.Run(name.(string), check.(func(*testing.T))) || true })
}

// Whatever two ends do not agree on keeps them apart, and both hear it as such.
func TestTicketsThatDiffer(t *testing.T) {
	t.Parallel()
	var all together
	for name, change := range map[string]func(*couple){
		"key":       func(c *couple) { c.dial.Key = []byte("0123456789abcdef0123456789abcdef") },
		"test":      func(c *couple) { c.dial.Test += "x" },
		"round":     func(c *couple) { c.dial.Round++ },
		"dialer":    func(c *couple) { c.dialer.cfg.ID = "else" },
		"server":    func(c *couple) { c.dial.Peer.ID = "else" },
		"direction": func(c *couple) { c.server.cfg.ID, c.serve.Peer.ID = "d", "s" },
	} {
		all.add(name, func() func(*testing.T) {
			c := newCouple(t)
			change(c)
			c.runUntilDialed()
			return func(t *testing.T) {
				require.Equal(t, netcheck.Auth, c.dialed.Class, c.dialed.Text)
				require.Equal(t, netcheck.Auth, c.served.Class, c.served.Text)
				require.Empty(t, c.served.Flows)
				require.NotContains(t, c.served.Text+c.dialed.Text, string(c.serve.Key))
			}
		})
	}
	all.check(t)
}

func TestATicketServesOnce(t *testing.T) {
	c := newCouple(t)
	c.run()
	require.Empty(t, c.dialed.Class, c.dialed.Text)
	c.run()
	require.Equal(t, netcheck.Own, c.served.Class)
	require.Contains(t, c.served.Text, "its key serves once")
	r := c.dialTo("127.0.0.1:1")
	require.Equal(t, netcheck.Own, r.Class)
}

// relay passes connections on to addr and keeps what the dialer sends first.
func relay(t *testing.T, addr string, keep *sync.Map) string {
	var n atomic.Int64
	return listener(t, func(in *net.TCPConn) {
		number := n.Add(1)
		out, err := net.Dial("tcp", addr)
		if err != nil {
			in.Close()
			return
		}
		go func() { _, _ = io.Copy(in, out); in.Close() }()
		first := make([]byte, 1+nonceLen+macLen)
		_, _ = io.ReadFull(in, first)
		keep.Store(number, first)
		_, _ = out.Write(first)
		_, _ = io.Copy(out, in)
		out.Close()
	})
}

func TestARecordedProofIsOfNoUse(t *testing.T) {
	c := newCouple(t)
	var heard sync.Map
	c.addrs = func(a []string) []string { return []string{relay(t, a[0], &heard)} }
	c.run()
	require.Empty(t, c.dialed.Class, c.dialed.Text)

	// Another server of the same ticket, which has not heard of the test.
	again := newCouple(t)
	again.serve, again.dial = c.serve, c.dial
	var wrong int
	again.addrs = func(a []string) []string {
		heard.Range(func(_, first any) bool {
			s, err := net.Dial("tcp", a[0])
			require.NoError(t, err)
			defer s.Close()
			_, _ = io.ReadFull(s, make([]byte, len(magic)+nonceLen))
			_, _ = s.Write(first.([]byte))
			n, _ := s.Read(make([]byte, 1))
			require.Zero(t, n, "left without a word")
			wrong++
			return true
		})
		return a
	}
	again.run()
	require.Equal(t, 1+streams, wrong)
	require.Empty(t, again.dialed.Class, again.dialed.Text)
}

// Who has the key can still begin one test only, and not bring streams of his own into it.
func TestOneTestForATicket(t *testing.T) {
	t.Parallel()
	c := newCouple(t)
	c.addrs = func(a []string) []string {
		tk := newTicket(c.dial, 0, "d", dialerRole)
		prove := func(key []byte, stream int) (net.Conn, nonces, error) {
			s, err := net.Dial("tcp", a[0])
			require.NoError(t, err)
			t.Cleanup(func() { s.Close() })
			n, _, err := tk.proveAsDialer(s, key, stream)
			return s, n, err
		}
		_, n, err := prove(tk.key, 0)
		require.NoError(t, err)
		_, _, err = prove(tk.key, 0)
		require.Error(t, err, "a second control connection")
		_, _, err = prove(tk.key, 1)
		require.Error(t, err, "a stream with the key of the ticket and not of the session")
		_, _, err = prove(tk.sessionKey(n), streams+1)
		require.Error(t, err, "a stream too many")
		_, _, err = prove(tk.sessionKey(n), 1)
		require.NoError(t, err)
		_, _, err = prove(tk.sessionKey(n), 1)
		require.Error(t, err, "a stream twice")
		return a
	}
	c.runUntilDialed()
	require.Equal(t, netcheck.Auth, c.dialed.Class, c.dialed.Text)
	require.Equal(t, netcheck.Stalled, c.served.Class, c.served.Text)
}

func TestOnlyThePeersAddressesAreLetIn(t *testing.T) {
	t.Parallel()
	c := newCouple(t)
	c.serve.Peer.Addr, c.serve.Peer.NICs = "127.0.0.9", nil
	c.dialer.limits.retry = 100 * time.Millisecond
	c.runUntilDialed()
	require.Equal(t, netcheck.Reset, c.dialed.Class, c.dialed.Text)
	require.Equal(t, netcheck.Unreachable, c.served.Class, c.served.Text)
}

func TestNothingIsSentToAnybodyElse(t *testing.T) {
	var met atomic.Int64
	addr := listener(t, func(*net.TCPConn) { met.Add(1) })
	c := newCouple(t)
	c.dial.Peer.Addr, c.dial.Peer.NICs = "10.1.2.3", []netcheck.NIC{{Addr: "10.1.2.4"}}
	r := c.dialTo(addr)
	require.Equal(t, netcheck.Own, r.Class, r.Text)
	require.Contains(t, r.Text, "is none of the other node's, which are [10.1.2.3 10.1.2.4]")
	require.Zero(t, met.Load())
}

// Strangers at the very address of the peer: silent ones, liars, and such that come and go.
func TestACrowdAtTheDoor(t *testing.T) {
	if testkit.Race {
		testkit.Long(t, "a crowd under the race detector is slow")
	}
	c := newCouple(t)
	ctx, cancel := context.WithCancel(t.Context())
	var crowd sync.WaitGroup
	c.addrs = func(a []string) []string {
		var came atomic.Int64
		for i := range 4 {
			crowd.Go(func() {
				var held []net.Conn
				for ctx.Err() == nil {
					s, err := net.DialTimeout("tcp", a[0], time.Second)
					if err != nil { // all are in, or too many wait
						continue
					}
					came.Add(1)
					switch i {
					case 0, 1:
						held = append(held, s)
					case 2:
						_, _ = s.Write(make([]byte, 1+nonceLen+macLen))
						s.Close()
					default:
						s.Close()
					}
					if len(held) == 500 {
						held[0].Close()
						held = held[1:]
					}
				}
				for _, s := range held {
					s.Close()
				}
			})
		}
		for came.Load() < 2*maxStrangers && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		return a
	}
	stop := context.AfterFunc(c.dialCtx, cancel)
	defer stop()
	done := make(chan struct{})
	go func() { c.run(); close(done) }()
	<-done
	cancel()
	crowd.Wait()
	require.Empty(t, c.dialed.Class, c.dialed.Text)
	require.Empty(t, c.served.Class, c.served.Text)
}

func TestStrangersAreBounded(t *testing.T) {
	t.Parallel()
	c := newCouple(t)
	d := c.door(t, maxStrangers)
	var held []net.Conn
	var ends sync.WaitGroup
	var reset atomic.Int64
	for range maxStrangers + 20 {
		s, err := net.Dial("tcp", d.addr())
		require.NoError(t, err)
		held = append(held, s)
		ends.Go(func() {
			if _, err := io.Copy(io.Discard, s); errors.Is(err, syscall.ECONNRESET) {
				reset.Add(1)
			}
		})
	}
	require.Eventually(t, func() bool { return reset.Load() == 20 }, long, time.Millisecond, "those that had to make room")
	d.mu.Lock()
	require.Len(t, d.strangers, maxStrangers)
	d.mu.Unlock()
	for _, s := range held {
		s.Close()
	}
	ends.Wait()
	d.close()
	d.greeters.Wait()
}

func TestStrangersDoNotStay(t *testing.T) {
	t.Parallel()
	c := newCouple(t)
	c.server.limits.proof = 100 * time.Millisecond
	d := c.door(t, maxStrangers)
	s, err := net.Dial("tcp", d.addr())
	require.NoError(t, err)
	defer s.Close()
	began := time.Now()
	_, err = io.Copy(io.Discard, s)
	require.NoError(t, err, "it is closed in order")
	require.Less(t, time.Since(began), long/2)
	d.close()
	d.greeters.Wait()
}

// Who had to make room in the moment of his proof takes nobody's place.
func TestWhoHadToGoClaimsNothing(t *testing.T) {
	c := newCouple(t)
	d := c.door(t, 8)
	defer d.greeters.Wait()
	defer d.close()
	a, b := tcpPair(t)
	require.False(t, d.claim(a, 0, nonces{}))
	d.strangers = append(d.strangers, b)
	require.True(t, d.claim(b, 0, nonces{}))
	require.Empty(t, d.strangers)
	d.release(b) // the proof could not be sent
	d.strangers = append(d.strangers, a)
	require.True(t, d.claim(a, 0, nonces{}))
}

func (c *couple) rail(t *testing.T) rail {
	peers, err := peerAddrs(t.Context(), c.serve.Peer)
	require.NoError(t, err)
	rails, f := c.server.rails(t.Context(), c.serve.Peer, peers)
	require.Nil(t, f)
	return rails[0]
}

// door is the server's.
func (c *couple) door(t *testing.T, room int) *door {
	r := c.rail(t)
	ln, err := r.out.listen(t.Context())
	require.NoError(t, err)
	return openDoor(ln, r, newTicket(c.serve, 0, "s", serverRole), time.Now().Add(c.serve.Left), room)
}

// play lets a Prober's Dial meet a server that has proved itself and then does what script says.
func (c *couple) play(t *testing.T, script func(*session)) {
	limit := time.Now().Add(c.serve.Left)
	d := c.door(t, 8)
	defer d.greeters.Wait()
	defer d.close()
	var playing sync.WaitGroup
	playing.Go(func() {
		conns, key, f := d.wait(t.Context())
		if f != nil {
			return
		}
		s := c.server.session(c.serve, c.rail(t), serverRole, conns, key, limit)
		defer s.close()
		script(s)
	})
	c.dialed = c.dialTo(d.addr())
	playing.Wait()
}

// upTo goes through the steps before data.
func (s *session) upTo(t *testing.T) bool {
	l, theirs, err := s.offers(t.Context())
	return err == nil && s.ladder(l, theirs.UDP) == nil && s.latency() == nil
}

func untilClosed(s *session) {
	_ = s.ctl.SetReadDeadline(s.limit)
	_, _ = io.Copy(io.Discard, s.ctl.Conn)
}

func TestPeersThatFailInTheMiddle(t *testing.T) {
	var all together
	for name, tt := range map[string]struct {
		script func(*testing.T, *session)
		class  netcheck.Class
		says   string
		pace   *plan // of the dialer; nil: that of all tests
	}{
		"silent after the proof": {func(_ *testing.T, s *session) { untilClosed(s) },
			netcheck.Stalled, "offer", nil},
		"never asks for data": {func(t *testing.T, s *session) { s.upTo(t); untilClosed(s) },
			netcheck.Stalled, "waiting for the other end to receive", nil},
		"asks for data and takes none": {func(t *testing.T, s *session) {
			s.upTo(t)
			_ = s.ctl.send(kindGo, nil)
			untilClosed(s)
		}, netcheck.Stalled, "nothing was taken for 2s", &plan{measure: long}},
		"never has enough": {func(t *testing.T, s *session) {
			s.upTo(t)
			for _, c := range s.streams {
				s.readers.Go(func() { _, _ = io.Copy(io.Discard, c) })
			}
			_ = s.ctl.send(kindGo, nil)
			untilClosed(s)
		}, netcheck.Stalled, "enough", nil},
		"sends nothing": {func(t *testing.T, s *session) {
			s.upTo(t)
			_ = s.receive()
			untilClosed(s)
		}, netcheck.Stalled, "no data for 2s", nil},
		"resets while it receives": {func(t *testing.T, s *session) {
			s.upTo(t)
			_ = s.ctl.send(kindGo, nil)
			_, _ = io.CopyN(io.Discard, s.streams[0], 1<<20)
			discard(s.streams[0])
			untilClosed(s)
		}, netcheck.Reset, "sending", nil},
		"resets while it sends": {func(t *testing.T, s *session) {
			s.upTo(t)
			_ = s.receive()
			_, _ = s.ctl.want(kindGo, long, "")
			_, _ = s.streams[0].Write(pattern())
			s.shut()
		}, netcheck.Reset, "receiving", nil},
		"ends one stream": {func(t *testing.T, s *session) {
			s.upTo(t)
			_ = s.receive()
			_, _ = s.ctl.want(kindGo, long, "")
			_ = s.streams[0].CloseWrite()
			untilClosed(s)
		}, netcheck.Reset, "stopped before it was told to", nil},
		"dies": {func(t *testing.T, s *session) { s.upTo(t); s.shut() }, netcheck.Reset, "", nil},
		"cannot do its part": {func(t *testing.T, s *session) {
			s.upTo(t)
			s.ctl.bye(faultf(netcheck.Own, "no memory"), long)
		}, netcheck.Canceled, "the other end: no memory", nil},
	} {
		all.add(name, func() func(*testing.T) {
			c := newCouple(t)
			if tt.pace != nil {
				c.dialer.pace = tt.pace
			}
			switch tt.class {
			case netcheck.Stalled:
				c.dialer.limits.answer = usual.answer
			case netcheck.Reset: // without a word
				c.dialer.limits.why = usual.why
			}
			began := time.Now()
			c.play(t, func(s *session) { tt.script(t, s) })
			took := time.Since(began)
			return func(t *testing.T) {
				require.Equal(t, tt.class, c.dialed.Class, c.dialed.Text)
				require.Contains(t, c.dialed.Text, tt.says)
				require.Less(t, took, long)
			}
		})
	}
	all.check(t)
}

// A sender that does not stop is not read any more: the receiver takes what it asked for and little else.
func TestTheReceiverTakesNoMoreThanItAsked(t *testing.T) {
	a, b := tcpPair(t)
	r := &receiver{patience: long, moved: make(chan struct{}, 1), ended: make(chan error, streams)}
	var sent atomic.Int64
	var both sync.WaitGroup
	both.Go(func() { _ = pump(a, &sent) })
	both.Go(func() { r.read(0, b) })
	m, err := r.measure(plan{measure: 100 * time.Millisecond}, time.Now().Add(time.Minute))
	require.NoError(t, err)
	require.NotEmpty(t, m.samples)
	r.drain()
	limit := r.limits[0].Load()
	require.NoError(t, <-r.ended)
	require.LessOrEqual(t, r.counts[0].Load(), limit+bufferSize)
	_ = a.SetWriteDeadline(time.Unix(1, 0))
	both.Wait()
}

func tcpPair(t *testing.T) (*net.TCPConn, *net.TCPConn) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	a, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	b, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { a.Close(); b.Close() })
	return a.(*net.TCPConn), b.(*net.TCPConn)
}

func TestWhatThisEndCannotDo(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*couple)
		says   string
	}{
		"an address that is not this host's": {func(c *couple) { c.server.cfg.NICs[0] = netcheck.NIC{Addr: "192.0.2.1"} },
			"listening at 192.0.2.1"},
		"no address":           {func(c *couple) { c.server.cfg.NICs[0].Addr = "eth0" }, `address "eth0" of interface "lo"`},
		"a peer's bad address": {func(c *couple) { c.serve.Peer.NICs = []netcheck.NIC{{Addr: "x"}} }, `address "x"`},
		"a short key":          {func(c *couple) { c.serve.Key = []byte("short") }, "has 5 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCouple(t)
			tt.change(c)
			c.run()
			require.Equal(t, netcheck.Own, c.served.Class, c.served.Text)
			require.Contains(t, c.served.Text, tt.says)
		})
	}
	c := newCouple(t)
	r := c.server.Serve(t.Context(), c.serve, func([]string) error { return io.ErrUnexpectedEOF })
	require.Equal(t, netcheck.Own, r.Class)
	require.Contains(t, r.Text, "saying where this end listens")
	for _, addr := range []string{"", "127.0.0.1", "127.0.0.1:0"} {
		r := newCouple(t).dialTo(addr)
		require.Equal(t, netcheck.Own, r.Class)
		require.Contains(t, r.Text, "need ip:port")
	}
}

// fill takes file descriptors until only spare are left, and returns what gives them back.
func fill(t *testing.T, spare int) func() {
	var was unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	few := was
	few.Cur = 200
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &few))
	var fds []int
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		fds = append(fds, fd)
	}
	for range spare {
		_ = unix.Close(fds[len(fds)-1])
		fds = fds[:len(fds)-1]
	}
	return func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was))
	}
}

func TestNoFileDescriptors(t *testing.T) {
	c := newCouple(t)
	empty := fill(t, 0)
	r := c.dialTo("127.0.0.1:1")
	empty()
	require.Equal(t, netcheck.Own, r.Class, r.Text)
	c.serve.Left = 2 * time.Second
	r = c.server.Serve(t.Context(), c.serve, func(addrs []string) error {
		empty = fill(t, 1)
		s, err := net.Dial("tcp", addrs[0])
		if err == nil {
			t.Cleanup(func() { s.Close() })
		}
		return err
	})
	empty()
	require.Equal(t, netcheck.Own, r.Class, r.Text)
}

func openFiles(t *testing.T) int {
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(files)
}

// Called off at any moment, a test ends without waiting for anything, says so at both ends, and leaves nothing.
func TestCancel(t *testing.T) {
	before := openFiles(t)
	for _, after := range []time.Duration{0, time.Millisecond, 4 * time.Millisecond, 10 * time.Millisecond,
		60 * time.Millisecond, 300 * time.Millisecond, 700 * time.Millisecond} {
		for _, which := range []string{"both", "server", "dialer"} {
			if which != "both" && after < 60*time.Millisecond {
				continue
			}
			c := newCouple(t)
			c.server.pace = &plan{warm: 300 * time.Millisecond, measure: 300 * time.Millisecond}
			c.dialer.pace = c.server.pace
			ctx, cancel := context.WithCancel(t.Context())
			if which != "dialer" {
				c.serveCtx = ctx
			}
			if which != "server" {
				c.dialCtx = ctx
			}
			var at atomic.Int64
			timer := time.AfterFunc(after, func() { at.Store(time.Now().UnixNano()); cancel() })
			if which == "dialer" { // it may not have connected yet
				c.runUntilDialed()
			} else {
				c.run()
			}
			took := time.Since(time.Unix(0, at.Load()))
			timer.Stop()
			cancel()
			if which != "dialer" {
				require.Equal(t, netcheck.Canceled, c.served.Class, "%v %s: %s", after, which, c.served.Text)
			}
			if which != "server" && c.dialed.Test != "" {
				require.Equal(t, netcheck.Canceled, c.dialed.Class, "%v %s: %s", after, which, c.dialed.Text)
			}
			require.Less(t, took, long/2, "%v %s", after, which)
		}
	}
	goleak.VerifyNone(t)
	require.LessOrEqual(t, openFiles(t), before) // what an earlier test had open may be closed by now
}

// The end of its time ends a test like a cancellation, and is no cancellation.
func TestDeadline(t *testing.T) {
	t.Parallel()
	c := newCouple(t)
	c.server.pace = &plan{warm: time.Minute, measure: time.Minute}
	c.dialer.pace = c.server.pace
	c.serve.Left, c.dial.Left = 2*time.Second, 2*time.Second
	began := time.Now()
	c.run()
	require.Less(t, time.Since(began), long)
	require.Equal(t, netcheck.Stalled, c.served.Class, c.served.Text)
	require.Equal(t, netcheck.Stalled, c.dialed.Class, c.dialed.Text)

	var several sync.WaitGroup
	for range 5 { // one end has less time, and says so before its connections are reset
		several.Go(func() {
			c := newCouple(t)
			c.server.pace = &plan{warm: time.Minute, measure: time.Minute}
			c.dialer.pace = c.server.pace
			c.serve.Left = 2 * time.Second
			c.run()
			assert.Equal(t, netcheck.Stalled, c.dialed.Class, c.dialed.Text)
			assert.Contains(t, c.dialed.Text, "the other end: ")
		})
	}
	several.Wait()

	c = newCouple(t)
	c.serve.Left = time.Second
	r := c.server.Serve(t.Context(), c.serve, func([]string) error { return nil })
	require.Equal(t, netcheck.Unreachable, r.Class)
	require.Contains(t, r.Text, "nobody connected")
}

func TestCPUBound(t *testing.T) {
	c := newCouple(t)
	c.server.cfg.Loopback = 1e9
	c.dialer.cfg.Loopback = 1 // less than anything measured
	c.run()
	require.Empty(t, c.dialed.Class, c.dialed.Text)
	require.True(t, c.dialed.Flows[0].CPUBound)
	p := New(Config{Loopback: 1e9})
	flow := netcheck.Flow{Mbps: 1000}
	require.False(t, p.flows([]*session{{flow: flow, busy: 0.5}})[0].CPUBound)
	require.True(t, p.flows([]*session{{flow: flow, busy: 0.5}, {flow: flow, busy: 0.97}})[0].CPUBound)
	p.cfg.Loopback = 2500
	require.False(t, p.flows([]*session{{flow: flow}})[0].CPUBound)
	require.True(t, p.flows([]*session{{flow: flow}, {flow: flow}})[0].CPUBound, "the sum of the rails counts")
}

func TestRails(t *testing.T) {
	c := newCouple(t)
	second := netcheck.NIC{Name: "lo", Addr: "127.0.0.2", MTU: 9000, Mbps: 100}
	c.server.cfg.NICs = append(c.server.cfg.NICs, second)
	c.dialer.cfg.NICs = append(c.dialer.cfg.NICs, second)
	c.serve.Peer.NICs = c.dialer.cfg.NICs
	c.dial.Peer.NICs = append(c.server.cfg.NICs, netcheck.NIC{Name: "eth9", Addr: "127.0.0.3"})
	c.run()
	for _, r := range []netcheck.Result{c.served, c.dialed} {
		require.Empty(t, r.Class, r.Text)
		require.Len(t, r.Flows, 2)
		require.Equal(t, 0, r.Flows[0].Rail)
		require.Equal(t, 1, r.Flows[1].Rail)
		require.Equal(t, 9000, r.Flows[1].MTU)
		require.Greater(t, r.Flows[1].Mbps, 0.0)
	}
}

// One rail that is broken names itself; what was measured on the others is kept.
func TestOneBrokenRail(t *testing.T) {
	t.Parallel()
	c := newCouple(t)
	second := netcheck.NIC{Name: "lo", Addr: "127.0.0.2"}
	for _, nics := range []*[]netcheck.NIC{&c.server.cfg.NICs, &c.dialer.cfg.NICs, &c.serve.Peer.NICs, &c.dial.Peer.NICs} {
		*nics = []netcheck.NIC{loNIC, second}
	}
	c.addrs = func(a []string) []string { return []string{a[0], "127.0.0.2:1"} }
	c.runUntilDialed()
	require.Equal(t, netcheck.Refused, c.dialed.Class)
	require.Contains(t, c.dialed.Text, "rail 1 (lo): ")
	require.Len(t, c.dialed.Flows, 1)
	require.Equal(t, netcheck.Unreachable, c.served.Class)
}
