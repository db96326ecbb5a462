package checkpointd_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
)

// patience is longer than the daemon waits for anything itself (30 s for the other nodes), on a loaded machine, too.
const patience = 90 * time.Second

// node is a daemon on a directory of its own, with storage that nodes may share.
type node struct {
	t    *testing.T
	dir  *shm.Dir
	sock string
	cfg  checkpointd.Config
	stop func()
}

func newNode(t *testing.T, change ...func(*checkpointd.Config)) *node {
	t.Helper()
	dir, err := shm.Create(t.TempDir(), "job")
	require.NoError(t, err)
	n := &node{t: t, dir: dir, sock: filepath.Join(dir.Path(), "sock"), cfg: checkpointd.Config{Dir: dir}}
	for _, f := range change {
		f(&n.cfg)
	}
	n.start()
	t.Cleanup(func() { n.stop() })
	return n
}

// start runs a daemon; stop ends it as abruptly as a goroutine can be ended.
func (n *node) start() {
	n.t.Helper()
	ln, err := checkpointd.Listen(n.sock)
	require.NoError(n.t, err)
	d, err := checkpointd.New(n.cfg)
	require.NoError(n.t, err)
	served := make(chan error, 1)
	go func() { served <- d.Serve(context.Background(), ln) }()
	n.stop = sync.OnceFunc(func() {
		d.Close()
		require.NoError(n.t, <-served)
	})
}

// ask sends one request on a connection of its own.
func (n *node) ask(req map[string]any) map[string]any {
	n.t.Helper()
	c, err := net.Dial("unix", n.sock)
	require.NoError(n.t, err)
	defer c.Close()
	require.NoError(n.t, c.SetDeadline(time.Now().Add(patience)))
	require.NoError(n.t, json.NewEncoder(c).Encode(req))
	var res map[string]any
	require.NoError(n.t, json.NewDecoder(c).Decode(&res))
	return res
}

func (n *node) wait(dir string, step int64) map[string]any {
	n.t.Helper()
	return n.ask(map[string]any{"op": "wait", "dir": dir, "step": step, "timeout_ms": patience.Milliseconds()})
}

func (n *node) control() *checkpointd.Control {
	n.t.Helper()
	c, err := checkpointd.Dial(n.t.Context(), n.sock)
	require.NoError(n.t, err)
	n.t.Cleanup(func() { c.Close() })
	return c
}

// shard describes a save of one rank among several.
func shard(dir string, step int64, rank, ranks, local int) shmtest.Save {
	m := shmtest.Meta(dir, step)
	m.Rank, m.Shard, m.Shards, m.WorldSize, m.LocalWorldSize, m.Resize = rank, rank, ranks, ranks, local, "same"
	m.Trackers = []commit.Tracker{{Path: "dlrover_latest.txt", Text: fmt.Sprint(step)}}
	return shmtest.Save{Meta: m, Disk: true, Files: []shmtest.File{{Path: fmt.Sprintf("%d/rank_%d.pt", step, rank),
		Kind: "raw", Data: content(step, rank)}}}
}

func content(step int64, rank int) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "step %d of rank %d.", step, rank), 5000)
}

func single(dir string, step int64) shmtest.Save { return shard(dir, step, 0, 1, 1) }

// put writes the save into a worker's segment and notifies the daemon.
func (n *node) put(s shmtest.Save, name string) {
	n.t.Helper()
	s.Write(n.t, n.dir, name)
	require.Equal(n.t, true, n.ask(map[string]any{"op": "saved", "seg": name})["ok"])
}

func requireStep(t *testing.T, dir string, step int64, ranks int) {
	t.Helper()
	latest, err := os.ReadFile(filepath.Join(dir, "dlrover_latest.txt"))
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint(step), strings.TrimSpace(string(latest)))
	for r := range ranks {
		got, err := os.ReadFile(filepath.Join(dir, fmt.Sprint(step), fmt.Sprintf("rank_%d.pt", r)))
		require.NoError(t, err)
		require.Equal(t, content(step, r), got)
	}
	store := commit.Store{FS: fsx.OS{}, Now: time.Now}
	m, skipped, err := store.Newest(t.Context(), dir, nil)
	require.NoError(t, err)
	require.Empty(t, skipped)
	require.Equal(t, step, m.Step)
	require.Len(t, m.Files, ranks)
}

