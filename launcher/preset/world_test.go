package preset

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// worlds are the cases of every preset's golden file, all ranks of each.
var worlds = []struct {
	name   string
	slots  []int // of each node
	change func(*Vars)
}{
	{"2 nodes with 2 workers", []int{2, 2}, func(*Vars) {}},
	{"nodes with 1 and 2 workers, after a restart", []int{1, 2}, func(v *Vars) {
		v.RestartCount = 1
		v.World[0].Ports = []int{5555} // somebody has the first one
	}},
}

// nodes of a world offer the ports from 4000 on, and one that nobody needs.
func nodes(slots ...int) (world []Node) {
	ranks := 0
	for i, n := range slots {
		node := Node{GroupRank: i, Addr: fmt.Sprintf("10.0.0.%d", i+1), RankBase: ranks, Slots: n}
		for p := range n + 1 {
			node.Ports = append(node.Ports, 4000+100*i+p)
		}
		world, ranks = append(world, node), ranks+n
	}
	return world
}

// workersOf describes each worker of a world.
func workersOf(world []Node) (all []Vars) {
	last := world[len(world)-1]
	for _, n := range world {
		for i := range n.Slots {
			v := worker()
			v.World, v.GroupRank, v.GroupWorldSize = world, n.GroupRank, len(world)
			v.LocalRank, v.LocalWorldSize = i, n.Slots
			v.Rank, v.WorldSize = n.RankBase+i, last.RankBase+last.Slots
			v.RoleRank, v.RoleWorldSize, v.Role = v.Rank, v.WorldSize, "default"
			v.RestartCount = 0
			all = append(all, v)
		}
	}
	return all
}

func goldenWorlds(t *testing.T, p Preset) string {
	var got strings.Builder
	for _, w := range worlds {
		for _, v := range workersOf(nodes(w.slots...)) {
			w.change(&v)
			env, err := p.Environ(v)
			require.NoError(t, err)
			fmt.Fprintf(&got, "# %s: rank %d %s\n%s\n\n", w.name, v.Rank, p.ArgsOf(v), strings.Join(env, "\n"))
		}
	}
	return got.String()
}

// ofRank is a worker of a world of so many slots, and its environment.
func ofRank(t *testing.T, name string, rank int, change func(*Vars), slots ...int) map[string]string {
	t.Helper()
	p, err := Lookup(name)
	require.NoError(t, err)
	v := workersOf(nodes(slots...))[rank]
	change(&v)
	env, err := p.Environ(v)
	require.NoError(t, err)
	return toMap(env)
}

func TestInheritedVariablesOfFrameworks(t *testing.T) {
	parent := map[string]string{
		"OMPI_VERSION": "5.0.3", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456", "MS_TOPO_TIMEOUT": "9",
		"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi", "JAX_LOCAL_DEVICE_IDS": "3", "CUDA_VISIBLE_DEVICES": "4,5",
		"PADDLE_DISTRI_BACKEND": "", "FLAGS_selected_gpus": "7", "TF_CONFIG": "{}",
	}
	env := func(name string, devices int) map[string]string {
		return ofRank(t, name, 1, func(v *Vars) {
			v.Parent, v.Devices, v.Device = lookupIn(parent), devices, "cuda"
		}, 2)
	}
	require.Equal(t, "4.1.0", env("jax", 0)["OMPI_VERSION"], "release 5 would ask for mpi4py")
	require.Equal(t, "4.1.0", env("mpi", 0)["OMPI_VERSION"])
	require.NotContains(t, env("jax", 0), "JAX_CPU_COLLECTIVES_IMPLEMENTATION")
	require.NotContains(t, env("jax", 2), "JAX_LOCAL_DEVICE_IDS")
	require.NotContains(t, env("mindspore", 0), "MS_TOPO_TIMEOUT")
	require.NotContains(t, env("paddle", 0), "PADDLE_DISTRI_BACKEND")
	require.NotContains(t, env("paddle", 2), "FLAGS_selected_gpus")
	require.NotContains(t, env("deepspeed", 2), "CUDA_VISIBLE_DEVICES")
	require.Equal(t, "10.0.0.1", env("paddle", 0)["MASTER_ADDR"], "Paddle prefers them to its own")
	require.Equal(t, "4000", env("paddle", 0)["MASTER_PORT"])
	require.Contains(t, env("tensorflow", 0)["TF_CONFIG"], `"index":1`)
	require.Equal(t, "5", env("tensorflow", 2)["CUDA_VISIBLE_DEVICES"])
}

