package run

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/guarded"
	"dlrover-run/launcher/remote"
)

// farm is four hosts with network namespaces of their own, of which the first three have an sshd: farmHosts are their
// addresses. The fourth is a launcher pod, which is in no host file.
type farm struct {
	*bench
	names  [4]string
	config string // of ssh
	sshds  [3]*launched
}

var farmHosts = [4]string{"10.99.8.1", "10.99.8.2", "10.99.8.3", "10.99.8.4"}

const sshd = "/usr/sbin/sshd"

func newFarm(t *testing.T) *farm {
	f := &farm{bench: newBench(t)}
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root, so the START OF HOSTS OVER SSH IS NOT TESTED")
	}
	for _, program := range []string{"ip", "ssh", "ssh-keygen", sshd} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s (packages iproute2, openssh-server), so the START OF HOSTS OVER SSH IS NOT TESTED: %v", program, err)
		}
	}
	id := strconv.FormatInt(time.Now().UnixNano()%1e9, 36)
	bridge := "dlrb" + id
	for i, name := range append(f.names[:], bridge) {
		if i < len(f.names) {
			f.names[i] = fmt.Sprintf("dlr%s-%d", id, i)
			name = f.names[i]
		}
		if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
			t.Skipf("network namespaces are not allowed here, so the START OF HOSTS OVER SSH IS NOT TESTED: %v %s", err, out)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", name).Run() })
	}
	f.ip("-n", bridge, "link", "add", "br0", "type", "bridge")
	f.ip("-n", bridge, "link", "set", "br0", "up")
	for i, name := range f.names {
		port := fmt.Sprintf("p%d", i)
		f.ip("link", "add", "eth", "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
		f.ip("-n", bridge, "link", "set", port, "master", "br0", "up")
		f.ip("-n", name, "addr", "add", farmHosts[i]+"/24", "dev", "eth")
		f.ip("-n", name, "link", "set", "eth", "up")
		f.ip("-n", name, "link", "set", "lo", "up")
	}
	f.keys()
	return f
}

func (f *farm) ip(args ...string) {
	f.t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	require.NoError(f.t, err, "ip %v: %s", args, out)
}

