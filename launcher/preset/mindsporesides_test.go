package preset

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func mindsporeVars(parent map[string]string) Vars {
	v := worker()
	v.World = []Node{{Addr: "10.0.0.1", Slots: 2, Ports: []int{4001}}}
	v.LogDir, v.Attempt, v.Parent = "/logs/attempt_0", "job-1-7-1-0", lookupIn(parent)
	return v
}

func TestMindSporeSides(t *testing.T) {
	p, err := Lookup("mindspore")
	require.NoError(t, err)
	v := mindsporeVars(map[string]string{"MS_TOPO_TIMEOUT": "30", "MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": "/r"})
	v.Servers = 1
	sides, err := p.Sides(v)
	require.NoError(t, err)
	require.Len(t, sides, 2)
	const common = "MS_RECOVERY_PATH=/r/job-1-7-1-0 MS_ROLE=%s MS_SCHED_HOST=10.0.0.1 MS_SCHED_PORT=4001 " +
		"MS_SERVER_NUM=1 " +
		"MS_WORKER_NUM=8 OMP_NUM_THREADS=1 PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1"
	for i, want := range []string{
		"GLOG_log_dir=/logs/attempt_0/scheduler " + strings.Replace(common, "%s", "MS_SCHED", 1) + " RANK_ID=0 RANK_SIZE=8",
		"GLOG_log_dir=/logs/attempt_0/pserver-0 " + strings.Replace(common, "%s", "MS_PSERVER", 1) + " RANK_SIZE=8",
	} {
		require.Equal(t, want, strings.Join(sides[i].Env, " "))
	}
	require.Equal(t, "scheduler", sides[0].Name)
	require.Equal(t, "pserver-0", sides[1].Name)
}

// Where processes have nodes of their own, each has one side or none; else the first node has all of them.
func TestMindSporeSidesOfANode(t *testing.T) {
	p, err := Lookup("mindspore")
	require.NoError(t, err)
	for _, c := range []struct {
		share     string
		groupRank int
		want      string
	}{
		{"", 0, "scheduler pserver-0 pserver-1 "}, {"", 1, ""}, {"scheduler", 0, "scheduler "},
		{"pserver-1", 2, "pserver-1 "}, {Workers, 0, ""}, {Workers, 3, ""},
	} {
		v := mindsporeVars(nil)
		v.Servers, v.Share, v.GroupRank = 2, c.share, c.groupRank
		sides, err := p.SidesOf(v)
		require.NoError(t, err)
		names := ""
		for _, s := range sides {
			names += s.Name + " "
			require.Equal(t, c.share != "", slices.Contains(s.Env, "MS_NODE_ID="+s.Name), "a pod's may be that of another role")
		}
		require.Equal(t, c.want, names)
	}
}

func TestMindSporeInheritedSettingsCount(t *testing.T) {
	p, err := Lookup("mindspore")
	require.NoError(t, err)
	v := mindsporeVars(map[string]string{"GLOG_log_dir": "/mine", "MS_RECOVERY_PATH": "/r"})
	v.ServicePort = 8118
	sides, err := p.Sides(v)
	require.NoError(t, err)
	require.Len(t, sides, 1)
	env := strings.Join(sides[0].Env, " ")
	require.Contains(t, env, "MS_SCHED_PORT=8118")
	require.NotContains(t, env, "GLOG_log_dir")
	require.NotContains(t, env, "MS_RECOVERY_PATH", "without MS_ENABLE_RECOVERY nothing is read")
	v.World = nil
	_, err = p.Sides(v)
	require.ErrorContains(t, err, "preset mindspore: MS_SCHED_HOST")
}