// requireNoLeftovers checks that no temporary files are left in the directory.
func requireNoLeftovers(t *testing.T, dir string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		require.NotContains(t, strings.TrimPrefix(path, dir), ".tmp")
		return err
	}))
	stages, err := filepath.Glob(filepath.Join(dir, ".dlrover/stage/*"))
	require.NoError(t, err)
	require.Empty(t, stages)
}

func TestSaveIsCommitted(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	n.put(single(dir, 20), "seg/l0-0.seg")
	require.Equal(t, map[string]any{"ok": true, "committed": 20.0}, n.wait(dir, 20))
	requireStep(t, dir, 20, 1)
	requireNoLeftovers(t, dir)
}

func TestChecksumsAreFilledIn(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	s := single(dir, 1)
	data := append(make([]byte, 8), content(1, 0)...)
	s.Files[0].Data = bytes.Clone(data)
	s.Fixups = []shmtest.Fixup{{Off: 8, Len: int64(len(data) - 8), First: 4}}
	n.put(s, "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 1)["ok"])
	got, err := os.ReadFile(filepath.Join(dir, "1/rank_0.pt"))
	require.NoError(t, err)
	require.Equal(t, crc32.ChecksumIEEE(data[8:]), binary.LittleEndian.Uint32(got[4:]))
	require.Equal(t, data[8:], got[8:])
}

func TestMemorySaveStaysInMemory(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	s := single(dir, 3)
	s.Disk = false
	n.put(s, "seg/l0-0.seg")
	res := n.ask(map[string]any{"op": "offers", "rank": 0, "dir": dir})
	offers := res["offers"].([]any)
	require.Len(t, offers, 1)
	require.Equal(t, 3.0, offers[0].(map[string]any)["step"])
	require.Equal(t, false, res["more"])
	require.NoFileExists(t, filepath.Join(dir, "dlrover_latest.txt"))
}

func TestOffersAreForTheRankThatAsks(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	s := shard(dir, 3, 1, 2, 2)
	s.Disk = false
	n.put(s, "seg/l1-0.seg")
	require.Empty(t, n.ask(map[string]any{"op": "offers", "rank": 0, "dir": dir})["offers"])
	require.Len(t, n.ask(map[string]any{"op": "offers", "rank": 1, "dir": dir})["offers"], 1)
	require.Empty(t, n.ask(map[string]any{"op": "offers", "rank": 1, "dir": dir + "/other"})["offers"])
}

func TestAllShardsOfANodeAreCommittedTogether(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	for r := range 3 {
		require.NoFileExists(t, filepath.Join(dir, "dlrover_latest.txt"))
		n.put(shard(dir, 7, r, 3, 3), fmt.Sprintf("seg/l%d-0.seg", r))
	}
	require.Equal(t, true, n.wait(dir, 7)["ok"])
	requireStep(t, dir, 7, 3)
}

// A breakpoint save takes the newest step that every shard is held of.
func TestBreakpoint(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	for r := range 2 {
		s := shard(dir, 10, r, 2, 2)
		s.Disk = false
		n.put(s, fmt.Sprintf("seg/l%d-0.seg", r))
	}
	newer := shard(dir, 15, 0, 2, 2)
	newer.Disk = false
	n.put(newer, "seg/l0-1.seg")
	c := n.control()
	require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	left, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left)
	requireStep(t, dir, 10, 2)
	names, err := n.dir.Names()
	require.NoError(t, err)
	require.Empty(t, names, "End removes the memory once all is on disk")
}

func TestBreakpointWithoutCompleteStep(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	s := shard(dir, 10, 0, 2, 2)
	s.Disk = false
	n.put(s, "seg/l0-0.seg")
	c := n.control()
	require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	_, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.NoFileExists(t, filepath.Join(dir, "dlrover_latest.txt"))
}

