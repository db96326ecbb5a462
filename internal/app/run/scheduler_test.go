package run

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/scheduler"
)

// forgetScheduler makes tests the same wherever they run: under srun, in a pod of an operator, or by hand.
func forgetScheduler() {
	prefixes := []string{"PET_", "SLURM_", "VC_", "VK_", "SKYPILOT_", "SM_", "OMPI_", "HYDRA_", "I_MPI_", "TORCHELASTIC_"}
	names := []string{"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX",
		"JOBSET_RESTART_ATTEMPT", "K_MPI_JOB_ROLE", "DLROVER_MASTER_ADDR", "DLROVER_TOKEN", "DLROVER_TOKEN_FILE", "NODE_NUM",
		"NODE_RANK", "WORKER_RANK", "NODE_ID", "NODE_IP", "POD_IP", "POD_NAME", "ELASTIC_JOB_NAME"}
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		begins := func(prefix string) bool { return strings.HasPrefix(name, prefix) }
		if slices.ContainsFunc(prefixes, begins) || slices.Contains(names, name) {
			_ = os.Unsetenv(name)
		}
	}
}

func variables(text string, more ...string) map[string]string {
	env := map[string]string{}
	for _, kv := range append(strings.Fields(text), more...) {
		name, value, _ := strings.Cut(kv, "=")
		env[name] = value
	}
	return env
}

const (
	slurmVariables = "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_NNODES=4 SLURM_NTASKS=4 SLURM_NODEID=2 " +
		"SLURM_JOB_NODELIST=gpu[1-4] SLURM_GPUS_ON_NODE=8 DLROVER_TOKEN=" + secret
	kubeflowVariables = "MASTER_ADDR=job-master-0 MASTER_PORT=23456 RANK=1 WORLD_SIZE=2 DLROVER_TOKEN=" + secret
)

