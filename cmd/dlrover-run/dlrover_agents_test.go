package main

import (
	"encoding/json"
	"os"
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

// port is where the workers of a world meet, as each of them has it.
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
	dlroverPackages(t)
	for _, d := range dlAgents {
		t.Run(d.String(), func(t *testing.T) {
			j := d.newJob(t, "2")
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

			j.again()
			nodes = []*launched{j.theirAgent(0, 3), j.theirAgent(1, 4)}
			j.trained(4, pids, nodes...)
			j.finish(nodes...)
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
