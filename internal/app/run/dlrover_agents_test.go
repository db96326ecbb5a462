package run

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// dlAgents are all kinds of agents of DLRover that run under our master.
var dlAgents = []dlrover{{version: "0.6.1", torch2: true}, {version: "0.6.1", torch2: true, http: true},
	{version: "0.5.1"}, {version: "0.5.1", torch2: true, http: true}, {version: "0.4.0"},
	{version: "0.4.0", torch2: true}}

// ctl runs dlroverctl, which has to end with a status, and returns what it prints.
func (j *dlJob) ctl(code int, args ...string) string {
	j.t.Helper()
	l := j.start("dlroverctl", nil, args...)
	require.Equal(j.t, code, l.wait(), l.err.String())
	return l.out.String() + l.err.String()
}

// dlEvent is a line of the run's timeline.
type dlEvent struct{ Event, Node, Text string }

// timeline are the events of one or more kinds, in order.
func (j *dlJob) timeline(kinds ...string) (all []dlEvent) {
	j.t.Helper()
	for line := range strings.Lines(j.ctl(0, "events", "job", "--json")) {
		var e dlEvent
		require.NoError(j.t, json.Unmarshal([]byte(line), &e), line)
		for _, kind := range kinds {
			if e.Event == kind {
				all = append(all, e)
			}
		}
	}
	return all
}

// again lets the next job of the same name begin.
func (j *dlJob) again() {
	j.t.Helper()
	require.NoError(j.t, os.Remove(j.log+".stop"))
}

// meets is where the workers of a world meet, as each of them has it.
func (j *dlJob) meets(pids []int) string {
	j.t.Helper()
	ports := map[string]bool{}
	for _, pid := range pids {
		env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
		require.NoError(j.t, err)
		for v := range strings.SplitSeq(string(env), "\x00") {
			if port, ok := strings.CutPrefix(v, "MASTER_PORT="); ok {
				ports[port] = true
			}
		}
	}
	require.Len(j.t, ports, 1)
	for port := range ports {
		return port
	}
	return ""
}

// TestDLRoverAgentsLife: agents of DLRover under our master. A worker is killed, then an agent, whose place another one
// takes; the job ends, and so does the next one at the same master.
func TestDLRoverAgentsLife(t *testing.T) {
	besideDLRovers(t)
	for _, d := range dlAgents {
		t.Run(d.String(), func(t *testing.T) {
			j := d.newJob(t, "2")
			if !d.http {
				j.torch()
			}
			m := j.ourMaster()
			nodes := []*launched{j.theirAgent(0, 0), j.theirAgent(1, 1)}
			pids := j.trained(4, nil, nodes...)
			for rank, pid := range pids {
				require.Equal(t, dlStart{rank, 4, rank / 2, 0, pid}, j.started(pid))
			}
			require.NotEmpty(t, j.meets(pids))
			if d.restarts() {
				pids = j.lives(pids, nodes)
			}
			j.finish(nodes...)
			require.NotEmpty(t, j.timeline("seal"))
			require.Len(t, j.timeline("succeeded"), 1)

			if !d.restarts() || d.http {
				j.again()
				nodes = []*launched{j.theirAgent(0, 3), j.theirAgent(1, 4)}
				j.trained(4, pids, nodes...)
				j.finish(nodes...)
			}
			require.NotContains(t, m.err.String(), "panic")
		})
	}
}

// lives kills a worker, and then an agent.
func (j *dlJob) lives(first []int, nodes []*launched) []int {
	j.t.Helper()
	require.NoError(j.t, syscall.Kill(first[3], syscall.SIGKILL))
	second := j.trained(4, first, nodes...)
	j.kill(nodes[1], 1)
	nodes[1] = j.theirAgent(1, 2)
	third := j.trained(4, append(first, second...), nodes...)
	return append(append(first, second...), third...)
}

// one has every node start one worker.
func (j *dlJob) one() {
	i := slices.Index(j.args, "--nproc_per_node=2")
	j.args = slices.Concat(j.args[:i], []string{"--nproc_per_node=1"}, j.args[i+1:])
}

// TestDLRoverAgentsGrowth: a third agent joins two that train.
func TestDLRoverAgentsGrowth(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1", torch2: true}, {version: "0.4.0"}} {
		t.Run(d.String(), func(t *testing.T) {
			j := d.newJob(t, "2:3")
			j.one()
			j.ourMaster()
			nodes := []*launched{j.theirAgent(0, 0), j.theirAgent(1, 1)}
			first := j.trained(2, nil, nodes...)
			nodes = append(nodes, j.theirAgent(2, 2))
			j.trained(3, first, nodes...)
			j.finish(nodes...)
		})
	}
}

