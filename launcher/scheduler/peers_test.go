package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPeersOf(t *testing.T) {
	type c struct {
		s     System
		host  string
		nodes int
		want  string // by spaces
		from  string
	}
	const pods = "the names of the pods"
	for name, c := range map[string]c{
		"an elastic PyTorchJob": {system("job-worker-2", 0), "job-worker-0", 3,
			"job-worker-0 job-worker-1 job-worker-2", pods},
		"its first pod": {system("job-worker-0", 0), "job-worker-0", 2, "job-worker-0 job-worker-1", pods},
		"by full names": {system("w-1.s.ns.svc.cluster.local", 0), "w-0.s.ns", 2,
			"w-0.s.ns w-1.s.ns", pods},
		"in capitals":        {system("W-1", 0), "w-0", 2, "w-0 w-1", pods},
		"the first of many":  {system("w-10", 0), "w-0", 11, "w-0 w-1 w-2 w-3 w-4 w-5 w-6 w-7 w-8 w-9 w-10", pods},
		"a name with digits": {system("a-1-1", 0), "a-1-0", 2, "a-1-0 a-1-1", pods},
		"a PyTorchJob's master": {system("job-master-0", 0, vars(pyTorchJob)...), "job-master-0", 3,
			"job-master-0 job-worker-0 job-worker-1", pods},
		"its worker": {system("job-worker-1", 0, vars(pyTorchJob)...), "job-master-0.ns.svc", 3,
			"job-master-0.ns.svc job-worker-0.ns.svc job-worker-1.ns.svc", pods},
		"pods that are called masters": {system("job-master-1", 0), "job-master-0", 2, "job-master-0 job-master-1", pods},
		"another job's pod":            {system("other-worker-1", 0), "job-worker-0", 2, "", ""},
		"another job's worker":         {system("other-worker-0", 0), "job-master-0", 2, "", ""},
		"a pod too many":               {system("job-worker-2", 0), "job-worker-0", 2, "", ""},
		"a worker too many":            {system("job-worker-1", 0), "job-master-0", 2, "", ""},
		"not the first pod":            {system("job-worker-1", 0), "job-worker-1", 2, "", ""},
		"a leading zero":               {system("n-01", 0), "n-0", 2, "", ""},
		"no number":                    {system("host-a", 0), "host-0", 2, "", ""},
		"no name":                      {system("-1", 0), "-0", 2, "", ""},
		"only a master":                {system("-worker-0", 0), "-master-0", 2, "", ""},
		"an address":                   {system("w-1", 0), "10.0.0.1", 2, "", ""},
		"nothing":                      {system("", 0), "", 2, "", ""},
		"one node":                     {system("w-0", 0), "w-0", 1, "", ""},
		"too many":                     {system("w-1", 0), "w-0", maxPeers + 1, "", ""},
		"no host's name":               {system("w w-1", 0), "w w-0", 2, "", ""},
		"Volcano": {system("tj-worker-1", 0, vars(volcanoJob)...), "tj-master-0.tj", 3,
			"tj-master-0.tj tj-worker-0.tj tj-worker-1.tj", "VC_MASTER_HOSTS, VC_TASK_INDEX, VC_WORKER_HOSTS"},
		"Volcano's PyTorch": {system("tj-worker-1", 0, append(vars(volcanoJob), vars(
			"MASTER_ADDR=tj-master-0 MASTER_PORT=1 RANK=2 WORLD_SIZE=3")...)...), "tj-master-0", 3,
			"tj-master-0.tj tj-worker-0.tj tj-worker-1.tj",
			"MASTER_PORT, VC_MASTER_HOSTS, VC_TASK_INDEX, VC_WORKER_HOSTS"},
		"Volcano, elsewhere": {system("x", 0, vars(volcanoJob)...), "other.tj", 3, "", ""},
		"the MPI operator": {system("j-worker-1", 0, mpiWorker, mpiHosts), "j-worker-0.j.ns.svc", 2,
			"j-worker-0.j.ns.svc j-worker-1.j.ns.svc", "/etc/mpi/hostfile, K_MPI_JOB_ROLE"},
		"SkyPilot": {system("x", 0, append(vars(sky), `SKYPILOT_NODE_IPS=10.0.0.1\n10.0.0.12\n`)...), "10.0.0.1", 2,
			"10.0.0.1 10.0.0.12", "SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK, SKYPILOT_NUM_GPUS_PER_NODE, SKYPILOT_TASK_ID"},
		"SkyPilot, elsewhere": {system("x", 0, append(vars(sky), `SKYPILOT_NODE_IPS=10.0.0.1\n10.0.0.2\n`)...), "10", 2, "",
			""},
		"IPv6": {system("x", 0, append(vars(sky), `SKYPILOT_NODE_IPS=fd00::1\nfd00::2\n`)...), "fd00::1", 2,
			"fd00::1 fd00::2", "SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK, SKYPILOT_NUM_GPUS_PER_NODE, SKYPILOT_TASK_ID"},
		"SageMaker": {system("x", 0, `SM_HOSTS=["algo-1","algo-2"]`, "SM_CURRENT_HOST=algo-2"), "algo-1", 2,
			"algo-1 algo-2", "SM_CURRENT_HOST, SM_HOSTS"},
		"SageMaker's oddity": {system("x", 0, `SM_HOSTS=["algo-1","a b"]`, "SM_CURRENT_HOST=algo-1"), "algo-1", 2, "", ""},

		"Slurm, whose machines other users may share": {system("login1", 0, vars(slurmStep)...), "gpu08", 4, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := Detect(Auto, c.s)
			require.NoError(t, err)
			for _, f := range []Facts{f, {}} { // called torchrun, we have asked for nothing
				got := PeersOf(f, inPod(c.s), c.host, c.nodes)
				require.Equal(t, c.want, strings.Join(got.Names, " "))
				require.Equal(t, c.from, got.From)
			}
		})
	}
}

