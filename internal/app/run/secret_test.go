package run

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/plainhttp"
)

// secret writes a token file as an editor does that replaces it, some time ago.
func (b *bench) secret(name string, tokens ...string) string {
	b.t.Helper()
	path := filepath.Join(b.dir, name)
	require.NoError(b.t, os.WriteFile(path+".new", []byte(strings.Join(tokens, "\n")+"\n"), 0o600))
	past := time.Now().Add(-time.Minute)
	require.NoError(b.t, os.Chtimes(path+".new", past, past))
	require.NoError(b.t, os.Rename(path+".new", path))
	return path
}

// The three steps of docs/tasks/job-token.md, at a job that runs. Programs that lag behind by a step go on.
func TestTheTokenOfAJobChanges(t *testing.T) {
	t.Parallel()
	for mode, refusal := range map[string]string{
		"off":  "the job token was not accepted",
		"auto": "has another key than the one of this job token", // which is derived from it
	} {
		t.Run("--tls="+mode, func(t *testing.T) {
			t.Parallel()
			changeToken(t, mode, refusal)
		})
	}
}

func changeToken(t *testing.T, tls, refusal string) {
	const old, young = "old-0123456789abcdef0123456789", "young-0123456789abcdef0123456789"
	b := newBench(t)
	b.env = append(b.env, "DLROVER_TLS="+tls)
	master := b.start("dlrover-master", nil, "--listen=127.0.0.1:0", "--token-file="+b.secret("master.token", old))
	addr := b.served(master)
	env := []string{"DLROVER_MASTER_ADDR=" + addr}
	args := func(file string) []string {
		return b.sh(hold, "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job", "--token-file="+b.secret(file, old))
	}
	l1, l2 := b.start("dlrover-run", env, args("n1.token")...), b.start("dlrover-run", env, args("n2.token")...)
	eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	ctl := func(token string, args ...string) (int, string) {
		c := b.start("dlroverctl", []string{"DLROVER_TOKEN=" + token, "DLROVER_MASTER_ADDR=" + addr}, args...)
		return c.wait(), c.out.String() + c.err.String()
	}
	changes := 0
	step := func(working string, tokens ...string) { // the master is ahead of the launchers
		changes++
		for i, l := range []*launched{master, l1, l2} {
			b.secret([]string{"master.token", "n1.token", "n2.token"}[i], tokens...)
			eventually(t, "read again", func() bool {
				ctl(working, "restart", "job") // requests read the file, and restarts cause requests
				return strings.Count(l.err.String(), "the token file was read again") >= changes
			})
		}
	}
	code, said := ctl(young, "runs")
	require.NotEqual(t, 0, code, said)
	step(old, old, young)
	step(young, young, old)
	code, said = ctl(old, "runs")
	require.Equal(t, 0, code, said)
	step(young, young)
	code, said = ctl(old, "runs")
	require.NotEqual(t, 0, code)
	require.Contains(t, said, refusal)
	starts := len(b.lines("starts"))
	eventually(t, "an order", func() bool { // refused while the last one is carried out
		code, _ = ctl(young, "restart", "job")
		return code == 0
	})
	eventually(t, "restarted", func() bool { return len(b.lines("starts")) >= starts+2 })
	b.release()
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
	require.Empty(t, b.events("node-loss"))
	for _, l := range []*launched{master, l1, l2} {
		require.NotContains(t, l.err.String(), old)
		require.NotContains(t, l.err.String(), young)
	}
}

// A launcher or user whose first token is not known yet to the server is served with the second one. With neither, a
// launcher ends.
func TestTheSecondTokenOfAFile(t *testing.T) {
	t.Parallel()
	const old, young = "old-0123456789abcdef", "young-0123456789abcdef"
	b := newBench(t)
	addr := b.served(b.start("dlrover-master", nil, "--listen=127.0.0.1:0", "--token-file="+b.secret("master.token", old)))
	env := []string{"DLROVER_MASTER_ADDR=" + addr}
	launch := func(name string, tokens ...string) *launched {
		return b.start("dlrover-run", env, b.sh("exit 0", "--nnodes=1", "--nproc-per-node=1", "--rdzv-id="+name,
			"--token-file="+b.secret(name, tokens...))...)
	}
	require.Equal(t, 0, launch("both", young, old).wait())
	ctl := b.start("dlroverctl", env, "runs", "--token-file="+b.secret("people", young, old))
	require.Equal(t, 0, ctl.wait(), ctl.err.String())
	refused := launch("one", young)
	require.NotEqual(t, 0, refused.wait())
	require.Contains(t, refused.err.String(), "use the same token on every node")
}

