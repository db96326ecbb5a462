package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMSOperatorsVariables(t *testing.T) {
	pod := func(role, id string) map[string]string {
		return map[string]string{"DLROVER_TOKEN": testToken, "MS_ROLE": role, "MS_NODE_ID": id,
			"MS_SCHED_HOST": "10.96.0.10", "MS_SCHED_PORT": "2222", "MS_WORKER_NUM": "4", "MS_SERVER_NUM": "2"}
	}
	for _, c := range []struct {
		role, id string
		rank     int
		slots    int
		share    string
	}{
		{"MS_SCHED", "j-scheduler-0", 0, 0, "scheduler"},
		{"MS_PSERVER", "j-ps-1", 2, 0, "pserver-1"},
		{"MS_WORKER", "j-worker-3", 6, 2, "workers"},
	} {
		line := "--nproc-per-node=2 train.py"
		if c.slots == 0 { // what is about workers has nobody to act on
			line = "--numa-binding=node --numa-affinity --warm " + line
		}
		s, err := resolved(t, line, pod(c.role, c.id))
		require.NoError(t, err)
		require.Equal(t, []any{c.rank, c.slots, c.slots, c.share}, []any{s.node.Rank, s.size.slots, s.node.Slots,
			s.size.share})
		require.Equal(t, []any{"j", "mindspore", 7, 7, 2, 0, "10.96.0.10:2222"},
			[]any{s.runID, s.framework.preset.Name, s.params.Min, s.params.Max, s.framework.servers, s.framework.port,
				s.rdzv.where()})
		require.Equal(t, c.rank == 0, *s.rdzv.isHost)
		p, err := makePlan(&s, testHost())
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("group rank %d of 7 nodes with %d workers in all, first start", c.rank,
			4*max(c.slots, 1)), p.Assumed)
		require.Len(t, p.Workers, c.slots)
		if c.slots > 0 {
			require.Empty(t, p.Beside)
			require.Equal(t, 6, p.Workers[0].Rank)
			require.Contains(t, p.Workers[1].Env, "MS_NODE_ID=7")
			require.Contains(t, p.Workers[1].Env, "MS_WORKER_NUM=8")
			continue
		}
		require.Equal(t, c.share, p.Beside[0].Name)
		require.Contains(t, p.Beside[0].Env, "MS_NODE_ID="+c.share)
	}
	for line, want := range map[string]string{
		"--preset=jax train.py": "--preset=jax, but the pods of ms-operator are those of --preset=mindspore: leave the " +
			"option out, or give --scheduler=none",
		"--ms-port=2222 train.py": "--ms-port=2222 is where the nodes meet: leave it out, or choose another port",
		"--ms-servers=3 train.py": "--ms-servers=3 and 2 pods of parameter servers contradict each other",
	} {
		_, err := resolved(t, line, pod("MS_WORKER", "1"))
		require.ErrorContains(t, err, want)
	}
	s, err := resolved(t, "--preset=auto --ms-port=2223 --ms-servers=2 train.py", pod("MS_WORKER", "1"))
	require.NoError(t, err)
	require.Equal(t, []any{"mindspore", 2223}, []any{s.framework.preset.Name, s.framework.port})
	daemon := pod("MS_SCHED", "j-scheduler-0")
	daemon["DLROVER_MASTER_ADDR"] = "m:50001"
	s, err = resolved(t, "--rdzv-id=j train.py", daemon)
	require.NoError(t, err)
	require.Equal(t, []any{master, "m:50001", "scheduler", 7}, []any{s.rdzv.backend, s.rdzv.where(), s.size.share,
		s.params.Max})
	s, err = resolved(t, "train.py", map[string]string{"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4"})
	require.NoError(t, err)
	require.Contains(t, s.warnings, "$MS_ROLE=MS_WORKER, but nothing says how many nodes there are, and where they "+
		"meet: this one trains alone; give --nnodes (1, if that is meant)")
}

// Nothing tells the pods of an MSJob from others, so each is refused without a token, and is told which line is
// missing.
func TestPodsOfMSOperatorWithoutAToken(t *testing.T) {
	docs := string(read(t, "../../../docs/tasks/schedulers.md"))
	for role, id := range map[string]string{"MS_SCHED": "j-scheduler-0", "MS_WORKER": "j-worker-0"} {
		pod := variables(inPod + " MS_SCHED_HOST=10.96.0.10 MS_SCHED_PORT=2222 MS_WORKER_NUM=2 MS_ROLE=" + role +
			" MS_NODE_ID=" + id)
		_, err := resolved(t, "train.py", pod)
		require.ErrorContains(t, err, "ms-operator says that the nodes meet at 10.96.0.10:2222, on a network, which needs a "+
			"job token: ")
		require.ErrorContains(t, err, podsToken)
		require.Contains(t, docs, "    "+podsToken)
		_, err = resolved(t, "--insecure train.py", pod)
		require.NoError(t, err)
	}
}

// A pod without workers needs no accelerators.
func TestPodsOfMSOperatorWithoutWorkers(t *testing.T) {
	for share, workers := range map[string]bool{"": true, "workers": true, "scheduler": false, "pserver-0": false} {
		s := settings{size: size{share: share}}
		require.Equal(t, !workers, s.job().Bare)
	}
}

// msPods are the pods of an MSJob, each in a network of its own: the scheduler, servers, workers. All but the scheduler
// know it by the address of a Service, which has one port.
type msPods struct {
	*cluster
	servers, workers int
	args             []string
}

const msService = "10.96.0.10"

