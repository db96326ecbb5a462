package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/plainhttp"
)

func TestPushAndFetch(t *testing.T) {
	for _, tc := range []struct {
		name   string
		size   int
		fixups bool
		conns  int
	}{
		{"one byte", 1, false, 0},
		{"a chunk and a byte", chunkSize - headerSize + 1, false, 0},
		{"many chunks", 33<<20 + 5, false, 0},
		{"one connection", 17 << 20, false, 1},
		{"more connections than allowed", 33 << 20, false, 99},
		{"open checksums", 33 << 20, true, 4},
	} {
		t.Run(tc.name, func(t *testing.T) {
			owner, partner, restored := newMemory(t), serve(t, token), newMemory(t)
			p := owner.saved(t, 3, 20, tc.size, tc.fixups)
			cl := &Client{Token: token, Conns: tc.conns}
			require.NoError(t, cl.Push(t.Context(), partner.addr, p))
			require.Equal(t, []string{"r3-0.seg"}, partner.files(t))
			got, err := partner.Copy(3, p.Meta.Save)
			require.NoError(t, err)
			defer got.Release()
			requireCopy(t, p, got)

			seg, err := cl.Fetch(t.Context(), partner.addr, 3, p.Meta.Save, restored.Incoming)
			require.NoError(t, err)
			defer seg.Close()
			back, err := seg.Pin()
			require.NoError(t, err)
			defer back.Release()
			requireCopy(t, p, back)
			require.Zero(t, partner.log.count("failed"))
		})
	}
}

// requireCopy checks that got has the content of want, and that the disk does not wait for it.
func requireCopy(t *testing.T, want, got *shm.Pinned) {
	t.Helper()
	require.True(t, bytes.Equal(want.Used()[headerSize:], got.Used()[headerSize:]))
	require.Equal(t, want.Meta, got.Meta)
	h := want.Header
	h.Disk, h.Released, h.Durable = false, h.Seq, 0
	require.Equal(t, h, got.Header)
}

func TestPushWhileTheDiskIsServed(t *testing.T) {
	owner, partner := newMemory(t), serve(t, token)
	p := owner.saved(t, 0, 20, 20<<20, true)
	s := p.Seal(t.Context(), 0)
	require.NoError(t, (&Client{Token: token}).Push(t.Context(), partner.addr, p))
	_, err := s.Sum()
	require.NoError(t, err)
	got, err := partner.Copy(0, p.Meta.Save)
	require.NoError(t, err)
	defer got.Release()
	requireCopy(t, p, got)
}

func TestRefusals(t *testing.T) {
	t.Run("push", func(t *testing.T) {
		owner, partner := newMemory(t), serve(t, token)
		partner.refuse = errors.New("holds step 30")
		p := owner.saved(t, 0, 20, 64<<20, false)
		var sent atomic.Int64
		w := &tap{write: func(_ net.Conn, _ int, _ int64, b []byte) ([]byte, error) {
			sent.Add(int64(len(b)))
			return b, nil
		}}
		err := (&Client{Token: token, Dial: w.dial}).Push(t.Context(), partner.addr, p)
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "holds step 30")
		require.Less(t, sent.Load(), int64(16<<10), "no bulk bytes before the answer")
		partner.nothingReceived(t)
	})
	t.Run("fetch of what is not there", func(t *testing.T) {
		_, err := (&Client{Token: token}).Fetch(t.Context(), serve(t, token).addr, 1, "00", newMemory(t).Incoming)
		require.ErrorIs(t, err, ErrMissing)
	})
	t.Run("fetch without room", func(t *testing.T) {
		owner, partner := newMemory(t), serve(t, token)
		cl := &Client{Token: token}
		p := owner.saved(t, 0, 20, 9<<20, false)
		require.NoError(t, cl.Push(t.Context(), partner.addr, p))
		_, err := cl.Fetch(t.Context(), partner.addr, 0, p.Meta.Save, func(shm.Meta, int64) (*shm.Incoming, error) {
			return nil, syscall.ENOSPC
		})
		require.ErrorIs(t, err, syscall.ENOSPC)
	})
	t.Run("unknown request", func(t *testing.T) {
		c, err := (&Client{Token: token}).dial(t.Context(), serve(t, token).addr)
		require.NoError(t, err)
		defer c.Close()
		require.NoError(t, c.send(message{Op: "dance"}))
		_, err = c.answer()
		require.ErrorContains(t, err, `unknown request "dance"`)
	})
	t.Run("unknown transfer", func(t *testing.T) {
		_, err := (&Client{Token: token}).join(newTransfer(t.Context()), serve(t, token).addr, "AAAA")
		require.ErrorContains(t, err, "no such transfer")
	})
}