func TestBreakpointOfASaveOnDisk(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	n.put(single(dir, 20), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	before, err := os.Stat(filepath.Join(dir, "20/rank_0.pt"))
	require.NoError(t, err)
	c := n.control()
	require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	_, err = c.End(t.Context(), patience)
	require.NoError(t, err)
	after, err := os.Stat(filepath.Join(dir, "20/rank_0.pt"))
	require.NoError(t, err)
	require.True(t, os.SameFile(before, after), "it was written again")
}

// putTorn puts the segment of a worker that died while it was copying. It never holds a complete save.
func (n *node) putTorn(s shmtest.Save, name string) {
	n.t.Helper()
	b := s.Bytes(n.t)
	binary.LittleEndian.PutUint64(b[16:], uint64(shm.Writing))
	path := filepath.Join(n.dir.Path(), name)
	require.NoError(n.t, os.WriteFile(path+".tmp", b, 0o600))
	require.NoError(n.t, os.Rename(path+".tmp", path))
}

func TestTornSaveIsNeverWritten(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	n.putTorn(single(dir, 15), "seg/l0-1.seg")
	c := n.control()
	require.NoError(t, c.Breakpoint(t.Context(), checkpointd.World{}, "the worker died", checkpointd.AtOnce))
	_, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	requireStep(t, dir, 10, 1)
}

// The next daemon finds its work in the headers alone.
func TestDaemonTakesOver(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	n.stop()
	single(dir, 30).Write(t, n.dir, "seg/l0-0.seg")
	n.start()
	require.Equal(t, true, n.wait(dir, 30)["ok"])
	requireStep(t, dir, 30, 1)
	n.stop()
	require.NoError(t, os.RemoveAll(filepath.Join(dir, "30"))) // to see whether it is written again
	n.start()
	require.Len(t, n.ask(map[string]any{"op": "offers", "rank": 0, "dir": dir, "timeout_ms": 1000})["offers"], 1)
	require.NoDirExists(t, filepath.Join(dir, "30"), "a committed save is not written again")
}

// A worker dies after it has completed a save but before it has notified the daemon.
func TestSaveWithoutAWord(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	c, err := net.Dial("unix", n.sock)
	require.NoError(t, err)
	require.NoError(t, json.NewEncoder(c).Encode(map[string]any{"op": "hello", "v": 1, "rank": 0}))
	_, err = bufio.NewReader(c).ReadString('\n')
	require.NoError(t, err)
	single(dir, 5).Write(t, n.dir, "seg/l0-0.seg")
	require.NoError(t, c.Close())
	require.Equal(t, true, n.wait(dir, 5)["ok"])
}

// faulty fails writes while a condition holds.
type faulty struct {
	fsx.FS
	mu    sync.Mutex
	err   error
	below string // only there; "": everywhere
	hit   chan struct{}
}

func (f *faulty) fail(err error) { f.failBelow("", err) }

func (f *faulty) failBelow(dir string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err, f.below = err, dir
}

func (f *faulty) WriteFrom(ctx context.Context, path string, src fsx.Source) error {
	f.mu.Lock()
	err, below := f.err, f.below
	f.mu.Unlock()
	if err != nil && strings.HasPrefix(path, below) {
		select {
		case f.hit <- struct{}{}:
		default:
		}
		return fmt.Errorf("write %s: %w", path, err)
	}
	return f.FS.WriteFrom(ctx, path, src)
}

func withFS(f fsx.FS) func(*checkpointd.Config) {
	return func(c *checkpointd.Config) { c.FS = f }
}

// What the workers tell of their epoch is forgotten with it.
func TestUsage(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c := n.control()
	usage := func() checkpointd.Usage {
		st, err := c.Status(t.Context())
		require.NoError(t, err)
		return st.Usage
	}
	loaded := func(step int, source string) { n.ask(map[string]any{"op": "loaded", "step": step, "source": source}) }
	saved := func(seg string, blocked int) { n.ask(map[string]any{"op": "saved", "seg": seg, "blocked_ns": blocked}) }
	loaded(0, "")
	require.Equal(t, checkpointd.Usage{Resumed: true}, usage())
	loaded(7, "disk")
	loaded(0, "")
	saved("l0-0.seg", 5)
	saved("l1-0.seg", 4)
	saved("l0-1.seg", 0) // as of an older client
	saved("", 8)
	require.Equal(t, checkpointd.Usage{Loaded: 7, Resumed: true, Blocked: 8, Before: 5}, usage())
	require.NoError(t, c.World(t.Context(), checkpointd.World{Term: 1, Epoch: 1, GroupWorldSize: 1}))
	require.Zero(t, usage())
}

func TestFullDisk(t *testing.T) {
	t.Parallel()
	disk := &faulty{FS: fsx.OS{}, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	disk.fail(syscall.ENOSPC)
	n.put(single(dir, 20), "seg/l0-1.seg")
	<-disk.hit
	require.Eventually(t, func() bool {
		res := n.ask(map[string]any{"op": "saved", "seg": "seg/l0-1.seg"})
		return res["behind"] == 1.0 && strings.Contains(res["note"].(string), "storage is full")
	}, patience, time.Millisecond)
	requireStep(t, dir, 10, 1)
	disk.fail(nil)
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	requireStep(t, dir, 20, 1)
	requireNoLeftovers(t, dir)
}

// nice storage knows the niceness of the threads that write and rename.
type nice struct {
	fsx.FS
	mu              sync.Mutex
	writes, renames []int
}

func (f *nice) note(to *[]int) {
	left, _ := syscall.Getpriority(syscall.PRIO_PROCESS, 0)
	f.mu.Lock()
	defer f.mu.Unlock()
	*to = append(*to, 20-left)
}

func (f *nice) WriteFrom(ctx context.Context, path string, src fsx.Source) error {
	f.note(&f.writes)
	return f.FS.WriteFrom(ctx, path, src)
}

func (f *nice) Rename(from, to string) error {
	f.note(&f.renames)
	return f.FS.Rename(from, to)
}

// Only the data of a save is written at a low priority.
func TestPriorities(t *testing.T) {
	left, err := syscall.Getpriority(syscall.PRIO_PROCESS, 0)
	require.NoError(t, err)
	mine := 20 - left
	disk := &nice{FS: fsx.OS{}}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	disk.mu.Lock()
	defer disk.mu.Unlock()
	require.Equal(t, []int{max(mine, 10)}, disk.writes)
	require.NotEmpty(t, disk.renames)
	for _, of := range disk.renames {
		require.Equal(t, mine, of)
	}
}

// hanging storage never answers below one directory, as NFS without its server.
type hanging struct {
	fsx.FS
	dir  string
	hit  chan struct{}
	free chan struct{}
}

func (h *hanging) WriteFrom(ctx context.Context, path string, src fsx.Source) error {
	if strings.HasPrefix(path, h.dir) {
		h.hit <- struct{}{}
		<-h.free
	}
	return h.FS.WriteFrom(ctx, path, src)
}

// Storage that hangs delays its own saves only.
func TestHangingStorage(t *testing.T) {
	t.Parallel()
	stuck, good := t.TempDir(), t.TempDir()
	disk := &hanging{FS: fsx.OS{}, dir: stuck, hit: make(chan struct{}, 4), free: make(chan struct{})}
	n := newNode(t, withFS(disk), func(c *checkpointd.Config) { c.Writers = 1 })
	s := single(stuck, 10)
	s.Meta.TimeoutS = 1
	n.put(s, "seg/l0-0.seg")
	<-disk.hit
	n.put(single(good, 20), "seg/l0-1.seg")
	res := n.wait(stuck, 10)
	require.Equal(t, false, res["ok"])
	require.Contains(t, res["error"], "storage does not answer")
	require.Equal(t, true, n.wait(good, 20)["ok"])
	requireStep(t, good, 20, 1)
	require.Len(t, n.ask(map[string]any{"op": "offers", "rank": 0, "dir": stuck})["offers"], 1, "it is still in memory")
	close(disk.free)
}

// A save does not wait for a writer that another mount keeps, not even before that one's save is given up.
func TestMountsHaveWritersOfTheirOwn(t *testing.T) {
	t.Parallel()
	stuck, good := t.TempDir(), t.TempDir()
	memory, err := os.MkdirTemp("/dev/shm", "TestMounts")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(memory)) })
	disk := &hanging{FS: fsx.OS{}, dir: stuck, hit: make(chan struct{}, 4), free: make(chan struct{})}
	n := newNode(t, withFS(disk), func(c *checkpointd.Config) { c.Writers = 1 })
	n.put(single(stuck, 10), "seg/l0-0.seg")
	<-disk.hit
	n.put(single(good, 20), "seg/l0-1.seg")
	n.put(single(filepath.Join(memory, "not", "yet"), 30), "seg/l0-2.seg")
	require.Equal(t, true, n.wait(filepath.Join(memory, "not", "yet"), 30)["ok"])
	require.NoFileExists(t, filepath.Join(good, "dlrover_latest.txt"), "its mount has one writer, which hangs")
	close(disk.free)
	require.Equal(t, true, n.wait(stuck, 10)["ok"])
	require.Equal(t, true, n.wait(good, 20)["ok"])
}

