package checkpointd_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm/shmtest"
)

func twice(c *checkpointd.Config) { c.Replicas = 2 }

// copies are the steps that the node keeps of others in dir.
func (n *node) copies(dir string) (steps []int64) {
	n.t.Helper()
	st, err := n.control().Status(n.t.Context())
	require.NoError(n.t, err)
	for _, s := range st.Segments {
		if s.Copy && s.Dir == dir {
			steps = append(steps, s.Step)
		}
	}
	return steps
}

func (n *node) awaitCopies(dir string, steps ...int64) {
	n.t.Helper()
	var last []int64
	require.Eventually(n.t, func() bool {
		last = n.copies(dir)
		return fmt.Sprint(last) == fmt.Sprint(steps)
	}, patience, 10*time.Millisecond, "want copies of %v", steps)
}

// wipe makes the directory that of a machine which has just replaced another.
func (n *node) wipe() {
	n.t.Helper()
	for _, sub := range []string{"seg", "peer"} {
		require.NoError(n.t, os.RemoveAll(filepath.Join(n.dir.Path(), sub)))
		require.NoError(n.t, os.Mkdir(filepath.Join(n.dir.Path(), sub), 0o700))
	}
}

// saves puts a save in memory of the rank that is alone on the node.
func (n *node) saves(dir string, step int64, rank, ranks, k int) {
	n.t.Helper()
	n.put(inMemory(shard(dir, step, rank, ranks, 1)), fmt.Sprintf("seg/l0-%d.seg", k))
}

// A daemon that is started again listens elsewhere: copies to it and from it continue in the same epoch. Of the copies
// that it missed it gets the newest.
func TestCopiesGoOnWithANewDaemon(t *testing.T) {
	t.Parallel()
	ns, dir := nodes(t, 2, twice), t.TempDir()
	ns[0].saves(dir, 1, 0, 2, 0)
	ns[1].awaitCopies(dir, 1)
	ns[1].stop()
	for k, step := range []int64{2, 3} {
		ns[0].saves(dir, step, 0, 2, k)
		require.Eventually(t, func() bool {
			st, err := ns[0].control().Status(t.Context())
			require.NoError(t, err)
			return st.Counters.CopiesFailed > int64(k)
		}, patience, 5*time.Millisecond)
	}
	ns[1].start()
	ns[1].join(1, 1, 2)
	ns[1].awaitCopies(dir, 1, 3)
	ns[1].saves(dir, 3, 1, 2, 0)
	ns[0].awaitCopies(dir, 3)
	ns[0].saves(dir, 4, 0, 2, 2)
	ns[1].awaitCopies(dir, 4, 3)
}

// A new epoch may have other partners: they get the newest save, and those that have it do not get it again.
func TestNewPartnersGetTheNewestCopy(t *testing.T) {
	ns, dir := nodes(t, 3, twice), t.TempDir()
	ns[0].saves(dir, 1, 0, 3, 0)
	ns[1].awaitCopies(dir, 1)
	ns[1].stop()
	ns[0].join(2, 0, 2)
	ns[2].join(2, 1, 2)
	ns[2].awaitCopies(dir, 1)
	ns[0].join(3, 0, 2)
	ns[2].join(3, 1, 2)
	ns[2].saves(dir, 1, 2, 3, 0) // copied after the new epoch's other copies
	ns[0].awaitCopies(dir, 1)
	st, err := ns[0].control().Status(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 2, st.Counters.CopiesSent)
}

// counting counts how often a daemon asks for the addresses.
type counting struct {
	coordinator.Coordinator
	asked atomic.Int64
}

func (b *counting) Peers(ctx context.Context, key string, self coordinator.Peer, nodes int,
	patience time.Duration) ([]coordinator.Peer, error) {
	b.asked.Add(1)
	return b.Coordinator.Peers(ctx, key, self, nodes, patience)
}