// TestPushThatBreaks breaks a push in every way, and checks that nothing of it is left.
func TestPushThatBreaks(t *testing.T) {
	const late = 6 << 20 // behind the offer and the first chunk
	dead := errors.New("dead")
	for _, tc := range []struct {
		name  string
		write func(c net.Conn, conn int, off int64, b []byte) ([]byte, error)
		want  error // nil: any, for either end may see it first
		conns int   // 0: the default
	}{
		{"damaged chunk", func(_ net.Conn, _ int, _ int64, b []byte) ([]byte, error) {
			if len(b) == chunkSize {
				b = bytes.Clone(b)
				b[len(b)/2] ^= 1
			}
			return b, nil
		}, errDamaged, 0},
		{"chunk in the wrong place", func(_ net.Conn, _ int, _ int64, b []byte) ([]byte, error) {
			if len(b) == 16 && b[0] == 1 {
				b = bytes.Clone(b)
				b[0] = 2
			}
			return b, nil
		}, errDamaged, 0},
		{"chunk that does not exist", func(_ net.Conn, _ int, _ int64, b []byte) ([]byte, error) {
			if len(b) == 16 && b[0] == 1 {
				b = bytes.Clone(b)
				b[5] = 1
			}
			return b, nil
		}, errDamaged, 0},
		{"damaged header", func(_ net.Conn, _ int, _ int64, b []byte) ([]byte, error) {
			if len(b) == headerSize {
				b = bytes.Clone(b)
				b[32] ^= 1
			}
			return b, nil
		}, errDamaged, 0},
		{"primary dies", func(_ net.Conn, conn int, off int64, b []byte) ([]byte, error) {
			if conn == 0 && off > late {
				return nil, dead
			}
			return b, nil
		}, nil, 1}, // else the other connection may carry nearly all
		{"truncated in a chunk", func(c net.Conn, conn int, off int64, b []byte) ([]byte, error) {
			if len(b) == chunkSize && off > late {
				c.Write(b[:1000])
				return nil, dead
			}
			return b, nil
		}, nil, 0},
		{"ends early", func(_ net.Conn, _ int, _ int64, b []byte) ([]byte, error) {
			if len(b) == 16 {
				end := newChunkHead(endOfChunks, nil)
				b = end[:]
			}
			return b, nil
		}, nil, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			owner, partner := newMemory(t), serve(t, token)
			p := owner.saved(t, 0, 20, 40<<20, false)
			err := (&Client{Token: token, Conns: tc.conns, Dial: (&tap{write: tc.write}).dial}).Push(t.Context(),
				partner.addr, p)
			require.Error(t, err)
			if tc.want != nil {
				require.ErrorIs(t, err, tc.want)
			}
			partner.nothingReceived(t)
		})
	}
}

func TestFurtherConnectionDies(t *testing.T) {
	owner, partner := newMemory(t), serve(t, token)
	p := owner.saved(t, 0, 20, 60<<20, false)
	began := make(chan struct{})
	var once sync.Once
	w := &tap{write: func(_ net.Conn, conn int, _ int64, b []byte) ([]byte, error) {
		switch {
		case len(b) != chunkSize:
		case conn == 0:
			<-began // so that the other one gets a chunk
		default:
			once.Do(func() { close(began) })
			return nil, io.ErrClosedPipe
		}
		return b, nil
	}}
	cl := &Client{Token: token, Dial: w.dial}
	require.Error(t, cl.Push(t.Context(), partner.addr, p))
	partner.nothingReceived(t)
}

