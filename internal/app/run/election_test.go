package run

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/plainhttp"
	"dlrover-run/launcher/torchpython"
)

// electorate is some masters that elect one of them in an etcd of one member.
type electorate struct {
	b       *bench
	etcd    string
	server  *launched
	addrs   []string
	masters []*launched
}

func newElectorate(b *bench, n int) *electorate {
	b.t.Helper()
	if _, err := exec.LookPath("etcd"); err != nil {
		b.t.Skip("there is no etcd in PATH: install Debian's etcd-server")
	}
	e := &electorate{b: b, etcd: "127.0.0.1:" + freePort(b.t)}
	client, peer := "http://"+e.etcd, "http://127.0.0.1:"+freePort(b.t)
	path, err := exec.LookPath("etcd")
	require.NoError(b.t, err)
	e.server = b.startPath(path, []string{"ETCD_ENABLE_V2=true"}, "--data-dir", filepath.Join(b.t.TempDir(), "etcd"),
		"--log-level=error", "--unsafe-no-fsync", "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	for range n {
		e.addrs = append(e.addrs, "127.0.0.1:"+freePort(b.t))
		e.masters = append(e.masters, nil)
	}
	for i := range n {
		e.start(i)
	}
	return e
}

func (e *electorate) start(i int) {
	e.masters[i] = e.b.start("dlrover-master", e.env(), "--listen="+e.addrs[i], "--etcd="+e.etcd)
}

func (e *electorate) env() []string {
	return []string{"DLROVER_TOKEN=" + testToken, "DLROVER_MASTER_ADDR=" + strings.Join(e.addrs, ",")}
}

// serving are the masters that listen.
func (e *electorate) serving() (all []int) {
	for i, addr := range e.addrs {
		if c, err := net.Dial("tcp", addr); err == nil {
			_ = c.Close()
			all = append(all, i)
		}
	}
	return all
}

// leader waits until one master serves, which is none of these.
func (e *electorate) leader(not ...int) (leader int) {
	e.b.t.Helper()
	eventually(e.b.t, "one master serves", func() bool {
		all := e.serving()
		if len(all) != 1 || slices.Contains(not, all[0]) {
			return false
		}
		leader = all[0]
		return true
	})
	return leader
}

// The master that serves is killed three times; each time another one serves, no worker is restarted, and a failure
// afterwards restarts both nodes as ever.
func TestKilledMasterIsReplaced(t *testing.T) {
	b := newBench(t)
	e := newElectorate(b, 3)
	args := b.sh(`[ -n "$AGAIN" ] || `+hold, "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job")
	l1, l2 := b.start("dlrover-run", e.env(), args...), b.start("dlrover-run", e.env(), args...)
	eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	ctl := func(args ...string) string {
		l := b.start("dlroverctl", e.env(), args...)
		require.Equal(t, 0, l.wait())
		return l.out.String()
	}
	e.leader()
	ctl("node", "mark", "gpu-07", "--reason=smoke")
	for range 3 {
		leader := e.leader()
		for i := range e.masters {
			if i != leader {
				eventually(t, "the others follow it", e.follows(i, leader))
			}
		}
		e.masters[leader].signal(syscall.SIGKILL)
		killed := time.Now()
		e.masters[leader].wait()
		next := e.leader(leader)
		t.Logf("master %d serves %s after master %d was killed", next, time.Since(killed).Round(time.Millisecond), leader)
		eventually(t, "the run is complete again", func() bool {
			return strings.Contains(e.masters[next].err.String(), `"msg":"resumed"`)
		})
		e.start(leader)
	}
	require.Contains(t, ctl("nodes"), "gpu-07", "findings are in the store")
	b.release()
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
	require.Len(t, b.lines("starts"), 2, "no worker was restarted")
}