// TestDLRoverAgentsCheck: agents test each other before they train.
func TestDLRoverAgentsCheck(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1", torch2: true}, {version: "0.5.1", http: true}, {version: "0.4.0"}} {
		t.Run(d.String(), func(t *testing.T) {
			j := d.newJob(t, "2", "--network-check")
			j.one()
			j.ourMaster()
			nodes := []*launched{j.theirAgent(0, 0), j.theirAgent(1, 1)}
			j.trained(2, nil, nodes...)
			j.finish(nodes...)
			for _, n := range nodes {
				require.Contains(t, n.out.String()+n.err.String(), "Network check time of round 0")
			}
		})
	}
}

// TestDLRoverAgentsFault: one of four agents fails the test with others, and three train.
func TestDLRoverAgentsFault(t *testing.T) {
	besideDLRovers(t)
	j := dlrover{version: "0.6.1", torch2: true}.newJob(t, "3:4", "--network-check", "--rdzv_conf=lastcall_timeout=15")
	j.one()
	j.ourMaster()
	const bad = 2
	var sound []*launched
	var faulty *launched
	for n := range 4 {
		if n == bad {
			faulty = j.theirAgentWith([]string{"MOCK_ERR_RANK=0"}, n, n)
		} else {
			sound = append(sound, j.theirAgent(n, n))
		}
	}
	j.trained(3, nil, sound...)
	require.NotZero(t, faulty.wait())
	errs := j.timeline("node-error")
	require.Len(t, errs, 1)
	require.Equal(t, "worker-2", errs[0].Node)
	j.finish(sound...)
}

// TestDLRoverAgentsControl: an operator acts on a run of agents.
func TestDLRoverAgentsControl(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1", torch2: true}, {version: "0.5.1"}} {
		t.Run(d.String(), func(t *testing.T) {
			j := d.newJob(t, "2")
			j.one()
			j.ourMaster()
			nodes := []*launched{j.theirAgent(0, 0), j.theirAgent(1, 1)}
			first := j.trained(2, nil, nodes...)
			require.Regexp(t, `(?s)worker-0.*worker-1`, j.ctl(0, "status", "job"))
			j.ctl(0, "restart", "job", "--reason", "new data")
			j.trained(2, first, nodes...)
			j.ctl(0, "stop", "job", "--reason", "bad data")
			for _, n := range nodes {
				require.NotZero(t, n.wait())
			}
			require.Contains(t, j.ctl(0, "verdict", "job"), "bad data")
		})
	}
}

// TestDLRoverAgentsMixed: an agent and a launcher in one job of our master, each in both places. A worker of each
// fails; then each takes the place of the other kind.
func TestDLRoverAgentsMixed(t *testing.T) {
	besideDLRovers(t)
	for _, d := range []dlrover{{version: "0.6.1", torch2: true}, {version: "0.4.0"}} {
		for ours := range 2 {
			t.Run(fmt.Sprintf("%s/our node %d", d, ours), func(t *testing.T) {
				j := d.newJob(t, "2")
				j.one()
				j.torch()
				j.ourMaster()
				theirs := 1 - ours
				nodes := make([]*launched, 2)
				nodes[ours], nodes[theirs] = j.ourAgent(ours, ours), j.theirAgent(theirs, theirs)
				old := j.trained(2, nil, nodes...)
				for _, rank := range []int{ours, theirs} {
					require.NoError(t, syscall.Kill(old[len(old)-2+rank], syscall.SIGKILL))
					old = append(old, j.trained(2, old, nodes...)...)
				}
				j.kill(nodes[theirs], theirs)
				nodes[theirs] = j.ourAgent(theirs, 2)
				old = append(old, j.trained(2, old, nodes...)...)
				j.kill(nodes[ours], ours)
				nodes[ours] = j.theirAgent(ours, 3)
				j.trained(2, old, nodes...)
				j.finish(nodes...)
			})
		}
	}
}

// TestDLRoverAgentsMixedCheck: with a check asked for, an agent alone does not wait for the launcher.
func TestDLRoverAgentsMixedCheck(t *testing.T) {
	besideDLRovers(t)
	j := dlrover{version: "0.6.1", torch2: true}.newJob(t, "2", "--network-check")
	j.one()
	j.ourMaster()
	nodes := []*launched{j.ourAgent(0, 0), j.theirAgent(1, 1)}
	j.trained(2, nil, nodes...)
	j.finish(nodes...)
}
