package shm

import (
	"math"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

func TestFreeMemory(t *testing.T) {
	const (
		v2       = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		v1       = "33 32 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
		v1docker = "33 32 0:28 /docker/ab /sys/fs/cgroup/memory ro,nosuid master:11 - cgroup cgroup rw,memory\n"
		other    = "34 32 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\nbroken\n1 2 3 - cgroup2 x\n"
	)
	for _, tc := range []struct {
		name  string
		files map[string]string
		want  int64
	}{
		{"nothing known", nil, math.MaxInt64},
		{"memory of the machine", map[string]string{"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  5 kB\n"}, 5120},
		{"v2", map[string]string{
			"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": other + v2,
			"sys/fs/cgroup/a/b/memory.max": "1000\n", "sys/fs/cgroup/a/b/memory.current": "300\n",
		}, 700},
		{"v2, machine has less", map[string]string{
			"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": v2, "proc/meminfo": "MemAvailable: 5 kB\n",
			"sys/fs/cgroup/a/memory.max": "10000\n", "sys/fs/cgroup/a/memory.current": "300\n",
		}, 5120},
		{"v2, an ancestor has less", map[string]string{
			"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/a/b/memory.max": "1000\n", "sys/fs/cgroup/a/b/memory.current": "300\n",
			"sys/fs/cgroup/a/memory.max": "2000\n", "sys/fs/cgroup/a/memory.current": "1900\n",
		}, 100},
		{"v2, no limit but at the root of the container", map[string]string{
			"proc/self/cgroup": "0::/../../x\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "300\n",
		}, 700},
		{"v2, unlimited", map[string]string{
			"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": v2,
			"sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "300\n",
		}, math.MaxInt64},
		{"v2, cache can be reclaimed", map[string]string{
			"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": v2, "sys/fs/cgroup/a/memory.max": "1000\n",
			"sys/fs/cgroup/a/memory.current": "900\n", "sys/fs/cgroup/a/memory.stat": "anon 100\ninactive_file 500\n",
		}, 600},
		{"v1 beside an empty v2", map[string]string{
			"proc/self/cgroup": "9:name=systemd:/\n4:hugetlb,memory:/job\n0::/\n", "proc/self/mountinfo": v1 + v2,
			"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000\n",
			"sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1000\n",
			"sys/fs/cgroup/memory/job/memory.stat":           "inactive_file 1\ntotal_inactive_file 10\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":     "9223372036854771712\n",
			"sys/fs/cgroup/memory/memory.usage_in_bytes":     "7000\n",
		}, 4010},
		{"v1 in a container", map[string]string{
			"proc/self/cgroup": "4:memory:/docker/ab/sub\n", "proc/self/mountinfo": v1docker,
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
			"sys/fs/cgroup/memory/sub/memory.limit_in_bytes": "3000\n",
			"sys/fs/cgroup/memory/sub/memory.usage_in_bytes": "1000\n",
		}, 2000},
		{"v1, group not visible", map[string]string{
			"proc/self/cgroup": "4:memory:/docker/abc\n", "proc/self/mountinfo": v1docker,
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
		}, 4000},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := fstest.MapFS{}
			for name, text := range tc.files {
				root[name] = &fstest.MapFile{Data: []byte(text)}
			}
			got, err := freeMemory(root)
			require.NoError(t, err)
			require.Equal(t, tc.want, got)
		})
	}
}

func FuzzMemoryGroups(f *testing.F) {
	f.Add("0::/a\n", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	f.Fuzz(func(t *testing.T, groups, mounts string) {
		for _, g := range memoryGroups(groups, mounts) {
			require.Equal(t, int64(math.MaxInt64), g.free(fstest.MapFS{}))
		}
	})
}
