package run

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDLRoverKubernetesPods: DLRover's master in Kubernetes puts one other pod, with the same rank, in the place of one
// whose launcher has met broken hardware, and of one that is evicted. For a pod that ends with 201, 0.4 creates two.
func TestDLRoverKubernetesPods(t *testing.T) {
	forDLRovers(t, func(t *testing.T, d dlrover) {
		policy, broken, evicted := "dlrover", 201, 143
		if d.http || d.version == "0.4.0" {
			policy, broken, evicted = "torchrun", 1, 1
		}
		j := d.newJob(t, "$(NODE_NUM)", "--exit-code-policy="+policy,
			"--rule=pattern /fallen off the bus/ -> retry-elsewhere")
		c := j.newCluster(2)
		m := c.master()
		nodes := []*launched{c.worker(0), c.worker(1)}
		first := j.trained(4, nil, nodes...)

		xid := []byte("NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.\n")
		require.NoError(t, os.WriteFile(j.log+".words", xid, 0o600))
		require.NoError(t, os.Rename(j.log+".words", j.log+".exit2"))
		require.Equal(t, broken, nodes[1].wait())
		nodes[1] = c.worker(2)
		second := j.trained(4, first, nodes...)
		require.Equal(t, dlStart{2, 4, 1, 0, second[2]}, j.started(second[2]))
		require.Equal(t, []string{"FAILED_EXITED"}, j.ends(1))
		require.Equal(t, "Failed", c.pod(1)["status"].(kubeObject)["phase"], "it is left for who wants to see its log")

		c.evict(2)
		require.Equal(t, evicted, nodes[1].wait())
		nodes[1] = c.worker(3)
		third := j.trained(4, append(first, second...), nodes...)
		require.Equal(t, dlStart{2, 4, 1, 0, third[2]}, j.started(third[2]))

		j.finish(nodes...)
		require.Equal(t, 0, m.wait())
		require.Nil(t, c.pod(4))
		j.clean(m)
	})
}

// TestDLRoverKubernetesCheck: DLRover's master puts other pods in the place of those whose nodes are sick, or fail the
// test with others. Of two nodes both are replaced, as nobody knows which of them is at fault.
func TestDLRoverKubernetesCheck(t *testing.T) {
	besideDLRovers(t)
	for name, c := range map[string]struct {
		nodes    int
		args     string
		prologue string
		ended    map[int]int // exit status by node ID
		told     int         // how many node_error node 1 has sent
	}{
		"health":      {2, "--health-check=$DIR/check", "", map[int]int{1: 201}, 1},
		"network":     {4, "--network-check", `[ $NODE_ID = 1 ] && export MOCK_ERR_RANK=0`, map[int]int{1: 201}, 1},
		"two network": {2, "--network-check", `[ $NODE_ID = 1 ] && export MOCK_ERR_RANK=0`, map[int]int{0: 202, 1: 202}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			j := dlrover{version: "0.6.1"}.newJob(t, "$(NODE_NUM)", "--exit-code-policy=dlrover")
			j.one()
			check := j.program(`[ "$NODE_ID" != 1 ] || { echo "the disk is slow"; exit 1; }`)
			j.args = append(j.args, strings.Replace(c.args, "$DIR/check", check, 1))
			k := j.newCluster(c.nodes)
			k.prologue = c.prologue
			m := k.master()
			var nodes []*launched
			for id := range c.nodes + len(c.ended) {
				if l := k.worker(id); c.ended[id] == 0 {
					nodes = append(nodes, l)
				} else {
					require.Eventually(t, l.ended, patience, 20*time.Millisecond)
					require.Equal(t, c.ended[id], l.code)
				}
			}
			j.trained(c.nodes, nil, nodes...)
			told := j.failures("node_error", 1)
			require.Len(t, told, c.told)
			for _, f := range told {
				require.Contains(t, f.Of["error_data"], "CheckFailure")
			}
			j.finish(nodes...)
			require.Equal(t, 0, m.wait())
			j.clean(m)
		})
	}
}

// TestDLRoverKubernetesMemory: where the kernel has ended a worker for its memory, the master creates no other pod.
func TestDLRoverKubernetesMemory(t *testing.T) {
	besideDLRovers(t)
	j := dlrover{version: "0.6.1"}.newJob(t, "$(NODE_NUM)", "--exit-code-policy=dlrover", "--rule=event oom -> stop-job")
	group := memoryGroup(t, 1<<30)
	c := j.newCluster(2)
	c.prologue = fmt.Sprintf(`[ "$NODE_ID" = 1 ] && echo $$ > %s/cgroup.procs`, group)
	m := c.master()
	nodes := []*launched{c.worker(0), c.worker(1)}
	j.trained(4, nil, nodes...)
	require.NoError(t, os.WriteFile(j.log+".memory2", nil, 0o600))
	require.Equal(t, 247, nodes[1].wait())
	eventually(t, "the master's decision", func() bool {
		return strings.Contains(m.err.String(), "will not try to recover node error with oom issue")
	})
	require.Nil(t, c.pod(2))
	nodes[0].signal(syscall.SIGTERM) // it waits for another node
	require.Equal(t, 143, nodes[0].wait())
}
