package python

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/torchpython"
	"dlrover-run/netcheck"
)

// minute is ample for whatever is to happen.
const minute = time.Minute

// anyPython is an interpreter for the fake PyTorch of testdata.
func anyPython(t *testing.T) string {
	t.Helper()
	for _, name := range []string{torchpython.System, "python3"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skip("SKIPPED: THE NODE CHECK'S PYTORCH PROBE IS NOT TESTED: there is no Python")
	return ""
}

// fake configures a Runner with a PyTorch that has some devices and faults; dir is where its processes meet.
func fake(t *testing.T, dir string, devices int, faults string) Config {
	t.Helper()
	path, err := filepath.Abs("testdata/fake")
	require.NoError(t, err)
	return Config{Interpreter: anyPython(t), Env: append(os.Environ(),
		"PYTHONPATH="+path, "PYTHONDONTWRITEBYTECODE=1", "FAKE_DIR="+dir,
		"FAKE_DEVICES="+strconv.Itoa(devices), "FAKE_FAULTS="+faults)}
}

// run computes with a fake and returns the result.
func run(t *testing.T, left time.Duration, devices int, faults string) netcheck.Result {
	t.Helper()
	r := start(t, fake(t, t.TempDir(), devices, faults))
	return r.Compute(t.Context(), netcheck.Assignment{Test: "t", Left: left, Quick: true})
}

func TestEveryDeviceIsMeasured(t *testing.T) {
	t.Parallel()
	res := run(t, minute, 4, "slow:2:wrong")
	require.Empty(t, res.Text)
	require.Equal(t, "cuda", res.Torch.Device)
	require.Equal(t, "9.9.fake, CUDA 13.2", res.Torch.Torch)
	require.Len(t, res.Torch.Matmul, 4)
	require.Greater(t, res.Torch.Matmul[2], 2.0)
}

// What the fake says of a device with a fault, and of none.
const (
	eccError = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
	noDevice = "PyTorch 9.9.fake, CUDA 13.2 finds no device (cuda), and this node should have "
)

func TestDevicesThatFail(t *testing.T) {
	t.Parallel()
	for faults, want := range map[string]string{
		"matmul:1:raise":                 "GPU 1: the device's memory has errors (" + eccError + ")",
		"matmul:1:wrong":                 "GPU 1: ArithmeticError: matrix products are wrong",
		"allocate:0:memory":              "GPU 0: the device has too little free memory (RuntimeError: CUDA out of memory. ",
		"wake:2:raise":                   "GPU 2: the device's memory has errors (" + eccError + ")",
		"matmul:1:crash":                 "GPU 1: its process ended with signal 6 while multiplying matrices",
		"wake:0:exit":                    "GPU 0: its process ended with status 3 while waking up",
		"matmul:1:hang":                  "GPU 1: no answer within",
		"matmul:1:raise allocate:2:hang": "GPU 1: the device's memory has errors",
		"matmul:*:hang":                  "GPU 0: no answer within",
	} {
		t.Run(faults, func(t *testing.T) {
			t.Parallel()
			left := minute
			if strings.Contains(want, "no answer") {
				left = 3 * time.Second
			}
			res := run(t, left, 3, faults)
			require.Equal(t, netcheck.Failed, res.Class)
			require.True(t, strings.HasPrefix(res.Text, want), res.Text)
			if strings.Contains(want, "no answer") {
				require.Contains(t, res.Text, "while multiplying matrices")
			}
			require.Nil(t, res.Torch)
		})
	}
}

// After a failure the next command begins with new processes.
func TestAFailureIsNotTheEnd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, fake(t, dir, 2, "allreduce:1:crash allreduce:0:hang"))
	for range 2 {
		res := r.Compute(t.Context(), netcheck.Assignment{Quick: true})
		require.Empty(t, res.Text)
		res = group(t, "t", r)[0]
		require.Equal(t, netcheck.Failed, res.Class)
	}
}

func TestPyTorchThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	for faults, c := range map[string]struct {
		is    error
		want  string
		class netcheck.Class
	}{
		"import:*:missing": {errNoTorch, "PyTorch is not installed: ModuleNotFoundError: No module named 'torch'",
			netcheck.Own},
		"import:*:broken": {errImport, "PyTorch cannot be imported: ImportError: libcudart.so.12: cannot open shared " +
			"object file", netcheck.Failed},
		"import:*:raise": {errImport, "PyTorch cannot be imported: the device's memory has errors (RuntimeError: " +
			"CUDA error: uncorrectable ECC error encountered)", netcheck.Failed},
		"import:*:crash": {errImport, "PyTorch cannot be imported: the probe has ended: signal: aborted", netcheck.Failed},
		"import:*:exit": {errImport, "PyTorch cannot be imported: the probe has ended: exit status 3: something went wrong",
			netcheck.Failed},
		"import:*:talk": {errImport, "PyTorch cannot be imported: the probe answers with something else: ", netcheck.Failed},
		"import:*:long": {errImport, "PyTorch cannot be imported: the probe answers with more than 65536 bytes",
			netcheck.Failed},
	} {
		t.Run(faults, func(t *testing.T) {
			t.Parallel()
			r := start(t, fake(t, t.TempDir(), 2, faults))
			_, err := r.Ready(t.Context())
			require.ErrorIs(t, err, c.is)
			require.True(t, strings.HasPrefix(err.Error(), c.want), err)
			require.Empty(t, r.Findings())
			res := r.Compute(t.Context(), netcheck.Assignment{Test: "t"})
			require.Equal(t, c.class, res.Class)
			require.Equal(t, "t", res.Test)
			require.Equal(t, err.Error(), res.Text)
			require.Equal(t, netcheck.Own, group(t, "t", r)[0].Class, "no fault of the other end")
		})
	}
}

func TestImportThatHangs(t *testing.T) {
	t.Parallel()
	cfg := fake(t, t.TempDir(), 1, "import:*:hang")
	cfg.ImportTimeout = 300 * time.Millisecond
	r := start(t, cfg)
	soon, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := r.Ready(soon)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = r.Ready(t.Context())
	require.EqualError(t, err, "PyTorch cannot be imported: its import takes more than 300ms")
	<-r.over
}

// A test whose time is over before PyTorch is there is not its end.
func TestTestsDuringTheImport(t *testing.T) {
	t.Parallel()
	r := start(t, fake(t, t.TempDir(), 1, "import:*:hang"))
	res := r.Compute(t.Context(), netcheck.Assignment{Test: "t", Left: time.Millisecond})
	require.Equal(t, netcheck.Result{Test: "t", Class: netcheck.Failed, Text: "PyTorch is still being imported"}, res)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Equal(t, netcheck.Canceled, r.Compute(ctx, netcheck.Assignment{Test: "t"}).Class)
}

