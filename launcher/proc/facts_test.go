package proc

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// tree writes files below a new directory; a name that ends in / is a directory.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if strings.HasSuffix(name, "/") {
			require.NoError(t, os.MkdirAll(path, 0o755))
			continue
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	return root
}

const (
	mountsV1 = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n" +
		"35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
		"41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
	mountsV2        = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
	mountsV2Subtree = "30 23 0:26 /kubepods/pod1/c1 /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
)

func ownMemory(procRoot, cgroupRoot string) (*memoryCgroup, error) {
	c, err := ownCgroups(procRoot, cgroupRoot)
	if err != nil {
		return nil, err
	}
	return c.memory()
}

func TestOwnMemory(t *testing.T) {
	v1 := func(limit string) map[string]string {
		return map[string]string{
			"proc/self/mountinfo":                          mountsV1,
			"proc/self/cgroup":                             "4:memory:/job/step\n1:cpu,cpuacct:/\n0::/\n",
			"cg/memory/job/step/memory.oom_control":        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
			"cg/memory/job/step/memory.limit_in_bytes":     limit,
			"cg/memory/job/step/memory.max_usage_in_bytes": "900\n",
			"cg/memory/job/memory.limit_in_bytes":          "5000\n",
			"cg/memory/job/memory.max_usage_in_bytes":      "4000\n",
			"cg/memory/memory.limit_in_bytes":              "9223372036854771712\n",
		}
	}
	v2 := map[string]string{
		"proc/self/mountinfo":   mountsV2,
		"proc/self/cgroup":      "0::/a/b\n",
		"cg/a/b/cgroup.procs":   "",
		"cg/a/memory.events":    "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n",
		"cg/a/memory.max":       "max\n",
		"cg/a/memory.peak":      "123\n",
		"cg/cgroup.controllers": "",
	}
	limited := maps.Clone(v2)
	limited["cg/a/memory.max"] = "2048\n"
	noPeak := maps.Clone(limited)
	delete(noPeak, "cg/a/memory.peak")
	container := map[string]string{
		"proc/self/mountinfo": mountsV2Subtree,
		"proc/self/cgroup":    "0::/kubepods/pod1/c1\n",
		"cg/memory.events":    "oom_kill 1\n",
		"cg/memory.max":       "64\n",
		"cg/memory.peak":      "60\n",
	}
	tests := []struct {
		name  string
		files map[string]string
		path  string
		want  MemoryState
	}{
		{"v1 own limit", v1("1000\n"), "cg/memory/job/step", MemoryState{3, 1000, 900}},
		{"v1 limit of an ancestor", v1("9223372036854771712\n"), "cg/memory/job/step", MemoryState{3, 5000, 4000}},
		{"v2 controller on above", v2, "cg/a", MemoryState{2, 0, 123}},
		{"v2 limit", limited, "cg/a", MemoryState{2, 2048, 123}},
		{"v2 before memory.peak", noPeak, "cg/a", MemoryState{2, 2048, 0}},
		{"v2 container", container, "cg", MemoryState{1, 64, 60}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			root := tree(t, tt.files)
			m, err := ownMemory(filepath.Join(root, "proc"), filepath.Join(root, "cg"))
			require.NoError(t, err)
			require.Equal(t, filepath.Join(root, tt.path), m.Path())
			got, err := m.Read()
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
		})
	}
	t.Run("none", func(t *testing.T) {
		root := tree(t, map[string]string{"proc/self/mountinfo": "", "proc/self/cgroup": ""})
		_, err := ownMemory(filepath.Join(root, "proc"), "")
		require.ErrorContains(t, err, "no memory cgroup")
		_, err = ownMemory(filepath.Join(root, "missing"), "")
		require.ErrorIs(t, err, os.ErrNotExist)
	})
}

