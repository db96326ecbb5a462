package run

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// ruled is a run of shell workers under a daemon, and dlroverctl for it.
type ruled struct {
	*bench
	addr   string
	daemon *launched
	nodes  []*launched
	env    []string
}

// rule starts a daemon and a launcher for each name. Every start of a worker leaves "NODE:RANK/WORLD" in the file
// starts; a worker ends when the file "go" is there, or with status 7 when there is one "fail.RANK".
func rule(t *testing.T, nnodes string, names ...string) *ruled {
	t.Helper()
	r := &ruled{bench: newBench(t)}
	r.daemon, r.addr = r.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
	r.env = []string{"DLROVER_MASTER_ADDR=" + r.addr, "DLROVER_TOKEN=" + testToken}
	for _, name := range names {
		r.nodes = append(r.nodes, r.node(name, nnodes))
	}
	return r
}

const ruledWorker = `trap 'echo $POD_NAME >> $DIR/ended; exit 0' TERM
echo $POD_NAME:$RANK/$WORLD_SIZE >> $DIR/starts
while [ ! -e $DIR/go ]; do [ -e $DIR/fail.$RANK ] && { echo "ValueError: bad batch" >&2; exit 7; }; sleep 0.02; done`

func (r *ruled) node(name, nnodes string) *launched {
	r.t.Helper()
	return r.start("dlrover-run", append([]string{"POD_NAME=" + name}, r.env...), r.sh(ruledWorker,
		"--nnodes="+nnodes,
		"--nproc-per-node=1", "--rdzv-id=job", "--exit-code-policy=reason", "--rdzv-conf=last_call_timeout=0.2")...)
}

// ctl runs dlroverctl, which has to end with a status, and returns what it prints.
func (r *ruled) ctl(code int, args ...string) string {
	r.t.Helper()
	l := r.start("dlroverctl", r.env, args...)
	require.Equal(r.t, code, l.wait(), l.err.String())
	return l.out.String() + l.err.String()
}

// started waits until workers have been started that many times in the given way.
func (r *ruled) started(way string, times int) {
	r.t.Helper()
	eventually(r.t, way, func() bool { return count(r.lines("starts"), way) == times })
}

// worlds waits until a world of both nodes has been started that many times.
func (r *ruled) worlds(times int) {
	r.t.Helper()
	eventually(r.t, "both nodes", func() bool {
		n := 0
		for _, s := range r.lines("starts") {
			if strings.HasSuffix(s, "/2") {
				n++
			}
		}
		return n == 2*times
	})
}

// phase is what status --json says of the run.
func (r *ruled) phase() (s struct {
	Phase  string          `json:"phase"`
	Paused json.RawMessage `json:"paused"`
	Nodes  []struct {
		Name  string `json:"name"`
		State string `json:"state"`
	} `json:"nodes"`
}) {
	r.t.Helper()
	require.NoError(r.t, json.Unmarshal([]byte(r.ctl(0, "status", "job", "--json")), &s))
	return s
}

func (r *ruled) ends(code int) {
	r.t.Helper()
	for _, n := range r.nodes {
		require.Equal(r.t, code, n.wait(), n.err.String())
	}
}

func TestAnOperatorRestartsAndStopsAJob(t *testing.T) {
	r := rule(t, "2", "n0", "n1")
	r.worlds(1)
	follow := r.start("dlroverctl", r.env, "events", "job", "-f")
	require.Contains(t, r.ctl(0, "status", "job"), "n1")
	eventually(t, "seal", func() bool { return strings.Contains(follow.out.String(), "2 nodes, 2 workers") })

	require.Contains(t, r.ctl(0, "restart", "job", "--reason", "new data"), "started anew")
	r.worlds(2)
	require.Contains(t, r.ctl(0, "runs"), "0 of 0", "an operator's restart is free")
	require.Contains(t, r.ctl(1, "status", "jib"), `keeps no run "jib"; it keeps job`)
	require.Contains(t, r.ctl(1, "resume", "job"), "not paused")

	require.Contains(t, r.ctl(0, "stop", "job", "--reason", "bad data"), "stopped")
	r.ends(45)
	require.Contains(t, r.nodes[0].err.String(), "bad data")
	require.Equal(t, 0, follow.wait())
	require.Regexp(t, `(?s)restart: new data .*stop: bad data .*failed`, follow.out.String())
	require.Contains(t, r.ctl(0, "verdict", "job"), "bad data")
	r.daemon.signal(syscall.SIGTERM)
	require.Equal(t, 0, r.daemon.wait())
	require.Contains(t, r.ctl(1, "runs"), "no daemon answers at "+r.addr)
}

