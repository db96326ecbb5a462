package run

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// forDLRovers runs a test with every version and form of DLRover's master.
func forDLRovers(t *testing.T, test func(*testing.T, dlrover)) {
	besideDLRovers(t)
	for _, d := range dlrovers {
		t.Run(d.String(), func(t *testing.T) { test(t, d) })
	}
}

// TestDLRoverLife: a worker is killed, then a launcher, whose place another one takes; the job ends well.
func TestDLRoverLife(t *testing.T) {
	forDLRovers(t, func(t *testing.T, d dlrover) {
		j := d.newJob(t, "2")
		j.torch()
		m := j.theirMaster(2)
		nodes := []*launched{j.ourAgent(0, 0), j.ourAgent(1, 1)}
		first := j.trained(4, nil, nodes...)
		for rank, pid := range first {
			require.Equal(t, dlStart{rank, 4, rank / 2, 0, pid}, j.started(pid))
		}
		require.NoError(t, syscall.Kill(first[3], syscall.SIGKILL))
		second := j.trained(4, first, nodes...)
		require.Equal(t, 1, j.started(second[3]).restarts, "a worker of node 1 was killed")
		require.Zero(t, j.started(second[0]).restarts, "those of node 0 failed by that")

		lost := map[bool]int{false: 1, true: 0}[d.http] // 0 serves the workers' store
		nodes[lost].signal(syscall.SIGKILL)
		<-nodes[lost].exited
		nodes[lost] = j.ourAgent(lost, 2)
		third := j.trained(4, append(first, second...), nodes...)
		rank := 2 * lost
		require.Equal(t, dlStart{rank, 4, lost, 0, third[rank]}, j.started(third[rank]), "it has restarted nothing")
		j.finish(nodes...)
		require.Equal(t, []string{"SUCCEEDED_EXITED"}, j.ends(1-lost))
		require.Equal(t, []string{"SUCCEEDED_EXITED"}, j.ends(2))
		require.Empty(t, j.ends(lost))
		j.clean(m)
	})
}

// TestDLRoverGrowth: a third node joins two that train, and is killed.
func TestDLRoverGrowth(t *testing.T) {
	forDLRovers(t, func(t *testing.T, d dlrover) {
		j := d.newJob(t, "2:3")
		m := j.theirMaster(3)
		nodes := []*launched{j.ourAgent(0, 0), j.ourAgent(1, 1)}
		first := j.trained(4, nil, nodes...)
		third := j.ourAgent(2, 2)
		second := j.trained(6, first, append(nodes, third)...)
		for rank, pid := range second {
			require.Equal(t, dlStart{rank, 6, rank / 2, 0, pid}, j.started(pid), "growth is free")
		}
		third.signal(syscall.SIGKILL)
		j.trained(4, append(first, second...), nodes...)
		j.finish(nodes...)
		j.clean(m)
	})
}

// TestDLRoverMasterRestart: the master is killed and started again. The workers do not notice, and what comes later
// works as before: a restart, the end.
func TestDLRoverMasterRestart(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1"}, {version: "0.6.1", http: true}, {version: "0.4.0"}} {
		for _, then := range []string{"end", "restart"} {
			t.Run(d.String()+"/"+then, func(t *testing.T) {
				j := d.newJob(t, "2")
				m := j.theirMaster(2)
				nodes := []*launched{j.ourAgent(0, 0), j.ourAgent(1, 1)}
				pids := j.trained(4, nil, nodes...)
				m.signal(syscall.SIGKILL)
				<-m.exited
				require.NoError(t, os.Remove(filepath.Join(j.dir, "heard")))
				again := j.theirMaster(2)
				for id := range nodes {
					eventually(t, "the new master is asked", func() bool {
						return len(j.heard("WaitingNodeNumRequest", id)) > 0
					})
				}
				j.goOn(pids, nodes...)
				require.Len(t, j.starts(), 4, "the workers were restarted")
				if then == "restart" {
					require.NoError(t, syscall.Kill(pids[0], syscall.SIGKILL))
					j.trained(4, pids, nodes...)
				}
				j.finish(nodes...)
				require.Equal(t, []string{"SUCCEEDED_EXITED"}, j.ends(0))
				require.Equal(t, []string{"SUCCEEDED_EXITED"}, j.ends(1))
				j.clean(again)
			})
		}
	}
}

