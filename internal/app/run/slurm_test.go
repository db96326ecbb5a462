package run

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// slurm is Debian's Slurm: a controller, and three nodes that are this machine under three names.
type slurm struct {
	*bench
	conf    string
	daemons map[string]*launched // munged, slurmctld, and the nodes'
}

const slurmConf = `ClusterName=test
SlurmctldHost=%[1]s(127.0.0.1)
SlurmctldPort=%[3]s
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=%[2]s/munge.socket
CredType=cred/munge
StateSaveLocation=%[2]s/state
SlurmdSpoolDir=%[2]s/spool.%%n
SlurmctldPidFile=%[2]s/slurmctld.pid
SlurmdPidFile=%[2]s/slurmd.%%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/linear
SlurmdParameters=config_overrides
KillWait=30
RequeueExit=13,40
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
`

// startSlurm skips where there is none, or no root.
func startSlurm(t *testing.T) *slurm {
	t.Helper()
	long(t)
	t.Parallel()
	for _, program := range []string{"munged", "slurmctld", "slurmd", "sbatch"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("SKIPPED: there is no %s, so jobs of a real Slurm are NOT tested (make e2e-slurm installs it)", program)
		}
	}
	if exec.Command("unshare", "--uts", "--mount", "true").Run() != nil {
		t.Skip("SKIPPED: unshare --uts --mount needs root, so jobs of a real Slurm are NOT tested")
	}
	s := &slurm{bench: newBench(t), daemons: map[string]*launched{}}
	s.conf = filepath.Join(s.dir, "slurm.conf")
	s.env = append(s.env, "SLURM_CONF="+s.conf)
	host, err := os.Hostname()
	require.NoError(t, err)
	text := fmt.Sprintf(slurmConf, host, s.dir, freePort(t))
	for _, name := range slurmNodes {
		text += fmt.Sprintf("NodeName=%s NodeAddr=127.0.0.1 Port=%s CPUs=1\n", name, freePort(t))
	}
	text += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
	s.write("slurm.conf", text)
	s.write("munge.key", strings.Repeat("0123456789abcdef", 64))
	hosts := "127.0.0.1 localhost " + host + " " + strings.Join(slurmNodes, " ") + "\n"
	s.write("hosts", hosts)
	require.NoError(t, os.Mkdir(filepath.Join(s.dir, "state"), 0o700))

	s.daemon("munged", "munged", "--foreground", "--force", "--num-threads=2", "--key-file="+s.dir+"/munge.key",
		"--socket="+s.dir+"/munge.socket", "--pid-file="+s.dir+"/munged.pid", "--log-file="+s.dir+"/munged.log",
		"--seed-file="+s.dir+"/munge.seed")
	eventually(t, "munge", s.exists("munge.socket"))
	s.daemon("slurmctld", "slurmctld", "-D", "-c")
	for _, name := range slurmNodes {
		s.node(name)
	}
	eventually(t, "nodes", func() bool {
		out, err := s.try("sinfo", "-h", "-t", "idle", "-o", "%D")
		return err == nil && strings.TrimSpace(out) == "3"
	})
	return s
}

var slurmNodes = []string{"node-a", "node-b", "node-c"}

func (s *slurm) write(name, text string) {
	s.t.Helper()
	require.NoError(s.t, os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600))
}

// daemon starts one that ends with the test.
func (s *slurm) daemon(name, program string, args ...string) {
	s.t.Helper()
	path, err := exec.LookPath(program)
	require.NoError(s.t, err)
	l := &launched{t: s.t, cmd: exec.Command(path, args...), out: &buffer{}, err: &buffer{}, exited: make(chan struct{})}
	l.cmd.Dir, l.cmd.Env, l.cmd.Stdout, l.cmd.Stderr = s.dir, s.env, l.out, l.err
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	s.follow(l)
	s.daemons[name] = l
	s.t.Cleanup(func() { s.end(name) })
}