func TestForbiddenDirectoryFailsAtOnce(t *testing.T) {
	disk := &faulty{FS: fsx.OS{}, err: syscall.EACCES, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	res := n.wait(dir, 10)
	require.Equal(t, false, res["ok"])
	require.Contains(t, res["error"], "permission denied")
}

// A save that waits for the disk and is overwritten by a newer one is not lost silently.
func TestSupersededSave(t *testing.T) {
	disk := &faulty{FS: fsx.OS{}, err: syscall.EIO, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk)), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	<-disk.hit
	newer := single(dir, 20)
	newer.Seq = 2
	n.put(newer, "seg/l0-0.seg")
	disk.fail(nil)
	require.Equal(t, true, n.wait(dir, 20)["ok"])
	requireStep(t, dir, 20, 1)
}

func TestDamageIsReported(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	verify := map[string]any{"op": "verify", "dir": dir, "step": 10}
	require.Equal(t, true, n.ask(verify)["good"])
	path := filepath.Join(dir, "10/rank_0.pt")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	data[100] ^= 1
	require.NoError(t, os.WriteFile(path, data, 0o600))
	res := n.ask(verify)
	require.Equal(t, false, res["good"])
	require.Contains(t, res["reason"], "rank_0.pt")
}

func TestRequests(t *testing.T) {
	n := newNode(t)
	for _, c := range []struct{ name, line, want string }{
		{"garbage", "not json", "not a request"},
		{"unknown operation", `{"op":"dance"}`, `operation "dance" is unknown`},
		{"another version", `{"op":"hello","v":7}`, "version 7"},
		{"timeout", `{"op":"wait","dir":"/nowhere","step":3,"timeout_ms":1}`, "step 3 was not committed within 1ms"},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, err := net.Dial("unix", n.sock)
			require.NoError(t, err)
			defer conn.Close()
			_, err = fmt.Fprintln(conn, c.line)
			require.NoError(t, err)
			reply, err := bufio.NewReader(conn).ReadString('\n')
			require.NoError(t, err)
			require.Contains(t, reply, `"ok":false`)
			var res map[string]any
			require.NoError(t, json.Unmarshal([]byte(reply), &res))
			require.Contains(t, res["error"], c.want)
		})
	}
}

