package run

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// tries is what another user of the host tries at the directories DIR..., and at processes, and what of it works.
const tries = `import os, socket, sys
dirs, pids = sys.argv[1].split(), sys.argv[2].split()
def works(what, f):
    try:
        f()
        print(what)
    except (OSError, ValueError):
        pass
def look(pid, name):
    open("/proc/%s/%s" % (pid, name), "rb").close()
    with open("/proc/%s/stat" % pid) as f:
        if f.read().rpartition(")")[2].split()[0] in "ZX":  # which has nothing left, and lets everybody open it
            raise OSError
for top in dirs:
    for at, subs, files in os.walk(top, onerror=lambda e: None):
        works("list " + at, lambda: os.listdir(at))
        works("make " + at, lambda: os.mknod(os.path.join(at, "foreign")))
        for name in files:
            path = os.path.join(at, name)
            works("read " + path, lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
            works("write " + path, lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))
            works("connect " + path, lambda: socket.socket(socket.AF_UNIX).connect(path))
for pid in pids:
    works("kill " + pid, lambda: os.kill(int(pid), 0))
    for name in "environ", "mem", "maps":
        works(name + " " + pid, lambda: look(pid, name))
    works("files " + pid, lambda: os.listdir("/proc/%s/fd" % pid))
`

// TestAnotherUserOfTheHost: another user reads and writes nothing of a job but its logs and reports, which are for all.
func TestAnotherUserOfTheHost(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: OTHER USERS OF THE HOST ARE NOT TESTED: only root can become one")
	}
	b := newBench(t)
	l := b.start("dlrover-run", []string{"DLROVER_TOKEN=" + testToken, "TORCHELASTIC_ENABLE_FILE_TIMER=1"},
		b.sh(hold, "--standalone", "--nproc-per-node=1", "--hang=auto", "--log-dir="+filepath.Join(b.dir, "logs"),
			"--event-log="+filepath.Join(b.dir, "events.node"))...)
	eventually(t, "up", b.exists("up.1.0"))
	private, err := filepath.Glob(filepath.Join(b.dir, "dlrover-0", "*"))
	require.NoError(t, err)
	require.NotEmpty(t, private, "nothing to try at")
	var pids []string
	for _, pid := range b.tagged() {
		pids = append(pids, strconv.Itoa(pid))
	}
	require.GreaterOrEqual(t, len(pids), 3, "guard, launcher, worker")
	all := as(t, 12345, tries, b.dir, strings.Join(pids, " "))
	for line := range strings.Lines(all) {
		what, path, _ := strings.Cut(strings.TrimSpace(line), " ")
		name, _ := filepath.Rel(b.dir, path)
		top, _, _ := strings.Cut(name, string(filepath.Separator))
		public := top == "logs" || top == "events.node" || top == "." || top == "starts" || strings.HasPrefix(top, "up.") ||
			strings.HasPrefix(top, "worker")
		require.True(t, public && (what == "read" || what == "list"), line)
	}
	own := as(t, 0, tries, b.dir, strings.Join(pids, " "))
	for _, works := range []string{"environ ", "mem ", "files ", "kill ", "connect ", "/hang-"} {
		require.Contains(t, own, works, "the attempts work for those who may")
	}
	b.release()
	require.Equal(t, 0, l.wait())
}

// as is the output of a Python program of a user.
func as(t *testing.T, uid uint32, program string, args ...string) string {
	t.Helper()
	cmd := exec.Command("/usr/bin/python3", append([]string{"-c", program}, args...)...)
	cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

// storeAsks sets and reads a key of a workers' store, as PyTorch 1.x does.
const storeAsks = `import socket, struct, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10)
text = lambda b: struct.pack("=Q", len(b)) + b
try:
    s.sendall(b"\0" + text(b"foreign") + text(b"value") + b"\2" + text(b"foreign"))
    print(s.recv(64)[8:].decode())
except OSError:
    print("refused")
`

// TestTheStoreOfAJobHasNoPassword: docs/reference/threats.md says so, of processes on hosts of the world.
func TestTheStoreOfAJobHasNoPassword(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: OTHER USERS OF THE HOST ARE NOT TESTED: only root can become one")
	}
	b := newBench(t)
	args := b.c10d("1:2", "--rdzv-conf=last_call_timeout=0.2")
	l := b.start("dlrover-run", []string{"DLROVER_TOKEN=" + testToken}, b.sh(hold, args...)...)
	eventually(t, "up", b.exists("up.2.0"))
	port := strings.TrimPrefix(args[3], "--rdzv-endpoint=localhost:")
	require.Equal(t, "value\n", as(t, 12345, storeAsks, port))
	b.release()
	require.Equal(t, 0, l.wait())
}

// lighthouseAsked opens a connection of HTTP/2 to a launcher's lighthouse, and prints what comes: settings, or nothing.
const lighthouseAsked = `import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10)
try:
    s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    print("served" if s.recv(64) else "closed")
except OSError:
    print("closed")
`

// TestTheLighthouseIsForItsOwnUser: other users of the host cannot ask for quorums of a job.
func TestTheLighthouseIsForItsOwnUser(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: OTHER USERS OF THE HOST ARE NOT TESTED: only root can become one")
	}
	g := &grouped{bench: newBench(t)}
	g.args = []string{"--nnodes=1:2", "--replica-groups=2", "--nproc-per-node=1", "--preset=torchft",
		"--rdzv-backend=c10d", "--rdzv-endpoint=localhost:" + freePort(t)}
	l := g.node("a")
	_, port, _ := strings.Cut(strings.TrimPrefix(g.replica("a", g.started(1)[0]).url, "http://"), ":")
	require.Equal(t, "closed\n", as(t, 12345, lighthouseAsked, port))
	require.Equal(t, "served\n", as(t, 0, lighthouseAsked, port))
	require.Contains(t, l.err.String(), "it is of uid 12345")
	g.release()
	require.Zero(t, l.wait())
}
