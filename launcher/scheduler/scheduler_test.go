package scheduler

import (
	"io/fs"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// system is a host with the variables and files of text: lines NAME=VALUE, \n in a value for a line's end, and
// PATH:CONTENT for files.
func system(host string, nodes int, lines ...string) System {
	env, files := map[string]string{}, map[string]string{}
	for _, line := range lines {
		line = strings.ReplaceAll(line, `\n`, "\n")
		if path, content, is := strings.Cut(line, ":"); is && strings.HasPrefix(line, "/") {
			files[path] = content
			continue
		}
		name, value, _ := strings.Cut(line, "=")
		env[name] = value
	}
	return System{
		Env: func(name string) (string, bool) { v, set := env[name]; return v, set },
		ReadFile: func(path string) ([]byte, error) {
			if text, is := files[path]; is {
				return []byte(text), nil
			}
			return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
		},
		Host: host, Nodes: nodes,
	}
}

func vars(text string) []string { return strings.Fields(text) }

// Variables as the schedulers set them.
const (
	slurmStep = `SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_NNODES=4 SLURM_NTASKS=4 SLURM_NODEID=2 SLURM_PROCID=2
		SLURM_LOCALID=0 SLURM_JOB_NODELIST=gpu[08-10],login1 SLURM_TASKS_PER_NODE=1(x4)`
	pyTorchJob = `PYTHONUNBUFFERED=1 MASTER_ADDR=job-master-0 MASTER_PORT=23456 RANK=1 WORLD_SIZE=2`
	volcanoJob = `VK_TASK_INDEX=1 VC_TASK_INDEX=1 VC_WORKER_HOSTS=tj-worker-0.tj,tj-worker-1.tj VC_WORKER_NUM=2
		VC_MASTER_HOSTS=tj-master-0.tj VC_MASTER_NUM=1`
	msJob     = `MS_SCHED_HOST=10.96.0.9 MS_SCHED_PORT=2223 MS_WORKER_NUM=4 MS_SERVER_NUM=2`
	indexed   = `JOB_COMPLETION_INDEX=3`
	mpiWorker = `K_MPI_JOB_ROLE=worker`
	sky       = `SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8 SKYPILOT_TASK_ID=sky-1`
	podHosts  = `/etc/hosts:127.0.0.1 localhost\n10.1.2.3 job-w-0-3.job.ns.svc.cluster.local job-w-0-3\n`
	mpiHosts  = `/etc/mpi/hostfile:j-worker-0.j.ns.svc slots=4\nj-worker-1.j.ns.svc slots=2\n`
)

func TestDetect(t *testing.T) {
	for name, c := range map[string]struct {
		s    System
		want Facts
	}{
		"nobody":               {system("host", 0), Facts{}},
		"nobody, many nodes":   {system("host-1", 4), Facts{}},
		"a half-set PyTorch":   {system("h", 0, "MASTER_ADDR=a", "RANK=0", "WORLD_SIZE=2"), Facts{}},
		"a worker of torchrun": {system("h", 0, append(vars(pyTorchJob), "LOCAL_RANK=0")...), Facts{}},
		"DLRover": {system("h", 0, "DLROVER_MASTER_ADDR=m:50001", "NODE_NUM=2", "NODE_RANK=1"),
			Facts{Name: "dlrover", Nodes: 2, MasterAddr: "m:50001", From: vars("DLROVER_MASTER_ADDR NODE_NUM")}},
		"Kubeflow": {system("h", 0, vars(pyTorchJob)...), Facts{Name: "kubeflow", Nodes: 2, NodeRank: 1,
			MasterAddr: "job-master-0", MasterPort: 23456, From: vars("MASTER_ADDR MASTER_PORT RANK WORLD_SIZE")}},
		"ms-operator, the scheduler": {system("j-a-scheduler-0", 0, append(vars(msJob), "MS_ROLE=MS_SCHED",
			"MS_NODE_ID=j-a-scheduler-0")...), Facts{Name: "ms-operator", Nodes: 7, MasterAddr: "10.96.0.9", MasterPort: 2223,
			Share: "scheduler", Preset: "mindspore", Servers: 2, RunID: "j-a", From: vars(`MS_NODE_ID MS_ROLE MS_SCHED_HOST
			MS_SCHED_PORT MS_SERVER_NUM MS_WORKER_NUM`)}},
		"ms-operator, a server": {system("j-ps-1", 0, append(vars(msJob), "MS_ROLE=MS_PSERVER")...), Facts{
			Name: "ms-operator", Nodes: 7, NodeRank: 2, MasterAddr: "10.96.0.9", MasterPort: 2223, Share: "pserver-1",
			Preset: "mindspore", Servers: 2, RunID: "j", From: vars(
				"MS_ROLE MS_SCHED_HOST MS_SCHED_PORT MS_SERVER_NUM MS_WORKER_NUM")}},
		"ms-operator, a worker": {system("h", 0, append(vars(msJob), "MS_ROLE=MS_WORKER", "MS_NODE_ID=3")...), Facts{
			Name: "ms-operator", Nodes: 7, NodeRank: 6, MasterAddr: "10.96.0.9", MasterPort: 2223, Share: "workers",
			Preset: "mindspore", Servers: 2, From: vars(
				"MS_NODE_ID MS_ROLE MS_SCHED_HOST MS_SCHED_PORT MS_SERVER_NUM MS_WORKER_NUM")}},
		"ms-operator, a worker without a number": {
			system("h", 0, vars("MS_ROLE=MS_WORKER MS_SCHED_HOST=s MS_WORKER_NUM=1")...),
			Facts{Name: "ms-operator", Nodes: 2, NodeRank: -1, MasterAddr: "s", MasterPort: 2222, Share: "workers",
				Preset: "mindspore", From: vars("MS_ROLE MS_SCHED_HOST MS_WORKER_NUM")}},
		"a worker of ours, of MindSpore": {system("h", 0, append(vars(msJob), "MS_ROLE=MS_WORKER", "LOCAL_RANK=0")...),
			Facts{}},
		"Slurm": {system("login1", 0, vars(slurmStep)...), Facts{Name: "slurm", Nodes: 4, NodeRank: 2, RunID: "4711.0",
			MasterAddr: "gpu08", MasterPort: 24711, From: vars(
				"SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_NNODES SLURM_NODEID SLURM_NTASKS SLURM_STEP_ID")}},
		"Slurm, all that it may say": {system("a", 0, vars(`SLURM_JOB_ID=10000 SLURM_STEPID=7 SLURM_STEP_NUM_NODES=1
			SLURM_NNODES=4 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=9 SLURM_PROCID=0 SLURM_STEP_NODELIST=a SLURM_JOB_NODELIST=a,b
			SLURM_GPUS_ON_NODE=8 SLURM_RESTART_COUNT=2 MASTER_PORT=1234`)...), Facts{Name: "slurm", Nodes: 1, RunID: "10000.7",
			MasterAddr: "a", MasterPort: 1234, Slots: 8, Restart: 2, From: vars(`MASTER_PORT SLURM_GPUS_ON_NODE SLURM_JOB_ID
			SLURM_PROCID SLURM_RESTART_COUNT SLURM_STEPID SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS`)}},
		"an allocation's shell": {system("login1", 0, "SLURM_JOB_ID=1", "SLURM_NNODES=4",
			"SLURM_JOB_NODELIST=a[1-4]"), Facts{}},
		"srun --pty":    {system("login1", 0, append(vars(slurmStep), "SLURM_PTY_PORT=3")...), Facts{}},
		"salloc's step": {system("l", 0, append(vars(slurmStep), "SLURM_STEP_ID=4294967290")...), Facts{}},
		"a JobSet": {system("job-w-0-3", 4, append(vars(indexed), podHosts, "JOBSET_RESTART_ATTEMPT=1")...),
			Facts{Name: "jobset", NodeRank: 3, MasterAddr: "job-w-0-0.job.ns.svc.cluster.local", MasterPort: 29500, Restart: 1,
				RunID: "job-w-0", From: vars("/etc/hosts JOBSET_RESTART_ATTEMPT JOB_COMPLETION_INDEX")}},
		"an Indexed Job that says where node 0 is": {system("j-3", 4, append(vars(indexed), "MASTER_ADDR=j-0.svc",
			"MASTER_PORT=7")...), Facts{Name: "jobset", NodeRank: 3, MasterAddr: "j-0.svc", MasterPort: 7, RunID: "j",
			From: vars("JOB_COMPLETION_INDEX MASTER_ADDR MASTER_PORT")}},
		"an Indexed Job of single nodes": {system("job-w-0-3", 0, append(vars(indexed), podHosts)...), Facts{}},
		"Volcano's worker behind a master": {system("tj-worker-1", 0, vars(volcanoJob)...), Facts{Name: "volcano", Nodes: 3,
			NodeRank: 2, MasterAddr: "tj-master-0.tj", MasterPort: 29500,
			From: vars("VC_MASTER_HOSTS VC_TASK_INDEX VC_WORKER_HOSTS")}},
		"Volcano's master": {system("tj-master-0", 0, append(vars(volcanoJob), "VC_TASK_INDEX=0")...), Facts{Name: "volcano",
			Nodes: 3, MasterAddr: "tj-master-0.tj", MasterPort: 29500,
			From: vars("VC_MASTER_HOSTS VC_TASK_INDEX VC_WORKER_HOSTS")}},
		"a task with dashes": {system("a-b-c-d-0", 0, "VC_TASK_INDEX=0", "VC_C_D_HOSTS=a-b-c-d-0.x,a-b-c-d-1.x"),
			Facts{Name: "volcano", Nodes: 2, MasterAddr: "a-b-c-d-0.x", MasterPort: 29500,
				From: vars("VC_C_D_HOSTS VC_TASK_INDEX")}},
		"Volcano's PyTorch has Kubeflow's variables": {system("tj-worker-1", 0, append(vars(volcanoJob), vars(
			"MASTER_ADDR=tj-master-0.tj MASTER_PORT=23456 RANK=2 WORLD_SIZE=4")...)...), Facts{Name: "kubeflow", Nodes: 4,
			NodeRank: 2, MasterAddr: "tj-master-0.tj", MasterPort: 23456,
			From: vars("MASTER_ADDR MASTER_PORT RANK WORLD_SIZE")}},
		"Volcano without its svc plug-in": {system("tj-worker-1", 0, "VC_TASK_INDEX=1"), Facts{}},
		"the MPI operator": {system("j-worker-1", 0, mpiWorker, mpiHosts), Facts{Name: "mpi", Nodes: 2, NodeRank: 1, Slots: 2,
			MasterAddr: "j-worker-0.j.ns.svc", MasterPort: 29500, From: vars("/etc/mpi/hostfile K_MPI_JOB_ROLE")}},
		"MPICH's file": {system("b", 0, mpiWorker, "HYDRA_HOST_FILE=/x", `/x:a:3\nb:5\n`), Facts{Name: "mpi", Nodes: 2,
			NodeRank: 1, Slots: 5, MasterAddr: "a", MasterPort: 29500, From: vars("/x HYDRA_HOST_FILE K_MPI_JOB_ROLE")}},
		"an MPI worker without the file": {system("j-worker-1", 0, mpiWorker), Facts{}},
		"Open MPI 5's file": {system("b", 0, mpiWorker, "PRTE_MCA_prte_default_hostfile=/x", `/x:a\nb slots=5\n`),
			Facts{Name: "mpi", Nodes: 2, NodeRank: 1, Slots: 5, MasterAddr: "a", MasterPort: 29500,
				From: vars("/x K_MPI_JOB_ROLE PRTE_MCA_prte_default_hostfile")}},
		"any MPI": {system("a", 0, "OMPI_MCA_orte_default_hostfile=/x", `/x:a slots=3`), Facts{}},
		"SkyPilot": {system("x", 0, append(vars(sky), `SKYPILOT_NODE_IPS=10.0.0.1\n10.0.0.2\n`)...), Facts{Name: "skypilot",
			Nodes: 2, NodeRank: 1, Slots: 8, MasterAddr: "10.0.0.1", MasterPort: 29500, RunID: "sky-1",
			From: vars("SKYPILOT_NODE_IPS SKYPILOT_NODE_RANK SKYPILOT_NUM_GPUS_PER_NODE SKYPILOT_TASK_ID")}},
		"SageMaker": {system("x", 0, `SM_HOSTS=["algo-1","algo-2"]`, "SM_CURRENT_HOST=algo-2", "SM_NUM_GPUS=0"),
			Facts{Name: "sagemaker", Nodes: 2, NodeRank: 1, MasterAddr: "algo-1", MasterPort: 29500,
				From: vars("SM_CURRENT_HOST SM_HOSTS SM_NUM_GPUS")}},
		"a StatefulSet": {system("job-w-0-3", 4, podHosts), Facts{Name: "statefulset", NodeRank: 3, RunID: "job-w-0",
			MasterAddr: "job-w-0-0.job.ns.svc.cluster.local", MasterPort: 29500, From: vars("/etc/hosts")}},
		"a machine that is called so": {system("gpu-1", 4, `/etc/hosts:10.0.0.1 gpu-1.example.com gpu-1\n`), Facts{}},
		"two that agree": {system("login1", 0, append(vars(slurmStep), vars(
			"MASTER_ADDR=gpu08 MASTER_PORT=1 RANK=2 WORLD_SIZE=4")...)...), Facts{Name: "kubeflow", Nodes: 4, NodeRank: 2,
			MasterAddr: "gpu08", MasterPort: 1, From: vars("MASTER_ADDR MASTER_PORT RANK WORLD_SIZE")}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := Detect(Auto, c.s)
			require.NoError(t, err)
			got.nodesFrom, got.hosts = "", nil
			require.Equal(t, c.want, got)
		})
	}
}