// A peer that sends half a line and closes its side must not block the daemon.
func TestHalfClosedPeer(t *testing.T) {
	n := newNode(t)
	c, err := net.Dial("unix", n.sock)
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Write([]byte(`{"op":`))
	require.NoError(t, err)
	require.NoError(t, c.(*net.UnixConn).CloseWrite())
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	_, err = bufio.NewReader(c).ReadString('\n')
	require.NoError(t, err, "half a line is answered as what it is")
}

// nodes are daemons of one run that meet at a master.
func nodes(t *testing.T, n int, change ...func(*checkpointd.Config)) []*node {
	t.Helper()
	return nodesOf(t, coordinator.NewHub(), n, change...)
}

func nodesOf(t *testing.T, h *coordinator.Hub, n int, change ...func(*checkpointd.Config)) []*node {
	t.Helper()
	hub := httptest.NewServer(h.Handler())
	t.Cleanup(hub.Close)
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	out := make([]*node, n)
	for i := range out {
		out[i] = newNode(t, append(change, func(c *checkpointd.Config) {
			c.Remote, c.Addr, c.Token = coordinator.Client(hub.URL, "run", nil, client), "127.0.0.1", "secret"
		})...)
		out[i].join(1, i, n)
	}
	return out
}

// join makes the daemon node i of n in a round, with one worker.
func (n *node) join(round, i, nodes int) {
	n.t.Helper()
	w := checkpointd.World{Term: 7, Round: round, GroupRank: i, GroupWorldSize: nodes, RankBase: i, WorldSize: nodes,
		LocalWorldSize: 1}
	require.NoError(n.t, n.control().World(n.t.Context(), w))
}

