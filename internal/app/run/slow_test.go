package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/launcher/torchpython"
)

// slowJob is a job of two nodes with four ranks each that runs testdata/slow.py.
func slowJob(t *testing.T, script ...string) (found func() []string) {
	t.Helper()
	found, _ = slowJobWith(t, "--hang=auto", script...)
	return found
}

// slowJobWith is slowJob with an option. The script has dir.
func slowJobWith(t *testing.T, option string, script ...string) (found func() []string, dir string) {
	t.Helper()
	besideOthers(t)
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+torchpython.Require(t, "SLOW RANKS ARE"), "GLOO_SOCKET_IFNAME=lo",
		"OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore")
	path, err := filepath.Abs("testdata/slow.py")
	require.NoError(t, err)
	args := append(b.c10d("2"), "--nproc-per-node=4", option, "--log-format=json", path)
	ls := []*launched{b.run(append(args, script...)...), b.run(append(args, script...)...)}
	t.Cleanup(func() {
		b.release()
		for _, l := range ls {
			require.Zero(t, l.wait())
		}
	})
	require.Eventually(t, b.exists("up"), 2*time.Minute, 100*time.Millisecond, "the ranks train")
	return func() []string { return append(ls[0].logged("slow-"), ls[1].logged("slow-")...) }, b.dir
}

// A rank that slows a job of two nodes is named within 60 s, and no other one is.
func TestSlowRanksAreNamedWithTorch(t *testing.T) {
	besideOthers(t)
	for _, c := range []struct {
		name, script string
		rank         int
		factor, want string
		rare         bool
	}{
		{"stopped for a while", "stop", 5, "2", `rank 5 \(node 1 .*\) slows the job: [12]\..x since .*, computing`, false},
		{"slow data", "data", 2, "1.5", `rank 2 \(node 0 .*\) slows the job: 1\.[3-7]x since .*, loading data`, true},
		{"more to compute", "compute", 7, "1.3", `rank 7 \(node 1 .*\) slows the job: 1\.[12345]x since .*`, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.rare {
				longest(t)
			}
			found := slowJob(t, c.script, strconv.Itoa(c.rank), c.factor)
			began := time.Now()
			require.Eventually(t, func() bool { return len(found()) > 0 }, 150*time.Second, 100*time.Millisecond, "it is named")
			t.Logf("%.0f s: %s", time.Since(began).Seconds(), found())
			require.Len(t, found(), 1)
			require.Regexp(t, "^slow-found: "+c.want, found()[0])
		})
	}
}

// Uneven batches, evaluations and logs of rank 0 make nobody slow.
func TestUnevenRanksAreNotSlowWithTorch(t *testing.T) {
	found := slowJob(t, "healthy", "0", "1")
	require.Never(t, func() bool { return len(found()) > 0 }, 45*time.Second, time.Second, "%q", found())
}

// The node of a rank that slows the job leaves after five minutes, and the spare takes its place.
func TestTheNodeOfASlowRankIsReplacedWithTorch(t *testing.T) {
	longest(t)
	besideOthers(t)
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+torchpython.Require(t, "NODES OF SLOW RANKS ARE"), "GLOO_SOCKET_IFNAME=lo",
		"OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore")
	path, err := filepath.Abs("testdata/slow.py")
	require.NoError(t, err)
	args := append(b.c10d("2"), "--slow-action=drain", "--log-format=json", path, "stop", "3", "2")
	first := b.start("dlrover-run", []string{"POD_NAME=n0"}, args...)
	eventually(t, "it serves", func() bool { return len(first.logged("serving the rendezvous")) > 0 })
	slow := b.start("dlrover-run", []string{"POD_NAME=n1"}, args...)
	require.Eventually(t, b.exists("up"), 2*time.Minute, 100*time.Millisecond, "the ranks train")
	spare, began := b.start("dlrover-run", []string{"POD_NAME=n2"}, args...), time.Now()
	require.Eventually(t, func() bool { return len(slow.logged("leaving the job")) > 0 }, 10*time.Minute, time.Second)
	require.Greater(t, time.Since(began), 4*time.Minute, "a while is no reason")
	require.Equal(t, 1, slow.wait())
	require.Contains(t, slow.err.String(), "left: drained: rank 3 (node 1 n1) slows the job")
	require.Eventually(t, func() bool { return len(spare.logged("workers started")) > 0 }, time.Minute, time.Second)
	b.release()
	require.Zero(t, first.wait())
	require.Zero(t, spare.wait())
}