// What was decided about runs is known after the master that decided it was killed: how a run has ended, to people and
// to a launcher that comes late; a pause of a run whose launchers are all gone.
func TestNextMasterKnowsWhatWasDecided(t *testing.T) {
	b := newBench(t)
	e := newElectorate(b, 2)
	leader := e.leader()
	ctl := func(args ...string) string {
		l := b.start("dlroverctl", e.env(), args...)
		require.Equal(t, 0, l.wait(), l.err.String())
		return l.out.String()
	}
	good := b.sh("echo $RANK >> $DIR/good", "--nnodes=1", "--nproc-per-node=1", "--rdzv-id=good")
	require.Equal(t, 0, b.start("dlrover-run", e.env(), good...).wait())
	bad := b.start("dlrover-run", e.env(), b.sh("echo 'ValueError: bad batch' >&2; exit 7", "--nnodes=1",
		"--nproc-per-node=1", "--rdzv-id=bad")...)
	require.NotZero(t, bad.wait())
	waits := b.start("dlrover-run", e.env(), b.sh("exit 1", "--nnodes=2", "--rdzv-id=paused")...)
	eventually(t, "it waits", func() bool { return strings.Contains(ctl("runs"), "paused") })
	ctl("pause", "paused", "--reason=lunch")
	waits.signal(syscall.SIGKILL)
	e.masters[leader].signal(syscall.SIGKILL)
	waits.wait()
	e.masters[leader].wait()
	e.leader(leader)
	require.Contains(t, ctl("status", "good"), "succeeded")
	require.Contains(t, ctl("events", "good"), "node-succeeded")
	require.Contains(t, ctl("status", "bad"), "failed")
	require.Contains(t, ctl("verdict", "bad"), "bad batch")
	require.Contains(t, ctl("status", "paused"), "lunch")
	require.Equal(t, 0, b.start("dlrover-run", e.env(), good...).wait())
	require.Len(t, b.lines("good"), 1, "the run has succeeded: a launcher that comes late starts nothing")
	ctl("forget", "good")
	require.Equal(t, 0, b.start("dlrover-run", e.env(), good...).wait())
	require.Len(t, b.lines("good"), 2)
}

// follows reports whether the newest leader that a master has followed is this one.
func (e *electorate) follows(i, leader int) func() bool {
	return func() bool {
		text := e.masters[i].err.String()
		at := strings.LastIndex(text, `"msg":"following the master that serves"`)
		return at >= 0 && strings.Contains(text[at:], e.addrs[leader])
	}
}

// A frozen master is deposed by another one before its lease is over, and serves no longer when it wakes.
func TestFrozenMasterIsReplaced(t *testing.T) {
	b := newBench(t)
	e := newElectorate(b, 2)
	leader := e.leader()
	other := 1 - leader
	eventually(t, "the other one follows it", e.follows(other, leader))
	e.masters[leader].signal(syscall.SIGSTOP)
	frozen := time.Now()
	eventually(t, "the other one serves", func() bool {
		return strings.Contains(e.masters[other].err.String(), `"msg":"serving"`)
	})
	t.Logf("master %d serves %s after master %d was frozen", other, time.Since(frozen).Round(time.Millisecond), leader)
	require.Contains(t, e.masters[other].err.String(), "it has answered nothing for a while")
	e.masters[leader].signal(syscall.SIGCONT)
	require.Equal(t, other, e.leader(leader))
	require.Contains(t, e.masters[leader].err.String(), `"msg":"deposed`)
}