// TestDLRoverHears: what the master hears of a worker that fails, with a restart left and without one.
func TestDLRoverHears(t *testing.T) {
	forDLRovers(t, func(t *testing.T, d dlrover) {
		j := d.newJob(t, "2", "--max-restarts=1")
		m := j.theirMaster(2)
		nodes := []*launched{j.ourAgent(0, 0), j.ourAgent(1, 1)}
		pids := j.trained(4, nil, nodes...)
		require.NoError(t, os.WriteFile(j.log+".exit3", nil, 0o600))
		again := j.trained(4, pids, nodes...)
		require.Equal(t, 1, j.started(again[2]).restarts)
		require.NoError(t, os.WriteFile(j.log+".exit2", nil, 0o600))
		require.Equal(t, 1, nodes[1].wait())
		nodes[0].signal(syscall.SIGTERM) // it waits for a replacement of node 1
		require.NotZero(t, nodes[0].wait())

		told := j.failures("process_error", 1)
		require.Len(t, told, 2)
		for i, rank := range []string{"3", "2"} {
			var f dlFailure
			require.NoError(t, json.Unmarshal([]byte(told[i].Of["error_data"].(string)), &f))
			require.Equal(t, 9, f[rank].ExitCode)
			require.Equal(t, map[string]int{"3": 1, "2": 0}[rank], f[rank].LocalRank)
			require.Contains(t, f[rank].Message, "rank "+rank)
			_, err := time.Parse(time.DateTime, f[rank].Datetime)
			require.NoError(t, err)
		}
		require.Equal(t, []string{"FAILED_EXITED"}, j.ends(1))
		require.Contains(t, nodes[1].err.String(), "restarts used 1 of 1")
		j.clean(m)
	})
}

// TestDLRoverExitStatus: the node whose hardware is to blame says so; the other one learns nothing of it.
func TestDLRoverExitStatus(t *testing.T) {
	besideDLRovers(t)
	j := dlrover{version: "0.6.1"}.newJob(t, "2", "--max_restarts=0", "--exit-code-policy=dlrover")
	j.bench.env = append(j.bench.env, "PYTHON_EXEC=/bin/sh")
	m := j.theirMaster(2)
	j.then = j.sh(`: > $DIR/up.$RANK; while [ ! -e $DIR/up.3 -o ! -e $DIR/up.0 ]; do sleep 0.01; done; ` +
		`if [ $RANK = 2 ]; then echo "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus." >&2; exit 1; fi; ` +
		`exec sleep 60`)
	nodes := []*launched{j.ourAgent(0, 0), j.ourAgent(1, 1)}
	require.Equal(t, 201, nodes[1].wait())
	nodes[0].signal(syscall.SIGTERM)
	require.Equal(t, 143, nodes[0].wait())
	require.Equal(t, []string{"FAILED_EXITED"}, j.ends(1))
	j.then = j.sh("exit 0")
	nodes = []*launched{j.ourAgent(0, 2), j.ourAgent(1, 3)}
	require.Equal(t, 0, nodes[0].wait())
	require.Equal(t, 0, nodes[1].wait())
	j.clean(m)
}