// inPod adds what the kubelet tells every pod.
func inPod(s System) System {
	env := s.Env
	s.Env = func(name string) (string, bool) {
		if name == "KUBERNETES_SERVICE_HOST" {
			return "10.0.0.1", true
		}
		return env(name)
	}
	return s
}

func TestMachinesThatAreCalledLikePodsAreNone(t *testing.T) {
	require.Empty(t, PeersOf(Facts{}, system("w-0", 0), "w-0", 2))
}

// Lists of pods count in pods whose network, and so whose name, is their own.
func TestListsOfPodsElsewhere(t *testing.T) {
	mpiByAddress := []string{mpiWorker, "POD_IP=10.0.0.5", `/etc/mpi/hostfile:j-worker-0.j.ns.svc\n10.0.0.5\n`}
	for _, c := range []struct {
		own, host string
		vars      []string
		names     []string // of pods that are served
	}{
		{"tj-worker-1", "tj-master-0.tj", vars(volcanoJob), []string{"tj-master-0.tj", "tj-worker-0.tj", "tj-worker-1.tj"}},
		{"gpu08", "tj-master-0.tj", vars(volcanoJob), nil},
		{"j-worker-1", "j-worker-0.j.ns.svc", []string{mpiWorker, mpiHosts},
			[]string{"j-worker-0.j.ns.svc", "j-worker-1.j.ns.svc"}},
		{"gpu08", "j-worker-0.j.ns.svc", mpiByAddress, nil},
	} {
		s := system(c.own, 0, c.vars...)
		f, err := Detect(Auto, s)
		require.NoError(t, err)
		for _, f := range []Facts{f, {}} {
			require.Equal(t, c.names, PeersOf(f, inPod(s), c.host, 3).Names, c.own)
			require.Empty(t, PeersOf(f, s, c.host, 3), "no pod")
		}
	}
}

func TestPeersText(t *testing.T) {
	for n, want := range map[int]string{2: "w-0, w-1", 4: "w-0, w-1, w-2, w-3", 12: "w-0, w-1, w-2 ... w-11 (12 hosts)"} {
		require.Equal(t, want, PeersOf(Facts{}, inPod(system("w-0", 0)), "w-0", n).String())
	}
}

// Whatever variables and names hold: names of hosts, the meeting place among them.
func FuzzPeersOf(f *testing.F) {
	f.Add("job-worker-1", "job-worker-0", 3, "")
	f.Add("job-worker-1", "job-master-0.ns", 3, "")
	f.Add("tj-worker-1", "tj-master-0", 3, strings.Join(vars(volcanoJob), "\x00"))
	f.Add("login1", "gpu08", 4, strings.Join(vars(slurmStep), "\x00"))
	f.Add("x", "10.0.0.1", 2, strings.Join(vars(sky), "\x00")+"\x00SKYPILOT_NODE_IPS=10.0.0.1 2")
	f.Fuzz(func(t *testing.T, own, host string, nodes int, lines string) {
		p := PeersOf(Facts{}, inPod(system(own, 0, strings.Split(lines, "\x00")...)), host, min(nodes, 200))
		if len(p.Names) == 0 {
			require.Empty(t, p.From)
			return
		}
		require.NotEmpty(t, p.From)
		require.LessOrEqual(t, len(p.Names), maxPeers)
		require.Len(t, slices.Compact(slices.Sorted(slices.Values(p.Names))), len(p.Names))
		require.True(t, slices.ContainsFunc(p.Names, func(n string) bool { return sameHost(n, host) }), fmt.Sprint(p))
		require.NotContains(t, p.String(), "\n")
	})
}
