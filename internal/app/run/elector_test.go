package run

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/member"
	"dlrover-run/launcher/torchpython"
)

// meeting is nodes that meet in an etcd of one member.
type meeting struct {
	*electorate
	opts  []string
	nodes []*meetingNode
}

// meetingNode is a launcher, with the name by which its processes are found.
type meetingNode struct {
	*launched
	name string
	m    *meeting
}

func newMeeting(t *testing.T, opts ...string) *meeting { return meetingOf(newBench(t), opts...) }

func meetingOf(b *bench, opts ...string) *meeting {
	m := &meeting{electorate: newElectorate(b, 0)}
	m.opts = append([]string{"--rdzv-backend=etcd-v2", "--rdzv-endpoint=" + m.etcd, "--rdzv-id=job",
		"--rdzv-conf=last_call_timeout=2", "--max-restarts=3"}, opts...)
	return m
}

// start starts a node.
func (m *meeting) start(args ...string) *meetingNode {
	n := &meetingNode{name: "NODE=n" + strconv.Itoa(len(m.nodes)), m: m}
	n.launched = m.b.start("dlrover-run", []string{n.name}, append(m.opts[:len(m.opts):len(m.opts)], args...)...)
	m.nodes = append(m.nodes, n)
	return n
}

// processes are those of the node with this word in their command line.
func (n *meetingNode) processes(word string) (pids []int) {
	for _, pid := range n.m.b.tagged() {
		env, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
		args, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if bytes.Contains(env, []byte(n.name+"\x00")) && bytes.Contains(args, []byte(word)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// kill kills them.
func (n *meetingNode) kill(word string) {
	n.m.b.t.Helper()
	pids := n.processes(word)
	require.NotEmpty(n.m.b.t, pids)
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// leads reports whether the newest election was of this node; elections is how many it knows of.
func (n *meetingNode) leads() bool {
	log := n.err.String()
	own := strings.LastIndex(log, `"msg":"elected"`)
	if own < 0 {
		return false
	}
	_, addr, _ := strings.Cut(log[own:], `"advertise":"`)
	addr, _, _ = strings.Cut(addr, `"`)
	last := log[strings.LastIndex(log, `"msg":"the node that serves`):]
	return addr != "" && strings.Contains(last, addr)
}

func (n *meetingNode) elections() int {
	return strings.Count(n.err.String(), `"msg":"the node that serves`)
}

// leader waits until one of them leads.
func (m *meeting) leader(nodes ...*meetingNode) (leader *meetingNode, others []*meetingNode) {
	m.b.t.Helper()
	eventually(m.b.t, "a node leads", func() bool {
		leader, others = nil, nil
		for _, n := range nodes {
			if n.elections() > 0 && n.leads() {
				leader = n
			} else {
				others = append(others, n)
			}
		}
		return leader != nil
	})
	return leader, others
}

// The dlrover-master that leads is killed three times. Another one serves, and no worker of the PyTorch job notices.
func TestElectedHelperIsKilled(t *testing.T) {
	t.Parallel()
	m := newMeeting(t, "--nnodes=2", "--nproc-per-node=2")
	m.b.env = append(m.b.env, "PYTHON_EXEC="+torchpython.Require(t, "HELPERS THAT MEET IN ETCD ARE"))
	script, err := filepath.Abs("testdata/allreduce.py")
	require.NoError(t, err)
	a, b := m.start(script, m.b.dir), m.start(script, m.b.dir)
	eventually(t, "training", m.b.exists("trained.4"))
	for i := range 3 {
		leader, _ := m.leader(a, b)
		leader.kill(member.Argument)
		eventually(t, "the next election", func() bool { return a.elections() >= i+2 && b.elections() >= i+2 })
		next, _ := m.leader(a, b)
		eventually(t, "the run is complete again", func() bool {
			return strings.Count(next.err.String(), "joined again")+strings.Count(leader.err.String(), "joined again") >= i+1
		})
		eventually(t, "another helper", func() bool { return len(leader.processes(member.Argument)) == 1 })
	}
	m.b.release()
	require.Equal(t, 0, a.wait())
	require.Equal(t, 0, b.wait())
	require.NoFileExists(t, filepath.Join(m.b.dir, "trained.4.again"), "no worker was restarted")
	require.Equal(t, 2, strings.Count(a.err.String()+b.err.String(), "workers started"))
}

// The node that leads is killed with all its processes. Another one serves, and the others restart because a member is
// gone. A new node makes the world grow.
func TestElectedNodeIsKilled(t *testing.T) {
	long(t)
	t.Parallel()
	m := newMeeting(t, "--nnodes=1:4", "--nproc-per-node=1")
	m.b.env = append(m.b.env, "PYTHON_EXEC="+torchpython.Require(t, "ELECTED NODES THAT ARE LOST ARE"))
	script, err := filepath.Abs("testdata/allreduce.py")
	require.NoError(t, err)
	a, b, c := m.start(script, m.b.dir), m.start(script, m.b.dir), m.start(script, m.b.dir)
	eventually(t, "training on three nodes", m.b.exists("trained.3"))
	leader, others := m.leader(a, b, c)
	leader.kill("")
	eventually(t, "training on two nodes", m.b.exists("trained.2"))
	d := m.start(script, m.b.dir)
	eventually(t, "training on three nodes again", m.b.exists("trained.3.again"))
	m.b.release()
	for _, n := range append(others, d) {
		require.Equal(t, 0, n.wait())
		require.Empty(t, n.processes(""))
	}
}

// The workers run on while etcd is away, and both helpers together serve on. A failure restarts both nodes as ever.
func TestEtcdIsAway(t *testing.T) {
	m := newMeeting(t, "--nnodes=2", "--nproc-per-node=1")
	args := m.b.sh(`echo $RANK >> $DIR/starts; : > $DIR/up.$RANK.$TORCHELASTIC_RESTART_COUNT; ` +
		`while [ ! -e $DIR/go.$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done; ` +
		`exit $((RANK*(1-TORCHELASTIC_RESTART_COUNT)))`)
	a, b := m.start(args...), m.start(args...)
	eventually(t, "up", func() bool { return m.b.exists("up.0.0")() && m.b.exists("up.1.0")() })
	leader, _ := m.leader(a, b)
	m.server.signal(syscall.SIGSTOP)
	eventually(t, "the loss is told", func() bool {
		text := leader.err.String()
		return strings.Contains(text, "this master goes on for as long as all others follow it") ||
			strings.Contains(text, `"msg":"deposed`) // a busy machine may be late with its word
	})
	require.Len(t, m.b.lines("starts"), 2)
	require.NoError(t, os.WriteFile(filepath.Join(m.b.dir, "go.0"), nil, 0o600))
	m.server.signal(syscall.SIGCONT)
	eventually(t, "the restart", func() bool { return m.b.exists("up.0.1")() && m.b.exists("up.1.1")() })
	require.NoError(t, os.WriteFile(filepath.Join(m.b.dir, "go.1"), nil, 0o600))
	require.Equal(t, 0, a.wait())
	require.Equal(t, 0, b.wait())
	require.Len(t, m.b.lines("starts"), 4)
}

// A launcher that is killed leaves no helper.
func TestHelperEndsWithItsLauncher(t *testing.T) {
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			m := newMeeting(t, "--nnodes=1", "--nproc-per-node=1")
			n := m.start(m.b.sh(hold)...)
			eventually(t, "up", m.b.exists("up.1.0"))
			require.Len(t, n.processes(member.Argument), 1)
			n.signal(sig)
			n.wait()
			eventually(t, "nothing is left", func() bool { return len(n.processes("")) == 0 })
		})
	}
}

// Nodes with the user's token do not put it into etcd, and a node without it is refused.
func TestOwnTokenStaysOutOfEtcd(t *testing.T) {
	m := newMeeting(t, "--nnodes=2", "--nproc-per-node=1")
	m.b.env = append(m.b.env, "DLROVER_TOKEN="+testToken)
	args := m.b.sh(`[ -z "$DLROVER_TOKEN" ]`)
	a := m.start(args...)
	m.leader(a)
	other := m.b.startPath("/usr/bin/env", nil,
		slices.Concat([]string{"-u", "DLROVER_TOKEN", filepath.Join(binDir, "dlrover-run")}, m.opts, args)...)
	require.NotZero(t, other.wait())
	require.Contains(t, other.err.String(), "token")
	b := m.start(args...)
	require.Equal(t, 0, a.wait())
	require.Equal(t, 0, b.wait())
	var data []byte
	eventually(t, "etcd has written its file", func() bool {
		data, _ = os.ReadFile(m.snapshot()) // there since the start
		return strings.Contains(string(data), "/dlrover/runs/job/leader")
	})
	require.NotContains(t, string(data), testToken)
}

// snapshot is the database of this etcd.
func (m *meeting) snapshot() string {
	for _, arg := range m.server.cmd.Args {
		if filepath.Base(arg) == "etcd" && strings.Contains(arg, m.b.t.Name()) {
			return filepath.Join(arg, "member", "snap", "db")
		}
	}
	return ""
}

// What makes a meeting impossible is said before any worker is started.
func TestMeetingThatCannotBe(t *testing.T) {
	b := newBench(t)
	nobody := "127.0.0.1:" + freePort(t)
	l := b.run(b.sh("exit 0", "--rdzv-backend=etcd", "--rdzv-endpoint="+nobody, "--rdzv-id=x",
		"--rdzv-conf=read_timeout=2")...)
	require.NotZero(t, l.wait())
	require.Contains(t, l.err.String(), "etcd at "+nobody+" has not answered for 2s")
	require.Contains(t, l.err.String(), "connection refused")

	alone := filepath.Join(t.TempDir(), "dlrover-run")
	program, err := os.ReadFile(filepath.Join(binDir, "dlrover-run"))
	require.NoError(t, err)
	require.NoError(t, writeProgram(alone, program))
	l = b.startPath(alone, []string{"PATH=/nowhere"},
		b.sh("exit 0", "--rdzv-backend=etcd", "--rdzv-endpoint="+nobody, "--rdzv-id=x")...)
	require.NotZero(t, l.wait())
	require.Contains(t, l.err.String(), "needs dlrover-master, which is neither in")
}

// torchrun's etcd backends meet in an API of etcd in which dlrover-run does not: the node that serves says so.
func TestMeetingBesideTorchrun(t *testing.T) {
	python := torchpython.Require(t, "AGENTS OF TORCHRUN IN ETCD ARE")
	if exec.Command(python, "-c", "import etcd").Run() != nil {
		t.Skip("AGENTS OF TORCHRUN IN ETCD ARE NOT TRIED: install Debian's python3-etcd, for " + python)
	}
	for backend, key := range map[string]string{
		"etcd": "/torchelastic/p2p/run_job", "etcd-v2": "/torch/elastic/rendezvous/job"} {
		t.Run(backend, func(t *testing.T) {
			m := newMeeting(t, "--nnodes=2")
			m.b.startPath(python, nil, "-m", "torch.distributed.run", "--rdzv_backend="+backend, "--rdzv_endpoint="+m.etcd,
				"--rdzv_id=job", "--nnodes=2", "--no_python", "true")
			eventually(t, "torchrun's keys in etcd", func() bool {
				answer, err := http.Get("http://" + m.etcd + "/v2/keys" + key)
				if err != nil {
					return false
				}
				return answer.Body.Close() == nil && answer.StatusCode == http.StatusOK
			})
			n := m.start(m.b.sh("exit 0")...)
			eventually(t, "the warning", func() bool { return strings.Contains(n.err.String(), `"key":"`+key) })
			require.Contains(t, n.err.String(), "start every node with dlrover-run, or use another --rdzv-id")
		})
	}
}

// Steps of which each node writes a part are committed after another node was elected, as they were before.
func TestCheckpointsFollowTheElected(t *testing.T) {
	long(t)
	t.Parallel()
	b := newTraining(t, 120)
	m := meetingOf(b.bench, "--nnodes=2", "--nproc-per-node=1")
	args := b.args(nil, 5, "sharded")
	x, y := m.start(args...), m.start(args...)
	eventually(t, "a committed step", func() bool { return b.latest() >= 10 })
	for i := range 2 {
		leader, _ := m.leader(x, y)
		leader.kill(member.Argument)
		eventually(t, "the next election", func() bool { return x.elections() >= i+2 && y.elections() >= i+2 })
		before := b.latest()
		eventually(t, "later steps", func() bool { return b.latest() >= min(before+15, 120) })
	}
	require.Equal(t, 0, x.wait(), x.err.String())
	require.Equal(t, 0, y.wait(), y.err.String())
	require.Equal(t, 120, b.latest())
	require.Len(t, b.starts(), 2, "no worker was restarted")
	b.requireMemoryIsGone()
}

// The launchers leave a frozen helper as soon as its lease has expired.
func TestElectedHelperIsFrozen(t *testing.T) {
	m := newMeeting(t, "--nnodes=2", "--nproc-per-node=1")
	args := m.b.sh(hold)
	a, b := m.start(args...), m.start(args...)
	eventually(t, "up", func() bool { return m.b.exists("up.2.0")() && m.b.exists("up.2.1")() })
	leader, others := m.leader(a, b)
	frozen := leader.processes(member.Argument)
	require.Len(t, frozen, 1)
	require.NoError(t, syscall.Kill(frozen[0], syscall.SIGSTOP))
	stopped := time.Now()
	eventually(t, "the other one serves", others[0].leads)
	eventually(t, "it came back there", func() bool { return strings.Contains(others[0].err.String(), "joined again") })
	require.Less(t, time.Since(stopped), 10*time.Second, "a client without news waits for a minute and a half")
	eventually(t, "the launcher beside it has another helper", func() bool {
		now := leader.processes(member.Argument)
		return len(now) == 1 && now[0] != frozen[0]
	})
	eventually(t, "it came back as well", func() bool { return strings.Contains(leader.err.String(), "joined again") })
	m.b.release()
	require.Equal(t, 0, a.wait())
	require.Equal(t, 0, b.wait())
	require.Len(t, m.b.lines("starts"), 2, "no worker was restarted")
}

// An etcd with TLS in both directions, and users with passwords.
func TestMeetingInGuardedEtcd(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	certify(t, file)
	if _, err := exec.LookPath("etcdctl"); err != nil {
		t.Skip("THERE IS NO etcdctl IN PATH: install Debian's etcd-client")
	}
	at := "127.0.0.1:" + freePort(t)
	client, peer := "https://"+at, "http://127.0.0.1:"+freePort(t)
	path, err := exec.LookPath("etcd")
	if err != nil {
		t.Skip("THERE IS NO etcd IN PATH: install Debian's etcd-server")
	}
	b.startPath(path, nil, "--data-dir", file("etcd"), "--log-level=error", "--unsafe-no-fsync",
		"--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
		"--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer, "--client-cert-auth",
		"--trusted-ca-file", file("ca.pem"), "--cert-file", file("cert.pem"), "--key-file", file("key.pem"))
	ctl := func(args ...string) error {
		cmd := exec.Command("etcdctl", append([]string{"--endpoints=" + at, "--cacert=" + file("ca.pem"),
			"--cert=" + file("cert.pem"), "--key=" + file("key.pem")}, args...)...)
		cmd.Env = append(os.Environ(), "ETCDCTL_API=3")
		return cmd.Run()
	}
	eventually(t, "etcd", func() bool { return ctl("user", "add", "root:secret-of-root") == nil })
	require.NoError(t, ctl("user", "grant-role", "root", "root"))
	require.NoError(t, ctl("user", "add", "job:secret-of-job"))
	require.NoError(t, ctl("role", "add", "jobs"))
	require.NoError(t, ctl("role", "grant-permission", "--prefix=true", "jobs", "readwrite", "/jobs/"))
	require.NoError(t, ctl("user", "grant-role", "job", "jobs"))
	require.NoError(t, ctl("auth", "enable"))
	require.NoError(t, os.WriteFile(file("password"), []byte("secret-of-job\n"), 0o600))
	require.NoError(t, os.WriteFile(file("wrong"), []byte("another"), 0o600))
	meet := func(conf ...string) *launched {
		return b.run(b.sh("exit 0", "--rdzv-backend=etcd", "--rdzv-endpoint="+at, "--rdzv-id=x",
			"--rdzv-conf=read_timeout=20,etcd_prefix=/jobs,"+strings.Join(conf, ","))...)
	}
	encrypted := []string{"protocol=https", "cacert=" + file("ca.pem"), "cert=" + file("cert.pem"),
		"key=" + file("key.pem")}
	for want, conf := range map[string][]string{
		"":                      append(encrypted, "user=job", "password_file="+file("password")),
		"authentication failed": append(encrypted, "user=job", "password_file="+file("wrong")),
		"permission denied": append(encrypted, "user=job", "password_file="+file("password"),
			"etcd_prefix=/other"),
		"certificate signed by unknown authority": {"protocol=https", "read_timeout=2"},
	} {
		l := meet(conf...)
		require.Equal(t, want == "", l.wait() == 0, l.err.String())
		require.Contains(t, l.err.String(), want)
		require.NotContains(t, l.err.String(), "secret-of-job")
	}
}

// certify makes the files of a certificate for 127.0.0.1, which is its own authority.
func certify(t *testing.T, file func(string) string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		Subject: pkix.Name{Organization: []string{"test"}}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	for name, block := range map[string]*pem.Block{
		"ca.pem": {Type: "CERTIFICATE", Bytes: cert}, "cert.pem": {Type: "CERTIFICATE", Bytes: cert},
		"key.pem": {Type: "PRIVATE KEY", Bytes: der},
	} {
		require.NoError(t, os.WriteFile(file(name), pem.EncodeToMemory(block), 0o600))
	}
}