// end stops a daemon: a second kill of an ended one does nothing.
func (s *slurm) end(name string) {
	l := s.daemons[name]
	select {
	case <-l.exited:
	default:
		_ = l.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-l.exited:
		case <-time.After(10 * time.Second):
			_ = syscall.Kill(-l.cmd.Process.Pid, syscall.SIGKILL)
		}
	}
}

// node starts the daemon of a node under its name.
func (s *slurm) node(name string) {
	s.t.Helper()
	s.daemon(name, "unshare", "--uts", "--mount", "sh", "-c",
		`hostname "$0" && mount --bind "$1/hosts" /etc/hosts && exec slurmd -D`, name, s.dir)
}

func (s *slurm) try(program string, args ...string) (string, error) {
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Env = s.dir, s.env
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (s *slurm) do(program string, args ...string) string {
	s.t.Helper()
	out, err := s.try(program, args...)
	require.NoError(s.t, err, "%s %v: %s", program, args, out)
	return strings.TrimSpace(out)
}

// batch submits a script, and returns the number of the job.
func (s *slurm) batch(options, script string) (id string) {
	s.t.Helper()
	s.write("job.sh", "#!/bin/sh\n"+options+"\n"+script)
	return s.do("sbatch", "--parsable", "--output="+s.dir+"/job-%A.%a.out", "--open-mode=append", "job.sh")
}

// job is a field of a job, as scontrol shows it.
func (s *slurm) job(id, field string) string {
	out, _ := s.try("scontrol", "show", "job", id)
	if m := regexp.MustCompile(`\b` + field + `=(\S+)`).FindStringSubmatch(out); m != nil {
		return m[1]
	}
	return ""
}

// becomes waits until a job is in a state.
func (s *slurm) becomes(id, state string) {
	s.t.Helper()
	for end := time.Now().Add(3 * time.Minute); s.job(id, "JobState") != state; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			out, _ := s.try("sh", "-c", "scontrol show job; sinfo; tail -n 40 *.out")
			require.FailNow(s.t, "the job does not become "+state, out)
		}
	}
}

func (s *slurm) output(id string) string {
	found, _ := filepath.Glob(filepath.Join(s.dir, "job-"+id+".*.out"))
	text := ""
	for _, path := range found {
		data, _ := os.ReadFile(path)
		text += string(data)
	}
	return text
}

// steps is a training until a file is there: rank 0 saves its step when it is told to end.
const steps = `step=$(cat $DIR/step 2>/dev/null || echo 0)
echo $(hostname):$RANK/$WORLD_SIZE:$SLURM_ARRAY_TASK_ID:$SLURM_RESTART_COUNT:$step >> $DIR/seen
trap '[ $RANK = 0 ] && echo $((step+1)) > $DIR/step.new && mv $DIR/step.new $DIR/step; exit 0' TERM
while [ ! -e $DIR/go ]; do sleep 0.05; step=$((step+1)); done`

// srun is the end of a batch script: a launcher on each node.
func (s *slurm) srun(script string, opts ...string) string {
	words := append([]string{binDir + "/dlrover-run", "--exit-code-policy=reason"}, s.sh(script, opts...)...)
	return "export DLROVER_TOKEN=" + testToken + "\nsrun --no-kill --kill-on-bad-exit=0 " + strings.Join(words, " ")
}

// fresh forgets what earlier jobs have left.
func (s *slurm) fresh(t *testing.T) *slurm {
	t.Helper()
	c := *s
	c.bench = &bench{t: t, dir: s.dir, env: s.env, tag: s.tag}
	for _, name := range []string{"seen", "step", "go"} {
		_ = os.Remove(filepath.Join(s.dir, name))
	}
	return &c
}

// saw waits until so many workers have said where they are, and returns these lines but for the step.
func (s *slurm) saw(n int) (places []string) {
	s.t.Helper()
	eventually(s.t, "workers", func() bool { return len(s.lines("seen")) >= n })
	for _, line := range s.lines("seen") {
		places = append(places, line[:strings.LastIndexByte(line, ':')])
	}
	return places
}