func TestCommitAcrossNodes(t *testing.T) {
	ns, dir := nodes(t, 2), t.TempDir()
	ns[1].put(shard(dir, 7, 1, 2, 1), "seg/l0-0.seg")
	ns[0].put(shard(dir, 7, 0, 2, 1), "seg/l0-0.seg")
	for _, n := range ns {
		require.Equal(t, true, n.wait(dir, 7)["ok"])
	}
	requireStep(t, dir, 7, 2)
	requireNoLeftovers(t, dir)
}

func TestBreakpointAcrossNodes(t *testing.T) {
	ns, dir := nodes(t, 2), t.TempDir()
	for i, n := range ns {
		for k, step := range []int64{10, 15} {
			if i == 1 && step == 15 {
				continue // its worker died before
			}
			s := shard(dir, step, i, 2, 1)
			s.Disk = false
			n.put(s, fmt.Sprintf("seg/l0-%d.seg", k))
		}
	}
	for _, n := range ns {
		require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	}
	for _, n := range ns {
		require.Equal(t, true, n.wait(dir, 10)["ok"])
	}
	requireStep(t, dir, 10, 2)
}

// One shard of a DISK save died with its worker. The save is aborted when the nodes agree on an older step, without a
// further wait.
func TestPartialSaveIsAborted(t *testing.T) {
	ns, dir := nodes(t, 2), t.TempDir()
	for i, n := range ns {
		s := shard(dir, 10, i, 2, 1)
		s.Disk = false
		n.put(s, "seg/l0-0.seg")
	}
	ns[0].put(shard(dir, 20, 0, 2, 1), "seg/l0-1.seg")
	for _, n := range ns {
		require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	}
	res := ns[0].wait(dir, 20)
	require.Equal(t, false, res["ok"])
	require.Contains(t, res["error"], "not all of its shards are left in memory")
	require.Equal(t, true, ns[1].wait(dir, 10)["ok"])
	requireStep(t, dir, 10, 2)
}

// The full state that every node holds is written by one of them, also when the node
// that usually writes it is dead.
func TestBreakpointOfAFullStateWithoutItsWriter(t *testing.T) {
	t.Parallel()
	ns, dir := nodes(t, 2), t.TempDir()
	for i, n := range ns {
		s := single(dir, 10)
		s.Disk, s.Meta.Resize, s.Meta.WorldSize, s.Meta.Rank, s.Meta.Primary = false, "any", 2, i, i == 0
		n.put(s, "seg/l0-0.seg")
	}
	ns[0].stop()
	require.NoError(t, ns[1].control().Breakpoint(t.Context(), checkpointd.World{}, "node lost", checkpointd.AtOnce))
	require.Equal(t, true, ns[1].wait(dir, 10)["ok"])
	requireStep(t, dir, 10, 1)
}