func TestCPUCount(t *testing.T) {
	all := affinityCount()
	v1 := func(quota string) map[string]string {
		return map[string]string{
			"proc/self/mountinfo": mountsV1, "proc/self/cgroup": "1:cpu,cpuacct:/x\n",
			"cg/cpu,cpuacct/x/cpu.cfs_quota_us": quota, "cg/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
		}
	}
	v2 := func(own, above string) map[string]string {
		return map[string]string{
			"proc/self/mountinfo": mountsV2, "proc/self/cgroup": "0::/a/b\n",
			"cg/a/b/cpu.max": own, "cg/a/cpu.max": above,
		}
	}
	tests := []struct {
		name  string
		files map[string]string
		want  int
	}{
		{"no cgroup", nil, all},
		{"v1 none", v1("-1\n"), all},
		{"v1 half a CPU", v1("50000\n"), 1},
		{"v1 exactly one", v1("100000\n"), 1},
		{"v1 one and a bit", v1("100001\n"), min(2, all)},
		{"v2 none", v2("max 100000\n", "max 100000\n"), all},
		{"v2 own", v2("100000 100000\n", "max 100000\n"), 1},
		{"v2 ancestor", v2("max 100000\n", "20000 100000\n"), 1},
		{"v2 more than there are", v2("99900000 100000\n", "max 100000\n"), all},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			root := tree(t, tt.files)
			require.Equal(t, tt.want, CPUCount(filepath.Join(root, "proc"), filepath.Join(root, "cg")))
		})
	}
	require.Positive(t, CPUCount("", ""))
}

func TestLimit(t *testing.T) {
	require.Equal(t, 2.5, limit(64, "250000 100000"))
	require.Equal(t, 0.33, limit(64, "33000 100000"))
	require.Equal(t, 64., limit(64, "9223372036854775807 1"))
	require.Equal(t, 64., limit(64, "0 100000"))
	require.Equal(t, 64., limit(64, "garbage"))
}