func newMSPods(t *testing.T, servers, workers int, args ...string) *msPods {
	p := &msPods{newCluster(t, 1+servers+workers, "1gbit"), servers, workers, args}
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("SKIPPED: no nft command, so pods of ms-operator behind a Service are NOT tested:", err)
	}
	for i := 1; i < len(p.names); i++ {
		p.tool("ip", "-n", p.names[i], "route", "add", msService, "via", p.addrs[0])
		p.tool("ip", "netns", "exec", p.names[i], "nft", "add table ip nat; add chain ip nat out "+
			"{ type nat hook output priority -100; }; add rule ip nat out ip daddr "+msService+
			" tcp dport 2222 dnat to "+p.addrs[0]+":2222")
	}
	return p
}

// role is that of pod i, with its number.
func (p *msPods) role(i int) (role, name string) {
	switch {
	case i == 0:
		return "MS_SCHED", "job-scheduler-0"
	case i <= p.servers:
		return "MS_PSERVER", fmt.Sprint("job-ps-", i-1)
	}
	return "MS_WORKER", fmt.Sprint("job-worker-", i-1-p.servers)
}

func (p *msPods) start(i int) *launched {
	role, name := p.role(i)
	host := msService
	if i == 0 {
		host = p.addrs[0]
	}
	env := []string{"POD_NAME=" + name, "MS_ROLE=" + role, "MS_NODE_ID=" + name, "MS_SCHED_HOST=" + host,
		"MS_SCHED_PORT=2222", fmt.Sprint("MS_WORKER_NUM=", p.workers), fmt.Sprint("MS_SERVER_NUM=", p.servers)}
	return p.on(i, "dlrover-run", env, p.args...)
}

func (p *msPods) all() (all []*launched) {
	for i := range p.names {
		all = append(all, p.start(i))
	}
	return all
}

func (p *msPods) told() []string {
	return strings.Split(strings.TrimSpace(string(read(p.t, filepath.Join(p.dir, "told")))), "\n")
}

// msScript says once who it is, and meets as MindSpore does: workers and servers know the scheduler.
const msScript = `at=$MS_SCHED_HOST:$MS_SCHED_PORT
echo "$MS_ROLE $MS_NODE_ID ${RANK:-none} $at $MS_WORKER_NUM $MS_SERVER_NUM" >> $DIR/told
started() { : > $DIR/$1; echo $$ > $DIR/pid.$1.new; mv $DIR/pid.$1.new $DIR/pid.$1; }
await() { while [ ! -e $DIR/$1 ]; do sleep 0.02; done; }
case $MS_ROLE in
MS_SCHED) started sched; await worker.0; await worker.1; await over; : > $DIR/sched.end;;
MS_PSERVER) started pserver; exec sleep 600;;
MS_WORKER) await sched; await pserver; started worker.$RANK; await go;  : > $DIR/done.$RANK;;
esac`

// Every process of the job has a pod of its own. The workers alone have ranks; a failure of any process starts all of
// them anew; the job ends with its workers.
func TestPodsOfMSOperator(t *testing.T) {
	for name, victim := range map[string]string{"worker": "worker.1", "scheduler": "sched", "server": "pserver"} {
		t.Run(name, func(t *testing.T) {
			long(t)
			t.Parallel()
			p := newMSPods(t, 1, 2, "--max-restarts=1", "--success-rule=all")
			p.args = p.sh(msScript, p.args...)
			pods := p.all()
			up := func() bool { return p.exists("pid.worker.0")() && p.exists("pid.worker.1")() }
			eventually(t, "the first start", up)
			told := p.told()
			require.Len(t, told, 4)
			port := ""
			for _, line := range told {
				require.Regexp(t, `^MS_(SCHED scheduler none|PSERVER pserver-0 none|WORKER 0 0|WORKER 1 1) `+
					`10\.98\.7\.1:\d+ 2 1$`, line)
				at := strings.Fields(line)[3]
				require.True(t, port == "" || port == at, "one scheduler")
				require.NotContains(t, at, ":2222", "where the nodes meet")
				port = at
			}
			pid, err := strconv.Atoi(strings.TrimSpace(string(read(t, filepath.Join(p.dir, "pid."+victim)))))
			require.NoError(t, err)
			for _, f := range []string{"pid.worker.0", "pid.worker.1"} {
				require.NoError(t, os.Remove(filepath.Join(p.dir, f)))
			}
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
			eventually(t, "the second start", up)
			eventually(t, "all of them", func() bool { return len(p.told()) == 8 })
			p.release()
			eventually(t, "the workers' end", p.exists("done.1"))
			require.NoError(t, os.WriteFile(filepath.Join(p.dir, "over"), nil, 0o600))
			for i, l := range pods {
				require.Equal(t, 0, l.wait(), "pod %d: %s", i, l.err.String())
			}
			require.FileExists(t, filepath.Join(p.dir, "sched.end"), "it may end by itself")
		})
	}
}

// MindSpore itself as an MSJob: one scheduler and two workers in pods of their own; one worker is killed.
func TestFrameworksMSOperator(t *testing.T) {
	f := frameworkCase{name: "mindspore", venv: "mindspore"}
	python := f.python(t)
	j := f.train(t, python)
	p := newMSPods(t, 0, 2, "--max-restarts=3", "--success-rule=all", "--hang=off")
	p.bench.env = append(p.bench.env, j.env...)
	p.args = append(p.args, j.then...)
	pods := p.all()
	pids := j.trained(2, nil, pods...)
	require.NoError(t, syscall.Kill(pids[1], syscall.SIGKILL))
	j.trained(2, pids, pods...)
	j.finish(pods...)
}
