package gpucheck

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox"
	"dlrover-run/switchbox/fake"
	"dlrover-run/switchbox/nvml"
	"dlrover-run/switchbox/nvml/cuda"
)

// machine has devices that say what they are told to, and copies that take as long as they are told to.
type machine struct {
	gpus      []*fake.GPU
	open      error                 // of NVML
	cuda      error                 // of CUDA
	prepare   map[string]error      // by name of the device
	rates     map[string]float64    // MB/s by "GPU 0>GPU 1"; else 400,000
	fails     map[string]error      // likewise
	separate  bool                  // no device reaches another one
	copying   func(from, to string) // is called in a copy
	mu        sync.Mutex            // of what follows
	order     []string              // of copies
	busy      map[string]bool       // devices in a copy
	collision bool                  // a device was in two copies at once
	byName    map[string]*fake.GPU  // of those that were opened
	files     string                // directory of device files
	listed    []int                 // of those, by device
}

func (m *machine) Devices() []switchbox.Device {
	var all []switchbox.Device
	for _, g := range m.gpus {
		all = append(all, g)
	}
	return all
}

func (m *machine) Files() []int    { return m.listed }
func (m *machine) Driver() string  { return "550.54.15" }
func (m *machine) Version() string { return "12.4" }

type opened string

func (opened) Close() {}

func (m *machine) Open(name, pci string) (end, error) {
	for _, g := range m.gpus {
		if g.ID.PCI == pci {
			m.byName[name] = g
		}
	}
	return opened(name), m.prepare[name]
}

func (m *machine) Reach(end, end) (bool, error) { return !m.separate, nil }