// A master is frozen while PyTorch trains on two nodes. The launchers are soon at the next one, where dlroverctl gets
// its answer, too; no rank is restarted.
func TestLaunchersLeaveAFrozenMaster(t *testing.T) {
	long(t)
	t.Parallel()
	b := newBench(t)
	b.env = append(b.env, "PYTHON_EXEC="+torchpython.Require(t, "A FROZEN MASTER IS"))
	e := newElectorate(b, 3)
	script, err := filepath.Abs("testdata/endless.py")
	require.NoError(t, err)
	var launchers []*launched
	for range 2 {
		launchers = append(launchers,
			b.start("dlrover-run", e.env(), "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=job", script))
	}
	eventually(t, "it trains", func() bool { return len(b.lines("starts")) == 4 && b.exists("step")() })
	for range 2 {
		leader := e.leader()
		for i := range e.masters {
			if i != leader {
				eventually(t, "the others follow it", e.follows(i, leader))
			}
		}
		e.masters[leader].signal(syscall.SIGSTOP)
		stopped := time.Now()
		ctl := b.start("dlroverctl", e.env(), "node", "mark", "gpu-07", "--reason=smoke")
		next, served := e.successor(leader, stopped)
		eventually(t, "the launchers are there", func() bool {
			return strings.Contains(e.masters[next].err.String(), `"msg":"resumed"`)
		})
		whole := time.Since(stopped)
		require.Equal(t, 0, ctl.wait())
		t.Logf("master %d serves %s after master %d was frozen, and the launchers are there %s later",
			next, served.Round(time.Millisecond), leader, (whole - served).Round(time.Millisecond))
		require.Less(t, whole-served, 8*time.Second, "before a report, or a watch, reaches its limit")
		e.masters[leader].signal(syscall.SIGKILL)
		e.masters[leader].wait()
		e.start(leader)
	}
	b.release()
	for _, l := range launchers {
		require.Equal(t, 0, l.wait())
	}
	require.Len(t, b.lines("starts"), 4, "no rank was restarted")
}

// successor waits until another master than the frozen one serves, and returns how long after an event that was.
func (e *electorate) successor(frozen int, since time.Time) (next int, after time.Duration) {
	e.b.t.Helper()
	eventually(e.b.t, "another master serves", func() bool {
		all := slices.DeleteFunc(e.serving(), func(i int) bool { return i == frozen })
		if len(all) == 1 {
			next, after = all[0], time.Since(since)
		}
		return len(all) == 1
	})
	return next, after
}

// While etcd is frozen the master that serves goes on, as long as all others follow it, and no other one serves. When
// one of them is gone it stops. All of them stay, and one is elected when etcd is back, which knows the marks.
func TestFrozenEtcdIsSurvived(t *testing.T) {
	b := newBench(t)
	e := newElectorate(b, 3)
	leader := e.leader()
	eventually(t, "it has named the others", func() bool { return e.metric(leader, "dlrover_election_candidates") == "2" })
	require.Equal(t, 0, b.start("dlroverctl", e.env(), "node", "mark", "gpu-07", "--reason=smoke").wait())
	first, second := (leader+1)%3, (leader+2)%3
	eventually(t, "one follows it", e.follows(first, leader))
	eventually(t, "the other one follows it", e.follows(second, leader))
	e.server.signal(syscall.SIGSTOP)
	for away := time.Now(); time.Since(away) < 6*time.Second; {
		require.Equal(t, []int{leader}, e.serving(), "after %s", time.Since(away))
	}
	require.Contains(t, e.masters[leader].err.String(), "this master goes on for as long as all others follow it")
	nodes := func() {
		t.Helper()
		l := b.start("dlroverctl", e.env(), "nodes")
		require.Equal(t, 0, l.wait())
		require.Contains(t, l.out.String(), "gpu-07")
	}
	nodes()
	e.masters[first].signal(syscall.SIGKILL)
	e.masters[first].wait()
	eventually(t, "no master serves", func() bool { return len(e.serving()) == 0 })
	e.server.signal(syscall.SIGCONT)
	e.leader(first)
	nodes()
	for _, i := range []int{leader, second} {
		select {
		case <-e.masters[i].exited:
			require.Fail(t, "a master has ended")
		default:
		}
	}
}