// hurry ends the two minutes that a requeued job waits. Slurm needs a moment between two starts.
func (s *slurm) hurry(id string) {
	s.t.Helper()
	s.becomes(id, "PENDING")
	time.Sleep(3 * time.Second)
	s.do("scontrol", "update", "job="+id, "starttime=now")
}

func TestSlurm(t *testing.T) {
	s := startSlurm(t)
	for _, c := range []struct {
		name string
		test func(*slurm)
	}{
		{"a job of two nodes", slurmJob}, {"a node is drained and the job requeued", slurmRequeue},
		{"an exit code requeues", slurmExitCode}, {"a signal before the limit, and a hand-over", slurmHandOver},
		{"a signal before the limit, and a requeue", slurmLimit}, {"a node is lost", slurmLoss},
		{"the first node is lost", slurmLossOfFirst}, {"a lost node requeues", slurmRestart},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(s.fresh(t)) })
	}
}

func slurmJob(s *slurm) {
	id := s.batch("#SBATCH --nodes=2 --ntasks-per-node=1", s.srun(`echo $(hostname):$RANK/$WORLD_SIZE:0 >> $DIR/seen
[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3`, "--nproc-per-node=2", "--max-restarts=1"))
	s.becomes(id, "COMPLETED")
	places := s.saw(4)
	require.Subset(s.t, places, []string{"node-a:0/4", "node-a:1/4", "node-b:2/4", "node-b:3/4"}, s.output(id))
}

func slurmRequeue(s *slurm) {
	id := s.batch("#SBATCH --nodes=2 --ntasks-per-node=1 --requeue", s.srun(steps))
	require.ElementsMatch(s.t, []string{"node-a:0/2::", "node-b:1/2::"}, s.saw(2))
	s.do("scontrol", "update", "node=node-b", "state=drain", "reason=bad")
	require.Equal(s.t, "RUNNING", s.job(id, "JobState"), "a drained node ends its job")
	s.do("scontrol", "requeue", id)
	eventually(s.t, "the save", s.exists("step"))
	s.hurry(id)
	require.ElementsMatch(s.t, []string{"node-a:0/2::1", "node-c:1/2::1"}, s.saw(4)[2:], s.output(id))
	require.NotContains(s.t, s.lines("seen")[2], ":1:0", "the save counts")
	s.release()
	s.becomes(id, "COMPLETED")
	s.do("scontrol", "update", "node=node-b", "state=resume")
}

// The site's check fails on the first node. RequeueExit of slurm.conf has the launcher's exit code.
func slurmExitCode(s *slurm) {
	s.release()
	id := s.batch("#SBATCH --nodes=1 --ntasks-per-node=1 --requeue",
		s.srun(steps, `--health-check='[ "$SLURM_RESTART_COUNT" = 1 ]'`))
	eventually(s.t, "requeued", func() bool { return s.job(id, "Restarts") == "1" })
	s.hurry(id)
	s.becomes(id, "COMPLETED")
	require.Contains(s.t, s.output(id), "Exited with exit code 40")
	require.Equal(s.t, []string{"node-a:0/1::1"}, s.saw(1))
}

// The others go on at once. srun counts the lost node as a failure, so the nodes leave a mark of their success.
func slurmLoss(s *slurm) {
	id := s.batch("#SBATCH --nodes=3 --ntasks-per-node=1 --no-kill", s.srun(steps, "--nnodes=1:3",
		`--after='[ $DLROVER_ENDED != success ] || : > done'`)+"\nstatus=$?; echo srun: $status\n[ -e done ] || exit $status")
	require.ElementsMatch(s.t, []string{"node-a:0/3::", "node-b:1/3::", "node-c:2/3::"}, s.saw(3))
	s.do("scontrol", "update", "node=node-b", "state=down", "reason=bad")
	require.ElementsMatch(s.t, []string{"node-a:0/2::", "node-c:1/2::"}, s.saw(5)[3:], s.output(id))
	s.release()
	s.becomes(id, "COMPLETED")
	require.Contains(s.t, s.output(id), "srun: 137")
}

