package proc

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	procStat = "cpu  10 20 30 400 50 6 7 80 9 9\ncpu0 1 2 3 4 5 6 7 8 9 9\n"
	snmp     = "Ip: Forwarding\nIp: 1\nTcp: RtoAlgorithm MaxConn OutSegs RetransSegs InErrs\nTcp: 1 -1 5000 20 0\n" +
		"Udp: OutSegs\nUdp: 9\n"
)

func strainAt(root string) Strain {
	return ReadStrain(filepath.Join(root, "proc"), filepath.Join(root, "cg"), filepath.Join(root, "sys"))
}

func TestStrain(t *testing.T) {
	files := map[string]string{
		"proc/self/mountinfo": mountsV2, "proc/self/cgroup": "0::/a/b\n", "proc/stat": procStat, "proc/net/snmp": snmp,
		"proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=3000000\nfull avg10=0.00 total=1\n",
		"proc/pressure/io":     "some avg10=0.00 avg60=0.00 avg300=0.00 total=4000000\n",
		"sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count":  "3\n",
		"sys/devices/system/cpu/cpu11/thermal_throttle/core_throttle_count": "4\n",
		"cg/a/b/io.pressure": "some avg10=9.00 avg60=0.00 avg300=0.00 total=2500000\nfull total=7\n",
	}
	root := tree(t, files)
	require.Equal(t, Strain{Ticks: 603, Stolen: 80, Memory: 3 * time.Second, IO: 2500 * time.Millisecond,
		Sent: 5000, Resent: 20, Hot: 7}, strainAt(root))
	require.Zero(t, strainAt(filepath.Join(root, "nowhere")))
	for _, name := range []string{"proc/stat", "proc/net/snmp", "proc/pressure/memory", "cg/a/b/io.pressure",
		"sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count",
		"sys/devices/system/cpu/cpu11/thermal_throttle/core_throttle_count"} {
		require.NoError(t, os.WriteFile(filepath.Join(root, name), []byte("Tcp: x\ncpu Tcp: 1 2\nsome total=\x00\n"), 0o600))
	}
	require.Zero(t, strainAt(root))
	require.Positive(t, ReadStrain("", "", "").Ticks)
}

func TestQuotas(t *testing.T) {
	const stat = "nr_periods 100\nnr_throttled 40\nthrottled_usec 7\n"
	v1 := tree(t, map[string]string{
		"proc/self/mountinfo": mountsV1, "proc/7/cgroup": "1:cpu,cpuacct:/job/x\n0::/\n", "proc/self/cgroup": "0::/\n",
		"cg/cpu,cpuacct/job/x/cpu.stat": stat, "cg/cpu,cpuacct/job/cpu.stat": "nr_periods 0\nnr_throttled 0\n",
		"cg/cpu,cpuacct/cpu.stat": "nr_periods 9\nnr_throttled 0\n",
	})
	require.Equal(t, map[string]Periods{filepath.Join(v1, "cg/cpu,cpuacct/job/x"): {100, 40},
		filepath.Join(v1, "cg/cpu,cpuacct"): {9, 0}}, Quotas(filepath.Join(v1, "proc"), filepath.Join(v1, "cg"), 7))
	v2 := tree(t, map[string]string{
		"proc/self/mountinfo": mountsV2, "proc/7/cgroup": "0::/pod/dlrover-1\n", "cg/pod/cpu.stat": "usage_usec 5\n" + stat,
		"cg/pod/dlrover-1/cpu.stat": "usage_usec 3\n",
	})
	require.Equal(t, map[string]Periods{filepath.Join(v2, "cg/pod"): {100, 40}},
		Quotas(filepath.Join(v2, "proc"), filepath.Join(v2, "cg"), 7))
	require.Empty(t, Quotas(filepath.Join(v2, "proc"), filepath.Join(v2, "cg"), 8), "it is gone")
}