func (f *farm) file(name, text string) string {
	f.t.Helper()
	path := filepath.Join(f.dir, name)
	require.NoError(f.t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// keys makes those of the hosts and of the user, and the files of ssh and sshd.
func (f *farm) keys() {
	for _, name := range []string{"hostkey", "userkey", "otherkey"} {
		path := filepath.Join(f.dir, name)
		out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path).CombinedOutput()
		require.NoError(f.t, err, "%s", out)
	}
	public := strings.Fields(string(read(f.t, filepath.Join(f.dir, "hostkey.pub"))))
	known := ""
	for _, addr := range farmHosts[:3] {
		known += addr + " " + public[0] + " " + public[1] + "\n"
	}
	f.file("known_hosts", known)
	f.file("authorized_keys", string(read(f.t, filepath.Join(f.dir, "userkey.pub"))))
	f.config = f.file("ssh_config", fmt.Sprintf("Host *\nIdentityFile %[1]s/userkey\nIdentitiesOnly yes\n"+
		"UserKnownHostsFile %[1]s/known_hosts\nGlobalKnownHostsFile /dev/null\n", f.dir))
	// Sessions get the marks of the test's processes; none comes with ssh.
	f.file("sshd_config", fmt.Sprintf("HostKey %[1]s/hostkey\nAuthorizedKeysFile %[1]s/authorized_keys\nStrictModes no\n"+
		"UsePAM no\nPidFile none\nPermitRootLogin yes\nSetEnv %[2]s DIR=%[1]s TMPDIR=%[1]s HERE=\"there $HOME\"\n",
		f.dir, f.tag))
}

// serve starts the sshd of a host. Without the program it does not see the test's.
func (f *farm) serve(host int, program bool) {
	f.t.Helper()
	hide := ""
	if !program {
		hide = "mount -t tmpfs none " + binDir + " && "
	}
	script := fmt.Sprintf("#!/bin/sh\nexec ip netns exec %s sh -c 'mount -t tmpfs none /run && mkdir /run/sshd && %s"+
		"exec %s -D -e -f %s/sshd_config'\n", f.names[host], hide, sshd, f.dir)
	path := filepath.Join(f.dir, fmt.Sprintf("sshd%d.sh", host))
	require.NoError(f.t, writeProgram(path, []byte(script)))
	f.sshds[host] = f.startPath(path, nil)
	eventually(f.t, "sshd", func() bool { return strings.Contains(f.sshds[host].err.String(), "Server listening") })
}

func (f *farm) serveAll() *farm {
	f.t.Helper()
	for host := range f.sshds {
		f.serve(host, host != 2)
	}
	return f
}

// deepSpeed starts it on a host.
func (f *farm) deepSpeed(host int, env []string, args ...string) *launched {
	f.t.Helper()
	path := filepath.Join(f.dir, fmt.Sprintf("deepspeed%d.sh", host))
	if _, err := os.Lstat(path); err != nil {
		link := filepath.Join(f.dir, "deepspeed")
		_ = os.Symlink(filepath.Join(binDir, "dlrover-run"), link)
		require.NoError(f.t, writeProgram(path, []byte("#!/bin/sh\nexec ip netns exec "+f.names[host]+" "+link+` "$@"`+"\n")))
	}
	own := []string{"HOME=" + f.dir, "DS_ACCELERATOR=cpu", "PDSH_SSH_ARGS_APPEND=-F " + f.config}
	return f.startPath(path, append(own, env...), args...)
}

// three is a host file of the three hosts with two workers on the second.
func (f *farm) three() string {
	return "--hostfile=" + f.hosts(farmHosts[0]+" slots=1", farmHosts[1]+" slots=2", farmHosts[2]+" slots=1")
}

// up waits for all four workers.
func (f *farm) up() {
	f.t.Helper()
	for rank := range 4 {
		eventually(f.t, "rank "+strconv.Itoa(rank), f.exists(fmt.Sprintf("up.4.%d", rank)))
	}
}

// The first host of the file starts all of them, as with DeepSpeed, and so does one that is not in the file. A host
// that does not have the program gets it for as long as the job runs.
func TestDeepSpeedStartsHosts(t *testing.T) {
	t.Parallel()
	for name, from := range map[string]int{"from the first host": 0, "from outside": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFarm(t).serveAll()
			f.file(".deepspeed_env", "FROM_FILE=$HERE\n")
			script := f.program(`secret=$DLROVER_TOKEN$DLROVER_REMOTE_START
				echo "$RANK/$WORLD_SIZE $CROSS_RANK $MASTER_ADDR $FROM_FILE $NCCL_DEBUG$NOT_EXPORTED$secret $2"
				[ "$PWD" = "$DIR" ] || echo "in $PWD"
				ls -d $DIR/dlrover-run-* >> $DIR/copies; ls /tmp/*.deepspeed >> $DIR/pids
				echo "to stderr" >&2; printf "no end $RANK"`)
			l := f.deepSpeed(from, []string{"NCCL_DEBUG=INFO", "NOT_EXPORTED=x", "HERE=here"}, f.three(), "--no_python",
				"--save_pid", script, "two words")
			require.Equal(t, 0, l.wait(), l.err.String())
			for rank, node := range []int{0, 1, 1, 2} {
				where, own := "there $HOME", ""
				if node == from { // its launcher is a child of the command
					where, own = "here", "x"
				}
				require.Contains(t, l.out.String(), fmt.Sprintf("%s: %d/4 %d %s %s INFO%s two words\n", farmHosts[node], rank, node,
					farmHosts[0], where, own))
				require.Contains(t, l.err.String(), farmHosts[node]+": to stderr\n")
				require.Contains(t, l.out.String(), fmt.Sprintf("no end %d", rank))
			}
			require.NotContains(t, l.out.String(), "in /")
			require.NotContains(t, l.out.String(), "dlrover-remote")
			require.NotEmpty(t, f.lines("copies"))
			require.Contains(t, f.lines("pids"), fmt.Sprintf("/tmp/%d.deepspeed", l.cmd.Process.Pid))
			f.noCopyLeft()
		})
	}
}

