package native_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv/native"
)

// ofShells is a System with programs in PATH.
func ofShells(host string, vars map[string]string, programs ...string) *native.System {
	sys := ofHosts(host, threeHosts, vars)
	sys.Has = func(program string) bool {
		return strings.Contains(" "+strings.Join(programs, " ")+" ", " "+program+" ")
	}
	return sys
}

const sshEnd = " -T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=6 {host}"

func TestDeepSpeedStartsHosts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		host, line  string
		vars        map[string]string
		here        int
		shell, args string
		hosts       string
	}{
		"first host":  {host: "host-a", line: "s", here: 0},
		"second host": {host: "host-b", line: "s", here: 1},
		"outside":     {host: "launcher", line: "s", here: -1},
		"one that is not used": {host: "host-a", line: "-e host-a s", here: -1, hosts: "host-b 10.0.0.7",
			args: "--exclude=host-a"},
		"a single other one": {host: "launcher", line: "--num_nodes=1 s", here: -1, hosts: "host-a", args: "--num_nodes=1"},
		"a single one by force": {host: "host-a", line: "--num_nodes=1 --force_multi s", here: 0, hosts: "host-a",
			args: "--num_nodes=1"},
		"options of the job": {host: "host-a", line: "--num_gpus=1 --module --master_port 7 --launcher=openmpi -q s", here: 0,
			args: "--num_gpus=1 --master_port=7 --module --quiet"},
		"a port": {host: "host-a", line: "--ssh_port=2222 s", here: 0, shell: "ssh -p 2222 -a -x" + sshEnd},
		"pdsh's": {host: "host-a", line: "--launcher_args=-l#me#-t5#-f#9#-S s",
			shell: "ssh -l me -o ConnectTimeout=5 -a -x" + sshEnd},
		"ssh's": {host: "host-a", line: "--launcher=ssh --launcher_args=-v#-i#'a#b' s",
			shell: "ssh -v -i a b -a -x" + sshEnd},
		"of others": {host: "host-a", line: "--launcher=slurm --launcher_args=-x s", here: 0},
		"PDSH's variables": {host: "host-a", line: "s", here: 0, shell: "ssh -F cfg -lme -oHostKeyAlias={host}" + sshEnd,
			vars: map[string]string{"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS": "-2 -l%u %h -oHostKeyAlias=%h", "USER": "me",
				"PDSH_SSH_ARGS_APPEND": "-F cfg"}},
		"another shell": {host: "host-a", line: "--rsh=kubectl#exec#-i#{host}#-- s",
			shell: "kubectl exec -i {host} --"},
		"by variable": {host: "host-a", line: "s", here: 0, shell: "kubectl {host}",
			vars: map[string]string{"PET_RSH": "kubectl {host}", "PDSH_RCMD_TYPE": "rsh"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			words := strings.Fields(c.line)
			for i, w := range words {
				words[i] = strings.ReplaceAll(w, "#", " ")
			}
			got, err := translate(t, "deepspeed", ofShells(c.host, c.vars, "ssh", "kubectl"), words...)
			require.NoError(t, err)
			r := got.Remote
			require.NotNil(t, r)
			if c.shell == "" {
				c.shell = "ssh -a -x" + sshEnd
			}
			if c.hosts == "" {
				c.hosts = "host-a host-b 10.0.0.7"
			}
			require.Equal(t, c.hosts, strings.Join(r.Hosts, " "))
			require.Equal(t, c.here, r.Here)
			require.Equal(t, c.shell, strings.Join(r.Shell, " "))
			require.Equal(t, strings.HasPrefix(c.shell, "ssh"), r.SSH)
			require.Equal(t, strings.TrimSpace("--no_ssh "+c.args)+" -- s", strings.Join(r.Args, " "))
			require.Equal(t, strings.Contains(c.line, "force"), r.Forced)
			require.Equal(t, len(r.Hosts), r.Least)
			require.Equal(t, threeHosts, r.Handed.Hostfile)
		})
	}
}

// What the starter hands on is all that a launcher needs, and it asks its own node for nothing else.
func TestDeepSpeedOfAStarter(t *testing.T) {
	t.Parallel()
	sys := ofShells("host-a", map[string]string{"PET_NNODES": "2:3", "WHO": "host-a"}, "ssh")
	read := sys.ReadFile
	sys.ReadFile = func(path string) ([]byte, error) {
		if path == ".deepspeed_env" {
			return []byte("X=of $WHO\n"), nil
		}
		return read(path)
	}
	got, err := translate(t, "deepspeed", sys, "--save_pid", "s")
	require.NoError(t, err)
	require.Equal(t, 2, got.Remote.Least)
	require.Empty(t, got.Env)
	handed := got.Remote.Handed
	handed.PID = 77

	there := node(map[string]string{"WHO": "host-b", "DLROVER_TOKEN": "0123456789abcdef"}, nil)
	there.Has, there.Handed = sys.Has, &handed
	got, err = translate(t, "deepspeed", there, append([]string{"--node_rank=1"}, got.Remote.Args...)...)
	require.NoError(t, err)
	require.Nil(t, got.Remote)
	require.Contains(t, strings.Join(got.Args, " "), "--node-rank=1 ")
	require.Equal(t, []string{"CUDA_VISIBLE_DEVICES=0,1,2,3", "X=of host-b"}, got.Env)
	require.Equal(t, []string{"X"}, got.Unshown)
	require.Equal(t, []string{"/tmp/77.deepspeed", "/tmp/77.ds"}, got.PIDFiles)
	require.NotContains(t, strings.Join(got.Notes, "\n"), "without effect")
}