func TestNodesWithoutTheirDevices(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		devices int
		faults  string
		want    Config
		text    string
	}{
		"none":    {0, "", Config{Wants: true, Devices: 8}, noDevice + "8"},
		"unknown": {0, "", Config{Wants: true}, noDevice + "1"},
		"fewer":   {7, "", Config{Wants: true, Devices: 8}, "PyTorch 9.9.fake, CUDA 13.2 finds 7 of 8 devices"},
		"a driver that fails": {8, "count:*:raise", Config{Wants: true, Devices: 8},
			noDevice + "8: the device's memory has errors " +
				"(RuntimeError: CUDA error: uncorrectable ECC error encountered)"},
		"a driver that crashes": {8, "count:*:crash", Config{Wants: true, Devices: 8},
			noDevice + "8: the process that asks the driver crashes"},
		"a CPU job":                   {0, "", Config{Devices: 8}, ""},
		"a CPU job that wants no GPU": {0, "", Config{Wants: true, Devices: 8, Device: CPU}, ""},
		"more":                        {9, "", Config{Wants: true, Devices: 8}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := fake(t, t.TempDir(), c.devices, c.faults)
			cfg.Wants, cfg.Devices, cfg.Device = c.want.Wants, c.want.Devices, c.want.Device
			r := start(t, cfg)
			ready(t, r)
			res := r.Compute(t.Context(), netcheck.Assignment{Quick: true})
			if c.text == "" {
				require.Empty(t, res.Text)
				require.Empty(t, r.Findings())
				return
			}
			require.Equal(t, netcheck.Result{Class: netcheck.Failed, Text: c.text}, res)
			require.Equal(t, netcheck.Own, group(t, "t", r)[0].Class, "the other end is not to be blamed")
			require.Equal(t, []netcheck.Finding{{
				Check: "torch", Kind: "compute", Severity: netcheck.Fatal, Metric: "devices",
				Value: float64(r.hello.Devices), Threshold: float64(max(c.want.Devices, 1)), Text: c.text,
			}}, r.Findings())
		})
	}
}

// One process for each device, with ranks in the order of the nodes.
func TestNCCL(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := start(t, fake(t, dir, 2, "")), start(t, fake(t, dir, 3, ""))
	for _, res := range group(t, "pair", a, b) {
		require.Empty(t, res.Text)
		require.Equal(t, "nccl", res.Torch.Backend)
		require.Equal(t, "IB", res.Torch.Transport)
		require.EqualValues(t, 64<<20, res.Torch.Bytes)
		require.InEpsilon(t, float64(res.Torch.Bytes)/res.Torch.AllReduce/1e3*2*4/5, res.Torch.BusMBps, 1e-9)
	}
	for rank := range 5 {
		text, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("pair_group_rank_%d", rank)))
		require.NoError(t, err)
		require.Equal(t, "nccl 5", string(text))
	}
}

// With a node without devices all take gloo, one process a node.
func TestMixedNodes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b, c := start(t, fake(t, dir, 2, "")), start(t, fake(t, dir, 0, "")), start(t, fake(t, dir, 1, ""))
	for _, res := range group(t, "three", a, b, c) {
		require.Empty(t, res.Text)
		require.Equal(t, "gloo", res.Torch.Backend)
	}
	joined, err := filepath.Glob(filepath.Join(dir, "three_group_rank_*"))
	require.NoError(t, err)
	require.Len(t, joined, 3)
}

func TestCollectivesThatFail(t *testing.T) {
	t.Parallel()
	for faults, c := range map[string]struct {
		left time.Duration
		want string
	}{
		"allreduce:1:hang":  {3 * time.Second, "GPU 1: no answer within"},
		"allreduce:0:raise": {minute, "GPU 0: the device's memory has errors"},
		"store:*:hang":      {3 * time.Second, "GPU 0: no answer within"},
		"destroy:1:hang":    {3 * time.Second, "GPU 1: no answer within"},
	} {
		t.Run(faults, func(t *testing.T) {
			t.Parallel()
			r := start(t, fake(t, t.TempDir(), 2, faults))
			ready(t, r)
			a := netcheck.Assignment{Test: "t", World: 1, Left: c.left}
			res := r.Join(t.Context(), a, func([]string) error { return nil })
			require.Equal(t, netcheck.Failed, res.Class)
			require.True(t, strings.HasPrefix(res.Text, c.want), res.Text)
		})
	}
	t.Run("a device that does not come", func(t *testing.T) {
		t.Parallel()
		r := start(t, fake(t, t.TempDir(), 2, "store:1:hang"))
		ready(t, r)
		a := netcheck.Assignment{Test: "t", World: 1, Left: 4 * time.Second}
		res := r.Join(t.Context(), a, func([]string) error { return nil })
		require.Equal(t, netcheck.Failed, res.Class)
		require.Contains(t, res.Text, "GPU 0: no answer in time (RuntimeError: wait timeout after ")
		require.Contains(t, res.Text, "; GPU 1: no answer while connecting to the store")
	})
	t.Run("a peer that does not come", func(t *testing.T) {
		t.Parallel()
		r := start(t, fake(t, t.TempDir(), 1, ""))
		ready(t, r)
		a := netcheck.Assignment{Test: "t", Left: 3 * time.Second}
		res := r.Serve(t.Context(), a, func([]string) error { return nil })
		require.Equal(t, netcheck.Failed, res.Class)
		require.Contains(t, res.Text, "no answer in time (RuntimeError: wait timeout after")
	})
}