func (f *farm) noCopyLeft() {
	f.t.Helper()
	eventually(f.t, "no copy of the program", func() bool {
		left, err := filepath.Glob(filepath.Join(f.dir, "dlrover-run-*"))
		return err == nil && len(left) == 0
	})
}

// The run's end is the starter's: one status, and one host that is named.
func TestDeepSpeedEndsAsItsHostsDo(t *testing.T) {
	t.Parallel()
	f := newFarm(t).serveAll()
	script := f.program(hold + `; [ $RANK != 2 ] || exit 7; sleep 60`)
	l := f.deepSpeed(0, []string{"PET_EXIT_CODE_POLICY=reason"}, f.three(), "--no_python", script)
	f.up()
	f.release()
	require.Equal(t, 10, l.wait())
	require.Contains(t, l.err.String(), "failed first: exit code 7")
	require.Contains(t, l.err.String(), "its launcher has ended with status 10")
	f.noCopyLeft()
}

// SIGTERM reaches the workers of all hosts.
func TestDeepSpeedPassesSignalsOn(t *testing.T) {
	t.Parallel()
	f := newFarm(t).serveAll()
	l := f.deepSpeed(3, []string{"PET_EXIT_CODE_POLICY=reason"}, f.three(), "--no_python",
		f.program(`trap 'echo TERM >> $DIR/terms; exit 3' TERM; `+hold))
	f.up()
	l.signal(syscall.SIGTERM)
	require.Equal(t, 143, l.wait())
	require.Len(t, f.lines("terms"), 4)
	f.noCopyLeft()
}

// The starter, its host's agent and launcher are signaled together, as systemd does: that is one signal, and the
// workers have time to end.
func TestDeepSpeedInAUnit(t *testing.T) {
	t.Parallel()
	f := newFarm(t).serveAll()
	l := f.deepSpeed(0, nil, f.three(), "--no_python",
		f.program(`trap 'sleep 0.5; echo $RANK >> $DIR/graceful; exit 3' TERM; `+hold))
	f.up()
	own := 0
	for _, p := range f.tagged() {
		exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", p))
		if filepath.Base(exe) == "dlrover-run" && f.on(p) == farmHosts[0] {
			own++
			require.NoError(t, syscall.Kill(p, syscall.SIGTERM))
		}
	}
	require.GreaterOrEqual(t, own, 5)
	require.NotEqual(t, 0, l.wait())
	require.ElementsMatch(t, []string{"0", "1", "2", "3"}, f.lines("graceful"))
}

// Whoever of them is killed, nothing of the job is left on any host, and the others end.
func TestDeepSpeedWhereSomeoneIsKilled(t *testing.T) {
	long(t)
	t.Parallel()
	for name, c := range map[string]struct {
		pattern string // in the command line of who is killed; "": the starter
		said    string
	}{
		"the starter":       {"", ""},
		"below its guard":   {"launcher", ""},
		"ssh":               {"ssh\x00-F", "the connection is lost (ssh: signal: killed)"},
		"a session of sshd": {"sshd: root", "the connection is lost (ssh: exit status"},
		"an agent":          {"--dlrover-remote\x00agent", "the connection is lost (ssh: exit status 137)"},
		"a launcher":        {"deepspeed\x00--node_rank=2", "its launcher has ended with status 137"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFarm(t).serveAll()
			l := f.deepSpeed(0, nil, f.three(), "--no_python", f.program(`trap 'echo TERM >> $DIR/terms; exit 3' TERM; `+hold))
			f.up()
			switch {
			case c.pattern == "":
				l.signal(syscall.SIGKILL)
				l.wait()
			case c.said == "":
				require.NoError(t, syscall.Kill(l.launcher(), syscall.SIGKILL))
				l.wait()
			default:
				require.NoError(t, syscall.Kill(f.process(c.pattern, farmHosts[2]), syscall.SIGKILL))
				require.Equal(t, 1, min(l.wait(), 1))
				require.Contains(t, l.err.String(), "host "+farmHosts[2]+": "+c.said)
			}
			if c.said == "" {
				eventually(t, "the end of all workers, with time", func() bool { return len(f.lines("terms")) == 4 })
			}
			f.noCopyLeft()
			for _, s := range f.sshds {
				s.signal(syscall.SIGKILL)
			}
			f.noneLeft()
		})
	}
}