// metric is a metric of a master, "" if it has none.
func (e *electorate) metric(i int, name string) string {
	req, err := http.NewRequest(http.MethodGet, "http://"+e.addrs[i]+"/metrics", nil)
	if err != nil {
		return ""
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	resp, err := plainhttp.New(nil).Do(req)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return ""
	}
	_, value, _ := strings.Cut(string(text), "\n"+name+" ")
	value, _, _ = strings.Cut(value, "\n")
	return value
}

// A master that is elected and cannot serve leaves that to another one, and stays.
func TestMasterThatCannotServe(t *testing.T) {
	b := newBench(t)
	e := newElectorate(b, 1)
	require.Equal(t, 0, e.leader())
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	l := b.start("dlrover-master", e.env(), "--listen="+taken.Addr().String(), "--etcd="+e.etcd)
	eventually(t, "it waits", func() bool { return strings.Contains(l.err.String(), "waiting to be elected") })
	e.masters[0].signal(syscall.SIGTERM)
	require.Equal(t, 0, e.masters[0].wait())
	eventually(t, "it says so", func() bool { return strings.Contains(l.err.String(), "was elected and cannot serve") })
	e.start(0)
	require.Equal(t, 0, e.leader())
	require.NotContains(t, l.err.String(), `"msg":"serving"`)
}

// Options of an election that do not fit are named before anything is started.
func TestOptionsOfAnElection(t *testing.T) {
	b := newBench(t)
	unused := filepath.Join(t.TempDir(), "data")
	for args, want := range map[string]string{
		"--advertise=a:1":                 "--advertise has no effect without --etcd",
		"--etcd=a":                        `"a" is not HOST:PORT`,
		"--etcd=a:1,":                     `"" is not HOST:PORT`,
		"--etcd=a:1 --etcd-prefix=x":      "need a key that begins with a slash",
		"--etcd=a:1 --etcd-cert=x":        "--etcd-cert and --etcd-key belong together",
		"--etcd=a:1 --etcd-user=x":        "--etcd-user and --etcd-password-file belong together",
		"--etcd=a:1 --etcd-ca=/dev/x":     "--etcd-ca=/dev/x",
		"--etcd=a:1 --listen=:0":          "fixed port",
		"--etcd=a:1 --data-dir=" + unused: "--data-dir has no effect with --etcd",
		"--ha=lease --data-dir=" + unused: "--data-dir has no effect with --ha",
		"--ha=raft":                       "--ha=raft: need lease",
		"--ha=lease":                      "--ha=lease: not in a Kubernetes pod with a service account",
		"--ha=lease --lease-name=A":       `--lease-name="A": need 1 to 240 small letters`,
		"--ha=lease --etcd=a:1":           "--etcd and --ha: choose one way",
		"--lease-namespace=a":             "--lease-namespace has no effect without --ha",
	} {
		l := b.start("dlrover-master", []string{"DLROVER_TOKEN=" + testToken}, strings.Fields(args)...)
		require.Equal(t, 2, l.wait(), args)
		require.Contains(t, l.err.String(), want, args)
	}
	require.NoDirExists(t, unused, "nothing was begun")
	l := b.start("dlrover-master", nil, "--etcd=a")
	require.Equal(t, 2, l.wait())
	require.NotContains(t, l.err.String(), "no job token", "an error in the options is all that is said")
	for endpoint, want := range map[string]string{
		"a:1,b": "needs a host and a port", "a:1,": "needs a host and a port", "a:1,b:x": "must be an integer",
	} {
		l := b.run(b.sh("exit 0", "--rdzv-backend=dlrover-master", "--rdzv-endpoint="+endpoint, "--rdzv-id=x")...)
		require.NotZero(t, l.wait())
		require.Contains(t, l.err.String(), want, fmt.Sprint(endpoint))
	}
	l = b.run(b.sh("exit 0", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1,b:2", "--rdzv-id=x")...)
	require.NotZero(t, l.wait())
	require.Contains(t, l.err.String(), "several addresses are for --rdzv-backend=dlrover-master")
}
