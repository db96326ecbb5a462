package native_test

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv/native"
)

const threeHosts = "host-a slots=2\nhost-b slots=4\n10.0.0.7 slots=2\n"

// ofHosts is host-a, or another one, with a host file and a job token.
func ofHosts(host, file string, vars map[string]string) *native.System {
	all := map[string]string{"DLROVER_TOKEN": "0123456789abcdef"}
	maps.Copy(all, vars)
	sys := node(all, map[string]string{"/job/hostfile": file})
	sys.Host = host
	sys.Owns = func(name string) bool { return name == host }
	return sys
}

func withDevices(sys *native.System, n int) *native.System {
	sys.Installed = func() (int, string) { return n, "cuda" }
	return sys
}

func TestDeepSpeedOnOneNode(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		line      string
		vars      map[string]string
		devices   int
		args, env string
	}{
		"all devices": {line: "train.py --deepspeed", devices: 4,
			args: "--preset=deepspeed --nproc-per-node=4 -- train.py --deepspeed"},
		"no devices": {line: "train.py", args: "--preset=deepspeed --nproc-per-node=2 -- train.py"}, // two NUMA nodes
		"devices that are not wanted": {line: "train.py", devices: 4, vars: map[string]string{"DS_ACCELERATOR": "cpu"},
			args: "--preset=deepspeed --nproc-per-node=2 -- train.py"},
		"visible devices": {line: "train.py", devices: 4, vars: map[string]string{"CUDA_VISIBLE_DEVICES": "3,1,GPU-7"},
			args: "--preset=deepspeed --nproc-per-node=3 -- train.py"},
		"some devices": {line: "--num_gpus 2 train.py", devices: 4,
			args: "--preset=deepspeed --nproc-per-node=2 -- train.py", env: "CUDA_VISIBLE_DEVICES=0,1"},
		"the other name": {line: "--num_accelerators=3 train.py",
			args: "--preset=deepspeed --nproc-per-node=3 -- train.py", env: "CUDA_VISIBLE_DEVICES=0,1,2"},
		"one node": {line: "--num_nodes 1 --num_gpus 1 train.py", devices: 4, env: "CUDA_VISIBLE_DEVICES=0",
			args: "--preset=deepspeed --nproc-per-node=1 --nnodes=1 --standalone -- train.py"},
		"included": {line: "-i localhost:3,1 train.py", devices: 4, env: "CUDA_VISIBLE_DEVICES=1,3",
			args: "--preset=deepspeed --nproc-per-node=2 --nnodes=1 --standalone -- train.py"},
		"excluded, with a port": {line: "-e localhost:0 --master_port 29501 train.py", devices: 4,
			env:  "CUDA_VISIBLE_DEVICES=1,2,3",
			args: "--preset=deepspeed --nproc-per-node=3 --nnodes=1 --rdzv-backend=static --master-port=29501 -- train.py"},
		"a port": {line: "--master_port=29501 train.py", devices: 1,
			args: "--preset=deepspeed --nproc-per-node=1 --master-port=29501 -- train.py"},
		"no host file": {line: "-H /dev/null train.py", devices: 1,
			args: "--preset=deepspeed --nproc-per-node=1 -- train.py"},
		"a module": {line: "--module --no_local_rank pkg.train --lr 1", devices: 1,
			args: "--preset=deepspeed --nproc-per-node=1 --module --no-local-rank -- pkg.train --lr 1"},
		"a program": {line: "--no_python ./train --num_gpus=9", devices: 1,
			args: "--preset=deepspeed --nproc-per-node=1 --no-python -- ./train --num_gpus=9"},
		"a virtual environment": {line: "--venv_script=/opt/v/bin/activate train.py", devices: 1,
			vars: map[string]string{"PATH": "/bin"}, args: "--preset=deepspeed --nproc-per-node=1 -- train.py",
			env: "PYTHON_EXEC=/opt/v/bin/python VIRTUAL_ENV=/opt/v PATH=/opt/v/bin:/bin"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := translate(t, "deepspeed", withDevices(node(c.vars, nil), c.devices), strings.Fields(c.line)...)
			require.NoError(t, err)
			require.Equal(t, c.args, strings.Join(got.Args, " "))
			require.Equal(t, c.env, strings.Join(got.Env, " "))
			require.Empty(t, got.Notes)
		})
	}
}