// process is a process of the job whose command line has the text, and which is for that host, or on it.
func (f *farm) process(text, host string) (pid int) {
	f.t.Helper()
	eventually(f.t, text, func() bool {
		for _, p := range append(f.tagged(), descendants(f.sshds[2].cmd.Process.Pid)...) { // sshd hides its environment
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p))
			if !bytes.Contains(line, []byte(text)) {
				continue
			}
			if bytes.Contains(line, []byte(host)) || f.on(p) == host {
				pid = p
				return true
			}
		}
		return false
	})
	return pid
}

// on is the host on which a process is.
func (f *farm) on(pid int) string {
	own, _ := os.Stat(fmt.Sprintf("/proc/%d/ns/net", pid))
	for i, name := range f.names {
		if ns, err := os.Stat("/var/run/netns/" + name); err == nil && own != nil && os.SameFile(ns, own) {
			return farmHosts[i]
		}
	}
	return ""
}

// A host that cannot be reached ends the job with one line: what is wrong, and what to do.
func TestDeepSpeedWhereAHostCannotBeReached(t *testing.T) {
	t.Parallel()
	f := newFarm(t)
	f.serve(1, true)
	script := f.program("exit 0")
	config := "PDSH_SSH_ARGS_APPEND=-F " + f.config + " "
	other := config + "-i " + f.dir + "/otherkey -F /dev/null -o UserKnownHostsFile=" + f.dir + "/known_hosts"
	for name, c := range map[string]struct{ host, env, arg, said string }{
		"no sshd":           {farmHosts[2], "", "", "ssh: no sshd listens there: start one, or give its port by --ssh_port"},
		"another port":      {farmHosts[1], "", "--ssh_port=23", "ssh: no sshd listens there"},
		"a key that is not": {farmHosts[1], other, "", "ssh: no key of this user is accepted there"},
		"an unknown host": {farmHosts[1], config + "-o UserKnownHostsFile=/dev/null", "",
			"ssh: its host key is not known here: add it by ssh-keyscan " + farmHosts[1]},
		"a host away":    {"10.99.8.9", config + "-o ConnectTimeout=1", "", "ssh: it does not answer"},
		"no such name":   {"nobody.invalid", config, "", "ssh: there is no host of that name"},
		"a wrong option": {farmHosts[1], config + "-o NoSuch=1", "", "ssh: ssh does not understand its options"},
		"no program": {farmHosts[1], "", "--rsh=sh -c 'echo no such pod >&2; exit 3' {host}",
			"sh ended with status 3 before it executed anything: no such pod"},
		"no input": {farmHosts[1], "", "--rsh=sh -c 'exec sh < /dev/null' {host}",
			"sh ended without executing anything: it does not pass its standard input on; kubectl exec needs -i"},
	} {
		t.Run(name, func(t *testing.T) {
			path := f.file("hosts."+c.host, farmHosts[0]+" slots=1\n"+c.host+" slots=1\n")
			args := []string{"--hostfile=" + path, "--master_port=" + freePort(t)}
			if c.arg != "" {
				args = append(args, c.arg)
			}
			env := []string{"PET_EXIT_CODE_POLICY=reason"}
			if c.env != "" {
				env = append(env, c.env)
			}
			l := f.deepSpeed(0, env, append(args, "--no_python", script)...)
			require.Equal(t, 20, l.wait())
			require.Contains(t, l.err.String(), "deepspeed: error: host "+c.host+": "+c.said)
		})
	}
}