func TestFurtherConnectionsAreNotNeeded(t *testing.T) {
	owner, partner := newMemory(t), serve(t, token)
	p := owner.saved(t, 0, 20, 20<<20, false)
	var dials atomic.Int32
	cl := &Client{Token: token, Dial: func(ctx context.Context, addr string) (net.Conn, error) {
		if dials.Add(1) > 1 {
			return nil, syscall.ECONNREFUSED
		}
		return net.Dial("tcp", addr)
	}}
	require.NoError(t, cl.Push(t.Context(), partner.addr, p))
}

// TestFurtherConnectionHangs checks that a connection that hangs before it has a chunk is not waited for.
func TestFurtherConnectionHangs(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never says a word
	require.NoError(t, err)
	defer silent.Close()
	for name, hang := range map[string]func(ctx context.Context) (net.Conn, error){
		"in dialling": func(ctx context.Context) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() },
		"in the handshake": func(ctx context.Context) (net.Conn, error) {
			return net.Dial("tcp", silent.Addr().String())
		},
		"until it is too late": nil, // see below
	} {
		t.Run(name, func(t *testing.T) {
			owner, partner, restored := newMemory(t), serve(t, token), newMemory(t)
			p := owner.saved(t, 0, 20, 5<<20, false)
			var dials atomic.Int32
			cl := &Client{Token: token, Dial: func(ctx context.Context, addr string) (net.Conn, error) {
				if dials.Add(1)%2 == 1 {
					return net.Dial("tcp", addr)
				}
				if hang == nil { // ends well, but after the work is done
					<-ctx.Done()
					return net.Dial("tcp", addr)
				}
				return hang(ctx)
			}}
			start := time.Now()
			require.NoError(t, cl.Push(t.Context(), partner.addr, p))
			seg, err := cl.Fetch(t.Context(), partner.addr, 0, p.Meta.Save, restored.Incoming)
			require.NoError(t, err)
			require.NoError(t, seg.Close())
			require.Less(t, time.Since(start), handshakeTime-time.Second)
		})
	}
}

// TestPushInPlace pushes a rank's shard again and again. From the third on, the copy reuses the memory of the one it
// replaces.
func TestPushInPlace(t *testing.T) {
	owner, partner := newMemory(t), serve(t, token)
	cl := &Client{Token: token}
	for i, tc := range []struct{ size, reused int }{
		{9 << 20, 0}, {9 << 20, 0}, {9 << 20, 1}, {9<<20 + 1000, 2}, {12 << 20, 2}, {12 << 20, 2}, {8 << 20,
			3}, {2 << 20, 3},
	} {
		p := owner.saved(t, 3, int64(20+i), tc.size, i%2 == 1)
		require.NoError(t, cl.Push(t.Context(), partner.addr, p))
		got, err := partner.Copy(3, p.Meta.Save)
		require.NoError(t, err)
		require.True(t, bytes.Equal(p.Used()[headerSize:], got.Used()[headerSize:]))
		require.Equal(t, []any{p.Meta, got.Header.Seq}, []any{got.Meta, got.Header.Released})
		require.Equal(t, tc.reused, partner.reused, "after push %d", i)
		got.Release()
		require.Len(t, partner.files(t), min(i+1, 2))
	}
}

// TestPushInPlaceThatBreaks: the newest copy stays, and the next push succeeds.
func TestPushInPlaceThatBreaks(t *testing.T) {
	owner, partner := newMemory(t), serve(t, token)
	cl := &Client{Token: token}
	var newest *shm.Pinned
	for step := range int64(2) {
		newest = owner.saved(t, 3, step, 9<<20, false)
		require.NoError(t, cl.Push(t.Context(), partner.addr, newest))
	}
	w := &tap{write: func(_ net.Conn, _ int, _ int64, b []byte) ([]byte, error) {
		if len(b) == chunkSize && b[chunkSize-1] != 0 {
			b = bytes.Clone(b)
			b[0] ^= 1
		}
		return b, nil
	}}
	next := owner.saved(t, 3, 2, 9<<20, false)
	require.ErrorIs(t, (&Client{Token: token, Dial: w.dial}).Push(t.Context(), partner.addr, next), errDamaged)
	for name, spare := range map[string]bool{newest.Meta.Save: false, next.Meta.Save: true} {
		got, err := partner.Copy(3, name)
		require.Equal(t, spare, err != nil)
		if err == nil {
			requireCopy(t, newest, got)
			got.Release()
		}
	}
	require.NoError(t, cl.Push(t.Context(), partner.addr, next))
	require.Equal(t, 2, partner.reused)
	got, err := partner.Copy(3, next.Meta.Save)
	require.NoError(t, err)
	defer got.Release()
	require.True(t, bytes.Equal(next.Used()[headerSize:], got.Used()[headerSize:]))
}