// A node that is replaced finds its shard on its peer, byte for byte, and the shards of other nodes are not touched.
func TestShardComesBackFromItsPeer(t *testing.T) {
	ns, dir := nodes(t, 2, func(c *checkpointd.Config) { c.Replicas = 2 }), t.TempDir()
	for i, n := range ns {
		s := shard(dir, 10, i, 2, 1)
		s.Disk = false
		n.put(s, "seg/l0-0.seg")
	}
	for i, n := range ns {
		require.Eventually(t, func() bool {
			names, err := n.dir.Names()
			require.NoError(t, err)
			return len(names) == 2 && strings.HasPrefix(names[0], fmt.Sprintf("peer/r%d", 1-i))
		}, patience, 10*time.Millisecond, "node %d keeps a copy of the other", i)
	}
	ns[1].stop()
	require.NoError(t, os.RemoveAll(filepath.Join(ns[1].dir.Path(), "seg", "l0-0.seg")))
	require.NoError(t, os.RemoveAll(filepath.Join(ns[1].dir.Path(), "peer")))
	require.NoError(t, os.Mkdir(filepath.Join(ns[1].dir.Path(), "peer"), 0o700))
	ns[1].start()
	for i, n := range ns {
		w := checkpointd.World{Round: 2, GroupRank: i, GroupWorldSize: 2, RankBase: i, WorldSize: 2, LocalWorldSize: 1}
		require.NoError(t, n.control().World(t.Context(), w))
	}
	res := ns[1].ask(map[string]any{"op": "offers", "rank": 1, "dir": dir, "timeout_ms": patience.Milliseconds()})
	offers := res["offers"].([]any)
	require.Len(t, offers, 1)
	got, err := os.ReadFile(filepath.Join(ns[1].dir.Path(), offers[0].(map[string]any)["seg"].(string)))
	require.NoError(t, err)
	require.Equal(t, content(10, 1), got[4096:4096+len(content(10, 1))])
	own := ns[0].ask(map[string]any{"op": "offers", "rank": 0, "dir": dir})["offers"].([]any)
	require.Len(t, own, 1)
	require.Equal(t, "seg/l0-0.seg", own[0].(map[string]any)["seg"])
}

// When the launcher dies, the saves in memory are written, and then the daemon ends.
func TestOrphanedDaemonSaves(t *testing.T) {
	t.Parallel()
	gone := make(chan int, 1)
	n, dir := newNode(t, func(c *checkpointd.Config) { c.Orphaned = func(left int) { gone <- left } }), t.TempDir()
	s := single(dir, 10)
	s.Disk = false
	n.put(s, "seg/l0-0.seg")
	c := n.control()
	require.NoError(t, c.Lead(t.Context(), "a"))
	require.NoError(t, c.Close())
	require.Zero(t, <-gone)
	requireStep(t, dir, 10, 1)
}

// The death of a launcher is noticed while it waits for its last checkpoints, and while another process still holds its
// connection.
func TestOrphanedAtTheEndOfTheJob(t *testing.T) {
	t.Parallel()
	for name, die := range map[string]func(c net.Conn, dead chan struct{}){
		"its connection ends": func(c net.Conn, _ chan struct{}) { _ = c.Close() },
		"it is dead":          func(_ net.Conn, dead chan struct{}) { close(dead) },
	} {
		t.Run(name, func(t *testing.T) {
			gone, dead := make(chan int, 1), make(chan struct{})
			disk := &faulty{FS: fsx.OS{}, err: syscall.EIO, hit: make(chan struct{}, 1)}
			n, dir := newNode(t, withFS(disk), func(c *checkpointd.Config) {
				c.Orphaned, c.Spawned = func(left int) { gone <- left }, true
				if name == "it is dead" {
					c.Gone = dead
				}
			}), t.TempDir()
			c, err := net.Dial("unix", n.sock)
			require.NoError(t, err)
			defer c.Close()
			_, err = fmt.Fprintln(c, `{"op":"lead"}`)
			require.NoError(t, err)
			n.put(single(dir, 10), "seg/l0-0.seg")
			<-disk.hit
			_, err = fmt.Fprintln(c, `{"op":"end","timeout_ms":600000}`)
			require.NoError(t, err)
			die(c, dead)
			disk.fail(nil)
			require.Zero(t, <-gone)
			requireStep(t, dir, 10, 1)
		})
	}
}

// A launcher that dies between its good-bye and the end of its daemon.
func TestOrphanedAfterTheGoodBye(t *testing.T) {
	gone := make(chan int, 1)
	n := newNode(t, func(c *checkpointd.Config) { c.Orphaned, c.Spawned = func(left int) { gone <- left }, true })
	c := n.control()
	require.NoError(t, c.Lead(t.Context(), "a"))
	_, err := c.End(t.Context(), patience)
	require.NoError(t, err)
	require.NoError(t, c.Close())
	require.Zero(t, <-gone)
}