func TestDeepSpeedOnSeveralNodes(t *testing.T) {
	t.Parallel()
	const met = " --rdzv-backend=static --master-addr=host-a --master-port=29500"
	for name, c := range map[string]struct {
		host, line, file string
		vars             map[string]string
		args, env        string
	}{
		"first": {host: "host-a", line: "train.py", env: "CUDA_VISIBLE_DEVICES=0,1",
			args: "--nproc-per-node=2 --nnodes=3" + met + " --node-rank=0 --live-hostfile"},
		"with more slots": {host: "host-b", line: "train.py", env: "CUDA_VISIBLE_DEVICES=0,1,2,3",
			args: "--nproc-per-node=4 --nnodes=3" + met + " --node-rank=1 --live-hostfile"},
		"by address": {host: "10.0.0.7", line: "train.py", env: "CUDA_VISIBLE_DEVICES=0,1",
			args: "--nproc-per-node=2 --nnodes=3" + met + " --node-rank=2 --live-hostfile"},
		"by the pod's name": {host: "x", vars: map[string]string{"POD_NAME": "host-b"}, line: "train.py",
			args: "--nproc-per-node=4 --nnodes=3" + met + " --node-rank=1 --live-hostfile", env: "CUDA_VISIBLE_DEVICES=0,1,2,3"},
		"by the pod's address": {host: "x", vars: map[string]string{"POD_IP": "10.0.0.7"}, line: "train.py",
			args: "--nproc-per-node=2 --nnodes=3" + met + " --node-rank=2 --live-hostfile", env: "CUDA_VISIBLE_DEVICES=0,1"},
		"by rank": {host: "x", line: "--no_ssh --node_rank=1 --master_addr=fd00::1 --master_port=7000 train.py",
			args: "--nproc-per-node=4 --nnodes=3 --rdzv-backend=static --master-addr=fd00::1 --master-port=7000 " +
				"--node-rank=1 --live-hostfile", env: "CUDA_VISIBLE_DEVICES=0,1,2,3"},
		"with a domain": {host: "host-b", file: "host-a.svc slots=1\nhost-b.svc slots=1", line: "train.py",
			args: "--nproc-per-node=1 --nnodes=2 --rdzv-backend=static --master-addr=host-a.svc --master-port=29500 " +
				"--node-rank=1 --live-hostfile", env: "CUDA_VISIBLE_DEVICES=0"},
		"the first two": {host: "host-b", line: "--num_nodes 2 --num_gpus=1 train.py", env: "CUDA_VISIBLE_DEVICES=0",
			args: "--nproc-per-node=1 --nnodes=2" + met + " --node-rank=1 --live-hostfile"},
		"included": {host: "10.0.0.7", line: "--include=10.0.0.7@host-b:3,1 train.py", env: "CUDA_VISIBLE_DEVICES=0,1",
			args: "--nproc-per-node=2 --nnodes=2 --rdzv-backend=static --master-addr=host-b --master-port=29500 " +
				"--node-rank=1 --live-hostfile"},
		"excluded": {host: "host-b", line: "--exclude=host-a@host-b:0 train.py", env: "CUDA_VISIBLE_DEVICES=1,2,3",
			args: "--nproc-per-node=3 --nnodes=2 --rdzv-backend=static --master-addr=host-b --master-port=29500 " +
				"--node-rank=0 --live-hostfile"},
		"only one": {host: "host-b", line: "-i host-b:2 train.py", env: "CUDA_VISIBLE_DEVICES=2",
			args: "--nproc-per-node=1 --nnodes=1 --standalone"},
		"elastic": {host: "host-b", line: "--elastic_training --min_elastic_nodes=2 --max_elastic_nodes=5 train.py",
			args: "--nproc-per-node=4 --nnodes=2:5 --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=host-a:29500 " +
				"--node-rank=1 --live-hostfile", env: "CUDA_VISIBLE_DEVICES=0,1,2,3"},
		"elastic by a variable": {host: "host-b", line: "train.py", vars: map[string]string{"PET_NNODES": "1:8"},
			args: "--nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=host-a:29500 --node-rank=1 --live-hostfile",
			env:  "CUDA_VISIBLE_DEVICES=0,1,2,3"},
		"with a daemon": {host: "host-b", line: "train.py", env: "CUDA_VISIBLE_DEVICES=0,1,2,3",
			vars: map[string]string{"DLROVER_MASTER_ADDR": "m:1", "PET_LIVE_HOSTFILE": "/job/live"},
			args: "--nproc-per-node=4 --nnodes=3 --node-rank=1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.file == "" {
				c.file = threeHosts
			}
			got, err := translate(t, "deepspeed", ofHosts(c.host, c.file, c.vars), strings.Fields(c.line)...)
			require.NoError(t, err)
			require.Equal(t, "--preset=deepspeed "+c.args+" -- train.py", strings.Join(got.Args, " "))
			require.Equal(t, c.env, strings.Join(got.Env, " "))
			require.NotEmpty(t, got.Hosts)
		})
	}
}