func TestSchedulerSaysWhatNoOptionSays(t *testing.T) {
	for name, c := range map[string]struct {
		line  string
		env   map[string]string
		check func(*testing.T, settings)
	}{
		"everything": {"train.py", variables(slurmVariables), func(t *testing.T, s settings) {
			require.Equal(t, c10d, s.rdzv.backend)
			require.Equal(t, "gpu1:24711", s.rdzv.where())
			require.Equal(t, []int{4, 4, 2, 8}, []int{s.params.Min, s.params.Max, s.node.Rank, s.size.slots})
			require.Equal(t, "4711.0", s.runID)
			require.False(t, s.rdzv.serves(s.node.Rank, testHost()))
			require.Equal(t, startPatience, s.rdzv.connect)
			require.Equal(t, "slurm: node 2 of 4, which meet at gpu1:24711 (from SLURM_GPUS_ON_NODE, SLURM_JOB_ID, "+
				"SLURM_JOB_NODELIST, SLURM_NNODES, SLURM_NODEID, SLURM_NTASKS, SLURM_STEP_ID)", s.scheduledText())
		}},
		"node 0 serves at the scheduler's name for it": {"train.py", variables(slurmVariables, "SLURM_NODEID=0"),
			func(t *testing.T, s settings) {
				require.True(t, s.rdzv.serves(s.node.Rank, testHost()))
				require.False(t, s.mayBeServedByAnother())
				require.Equal(t, "gpu1", s.node.Addr)
			}},
		"options win": {"--nnodes=2:4 --nproc-per-node=3 --node-rank=1 --rdzv-id=j --rdzv-conf=read_timeout=5 train.py",
			variables(slurmVariables), func(t *testing.T, s settings) {
				require.Equal(t, []int{2, 4, 1, 3}, []int{s.params.Min, s.params.Max, s.node.Rank, s.size.slots})
				require.Equal(t, "j", s.runID)
				require.Equal(t, "5s", s.rdzv.connect.String())
				require.Equal(t, "gpu1:24711", s.rdzv.where())
				require.Contains(t, s.scheduledText(), "node 2 of 2 to 4")
			}},
		"so do their variables": {"train.py", variables(slurmVariables, "PET_NNODES=3", "PET_NPROC_PER_NODE=1"),
			func(t *testing.T, s settings) {
				require.Equal(t, []int{3, 3, 1}, []int{s.params.Min, s.params.Max, s.size.slots})
				require.Contains(t, strings.Join(s.warnings, "\n"), "--nnodes=3, but slurm has started 4 nodes")
			}},
		"static if that is asked for": {"--rdzv-backend=static train.py", variables(kubeflowVariables),
			func(t *testing.T, s settings) {
				require.Equal(t, static, s.rdzv.backend)
				require.True(t, s.params.Static)
				require.Equal(t, "job-master-0:23456", s.rdzv.where())
			}},
		"an endpoint is a word": {"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=host-a train.py", variables(slurmVariables),
			func(t *testing.T, s settings) {
				require.Empty(t, s.scheduler)
				require.Equal(t, 1, s.size.slots)
			}},
		"a master address is a word": {"train.py", variables(slurmVariables, "PET_MASTER_ADDR=10.0.0.1", "PET_NNODES=2"),
			func(t *testing.T, s settings) {
				require.Empty(t, s.scheduler)
				require.Equal(t, static, s.rdzv.backend)
			}},
		"one node is a word": {"--nnodes=1 train.py", variables(slurmVariables), func(t *testing.T, s settings) {
			require.Empty(t, s.scheduler)
			require.Equal(t, local, s.rdzv.backend)
		}},
		"standalone is a word": {"--standalone train.py", variables(kubeflowVariables), func(t *testing.T, s settings) {
			require.Empty(t, s.scheduler)
		}},
		"none": {"--scheduler=none train.py", variables(kubeflowVariables), func(t *testing.T, s settings) {
			require.Empty(t, s.scheduler)
			require.Equal(t, local, s.rdzv.backend)
			require.Empty(t, s.scheduledText())
			require.Nil(t, s.planScheduler())
		}},
		"one that is named adds to an endpoint": {"--scheduler=slurm --rdzv-backend=c10d --rdzv-endpoint=x:1 train.py",
			variables(slurmVariables), func(t *testing.T, s settings) {
				require.Equal(t, "x:1", s.rdzv.where())
				require.Equal(t, []int{4, 2, 8}, []int{s.params.Max, s.node.Rank, s.size.slots})
			}},
		"one node has workers only": {"train.py", variables(slurmVariables, "SLURM_NNODES=1", "SLURM_NTASKS=1",
			"SLURM_NODEID=0", "SLURM_JOB_NODELIST=gpu1"), func(t *testing.T, s settings) {
			require.Equal(t, local, s.rdzv.backend)
			require.Equal(t, 8, s.size.slots)
			require.Contains(t, s.scheduledText(), "slurm: one node, workers: 8")
		}},
		"one process of its own": {"train.py", variables(kubeflowVariables, "WORLD_SIZE=1", "RANK=0"),
			func(t *testing.T, s settings) {
				require.Equal(t, local, s.rdzv.backend)
				require.Empty(t, s.scheduledText())
			}},
		"DLRover's daemon says the rest": {"train.py", variables("DLROVER_MASTER_ADDR=m:1 NODE_NUM=2 NODE_RANK=1 " +
			"DLROVER_TOKEN=" + secret), func(t *testing.T, s settings) {
			require.Equal(t, master, s.rdzv.backend)
			require.Equal(t, 1, s.params.Max)
			require.Equal(t, "dlrover", s.planScheduler().Name)
			require.Empty(t, s.scheduledText())
		}},
		"node 0 that calls itself localhost": {"train.py", variables(kubeflowVariables, "MASTER_ADDR=localhost", "RANK=0"),
			func(t *testing.T, s settings) {
				require.Equal(t, "host-a:23456", s.rdzv.where())
				require.True(t, s.rdzv.serves(s.node.Rank, testHost()))
				require.Equal(t, "10.0.0.1", s.node.Addr)
			}},
		"an index of nobody knows how many": {"train.py", variables("JOB_COMPLETION_INDEX=2"),
			func(t *testing.T, s settings) {
				require.Equal(t, local, s.rdzv.backend)
				require.Contains(t, s.about("trains alone"), "$JOB_COMPLETION_INDEX=2, but nothing says how many nodes there are, "+
					"and where they meet: this one trains alone; give --nnodes (1, if that is meant)")
			}},
		"an index of as many as the user says": {"--nnodes=1 train.py", variables("JOB_COMPLETION_INDEX=2"),
			func(t *testing.T, s settings) { require.Empty(t, s.about("trains alone")) }},
		"a name that is not known yet": {"train.py", variables(kubeflowVariables, "MASTER_ADDR=unknown"),
			func(t *testing.T, s settings) { require.Equal(t, "10.0.0.1", s.node.Addr) }},
		"a pod's address": {"train.py", variables(kubeflowVariables, "POD_IP=10.1.1.1"), func(t *testing.T, s settings) {
			require.Equal(t, "10.1.1.1", s.node.Addr)
		}},
		"on one machine without a token": {"train.py",
			variables(kubeflowVariables, "MASTER_ADDR=127.0.0.1", "DLROVER_TOKEN="),
			func(t *testing.T, s settings) { require.Equal(t, "127.0.0.1:23456", s.rdzv.where()) }},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := resolved(t, c.line, c.env)
			require.NoError(t, err)
			c.check(t, s)
		})
	}
}

