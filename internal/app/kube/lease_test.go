package kube_test

import (
	"log/slog"
	"net"
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
	"k8s.io/client-go/rest"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/leadtest"
	"dlrover-run/internal/app/lease"
	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous/lead"
)

// masterAccount makes a service account with the rights to elect a master of master.yaml, and no others. Lease and
// account have the same name.
func (k real) masterAccount(t *testing.T) (cfg kube.Config, name string) {
	var role []string
	for doc := range strings.SplitSeq(manifest(t, "master.yaml"), "\n---\n") {
		if kind := headOf(t, doc).Kind; kind == "Role" || kind == "RoleBinding" {
			role = append(role, doc)
		}
	}
	require.Len(t, role, 2)
	cfg = k.Bound(t, strings.Join(role, "\n---\n"), "patch pods")
	return cfg, filepath.Base(cfg.TokenFile)
}

func (k real) testLease(t *testing.T) {
	leadtest.Run(t, func(t *testing.T) leadtest.Suite {
		account, name := k.masterAccount(t)
		api := &rest.Config{Host: account.Server, BearerTokenFile: account.TokenFile}
		api.CAFile = account.CAFile
		cfg := lease.Config{Name: name, Namespace: "default", API: api, Log: slog.New(slog.DiscardHandler)}
		return leadtest.Suite{Deposes: true, Open: func(t *testing.T) lead.Store {
			s, err := lease.Open(cfg)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, s.Close()) })
			return s
		}}
	})
}

// losses of each kind are timed.
const losses = 10

// masterPods are two masters, each in the surroundings of its own pod.
type masterPods struct {
	k       real
	t       *testing.T
	program string
	name    string // of the Lease; pods have a number behind
	account string // directory of the service account
	silent  bool   // their hosts answer nothing to each other
	addrs   [2]string
	procs   [2]*process
	leader  int
}

// testMasters loses the master that leads again and again: each time the other one serves, and has the label.
func (k real) testMasters(t *testing.T) {
	program := filepath.Join(t.TempDir(), "dlrover-master")
	out, err := exec.Command("go", "build", "-o", program, "../../../cmd/dlrover-master").CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, c := range []struct {
		how    string
		sig    syscall.Signal
		silent bool
	}{{"killed", syscall.SIGKILL, false}, {"frozen", syscall.SIGSTOP, false}, {"silent", syscall.SIGSTOP, true}} {
		t.Run(c.how, func(t *testing.T) {
			m := &masterPods{k: k, t: t, program: program, account: t.TempDir(), silent: c.silent}
			m.open()
			var after []time.Duration
			for range losses {
				after = append(after, m.lose(c.sig).Round(time.Millisecond))
			}
			t.Logf("%s: %v", c.how, after) // which make bench reads
			slices.Sort(after)
			t.Logf("%s: the next master serves after %s (median of %d, %s to %s)", c.how, after[losses/2], losses,
				after[0], after[losses-1])
		})
	}
}

// open starts both, and waits until one serves.
func (m *masterPods) open() {
	cfg, name := m.k.masterAccount(m.t)
	m.name = name
	for file, from := range map[string]string{"token": cfg.TokenFile, "ca.crt": cfg.CAFile} {
		text, err := os.ReadFile(from)
		check(m.t, err)
		write(m.t, filepath.Join(m.account, file), string(text))
	}
	write(m.t, filepath.Join(m.account, "namespace"), "default")
	for i := range m.addrs {
		m.addrs[i] = "127.0.0.1:" + freePort(m.t)
		m.k.Pod(m.t, m.pod(i), cfg)
		m.start(i)
	}
	if !eventually(func() bool { return m.serves(0) || m.serves(1) }) {
		m.t.Fatal(m.procs[0].tail(), m.procs[1].tail())
	}
	if m.serves(1) {
		m.leader = 1
	}
}

// lose sends a signal to the master that serves, and returns when the other one does.
func (m *masterPods) lose(sig syscall.Signal) (after time.Duration) {
	leader, other := m.leader, 1-m.leader
	require.True(m.t, eventually(func() bool { return m.labelled(leader) && !m.labelled(other) }))
	require.True(m.t, m.silent || eventually(func() bool { return m.follows(other) }), m.procs[other].tail())
	old := m.procs[leader]
	check(m.t, old.of.Signal(sig))
	began := time.Now()
	require.True(m.t, eventually(func() bool { return m.serves(other) }), m.procs[other].tail())
	after = time.Since(began)
	require.True(m.t, eventually(func() bool { return m.labelled(other) && !m.labelled(leader) }), m.procs[other].tail())
	if sig != syscall.SIGKILL {
		check(m.t, old.of.Signal(syscall.SIGCONT))
		require.True(m.t, eventually(func() bool { return strings.Contains(old.tail(), `"msg":"deposed`) }))
		require.True(m.t, eventually(func() bool { return !m.serves(leader) }))
		check(m.t, old.of.Kill())
	}
	<-old.ended
	m.start(leader) // a new one: no process deposes two leaders in ten seconds
	m.leader = other
	return after
}

func (m *masterPods) pod(i int) string { return m.name + "-" + strconv.Itoa(i) }

func (m *masterPods) start(i int) {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(m.k.root.Server, "https://"))
	check(m.t, err)
	advertise := m.addrs[i]
	if m.silent {
		var end func()
		advertise, end, err = testkit.Deaf()
		check(m.t, err)
		m.t.Cleanup(end)
	}
	m.procs[i] = spawn(m.t, m.t.TempDir(), "/usr/bin/env", "KUBERNETES_SERVICE_HOST="+host,
		"KUBERNETES_SERVICE_PORT="+port, kube.DirVariable+"="+m.account, "POD_NAME="+m.pod(i),
		"DLROVER_TOKEN=of-the-job-of-the-job", m.program,
		"--listen="+m.addrs[i], "--ha=lease", "--lease-name="+m.name, "--node-action=none", "--advertise="+advertise)
}

func (m *masterPods) serves(i int) bool {
	c, err := net.Dial("tcp", m.addrs[i])
	if err == nil {
		err = c.Close()
	}
	return err == nil
}

// follows: it is connected to the one that serves, since it served itself.
func (m *masterPods) follows(i int) bool {
	log := m.procs[i].tail()
	return strings.LastIndex(log, `"msg":"following`) > strings.LastIndex(log, `"msg":"deposed`)
}

func (m *masterPods) labelled(i int) bool {
	var pod struct {
		Metadata struct{ Labels map[string]string }
	}
	newAdmin(m.t, m.k.root).want("GET", "/api/v1/namespaces/default/pods/"+m.pod(i), "", nil, &pod)
	return pod.Metadata.Labels[lease.Label] == "true"
}