func TestGPUCount(t *testing.T) {
	devices := func(names ...string) map[string]string {
		files := map[string]string{"dev/": ""}
		for _, n := range names {
			files[n] = ""
		}
		return files
	}
	nvidia := devices("dev/nvidia0",
		"dev/nvidia1", "dev/nvidia2", "dev/nvidia3", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-caps/nvidia-cap1")
	rocm := devices("dev/kfd", "dev/dri/renderD128", "dev/dri/renderD129", "dev/dri/renderD130", "dev/dri/card0")
	kfd := maps.Clone(rocm) // renderD130 belongs to another maker, renderD131 to another container
	for i, minor := range []string{"0", "128", "129", "131"} {
		kfd[fmt.Sprintf("sys/class/kfd/kfd/topology/nodes/%d/properties",
			i)] = "simd_count 1\ndrm_render_minor " + minor + "\n"
	}
	ascend := devices("dev/davinci4", "dev/davinci5", "dev/davinci_manager")
	metax := devices("dev/mxcd", "dev/dri/renderD128", "dev/dri/renderD129", "dev/dri/card0")
	layout := func(driver string, devices int) map[string]string {
		files := maps.Clone(metax) // renderD130 is a display adapter's
		files["dev/dri/renderD130"] = ""
		for i := range 2 + devices {
			node := fmt.Sprintf("sys/class/%s/mxcd/layout/nodes/%d/properties", driver, i)
			files[node] = "cpu_cores_count 64\n"
			if i >= 2 {
				files[node] = fmt.Sprintf("simd_count 416\nmgpu_id %d\n", i-2)
			}
		}
		return files
	}
	tests := []struct {
		name  string
		files map[string]string
		env   string
		count int
		kind  string
	}{
		{"nothing", devices(), "", 0, ""},
		{"display adapter only", devices("dev/dri/renderD128", "dev/dri/card0"), "", 0, ""},
		{"cuda", nvidia, "", 4, "cuda"},
		{"cuda empty", nvidia, "CUDA_VISIBLE_DEVICES=", 0, "cuda"},
		{"cuda none", nvidia, "CUDA_VISIBLE_DEVICES=-1", 0, "cuda"},
		{"cuda NoDevFiles", nvidia, "CUDA_VISIBLE_DEVICES=NoDevFiles", 0, "cuda"},
		{"cuda list", nvidia, "CUDA_VISIBLE_DEVICES=3, 1", 2, "cuda"},
		{"cuda stops at -1", nvidia, "CUDA_VISIBLE_DEVICES=0,-1,1", 1, "cuda"},
		{"cuda stops at unknown", nvidia, "CUDA_VISIBLE_DEVICES=0,1,4,2", 2, "cuda"},
		{"cuda stops at word", nvidia, "CUDA_VISIBLE_DEVICES=0,x,1", 1, "cuda"},
		{"cuda strtoul", nvidia, "CUDA_VISIBLE_DEVICES=1gpu2,+2ampere", 2, "cuda"},
		{"cuda twice", nvidia, "CUDA_VISIBLE_DEVICES=0,1,0", 0, "cuda"},
		{"cuda uuids", nvidia, "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2,3", 2, "cuda"},
		{"cuda uuid twice", nvidia, "CUDA_VISIBLE_DEVICES=GPU-1,GPU-1", 0, "cuda"},
		{"cuda more uuids than devices", nvidia, "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2,GPU-3,GPU-4,GPU-5", 4, "cuda"},
		{"cuda MIG", nvidia, "CUDA_VISIBLE_DEVICES=MIG-1,MIG-2", 1, "cuda"},
		{"container variable", nvidia, "NVIDIA_VISIBLE_DEVICES=void", 4, "cuda"},
		{"cuda ignores HIP", nvidia, "HIP_VISIBLE_DEVICES=0", 4, "cuda"},
		{"rocm", rocm, "", 3, "rocm"},
		{"rocm topology", kfd, "", 2, "rocm"},
		{"rocm HIP", rocm, "HIP_VISIBLE_DEVICES=1", 1, "rocm"},
		{"rocm CUDA's variable", rocm, "CUDA_VISIBLE_DEVICES=0", 1, "rocm"},
		{"rocm HIP wins over CUDA", rocm, "HIP_VISIBLE_DEVICES=0,1 CUDA_VISIBLE_DEVICES=0", 2, "rocm"},
		{"rocm HIP within ROCR", rocm, "ROCR_VISIBLE_DEVICES=1,2 HIP_VISIBLE_DEVICES=0,1,2", 2, "rocm"},
		{"rocm none", rocm, "ROCR_VISIBLE_DEVICES=", 0, "rocm"},
		{"ascend", ascend, "", 2, "ascend"},
		{"ascend one", ascend, "ASCEND_RT_VISIBLE_DEVICES=1", 1, "ascend"},
		{"metax", metax, "", 2, "metax"},
		{"metax one", metax, "MACA_VISIBLE_DEVICES=0", 1, "metax"},
		{"metax layout", layout("mxcd", 2), "", 2, "metax"},
		{"metax layout, other root", layout("metax", 2), "", 2, "metax"},
		{"metax layout of the host", layout("mxcd", 8), "", 3, "metax"},
		{"metax layout, one visible", layout("mxcd", 2), "MACA_VISIBLE_DEVICES=1", 1, "metax"},
		{"metax layout, none visible", layout("mxcd", 2), "MACA_VISIBLE_DEVICES=2", 0, "metax"},
		{"metax layout, CUDA's variable", layout("mxcd", 2), "CUDA_VISIBLE_DEVICES=0", 1, "metax"},
		{"metax layout, its own variable wins", layout("mxcd", 2), "MACA_VISIBLE_DEVICES=0,1 CUDA_VISIBLE_DEVICES=0", 2,
			"metax"},
		{"no MetaX device in the layout", layout("mxcd", 0), "", 0, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			env := map[string]string{}
			for kv := range strings.SplitSeq(tt.env, " ") {
				if k, v, ok := strings.Cut(kv, "="); ok {
					env[k] = v
				}
			}
			if strings.Contains(tt.env, ", ") {
				env = map[string]string{"CUDA_VISIBLE_DEVICES": "3, 1"}
			}
			n, kind := GPUCount(tree(t, tt.files), func(k string) (string, bool) { v, ok := env[k]; return v, ok })
			require.Equal(t, tt.count, n)
			require.Equal(t, tt.kind, kind)
		})
	}
}

func TestSignalNames(t *testing.T) {
	seen := map[string]bool{}
	for n := syscall.Signal(1); n <= 64; n++ {
		if n == 32 || n == 33 {
			continue // glibc's own, without a name
		}
		name := SignalName(n)
		require.True(t, strings.HasPrefix(name, "SIG"), name)
		require.False(t, seen[name], "%s twice", name)
		seen[name] = true
	}
	require.Equal(t, "SIGKILL", SignalName(9))
	require.Equal(t, "SIGRTMIN+30", SignalName(64))
	require.Equal(t, "signal 32", SignalName(32))
	require.Equal(t, "signal 99", SignalName(99))
}