func TestSchedulerThatDoesNotFit(t *testing.T) {
	for name, c := range map[string]struct {
		line string
		env  map[string]string
		want string
	}{
		"too few nodes": {"--nnodes=5 train.py", variables(slurmVariables),
			"--nnodes=5 needs 5 nodes, but slurm has started 4 (from SLURM_GPUS_ON_NODE,"},
		"two ranks": {"train.py", variables(kubeflowVariables, "NODE_RANK=0"),
			"$NODE_RANK=0 and kubeflow's node rank 1 (from $MASTER_ADDR, $MASTER_PORT, $RANK, $WORLD_SIZE) " +
				"contradict each other"},
		"two schedulers": {"train.py", variables(slurmVariables + " " + kubeflowVariables), "contradict each other"},
		"no token":       {"train.py", variables(slurmVariables, "DLROVER_TOKEN="), "before srun, do: export DLROVER_TOKEN="},
		"no token in a pod": {"train.py", variables(kubeflowVariables, "DLROVER_TOKEN=", "RANK=0"),
			"of every role of pods this line: env: [{name: DLROVER_TOKEN, valueFrom: "},
		"unknown":            {"--scheduler=pbs train.py", nil, "invalid choice: 'pbs'"},
		"unknown by default": {"train.py", variables("PET_SCHEDULER=pbs"), "pbs"},
		"not there":          {"--scheduler=slurm train.py", nil, "start dlrover-run with srun"},
		"another backend": {"--scheduler=slurm --rdzv-backend=etcd train.py", variables(slurmVariables),
			"--rdzv-backend=etcd: where a scheduler says how nodes meet"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := resolved(t, c.line, c.env)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// A key of ssh that all nodes have is a secret that they share; each job makes another token of it.
func TestTokenOfASharedKey(t *testing.T) {
	host := testHost()
	host.root = fstest.MapFS{"home/u/.ssh/id_rsa": {Data: []byte(strings.Repeat("key", 100)), Mode: 0o600},
		"home/u/.ssh/id_ecdsa": {Data: []byte("short"), Mode: 0o600}}
	tokenOf := func(env map[string]string) (settings, error) {
		lookup := func(name string) (string, bool) { v, set := env[name]; return v, set }
		t.Chdir(t.TempDir())
		require.NoError(t, os.WriteFile("train.py", nil, 0o600))
		c, err := argv.Parse(argv.Options(), []string{"train.py"}, lookup)
		require.NoError(t, err)
		return resolve(c, lookup, host)
	}
	tokens := map[string]bool{}
	for _, more := range [][]string{{"SLURM_NODEID=0"}, {"SLURM_NODEID=1"}, {"SLURM_JOB_ID=4712"}} {
		s, err := tokenOf(variables(slurmVariables, append(more, "DLROVER_TOKEN=", "HOME=/home/u")...))
		require.NoError(t, err)
		require.Len(t, s.auth.token, 64)
		require.Contains(t, s.scheduledText(), "derived from /home/u/.ssh/id_rsa, which all nodes must share")
		tokens[s.auth.token] = true
	}
	require.Len(t, tokens, 2)
	s, err := tokenOf(variables(slurmVariables, "HOME=/home/u"))
	require.NoError(t, err)
	require.Equal(t, secret, s.auth.token)
	require.NotContains(t, s.scheduledText(), "ssh")
	_, err = tokenOf(variables(kubeflowVariables, "DLROVER_TOKEN=", "HOME=/home/u"))
	require.ErrorContains(t, err, "needs a job token")
}

// torchrun's own line is torchrun's: what it does not read is not read.
func TestTorchrunHasNoScheduler(t *testing.T) {
	for args, want := range map[string]string{"torchrun train.py": "", "torchrun --scheduler=auto train.py": "kubeflow",
		"dlrover-run train.py": "kubeflow", "xpu_timer_launch python train.py": ""} {
		words := strings.Fields(args)
		as := calledAs(words)
		env := variables(kubeflowVariables)
		lookup := func(name string) (string, bool) { v, set := env[name]; return v, set }
		t.Chdir(t.TempDir())
		require.NoError(t, os.WriteFile("train.py", nil, 0o600))
		c, err := as.parse(words[1:], lookup, testHost(), &strings.Builder{})
		require.NoError(t, err)
		s, err := resolveAs(as, c, lookup, testHost())
		require.NoError(t, err)
		require.Equal(t, want, s.scheduler.Name, args)
	}
}

func TestSchedulerOption(t *testing.T) {
	opts := argv.Options()
	i := slices.IndexFunc(opts, func(o argv.Option) bool { return o.Name == "scheduler" })
	require.Equal(t, append([]string{scheduler.Auto, "none"}, scheduler.Names()...), opts[i].Choices)
}

// A file that the environment names may be anything: a program can put a device in its place.
func TestSchedulerReadsFiles(t *testing.T) {
	read := thisHost(os.LookupEnv).readFile
	path := filepath.Join(t.TempDir(), "hostfile")
	require.NoError(t, os.WriteFile(path, []byte("a slots=2\n"), 0o600))
	text, err := read(path)
	require.NoError(t, err)
	require.Equal(t, "a slots=2\n", string(text))
	_, err = read("no/such/file")
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = read("/dev/zero")
	require.ErrorIs(t, err, openfile.ErrNotRegular)
	require.NoError(t, os.Truncate(path, 1<<30))
	_, err = read(path)
	require.ErrorIs(t, err, openfile.ErrTooLong)
}

// Two launchers get nothing but what a scheduler sets, and are one job.
func TestTwoNodesOfAScheduler(t *testing.T) {
	for name, c := range map[string]struct {
		common string
		nodes  [2]string
		opts   []string
	}{
		"kubeflow": {"MASTER_ADDR=127.0.0.1 WORLD_SIZE=2", [2]string{"RANK=0", "RANK=1"}, nil},
		"slurm": {"SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_NNODES=2 SLURM_NTASKS=2 SLURM_JOB_NODELIST=127.0.0.[1-2]",
			[2]string{"SLURM_NODEID=0", "SLURM_NODEID=1"}, nil},
		"volcano": {"VC_WORKER_HOSTS=127.0.0.1,127.0.0.2 VC_WORKER_NUM=2",
			[2]string{"VC_TASK_INDEX=0", "VC_TASK_INDEX=1"}, nil},
		"mpi": {"K_MPI_JOB_ROLE=worker OMPI_MCA_orte_default_hostfile=hosts", [2]string{"POD_IP=127.0.0.1",
			"POD_IP=127.0.0.2"}, nil},
		"jobset": {"MASTER_ADDR=127.0.0.1", [2]string{"JOB_COMPLETION_INDEX=0", "JOB_COMPLETION_INDEX=1"},
			[]string{"--nnodes=2"}},
		"skypilot": {"SKYPILOT_NODE_IPS=127.0.0.1_127.0.0.2", [2]string{"SKYPILOT_NODE_RANK=0", "SKYPILOT_NODE_RANK=1"}, nil},
		"sagemaker": {`SM_HOSTS=["127.0.0.1","127.0.0.2"]`, [2]string{"SM_CURRENT_HOST=127.0.0.1",
			"SM_CURRENT_HOST=127.0.0.2"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			hosts := []byte("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
			require.NoError(t, os.WriteFile(filepath.Join(b.dir, "hosts"), hosts, 0o600))
			common := strings.Fields(strings.ReplaceAll(c.common, "_127", "\x01127"))
			for i := range common {
				common[i] = strings.ReplaceAll(common[i], "\x01", "\n")
			}
			args := b.sh(`echo $GROUP_RANK:$RANK/$WORLD_SIZE:$MASTER_ADDR >> $DIR/seen`, c.opts...)
			b.env = append(b.env, append(common, "MASTER_PORT="+freePort(t))...)
			l1 := b.start("dlrover-run", []string{c.nodes[1]}, args...)
			l0 := b.start("dlrover-run", []string{c.nodes[0]}, args...)
			require.Equal(t, 0, l0.wait())
			require.Equal(t, 0, l1.wait())
			require.ElementsMatch(t, []string{"0:0/2:127.0.0.1", "1:1/2:127.0.0.1"}, b.lines("seen"))
			require.Contains(t, l1.err.String(), name+": node 1 of 2, which meet at 127.0.0.1:")
		})
	}
}

// DLRover's pods find their daemon.
func TestTwoNodesOfDLRover(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	_, addr := b.startDaemon("127.0.0.1:0")
	b.env = append(b.env, "DLROVER_MASTER_ADDR="+addr, "NODE_NUM=2", "ELASTIC_JOB_NAME=job")
	args := b.sh(`echo $GROUP_RANK:$RANK/$WORLD_SIZE >> $DIR/seen`, "--auto-config", "--accelerator=cpu")
	l1 := b.start("dlrover-run", []string{"NODE_RANK=1", "NODE_ID=1", "POD_NAME=job-1"}, args...)
	l0 := b.start("dlrover-run", []string{"NODE_RANK=0", "NODE_ID=0", "POD_NAME=job-0"}, args...)
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
	require.ElementsMatch(t, []string{"0:0/2", "1:1/2"}, b.lines("seen"))
}

// pod starts a launcher under a host name, with a hosts file as the kubelet writes it.
func (b *bench) pod(name, domain string, args ...string) *launched {
	b.t.Helper()
	if os.Geteuid() != 0 {
		b.t.Skip("SKIPPED: host names of pods need root, so StatefulSets and JobSets by their names are NOT tested")
	}
	if out, err := exec.Command("unshare", "--uts", "--mount", "true").CombinedOutput(); err != nil {
		b.t.Skipf("SKIPPED: no namespaces here, so StatefulSets and JobSets by their names are NOT tested: %v %s", err, out)
	}
	hosts, script := filepath.Join(b.dir, name+".hosts"), filepath.Join(b.dir, name+".sh")
	base := name[:len(name)-1]
	text := fmt.Sprintf("127.0.0.1 localhost\n127.0.0.1 %[1]s0.%[2]s %[1]s0\n127.0.0.2 %[1]s1.%[2]s %[1]s1\n",
		base, domain)
	require.NoError(b.t, os.WriteFile(hosts, []byte(text), 0o600))
	text = fmt.Sprintf("#!/bin/sh\nhostname %s\nmount --bind %s /etc/hosts\nexec %s/dlrover-run \"$@\"\n",
		name, hosts, binDir)
	require.NoError(b.t, writeProgram(script, []byte(text)))
	return b.startPath("/usr/bin/unshare", []string{"DLROVER_TOKEN=" + testToken, "POD_NAME=" + name},
		append([]string{"--uts", "--mount", script}, args...)...)
}

// Nothing is set: names say all but how many there are.
func TestTwoPodsByTheirNames(t *testing.T) {
	for name, variable := range map[string]string{"statefulset": "X=", "jobset": "JOB_COMPLETION_INDEX="} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.env = append(b.env, "MASTER_PORT="+freePort(t))
			args := b.sh(`echo $GROUP_RANK:$RANK/$WORLD_SIZE:$MASTER_ADDR >> $DIR/seen`, "--nnodes=2")
			env := b.env
			b.env = append(slices.Clone(env), variable+"1")
			l1 := b.pod("web-1", "svc-a.ns.svc.cluster.local", args...)
			b.env = append(slices.Clone(env), variable+"0")
			l0 := b.pod("web-0", "svc-a.ns.svc.cluster.local", args...)
			require.Equal(t, 0, l0.wait())
			require.Equal(t, 0, l1.wait())
			addr := "web-0.svc-a.ns.svc.cluster.local"
			require.ElementsMatch(t, []string{"0:0/2:" + addr, "1:1/2:" + addr}, b.lines("seen"))
			require.Contains(t, l1.err.String(), name+": node 1 of 2, which meet at "+addr)
		})
	}
}

// A real step across hosts: the token is asked for before anything starts, and then node 0 serves.
func TestSlurmAcrossHosts(t *testing.T) {
	h := newHosts(t)
	env := []string{"HOME=" + h.dir, "SLURM_JOB_ID=4711", "SLURM_STEP_ID=0", "SLURM_NNODES=2", "SLURM_NTASKS=2",
		"SLURM_JOB_NODELIST=" + h.addrs[0] + ",node1", "SLURM_NODEID=1"}
	args := h.sh(`echo $GROUP_RANK:$RANK/$WORLD_SIZE:$MASTER_ADDR:$TORCHELASTIC_RUN_ID >> $DIR/seen`)
	refused := h.on(1, env, args...)
	require.Equal(t, 2, refused.wait())
	require.Contains(t, refused.err.String(), "slurm says that the nodes meet at 10.99.7.1:24711, "+
		"on a network, which needs "+
		"a job token: before srun, do: export DLROVER_TOKEN=$(openssl rand -hex 16)")
	env = append(env, "DLROVER_TOKEN="+testToken)
	l1 := h.on(1, env, args...)
	l0 := h.on(0, append(env, "SLURM_NODEID=0"), args...)
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
	require.ElementsMatch(t, []string{"0:0/2:10.99.7.1:4711.0", "1:1/2:10.99.7.1:4711.0"}, h.lines("seen"))
}

// A node of a scheduler whose launcher was killed comes back, and finds its rank.
func TestNodeOfASchedulerIsReplaced(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.env = append(b.env, "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+freePort(t), "WORLD_SIZE=2")
	args := b.sh(hold, "--max-restarts=2")
	l0 := b.start("dlrover-run", []string{"RANK=0"}, args...)
	l1 := b.start("dlrover-run", []string{"RANK=1"}, args...)
	eventually(t, "together", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	l1.signal(9)
	starts := len(b.lines("starts"))
	l1 = b.start("dlrover-run", []string{"RANK=1"}, args...)
	eventually(t, "together again", func() bool { return len(b.lines("starts")) >= starts+2 })
	b.release()
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
}

func TestDryRunNamesTheScheduler(t *testing.T) {
	env := variables(slurmVariables)
	s, err := resolved(t, "train.py", env)
	require.NoError(t, err)
	p, err := makePlan(&s, testHost())
	require.NoError(t, err)
	require.Equal(t, &planScheduler{Name: "slurm", Nodes: 4, NodeRank: 2, Workers: 8, From: slices.DeleteFunc(
		slices.Sorted(maps.Keys(env)), func(n string) bool { return n == "DLROVER_TOKEN" })}, p.Scheduler)
}

// A first world waits for nodes that somebody has promised, and for others only as long as they keep coming.
func TestWhomTheLastCallWaitsFor(t *testing.T) {
	const hand = "--nnodes=2:8 --rdzv-backend=c10d --rdzv-endpoint=host-a train.py"
	kubeflow := "MASTER_ADDR=host-a MASTER_PORT=29400 RANK=0 WORLD_SIZE=6 DLROVER_TOKEN=" + secret
	for name, c := range map[string]struct {
		line, env   string
		quiet, last time.Duration
		promised    int
	}{
		"by hand":             {hand, "", 2 * time.Second, 0, 0},
		"said":                {"--rdzv-conf=last_call_timeout=30 " + hand, "NODE_NUM=4", 0, 30 * time.Second, 0},
		"said, as PyTorch":    {"--rdzv-conf=lastcall_timeout=7 " + hand, "NODE_NUM=4", 0, 7 * time.Second, 0},
		"fixed":               {"--nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=host-a train.py", "NODE_NUM=4", 0, 0, 0},
		"NODE_NUM":            {hand, "NODE_NUM=4", 2 * time.Second, 0, 4},
		"a bad NODE_NUM":      {hand, "NODE_NUM=-4", 2 * time.Second, 0, 0},
		"no number":           {hand, "NODE_NUM=four", 2 * time.Second, 0, 0},
		"Kubeflow":            {"--nnodes=2:8 train.py", kubeflow, 2 * time.Second, 0, 6},
		"Kubeflow, by hand":   {hand, kubeflow, 2 * time.Second, 0, 6},
		"not asked for":       {"--scheduler=none " + hand, kubeflow + " NODE_NUM=4", 2 * time.Second, 0, 0},
		"Slurm":               {hand, slurmVariables, 2 * time.Second, 0, 4},
		"a contradiction":     {hand, slurmVariables + " " + kubeflow, 2 * time.Second, 0, 0},
		"a master of a pod":   {"--nnodes=2:8 train.py", "DLROVER_MASTER_ADDR=localhost:1 NODE_NUM=5", 2 * time.Second, 0, 5},
		"a master, no number": {"--nnodes=2:8 train.py", "DLROVER_MASTER_ADDR=localhost:1", 2 * time.Second, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			env := map[string]string{}
			for _, kv := range strings.Fields(c.env) {
				k, v, _ := strings.Cut(kv, "=")
				env[k] = v
			}
			s, err := resolved(t, c.line, env)
			require.NoError(t, err)
			require.Equal(t, []any{c.quiet, c.last, c.promised}, []any{s.params.Quiet, s.params.LastCall, s.params.Promised})
		})
	}
}
