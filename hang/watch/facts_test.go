package watch

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/hang"
)

// spend has a process of fakeProc use a share of a CPU, its thread wait for another one, and changes its state.
func spend(t *testing.T, root string, pid int, state byte, parent int, cpu, wait float64) {
	began := time.Now()
	replace := func(name, text string) {
		path := filepath.Join(root, strconv.Itoa(pid), name)
		if os.WriteFile(path+".new", []byte(text), 0o600) == nil {
			_ = os.Rename(path+".new", path)
		}
	}
	write := func() {
		ns := float64(time.Since(began))
		replace("stat", below(parent, state, uint64(cpu*ns/float64(tick))))
		replace("schedstat", fmt.Sprintf("%.0f %.0f 5\n", cpu*ns+5, wait*ns+5))
	}
	write()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for time.Sleep(20 * time.Millisecond); t.Context().Err() == nil; time.Sleep(20 * time.Millisecond) {
			write()
		}
	}()
	t.Cleanup(func() { <-done }) // before the directory is removed
}

// below is the stat of a process with a parent.
func below(parent int, state byte, ticks uint64) string {
	text := line("x", state, ticks, 0, 0, 0, 1, 1)
	return strings.Replace(text, fmt.Sprintf(" %c 1 ", state), fmt.Sprintf(" %c %d ", state, parent), 1)
}

// A node that is asked for facts tells what its workers and others do; one that is not meant is silent.
func TestFactsOfANode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, j := bench(t)
		c.GroupRank, c.First = 1, time.Hour
		c.Facts = func(context.Context) []hang.Fact { return []hang.Fact{{Kind: "cpu.count", Value: 8}} }
		c.End = func(context.Context) json.RawMessage { return json.RawMessage(`"here"`) }
		c.Test = func(_ context.Context, l hang.Link) []hang.Fact {
			return []hang.Fact{{Kind: "test.received", Of: l.Test}}
		}
		fakeProc(t, c.root, 9, 1)
		fakeProc(t, c.root, 10, 1)
		require.NoError(t, os.WriteFile(filepath.Join(c.root, "10", "comm"), []byte("stress\n"), 0o600))
		spend(t, c.root, 7, 'T', 1, 0, 0)
		spend(t, c.root, 8, 'D', 1, 0.5, 0.25)
		spend(t, c.root, 9, 'R', 7, 1, 0) // a child of a worker
		spend(t, c.root, 10, 'R', 1, 1, 0)
		inCall(t, c.root, 8, unix.SYS_READ, 5, "/data/"+strings.Repeat("x", 100))
		watchFor(t, New(c), 6*time.Second, map[time.Duration]hang.Ask{
			time.Second / 2: {Seq: 5, What: hang.AskFacts, Nodes: []int{0, 2}},
			time.Second:     {Seq: 6, What: hang.AskFacts, Nodes: []int{0, 1}, Listen: true},
			4 * time.Second: {Seq: 7, What: hang.AskLink, Nodes: []int{1}, Link: &hang.Link{Test: "x"}},
			5 * time.Second: {Seq: 8, What: hang.AskLink, Nodes: []int{0}, Link: &hang.Link{Test: "y"}},
		})
		require.Len(t, j.heard, 2)
		require.JSONEq(t, `"here"`, string(j.heard[0].End))
		rates := []hang.Fact{{Kind: "test.received", Of: "x"}}
		require.Equal(t, hang.Report{Ask: 7, Epoch: c.Epoch, Facts: rates}, j.heard[1])
		require.Equal(t, uint64(6), j.heard[0].Ask)
		require.Less(t, j.at[0], 4*time.Second)
		by := map[string]float64{}
		for _, f := range j.heard[0].Facts {
			by[f.Kind+" "+f.Of] = f.Value
		}
		require.Equal(t, 100.0, by["cpu.stopped rank 10"])
		require.Zero(t, by["cpu.stopped rank 11"])
		require.Equal(t, 100.0, by["cpu.blocked rank 11"])
		require.InDelta(t, 0, by["cpu.waiting rank 10"], 0.1)
		require.InDelta(t, 25, by["cpu.waiting rank 11"], 2)
		require.Equal(t, 8.0, by["cpu.count "])
		require.Contains(t, by, "cpu.others other processes such as stress (pid 10)")
		require.Contains(t, by, "storage.files rank 10 waited for files")
		require.Equal(t, 100.0, by["storage.files rank 11 waited for files such as /data/"+strings.Repeat("x", 91)+"…"])
		require.Len(t, by, 10)
	})
}

