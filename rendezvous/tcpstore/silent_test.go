package tcpstore

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// street is a listener in memory whose clients choose their address.
type street struct {
	net.Listener
	accepts chan net.Conn
}

func (s *street) Addr() net.Addr { return &net.TCPAddr{} }
func (s *street) Close() error   { close(s.accepts); return nil }

func (s *street) Accept() (net.Conn, error) {
	nc, ok := <-s.accepts
	if !ok {
		return nil, net.ErrClosed
	}
	return nc, nil
}

// passer is a connection from an address, which may have proved who it is.
type passer struct {
	net.Conn
	from   string
	proven bool
}

func (p *passer) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(p.from), 1))
}

func (p *passer) Prove(ok bool) { p.proven = ok }

const member, stranger = "10.0.0.1", "10.0.0.9"

// newStreet splits the traffic of a store whose only member may keep two connections silent.
func newStreet(t *testing.T) (*Server, net.Listener, *street) {
	l := &street{accepts: make(chan net.Conn)}
	s := New(Config{
		Allow: func(a netip.Addr) bool { return a.String() == member },
		Silent: func(a netip.Addr) int {
			if a.String() == member {
				return 2
			}
			return 0
		},
	})
	other := Split(l, s)
	t.Cleanup(func() {
		require.NoError(t, other.Close())
		require.NoError(t, s.Close())
	})
	return s, other, l
}

func (s *street) enter(from string) (*recorder, *passer) {
	client, server := net.Pipe()
	p := &passer{Conn: server, from: from}
	s.accepts <- p
	synctest.Wait()
	return record(client), p
}

func isClosed(r *recorder) bool {
	_, closed := r.take()
	return closed
}

func TestStrangersMustSpeakSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, l := newStreet(t)
		theirs, theirConn := l.enter(stranger)
		first, firstConn := l.enter(member)
		second, _ := l.enter(member)
		third, thirdConn := l.enter(member)
		require.Equal(t, []bool{false, true, false}, []bool{theirConn.proven, firstConn.proven, thirdConn.proven})
		time.Sleep(9 * time.Second)
		require.False(t, isClosed(theirs))
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.True(t, isClosed(theirs), "10 seconds")
		require.True(t, isClosed(third), "one more than the member has places for")
		require.Equal(t, uint64(2), s.stats().Refused)
		time.Sleep(24 * time.Hour)
		synctest.Wait()

		send(t, first.nc, "\x07"+str("/k")) // WATCH_KEY of generation A
		synctest.Wait()
		got, closed := first.take()
		require.Equal(t, "\x03", got)
		require.False(t, closed)
		fourth, _ := l.enter(member)
		time.Sleep(time.Hour)
		synctest.Wait()
		require.False(t, isClosed(fourth), "the place of the first is free since it spoke")
		require.NoError(t, second.nc.Close())
		synctest.Wait()
		fifth, _ := l.enter(member)
		time.Sleep(time.Hour)
		synctest.Wait()
		require.False(t, isClosed(fifth), "and that of the second since it left")
	})
}

func TestLateFirstByteOfAMemberWithoutPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, _, l := newStreet(t)
		l.enter(member)
		l.enter(member)
		third, conn := l.enter(member)
		time.Sleep(9 * time.Second)
		send(t, third.nc, "\x03"+str("/k")+u64(1))
		synctest.Wait()
		got, _ := third.take()
		require.Equal(t, u64(1), got)
		require.True(t, conn.proven)
		time.Sleep(time.Hour)
		synctest.Wait()
		require.False(t, isClosed(third), "the limit was for the first byte")
	})
}

func TestWhatIsNotTheStoresIsUnproven(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, other, l := newStreet(t)
		web, conn := l.enter(member)
		require.True(t, conn.proven)
		send(t, web.nc, "G")
		got, err := other.Accept()
		require.NoError(t, err)
		require.False(t, conn.proven)
		got.(interface{ Prove(bool) }).Prove(true)
		require.True(t, conn.proven)
		require.NoError(t, got.SetReadDeadline(time.Now().Add(time.Hour)))
		_, err = io.ReadFull(got, make([]byte, 1))
		require.NoError(t, err)
		require.NoError(t, got.Close())
	})
}

func TestResetFreesTheSilentPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, l := newStreet(t)
		old, conn := l.enter(member)
		l.enter(member)
		time.Sleep(time.Hour)
		s.Reset()
		require.False(t, conn.proven)
		first, _ := l.enter(member)
		second, _ := l.enter(member)
		time.Sleep(11 * time.Second)
		synctest.Wait()
		require.True(t, isClosed(old), "it belongs to workers that have ended")
		require.False(t, isClosed(first))
		require.False(t, isClosed(second))
	})
}
