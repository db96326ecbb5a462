package nodechecks

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature/featuretest"
	"dlrover-run/internal/app/service"
	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
	"dlrover-run/netcheck/python"
	"dlrover-run/switchbox"
)

// openedChecks prepares the checks of a command line on a host with n devices of a kind.
func openedChecks(t *testing.T, line string, n int, kind string) (*nodeChecks, error) {
	t.Helper()
	o := featuretest.Read(t, line, nil)
	o.Devices, o.Kind = n, kind
	k, err := read(o)
	require.NoError(t, err)
	return openNodeChecks(&featuretest.Node{Of: featuretest.Job()}, k)
}

func TestWhatDevicesAreChecked(t *testing.T) {
	skipped := func(line string, n int, kind string) string {
		c, err := openedChecks(t, line, n, kind)
		require.NoError(t, err)
		if c.devices == nil {
			return ""
		}
		r := c.devices(t.Context())
		require.Equal(t, switchbox.Skipped, r.State)
		return r.Reason
	}
	require.Empty(t, skipped("--network-check train.py", 0, ""))
	require.Empty(t, skipped("--network-check train.py", 8, "metax"), "only --switchbox-check needs MetaX' tool")
	require.Empty(t, skipped("--network-check train.py", 8, "ascend"))
	require.Equal(t, noDevices, skipped("--switchbox-check train.py", 0, ""))
	require.Equal(t, noDevices, skipped("--switchbox-check --accelerator=cpu train.py", 8, "cuda"))
	require.Contains(t, skipped("--switchbox-check train.py", 8, "ascend"), "devices of the kind ascend")
	require.NotNil(t, must(openedChecks(t, "--network-check train.py", 8, "cuda")).devices)

	// The named kind is tested, also where detection has found another.
	t.Setenv("DLROVER_SYSFS_ROOT", filepath.Join(featuretest.MetaxTree(t, 0, 2), "host/sys"))
	t.Setenv("SWITCHBOX_CHECK_TOOL_PATH", "/no/such/tool")
	const metax = "--switchbox-check --accelerator=metax-tech.com/gpu --box-pairs=0:1 --min-channels=1 train.py"
	require.Contains(t, skipped(metax, 0, ""), "/no/such/tool cannot be run")
	require.NotNil(t, must(openedChecks(t, "--network-check --accelerator=nvidia.com/gpu train.py", 0, "")).devices)
	_, err := openedChecks(t, strings.Replace(metax, "0:1", "0:7", 1), 0, "")
	require.ErrorContains(t, err, "--box-pairs: 0:7 names a device that is not here; this node has 0, 1")
}

// gpucheck knows the default pairs; only others are passed to it.
func TestPairsOfGpucheck(t *testing.T) {
	for line, want := range map[string]string{
		"--switchbox-check":                              "",
		"--switchbox-check --box-pairs=ring":             "--pairs=ring",
		"--switchbox-check --box-pairs 0:1 2:4 train.py": "--pairs=0:1,2:4",
	} {
		c := must(openedChecks(t, line+" train.py", 8, "cuda"))
		got := ""
		for _, arg := range c.gpucheckArgs() {
			if strings.HasPrefix(arg, "--pairs") {
				got = arg
			}
		}
		require.Equal(t, want, got, line)
	}
}