// The first job of the array gets SIGTERM before its limit, saves and leaves. The second goes on, and cancels the rest.
func slurmHandOver(s *slurm) {
	id := s.batch("#SBATCH --nodes=2 --ntasks-per-node=1 --array=1-3%1 --time=1 --signal=TERM@55",
		s.srun(steps)+"\nstatus=$?; echo srun: $status; [ $status = 0 ] && scancel --state=PENDING $SLURM_ARRAY_JOB_ID\n"+
			"exit $status")
	require.ElementsMatch(s.t, []string{"node-a:0/2:1:", "node-b:1/2:1:", "node-a:0/2:2:", "node-b:1/2:2:"}, s.saw(4))
	require.NotContains(s.t, s.lines("seen")[2], "::0", "the save counts")
	s.release()
	s.becomes(id+"_2", "COMPLETED")
	s.becomes(id+"_3", "CANCELLED")
	require.Equal(s.t, "FAILED", s.job(id+"_1", "JobState"))
	require.Contains(s.t, s.output(id), "srun: 143")
	require.Contains(s.t, s.output(id), "stopped by SIGTERM")
}

// The job gets SIGTERM before its limit, saves and leaves, and its script requeues it.
func slurmLimit(s *slurm) {
	id := s.batch("#SBATCH --nodes=1 --ntasks-per-node=1 --time=1 --signal=TERM@55 --requeue",
		s.srun(steps)+"\nstatus=$?; [ $status != 143 ] || scontrol requeue $SLURM_JOB_ID\nexit $status")
	eventually(s.t, "requeued", func() bool { return s.job(id, "Restarts") == "1" })
	s.hurry(id)
	require.Equal(s.t, []string{"node-a:0/1::", "node-a:0/1::1"}, s.saw(2), s.output(id))
	s.release()
	s.becomes(id, "COMPLETED")
}

// powerOff kills everything on a node at once, which is what has its host name, and has Slurm know.
func (s *slurm) powerOff(name string) {
	s.t.Helper()
	uts, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/uts", s.daemons[name].cmd.Process.Pid))
	require.NoError(s.t, err)
	links, err := filepath.Glob("/proc/[0-9]*/ns/uts")
	require.NoError(s.t, err)
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == uts {
			pid, _ := strconv.Atoi(strings.Split(link, "/")[2])
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	s.do("scontrol", "update", "node="+name, "state=down", "reason=off")
}

// The batch script was on the first node. The launcher of the other node goes on, and serves itself, but nothing ends
// the job.
func slurmLossOfFirst(s *slurm) {
	id := s.batch("#SBATCH --nodelist=node-b,node-c --ntasks-per-node=1 --no-kill", s.srun(steps, "--nnodes=1:2",
		`--after='[ $DLROVER_ENDED != success ] || : > done.$SLURM_JOB_ID'`))
	require.ElementsMatch(s.t, []string{"node-b:0/2::", "node-c:1/2::"}, s.saw(2))
	s.powerOff("node-b")
	require.Equal(s.t, "node-c:0/1::", s.saw(3)[2])
	s.release()
	eventually(s.t, "success", s.exists("done."+id))
	require.Equal(s.t, "RUNNING", s.job(id, "JobState"))
	s.do("scancel", id)
}

// Without --no-kill the job starts anew.
func slurmRestart(s *slurm) {
	s.node("node-b")
	id := s.batch("#SBATCH --nodelist=node-a --nodes=2 --ntasks-per-node=1 --requeue", s.srun(steps))
	s.saw(2)
	s.powerOff("node-a")
	eventually(s.t, "requeued", func() bool { return s.job(id, "Restarts") == "1" })
	s.do("scontrol", "update", "job="+id, "nodelist=")
	s.hurry(id)
	require.ElementsMatch(s.t, []string{"node-b:0/2::1", "node-c:1/2::1"}, s.saw(4)[2:], s.output(id))
	s.release()
	s.becomes(id, "COMPLETED")
}