// The workers of a paused job have ended and its launchers stay, whatever becomes of the daemon.
func TestAPauseSurvivesTheDaemon(t *testing.T) {
	r := rule(t, "2", "n0", "n1")
	r.worlds(1)
	require.Contains(t, r.ctl(0, "pause", "job", "--reason", "switch is replaced"), "dlroverctl resume job")
	eventually(t, "ended", func() bool { return len(r.lines("ended")) == 2 })
	require.Contains(t, r.ctl(0, "status", "job"), "paused: switch is replaced")

	r.daemon.signal(syscall.SIGKILL)
	r.daemon.wait()
	r.startDaemon(r.addr, "DLROVER_TOKEN="+testToken)
	eventually(t, "back", func() bool { return r.ctlWorks("status", "job") && len(r.phase().Nodes) == 2 })
	require.Contains(t, r.ctl(0, "status", "job"), "paused: switch is replaced")
	require.Len(t, r.lines("starts"), 2, "nothing has been started")

	r.ctl(0, "resume", "job")
	r.worlds(2)
	r.release()
	r.ends(0)
}

func (r *ruled) ctlWorks(args ...string) bool {
	return r.start("dlroverctl", r.env, args...).wait() == 0
}

func TestABarredNodeHasNoWorkers(t *testing.T) {
	r := rule(t, "1:2", "n0", "n1")
	r.worlds(1)
	require.Contains(t, r.ctl(0, "bar", "job", "n1", "--reason", "fan"), "dlroverctl unbar job n1")
	r.started("n0:0/1", 1)
	require.Contains(t, r.ctl(0, "status", "job"), "barred: fan")
	r.ctl(0, "unbar", "job", "n1")
	r.worlds(2)
	r.release()
	r.ends(0)
}

func TestTheVerdictNamesTheFailedRank(t *testing.T) {
	r := rule(t, "2", "n0", "n1")
	r.worlds(1)
	require.Contains(t, r.ctl(1, "verdict", "job"), "no verdict")
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "fail.1"), nil, 0o600))
	r.ends(10)
	require.Regexp(t, `rank 1 \(node 1 n[01].*failed first: exit code 7, last output "ValueError: bad batch"`,
		r.ctl(0, "verdict", "job"))
}

// The node that serves a c10d job is asked in the same way.
func TestTheServingNodeIsAsked(t *testing.T) {
	b := newBench(t)
	port := freePort(t)
	args := b.sh(hold, "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:"+port,
		"--rdzv-id=job", "--rdzv-conf=last_call_timeout=0.2", "--exit-code-policy=reason")
	l := b.run(args...)
	eventually(t, "up", b.exists("up.1.0"))
	r := &ruled{bench: b, env: []string{"DLROVER_MASTER_ADDR=localhost:" + port}}
	require.Contains(t, r.ctl(0, "runs"), "running")
	r.ctl(0, "restart", "job")
	r.started("0/1:0", 2)
	r.ctl(0, "stop", "job")
	require.Equal(t, 45, l.wait())
}

// The daemon of a paused job writes to disk what the workers had in memory, and they go on from there.
func TestTorchCheckpointPause(t *testing.T) {
	t.Parallel()
	const steps = 30
	b := newTraining(t, steps)
	port := freePort(t)
	l := b.run(b.args([]string{
		"--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:" + port,
		"--rdzv-id=job", "--rdzv-conf=last_call_timeout=0.2",
	}, steps)...)
	r := &ruled{bench: b.bench, env: []string{"DLROVER_MASTER_ADDR=localhost:" + port}}
	eventually(t, "training", func() bool { return b.trained() >= 5 })
	r.ctl(0, "pause", "job")
	eventually(t, "workers ended", func() bool { return len(b.workers()) == 0 })
	eventually(t, "saved", func() bool { return b.latest() >= 4 })
	saved := b.latest()
	r.ctl(0, "resume", "job")
	require.Equal(t, 0, l.wait())
	require.Len(t, b.curve(), steps)
	require.Contains(t, b.starts(), saved)
}