// Each error names what was read, the rule and the fix.
func TestDetectRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		scheduler string
		s         System
		want      []string
	}{
		"a role that nobody knows": {Auto, system("h", 0, append(vars(msJob), "MS_ROLE=MS_PS")...), []string{
			"ms-operator: $MS_ROLE=MS_PS: need MS_SCHED, MS_PSERVER or MS_WORKER; --scheduler=none"}},
		"more workers than there are": {Auto, system("h", 0, append(vars(msJob), "MS_ROLE=MS_WORKER",
			"MS_NODE_ID=j-worker-4")...), []string{"ms-operator: $MS_NODE_ID=j-worker-4 does not fit $MS_WORKER_NUM=4: " +
			"need a number from 0 to 3, or a name that ends with -worker-NUMBER"}},
		"a server where there is none": {"ms-operator", system("j-ps-0", 0, vars(
			"MS_ROLE=MS_PSERVER MS_SCHED_HOST=s MS_WORKER_NUM=1")...), []string{
			"--scheduler=ms-operator: $MS_ROLE=MS_PSERVER, but $MS_SERVER_NUM is not set, or 0"}},
		"ranks from 1": {Auto, system("h", 0, append(vars(pyTorchJob), "RANK=2")...), []string{
			"kubeflow: $RANK=2 does not fit $WORLD_SIZE=2", "ranks are from 0", "--scheduler=none"}},
		"not a number": {Auto, system("h", 0, append(vars(pyTorchJob), "WORLD_SIZE=two")...), []string{
			"$WORLD_SIZE=two: need a whole number from 1"}},
		"not a port": {Auto, system("h", 0, append(vars(pyTorchJob), "MASTER_PORT=0")...), []string{
			"$MASTER_PORT=0: need a whole number from 1 to 65535"}},
		"two schedulers": {Auto, system("h", 0, append(vars(slurmStep), vars(pyTorchJob)...)...), []string{
			"$WORLD_SIZE=2 (kubeflow) and $SLURM_NNODES=4 (slurm) contradict each other",
			"--scheduler=kubeflow or --scheduler=slurm"}},
		"several tasks on a node": {Auto, system("h", 0, append(vars(slurmStep), "SLURM_NTASKS=32")...), []string{
			"$SLURM_NTASKS=32 with $SLURM_NNODES=4", "srun --ntasks-per-node=1"}},
		"a rank too high": {Auto, system("h", 0, append(vars(slurmStep), "SLURM_NODEID=4")...), []string{
			"$SLURM_NODEID=4 does not fit $SLURM_NNODES=4", "from 0 to 3"}},
		"a list too short": {Auto, system("h", 0, append(vars(slurmStep), "SLURM_JOB_NODELIST=a[1-3]")...), []string{
			"$SLURM_JOB_NODELIST=a[1-3] lists 3 nodes, but $SLURM_NNODES=4"}},
		"a list with a typo": {Auto, system("h", 0, append(vars(slurmStep), "SLURM_JOB_NODELIST=a[1-4")...), []string{
			"$SLURM_JOB_NODELIST=a[1-4:", "bracket that is not closed"}},
		"no list": {Auto, system("h", 0, append(vars(slurmStep), "SLURM_JOB_NODELIST=")...), []string{
			"without $SLURM_JOB_NODELIST"}},
		"too many nodes": {Auto, system("h", 0, append(vars(slurmStep), "SLURM_NNODES=100001")...), []string{
			"$SLURM_NNODES=100001: need a whole number from 1 to 100000"}},
		"an odd job": {Auto, system("h", 0, append(vars(slurmStep), "SLURM_JOB_ID=x")...), []string{
			"$SLURM_JOB_ID=x: need the job's number"}},
		"a pod without a name": {Auto, system("job-w-0-3", 4, indexed), []string{
			"no name by which other pods reach it", "headless Service"}},
		"more pods than nodes": {Auto, system("job-w-0-3", 2, indexed, podHosts), []string{
			"$JOB_COMPLETION_INDEX=3 does not fit --nnodes, which holds 2"}},
		"more replicas than nodes": {Auto, system("job-w-0-3", 2, podHosts), []string{
			`host name "job-w-0-3" does not fit --nnodes, which holds 2`}},
		"a task that is not listed": {Auto, system("tj-worker-1", 0, "VC_TASK_INDEX=1", "VC_WORKER_HOSTS=a"), []string{
			"$VC_TASK_INDEX=1 does not fit $VC_WORKER_HOSTS, which has 1"}},
		"the MPI launcher": {Auto, system("j-launcher", 0, "K_MPI_JOB_ROLE=launcher", mpiHosts), []string{
			"does not list host j-launcher", "start dlrover-run in the workers"}},
		"a worker that is not listed": {Auto, system("w9", 0, mpiWorker, mpiHosts), []string{
			"/etc/mpi/hostfile does not list host w9", `"w9 slots=1"`}},
		"two launchers on a node": {Auto, system("a", 0, "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=4",
			"OMPI_COMM_WORLD_LOCAL_SIZE=2"), []string{"$OMPI_COMM_WORLD_LOCAL_SIZE=2", "ppr:1:node", "--scheduler=none"}},
		"a rank of mpirun too high": {Auto, system("a", 0, "OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=2"), []string{
			"$OMPI_COMM_WORLD_RANK=2 does not fit $OMPI_COMM_WORLD_SIZE=2"}},
		"a damaged host file": {Auto, system("w9", 0, mpiWorker, `/etc/mpi/hostfile:a slots=x`), []string{
			"/etc/mpi/hostfile: line 1"}},
		"SkyPilot's rank": {Auto, system("h", 0, append(vars(sky), "SKYPILOT_NODE_IPS=10.0.0.1")...), []string{
			"$SKYPILOT_NODE_RANK=1 does not fit $SKYPILOT_NODE_IPS, which has 1 lines"}},
		"SageMaker's list": {Auto, system("h", 0, "SM_HOSTS=algo-1", "SM_CURRENT_HOST=algo-1"), []string{
			"$SM_HOSTS=algo-1: need a list"}},
		"SageMaker's host": {Auto, system("h", 0, `SM_HOSTS=[]`, "SM_CURRENT_HOST=algo-1"), []string{
			"$SM_CURRENT_HOST=algo-1 is not in $SM_HOSTS=[]"}},
		"unknown": {"pbs", system("h", 0), []string{
			"--scheduler=pbs is unknown; use auto, none, or one of ms-operator, dlrover,"}},
		"named, and not there": {"slurm", system("h", 0), []string{
			"--scheduler=slurm needs $SLURM_JOB_ID and $SLURM_STEP_ID: start dlrover-run with srun"}},
		"named, and no number of nodes": {"statefulset", system("job-w-0-3", 0, podHosts), []string{
			"--scheduler=statefulset does not say how many nodes there are: give --nnodes"}},
		"named, and no Service": {"statefulset", system("job-3", 4),
			[]string{"--scheduler=statefulset: ", "headless Service"}},
		"named, and no file": {"mpi", system("a", 0), []string{"/etc/mpi/hostfile", "JOB-config"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Detect(c.scheduler, c.s)
			require.Error(t, err)
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
			require.NotContains(t, err.Error(), "\n")
		})
	}
}