// Every node runs the command where something says which one it is, or nothing can reach the others.
func TestDeepSpeedLeavesHostsAlone(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		line string
		vars map[string]string
		said string
		no   bool
	}{
		"no ssh":              {line: "s", no: true, said: "there is no ssh in PATH to start other hosts"},
		"it is said":          {line: "--no_ssh s"},
		"a rank":              {line: "--node_rank=0 s"},
		"a rank by PET":       {line: "s", vars: map[string]string{"PET_NODE_RANK": "0"}, said: "$PET_NODE_RANK says"},
		"a rank of DLRover":   {line: "s", vars: map[string]string{"NODE_RANK": "0"}, said: "$NODE_RANK says"},
		"a scheduler":         {line: "s", vars: map[string]string{"SCHEDULER": "slurm"}, said: "slurm says which"},
		"one node, this one":  {line: "--num_nodes=1 --ssh_port=22 s", said: "without effect here: --ssh_port=22"},
		"no host file at all": {line: "-H /dev/null s"},
	} {
		sys := ofShells("host-a", c.vars, "ssh")
		if c.no {
			sys.Has = nil
		}
		sys.RankedBy = func() string { return c.vars["SCHEDULER"] }
		got, err := translate(t, "deepspeed", sys, strings.Fields(c.line)...)
		require.NoError(t, err, name)
		require.Nil(t, got.Remote, name)
		require.Contains(t, strings.Join(got.Notes, "\n"), c.said, name)
	}
}

func TestDeepSpeedRefusesToStartHosts(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"--rsh=kubectl#exec s":                "--rsh=kubectl exec: nothing says to which host: write {host}",
		"--rsh=nothing#{host} s":              "there is no program nothing that can be executed",
		"--rsh='{host} s":                     "a ' is not closed",
		"--ssh_port=0 s":                      "--ssh_port=0: need a port from 1 to 65535",
		"--launcher_args=-R#exec s":           "--launcher_args=-R exec: hosts are started over ssh; give another",
		"--launcher_args=-w#x s":              `pdsh's "-w x" is not understood; there are -l USER`,
		"--launcher_args=-t#x s":              `pdsh's "-t x" is not understood`,
		"--launcher=ssh --launcher_args=\" s": "is not closed",
		"--master_port=0 s":                   "--master_port=0: need a port from 1 to 65535",
	} {
		words := strings.Fields(line)
		for i, w := range words {
			words[i] = strings.ReplaceAll(w, "#", " ")
		}
		_, err := translate(t, "deepspeed", ofShells("host-a", nil, "ssh", "kubectl"), words...)
		require.ErrorContains(t, err, want, line)
		require.NotContains(t, err.Error(), "\n")
	}
	_, err := translate(t, "deepspeed", ofShells("host-a", map[string]string{"PDSH_RCMD_TYPE": "rsh"}, "ssh"), "s")
	require.ErrorContains(t, err, "$PDSH_RCMD_TYPE=rsh: hosts are started over ssh; give another remote shell by --rsh")
	_, err = translate(t, "deepspeed", ofShells("launcher", nil), "s")
	require.ErrorContains(t, err, "this node, launcher, is not in /job/hostfile, which has host-a, host-b, 10.0.0.7: to "+
		"start the job there from here needs ssh, which is not in PATH: install it (package openssh-client), or give "+
		"another remote shell by --rsh; or run the command on every host of the file, with --no_ssh")
}

// The tuner starts its trials by this program, in the way that the line says.
func TestDeepSpeedTunesHosts(t *testing.T) {
	t.Parallel()
	sys := ofShells("host-a", map[string]string{"PDSH_SSH_ARGS_APPEND": "-F cfg"}, "ssh", "kubectl")
	got, err := translate(t, "deepspeed", sys, "--autotuning=tune", "--ssh_port=2222", "--num_gpus=2", "s", "--x")
	require.NoError(t, err)
	require.Nil(t, got.Remote)
	require.Equal(t, "-u -m deepspeed.launcher.runner --hostfile=/job//job/hostfile --autotuning=tune --num_gpus=2 "+
		"--no_ssh_check --master_addr=host-a s --x", strings.Join(got.Become, " "))
	require.Equal(t, []string{"PDSH_SSH_ARGS_APPEND=-F cfg -p 2222"}, got.Env)
	got, err = translate(t, "deepspeed", sys, "--autotuning=run", "--rsh=kubectl {host}", "--master_addr=m", "s")
	require.NoError(t, err)
	require.Equal(t, []string{"PET_RSH=kubectl {host}"}, got.Env)
}

func TestExportedVariables(t *testing.T) {
	t.Parallel()
	environ := strings.Fields("NCCL_DEBUG=INFO PATH=/bin HOME=/root PYTHONPATH=/a UCX_NET_DEVICES=x PET_MAX_RESTARTS=3 " +
		"PET_RSH=x PET_NODE_RANK=1 DLROVER_TOKEN=secret DS_ACCELERATOR=cpu DS_ENV_FILE=x MV2_X=1 RANK=0 NCCL_IB_HCA=y")
	require.Equal(t, strings.Fields("NCCL_DEBUG=INFO PATH=/bin UCX_NET_DEVICES=x PET_MAX_RESTARTS=3 DS_ACCELERATOR=cpu "+
		"MV2_X=1 NCCL_IB_HCA=y PYTHONPATH=/job:/a"), native.Exported(environ, "/job"))
	require.Equal(t, strings.Fields("NCCL_DEBUG=INFO PATH=/bin PET_MAX_RESTARTS=3 DS_ACCELERATOR=cpu MV2_X=1 "+
		"PYTHONPATH=/job:/a"),
		native.Exported(append(environ, "AISC_JOB_NAME=j"), "/job"), "nodes of AISC have interfaces of their own")
}