// A test that is canceled leaves the probe usable.
func TestCancel(t *testing.T) {
	t.Parallel()
	r := start(t, fake(t, t.TempDir(), 2, "allreduce:*:hang"))
	ready(t, r)
	ctx, cancel := context.WithCancel(t.Context())
	a := netcheck.Assignment{Test: "t", World: 1, Left: minute}
	res := r.Join(ctx, a, func([]string) error {
		time.AfterFunc(300*time.Millisecond, cancel)
		return nil
	})
	require.Equal(t, netcheck.Canceled, res.Class)
	res = r.Compute(t.Context(), netcheck.Assignment{Quick: true})
	require.Empty(t, res.Text)
	require.Len(t, res.Torch.Matmul, 2)
}

func TestServeAndDial(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := start(t, fake(t, dir, 1, "")), start(t, fake(t, dir, 1, ""))
	var allowed []string
	var released atomic.Bool
	serve := a.cfg.Store
	a.cfg.Store = func(allow []string) (string, func(), error) {
		allowed = allow
		addr, release, err := serve(allow)
		return addr, func() { release(); released.Store(true) }, err
	}
	peer := netcheck.Peer{Addr: "10.0.0.2", NICs: []netcheck.NIC{{Addr: "10.1.0.2"}, {Name: "no address"}}}
	var both sync.WaitGroup
	var served, dialed netcheck.Result
	both.Go(func() {
		served = a.Serve(t.Context(), netcheck.Assignment{Test: "t", Peer: peer}, func(addrs []string) error {
			both.Go(func() {
				dialed = b.Dial(t.Context(), netcheck.Assignment{Test: "t", Peer: netcheck.Peer{Addrs: addrs}})
			})
			return nil
		})
	})
	both.Wait()
	require.Empty(t, served.Text)
	require.Empty(t, dialed.Text)
	require.Equal(t, []string{"10.0.0.2", "10.1.0.2"}, allowed)
	require.True(t, released.Load())
}

func TestAssignmentsThatCannotBe(t *testing.T) {
	t.Parallel()
	r := start(t, fake(t, t.TempDir(), 1, ""))
	for want, addrs := range map[string][]string{
		"the assignment does not say where the store is":                nil,
		`the store's address is "10.0.0.1", which is not a host:port`:   {"10.0.0.1"},
		`the store's address is "10.0.0.1:0", which is not a host:port`: {"10.0.0.1:0"},
		`the store's address is ":80", which is not a host:port`:        {":80"},
	} {
		res := r.Dial(t.Context(), netcheck.Assignment{Peer: netcheck.Peer{Addrs: addrs}})
		require.Equal(t, netcheck.Result{Class: netcheck.Own, Text: want}, res)
	}
	r.cfg.Store = func([]string) (string, func(), error) { return "", nil, fmt.Errorf("no port is free") }
	res := r.Serve(t.Context(), netcheck.Assignment{}, nil)
	require.Equal(t, netcheck.Result{Class: netcheck.Own, Text: "serve PyTorch's store: no port is free"}, res)
}

// What libraries print costs nobody anything.
func TestFlood(t *testing.T) {
	t.Parallel()
	require.Empty(t, run(t, minute, 2, "matmul:*:flood").Text)
}

