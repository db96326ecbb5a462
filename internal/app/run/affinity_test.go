package run

import (
	"fmt"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/binding"
	"dlrover-run/launcher/numa"
	"dlrover-run/launcher/proc"
)

// gpuHost has two NVIDIA GPUs, of node 0 and of one that the firmware does not tell, and the CPUs of this process in
// node 0.
func gpuHost(t *testing.T, nodes ...int) hostFacts {
	t.Helper()
	cpus, err := binding.Affinity()
	require.NoError(t, err)
	root := fstest.MapFS{
		"sys/devices/system/node/node0/cpulist": {Data: []byte(numa.Format(cpus))},
		"sys/devices/system/node/node1/cpulist": {Data: []byte("60000")},
	}
	for i, node := range nodes {
		address := fmt.Sprintf("0000:0%d:00.0", i)
		root["proc/driver/nvidia/gpus/"+address+"/information"] = &fstest.MapFile{
			Data: fmt.Appendf(nil, "Device Minor: %d\n", i)}
		root[fmt.Sprintf("dev/nvidia%d", i)] = &fstest.MapFile{}
		root["sys/bus/pci/devices/"+address+"/numa_node"] = &fstest.MapFile{Data: fmt.Append(nil, node)}
	}
	h := testHost()
	h.root = root
	return h
}

// about are the warnings with a word in them.
func (s *settings) about(word string) (found []string) {
	for _, w := range s.warnings {
		if strings.Contains(w, word) {
			found = append(found, w)
		}
	}
	return found
}

func TestNUMAAffinity(t *testing.T) {
	s, err := resolvedOn(t, gpuHost(t, 0, -1), "--nproc-per-node=2 --numa-affinity --membind-policy=bind train.py", nil)
	require.NoError(t, err)
	cpus, err := binding.Affinity()
	require.NoError(t, err)
	require.Equal(t, cpus, s.binding.CPUs(0))
	require.Nil(t, s.binding.CPUs(1), "nobody knows where it is")
	require.Len(t, s.about("--numa-affinity"), 1)
	require.Contains(t, s.about("--numa-affinity")[0], "local ranks 1 are not bound; that of 1: its accelerator is 0000:")
	require.Nil(t, s.binding.Memory(1))
	if err := (proc.MemoryPolicy{Mode: proc.BindNode}).Try(); err != nil {
		t.Skipf("SKIPPED: MEMORY POLICIES ARE NOT TESTED: this process may not set a memory policy: %s", err)
	}
	require.Equal(t, proc.MemoryPolicy{Mode: proc.BindNode}, *s.binding.Memory(0))
	require.Empty(t, s.about("membind"))
	p, err := makePlan(&s, testHost())
	require.NoError(t, err)
	require.Equal(t, "bind:0", p.Workers[0].Memory)
	require.Empty(t, p.Workers[1].Memory)
}

func TestMembindPolicy(t *testing.T) {
	for line, want := range map[string]string{
		"--numa-affinity":                        "",
		"--numa-affinity --membind-policy=none":  "",
		"--numa-affinity --membind-policy=local": "--membind-policy=local is neither bind, preferred nor none",
		"--membind-policy=bind":                  "has no effect without --numa-affinity",
		"--numa-affinity --numa-binding=node":    "",
	} {
		s, err := resolvedOn(t, gpuHost(t, 0), line+" train.py", nil)
		require.NoError(t, err)
		if want == "" {
			require.Empty(t, s.about("membind-policy"))
		} else {
			require.Contains(t, strings.Join(s.about("membind-policy"), "\n"), want)
			require.Nil(t, s.binding.Memory)
		}
	}
	s, err := resolvedOn(t, gpuHost(t), "--numa-affinity train.py", nil)
	require.NoError(t, err, "a job without GPUs runs")
	require.Contains(t, s.about("numa")[0], "--numa-affinity: workers are not bound: ")
	require.Nil(t, s.binding.CPUs)
}

// The node of a GPU may have no memory, or none for this container.
func TestNUMAAffinityWithoutMemory(t *testing.T) {
	h := gpuHost(t, 1000)
	cpus, err := binding.Affinity()
	require.NoError(t, err)
	h.root.(fstest.MapFS)["sys/devices/system/node/node1000/cpulist"] = &fstest.MapFile{Data: []byte(numa.Format(cpus))}
	s, err := resolvedOn(t, h, "--numa-affinity train.py", nil)
	require.NoError(t, err)
	require.Equal(t, cpus, s.binding.CPUs(0))
	require.Nil(t, s.binding.Memory(0))
	require.Len(t, s.about("--membind-policy=preferred: only CPUs are bound"), 1)
}

func TestOptionsWithoutEffect(t *testing.T) {
	s, err := resolved(t, "--auto_tunning --ucp_device_type=gpu train.py", nil)
	require.NoError(t, err)
	require.Len(t, s.about("--auto-tunning has no effect"), 1)
	require.Len(t, s.about("--ucp-device-type=gpu has no effect"), 1)
	s, err = resolved(t, "train.py", map[string]string{"PET_AUTO_TUNNING": "1"})
	require.NoError(t, err)
	require.Len(t, s.about("--auto-tunning has no effect"), 1)
	s, err = resolved(t, "train.py", nil)
	require.NoError(t, err)
	require.Empty(t, s.about("effect"))
}
