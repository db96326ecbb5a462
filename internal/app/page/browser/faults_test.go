package browser

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// A reader who has never seen the product finds the culprit of a fault on the page alone, without scrolling.

const (
	faultyRun  = "llama"
	foundAfter = 30 * time.Second // of the fault
	fold       = 900              // pixels, of a window that is 1280 wide
)

// train starts a node of the run that is about to have a fault.
func (h *house) train(name string, args ...string) *exec.Cmd {
	return h.start(name, "dlrover-run", append([]string{"--rdzv-id=" + faultyRun}, args...)...)
}

// reads opens the page of the run as soon as it is there.
func (h *house) reads() *tab {
	h.t.Helper()
	b := h.browse(chromedp.WindowSize(1280, fold))
	require.Eventually(h.t, func() bool {
		_, status := h.get("/ui/runs/" + faultyRun)
		return status == 200
	}, limit, 20*time.Millisecond)
	b.do(chromedp.Navigate(h.ticket(faultyRun)), chromedp.EmulateViewport(1280, fold))
	return b
}

// aboveFold are the headings and sentences that are seen without scrolling.
var aboveFold = fmt.Sprintf(`[...document.querySelectorAll("h1, small, dt, dd p")].filter(e => {
	const r = e.getBoundingClientRect();
	return e.checkVisibility() && r.top >= 0 && r.bottom <= %d && r.left >= 0 && r.right <= 1280;
}).map(e => e.innerText).join("\n")`, fold)