// With --slow-action=check the node of a slow rank is compared with the other one, once, and the reason is told.
func TestNodesOfSlowRanksAreComparedWithTorch(t *testing.T) {
	besideOthers(t)
	for _, c := range []struct {
		name, script, want string
		rare               bool
	}{
		{"stopped", "stop", `rank 5 was stopped, by a signal or a debugger, for [3-7]\d % of the time, 0 at node 0 `, false},
		{"quota", "quota", `rank 5 used up the CPU quota of its cgroup in (\d\d|100) % of all periods, 0 at `, true},
		{"disk", "disk", `rank 5 waited for files such as /.*/slow-disk/batch for \d\d % of the time, \d at node 0 `, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.rare {
				longest(t)
			}
			script := []string{c.script, "5", "2"}
			if c.script == "disk" {
				script = append(script, slowDisk(t))
			}
			found, dir := slowJobWith(t, "--slow-action=check", script...)
			if c.script == "quota" {
				pid, err := os.ReadFile(filepath.Join(dir, "pid"))
				require.NoError(t, err)
				limitCPU(t, strings.TrimSpace(string(pid)), 40)
			}
			checked := func() []string {
				return slices.DeleteFunc(found(), func(s string) bool { return !strings.HasPrefix(s, "slow-checked: ") })
			}
			examined := func() bool { return len(checked()) > 0 }
			require.Eventually(t, examined, 4*time.Minute, 100*time.Millisecond)
			t.Log(found())
			require.Len(t, checked(), 1)
			require.Regexp(t, `^slow-checked: rank 5 \(node 1 .*\): `, checked()[0])
			require.Regexp(t, c.want, checked()[0])
		})
	}
}

// slowDisk is a directory from which 400 KiB can be read in a second, with a file "batch" of 64 KiB.
func slowDisk(t *testing.T) string {
	t.Helper()
	bindfs, err := exec.LookPath("bindfs")
	if err != nil || os.Getuid() != 0 {
		t.Skip("A SLOW DISK IS NOT TESTED: it takes bindfs, and root")
	}
	src, dir := t.TempDir(), filepath.Join(t.TempDir(), "slow-disk")
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(src, "batch"), make([]byte, 64<<10), 0o600))
	out, err := exec.Command(bindfs, "--read-rate=400k", "-o", "direct_io", src, dir).CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// Nodes with networks of their own: the other MTU of one is told, here by the status, too, and how much it can send.
func TestNetworksOfSlowRanksAreComparedWithTorch(t *testing.T) {
	longest(t)
	besideOthers(t)
	c := newCluster(t, 2, "1gbit")
	c.tool("ip", "-n", c.names[1], "link", "set", "eth0", "mtu", "1400")
	c.sends(1, "200mbit")
	path, err := filepath.Abs("testdata/slow.py")
	require.NoError(t, err)
	env := []string{"PYTHON_EXEC=" + torchpython.Require(t, "NETWORKS OF SLOW RANKS ARE"), "GLOO_SOCKET_IFNAME=eth0",
		"PYTHONWARNINGS=ignore"}
	args := []string{"--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=" + c.addrs[0] + ":29400",
		"--rdzv-id=job", "--slow-action=check", "--slow-check-link=yes", "--log-format=json", path, "stop", "5", "2"}
	first := c.on(0, "dlrover-run", env, args...)
	eventually(t, "it serves", func() bool { return len(first.logged("serving the rendezvous")) > 0 })
	second := c.on(1, "dlrover-run", env, args...)
	checked := func() bool { return len(first.logged("slow-checked")) > 0 }
	require.Eventually(t, checked, 5*time.Minute, 100*time.Millisecond)
	t.Log(first.logged("slow-"))
	require.Regexp(t, `: rank 5 was stopped, .*; eth0 has an MTU of 1400, 1500 at node 0 node0; `+
		`eth0 sends 0\.1\d? Gb/s to node 0 node0, and gets 0\.[789]\d?$`, first.logged("slow-checked")[0])
	l := c.on(0, "dlroverctl", []string{"DLROVER_MASTER_ADDR=" + c.addrs[0] + ":29400"}, "status", "job")
	require.Zero(t, l.wait())
	require.Regexp(t, `slow +rank 5 .*; eth0 has an MTU of 1400, 1500 at node 0 node0; eth0 sends `, l.out.String())
	c.release()
	require.Zero(t, first.wait())
	require.Zero(t, second.wait())
}

// limitCPU puts a process into a cgroup with so many percent of a CPU.
func limitCPU(t *testing.T, pid string, percent int) {
	t.Helper()
	base, quota := "/sys/fs/cgroup/cpu", map[string]string{"cpu.cfs_quota_us": fmt.Sprint(1000 * percent)}
	if _, err := os.Stat(base); err != nil {
		base, quota = "/sys/fs/cgroup", map[string]string{"cpu.max": fmt.Sprint(1000*percent, " 100000")}
	}
	dir := filepath.Join(base, "dlq"+pid)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip("SKIPPED: no cgroup can be made here, so CPU QUOTAS OF SLOW RANKS ARE NOT TESTED:", err)
	}
	t.Cleanup(func() {
		_ = os.WriteFile(filepath.Join(base, "cgroup.procs"), []byte(pid), 0o644) // it may have ended
		require.NoError(t, os.Remove(dir))
	})
	quota["cgroup.procs"] = pid
	for name, text := range quota {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Skip("SKIPPED: no cgroup can limit CPUs here, so CPU QUOTAS OF SLOW RANKS ARE NOT TESTED:", err)
		}
	}
}