// Addresses are not requested while all nodes are reachable, and an unreachable partner is not retried without end.
func TestAddressesAreAskedForWhenNeeded(t *testing.T) {
	var coordinators []*counting
	ns, dir := nodes(t, 2, twice), t.TempDir()
	for i, n := range ns { // once more, counted
		n.stop()
		b := &counting{Coordinator: n.cfg.Remote}
		coordinators = append(coordinators, b)
		n.cfg.Remote = b
		n.start()
		n.join(2, i, 2)
	}
	for step := int64(1); step < 8; step++ {
		ns[0].saves(dir, step, 0, 2, int(step%3))
		require.Eventually(t, func() bool {
			return strings.Contains(fmt.Sprint(ns[1].copies(dir)), fmt.Sprint(step))
		}, patience, time.Millisecond)
	}
	for _, b := range coordinators {
		require.EqualValues(t, 1, b.asked.Load())
	}
	ns[1].stop()
	for step := int64(8); step < 28; step++ {
		ns[0].saves(dir, step, 0, 2, int(step%3))
	}
	require.Eventually(t, func() bool { return coordinators[0].asked.Load() > 1 }, patience, time.Millisecond)
	require.LessOrEqual(t, coordinators[0].asked.Load(), int64(5), "after 0, 250, 750 and 1750 ms")
}

// A worker's fetch reaches the holder at its present address, even while it is still being started.
func TestFetchFromANewDaemon(t *testing.T) {
	for name, late := range map[string]bool{"it is there": false, "it comes": true} {
		t.Run(name, func(t *testing.T) {
			ns, dir := nodes(t, 2, twice), t.TempDir()
			for i, n := range ns {
				n.saves(dir, 10, i, 2, 0)
			}
			ns[0].awaitCopies(dir, 10)
			ns[1].stop()
			ns[1].wipe()
			ns[1].start()
			for i, n := range ns {
				n.join(2, i, 2)
			}
			none := ns[1].ask(map[string]any{"op": "offers", "rank": 1, "dir": dir + "/other",
				"timeout_ms": patience.Milliseconds()})
			require.Empty(t, none["offers"], "it has learned the addresses")
			ns[0].stop()
			back := func() { ns[0].start(); ns[0].join(2, 0, 2) }
			wait := func() {}
			if late {
				done := make(chan struct{})
				timer := time.AfterFunc(100*time.Millisecond, func() { defer close(done); back() })
				defer timer.Stop()
				wait = func() { <-done }
			} else {
				back()
			}
			res := ns[1].ask(map[string]any{"op": "offers", "rank": 1, "dir": dir,
				"timeout_ms": patience.Milliseconds()})
			wait()
			require.Len(t, res["offers"], 1)
			require.Equal(t, 10.0, res["offers"].([]any)[0].(map[string]any)["step"])
		})
	}
}

// A rank with two directories gets the shard of the directory that it asks for, even if the other is ahead.
func TestFetchIsForTheDirectory(t *testing.T) {
	ns, ahead, behind := nodes(t, 2, twice), t.TempDir(), t.TempDir()
	for k, s := range []shmtest.Save{inMemory(shard(ahead, 50, 1, 2, 1)), inMemory(shard(behind, 30, 1, 2, 1))} {
		ns[1].put(s, fmt.Sprintf("seg/l0-%d.seg", k))
		ns[0].awaitCopies(s.Meta.Dir, s.Meta.Step)
	}
	ns[1].stop()
	ns[1].wipe()
	ns[1].start()
	for i, n := range ns {
		n.join(2, i, 2)
	}
	for dir, step := range map[string]float64{behind: 30, ahead: 50} {
		offers := ns[1].ask(map[string]any{"op": "offers", "rank": 1, "dir": dir,
			"timeout_ms": patience.Milliseconds()})["offers"].([]any)
		require.Len(t, offers, 1)
		require.Equal(t, step, offers[0].(map[string]any)["step"])
	}
}

// forgetful is a coordinator between daemons. One of them does not report directories.
type forgetful struct{ coordinator.Coordinator }

func (b forgetful) Peers(ctx context.Context, key string, self coordinator.Peer, nodes int,
	patience time.Duration) ([]coordinator.Peer, error) {
	for i := range self.Copies {
		c := &self.Copies[i]
		c.Dir, c.SavedNS, c.Shards = "", 0, 0
	}
	return b.Coordinator.Peers(ctx, key, self, nodes, patience)
}

