package preflight

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSharedMemory(t *testing.T) {
	require.Empty(t, SharedMemory(64<<20, 1))
	require.Empty(t, SharedMemory(1<<40, 4096))
	require.Contains(t, SharedMemory(64<<20, 2), "/dev/shm has 64 MiB left for 2 workers")
	require.Contains(t, SharedMemory(0, 1), "--shm-size")
}

func TestDevices(t *testing.T) {
	require.Equal(t, []string{"/dev/davinci3", "/dev/nvidia0", "/dev/nvidia2", "/dev/nvidia12"},
		Devices([]string{"null", "nvidia0", "nvidia12", "nvidia2", "nvidiactl", "nvidia-uvm",
			"davinci3", "davinci_manager", "nvidia"},
			[]string{"renderD128", "card0"}))
	require.Equal(t, []string{"/dev/dri/renderD128"}, Devices([]string{"mxcd"}, []string{"renderD128", "card0"}))
	require.Empty(t, Devices(nil, nil))
}

func TestChosen(t *testing.T) {
	all := []string{"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia3"}
	for list, want := range map[string][]string{
		"0": all[:1], "2, 0": {all[0], all[2]}, "": nil, "GPU-1234": nil, "7": nil, "-1": nil,
	} {
		require.Equal(t, want, Chosen(all, func(n string) (string, bool) { return list, n == "CUDA_VISIBLE_DEVICES" }), list)
	}
	require.Equal(t, all, Chosen(all, func(string) (string, bool) { return "", false }))
}

func TestBusy(t *testing.T) {
	devices := []string{"/dev/nvidia0", "/dev/nvidia1", "/dev/davinci0"}
	all := []Process{
		{PID: 1, Name: "init", Files: []string{"/dev/null"}},
		{PID: 5, Parent: 1, Name: "nvidia-persiste", Files: []string{"/dev/nvidia0", "/dev/nvidia-uvm"}},
		{PID: 6, Parent: 1, Name: "python3", Files: []string{"/dev/nvidia0"}}, // looks at it by NVML
		{PID: 10, Parent: 1, Name: "dlrover-run"},
		{PID: 11, Parent: 10, Name: "launcher"},
		{PID: 12, Parent: 11, Name: "python3", Files: []string{"/dev/nvidia1", "/dev/nvidia-uvm"}},
	}
	require.Empty(t, Busy(devices, all, 10), "those of this launcher, and those that only look")
	all = append(all, Process{PID: 20, Parent: 1, Name: "python3", Command: "python3 other.py",
		Files: []string{"/dev/nvidia1", "/dev/nvidia-uvm", "/dev/nvidia1"}})
	require.Equal(t, "/dev/nvidia1 is in use by another program: pid 20 (python3 other.py); "+
		"its memory and time are missing to this job", Busy(devices, all, 10))
	for pid := range 5 {
		all = append(all, Process{PID: 30 + pid, Parent: 1, Name: "worker", Files: []string{"/dev/davinci0"}})
	}
	require.Contains(t, Busy(devices, all, 10), "/dev/davinci0, /dev/nvidia1 are in use by another program: "+
		"pid 20 (python3 other.py), pid 30 (worker), pid 31 (worker) and 3 more")
	require.Contains(t, Busy(devices, []Process{{PID: 2, Parent: 3, Files: devices[2:]}, {PID: 3, Parent: 2}}, 10),
		"pid 2", "a loop of parents has an end")
	require.Less(t, len(Process{Command: strings.Repeat("x", 1000)}.String()), 120)
}

const tables = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 111 1 0 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1 0 100 0 0 10 0
   2: 0100007F:1F90 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 333 1 0 100 0 0 10 0
   3: 00000000000000000000000000000000:1F91 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 444 1
`

func TestListeners(t *testing.T) {
	any, loopback := netip.IPv4Unspecified(), netip.MustParseAddr("127.0.0.1")
	require.Equal(t, []string{"socket:[111]"}, Listeners(tables, any, 8080))
	require.Equal(t, []string{"socket:[111]"}, Listeners(tables, loopback, 8080))
	require.Empty(t, Listeners(tables, netip.MustParseAddr("10.0.0.1"), 8080))
	require.Equal(t, []string{"socket:[222]"}, Listeners(tables, loopback, 22))
	require.Equal(t, []string{"socket:[444]"}, Listeners(tables, loopback, 8081))
	require.Equal(t, []string{"pid 7 (a)"}, Holders([]Process{
		{PID: 7, Name: "a", Files: []string{"x", "socket:[111]"}}, {PID: 8, Name: "b", Files: []string{"socket:[222]"}},
	}, []string{"socket:[111]"}))
}

func FuzzListeners(f *testing.F) {
	f.Add(tables, 8080)
	f.Fuzz(func(t *testing.T, table string, port int) {
		for _, file := range Listeners(table, netip.IPv4Unspecified(), port) {
			require.True(t, strings.HasPrefix(file, "socket:["))
		}
	})
}
