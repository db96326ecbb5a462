package kube_test

import (
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
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
	"dlrover-run/rendezvous/lead"
)

// masterAccount makes a service account with the rights to elect a master of master.yaml, and no others. Lease and
// account have the same name.
func (k real) masterAccount(t *testing.T) (cfg kube.Config, name string) {
	var role []string
	for doc := range strings.SplitSeq(manifest(t, "master.yaml"), "\n---\n") {
		if kind := kindOf(doc); kind == "Role" || kind == "RoleBinding" {
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

// masterPods are two masters, each in the surroundings of its own pod.
type masterPods struct {
	k       real
	t       *testing.T
	program string
	name    string // of the Lease; pods have a number behind
	account string // directory of the service account
	addrs   [2]string
	procs   [2]*process
}

// testMasters kills the master that leads and freezes its successor: each time the other one serves, and has the label.
func (k real) testMasters(t *testing.T) {
	m := &masterPods{k: k, t: t, program: filepath.Join(t.TempDir(), "dlrover-master"), account: t.TempDir()}
	out, err := exec.Command("go", "build", "-o", m.program, "../../../cmd/dlrover-master").CombinedOutput()
	require.NoError(t, err, "%s", out)
	cfg, name := k.masterAccount(t)
	m.name = name
	for file, from := range map[string]string{"token": cfg.TokenFile, "ca.crt": cfg.CAFile} {
		text, err := os.ReadFile(from)
		check(t, err)
		write(t, filepath.Join(m.account, file), string(text))
	}
	write(t, filepath.Join(m.account, "namespace"), "default")
	for i := range m.addrs {
		m.addrs[i] = "127.0.0.1:" + freePort(t)
		k.Pod(t, m.pod(i), cfg)
		m.start(i)
	}
	leader := 0
	if !eventually(func() bool { return m.serves(0) || m.serves(1) }) {
		t.Fatal(m.procs[0].tail(), m.procs[1].tail())
	}
	if m.serves(1) {
		leader = 1
	}
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		require.True(t, eventually(func() bool { return m.labelled(leader) && !m.labelled(1-leader) }))
		old := m.procs[leader]
		check(t, old.of.Signal(sig))
		began := time.Now()
		other := 1 - leader
		require.True(t, eventually(func() bool { return m.serves(other) }), m.procs[other].tail())
		t.Logf("the next master serves %s after %s", time.Since(began).Round(time.Millisecond), sig)
		require.True(t, eventually(func() bool { return m.labelled(other) && !m.labelled(leader) }), m.procs[other].tail())
		if sig == syscall.SIGKILL {
			<-old.ended
			m.start(leader)
		} else {
			check(t, old.of.Signal(syscall.SIGCONT))
			require.True(t, eventually(func() bool { return strings.Contains(old.tail(), `"msg":"deposed`) }))
			require.True(t, eventually(func() bool { return !m.serves(leader) }))
		}
		leader = other
	}
}

func (m *masterPods) pod(i int) string { return m.name + "-" + strconv.Itoa(i) }

func (m *masterPods) start(i int) {
	host, port, err := net.SplitHostPort(strings.TrimPrefix(m.k.root.Server, "https://"))
	check(m.t, err)
	m.procs[i] = spawn(m.t, m.t.TempDir(), "/usr/bin/env", "KUBERNETES_SERVICE_HOST="+host,
		"KUBERNETES_SERVICE_PORT="+port, kube.DirVariable+"="+m.account, "POD_NAME="+m.pod(i),
		"DLROVER_TOKEN=of-the-job-of-the-job", m.program,
		"--listen="+m.addrs[i], "--ha=lease", "--lease-name="+m.name, "--node-action=none")
}

func (m *masterPods) serves(i int) bool {
	c, err := net.Dial("tcp", m.addrs[i])
	if err == nil {
		err = c.Close()
	}
	return err == nil
}

func (m *masterPods) labelled(i int) bool {
	var pod struct {
		Metadata struct{ Labels map[string]string }
	}
	newAdmin(m.t, m.k.root).want("GET", "/api/v1/namespaces/default/pods/"+m.pod(i), "", nil, &pod)
	return pod.Metadata.Labels[lease.Label] == "true"
}