func TestDeepSpeedRefuses(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"-i a -e b s":                                 "--include and --exclude contradict",
		"-i a --num_gpus=1 s":                         "--num_nodes and --num_gpus contradict --include and --exclude",
		"-e a --num_nodes=0 s":                        "contradict",
		"--module --no_python s":                      "--module and --no_python contradict",
		"--launcher=rsh s":                            "--launcher=rsh is unknown: there are pdsh, ssh, openmpi",
		"--no_ssh --rsh=x s":                          "--no_ssh and --rsh contradict",
		"--num_gpu=3 s":                               "--num_gpus=3: host host-a has 2 slots in /job/hostfile",
		"--num_gpus=9999 s":                           "need at most 4096",
		"--node_rank=3 s":                             "--node_rank=3: 3 hosts are used; need a number from 0 to 2",
		"--include=host-z s":                          `"host-z": there is no such host; there are host-a, host-b, 10.0.0.7`,
		"--exclude=host-b:4 s":                        "host host-b has no slot 4; it has 0 to 3",
		"--include=host-a:x s":                        "need numbers of slots",
		"--master_port=0 s":                           "--master_port=0: need a port from 1 to 65535",
		"--hostfile=typo s":                           "--hostfile=typo: line 2: \"slot=4\" is not understood",
		"--hostfile=bare s":                           "--hostfile=bare: line 1: host host-a has no number of slots; write",
		"--hostfile=empty s":                          "--hostfile=empty: no line names a host",
		"-H others s":                                 "this node, host-a, is not in others, which has w-0, w-1",
		"-H twice s":                                  "host-a.x, host-a.y of twice are all this node: say by --node_rank",
		"-H missing --num_nodes=2 s":                  "--num_nodes=2 needs a host file, and there is no missing",
		"-H /dev/null --node_rank=1 s":                "--node_rank=1 needs a host file",
		"--autotuning=tune s":                         "--autotuning=tune with 3 nodes",
		"--autotuning=on s":                           "invalid choice: 'on' (choose from 'tune', 'run')",
		"--log_level=loud s":                          "invalid choice: 'loud'",
		"--elastic_training --max_elastic_nodes=0 s":  "1:0 breaks 0 < MIN <= MAX",
		"--bind_cores_to_rank --bind_core_list=0 s":   "there are 1 cores (0) for 2 ranks",
		"--bind_cores_to_rank --bind_core_list=0-9 s": "this process may not use core 8; it may use 0-7",
		"--bind_cores_to_rank --bind_core_list=x s":   "--bind_core_list=x: need numbers and ranges",
		"--num_gpuss=1 s":                             "did you mean --num_gpus?",
		"":                                            "the following arguments are required",
	} {
		sys := node(map[string]string{"PET_INSECURE": "1"}, map[string]string{
			"/job/hostfile": threeHosts, "typo": "host-a slots=2\nhost-b slot=4", "bare": "host-a", "empty": "# none\n",
			"others": "w-0 slots=1\nw-1 slots=1", "twice": "host-a.x slots=1\nhost-a.y slots=1",
		})
		sys.Owns = func(host string) bool { return strings.HasPrefix(host, "host-a") }
		_, err := translate(t, "deepspeed", sys, strings.Fields(line)...)
		require.ErrorContains(t, err, want, line)
		require.NotContains(t, err.Error(), "\n")
	}
	_, err := translate(t, "deepspeed", withDevices(ofHosts("host-b", threeHosts, nil), 2), "s")
	require.ErrorContains(t, err, "slot 3 of host-b is to be used, and this node has 2 devices (cuda)")
	sys := ofHosts("host-a", threeHosts, map[string]string{"KMP_AFFINITY": ""})
	_, err = translate(t, "deepspeed", sys, "--bind_cores_to_rank", "s")
	require.ErrorContains(t, err, "$KMP_AFFINITY")
	sys.ReadFile = func(string) ([]byte, error) { return nil, errors.New("open /job/hostfile: permission denied") }
	_, err = translate(t, "deepspeed", sys, "s")
	require.ErrorContains(t, err, "permission denied")
}