// A node that does not report the directory of its copies may be asked for any. Unwanted ones stay there.
func TestFetchFromANodeWithoutDirectories(t *testing.T) {
	ns, ahead, behind := nodes(t, 2, twice), t.TempDir(), t.TempDir()
	for k, s := range []shmtest.Save{inMemory(shard(ahead, 50, 1, 2, 1)), inMemory(shard(behind, 30, 1, 2, 1))} {
		ns[1].put(s, fmt.Sprintf("seg/l0-%d.seg", k))
		ns[0].awaitCopies(s.Meta.Dir, s.Meta.Step)
	}
	for i, n := range ns {
		n.stop()
		if i == 1 {
			n.wipe()
		}
		n.cfg.Remote = forgetful{n.cfg.Remote}
		n.start()
		n.join(2, i, 2)
	}
	offers := ns[1].ask(map[string]any{"op": "offers", "rank": 1, "dir": behind,
		"timeout_ms": patience.Milliseconds()})["offers"].([]any)
	require.Len(t, offers, 1)
	require.Equal(t, 30.0, offers[0].(map[string]any)["step"])
	require.Equal(t, []int64(nil), ns[1].copies(ahead))
}

// A node that the master knows to be dead is not waited for, whether it dies before the agreement or during it. The
// saves left in memory, with copies, are written.
func TestBreakpointDoesNotWaitForTheDead(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]bool{"lost before": true, "lost meanwhile": false} {
		t.Run(name, func(t *testing.T) {
			hub, dir := coordinator.NewHub(), t.TempDir()
			ns := nodesOf(t, hub, 3, twice)
			for i, n := range ns {
				n.saves(dir, 10, i, 3, 0)
			}
			holder := ns[0]
			require.Eventually(t, func() bool {
				for _, n := range ns[:2] {
					names, err := n.dir.Names()
					require.NoError(t, err)
					if strings.HasPrefix(names[0], "peer/r2-") {
						holder = n
						return true
					}
				}
				return false
			}, patience, 10*time.Millisecond)
			holder.awaitCopies(dir, 10)
			ns[2].stop()
			if before {
				hub.Lost("run", 7, 1, 2)
			}
			begin := time.Now()
			for _, n := range ns[:2] {
				require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "node lost", checkpointd.AtOnce))
			}
			if !before {
				hub.Lost("run", 7, 1, 2)
			}
			for _, n := range ns[:2] {
				require.Equal(t, true, n.wait(dir, 10)["ok"])
			}
			requireStep(t, dir, 10, 3)
			require.Less(t, time.Since(begin), 4*time.Second, "without the patience for nodes that may be dead")
		})
	}
}

// listed records the announced agreements of a daemon, and the agreements that it calls.
type listed struct {
	coordinator.Coordinator
	spoken  chan coordinator.Participation
	agreeds chan string
}

func (b listed) Announce(_ context.Context, s coordinator.Participation) error {
	b.spoken <- s
	return nil
}

func (b listed) Agree(_ context.Context, key string, _, _ int, _ []coordinator.Holding,
	_ time.Duration) (coordinator.Plan, bool, error) {
	b.agreeds <- key
	return coordinator.Plan{}, false, nil
}

// A daemon announces its agreements, including those after a signal to its launcher, which may come later.
func TestBreakpointIsAnnounced(t *testing.T) {
	b := listed{coordinator.Local(1), make(chan coordinator.Participation, 2), make(chan string, 4)}
	n, one, two := newNode(t, func(c *checkpointd.Config) { c.Remote = b }), t.TempDir(), t.TempDir()
	n.join(3, 1, 2)
	n.saves(one, 10, 1, 2, 0)
	n.saves(two, 10, 1, 2, 1)
	drained := func() {
		require.EqualValues(t, 0, n.ask(map[string]any{"op": "drain", "timeout_ms": patience.Milliseconds()})["left"])
	}
	require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.Early))
	drained()
	require.Len(t, b.agreeds, 2)
	early := []string{<-b.agreeds, <-b.agreeds}
	require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "test", checkpointd.AtOnce))
	s := <-b.spoken
	require.Equal(t, "7.3.0", s.Of)
	require.Equal(t, 1, s.Node)
	require.ElementsMatch(t, append(early, <-b.agreeds, <-b.agreeds), s.Keys)
	n.stop()
	require.Empty(t, b.spoken, "once")
}

