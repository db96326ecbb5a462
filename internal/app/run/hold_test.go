package run

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// with starts a launcher as ruled.node does, with more options.
func (r *ruled) with(name, nnodes string, options ...string) *launched {
	r.t.Helper()
	args := append([]string{"--nnodes=" + nnodes, "--nproc-per-node=1", "--rdzv-id=job", "--exit-code-policy=reason",
		"--rdzv-conf=last_call_timeout=0.2"}, options...)
	l := r.start("dlrover-run", append([]string{"POD_NAME=" + name, "TMPDIR=" + r.dir}, r.env...), r.sh(ruledWorker,
		args...)...)
	r.nodes = append(r.nodes, l)
	return l
}

func TestAHeldJobIsStartedWithAnotherCommand(t *testing.T) {
	r := rule(t, "2")
	meanwhile := `--hold=sh -c 'cp $DLROVER_ENV_DIR/rank0.env.sh $DIR/env.$POD_NAME; exec sleep inf'`
	r.with("n0", "2", meanwhile)
	r.with("n1", "2", "--hold=false") // a command that fails holds, too
	eventually(t, "env", func() bool { return strings.Contains(r.text("env.n0"), "export WORLD_SIZE='2'\n") })
	eventually(t, "held", func() bool { return strings.Contains(r.nodes[1].err.String(), "the run stays held") })
	require.Contains(t, r.ctl(0, "status", "job"), "held: the job was started with --hold")
	require.Empty(t, r.lines("starts"))

	r.ctl(0, "start", "job", "--command",
		"sh -c 'echo $RANK $1 >> $DIR/starts; while [ ! -e $DIR/go ]; do sleep 0.02; done'",
		"--", "sh", "fast")
	eventually(t, "other workers", func() bool {
		return strings.Contains(r.text("starts"), "0 fast\n") && strings.Contains(r.text("starts"), "1 fast\n")
	})
	require.Contains(t, r.ctl(1, "start", "job"), "is not paused or held")
	require.Contains(t, r.ctl(0, "status", "job"), "sh -c ")
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
	r.ends(0)
	left, err := filepath.Glob(filepath.Join(r.dir, "dlrover-env-*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// text is what is in a file of the bench; "" without one.
func (r *ruled) text(file string) string {
	text, _ := os.ReadFile(filepath.Join(r.dir, file))
	return string(text)
}

func TestTheCommandOfAResumeOutlivesTheDaemon(t *testing.T) {
	long(t)
	t.Parallel()
	r := rule(t, "2:3", "n0", "n1")
	r.worlds(1)
	r.ctl(0, "pause", "job", "--command", "sh -c 'echo other.$RANK/$WORLD_SIZE >> $DIR/starts; exec sleep inf'")
	eventually(t, "ended", func() bool { return len(r.lines("ended")) == 2 })
	r.daemon.signal(syscall.SIGKILL)
	r.daemon.wait()
	r.daemon, _ = r.startDaemon(r.addr, "DLROVER_TOKEN="+testToken)
	eventually(t, "the nodes have come back", func() bool {
		l := r.start("dlroverctl", r.env, "status", "job", "--json")
		return l.wait() == 0 && strings.Count(l.out.String(), `"slots"`) >= 2
	})
	require.NotNil(t, r.phase().Paused)
	r.ctl(0, "resume", "job")
	r.started("other.0/2", 1)
	r.with("n2", "2:3")
	r.started("other.2/3", 1) // a node that joins later gets it, too
	r.ctl(0, "stop", "job")
	r.ends(45)
}

func TestACommandNeedsAToken(t *testing.T) {
	r := rule(t, "2")
	r.daemon.signal(syscall.SIGTERM)
	r.daemon.wait()
	r.daemon, r.addr = r.startDaemon("127.0.0.1:0")
	r.env = []string{"DLROVER_MASTER_ADDR=" + r.addr}
	r.with("n0", "1", "--hold")
	eventually(t, "held", func() bool { return strings.Contains(r.nodes[0].err.String(), "the run is held") })
	require.Contains(t, r.ctl(1, "start", "job", "--command", "true"), "needs a job token")
	require.Empty(t, r.lines("starts"))
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
	r.ctl(0, "start", "job")
	r.ends(0)
}

func TestADrainedNodeLeaves(t *testing.T) {
	r := rule(t, "1:2", "n0", "n1")
	r.worlds(1)
	require.Contains(t, r.ctl(0, "drain", "job", "n0", "--reason", "a new fan"), "unbar job n0")
	require.Equal(t, 143, r.nodes[0].wait(), r.nodes[0].err.String())
	require.Contains(t, r.nodes[0].err.String(), "left: drained: a new fan")
	r.started("n1:0/1", 1)
	require.Contains(t, r.ctl(1, "drain", "job", "n0"), `has no node "n0"`)
	late := r.node("n0", "1:2")
	eventually(t, "barred", func() bool { return strings.Contains(late.err.String(), "gets no workers") })
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
	require.Equal(t, 0, r.nodes[1].wait())
	require.Equal(t, 0, late.wait())
}

// A node that got a signal announces it, has its time to end, and the others wait for none of that.
func TestTheOthersDoNotWaitForANodeThatLeaves(t *testing.T) {
	long(t)
	t.Parallel()
	r := rule(t, "1:2")
	stubborn := `trap 'echo $POD_NAME >> $DIR/ended' TERM; echo $POD_NAME:$RANK/$WORLD_SIZE >> $DIR/starts
while :; do sleep 0.02; done`
	for n, patience := range []string{"300", "1"} {
		r.nodes = append(r.nodes, r.start("dlrover-run", append([]string{fmt.Sprintf("POD_NAME=n%d", n)}, r.env...),
			r.sh(stubborn, "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=job", "--rdzv-conf=last_call_timeout=0.5",
				"--leave-grace=300s", "--shutdown-timeout="+patience)...))
	}
	r.worlds(1)
	begun := time.Now()
	r.nodes[0].signal(syscall.SIGTERM)
	r.started("n1:0/1", 1)
	require.Less(t, time.Since(begun), 10*time.Second)
	r.nodes[0].signal(syscall.SIGTERM) // no more grace
	r.nodes[0].wait()
	r.ctl(0, "stop", "job")
	r.nodes[1].wait()
}

func TestANoticeEndsANodesPart(t *testing.T) {
	long(t)
	t.Parallel()
	var notice, elsewhere atomic.Bool
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Store(true) }))
	defer other.Close()
	cloud := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.Header.Get("Metadata-Flavor") != "Google":
			w.WriteHeader(http.StatusForbidden)
		case notice.Load():
			fmt.Fprint(w, `{"action": "terminate"}`)
		default:
			http.Redirect(w, req, other.URL, http.StatusFound)
		}
	}))
	defer cloud.Close()
	r := rule(t, "1:3")
	file := filepath.Join(r.dir, "notice")
	for i, from := range []string{"--leave-on=" + file, "--leave-on=" + cloud.URL, "--leave-grace=20s"} {
		r.with(fmt.Sprint("n", i), "1:3", from)
	}
	eventually(t, "three nodes", func() bool { return strings.Contains(strings.Join(r.lines("starts"), " "), "/3") })
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.Equal(t, 143, r.nodes[0].wait())
	require.Contains(t, r.nodes[0].err.String(), "left: notice at "+file)
	eventually(t, "an answer that is none", func() bool {
		return strings.Contains(r.nodes[1].err.String(), "--leave-on gives no answer")
	})
	notice.Store(true)
	require.Equal(t, 143, r.nodes[1].wait())
	require.False(t, elsewhere.Load(), "nobody is sent elsewhere")
	r.started("n2:0/1", 1)
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
	require.Equal(t, 0, r.nodes[2].wait())
}

func TestTheWorkingDirectoryOfWorkers(t *testing.T) {
	b := newBench(t)
	require.NoError(t, os.Mkdir(filepath.Join(b.dir, "work"), 0o755))
	script := filepath.Join(b.dir, "work", "script.sh")
	require.NoError(t, writeProgram(script, []byte("#!/bin/sh\npwd > where\n")))
	l := b.start("dlrover-run", nil, "--standalone", "--no-python", "--workdir="+filepath.Join(b.dir, "work"),
		"./script.sh")
	require.Equal(t, 0, l.wait(), l.err.String())
	where, err := os.ReadFile(filepath.Join(b.dir, "work", "where"))
	require.NoError(t, err)
	require.Equal(t, filepath.Join(b.dir, "work"), strings.TrimSpace(string(where)))
	l = b.start("dlrover-run", nil, "--standalone", "--no-python", "--workdir=/nowhere/at/all", "./script.sh")
	require.Equal(t, 2, l.wait())
	require.Contains(t, l.err.String(), "--workdir=/nowhere/at/all: there is no such directory")
}