// A host that is not used has nothing to do, which is no error of the command line.
func TestDeepSpeedOnAHostThatIsNotUsed(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"-e host-b s", "-i host-a s", "--num_nodes=1 s"} {
		_, err := translate(t, "deepspeed", ofHosts("host-b", threeHosts, nil), strings.Fields(line)...)
		var idle *native.IdleError
		require.ErrorAs(t, err, &idle, line)
		require.ErrorContains(t, err, "host host-b is not among those that are used")
	}
}

func TestDeepSpeedNotes(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"--launcher=OpenMPI --launcher_args=-x --no_ssh_check --force_multi --ssh_port=22 s": "without effect here: " +
			"--no_ssh_check --launcher=OpenMPI --launcher_args=-x --ssh_port=22 --force_multi",
		"--hostfile=missing s":             "--hostfile=missing: there is no such file, so this node trains alone",
		"--num_nodes=9 s":                  "--num_nodes=9: /job/hostfile has 3 hosts",
		"--bind_core_list=0 s":             "--bind_core_list has no effect without",
		"--max_elastic_nodes=2 s":          "--max_elastic_nodes has no effect without",
		"--elastic_training s":             "is --nnodes=1:3 here",
		"--venv_script=conda.sh s":         "--venv_script=conda.sh is no bin/activate",
		"-H /dev/null --num_gpus=1 s":      "$CUDA_VISIBLE_DEVICES=5 has no effect",
		"s":                                "node 0 of /job/hostfile; the nodes meet at host-a:29500",
		"--autotuning=run --num_nodes=1 s": "--autotuning=run: DeepSpeed's own launcher runs on this node",
	} {
		sys := ofHosts("host-a", threeHosts, map[string]string{"CUDA_VISIBLE_DEVICES": "5"})
		got, err := translate(t, "deepspeed", sys, strings.Fields(line)...)
		require.NoError(t, err, line)
		require.Contains(t, strings.Join(got.Notes, "\n"), want, line)
	}
}

func TestDeepSpeedOutput(t *testing.T) {
	t.Parallel()
	got, err := translate(t, "deepspeed", node(nil, nil), "--enable_each_rank_log=out", "--save_pid", "-q", "s")
	require.NoError(t, err)
	require.Equal(t, &native.RankLogs{Dir: "out", Name: "{time}_rank{rank}.log"}, got.RankLogs)
	require.Equal(t, []string{"/tmp/{pid}.deepspeed", "/tmp/{pid}.ds"}, got.PIDFiles)
	require.Equal(t, "error", got.LogLevel)
	got, err = translate(t, "deepspeed", node(nil, nil), "--enable_each_rank_log=None", "--log_level=debug", "s")
	require.NoError(t, err)
	require.Nil(t, got.RankLogs)
	require.Equal(t, "debug", got.LogLevel)
}

func TestDeepSpeedBindsCores(t *testing.T) {
	t.Parallel()
	siblings := map[string]string{}
	for cpu, mates := range []string{"0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"} {
		siblings["/sys/devices/system/cpu/cpu"+string(rune('0'+cpu))+"/topology/thread_siblings_list"] = mates + "\n"
	}
	for line, want := range map[string][][]int{
		"--num_gpus=2 --bind_cores_to_rank s":                          {{0, 1}, {2, 3}},
		"--num_gpus=3 --bind_cores_to_rank s":                          {{0}, {1}, {2}},
		"--num_gpus=2 --bind_cores_to_rank --bind_core_list=1,3-5,7 s": {{1, 3}, {4, 5}},
		"--num_gpus=2 s": nil,
	} {
		got, err := translate(t, "deepspeed", node(nil, siblings), strings.Fields(line)...)
		require.NoError(t, err)
		require.Equal(t, want, got.CPUs, line)
		if want != nil {
			require.Contains(t, got.Env, "OMP_NUM_THREADS="+string(rune('0'+len(want[0]))))
		}
	}
}