// A pair that the user has named and that this node has not is an error of the command line; a default one is not.
func TestPairsThatAreNotHere(t *testing.T) {
	_, err := openedChecks(t, "--switchbox-check --box-pairs=0:1 --min-channels=1 train.py", 0, "")
	require.ErrorContains(t, err, "--box-pairs: 0:1 names a device that is not here; this node has none: "+noDevices)
	var why *launcher.ReasonError
	require.ErrorAs(t, err, &why)
	require.Equal(t, policy.Usage, why.Reason)
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// What DLRover's test does not know is named if it was asked for, and what this node's own examination heeds is not.
func TestOptionsOfAPythonCheckThatCannotAct(t *testing.T) {
	for line, want := range map[string]string{
		"--network-check": "", "--precheck=1 --exclude-straggler": "", "--network-check --check-action=report": "",
		"--network-check --check-ttl=600 --check-timeout=1m": "",
		"--network-check --comm-perf-test":                   "--comm-perf-test",
		"--precheck=2 --check-ttl=run":                       "--comm-perf-test --check-ttl=run",
		"--precheck=1 --check-ttl=1h --check-timeout=30":     "--check-ttl=1h0m0s --check-timeout=30s",
		"--health-check=true --check-ttl=1h":                 "",
	} {
		c, err := openedChecks(t, line+" train.py", 0, "")
		require.NoError(t, err)
		c.noPy = errors.New("no python3") // which is asked for last
		k, err := c.pythonCheck(t.Context())
		require.Equal(t, k.Test != nil, errors.Is(err, c.noPy), line)
		require.Equal(t, want, k.Inert, line)
	}
}

func TestTorchDevices(t *testing.T) {
	for kind, want := range map[string]python.Device{
		"": python.CPU, "cuda": python.CUDA, "rocm": python.CUDA, "metax": python.CUDA, "ascend": python.NPU,
		"musa": python.MUSA,
	} {
		require.Equal(t, want, torchDevice(kind), kind)
	}
}

// What has not been prepared cannot pass, and does not panic.
func TestChecksThatCouldNotBePrepared(t *testing.T) {
	c, err := openedChecks(t, "--network-check train.py", 0, "")
	require.NoError(t, err)
	_, err = c.check(context.Background(), launcher.CheckRequest{})
	require.ErrorContains(t, err, "see its log")
	require.Empty(t, c.doubt(t.Context()))
	c.noPy = errors.New("no python3")
	require.Equal(t, "no python3", c.noTorch())
}

// Others depend on who serves the rendezvous: it stays without workers.
func TestWhoStaysWhenBarred(t *testing.T) {
	c, err := openedChecks(t, "--network-check train.py", 0, "")
	require.NoError(t, err)
	n := c.node.(*featuretest.Node)
	n.Of.Params.Max = 2
	for _, x := range []struct{ local, served, stays bool }{
		{false, true, true}, {false, false, false}, {true, true, false},
	} {
		n.Of.Local, n.At = x.local, featuretest.Rendezvous{}
		if x.served {
			n.At = featuretest.Rendezvous{Service: &service.Service{}}
		}
		var cfg launcher.Config
		c.configure(&cfg)
		require.Equal(t, x.stays, cfg.StayWhenBarred, "%v", x)
	}
}

func TestAccelerators(t *testing.T) {
	for line, want := range map[string]checkSettings{
		"":                      {gpus: 4, kind: "cuda"},
		"--nproc-per-node=gpu":  {gpus: 4, kind: "cuda", wants: true},
		"--nproc-per-node=auto": {gpus: 4, kind: "cuda"},
		"--accelerator=cpu":     {},
		"--nproc-per-node=2 --accelerator=nvidia.com/gpu": {gpus: 4, kind: "cuda", wants: true},
	} {
		o := featuretest.Read(t, "--network-check "+line+" train.py", nil)
		o.Devices, o.Kind = 4, "cuda"
		k, err := read(o)
		require.NoError(t, err)
		require.Equal(t, want, checkSettings{gpus: k.gpus, kind: k.kind, wants: k.wants}, line)
	}
	for line, want := range map[string]bool{"--accelerator=nvidia.com/gpu": true, "": false} {
		o := featuretest.Read(t, "--network-check "+line+" train.py", nil)
		k, err := read(o)
		require.NoError(t, err)
		require.Equal(t, want, k.wants)
		o.Of.Bare = true
		k, err = read(o)
		require.NoError(t, err)
		require.False(t, k.wants, "a node without workers needs none")
	}
	n := &featuretest.Node{Of: featuretest.Job()}
	require.Empty(t, (&nodeChecks{node: n}).noTorch())
	n.Of.Bare = true
	require.NotEmpty(t, (&nodeChecks{node: n}).noTorch())
}