// TestNothingShowsTheToken drives the programs through what they can be asked, and looks for the token in all that they
// write: output, logs, files, answers, and /proc.
func TestNothingShowsTheToken(t *testing.T) {
	t.Parallel()
	const marked = "marked-5ecret-0123456789"
	b := newBench(t)
	said := map[string]string{}
	say := func(name string, l *launched) { said[name] = l.out.String() + l.err.String() }
	loud := []string{"DLROVER_TOKEN=" + marked, "LOGLEVEL=DEBUG"}
	master, addr := b.startDaemon("127.0.0.1:0", loud...)
	at := append(loud, "DLROVER_MASTER_ADDR="+addr)
	metrics := "127.0.0.1:" + freePort(t)
	script := `env; cat /proc/$$/cmdline; ulimit -c; exec 2>&1; cat /proc/$PPID/cmdline; ` +
		`[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; ` + hold
	args := b.sh(script, "--nnodes=1", "--nproc-per-node=1", "--rdzv-id=job", "--max-restarts=1", "--allow-exec",
		"--log-dir="+filepath.Join(b.dir, "logs"), "--event-log="+filepath.Join(b.dir, "events.node"),
		"--metrics-addr="+metrics)
	plan := b.start("dlrover-run", at, append([]string{"--dry-run"}, args...)...)
	require.Equal(t, 0, plan.wait())
	say("--dry-run", plan)
	l := b.start("dlrover-run", at, args...)
	eventually(t, "up", b.exists("up.1.0"))
	for name, text := range b.shown() {
		said[name] = text
	}
	for _, at := range []string{metrics, addr} {
		said["metrics "+at] = scrape(t, at, marked)
	}
	require.Contains(t, said["metrics "+addr], "dlrover_rendezvous_events_total")
	require.Contains(t, scrape(t, addr, ""), "the job token was not accepted")
	for _, command := range [][]string{{"runs", "--json"}, {"status", "job", "--json"}, {"status", "job"},
		{"nodes", "job", "--json"}, {"events", "job", "--json"}, {"verdict", "job", "--json"}, {"hang", "job", "--json"},
		{"check", "job", "--json"}, {"stacks", "job"}, {"bundle", "job"}, {"log-level", "job", "DEBUG"},
		{"logs", "job", "--json"}, {"exec", "job", "0", "--", "env"}, {"status", "nosuch"}, {"drain", "job", "nosuch"}} {
		c := b.start("dlroverctl", at, command...)
		if command[0] == "logs" { // which follows
			eventually(t, "logs", func() bool { return c.out.String() != "" })
			c.signal(syscall.SIGINT)
		}
		c.wait()
		say("dlroverctl "+strings.Join(command, " "), c)
	}
	wrong := b.start("dlroverctl", append(at, "DLROVER_TOKEN="+marked+"x"), "runs")
	require.NotEqual(t, 0, wrong.wait())
	say("a wrong token", wrong)
	bad := b.start("dlrover-run", append(at, "DLROVER_TOKEN="+marked+" x"), args...)
	require.Equal(t, 2, bad.wait())
	say("no token", bad)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "bad"), []byte(marked+" x\n"), 0o600))
	for _, program := range []string{"dlrover-run", "dlrover-master", "checkpointd"} {
		bad := b.start(program, nil, "--token-file="+filepath.Join(b.dir, "bad"), "--job=x")
		require.NotEqual(t, 0, bad.wait())
		say(program+" with a bad file", bad)
	}
	require.NoError(t, os.Remove(filepath.Join(b.dir, "bad")))
	b.release()
	require.Equal(t, 0, l.wait())
	say("dlrover-run", l)
	say("dlrover-master", master)
	b.findSecret(marked, said)
}

// A daemon that dies of a signal leaves its memory, and the token in it, nowhere.
func TestNoCoreDump(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGSEGV, syscall.SIGABRT, syscall.SIGQUIT, syscall.SIGTRAP} {
		b := newBench(t)
		d := b.startPath("/bin/sh", []string{"DLROVER_TOKEN=" + testToken}, "-c", `ulimit -c unlimited; exec "$@"`, "sh",
			filepath.Join(binDir, "dlrover-master"), "--listen=127.0.0.1:0")
		b.served(d)
		d.signal(sig)
		require.Equal(t, 2, d.wait(), sig)
		require.False(t, d.cmd.ProcessState.Sys().(syscall.WaitStatus).CoreDump())
		require.NotContains(t, d.err.String(), testToken)
	}
}

// scrape is what a Prometheus with the token sees.
func scrape(t *testing.T, addr, token string) string {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/metrics", nil)
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := plainhttp.New(nil).Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(text)
}

// shown is what /proc shows of the processes that the bench has started.
func (b *bench) shown() map[string]string {
	all := map[string]string{}
	for _, pid := range b.tagged() {
		for _, name := range []string{"cmdline", "environ"} {
			path := filepath.Join("/proc", strconv.Itoa(pid), name)
			text, _ := os.ReadFile(path)
			all[path+" "+strconv.Itoa(len(text))] = string(text)
		}
	}
	return all
}

// findSecret fails for every text, and every file of the bench, with the token.
func (b *bench) findSecret(token string, said map[string]string) {
	b.t.Helper()
	require.NoError(b.t, filepath.WalkDir(b.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			said[path] = contents(path)
		}
		return err
	}))
	require.Greater(b.t, len(said), 30)
	require.True(b.t, slices.ContainsFunc(slices.Collect(maps.Keys(said)), func(name string) bool {
		return strings.HasSuffix(name, ".tar.gz") && strings.Contains(said[name], "status")
	}), "a bundle")
	encoded := base64.RawStdEncoding.EncodeToString([]byte(token))
	for name, text := range said {
		if strings.Contains(text, token) || strings.Contains(text, encoded[:16]) {
			b.t.Errorf("%s holds the token", name)
		}
	}
}

// contents are those of a file, or of an archive.
func contents(path string) string {
	text, _ := os.ReadFile(path)
	packed, err := gzip.NewReader(bytes.NewReader(text))
	if err != nil {
		return string(text)
	}
	text, _ = io.ReadAll(packed)
	return string(text)
}
