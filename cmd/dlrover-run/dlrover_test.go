package main

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// forDLRovers runs a test with every version and form of DLRover's master.
func forDLRovers(t *testing.T, test func(*testing.T, dlrover)) {
	dlroverPackages(t)
	for _, d := range dlrovers {
		t.Run(d.String(), func(t *testing.T) { test(t, d) })
	}
}

// TestDLRoverLife: a worker is killed, then a launcher, whose place another one takes; the job ends well.
func TestDLRoverLife(t *testing.T) {
	forDLRovers(t, func(t *testing.T, d dlrover) {
		j := d.newJob(t, "2")
		m := j.theirMaster(2)
		nodes := []*launched{j.ourAgent(0, 0), j.ourAgent(1, 1)}
		first := j.trained(4, nil, nodes...)
		for rank, pid := range first {
			require.Equal(t, dlStart{rank, 4, rank / 2, 0, pid}, j.started(pid))
		}
		require.NoError(t, syscall.Kill(first[3], syscall.SIGKILL))
		second := j.trained(4, first, nodes...)
		require.Equal(t, 1, j.started(second[3]).restarts, "a worker of node 1 was killed")

		nodes[1].signal(syscall.SIGKILL)
		<-nodes[1].exited
		nodes[1] = j.ourAgent(1, 2)
		third := j.trained(4, append(first, second...), nodes...)
		require.Equal(t, dlStart{3, 4, 1, 0, third[3]}, j.started(third[3]), "the replacement has restarted nothing")
		j.finish(nodes...)
		require.Equal(t, []string{"SUCCEEDED_EXITED"}, j.ends(0))
		require.Equal(t, []string{"SUCCEEDED_EXITED"}, j.ends(2))
		require.Empty(t, j.ends(1))
		j.clean(m)
	})
}