// TestFetchThatBreaks has a proxy that damages or cuts the server's bytes.
func TestFetchThatBreaks(t *testing.T) {
	for _, tc := range []struct {
		name   string
		damage bool
	}{{"damaged", true}, {"cut off", false}} {
		t.Run(tc.name, func(t *testing.T) {
			owner, partner, restored := newMemory(t), serve(t, token), newMemory(t)
			p := owner.saved(t, 0, 20, 20<<20, false)
			require.NoError(t, (&Client{Token: token}).Push(t.Context(), partner.addr, p))
			cl := &Client{Token: token, Conns: 1, Dial: func(ctx context.Context, addr string) (net.Conn, error) {
				c, err := net.Dial("tcp", addr)
				return &breaksReads{Conn: c, damage: tc.damage}, err
			}}
			_, err := cl.Fetch(t.Context(), partner.addr, 0, p.Meta.Save, restored.Incoming)
			if tc.damage {
				require.ErrorIs(t, err, errDamaged)
			} else {
				require.ErrorIs(t, err, io.ErrUnexpectedEOF)
			}
			require.Empty(t, restored.files(t))
		})
	}
}

type breaksReads struct {
	net.Conn
	damage bool
	read   int
}

func (c *breaksReads) Read(b []byte) (int, error) {
	if c.read > 9<<20 && !c.damage {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(b)
	if c.read += n; c.read > 9<<20 && c.damage {
		b[0] ^= 0x10
	}
	return n, err
}

func TestPushAgainSupersedes(t *testing.T) {
	owner, partner := newMemory(t), serve(t, token)
	old, next := owner.saved(t, 0, 20, 20<<20, false), newMemory(t).saved(t, 0, 21, 20<<20, false)
	stuck, result := make(chan struct{}), make(chan error, 1)
	var once sync.Once
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := &tap{write: func(_ net.Conn, conn int, _ int64, b []byte) ([]byte, error) {
		if len(b) == chunkSize {
			once.Do(func() { close(stuck) })
			<-ctx.Done()
		}
		return b, nil
	}}
	go func() {
		result <- (&Client{Token: token, Dial: w.dial}).Push(context.WithoutCancel(ctx), partner.addr, old)
	}()
	<-stuck
	require.NoError(t, (&Client{Token: token}).Push(t.Context(), partner.addr, next))
	cancel()
	require.Error(t, <-result)
	require.Equal(t, 1, partner.arrived)
	got, err := partner.Copy(0, next.Meta.Save)
	require.NoError(t, err)
	got.Release()
}

func TestCancel(t *testing.T) {
	owner, partner := newMemory(t), serve(t, token)
	p := owner.saved(t, 0, 20, 20<<20, false)
	ctx, cancel := context.WithCancel(t.Context())
	w := &tap{write: func(_ net.Conn, _ int, off int64, b []byte) ([]byte, error) {
		if off > 6<<20 {
			cancel()
		}
		return b, nil
	}}
	require.ErrorIs(t, (&Client{Token: token, Dial: w.dial}).Push(ctx, partner.addr, p), context.Canceled)
	partner.nothingReceived(t)
}

func TestCloseDuringPush(t *testing.T) {
	owner, partner := newMemory(t), serve(t, token)
	p := owner.saved(t, 0, 20, 20<<20, false)
	w := &tap{write: func(_ net.Conn, _ int, off int64, b []byte) ([]byte, error) {
		if off > 6<<20 {
			partner.server.Close()
		}
		return b, nil
	}}
	require.Error(t, (&Client{Token: token, Dial: w.dial}).Push(t.Context(), partner.addr, p))
	partner.nothingReceived(t)
	require.Error(t, (&Client{Token: token}).Push(t.Context(), partner.addr, p), "nobody listens")
}

func TestTokens(t *testing.T) {
	owner := newMemory(t)
	p := owner.saved(t, 0, 20, 1000, false)
	for _, tc := range []struct {
		name, server, client string
		want                 error
	}{
		{"same", token, token, nil},
		{"none on loopback", "", "", nil},
		{"wrong", token, token + "x", errToken},
		{"none but needed", token, "", errToken},
		{"not needed but given", "", token, errToken},
	} {
		t.Run(tc.name, func(t *testing.T) {
			partner := serve(t, tc.server)
			err := (&Client{Token: tc.client}).Push(t.Context(), partner.addr, p)
			require.ErrorIs(t, err, tc.want)
			if tc.want != nil {
				partner.nothingReceived(t)
				require.Equal(t, 1, partner.log.count("handshake failed"))
			}
		})
	}
	t.Run("one of two, while it changes", func(t *testing.T) {
		partner := serveWith(t, token, func() []string { return []string{token, token + "2"} }, nil)
		for _, known := range [][]string{{token}, {token + "2"}, {token + "3", token}} {
			cl := &Client{Token: "old", Tokens: plainhttp.NewTokens(func() []string { return known })}
			require.NoError(t, cl.Push(t.Context(), partner.addr, p), known)
		}
		require.Equal(t, 1, partner.log.count("handshake failed"))
		require.ErrorIs(t, (&Client{Token: token + "3"}).Push(t.Context(), partner.addr, p), errToken)
	})
	t.Run("none beyond loopback", func(t *testing.T) {
		ln, err := net.Listen("tcp", "0.0.0.0:0")
		require.NoError(t, err)
		require.ErrorContains(t, NewServer("", nil, nil).Serve(ln), "token is needed")
		_, err = ln.Accept()
		require.ErrorIs(t, err, net.ErrClosed)
		dial := func(context.Context, string) (net.Conn, error) { c, _ := net.Pipe(); return c, nil }
		require.ErrorContains(t, (&Client{Dial: dial}).Push(t.Context(), "10.0.0.1:1", p), "token is needed")
	})
}

func TestSilence(t *testing.T) {
	t.Run("stranger", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a, b := net.Pipe()
			defer a.Close()
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() { // a byte a second is no reason to wait longer
				for err := error(nil); err == nil; time.Sleep(time.Second) {
					_, err = a.Write([]byte{'D'})
				}
			})
			start := time.Now()
			require.Error(t, handshake(t.Context(), b, func(rw io.ReadWriter) error {
				return welcome(rw, []string{token})
			}))
			require.Equal(t, handshakeTime, time.Since(start))
			b.Close()
		})
	})
	t.Run("peer", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a, b := net.Pipe()
			c := newConn(t.Context(), b)
			defer c.Close()
			start := time.Now()
			go func() {
				for range 3 {
					time.Sleep(20 * time.Second)
					a.Write([]byte{1})
				}
			}()
			_, err := c.Read(make([]byte, 4))
			require.ErrorContains(t, err, "silent for 30s")
			require.Equal(t, 90*time.Second, time.Since(start), "every byte counts")
		})
	})
	t.Run("peer that moves bytes elsewhere", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			_, b := net.Pipe()
			c := newConn(t.Context(), b)
			defer c.Close()
			start := time.Now()
			go func() {
				time.Sleep(25 * time.Second)
				c.moved.Store(time.Now().UnixNano())
			}()
			_, err := c.Read(make([]byte, 4))
			require.ErrorContains(t, err, "silent for 30s")
			require.Equal(t, 60*time.Second, time.Since(start))
		})
	})
	t.Run("peer that says it is busy", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a, b := net.Pipe()
			server, client := newConn(t.Context(), a), newConn(t.Context(), b)
			defer server.Close()
			defer client.Close()
			go func() {
				server.during(func() error { time.Sleep(5 * time.Minute); return nil })
				server.send(message{OK: true})
			}()
			m, err := client.answer()
			require.NoError(t, err)
			require.True(t, m.OK)
		})
	})
	t.Run("context", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			_, b := net.Pipe()
			ctx, cancel := context.WithCancelCause(t.Context())
			c := newConn(ctx, b)
			defer c.Close()
			time.AfterFunc(time.Second, func() { cancel(syscall.EIO) })
			_, err := c.Read(make([]byte, 4))
			require.ErrorIs(t, err, syscall.EIO)
		})
	})
}