func TestAnOperatorSetsTheLogLevel(t *testing.T) {
	r := rule(t, "2", "n0", "n1")
	r.worlds(1)
	require.Contains(t, r.ctl(2, "log-level", "job", "loud"), "need one of debug, info, warn, error")
	r.ctl(0, "log-level", "job", "debug", "--node=n1")
	eventually(t, "told", func() bool { return strings.Contains(r.nodes[1].err.String(), "the log level changes") })
	require.NotContains(t, r.nodes[0].err.String(), "the log level changes")
	r.release()
	r.ends(0)
}

// operatorView is what status --json says in the words of training operators.
func (r *ruled) operatorView() string {
	var s struct {
		Operator struct {
			Phase     string
			Aggregate map[string]int
			Tasks     []struct {
				Name                   string
				Replicas, RestartCount int
			}
		}
	}
	require.NoError(r.t, json.Unmarshal([]byte(r.ctl(0, "status", "job", "--json")), &s))
	return fmt.Sprint(s.Operator.Phase, " ", s.Operator.Aggregate["succeeded"], " ", s.Operator.Aggregate["failed"], " ",
		s.Operator.Tasks)
}

// What a run was like is shown after its end, and who comes to one that has succeeded has nothing to do.
func TestARunAfterItsEnd(t *testing.T) {
	r := rule(t, "2", "n0", "n1")
	r.worlds(1)
	r.ctl(1, "forget", "job")
	r.ctl(0, "restart", "job")
	r.worlds(2)
	r.release()
	for _, n := range r.nodes {
		require.Equal(t, 0, n.wait())
	}
	require.Equal(t, "Succeeded 2 0 [{default 2 2}]", r.operatorView())
	require.Regexp(t, `(?s)n[01] +Succeeded .* true .*n[01] +Succeeded .* false `, r.ctl(0, "nodes", "job"))
	text := r.ctl(0, "status", "job", "--conditions")
	require.Regexp(t, `(?s)ended +\d+s ago.*nodes +2 at the end; it wants 2.*Completed +True.*succeeded +2.*`+
		`n[01] .*n[01] `, text)
	require.Contains(t, r.ctl(0, "events", "job"), "succeeded")
	require.Contains(t, r.ctl(0, "verdict", "job"), "round 1, epoch 1")

	again := r.node("n1", "2")
	require.Equal(t, 0, again.wait())
	require.Contains(t, again.err.String(), "run job has succeeded, ")
	require.Contains(t, again.err.String(), "dlroverctl forget job")
	require.Len(t, r.lines("starts"), 4)
	require.Equal(t, "Succeeded 2 0 [{default 2 2}]", r.operatorView(), "it changes nothing")

	require.Contains(t, r.ctl(0, "forget", "job"), "its name is free")
	require.Contains(t, r.ctl(1, "status", "job"), "keeps no run")
	require.Equal(t, 0, r.node("n1", "1").wait())
	require.Len(t, r.lines("starts"), 5)
}

// A pod of a failed run that is started again is another attempt.
func TestAFailedRunAfterItsEnd(t *testing.T) {
	r := rule(t, "2", "n0", "n1")
	r.worlds(1)
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "fail.1"), nil, 0o600))
	for _, n := range r.nodes {
		require.Equal(t, 10, n.wait())
	}
	require.Equal(t, "Failed 0 2 [{default 2 0}]", r.operatorView())
	require.Contains(t, r.ctl(0, "verdict", "job"), "ValueError: bad batch")
	require.NoError(t, os.Remove(filepath.Join(r.dir, "fail.1")))
	r.nodes = []*launched{r.node("n0", "2"), r.node("n1", "2")}
	r.worlds(2)
	r.release()
	for _, n := range r.nodes {
		require.Equal(t, 0, n.wait())
	}
	require.Contains(t, r.ctl(0, "verdict", "job"), "ValueError: bad batch", "of the attempt before")
	require.Equal(t, "Succeeded 2 0 [{default 2 0}]", r.operatorView())
}