// Any remote shell will do; here one that enters the host's namespace.
func TestDeepSpeedOverAnotherRemoteShell(t *testing.T) {
	t.Parallel()
	f := newFarm(t)
	agent := filepath.Join(f.dir, "agent.sh") // as Open MPI's operators have them: AGENT HOST COMMAND
	require.NoError(t, writeProgram(agent, []byte("#!/bin/sh\nexec ip netns exec $(cat $DIR/ns.$1) /bin/sh -c \"$2\"\n")))
	for i, name := range f.names {
		f.file("ns."+farmHosts[i], name)
	}
	l := f.deepSpeed(3, []string{"PET_RSH=" + agent + " {host}", "PATH=" + os.Getenv("PATH")}, f.three(), "--no_python",
		f.program(`echo "$RANK"`))
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Contains(t, l.out.String(), farmHosts[2]+": 3\n")
	for args, said := range map[string]string{
		"--rsh=kubectl exec -i worker --": "nothing says to which host: write {host} in its place",
		"--rsh=no-such-program {host}":    "there is no program no-such-program",
		"--rsh='{host}":                   "a ' is not closed",
	} {
		l := f.deepSpeed(3, nil, f.three(), args, "train.py")
		require.Equal(t, 2, l.wait())
		require.Contains(t, l.err.String(), said)
	}
}

// Where the command is started on every host, the second one hears what to do.
func TestDeepSpeedStartedOnEveryHost(t *testing.T) {
	t.Parallel()
	f := newFarm(t).serveAll()
	first := f.deepSpeed(0, nil, f.three(), "--no_python", f.program(hold))
	f.up()
	for _, env := range [][]string{nil, {"DLROVER_TOKEN=" + testToken}} {
		second := f.deepSpeed(1, env, f.three(), "--no_python", f.program(hold))
		require.NotEqual(t, 0, second.wait())
		require.Contains(t, second.err.String(), "this host's place in the job is taken: if deepspeed was started on "+
			"several hosts, start it on one, or give all of them --no_ssh")
	}
	f.release()
	require.Equal(t, 0, first.wait())
}

// A job that may go on with fewer hosts does.
func TestDeepSpeedGoesOnWithFewerHosts(t *testing.T) {
	t.Parallel()
	f := newFarm(t).serveAll()
	l := f.deepSpeed(0, []string{"PET_NNODES=2:3", "PET_RDZV_CONF=last_call_timeout=30"}, f.three(), "--no_python",
		f.program(hold))
	f.up()
	require.NoError(t, syscall.Kill(f.process("ssh\x00-F", farmHosts[2]), syscall.SIGKILL))
	eventually(t, "the others", func() bool { return f.exists("up.3.0")() && f.exists("up.3.2")() })
	f.release()
	require.Equal(t, 0, l.wait())
	require.Contains(t, l.err.String(), "the job goes on with 2 hosts")
}

func TestDeepSpeedShowsHowItStartsHosts(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	l := b.deepSpeed([]string{"DLROVER_TOKEN=" + testToken, "NCCL_X=secret"},
		"--hostfile="+b.hosts("a.invalid slots=1", "b.invalid slots=2"), "--rsh=env {host}", "--dry-run", "train.py")
	require.Equal(t, 0, l.wait())
	var p planCalled
	require.NoError(t, json.Unmarshal([]byte(l.out.String()), &p))
	require.Equal(t, []planHost{{"a.invalid", 0, []string{"env", "a.invalid", "sh"}},
		{"b.invalid", 1, []string{"env", "b.invalid", "sh"}}}, p.Start.Hosts)
	require.Contains(t, p.Start.Variables, "NCCL_X")
	require.NotContains(t, l.out.String(), "secret")
	require.NotContains(t, l.out.String(), testToken)
}