func TestInterpreterThatIsNone(t *testing.T) {
	t.Parallel()
	_, err := Start(t.Context(), Config{Interpreter: "/no/python"})
	require.ErrorContains(t, err, "start /no/python for the node check: ")
	r := start(t, Config{Interpreter: "/bin/true"})
	_, err = r.Ready(t.Context())
	require.ErrorIs(t, err, errImport)
	require.EqualError(t, err, "PyTorch cannot be imported: the probe has ended: exit status 0")
}

// forked waits for the four processes that a fake with two devices notes in dir.
func forked(t *testing.T, dir string) (pids []int) {
	t.Helper()
	require.Eventually(t, func() bool {
		text, _ := os.ReadFile(filepath.Join(dir, "pids"))
		pids = nil
		for _, word := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(word); err == nil {
				pids = append(pids, pid)
			}
		}
		return len(pids) == 4
	}, minute, time.Millisecond)
	return pids
}

// All processes end within a second of Close, and of the context's end: those of devices, and those that have left
// the group.
func TestNothingIsLeft(t *testing.T) {
	for name, end := range map[string]func(r *Runner, cancel func()){
		"close":   func(r *Runner, _ func()) { r.Close() },
		"context": func(r *Runner, cancel func()) { cancel(); <-r.over },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			cfg := fake(t, dir, 2, "wake:*:leave matmul:*:hang")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r, err := Start(ctx, cfg)
			require.NoError(t, err)
			defer r.Close()
			var computed sync.WaitGroup
			computed.Go(func() { r.Compute(t.Context(), netcheck.Assignment{Left: minute}) })
			pids := forked(t, dir)
			begun := time.Now()
			end(r, cancel)
			require.Less(t, time.Since(begun), time.Second)
			for _, pid := range pids {
				require.Eventually(t, func() bool { return testkit.Gone(pid) }, time.Second, time.Millisecond)
			}
			computed.Wait()
		})
	}
}

// The processes of devices do not outlive the one that has forked them.
func TestTheProbeIsKilled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := start(t, fake(t, dir, 2, "wake:*:leave matmul:*:hang"))
	ready(t, r)
	var res netcheck.Result
	var computed sync.WaitGroup
	computed.Go(func() { res = r.Compute(t.Context(), netcheck.Assignment{Left: minute}) })
	pids := forked(t, dir)
	require.NoError(t, syscall.Kill(r.pid, syscall.SIGKILL))
	computed.Wait()
	require.Equal(t, netcheck.Failed, res.Class)
	require.Contains(t, res.Text, "the probe has ended: signal: killed")
	for i, pid := range pids {
		if i%2 == 1 { // of a device
			require.Eventually(t, func() bool { return testkit.Gone(pid) }, minute, time.Millisecond)
			continue
		}
		_ = syscall.Kill(pid, syscall.SIGKILL) // the test's own
	}
	require.Contains(t, r.Compute(t.Context(), netcheck.Assignment{}).Text, "the probe has ended")
}

// Every Python from 3.8 on that is here can run the probe.
func TestPythons(t *testing.T) {
	t.Parallel()
	tested := 0
	for minor := 8; minor <= 14; minor++ {
		path, err := exec.LookPath(fmt.Sprintf("python3.%d", minor))
		if err != nil || exec.Command(path, "-c", "pass").Run() != nil {
			continue
		}
		t.Run(filepath.Base(path), func(t *testing.T) {
			t.Parallel()
			cfg := fake(t, t.TempDir(), 2, "")
			cfg.Interpreter = path
			r := start(t, cfg)
			ready(t, r)
			require.Empty(t, r.Compute(t.Context(), netcheck.Assignment{Quick: true}).Text)
			require.Empty(t, group(t, "t", r)[0].Text)
		})
		tested++
	}
	t.Logf("%d versions", tested)
}