// inCall has a process of fakeProc wait in a system call with the descriptor of a file.
func inCall(t *testing.T, root string, pid, call, fd int, file string) {
	dir := filepath.Join(root, strconv.Itoa(pid))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "fd"), 0o700))
	require.NoError(t, os.Symlink(file, filepath.Join(dir, "fd", strconv.Itoa(fd))))
	text := fmt.Sprintf("%d %#x 0x7f 0x1 0x0 0x0 0x0 0x7fff 0x7f7f\n", call, fd)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "syscall"), []byte(text), 0o600))
}

// A worker waits for a file if it, or a process that loads its data, sleeps in a call on a file that is not in memory.
func TestFilesThatAreWaitedFor(t *testing.T) {
	root := t.TempDir()
	fs := newProcfs(root)
	for i, c := range []struct {
		call       int
		file, want string
	}{
		{unix.SYS_PREAD64, "/data/a b", "/data/a b"},
		{unix.SYS_FSYNC, "/log", "/log"},
		{unix.SYS_FUTEX, "/data/a", ""},
		{unix.SYS_READ, "/dev/shm/a", ""},
		{unix.SYS_READ, "/memfd:a (deleted)", ""},
		{unix.SYS_READ, "pipe:[7]", ""},
		{unix.SYS_READ, "socket:[7]", ""},
	} {
		inCall(t, root, 10+i, c.call, 3, c.file)
		require.Equal(t, c.want, fs.waitedFor(10+i, 10+i), c.file)
	}
	require.Empty(t, fs.waitedFor(9, 9), "there is no such process")
	for _, text := range []string{"running\n", "", "-1 0x7fff 0x7f7f\n", "0", "0 x", "0 0xffffffff 0x1"} {
		require.NoError(t, os.WriteFile(filepath.Join(root, "10", "syscall"), []byte(text), 0o600))
		require.Empty(t, fs.waitedFor(10, 10), text)
	}
	w := fileWaits{pid: 10, below: []int{12, 11}}
	w.look(fs, &hang.Sample{})
	require.Equal(t, hang.Fact{Kind: "storage.files", Of: "rank 4 waited for files such as /log", Value: 100}, w.fact(4))
	w.below = nil
	w.look(fs, &hang.Sample{})
	require.InDelta(t, 50.0, w.fact(4).Value, 1e-9)
}

func TestOtherProcesses(t *testing.T) {
	ofJob := map[int]bool{7: true}
	before := map[int]stat{7: {start: 1}, 8: {start: 1, parent: 7}, 9: {start: 1, parent: 1}, 10: {start: 1, parent: 9}}
	p := newProcfs(t.TempDir())
	for pid, ticks := range map[int]uint64{7: 100, 8: 100, 9: 10, 10: 30, 11: 50} {
		fakeProc(t, p.root, pid, 1)
		text := below(before[pid].parent, 'R', ticks)
		require.NoError(t, os.WriteFile(filepath.Join(p.root, strconv.Itoa(pid), "stat"), []byte(text), 0o600))
	}
	f := p.others(before, time.Second, ofJob)
	require.Equal(t, "cpu.others", f.Kind)
	require.InDelta(t, 100*0.4/float64(runtime.NumCPU()), f.Value, 1e-9, "of 9 and 10: 11 is new")
	require.False(t, descends(map[int]stat{1: {parent: 2}, 2: {parent: 1}}, 1, ofJob), "a circle ends")
}