func TestDevices(t *testing.T) {
	env := func(name, kind string, slots, devices int) map[string]string {
		return ofRank(t, name, slots-1, func(v *Vars) { v.Devices, v.Device = devices, kind }, slots)
	}
	require.Equal(t, "0,1,2,3", env("jax", "cuda", 1, 4)["JAX_LOCAL_DEVICE_IDS"], "one process has them all")
	require.NotContains(t, env("jax", "cuda", 4, 4), "JAX_LOCAL_DEVICE_IDS")
	require.NotContains(t, env("tensorflow", "cuda", 1, 4), "CUDA_VISIBLE_DEVICES")
	require.Equal(t, "3", env("tensorflow", "cuda", 4, 4)["CUDA_VISIBLE_DEVICES"])
	require.Equal(t, "0,1,2,3", env("paddle", "cuda", 1, 4)["FLAGS_selected_gpus"])
	require.Equal(t, "3", env("paddle", "cuda", 4, 4)["FLAGS_selected_gpus"])
	require.Equal(t, "1", env("paddle", "ascend", 2, 2)["FLAGS_selected_npus"])
	require.NotContains(t, env("paddle", "cuda", 4, 4), "PADDLE_DISTRI_BACKEND")
	require.Equal(t, "0,1,2,3", env("deepspeed", "cuda", 4, 8)["CUDA_VISIBLE_DEVICES"])
	require.Equal(t, "0,1", env("deepspeed", "ascend", 2, 8)["ASCEND_RT_VISIBLE_DEVICES"])
	require.NotContains(t, env("deepspeed", "ascend", 2, 8), "CUDA_VISIBLE_DEVICES")
}

func TestServicePort(t *testing.T) {
	env := ofRank(t, "mindspore", 2, func(v *Vars) { v.ServicePort = 8118 }, 2, 2)
	require.Equal(t, "10.0.0.1", env["MS_SCHED_HOST"])
	require.Equal(t, "8118", env["MS_SCHED_PORT"])
}

func TestIPv6(t *testing.T) {
	change := func(v *Vars) { v.World[0].Addr = "fd00::1" }
	require.Equal(t, "[fd00::1]:4000", ofRank(t, "jax", 1, change, 2)["JAX_COORDINATOR_ADDRESS"])
	require.Equal(t, "0.0;tcp6://[fd00::1]:4000", ofRank(t, "jax", 1, change, 2)["OMPI_MCA_orte_hnp_uri"])
	require.Contains(t, ofRank(t, "tensorflow", 1, change, 2)["TF_CONFIG"], `["[fd00::1]:4000","[fd00::1]:4001"]`)
}

// What nobody knows before the nodes have met is said so.
func TestUndecided(t *testing.T) {
	for _, name := range []string{"mindspore", "jax", "tensorflow", "paddle"} {
		env := ofRank(t, name, 1, func(v *Vars) {
			for i := range v.World {
				v.World[i].Addr, v.World[i].Ports = Undecided, make([]int, v.World[i].Slots)
			}
		}, 2)
		for key, value := range env {
			require.NotContains(t, value, ":0", "%s %s", name, key)
		}
		require.Contains(t, fmt.Sprint(env), Undecided)
	}
}

func TestWorldsThatDoNotServe(t *testing.T) {
	for _, tt := range []struct {
		preset string
		change func(*Vars)
		want   string
	}{
		{"jax", func(v *Vars) { v.World = nil },
			"preset jax: JAX_COORDINATOR_ADDRESS for local rank 1: the addresses of the nodes are not known"},
		{"tensorflow", func(v *Vars) { v.World = nil }, "the addresses of the nodes are not known"},
		{"mindspore", func(v *Vars) { v.World[0].Ports = nil },
			"node 0 (10.0.0.1) offers 0 ports and needs 1: give every node the same --preset"},
		{"paddle", func(v *Vars) { v.World[1].Ports = []int{1} },
			"node 1 (10.0.0.2) offers 1 ports and needs 2: give every node the same --preset"},
		{"paddle", func(v *Vars) { v.Rank = 4 }, "rank 4 is not among the 4 of the nodes"},
	} {
		p, err := Lookup(tt.preset)
		require.NoError(t, err)
		v := workersOf(nodes(2, 2))[1]
		tt.change(&v)
		_, err = p.Environ(v)
		require.ErrorContains(t, err, tt.want)
	}
}

func TestPorts(t *testing.T) {
	for name, want := range map[string]int{"torch": 0, "deepspeed": 0, "mpi": 0, "torchft": 0, "mindspore": 1, "jax": 1,
		"tensorflow": 3, "paddle": 3} {
		p, err := Lookup(name)
		require.NoError(t, err)
		require.Equal(t, want, p.PortsOf(3), name)
		require.Equal(t, want > 0, p.World, name)
	}
}