// The tuner's trials are jobs of this program, which starts their hosts in the way that the tuner's own line names.
func TestDeepSpeedTunesOnHosts(t *testing.T) {
	t.Parallel()
	f := newFarm(t)
	f.serve(0, true)
	f.serve(1, true)
	python := f.program(`[ -z "$RANK" ] || { echo "trial $RANK/$WORLD_SIZE"; exit; }
		echo "$@" > $DIR/args
		exec deepspeed --hostfile ` + filepath.Join(f.dir, "hosts") + ` --include=` + farmHosts[0] + `:0@` + farmHosts[1] +
		`:0,1 --master_port=29777 train.py`)
	f.file("train.py", "")
	l := f.deepSpeed(3, []string{"PYTHON_EXEC=" + python, "PATH=/usr/bin:/bin"}, f.three(), "--autotuning=run",
		"--ssh_port=22", "train.py", "--deepspeed", "ds.json")
	require.Equal(t, 0, l.wait())
	require.Contains(t, l.out.String(), farmHosts[1]+": trial 2/3\n")
	require.Equal(t, strings.Fields("-u -m deepspeed.launcher.runner --hostfile="+filepath.Join(f.dir, "hosts")+
		" --autotuning=run --no_ssh_check --master_addr="+farmHosts[0]+" train.py --deepspeed ds.json"), f.lines("args"))
}

func TestAgentsHaveNoGuard(t *testing.T) {
	t.Parallel()
	require.Equal(t, guarded.RemoteAgent, remote.Argument)
	out, err := exec.Command(filepath.Join(binDir, "dlrover-run"), remote.Argument, "id").Output()
	require.NoError(t, err)
	require.Regexp(t, "^[0-9a-f]{32}\n$", string(out))
}

// A scheduler that starts the command on every node is seen; an operator whose launcher pod starts the others is not.
func TestRankedBy(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"": "",
		"MASTER_ADDR=a MASTER_PORT=1 RANK=1 WORLD_SIZE=2":                    "kubeflow",
		"MASTER_ADDR=a MASTER_PORT=1 RANK=1 WORLD_SIZE=2 PET_SCHEDULER=none": "",
		"MASTER_ADDR=a MASTER_PORT=1 RANK=0 WORLD_SIZE=1":                    "",
		slurmVariables:                          "slurm",
		"SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a,b": "",
		"K_MPI_JOB_ROLE=launcher OMPI_MCA_orte_default_hostfile=hosts":                 "",
		"K_MPI_JOB_ROLE=worker OMPI_MCA_orte_default_hostfile=hosts PET_SCHEDULER=mpi": "mpi",
		"VC_TASK_INDEX=0 VC_WORKER_HOSTS=a,b VC_TASK_NAME=worker":                      "",
		"DLROVER_MASTER_ADDR=a:1": "",
	} {
		vars := variables(text)
		env := func(name string) (string, bool) { v, ok := vars[name]; return v, ok }
		host := hostFacts{name: "a", readFile: func(string) ([]byte, error) { return []byte("a slots=1\nb slots=1\n"), nil }}
		require.Equal(t, want, rankedBy(env, host), text)
	}
}

// The end of a job leaves time for last checkpoints, unless somebody wants it.
func TestGraceOfHosts(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"":                        90 * time.Second,
		"PET_SHUTDOWN_TIMEOUT=60": 150 * time.Second,
		"PET_LEAVE_GRACE=20":      90 * time.Second,
		"PET_LEAVE_GRACE=10m":     630 * time.Second,
		"PET_LEAVE_GRACE=x":       90 * time.Second,
		"PET_LEAVE_GRACE=600 PET_SHUTDOWN_TIMEOUT=1h": 2*time.Hour + 30*time.Second,
	} {
		vars := variables(text)
		require.Equal(t, want, endGrace(func(name string) (string, bool) { v, ok := vars[name]; return v, ok }), text)
	}
}