func TestHalfClosedPeer(t *testing.T) {
	partner := serve(t, token)
	p := newMemory(t).saved(t, 0, 20, 20<<20, false)
	c, err := (&Client{Token: token}).dial(t.Context(), partner.addr)
	require.NoError(t, err)
	defer c.Close()
	o, err := offerOf(p)
	require.NoError(t, err)
	require.NoError(t, o.write(c, message{Op: "push"}))
	_, err = c.answer()
	require.NoError(t, err)
	require.NoError(t, c.Conn.(*net.TCPConn).CloseWrite())
	_, err = c.answer()
	require.ErrorContains(t, err, "EOF", "the server says what it saw, and ends")
	_, err = c.answer()
	require.ErrorIs(t, err, io.EOF)
	partner.nothingReceived(t)
}

func TestConnectionLimits(t *testing.T) {
	partner := serve(t, token)
	member, err := (&Client{Token: token}).dial(t.Context(), partner.addr)
	require.NoError(t, err)
	defer member.Close()
	var first net.Conn
	for i := range 2 * freshConns {
		c, err := net.Dial("tcp", partner.addr)
		require.NoError(t, err)
		defer c.Close()
		if i == 0 {
			first = c
		}
	}
	_, err = first.Read(make([]byte, 1))
	require.Error(t, err, "the oldest makes room")
	late, err := (&Client{Token: token}).dial(t.Context(), partner.addr)
	require.NoError(t, err, "strangers keep no member out")
	late.Close()
	require.Equal(t, 1, partner.log.count("handshake failed"), "strangers do not fill the log")
}