// tells waits until all of the words are above the fold, for as long as a reader may look for them.
func (b *tab) tells(planted time.Time, words ...string) {
	b.t.Helper()
	for {
		seen, missing := eval[string](b, aboveFold), ""
		for _, w := range words {
			if !strings.Contains(seen, w) {
				missing = w
			}
		}
		took := time.Since(planted)
		if missing == "" {
			b.t.Logf("told %.1f s after the fault", took.Seconds())
			b.screenshot(strings.ReplaceAll(b.t.Name(), "/", "-") + ".png")
			return
		}
		if took > foundAfter {
			b.screenshot("missing.png")
			require.Failf(b.t, "not told", "%q is not above the fold after %s:\n%s", missing, took, seen)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// since waits for a file that a script writes when it begins to harm, and returns its time.
func (h *house) since(file string) time.Time {
	h.t.Helper()
	var at time.Time
	require.Eventually(h.t, func() bool {
		info, err := os.Stat(filepath.Join(h.dir, file))
		if err == nil {
			at = info.ModTime()
		}
		return err == nil
	}, 2*limit, 20*time.Millisecond)
	return at
}

func (h *house) write(file, text string) string {
	h.t.Helper()
	path := filepath.Join(h.dir, file)
	require.NoError(h.t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// torch has the workers use Debian's PyTorch.
func torch(t *testing.T, h *house) {
	const python = "/usr/bin/python3"
	if out, err := exec.Command(python, "-c", "import torch").CombinedOutput(); err != nil {
		t.Skipf("NOT TESTED: %s has no PyTorch: make torch; %s", python, out)
	}
	h.env = append(h.env, "PYTHON_EXEC="+python, "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo")
}

func TestMissingNodeIsTold(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	args := []string{"--nnodes=2", "--max-restarts=9", h.dir + "/job.py"}
	h.train("gpu-01", args...)
	lost := h.train("gpu-02", args...)
	b := h.reads()
	b.says("#moving", "Yes: 2 workers run")
	planted := time.Now()
	require.NoError(t, syscall.Kill(-lost.Process.Pid, syscall.SIGKILL))
	b.tells(planted, "No: waiting for nodes", "For 1 of 2 nodes.", "gpu-02 (node ", "gone ")
}

func TestCrashLoopIsTold(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	script := h.write("crash.py", `import os, time
time.sleep(1)
if os.environ["RANK"] == "1":
    raise KeyError("learning_rate")
time.sleep(1000)
`)
	args := []string{"--nnodes=2", "--max-restarts=50", script}
	h.train("gpu-01", args...)
	h.train("gpu-02", args...)
	b := h.reads()
	b.tells(time.Now(), "rank 1 (node 1 gpu-0", "KeyError: 'learning_rate'", "It fails again and again")
}

func TestHungRankIsTold(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	torch(t, h)
	h.env = append(h.env, "XPU_TIMER_HANG_TIMEOUT=4", "XPU_TIMER_TIMELINE_PATH="+h.dir)
	script := h.write("hang.py", `import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")

def load_batch(step):
    if dist.get_rank() == 1 and step == 60:
        open(os.path.join(os.path.dirname(__file__), "hangs"), "w").close()
        time.sleep(1000)

for step in range(100000):
    load_batch(step)
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
`)
	args := []string{"--nnodes=2", script}
	h.train("gpu-01", args...)
	h.train("gpu-02", args...)
	b := h.reads()
	b.tells(h.since("hangs"), "No step for ", "Rank 1 on gpu-0", "asleep in load_batch")
	b.says("#late", "Ranks 1 have not come, ")
	b.says("#late", "1 ranks came with the first.")
	b.lag()
	b.flame(faultyRun, "load_batch")
}

func TestFullDiskIsTold(t *testing.T) {
	t.Parallel()
	h := newHouse(t)
	torch(t, h)
	dir := filepath.Join(h.dir, "full")
	require.NoError(t, os.Mkdir(dir, 0o700))
	if err := syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "size=1m"); err != nil {
		t.Skip("NOT TESTED: THE PAGE OF A JOB WHOSE DISK IS FULL: no file system can be mounted here: ", err)
	}
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	script := h.write("save.py", `import os, sys, time, torch, torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
dist.init_process_group("gloo")
world = dist.get_world_size()
saves = DdpCheckpointer(sys.argv[1], local_shard_num=1, global_shard_num=world)
for step in range(1, 1000):
    if step == 2 and dist.get_rank() == 0:
        open(os.path.join(os.path.dirname(__file__), "fills"), "w").close()
    saves.save_checkpoint(step, {"w": torch.ones(1000 if step == 1 else 400000)}, storage_type=StorageType.DISK)
    time.sleep(1)
`)
	args := []string{"--nnodes=2", "--ckpt-shm-dir=" + h.dir, script, dir}
	h.train("gpu-01", args...)
	h.train("gpu-02", args...)
	t.Cleanup(func() { // of the launchers, which would wait for it
		require.NoError(t, syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, "size=100m"))
	})
	b := h.reads()
	b.tells(h.since("fills"), "No save gets to disk from gpu-0", "storage is full", dir)
}

// fabric are network namespaces on a switch here, as machines whose cables carry 100 Mbit/s; one sends a fifth of it.
func (h *house) fabric(names []string, slow string) {
	tool := func(args ...string) {
		h.t.Helper()
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(h.t, err, "%v: %s", args, out)
	}
	h.within = map[string][]string{}
	for i, name := range names {
		ns := fmt.Sprintf("dlp%d-%d", os.Getpid(), i)
		tool("ip", "netns", "add", ns)
		h.t.Cleanup(func() { tool("ip", "netns", "del", ns) })
		port, addr := "p"+ns, fmt.Sprintf("10.98.9.%d/24", i+1)
		tool("ip", "link", "add", "eth0", "netns", ns, "type", "veth", "peer", "name", port)
		tool("ip", "link", "set", port, "master", bridge, "up")
		tool("ip", "-n", ns, "addr", "add", addr, "dev", "eth0")
		tool("ip", "-n", ns, "link", "set", "lo", "up")
		tool("ip", "-n", ns, "link", "set", "eth0", "up")
		rate := "100mbit"
		if name == slow {
			rate = "20mbit"
		}
		tool("tc", "-n", ns, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb",
			"latency", "20ms")
		h.within[name] = []string{"ip", "netns", "exec", ns}
	}
}

const bridge = "dlpage0"

func TestSlowNodeIsTold(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command("ip", "link", "add", "name", bridge, "type", "bridge").CombinedOutput(); err != nil {
		t.Skipf("NOT TESTED: THE PAGE OF A JOB WITH A SLOW NODE: no network can be made here: %v %s", err, out)
	}
	t.Cleanup(func() { require.NoError(t, exec.Command("ip", "link", "del", bridge).Run()) })
	for _, args := range []string{"addr add 10.98.9.254/24 dev " + bridge, "link set " + bridge + " up"} {
		require.NoError(t, exec.Command("ip", strings.Fields(args)...).Run())
	}
	h := newHouseAt(t, freeAddr(t, "10.98.9.254"))
	names := []string{"gpu-01", "gpu-02", "gpu-03", hostile}
	h.fabric(names, "gpu-03")
	planted := time.Now()
	for _, name := range names {
		h.train(name, "--nnodes=4", "--network-check", "--check-level=host", h.dir+"/job.py")
	}
	b := h.reads()
	b.tells(planted, "gpu-03 is slow", "eth0 sends ")
	b.matrix(faultyRun, "gpu-03")
}
