package numa

import (
	"fmt"
	"path"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine describes a fake /sys. Thread t of core c is CPU t*cores+c; sockets, nodes and caches take the cores in
// order.
type machine struct {
	sockets, nodes, cores, threads int
	caches                         int   // L3 caches; 0 = no cache information
	gpus                           []int // numa_node of each
	offline                        []int
}

func (m machine) tree() fstest.MapFS {
	tree := fstest.MapFS{}
	put := func(content any, elem ...string) {
		tree[path.Join(elem...)] = &fstest.MapFile{Data: fmt.Appendln(nil, content)}
	}
	put("0", nodeDir, "possible")
	for node := range m.nodes {
		put(m.cpus(node, m.nodes), nodeDir, fmt.Sprintf("node%d/cpulist", node))
	}
	for cpu := range m.cores * m.threads {
		core, dir := cpu%m.cores, path.Join(cpuDir, cpuName(cpu))
		if slices.Contains(m.offline, cpu) {
			put("0", dir, "online")
			continue
		}
		put(core*m.sockets/m.cores, dir, "topology/physical_package_id")
		put(m.cpus(core, m.cores), dir, "topology/thread_siblings_list")
		if m.caches == 0 {
			continue
		}
		put("", dir, "cache/uevent")
		for i, c := range []struct {
			level  int
			kind   string
			number int
		}{{1, "Data", m.cores}, {1, "Instruction", m.cores}, {2, "Unified", m.cores}, {3, "Unified", m.caches}} {
			index := fmt.Sprintf("cache/index%d", i)
			put(c.level, dir, index, "level")
			put(c.kind, dir, index, "type")
			put(m.cpus(core*c.number/m.cores, c.number), dir, index, "shared_cpu_list")
		}
	}
	for i, device := range m.devices() {
		put(m.gpus[i], pciDir, device, "numa_node")
	}
	return tree
}

// cpus lists the online CPUs of part i of n.
func (m machine) cpus(i, n int) string {
	var cpus []int
	for cpu := range m.cores * m.threads {
		if cpu%m.cores*n/m.cores == i && !slices.Contains(m.offline, cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return Format(cpus)
}

func (m machine) devices() (list []string) {
	for i := range m.gpus {
		list = append(list, fmt.Sprintf("0000:%02x:00.0", 0x10+i))
	}
	return list
}

func TestPlan(t *testing.T) {
	desktop := machine{sockets: 1, nodes: 1, cores: 8, threads: 1, caches: 1, gpus: []int{-1, -1, -1}}
	xeon := machine{sockets: 2, nodes: 8, cores: 32, threads: 2, caches: 2, gpus: []int{0, 0, 3, 3, 4, 4, 4, 7}}
	epyc := machine{sockets: 1, nodes: 2, cores: 16, threads: 2, caches: 8, gpus: []int{0, 0, 1, 0, 0, 0}}
	virtual := machine{sockets: 2, nodes: 2, cores: 4, threads: 1, gpus: []int{0, 1}}
	halfOff := xeon
	halfOff.offline = []int{1, 32, 34, 35}

	for _, tt := range []struct {
		name    string
		machine machine
		mode    Mode
		workers int
		allowed string // "" = all
		want    []string
	}{
		{"one node, unknown node of the device", desktop, modeNode, 3, "", []string{"0-7", "0-7", "0-7"}},
		{"one node, socket", desktop, modeSocket, 2, "", []string{"0-7", "0-7"}},
		{"one node, exclusive, the first take the rest", desktop, modeExclusive, 3, "", []string{"0-2", "3-5", "6-7"}},
		{"one node, one cache wraps", desktop, modeCoreComplex, 3, "", []string{"0-7", "0-7", "0-7"}},
		{"no workers", desktop, modeNode, 0, "", []string{}},

		{"many nodes, node", xeon, modeNode, 8, "", []string{"0-3,32-35", "0-3,32-35", "12-15,44-47", "12-15,44-47",
			"16-19,48-51", "16-19,48-51", "16-19,48-51", "28-31,60-63"}},
		{"many nodes, socket", xeon, modeSocket, 5, "",
			[]string{"0-15,32-47", "0-15,32-47", "0-15,32-47", "0-15,32-47", "16-31,48-63"}},
		{"many nodes, exclusive keeps hyperthreads together", xeon, modeExclusive, 8, "", []string{"0-1,32-33", "2-3,34-35",
			"12-13,44-45", "14-15,46-47", "16-17,48-49", "18,50", "19,51", "28-31,60-63"}},
		{"fewer workers than devices: the share is the same", xeon, modeExclusive, 1, "", []string{"0-1,32-33"}},
		{"a cache beyond the node is cut to the node", xeon, modeCoreComplex, 3, "",
			[]string{"0-3,32-35", "0-3,32-35", "12-15,44-47"}},

		{"caches in turn, per node, then again", epyc, modeCoreComplex, 6, "",
			[]string{"0-1,16-17", "2-3,18-19", "8-9,24-25", "4-5,20-21",
				"6-7,22-23", "0-1,16-17"}},
		{"caches with most usable CPUs first", epyc, modeCoreComplex, 5, "0,4-9,16,17,20-23",
			[]string{"4-5,20-21", "6-7,22-23", "8-9", "0,16-17", "4-5,20-21"}},

		{"mask, node", xeon, modeNode, 4, "2,14-40", []string{"2,32-35", "2,32-35", "14-15", "14-15"}},
		{"mask, socket reaches the other node", xeon, modeSocket, 1, "4-5,16", []string{"4-5"}},
		{"mask, exclusive counts cores with one usable thread", xeon, modeExclusive, 2, "2,3,33", []string{"2,33", "3"}},
		{"mask in any order", desktop, modeNode, 1, "5,1,3", []string{"1,3,5"}},

		{"offline CPUs, node", halfOff, modeNode, 1, "", []string{"0,2-3,33"}},
		// CPU 33 lists no offline sibling, so that its core comes after those of CPUs 2 and 3.
		{"offline CPUs, exclusive", halfOff, modeExclusive, 2, "", []string{"0,2", "3,33"}},
		{"offline CPUs, core-complex", halfOff, modeCoreComplex, 1, "", []string{"0,2-3,33"}},

		{"no cache information, exclusive", virtual, modeExclusive, 2, "", []string{"0-1", "2-3"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Plan(tt.machine.tree(), tt.mode, tt.machine.devices(), tt.workers, mask(t, tt.machine, tt.allowed))
			require.NoError(t, err)
			formatted := []string{}
			for _, cpus := range got {
				require.IsIncreasing(t, append([]int{-1}, cpus...))
				formatted = append(formatted, Format(cpus))
			}
			require.Equal(t, tt.want, formatted)
		})
	}
}

func mask(t *testing.T, m machine, allowed string) []int {
	t.Helper()
	if allowed == "" {
		allowed = fmt.Sprintf("0-%d", m.cores*m.threads-1)
	}
	cpus, err := ParseCPUs(allowed)
	require.NoError(t, err)
	return cpus
}

func TestPlanFails(t *testing.T) {
	two := machine{sockets: 2, nodes: 2, cores: 4, threads: 1, caches: 2, gpus: []int{0, -1}}
	crowded := machine{sockets: 1, nodes: 1, cores: 2, threads: 2, caches: 1, gpus: []int{0, 0, 0}}
	virtual := machine{sockets: 1, nodes: 1, cores: 2, threads: 1, gpus: []int{0}}
	farNode := machine{sockets: 1, nodes: 1, cores: 2, threads: 1, gpus: []int{3}}

	for _, tt := range []struct {
		name    string
		machine machine
		mode    Mode
		workers int
		allowed string
		want    []string // parts of the error
	}{
		{"unknown mode", two, "numa", 1, "", []string{`"numa"`, "node, socket, exclusive or core-complex"}},
		{"too few devices", two, modeNode, 3, "",
			[]string{"3 workers", "2 are visible", "[0000:10:00.0 0000:11:00.0]", "--nproc-per-node"}},
		{"unknown node of several", two, modeNode, 2, "",
			[]string{"local rank 1", "0000:11:00.0", "numa_node is -1", "2 NUMA nodes", "firmware"}},
		{"mask without the node", two, modeNode, 1, "2-3",
			[]string{"local rank 0", "0000:10:00.0", "NUMA node 0", "[0-1]", "[2-3]", "container"}},
		{"mask without the socket", two, modeSocket, 1, "2-3", []string{"mode socket", "[0-1]", "[2-3]"}},
		{"node without CPUs", farNode, modeExclusive, 1, "", []string{"NUMA node 3", "[]", "[0-1]"}},
		{"node without CPUs, socket", farNode, modeSocket, 1, "", []string{"NUMA node 3", "[]", "[0-1]"}},
		{"fewer cores than devices", crowded, modeExclusive, 1, "",
			[]string{"local rank 0", "2 usable physical cores (CPUs 0-3)", "3 accelerators", "--numa-binding=node"}},
		{"no cache information", virtual, modeCoreComplex, 1, "",
			[]string{"local rank 0", "/sys/devices/system/cpu/cpu0/cache", "--numa-binding=node"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Plan(tt.machine.tree(), tt.mode, tt.machine.devices(), tt.workers, mask(t, tt.machine, tt.allowed))
			for _, part := range tt.want {
				require.ErrorContains(t, err, part)
			}
		})
	}
	t.Run("an unknown node matters only to a worker", func(t *testing.T) {
		got, err := Plan(two.tree(), modeExclusive, two.devices(), 1, mask(t, two, ""))
		require.NoError(t, err)
		require.Equal(t, [][]int{{0, 1}}, got)
	})
}

// Every file that Plan reads may be missing or damaged; the error then names it.
func TestPlanDamagedSysfs(t *testing.T) {
	m := machine{sockets: 1, nodes: 1, cores: 2, threads: 1, caches: 1, gpus: []int{0}}
	for _, tt := range []struct {
		mode Mode
		file string
	}{
		{modeNode, pciDir + "/0000:10:00.0/numa_node"},
		{modeSocket, cpuDir + "/cpu0/topology/physical_package_id"},
		{modeExclusive, cpuDir + "/cpu0/topology/thread_siblings_list"},
		{modeCoreComplex, cpuDir + "/cpu0/cache/index3/shared_cpu_list"},
		{modeNode, nodeDir + "/node0/cpulist"},
	} {
		t.Run(tt.file, func(t *testing.T) {
			tree := m.tree()
			tree[tt.file].Data = []byte("x\n")
			_, err := Plan(tree, tt.mode, m.devices(), 1, []int{0, 1})
			require.ErrorContains(t, err, tt.file)
			delete(tree, tt.file)
			_, err = Plan(tree, tt.mode, m.devices(), 1, []int{0, 1})
			require.Error(t, err)
		})
	}
	_, err := Plan(fstest.MapFS{}, modeNode, m.devices(), 1, []int{0, 1})
	require.ErrorContains(t, err, "no NUMA node in /sys/devices/system/node")
}

func TestMemoryOnlyNodes(t *testing.T) {
	m := machine{sockets: 1, nodes: 1, cores: 2, threads: 1, caches: 1, gpus: []int{-1}}
	tree := m.tree()
	tree[nodeDir+"/node1/cpulist"] = &fstest.MapFile{Data: []byte("\n")} // GPU memory, as on GH200
	for _, mode := range []Mode{modeNode, modeSocket} {
		got, err := Plan(tree, mode, m.devices(), 1, []int{0, 1})
		require.NoError(t, err)
		require.Equal(t, [][]int{{0, 1}}, got)
	}
}

func TestParseMode(t *testing.T) {
	for _, mode := range []Mode{modeNode, modeSocket, modeExclusive, modeCoreComplex} {
		got, err := ParseMode(string(mode))
		require.NoError(t, err)
		require.Equal(t, mode, got)
	}
	_, err := ParseMode("")
	require.ErrorContains(t, err, `""`)
}