// The segments of a daemon whose runtime directory was removed cannot be found: without a launcher it ends, even with
// unwritten saves.
func TestOrphanWithoutItsDirectory(t *testing.T) {
	gone := make(chan int, 1)
	disk := &faulty{FS: fsx.OS{}, err: syscall.EIO, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk), func(c *checkpointd.Config) {
		c.Orphaned, c.Spawned = func(left int) { gone <- left }, true
	}), t.TempDir()
	c := n.control()
	require.NoError(t, c.Lead(t.Context(), "a"))
	n.put(single(dir, 10), "seg/l0-0.seg")
	<-disk.hit
	require.NoError(t, n.dir.RemoveAll())
	require.NoError(t, c.Close())
	require.Equal(t, 1, <-gone)
}

// A live launcher has locked the directory, and may reconnect late: no other launcher has taken over.
func TestDaemonStaysWithALauncherThatLives(t *testing.T) {
	t.Parallel()
	gone, dead := make(chan int, 1), make(chan struct{})
	n, dir := newNode(t, func(c *checkpointd.Config) {
		c.Orphaned, c.Gone, c.Spawned = func(left int) { gone <- left }, dead, true
	}), t.TempDir()
	release, err := n.dir.Own()
	require.NoError(t, err)
	c := n.control()
	require.NoError(t, c.Lead(t.Context(), "a"))
	require.NoError(t, c.Close())
	select {
	case <-gone:
		t.Fatal("the daemon has ended, and its launcher lives")
	case <-time.After(time.Second): // twice the grace where only the connection shows a launcher's death
	}
	n.put(inMemory(single(dir, 10)), "seg/l0-0.seg")
	require.NoError(t, release())
	close(dead)
	require.Zero(t, <-gone)
	requireStep(t, dir, 10, 1)
}

// Messages that a launcher sent before its death may be read after it, and do not count as a sign of life.
func TestDeadLauncherIsHeardLate(t *testing.T) {
	t.Parallel()
	gone, dead := make(chan int, 1), make(chan struct{})
	disk := &faulty{FS: fsx.OS{}, err: syscall.EIO, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk), func(c *checkpointd.Config) {
		c.Orphaned, c.Gone, c.Spawned = func(left int) { gone <- left }, dead, true
	}), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	<-disk.hit
	close(dead)
	require.NoError(t, n.control().Lead(t.Context(), "a"))
	disk.fail(nil)
	require.Zero(t, <-gone)
	requireStep(t, dir, 10, 1)
}

// The launcher that reconnects in time finds its daemon at work.
func TestLauncherReconnects(t *testing.T) {
	n := newNode(t, func(c *checkpointd.Config) { c.Orphaned = func(int) { t.Error("the daemon gave up its launcher") } })
	first := n.control()
	require.NoError(t, first.Lead(t.Context(), "a"))
	second := n.control()
	require.NoError(t, second.Lead(t.Context(), "b"))
	require.NoError(t, first.Close())
	require.NoError(t, second.Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.Early))
	left, err := second.End(t.Context(), patience)
	require.NoError(t, err)
	require.Zero(t, left)
}

func TestStatus(t *testing.T) {
	n, dir := newNode(t), t.TempDir()
	n.put(single(dir, 10), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 10)["ok"])
	st, err := n.control().Status(t.Context())
	require.NoError(t, err)
	require.Len(t, st.Segments, 1)
	require.True(t, st.Segments[0].Durable)
	require.EqualValues(t, 10, st.Segments[0].Step)
	require.EqualValues(t, 1, st.Counters.Commits)
	require.EqualValues(t, len(content(10, 0)), st.Counters.FlushedBytes)
}

func TestConfigIsChecked(t *testing.T) {
	_, err := checkpointd.New(checkpointd.Config{})
	require.Error(t, err)
	_, err = checkpointd.New(checkpointd.Config{Dir: &shm.Dir{}, Writers: -1})
	require.Error(t, err)
}

func TestParseWorld(t *testing.T) {
	w := checkpointd.World{Term: 7, Round: 1, Epoch: 2, GroupRank: 3, GroupWorldSize: 4, RankBase: 5, WorldSize: 6,
		LocalWorldSize: 8}
	got, err := checkpointd.ParseWorld(w.String())
	require.NoError(t, err)
	require.Equal(t, w, got)
	_, err = checkpointd.ParseWorld("1,2")
	require.Error(t, err)
}