// TestDLRoverMixed: a launcher of ours and an agent of DLRover's in one job, each in both places.
func TestDLRoverMixed(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1"}, {version: "0.4.0"}} {
		for ours := range 2 {
			t.Run(fmt.Sprintf("%s/our node %d", d, ours), func(t *testing.T) {
				j := d.newJob(t, "2")
				j.torch()
				m := j.theirMaster(2)
				nodes := make([]*launched, 2)
				nodes[ours], nodes[1-ours] = j.ourAgent(ours, ours), j.theirAgent(1-ours, 1-ours)
				first := j.trained(4, nil, nodes...)
				require.NoError(t, syscall.Kill(first[2*ours], syscall.SIGKILL))
				second := j.trained(4, first, nodes...)
				require.NoError(t, syscall.Kill(second[2*(1-ours)], syscall.SIGKILL))
				j.trained(4, append(first, second...), nodes...)
				j.finish(nodes...)
				require.Equal(t, []string{"SUCCEEDED_EXITED"}, j.ends(ours))
				j.clean(m)
			})
		}
	}
}

// TestDLRoverActions: the master's diagnosis asks for something in its answer to a heartbeat.
func TestDLRoverActions(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1"}, {version: "0.5.1", http: true}, {version: "0.4.0"}} {
		t.Run(d.String(), func(t *testing.T) {
			j := d.newJob(t, "2")
			m := j.theirMaster(2)
			nodes := []*launched{j.ourAgent(0, 0), j.ourAgent(1, 1)}
			pids := j.trained(4, nil, nodes...)
			j.act(1, "restart_worker")
			again := j.trained(4, pids, nodes...)
			for _, pid := range again {
				require.Zero(t, j.started(pid).restarts, "what the master asks for is free")
			}
			j.act(1, "relaunch_worker")
			require.Equal(t, 1, nodes[1].wait())
			require.Equal(t, []string{"FAILED_EXITED"}, j.ends(1))
			require.Contains(t, nodes[1].err.String(), "the test wants it")
			nodes[1] = j.ourAgent(1, 1)
			last := j.trained(4, append(pids, again...), nodes...)
			if d.version == "0.4.0" {
				j.finish(nodes...)
			} else {
				j.act(0, "JobAbortionAction")
				j.act(1, "JobAbortionAction")
				require.Equal(t, 1, nodes[0].wait())
				require.Equal(t, 1, nodes[1].wait())
				require.Equal(t, []string{"FAILED_EXITED"}, j.ends(0))
			}
			require.NotEmpty(t, last)
			j.clean(m)
		})
	}
}

// TestDLRoverJobUID: a launcher of another job says so and ends; one of this job works.
func TestDLRoverJobUID(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1"}, {version: "0.6.1", http: true}} {
		t.Run(d.String(), func(t *testing.T) {
			j := d.newJob(t, "1")
			j.uid = "right"
			m := j.theirMaster(1)
			j.bench.env = append(j.bench.env, "JOB_UID=wrong")
			began := time.Now()
			l := j.ourAgent(0, 0)
			require.Equal(t, 1, l.wait())
			require.Less(t, time.Since(began), 20*time.Second, "it has tried again and again")
			require.Regexp(t, `JOB_UID must be that of its job`, l.err.String())
			require.Empty(t, j.starts())
			j.bench.env = append(j.bench.env, "JOB_UID=right")
			l = j.ourAgent(0, 0)
			j.trained(2, nil, l)
			j.finish(l)
			j.clean(m)
		})
	}
}

// TestDLRoverJoinTimeout: too few nodes come, and the master hears of it.
func TestDLRoverJoinTimeout(t *testing.T) {
	forDLRovers(t, func(t *testing.T, d dlrover) {
		j := d.newJob(t, "2", "--rdzv-conf=last_call_timeout=3,join_timeout=5", "--exit-code-policy=reason")
		m := j.theirMaster(2)
		l := j.ourAgent(0, 0)
		require.Equal(t, 20, l.wait())
		require.Contains(t, l.err.String(), "too few nodes within 5s: need 2 to 2")
		told := j.failures("rdzv_error", 0)
		require.Len(t, told, 1)
		var why map[string]any
		require.NoError(t, json.Unmarshal([]byte(told[0].Of["error_data"].(string)), &why))
		require.Equal(t, "elastic-training", why["rdzv_name"])
		require.Equal(t, []string{"FAILED_EXITED"}, j.ends(0))
		j.clean(m)
	})
}

