package conns

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBelow(t *testing.T) {
	require.Equal(t, Limits{Total: 896, Unproven: 224}, Below(1024, 128))
	require.Equal(t, Limits{Total: 128, Unproven: 32}, Below(256, 200), "a half when files are few")
	require.Equal(t, Limits{Total: 1<<20 - 128, Unproven: 4096}, Below(1<<20, 128))
	require.Equal(t, 4096, Below(1<<64-1, 128).Unproven, "RLIM_INFINITY")
	require.Equal(t, Limits{Total: 1, Unproven: 1}, Below(2, 128))
}

// piped is a listener whose connections are in memory.
type piped struct {
	net.Listener
	accepts chan net.Conn
	once    sync.Once
}

func newPiped() *piped { return &piped{accepts: make(chan net.Conn)} }

func (p *piped) Addr() net.Addr { return &net.TCPAddr{} }

func (p *piped) Close() error {
	p.once.Do(func() { close(p.accepts) })
	return nil
}

func (p *piped) Accept() (net.Conn, error) {
	nc, ok := <-p.accepts
	if !ok {
		return nil, net.ErrClosed
	}
	return nc, nil
}

// dial returns both ends of a new connection; ours is nil when it was not accepted.
func dial(t *testing.T, p *piped, taken chan *Conn) (theirs net.Conn, ours *Conn) {
	theirs, server := net.Pipe()
	t.Cleanup(func() { theirs.Close(); server.Close() })
	p.accepts <- server
	synctest.Wait()
	select {
	case ours = <-taken:
	default:
	}
	return theirs, ours
}

func listen(t *testing.T, limits Limits) (l *Listener, p *piped, taken chan *Conn, log *bytes.Buffer) {
	p, taken, log = newPiped(), make(chan *Conn, 100), &bytes.Buffer{}
	l = Listen(p, limits, slog.New(slog.NewTextHandler(log, nil)))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			taken <- nc.(*Conn)
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return l, p, taken, log
}

func closed(nc net.Conn) bool {
	_ = nc.SetReadDeadline(time.Now().Add(time.Millisecond))
	_, err := nc.Read(make([]byte, 1))
	return err == io.EOF
}

func TestTheOldestUnprovenMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, p, taken, log := listen(t, Limits{Total: 10, Unproven: 2})
		member, proven := dial(t, p, taken)
		proven.Prove(true)
		first, _ := dial(t, p, taken)
		second, _ := dial(t, p, taken)
		begin := time.Now()
		_, third := dial(t, p, taken)
		require.Nil(t, third, "the first has its time")
		third = <-taken
		require.Equal(t, patience, time.Since(begin))
		require.True(t, closed(first))
		require.False(t, closed(second))
		require.False(t, closed(member))
		time.Sleep(time.Second)
		begin = time.Now()
		_, fourth := dial(t, p, taken)
		require.NotNil(t, fourth)
		require.Zero(t, time.Since(begin), "the second has had its time")
		require.True(t, closed(second))
		open, unproven := l.Counts()
		require.Equal(t, []int{3, 2}, []int{open, unproven})
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())

		require.NoError(t, third.Close())
		_ = third.Close()
		proven.Prove(false)
		open, unproven = l.Counts()
		require.Equal(t, []int{2, 2}, []int{open, unproven})
	})
}

// from is a connection of a peer's address.
type from struct {
	net.Conn
	addr net.Addr
}

func (f from) RemoteAddr() net.Addr { return f.addr }

// An address that opens many connections closes its own, and not the older one of another address.
func TestAnAddressWithManyMakesRoom(t *testing.T) {
	l := Listen(newPiped(), Limits{Total: 10, Unproven: 3}, slog.New(slog.DiscardHandler))
	synctest.Test(t, func(t *testing.T) {
		open := func(ip byte) *Conn {
			a, b := net.Pipe()
			t.Cleanup(func() { a.Close() })
			nc := from{b, &net.TCPAddr{IP: net.IPv4(10, 0, 0, ip), Port: 1}}
			c := &Conn{Conn: nc, l: l, from: origin(nc.RemoteAddr())}
			require.True(t, l.add(c))
			time.Sleep(2 * patience)
			return c
		}
		slow := open(1)
		crowd := []*Conn{open(2), open(2)}
		for i := range 20 {
			crowd = append(crowd, open(2))
			require.False(t, slow.gone)
			require.True(t, crowd[i].gone)
		}
		require.False(t, open(3).gone)
		require.False(t, slow.gone)
		_, unproven := l.Counts()
		require.Equal(t, 3, unproven)
		for _, c := range append(crowd, slow) {
			_ = c.Close()
		}
		require.Len(t, l.from, 1)
	})
}

func TestAProofMakesRoomAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, p, taken, log := listen(t, Limits{Total: 10, Unproven: 1})
		peer, first := dial(t, p, taken)
		_, second := dial(t, p, taken)
		require.Nil(t, second)
		begin := time.Now()
		first.Prove(true)
		require.NotNil(t, <-taken)
		require.Zero(t, time.Since(begin))
		require.False(t, closed(peer))
		require.Empty(t, log.String())
	})
}

func TestTheTotalHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, p, taken, log := listen(t, Limits{Total: 2, Unproven: 2})
		_, a := dial(t, p, taken)
		a.Prove(true)
		_, b := dial(t, p, taken)
		b.Prove(true)
		refused, c := dial(t, p, taken)
		require.Nil(t, c)
		require.True(t, closed(refused))
		require.Contains(t, log.String(), "new ones are closed")
		require.NoError(t, a.Close())
		_, d := dial(t, p, taken)
		require.NotNil(t, d)
		require.NoError(t, l.Close())
	})
}

func TestCloseWhileAConnectionWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, p, taken, _ := listen(t, Limits{Total: 1, Unproven: 1})
		dial(t, p, taken)
		waiting, none := dial(t, p, taken)
		require.Nil(t, none)
		require.NoError(t, l.Close())
		synctest.Wait()
		require.True(t, closed(waiting))
	})
}

func TestADetachedConnectionIsCountedUntilItsClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, p, taken, _ := listen(t, Limits{Total: 10, Unproven: 2})
		theirs, ours := dial(t, p, taken)
		ours.Prove(true)
		below := ours.NetConn()
		require.True(t, ours.Detach())
		open, unproven := l.Counts()
		require.Equal(t, []int{1, 0}, []int{open, unproven})
		require.NoError(t, ours.Close())
		require.NoError(t, ours.Close())
		open, _ = l.Counts()
		require.Zero(t, open)
		require.False(t, closed(theirs), "it is the caller's")
		require.NoError(t, below.Close())
		require.True(t, closed(theirs))
		_, other := dial(t, p, taken)
		require.NoError(t, other.Close())
		require.False(t, other.Detach(), "it is closed")
	})
}