// Who is named is asked alone, also inside of a worker.
func TestNamed(t *testing.T) {
	s := system("login1", 0, append(append(vars(slurmStep), vars(pyTorchJob)...), "LOCAL_RANK=0", "SLURM_PTY_PORT=1")...)
	for name, nodes := range map[string]int{"slurm": 4, "kubeflow": 2} {
		f, err := Detect(name, s)
		require.NoError(t, err)
		require.Equal(t, name, f.Name)
		require.Equal(t, nodes, f.Nodes)
	}
	f, err := Detect("mpi", system("a", 0, "OMPI_MCA_orte_default_hostfile=/x", `/x:a slots=3`))
	require.NoError(t, err)
	require.Equal(t, 3, f.Slots)
	require.Equal(t, []string{"ms-operator", "dlrover", "kubeflow"}, Names()[:3])
}

func TestANodeThatMayNotBeAlone(t *testing.T) {
	for name, c := range map[string]struct {
		system System
		want   string
	}{
		"MindSpore's role without more":   {system("h", 0, "MS_ROLE=MS_WORKER", "MS_WORKER_NUM=4"), "$MS_ROLE=MS_WORKER"},
		"a later pod of an indexed Job":   {system("job-2", 0, "JOB_COMPLETION_INDEX=2"), "$JOB_COMPLETION_INDEX=2"},
		"its first may be the only one":   {system("job-0", 0, "JOB_COMPLETION_INDEX=0"), ""},
		"Volcano without its plug-in":     {system("j-worker-1", 0, "VC_TASK_INDEX=1"), "$VC_TASK_INDEX=1"},
		"a rank of nobody knows how many": {system("a", 0, "MASTER_ADDR=b", "RANK=1"), "$RANK=1"},
		"a rank of anything":              {system("a", 0, "RANK=1"), ""},
		"MPI's worker without its file":   {system("a", 0, "K_MPI_JOB_ROLE=worker"), "$K_MPI_JOB_ROLE=worker"},
		"MPI's launcher":                  {system("a", 0, "K_MPI_JOB_ROLE=launcher"), ""},
		"Open MPI's second process":       {system("a", 0, "OMPI_COMM_WORLD_RANK=1"), "$OMPI_COMM_WORLD_RANK=1"},
		"its first":                       {system("a", 0, "OMPI_COMM_WORLD_RANK=0"), ""},
		"a later process of MPICH":        {system("a", 0, "PMI_RANK=2"), "$PMI_RANK=2"},
		"no number":                       {system("a", 0, "JOB_COMPLETION_INDEX=x"), ""},
		"a worker of a launcher":          {system("a", 0, "JOB_COMPLETION_INDEX=2", "LOCAL_RANK=0"), ""},
		"nothing":                         {system("a", 0), ""},
	} {
		require.Equal(t, c.want, Alone(c.system), name)
	}
}