func TestDeepSpeedEnvironmentFiles(t *testing.T) {
	t.Parallel()
	files := map[string]string{
		"/job/hostfile":        threeHosts,
		"/root/.deepspeed_env": "# all nodes\nA=1\nB=home\n",
		".deepspeed_env":       "B=here\r\n\n C = x y \nD=\"q\"\nE=$A-${B}$C\nF=$NONE$ ${}${A $1\nLD=/x:$LD\n",
		"own.env":              "Z=1",
		"bad.env":              "A=1\nexport B=2\n",
		"bare.env":             "A",
	}
	vars := map[string]string{"HOME": "/root", "LD": "/y", "CUDA_VISIBLE_DEVICES": "0", "PET_INSECURE": "1"}
	sys := node(vars, files)
	got, err := translate(t, "deepspeed", sys, "s")
	require.NoError(t, err)
	require.Equal(t, []string{"CUDA_VISIBLE_DEVICES=0,1", "A=1", "B=home", "B=here", "C=x y", "D=q", "E=1-herex y",
		"F=$ ${}${A $1", "LD=/x:/y"}, got.Env)
	require.Equal(t, []string{"A", "B", "B", "C", "D", "E", "F", "LD"}, got.Unshown, "they may be secrets")

	got, err = translate(t, "deepspeed", sys, "--num_nodes=1", "s")
	require.NoError(t, err)
	require.Len(t, got.Env, 1, "DeepSpeed gives them to several nodes only")

	vars["DS_ENV_FILE"] = "own.env"
	got, err = translate(t, "deepspeed", sys, "s")
	require.NoError(t, err)
	require.Equal(t, []string{"CUDA_VISIBLE_DEVICES=0,1", "Z=1"}, got.Env)
	require.NotContains(t, strings.Join(got.Notes, "\n"), "DS_ENV_FILE")
	vars["DS_ENV_FILE"] = "none.env"
	got, err = translate(t, "deepspeed", sys, "s")
	require.NoError(t, err)
	require.Contains(t, strings.Join(got.Notes, "\n"),
		"DS_ENV_FILE=none.env: there is no /root/none.env and no none.env: ")
	for _, name := range []string{"bad.env", "bare.env"} {
		vars["DS_ENV_FILE"] = name
		_, err = translate(t, "deepspeed", sys, "s")
		require.ErrorContains(t, err, "variables of the workers in "+name+": line ")
	}
}

// Without a token the key by which the nodes reach each other over ssh makes one; who knows the token knows no key.
func TestDeepSpeedToken(t *testing.T) {
	t.Parallel()
	files := map[string]string{"/job/hostfile": threeHosts, "local": "127.0.0.1 slots=1\nlocalhost slots=1"}
	vars := map[string]string{"HOME": "/root"}
	_, err := translate(t, "deepspeed", node(vars, files), "s")
	require.ErrorContains(t, err, "the nodes meet at host-a, on a network, which needs a job token")
	_, err = translate(t, "deepspeed", node(vars, files), "-H", "local", "--node_rank=1", "s")
	require.NoError(t, err)

	files["key"] = "a token"
	got, err := translate(t, "deepspeed", node(vars, files), "s")
	require.NoError(t, err)
	require.Equal(t, "a token for deepspeed at port 29500, run ", got.Token)
	require.Contains(t, strings.Join(got.Notes, "\n"), "the job token is derived from /root/.ssh/id_rsa")
	require.NotContains(t, strings.Join(append(got.Args, got.Env...), " "), got.Token)

	vars["PET_RDZV_ID"] = "7"
	got, err = translate(t, "deepspeed", node(vars, files), "--master_port=1234", "s")
	require.NoError(t, err)
	require.Equal(t, "a token for deepspeed at port 1234, run 7", got.Token)
	vars["PET_INSECURE"] = "1"
	got, err = translate(t, "deepspeed", node(vars, files), "s")
	require.NoError(t, err)
	require.Empty(t, got.Token)
}

func TestDeepSpeedTunes(t *testing.T) {
	t.Parallel()
	const runner = "-u -m deepspeed.launcher.runner --hostfile=/dev/null --autotuning=tune "
	for line, want := range map[string]string{
		"-H /dev/null --autotuning tune s --deepspeed c.json":   "s --deepspeed c.json",
		"--autotuning tune --num_gpus=2 --num_nodes=1 s":        "--num_nodes=1 --num_gpus=2 s",
		"--autotuning tune --num_nodes=1 --no_ssh_check -q s":   "--num_nodes=1 --quiet --include=localhost:0,1 s",
		"--autotuning tune -i host-a:1 --master_port=1234 s -q": "--master_port=1234 --include=localhost:1 s -q",
	} {
		got, err := translate(t, "deepspeed", ofHosts("host-a", threeHosts, nil), strings.Fields(line)...)
		require.NoError(t, err)
		require.Equal(t, runner+want, strings.Join(got.Become, " "))
	}
}