// The daemon of a node that replaces another holds nothing. The others save the newest step whose shards they hold all,
// with their copies.
func TestBreakpointAfterANodeWasReplaced(t *testing.T) {
	ns, dir := nodes(t, 3, twice), t.TempDir()
	for i, n := range ns {
		n.saves(dir, 10, i, 3, 0)
	}
	for _, n := range ns {
		n.awaitCopies(dir, 10)
	}
	for _, n := range ns {
		n.stop() // so that the next step has no copies
	}
	for i, n := range ns[:2] {
		inMemory(shard(dir, 20, i, 3, 1)).Write(t, n.dir, "seg/l0-1.seg")
	}
	ns[2].wipe()
	for _, n := range ns {
		n.cfg.Replicas = 0
		n.start()
	}
	for i, n := range ns {
		n.join(2, i, 3)
	}
	begin := time.Now()
	for _, n := range ns {
		require.NoError(t, n.control().Breakpoint(t.Context(), checkpointd.World{}, "a worker failed", checkpointd.AtOnce))
	}
	for _, n := range ns {
		require.Equal(t, true, n.wait(dir, 10)["ok"])
	}
	requireStep(t, dir, 10, 3)
	require.Less(t, time.Since(begin), 4*time.Second, "nobody waits for who has nothing")
	for _, n := range ns {
		require.EqualValues(t, 0, n.ask(map[string]any{"op": "drain", "timeout_ms": patience.Milliseconds()})["left"])
	}
	require.NoDirExists(t, filepath.Join(dir, "20"))
}

// A process of another user that opens the socket is refused, regardless of the mode of the socket.
func TestAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be somebody else, so a request of another user is NOT tested")
	}
	open, err := os.MkdirTemp("", "sock")
	require.NoError(t, err)
	defer os.RemoveAll(open)
	require.NoError(t, os.Chmod(open, 0o711))
	n := newNode(t)
	n.stop()
	n.sock = filepath.Join(open, "sock")
	n.start()
	require.NoError(t, os.Chmod(n.sock, 0o777))
	require.Empty(t, reply(t, n.sock, 65534))
	require.Contains(t, reply(t, n.sock, 0), `"ok":true`)
}

// reply is the data that a thread of the given effective user reads from the socket, until it is closed.
func reply(t *testing.T, path string, uid int) string {
	t.Helper()
	type result struct {
		text string
		err  error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its user
		text, err := talk(path, uid)
		done <- result{text, err}
	}()
	r := <-done
	require.NoError(t, r.err)
	return r.text
}

func talk(path string, uid int) (string, error) {
	if uid != 0 {
		same := ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(uid),
			same); errno != 0 { // of this thread alone
			return "", fmt.Errorf("become user %d: %w", uid, errno)
		}
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	_, _ = unix.Write(fd, []byte(`{"op":"status"}`+"\n")) // the daemon may have closed its end
	buf := make([]byte, 64<<10)
	n, err := unix.Read(fd, buf)
	if err == unix.ECONNRESET {
		return "", nil
	}
	return string(buf[:max(n, 0)]), err
}

// A daemon tells the master of its place as soon as a world of several nodes begins, before anything is saved, so that
// its end is noticed.
func TestDaemonsAttend(t *testing.T) {
	hub, attends := coordinator.NewHub(), make(chan context.Context, 8)
	hub.Connection = func(ctx context.Context) context.Context { attends <- ctx; return nil }
	n := nodesOf(t, hub, 1)[0]
	for round := range 2 {
		n.join(round, round, 2)
		select {
		case <-attends:
		case <-time.After(8 * time.Second): // the next report of ages is due after ten
			t.Fatal("it reports its place with the ages alone")
		}
	}
}
