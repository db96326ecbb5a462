package replica

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
	"dlrover-run/internal/secure"
	"dlrover-run/internal/testkit"
)

const token = "0123456789abcdef"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory is a Store over one runtime directory, as each node has one.
type memory struct {
	dir *shm.Dir

	mu      sync.Mutex
	refuse  error
	held    map[int]*shm.Segment // by rank: the newest
	spare   map[int]*shm.Segment // by rank: the one before, which the next copy takes over
	reused  int
	arrived int
}

func newMemory(t testing.TB) *memory {
	t.Helper()
	base := t.TempDir()
	if _, err := os.Stat("/dev/shm"); err == nil {
		base, err = os.MkdirTemp("/dev/shm", "replica-test-")
		require.NoError(t, err)
		t.Cleanup(func() { os.RemoveAll(base) })
	}
	dir, err := shm.Create(base, "key")
	require.NoError(t, err)
	m := &memory{dir: dir, held: map[int]*shm.Segment{}, spare: map[int]*shm.Segment{}}
	t.Cleanup(func() {
		for _, r := range []map[int]*shm.Segment{m.held, m.spare} {
			for _, s := range r {
				s.Close()
			}
		}
	})
	return m
}

func (m *memory) Incoming(meta shm.Meta, size int64) (*shm.Incoming, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refuse != nil {
		return nil, m.refuse
	}
	name := fmt.Sprintf("peer/r%d-0.seg", meta.Rank)
	if held := m.held[meta.Rank]; held != nil && held.Name() == name {
		name = fmt.Sprintf("peer/r%d-1.seg", meta.Rank)
	}
	if spare := m.spare[meta.Rank]; spare != nil {
		if h, err := spare.Header(); err != nil {
			return nil, err
		} else if in, err := spare.Reuse(size, h.Seq); err == nil {
			m.reused++
			return in, nil
		}
	}
	return m.dir.Incoming(name, size)
}

func (m *memory) Published(s *shm.Segment) {
	p, err := s.Pin()
	if err != nil {
		panic(err)
	}
	defer p.Release()
	m.mu.Lock()
	defer m.mu.Unlock()
	if spare := m.spare[p.Meta.Rank]; spare != nil && spare != s {
		spare.Close()
	}
	if held := m.held[p.Meta.Rank]; held != nil {
		m.spare[p.Meta.Rank] = held
	}
	m.held[p.Meta.Rank] = s
	m.arrived++
}

func (m *memory) Copy(rank int, save string) (*shm.Pinned, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.held[rank]
	if s == nil {
		return nil, errors.New("nothing of this rank")
	}
	p, err := s.Pin()
	if err == nil && p.Meta.Save != save {
		p.Release()
		return nil, errors.New("another save")
	}
	return p, err
}

// files are the names in the directory of copies, hidden ones too.
func (m *memory) files(t testing.TB) (names []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(filepath.Join(m.dir.Path(), "peer"),
		func(path string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				names = append(names, e.Name())
			}
			return err
		}))
	return names
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	rand.NewChaCha8(seed).Read(b)
	return b
}

// saved is a pinned segment with one file of size bytes. With fixups, the checksum of the second half is to be stored
// in the first bytes.
func (m *memory) saved(t testing.TB, rank int, step int64, size int, fixups bool) *shm.Pinned {
	t.Helper()
	meta := shmtest.Meta("/ckpt", step)
	meta.Rank, meta.WorldSize = rank, rank+1
	s := shmtest.Save{Meta: meta, Seq: 7, Disk: true,
		Files: []shmtest.File{{Path: "a.bin", Kind: "raw", Data: randomBytes(size)}}}
	if fixups {
		half := int64(size / 2)
		s.Fixups = []shmtest.Fixup{{Off: half, Len: int64(size) - half, First: 8}}
	}
	name := fmt.Sprintf("seg/l%d-0.seg", rank)
	s.Write(t, m.dir, name)
	seg, err := m.dir.Open(name)
	require.NoError(t, err)
	t.Cleanup(func() { seg.Close() })
	p, err := seg.Pin()
	require.NoError(t, err)
	t.Cleanup(p.Release)
	return p
}

// node is a Server on loopback.
type node struct {
	*memory
	server *Server
	addr   string
	log    *logText
}

func serve(t testing.TB, token string) *node { return serveWith(t, token, nil, nil) }

// serveWith takes any of the tokens that accepted returns, unless it is nil, over the TLS.
func serveWith(t testing.TB, token string, accepted func() []string, l *secure.Layer) *node {
	t.Helper()
	n := &node{memory: newMemory(t), log: &logText{}}
	n.server = NewServer(token, n.memory, slog.New(slog.NewTextHandler(n.log, nil)))
	n.server.Accepted, n.server.TLS = accepted, l
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n.addr = ln.Addr().String()
	done := make(chan error, 1)
	go func() { done <- n.server.Serve(ln) }()
	t.Cleanup(func() { n.server.Close(); require.NoError(t, <-done) })
	return n
}

// nothingReceived waits for the end of the transfers that the server has, and checks that they left nothing.
func (n *node) nothingReceived(t testing.TB) {
	t.Helper()
	n.server.Close()
	require.Empty(t, n.files(t))
	require.Zero(t, n.arrived)
}

type logText struct{ testkit.Buffer }

func (l *logText) count(s string) int { return strings.Count(l.String(), s) }

// tap makes connections whose written bytes go through a function, which may change them, or fail the write. The first
// connection has index 0.
type tap struct {
	mu    sync.Mutex
	count int
	write func(c net.Conn, conn int, off int64, b []byte) ([]byte, error)
}

func (w *tap) dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count++
	return &tapped{Conn: c, tap: w, index: w.count - 1}, nil
}

type tapped struct {
	net.Conn
	tap   *tap
	index int
	off   int64
}

func (c *tapped) Write(b []byte) (int, error) {
	out, err := c.tap.write(c.Conn, c.index, c.off, b)
	c.off += int64(len(b))
	if err != nil {
		c.Conn.Close()
		return 0, err
	}
	if _, err := c.Conn.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}