func (m *machine) Copy(from, to end) (cuda.Rate, error) {
	a, b := string(from.(opened)), string(to.(opened))
	route := a + ">" + b
	m.mu.Lock()
	m.order = append(m.order, route)
	m.collision = m.collision || m.busy[a] || m.busy[b]
	m.busy[a], m.busy[b] = true, true
	m.mu.Unlock()
	if m.copying != nil {
		m.copying(a, b)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.busy[a], m.busy[b] = false, false
	rate := cuda.Rate{MBps: 400_000, Bytes: cuda.Large, Moved: 52 * cuda.Large}
	if r, ok := m.rates[route]; ok {
		rate.MBps = r
	}
	if m.fails[route] == nil {
		m.byName[a].Moved.Sent += uint64(rate.Moved)
	}
	return rate, m.fails[route]
}

func box(n int) *machine {
	return &machine{gpus: fake.Box(n), busy: map[string]bool{}, byName: map[string]*fake.GPU{}}
}

func (m *machine) drivers() drivers {
	return drivers{
		manager: func() (manager, error) { return m, m.open },
		copier:  func() (copier, error) { return m, m.cuda },
		files:   m.files,
	}
}

// check runs gpucheck and returns its report and exit status.
func (m *machine) check(t *testing.T, args ...string) (switchbox.Report, int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	status := run(append(args, "--json"), &stdout, &stderr, m.drivers(), func(int) { t.Error("the watchdog has fired") })
	require.Empty(t, stderr.String())
	r, err := switchbox.ParseReport(stdout.Bytes())
	require.NoError(t, err, stdout.String())
	return r, status
}

func texts(r switchbox.Report) string {
	var all []string
	for _, f := range r.Findings {
		all = append(all, string(f.Severity)+": "+f.Text)
	}
	return strings.Join(all, "\n")
}

func TestHealthyMachine(t *testing.T) {
	for _, level := range []string{"inventory", "links", "copy"} {
		m := box(8)
		r, status := m.check(t, "--level="+level)
		require.Equal(t, exitOK, status)
		require.Equal(t, switchbox.OK, r.State, texts(r))
		require.Len(t, r.Devices, 8)
		require.NotContains(t, texts(r), "warn")
		switch level {
		case "inventory":
			require.Empty(t, r.Devices[0].Links)
			require.NotNil(t, r.Devices[0].Memory)
		case "links":
			require.Len(t, r.Devices[0].Links, 18)
			require.Empty(t, m.order, "nothing is copied")
			require.Equal(t, "NVIDIA 550.54.15", r.Driver)
		case "copy":
			require.Equal(t, "0:1 2:4 3:5 6:7", tested(r))
			require.Len(t, m.order, 8, "both directions")
			require.False(t, m.collision)
			require.EqualValues(t, 400_000, r.Pairs[0].Back)
			require.Equal(t, "NVIDIA 550.54.15, CUDA 12.4", r.Driver)
		}
	}
}

func tested(r switchbox.Report) string {
	var all []string
	for _, m := range r.Pairs {
		all = append(all, m.Pair.String())
	}
	return strings.Join(all, " ")
}

// Without pairs those of the documents are tested, and no GPU is left out.
func TestDefaultPairs(t *testing.T) {
	for n, want := range map[int]string{
		2: "0:1", 3: "0:1 0:2", 4: "0:1 2:3", 5: "0:1 2:4 0:3", 8: "0:1 2:4 3:5 6:7", 10: "0:1 2:4 3:5 6:7 8:9",
	} {
		r, _ := box(n).check(t, "--level=copy")
		require.Equal(t, want, tested(r))
	}
	r, _ := box(8).check(t, "--pairs=ring")
	require.ElementsMatch(t, strings.Fields("0:1 1:2 2:3 3:4 4:5 5:6 6:7 7:0"), strings.Fields(tested(r)))
}

// A pair below the limit is told wherever it stands, whether enough pass or not.
func TestSlowDefaultPair(t *testing.T) {
	for pair, rate := range map[string]string{
		"0:1": "GPU 1>GPU 0", "2:4": "GPU 2>GPU 4", "3:5": "GPU 3>GPU 5", "6:7": "GPU 7>GPU 6",
	} {
		m := box(8)
		m.rates = map[string]float64{rate: 8000}
		r, status := m.check(t, "--level=copy", "--min-bandwidth=10000", "--min-channels=2")
		require.Equal(t, exitOK, status)
		require.Equal(t, "3 of 4 pairs reach 10000 MB/s (not "+pair+"); 2 must", r.Reason)
		require.Contains(t, texts(r), "warn: pair "+pair+" reaches 8000 MB/s, less than 10000 MB/s")
		r, status = m.check(t, "--level=copy", "--min-bandwidth=10000", "--min-channels=4")
		require.Equal(t, exitFaulty, status)
		require.Equal(t, "3 of 4 pairs reach 10000 MB/s (not "+pair+"); 4 must", r.Reason)
	}
}

func TestDomainIsClusterAndClique(t *testing.T) {
	m := box(2)
	for _, g := range m.gpus {
		g.Switches.Cluster, g.Switches.Clique = "dead0000-0000-0000-0000-000000000001", 7
	}
	r, _ := m.check(t)
	require.Equal(t, "dead0000-0000-0000-0000-000000000001.7", r.Domain)
}

// The trap: links are active, and the fabric was never registered.
func TestUnregisteredFabricIsFaulty(t *testing.T) {
	m := box(4)
	m.gpus[2].Switches.State = switchbox.FabricInProgress
	r, status := m.check(t)
	require.Equal(t, exitFaulty, status)
	require.Equal(t, switchbox.Faulty, r.State)
	require.Contains(t, r.Reason, "GPU 2")
}

func TestSlowPair(t *testing.T) {
	m := box(4)
	m.rates = map[string]float64{"GPU 2>GPU 3": 8000}
	r, status := m.check(t, "--pairs", "0:1", "2:3", "--min-bandwidth=10000", "--min-channels=2")
	require.Equal(t, exitFaulty, status)
	require.Contains(t, texts(r),
		"pair 2:3 reaches 8000 MB/s, less than 10000 MB/s (2 to 3: 8000 MB/s, back: 400000 MB/s)")
	r, status = m.check(t, "--pairs", "0:1", "2:3", "--min-bandwidth=10000", "--min-channels=1")
	require.Equal(t, exitOK, status, "one pair is enough")
	require.Contains(t, texts(r), "warn: pair 2:3 reaches 8000 MB/s")
}

// Fast and wrong is worse than slow, whatever the limits say.
func TestCorruptDataIsFaulty(t *testing.T) {
	m := box(4)
	m.fails = map[string]error{"GPU 1>GPU 0": fmt.Errorf("GPU 1 to GPU 0: %w", &cuda.Corruption{Words: 1, Bytes: 64,
		At: 8, Sent: 1, Came: 3})}
	r, status := m.check(t, "--level=copy")
	require.Equal(t, exitFaulty, status)
	require.Equal(t, "data was damaged on its way: GPU 1 to GPU 0: 1 of 8 words differ, the first at byte 8: "+
		"sent 0x0000000000000001, received 0x0000000000000003", r.Reason)
	require.Equal(t, "1:0", r.Findings[0].Entity, "with its direction")
}

func TestCopyThatFails(t *testing.T) {
	m := box(2)
	m.fails = map[string]error{"GPU 0>GPU 1": &cuda.Error{Call: "cuMemcpyPeerAsync", Code: 719,
		Name: "CUDA_ERROR_LAUNCH_FAILED"}}
	r, status := m.check(t, "--pairs=0:1", "--min-channels=1")
	require.Equal(t, exitFaulty, status)
	require.Contains(t, texts(r), "pair 0:1: cuMemcpyPeerAsync: CUDA_ERROR_LAUNCH_FAILED (CUDA error 719)")
	require.Equal(t, "cuMemcpyPeerAsync: CUDA_ERROR_LAUNCH_FAILED (CUDA error 719)", r.Pairs[0].Error)
}

// What NVML counts shows which way the bytes took, and errors that a full rate hides.
func TestCountersAreComparedOverTheCopies(t *testing.T) {
	m := box(2)
	m.copying = func(string, string) { m.gpus[0].Moved.Sent = 0 } // nothing goes over the links of GPU 0
	m.gpus[1].Errors = make([]switchbox.LinkErrors, 18)
	calls := 0
	m.gpus[1].Called = func(method string) {
		if calls++; strings.HasPrefix(method, "LinkErrors") && len(m.order) > 0 {
			m.gpus[1].Errors[3].Replay = 5
		}
	}
	r, status := m.check(t, "--level=copy")
	require.Equal(t, exitOK, status, texts(r))
	require.Contains(t, texts(r), "warn: GPU 1 had errors on link 3 during the copies: 5 ")
}

func TestCopiesByWayOfTheHost(t *testing.T) {
	m := box(2)
	m.gpus = fake.Bare(2)
	m.separate = true
	r, status := m.check(t, "--level=copy")
	require.Equal(t, exitOK, status)
	require.Contains(t, texts(r), "info: pair 0:1 copies by way of the host's memory: the two do not see each other")
	require.NotContains(t, texts(r), "warn")
}

func TestOnlyGPU(t *testing.T) {
	m := box(1)
	r, status := m.check(t, "--level=copy")
	require.Equal(t, exitOK, status)
	require.Equal(t, switchbox.OK, r.State)
	require.Contains(t, texts(r),
		"GPU 0 is the only one here: a copy within it reaches 400000 MB/s, and no link was tested")
	require.Equal(t, switchbox.Pair{}, r.Pairs[0].Pair)
	require.Equal(t, []string{"GPU 0>GPU 0"}, m.order)
	r, status = m.check(t, "--level=copy", "--min-channels=2")
	require.Equal(t, exitOK, status)
	require.Equal(t, switchbox.Skipped, r.State)
	require.Equal(t, "there is one GPU here, so there is no pair", r.Reason)
}

// What an H200 of a virtual machine says: no links, no fabric.
func TestTextOfAnOnlyGPU(t *testing.T) {
	m := box(1)
	m.gpus = fake.Bare(1)
	m.gpus[0].ID.Name = "NVIDIA H200"
	var out bytes.Buffer
	require.Equal(t, exitOK, run([]string{"--level=copy"}, &out, &out, m.drivers(), nil))
	require.Regexp(t, `^ok
driver: NVIDIA 550.54.15, CUDA 12.4
GPU 0: NVIDIA H200 \S+ GPU-\S+
within GPU 0: 400000 MB/s 
info: GPU 0 is the only one here: a copy within it reaches 400000 MB/s, and no link was tested
$`, out.String())
	out.Reset()
	require.Equal(t, exitUsage, run([]string{"--pairs=0:1"}, &out, &out, m.drivers(), nil))
	require.Contains(t, out.String(), "0:1 names a device that is not here; this node has only device 0")
}

func TestOnlyGPUIsWatchedWhileItCopies(t *testing.T) {
	m := box(1)
	m.copying = func(string, string) { m.gpus[0].Told = append(m.gpus[0].Told, switchbox.Xid{Number: 48}) }
	r, status := m.check(t, "--level=copy")
	require.Equal(t, exitFaulty, status)
	require.Contains(t, texts(r), "Xid 48")
}

// The default of two channels must not fail a machine that has one pair only.
func TestFewerPairsThanMustPass(t *testing.T) {
	r, status := box(2).check(t, "--level=copy", "--min-channels=2", "--min-bandwidth=10000")
	require.Equal(t, exitOK, status)
	require.Equal(t, switchbox.Skipped, r.State)
	require.Equal(t, "there are 1 pairs of GPUs here, and 2 must pass", r.Reason)
	require.Len(t, r.Pairs, 1, "the figure is there all the same")
}

func TestPairWithAGPUThatIsNotHere(t *testing.T) {
	var stdout, stderr bytes.Buffer
	status := run([]string{"--pairs=0:9"}, &stdout, &stderr, box(2).drivers(), nil)
	require.Equal(t, exitUsage, status)
	require.Contains(t, stderr.String(), "0:9 names a device that is not here; this node has 0, 1")
	require.Empty(t, stdout.String())
}

func TestGPUsThatCannotCopy(t *testing.T) {
	m := box(4)
	m.gpus[0].Is.MIG = true
	m.prepare = map[string]error{"GPU 2": fmt.Errorf("GPU 2: %w: 10 of 81920 MiB", cuda.ErrNoMemory)}
	r, status := m.check(t, "--pairs=0:1,2:3,1:3")
	require.Equal(t, exitOK, status)
	require.Contains(t, texts(r), "info: pair 0:1 is skipped: GPU 0 is divided (MIG)")
	require.Contains(t, texts(r), "warn: pair 2:3: GPU 2: too little memory is free")
	require.Len(t, r.Pairs, 2)
	require.Equal(t, []string{"GPU 1>GPU 3", "GPU 3>GPU 1"}, m.order)
}

func TestGPUsInUseAreLeftAlone(t *testing.T) {
	m := box(2)
	m.gpus[1].Mem.Used = m.gpus[1].Mem.Total / 2
	r, status := m.check(t, "--level=copy")
	require.Equal(t, exitFaulty, status)
	require.Contains(t, r.Reason, "of its memory in use")
	require.Contains(t, r.Pairs[0].Error, "GPU 1 is not copied to: others use more than 30 % of its memory")
	require.Empty(t, m.order)
}

func TestWithoutADriver(t *testing.T) {
	m := box(2)
	m.open = fmt.Errorf("%w: libnvidia-ml.so.1 cannot be loaded", nvml.ErrNoDriver)
	r, status := m.check(t, "--level=copy")
	require.Equal(t, exitOK, status)
	require.Equal(t, switchbox.Skipped, r.State)
	require.Equal(t, "no NVIDIA driver: libnvidia-ml.so.1 cannot be loaded", r.Reason)
	r, _ = box(0).check(t)
	require.Equal(t, "the NVIDIA driver shows this process no GPU", r.Reason)
}

func TestDriverThatCannotStart(t *testing.T) {
	m := box(2)
	m.open = errors.New("NVML and the kernel module are of different versions")
	r, status := m.check(t)
	require.Equal(t, exitFaulty, status)
	require.Equal(t, "NVML and the kernel module are of different versions", r.Reason)
	m = box(2)
	m.cuda = &cuda.Error{Call: "cuInit", Code: 802, Name: "CUDA_ERROR_SYSTEM_NOT_READY"}
	r, status = m.check(t, "--level=copy")
	require.Equal(t, exitFaulty, status)
	require.Equal(t, "CUDA cannot be used: cuInit: CUDA_ERROR_SYSTEM_NOT_READY (CUDA error 802)", r.Reason)
	m.cuda = fmt.Errorf("%w: libcuda.so.1: cannot open shared object file", cuda.ErrNoDriver)
	r, status = m.check(t, "--level=copy")
	require.Equal(t, exitOK, status, "an image without libcuda")
	require.Equal(t, switchbox.Skipped, r.State)
	require.Len(t, r.Devices, 2, "what NVML said is not lost")
}

// A GPU that the driver refuses to describe is not sound, at any level.
func TestDeviceThatTheDriverRefuses(t *testing.T) {
	for _, level := range []string{"inventory", "links", "copy"} {
		for method, err := range map[string]error{
			"Mode":   fmt.Errorf("%w: GPU requires reset", switchbox.ErrLost),
			"Memory": errors.New("Unknown Error"),
		} {
			m := box(2)
			m.gpus[1].Fail = map[string]error{method: err}
			r, status := m.check(t, "--level="+level)
			require.Equal(t, exitFaulty, status, level+method)
			require.Contains(t, r.Reason, "GPU 1 ")
			require.Contains(t, r.Reason, method+": "+err.Error(), "in the driver's words")
		}
	}
}

func TestDeviceFilesWithoutAGPU(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia01"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	gone, path := filepath.Join(dir, "nvidia7"), func(n string) string { return filepath.Join(dir, "nvidia"+n) }
	require.NoError(t, syscall.Mkfifo(gone, 0o600))
	for name, c := range map[string]struct {
		listed []int
		want   string
		status int
	}{
		"all are there":     {[]int{0, 1, 2, 7, 10}, "", exitOK},
		"one is missing":    {[]int{0, 1, 7, 10}, "fatal: NVML lists no GPU for " + path("2"), exitFaulty},
		"two are missing":   {[]int{0, 2, 7}, "NVML lists no GPU for " + path("1") + ", " + path("10"), exitFaulty},
		"one has no handle": {[]int{0, -1, 2, 7, 10}, "", exitOK},
		"one of each":       {[]int{0, -1, 7, 10}, path("1") + ", " + path("2") + " but 1", exitFaulty},
		"none is there":     {nil, "NVML lists no GPU for " + path("0") + ", ", exitFaulty},
	} {
		t.Run(name, func(t *testing.T) {
			m := box(len(c.listed))
			m.files, m.listed = dir, c.listed
			r, status := m.check(t, "--level=copy")
			require.Equal(t, c.status, status, texts(r))
			require.Contains(t, texts(r), c.want)
			require.Equal(t, c.want == "", !strings.Contains(texts(r), "NVML lists no GPU"), texts(r))
		})
	}
}

// A device that the kernel does not know either is told: its file may have been left behind.
func TestDeviceFileThatIsStale(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "nvidia0")) // opening a socket fails by ENXIO
	require.NoError(t, err)
	defer l.Close()
	found := unlisted(dir, nil)
	require.Len(t, found, 1)
	require.Equal(t, switchbox.Warn, found[0].Severity)
	require.Contains(t, found[0].Text, "nvidia0 (no such device or address)")
}
