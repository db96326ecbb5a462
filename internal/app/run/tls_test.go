package run

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/secure"
	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/torchpython"
)

// mutual makes all programs of a test have one certificate, for a name that none of them is dialed by.
func mutual(t *testing.T) (ca *testkit.Authority, dir string) {
	ca, dir = testkit.NewAuthority(t, "training"), t.TempDir()
	cert, key := ca.Issue(dir, nil, "job.example")
	t.Setenv("DLROVER_TLS_CERT", cert)
	t.Setenv("DLROVER_TLS_KEY", key)
	t.Setenv("DLROVER_TLS_CA", ca.CA)
	return ca, dir
}

// A job of PyTorch under a master that requires certificates. Clients without one, or with a strange one, are told so,
// and a certificate that is renewed is shown without a restart.
func TestMutualTLS(t *testing.T) {
	ca, dir := mutual(t)
	b := newBench(t)
	b.env = append(b.env, "DLROVER_TOKEN="+testToken, "PYTHON_EXEC="+torchpython.Require(t, "LAUNCHERS WITH TLS ARE"))
	_, addr := b.startDaemon("127.0.0.1:0")
	b.env = append(b.env, "DLROVER_MASTER_ADDR="+addr)
	script, err := filepath.Abs("testdata/allreduce.py")
	require.NoError(t, err)
	node := func() *launched {
		return b.start("dlrover-run", nil, "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job", script, b.dir)
	}
	l1, l2 := node(), node()
	eventually(t, "training", b.exists("trained.2"))
	ctl := func(want string, env ...string) {
		t.Helper()
		l := b.start("dlroverctl", env, "runs")
		l.wait()
		require.Contains(t, l.out.String()+l.err.String(), want)
	}
	none := []string{"DLROVER_TLS_CERT=", "DLROVER_TLS_KEY="}
	ctl("running")
	ctl("is for job.example, not for 127.0.0.1: issue one", none...)
	ctl("this server speaks TLS, and the client does not", "DLROVER_TLS=off")
	ctl("has another key than the one of this job token", append(none, "DLROVER_TLS_CA=", "DLROVER_TLS=auto")...)
	other := testkit.NewAuthority(t, "another")
	ctl("(CN=job.example) is not signed by an authority in --tls-ca="+other.CA, "DLROVER_TLS_CA="+other.CA)
	cert, key := other.Issue(t.TempDir(), nil, "job.example")
	ctl("the client's certificate (CN=job.example) is not signed by", "DLROVER_TLS_CERT="+cert, "DLROVER_TLS_KEY="+key)

	before := certificateOf(t, addr)
	ca.Issue(dir, nil, "job.example")
	eventually(t, "the new certificate", func() bool { return !before.Equal(certificateOf(t, addr)) })
	ctl("running")
	b.release()
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l2.wait(), l2.err.String())
}

// certificateOf is the certificate of a server.
func certificateOf(t *testing.T, addr string) *x509.Certificate {
	t.Helper()
	c, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
	require.NoError(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c.ConnectionState().PeerCertificates[0]
}

// The plan has the mode and the paths of TLS, where connections speak it, and neither token nor key.
func TestPlanOfTLS(t *testing.T) {
	ca := testkit.NewAuthority(t, "training")
	cert, key := ca.Issue(t.TempDir(), nil, "job.example")
	files := "--tls-cert=" + cert + " --tls-key=" + key + " --tls-ca=" + ca.CA
	const token = "0123456789abcdef0123456789abcdef"
	for line, want := range map[string]*secure.Choice{
		"--nnodes=2 --master-addr=localhost":            nil,
		"--nnodes=2 --master-addr=localhost --tls=off":  nil,
		"--nnodes=2 --master-addr=localhost --tls=auto": {Auto: true},
		"--nnodes=2 --master-addr=localhost " + files:   {Cert: cert, Key: key, CA: ca.CA},
		"--standalone --tls-ca=" + ca.CA:                nil,
	} {
		s, err := resolved(t, "--dry-run "+line+" train.py", map[string]string{"DLROVER_TOKEN": token})
		require.NoError(t, err)
		var out bytes.Buffer
		require.Zero(t, printPlan(&out, &s, testHost()))
		var p struct{ Rendezvous struct{ TLS *secure.Choice } }
		require.NoError(t, json.Unmarshal(out.Bytes(), &p))
		require.Equal(t, want, p.Rendezvous.TLS, line)
		require.NotContains(t, out.String(), token)
		require.NotContains(t, out.String(), "PRIVATE")
	}
}

// underTLS plays tests with TLS, each in a process of its own, whose environment it is.
func underTLS(t *testing.T, prepare func(*testing.T), tests map[string]string) {
	t.Helper()
	ca := testkit.NewAuthority(t, "training")
	cert, key := ca.Issue(t.TempDir(), nil, "job.example")
	for mode, env := range map[string][]string{
		"auto":         {"DLROVER_TLS=auto"},
		"certificates": {"DLROVER_TLS_CERT=" + cert, "DLROVER_TLS_KEY=" + key, "DLROVER_TLS_CA=" + ca.CA},
	} {
		for name, test := range tests {
			t.Run(mode+": "+name, func(t *testing.T) {
				prepare(t)
				out, err := apart(t, test, env...)
				require.NoError(t, err, string(out))
			})
		}
	}
}

// What holds without TLS holds with it: successors of a launcher that serves, elections in etcd, a leader that is
// frozen, copies of checkpoints, and checks of nodes.
func TestUnderTLS(t *testing.T) {
	besideOthers(t)
	underTLS(t, besideOthers, map[string]string{
		"a launcher that serves is killed": "TestSurvivorOfTwoServes",
		"an elected master is killed":      "TestKilledMasterIsReplaced",
		"an elected master is frozen":      "TestFrozenMasterIsReplaced",
		"an elected helper is killed":      "TestElectedHelperIsKilled",
		"a checkpoint comes from a copy":   "TestTorchCheckpointNodeReplaced",
		"a checked node is killed":         "TestNodeIsKilledInTheCheck",
	})
}

// It measures rates.
func TestChecksUnderTLS(t *testing.T) {
	underTLS(t, long, map[string]string{"checked nodes": "TestChecksOfSoundNodes"})
}
