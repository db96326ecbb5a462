package checkpointd_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm/shmtest"
)

// stepBytes is the size of a step in these tests; manifests and the like take a few pages more.
const stepBytes = 1 << 20

// smallDisk mounts a file system with that much room.
func smallDisk(t *testing.T, bytes int) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV,
		"mode=0700,size="+strconv.Itoa(bytes)); err != nil {
		t.Skipf("WHAT THE DAEMON DOES ON A FULL DISK IS NOT TESTED: mount a small tmpfs: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	return dir
}

// tracking checks after each change of a directory that the tracker names an existing step.
type tracking struct {
	fsx.FS
	dir string

	mu    sync.Mutex
	looks int
	lies  []string
}

func (f *tracking) look(after string, err error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	latest, lerr := os.ReadFile(filepath.Join(f.dir, commit.Latest))
	if lerr != nil {
		return err
	}
	f.looks++
	step := strings.TrimSpace(string(latest))
	var m struct{ Files []commit.FileEntry }
	text, lerr := os.ReadFile(filepath.Join(f.dir, ".dlrover", step+".json"))
	if lerr == nil {
		lerr = json.Unmarshal(text, &m)
	}
	for _, file := range m.Files {
		if st, serr := os.Stat(filepath.Join(f.dir, file.Path)); serr != nil || st.Size() != file.Size {
			lerr = fmt.Errorf("%s is not there, or not whole", file.Path)
		}
	}
	if lerr != nil {
		f.lies = append(f.lies, fmt.Sprintf("after %s the tracker names step %s: %v", after, step, lerr))
	}
	return err
}

func (f *tracking) WriteFile(path string, data []byte) error {
	return f.look("write "+path, f.FS.WriteFile(path, data))
}

func (f *tracking) Rename(from, to string) error { return f.look("rename "+to, f.FS.Rename(from, to)) }
func (f *tracking) Remove(path string) error     { return f.look("remove "+path, f.FS.Remove(path)) }

func bigStep(dir string, step int64, keep int) shmtest.Save {
	s := single(dir, step)
	s.Files[0].Data = bytes.Repeat([]byte{byte(step)}, stepBytes)
	s.Meta.Retention = &commit.Retention{KeepLatest: keep}
	return s
}

// A disk is too full for one more step: committed steps are not touched, no partial step is left, and the reason is
// logged. When there is room again, saves continue.
func TestFullDiskKeepsCommittedSteps(t *testing.T) {
	t.Parallel()
	dir := smallDisk(t, 5*stepBytes/2)
	disk := &tracking{FS: fsx.OS{}, dir: dir}
	n := newNode(t, withFS(disk))
	for i, step := range []int64{10, 20} {
		n.put(bigStep(dir, step, 2), fmt.Sprintf("seg/l0-%d.seg", i))
		require.Equal(t, true, n.wait(dir, step)["ok"])
	}
	third := bigStep(dir, 30, 2)
	third.Meta.TimeoutS = 3 // two more tries, the first after a second
	n.put(third, "seg/l0-2.seg")
	res := n.wait(dir, 30)
	require.Contains(t, res["error"], "not committed within its save timeout")
	require.Contains(t, res["error"], syscall.ENOSPC.Error())
	require.Equal(t, []int64{10, 20}, stepsIn(t, dir))
	requireNoLeftovers(t, dir)

	require.NoError(t, commit.Store{FS: fsx.OS{}, Now: time.Now}.Remove(t.Context(), dir, 10))
	n.put(bigStep(dir, 40, 2), "seg/l0-0.seg")
	require.Equal(t, true, n.wait(dir, 40)["ok"])
	require.Equal(t, []int64{20, 40}, stepsIn(t, dir))
	require.Empty(t, disk.lies)
	require.NotZero(t, disk.looks)
	requireNoLeftovers(t, dir)
}

// stepsIn returns the committed steps, after a look at their files.
func stepsIn(t *testing.T, dir string) (steps []int64) {
	ms, err := commit.Store{FS: fsx.OS{}, Now: time.Now}.Manifests(dir)
	require.NoError(t, err)
	for _, m := range ms {
		steps = append([]int64{m.Step}, steps...)
		require.FileExists(t, filepath.Join(dir, m.Files[0].Path))
	}
	return steps
}

// Many saves wait for a disk that is full, and each is tried again and again: that is one event.
func TestTroubleIsLoggedOncePerDirectory(t *testing.T) {
	t.Parallel()
	var log lines
	disk := &faulty{FS: fsx.OS{}, err: syscall.ENOSPC, hit: make(chan struct{}, 1)}
	n, dir := newNode(t, withFS(disk), log.config), t.TempDir()
	for i := range int64(3) {
		n.put(single(dir, 10+i), fmt.Sprintf("seg/l0-%d.seg", i))
	}
	require.Eventually(t, func() bool {
		st, err := n.control().Status(t.Context())
		return err == nil && st.Counters.Retries >= 6
	}, patience, 50*time.Millisecond)
	require.Len(t, log.with("cannot write a checkpoint, trying again"), 1)
	disk.fail(nil)
	for i := range int64(3) { // an older one is dropped if a newer one is committed first
		res := n.wait(dir, 10+i)
		require.True(t, res["ok"] == true || i < 2 && strings.Contains(fmt.Sprint(res["error"]), "a later save"), "%v", res)
	}
	disk.fail(syscall.ENOSPC)
	n.put(single(dir, 20), "seg/l0-3.seg")
	require.Eventually(t, func() bool { return len(log.with("cannot write a checkpoint, trying again")) == 2 },
		patience, 10*time.Millisecond, "another one")
	disk.fail(nil)
	require.Equal(t, true, n.wait(dir, 20)["ok"])
}