// TestDLRoverMixedCheck: a launcher and an agent of DLRover test each other under DLRover's master.
func TestDLRoverMixedCheck(t *testing.T) {
	besideDLRovers(t)
	j := dlrover{version: "0.6.1", torch2: true}.newJob(t, "2", "--network-check")
	j.one()
	m := j.theirMaster(2)
	nodes := []*launched{j.ourAgent(0, 0), j.theirAgent(1, 1)}
	j.trained(2, nil, nodes...)
	j.finish(nodes...)
	require.Len(t, j.passes(0), 1)
	require.Len(t, j.passes(1), 1)
	j.clean(m)
}

// passes are the tests with others that a node has told to have passed.
func (j *dlJob) passes(id int) []dlHeard {
	return slices.DeleteFunc(j.heard("NodeEvent", id), func(h dlHeard) bool {
		return h.Of["event_type"] != "NODE_CHECK_SUCCEEDED"
	})
}

// TestDLRoverFault: one of four launchers fails the test with others under DLRover's master, which hears of it; the
// others train.
func TestDLRoverFault(t *testing.T) {
	besideDLRovers(t)
	j := dlrover{version: "0.6.1"}.newJob(t, "3:4", "--network-check", "--exit-code-policy=dlrover",
		"--rdzv_conf=lastcall_timeout=10")
	j.one()
	m := j.theirMaster(4)
	const bad = 1
	j.bench.env = append(j.bench.env, "MOCK_ERR_RANK=0")
	faulty := j.ourAgent(bad, bad)
	j.bench.env = j.bench.env[:len(j.bench.env)-1]
	sound := []*launched{j.ourAgent(0, 0), j.ourAgent(2, 2), j.ourAgent(3, 3)}
	j.trained(3, nil, sound...)
	require.Equal(t, 201, faulty.wait())
	told := j.failures("node_error", bad)
	require.Len(t, told, 1)
	require.Contains(t, told[0].Of["error_data"], "CheckFailure")
	j.finish(sound...)
	j.clean(m)
}

// TestDLRoverHealthCheck: a node that its own check finds sick says why.
func TestDLRoverHealthCheck(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1"}, {version: "0.4.0"}} {
		t.Run(d.String(), func(t *testing.T) {
			j := d.newJob(t, "1:2", "--exit-code-policy=dlrover")
			j.one()
			check := j.program(`[ "$NODE_RANK" = 1 ] && { echo "the disk is slow"; exit 1; }; exit 0`)
			j.args = append(j.args, "--health-check="+check)
			m := j.theirMaster(2)
			sick := j.ourAgent(1, 1)
			require.Equal(t, 201, sick.wait())
			told := j.failures("node_error", 1)
			require.Len(t, told, 1)
			require.Regexp(t, "CheckFailure.*the disk is slow", told[0].Of["error_data"])
			sound := j.ourAgent(0, 0)
			j.trained(1, nil, sound)
			j.finish(sound)
			j.clean(m)
		})
	}
}

// TestDLRoverCheckWithoutPackage: DLRover's test needs DLRover's package in the workers' Python.
func TestDLRoverCheckWithoutPackage(t *testing.T) {
	besideDLRovers(t)
	j := dlrover{version: "0.6.1"}.newJob(t, "1", "--network-check")
	j.theirMaster(1)
	j.bench.env = append(j.bench.env, "PYTHON_EXEC=/usr/bin/python3")
	l := j.ourAgent(0, 0)
	require.Equal(t, 1, l.wait())
	require.Equal(t, 1, strings.Count(l.err.String(), "/usr/bin/python3 has no package dlrover"))
	require.Empty(t, j.starts())
	require.Empty(t, j.heard("JoinRendezvousRequest", 0))
}