func TestParseMountinfo(t *testing.T) {
	got := parseMountinfo(mountsV1 +
		`50 1 0:9 /a\040b /mnt/c\134d rw master:1 - cgroup2 none rw` + "\nbad line\n- cgroup2\n")
	require.Equal(t, []cgroupMount{
		{"/", "/sys/fs/cgroup/cpu,cpuacct", []string{"rw", "cpu", "cpuacct"}},
		{"/", "/sys/fs/cgroup/memory", []string{"rw", "memory"}},
		{"/", "/sys/fs/cgroup/unified", []string{unified}},
		{"/a b", `/mnt/c\d`, []string{unified}},
	}, got)
}

func TestCgroupDirs(t *testing.T) {
	tests := []struct {
		name, mounts, own string
		want              []string
	}{
		{"root", mountsV2, "0::/\n", []string{"/sys/fs/cgroup"}},
		{"nested", mountsV2, "0::/a/b:c\n", []string{"/sys/fs/cgroup/a/b:c", "/sys/fs/cgroup/a", "/sys/fs/cgroup"}},
		{"hybrid", mountsV1, "0::/a\n", []string{"/sys/fs/cgroup/unified/a", "/sys/fs/cgroup/unified"}},
		{"subtree", mountsV2Subtree, "0::/kubepods/pod1/c1/x\n", []string{"/sys/fs/cgroup/x", "/sys/fs/cgroup"}},
		{"not visible", mountsV2Subtree, "0::/kubepods/pod1/c10\n", nil},
		{"outside of the namespace", mountsV2, "0::/../x\n", nil},
		{"not mounted", "", "0::/\n", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := cgroups{mounts: parseMountinfo(tt.mounts), own: parseOwnCgroups(tt.own)}
			require.Equal(t, tt.want, c.dirs(unified))
		})
	}
}

func TestUnique(t *testing.T) {
	require.Equal(t, []string{"A=2", "B=x=y", "C"}, unique([]string{"A=1", "B=x=y", "C", "A=2"}))
}

func FuzzCgroups(f *testing.F) {
	f.Add(mountsV1, "4:memory:/job\n0::/\n")
	f.Add(mountsV2Subtree, "0::/kubepods/pod1/c1/../x\n")
	f.Fuzz(func(t *testing.T, mounts, own string) {
		c := cgroups{mounts: parseMountinfo(mounts), own: parseOwnCgroups(own)}
		for controller := range c.own {
			for _, dir := range c.dirs(controller) {
				require.True(t, slices.ContainsFunc(c.mounts, func(m cgroupMount) bool {
					rel, err := filepath.Rel(m.point, dir)
					return err == nil && !strings.HasPrefix(rel, "..")
				}), "%s is below no mount", dir)
			}
		}
	})
}

func FuzzSelected(f *testing.F) {
	f.Add("0,1,2", 4)
	f.Add("GPU-1,GPU-2", 1)
	f.Add("-1", 8)
	f.Fuzz(func(t *testing.T, list string, n int) {
		n = max(n, 0) % 64
		got := selected(list, n)
		require.True(t, got >= 0 && got <= max(n, 1))
	})
}

func FuzzLimit(f *testing.F) {
	f.Add(64, "250000 100000")
	f.Fuzz(func(t *testing.T, n int, quota string) {
		n = max(n, 1)
		got := limit(float64(n), quota)
		require.True(t, got > 0 && got <= float64(n))
	})
}

func FuzzMemoryNumbers(f *testing.F) {
	f.Add("oom 1\noom_kill 2\n")
	f.Fuzz(func(t *testing.T, text string) { require.GreaterOrEqual(t, parseKey(text, "oom_kill"), int64(0)) })
}

// The supervisor knows the cgroup as soon as somebody asks.
func TestSupervisorsMemory(t *testing.T) {
	s, err := New(Config{Logger: quiet()})
	require.NoError(t, err)
	defer s.Close()
	got := s.Memory()
	want, err := ownMemory("", "")
	if err != nil {
		require.Nil(t, got)
		return
	}
	require.Equal(t, want, got)
}