// TestPacing: connections within a machine are not paced, and others keep the system's choice.
func TestPacing(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	choice, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	require.NoError(t, err)
	for from, want := range map[string]string{"127.0.0.1": "reno", "127.0.0.2": strings.TrimSpace(string(choice))} {
		ours, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", ln.Addr().String())
		require.NoError(t, err)
		theirs, err := ln.Accept()
		require.NoError(t, err)
		for _, nc := range []net.Conn{ours, theirs} {
			c := newConn(t.Context(), nc)
			defer c.Close()
			raw, err := nc.(*net.TCPConn).SyscallConn()
			require.NoError(t, err)
			require.NoError(t, raw.Control(func(fd uintptr) {
				got, err := unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
				require.NoError(t, err)
				require.Equal(t, want, got, "from %s", from)
			}))
		}
	}
}

func benchmark(b *testing.B, size int, fixups bool, conns int) {
	partner := serve(b, token)
	p := newMemory(b).saved(b, 0, 20, size, fixups)
	cl := &Client{Token: token, Conns: conns}
	again := func() { require.NoError(b, cl.Push(b.Context(), partner.addr, p)) }
	again() // after two, the partner has all the memory that it needs
	again()
	b.SetBytes(int64(size))
	var before, after syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	for b.Loop() {
		again()
	}
	syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	seconds := func(r *syscall.Rusage) float64 {
		return time.Duration(r.Utime.Nano() + r.Stime.Nano()).Seconds()
	}
	gib := float64(size) * float64(b.N) / (1 << 30)
	b.ReportMetric(gib/b.Elapsed().Seconds(), "GiB/s")
	b.ReportMetric((seconds(&after)-seconds(&before))/gib, "cpu-s/GiB")
}

// BenchmarkPush pushes the same rank again and again, and counts the CPU of both ends.
func BenchmarkPush(b *testing.B) {
	for _, conns := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("conns=%d", conns), func(b *testing.B) { benchmark(b, 256<<20, false, conns) })
	}
	b.Run("checksums", func(b *testing.B) { benchmark(b, 256<<20, true, 2) })
}
