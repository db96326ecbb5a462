package run

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// record is a command for --before or --after that keeps its environment.
const record = `echo "$DLROVER_HOOK $DLROVER_ROUND.$DLROVER_EPOCH $DLROVER_NODE_RANK/$DLROVER_NODES ` +
	`$DLROVER_RESTART_COUNT/$DLROVER_MAX_RESTARTS $DLROVER_CAUSE:$DLROVER_ENDED:$DLROVER_EXIT_CODE" >> $DIR/hooks.$NAME`

// hooked starts a launcher with both commands.
func (b *bench) hooked(name, before, after, script string, opts ...string) *launched {
	b.t.Helper()
	opts = append(opts, "--before="+before, "--after="+after, "--exit-code-policy=reason")
	return b.start("dlrover-run", []string{"NAME=" + name, "POD_NAME=" + name}, b.sh(script, opts...)...)
}

// hooksOf lists the lines of record that a node has left.
func (b *bench) hooksOf(name string) []string {
	text, _ := os.ReadFile(filepath.Join(b.dir, "hooks."+name))
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

func TestHooksOptions(t *testing.T) {
	_, err := resolved(t, "--before=true --hook-timeout=0.5 train.py", nil)
	require.ErrorContains(t, err, "--hook-timeout=0.5s is out of range: want 1s to 24h")
	_, err = resolved(t, "--hook-timeout=1m train.py", nil)
	require.ErrorContains(t, err, "--hook-timeout has no effect without --before and --after")
	s, err := resolved(t, "--before=true train.py", map[string]string{"PET_AFTER": "false", "PET_HOOK_TIMEOUT": "2m"})
	require.NoError(t, err)
	p, err := makePlan(&s, testHost())
	require.NoError(t, err)
	plan, err := json.Marshal(p.Features["hooks"])
	require.NoError(t, err)
	require.JSONEq(t, `{"before":"true","after":"false","timeout":"2m"}`, string(plan))
	s, err = resolved(t, "--before= train.py", map[string]string{"PET_BEFORE": "false"})
	require.NoError(t, err)
	p, err = makePlan(&s, testHost())
	require.NoError(t, err)
	require.NotContains(t, p.Features, "hooks")
}

func TestHooksAroundARestart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	l := b.hooked("n", "echo mounted; "+record+"; : > $DIR/ready", "echo cleaned >&2; "+record+"; exit 9",
		`[ -e $DIR/ready ] || exit 4; rm $DIR/ready; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 7`,
		"--standalone", "--max-restarts=1")
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Equal(t, []string{"before 1.0 0/1 0/1 start::", "after 1.0 0/1 0/1 start:failure:7",
		"before 1.1 0/1 1/1 worker-failure::", "after 1.1 0/1 1/1 worker-failure:success:0"}, b.hooksOf("n"))
	log := l.err.String()
	for _, line := range []string{"before: mounted", "after: cleaned", "the command of --before has passed",
		"the command of --after failed"} {
		require.Equal(t, 2, strings.Count(log, line), log)
	}
}

// A process of another session lives as long as the workers, one of the command's group as long as the command.
func TestABeforeThatLeavesProcesses(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	l := b.hooked("n", `sleep 600 & echo $! > $DIR/child
setsid sh -c 'echo $$ > $DIR/own; exec sleep 600' >$DIR/log 2>&1 &
while [ ! -s $DIR/own ]; do sleep 0.02; done`, `kill -0 $(cat $DIR/own) || : > $DIR/gone`,
		`kill -0 $(cat $DIR/own) || exit 3; kill -0 $(cat $DIR/child) && exit 4; exit 0`, "--standalone")
	require.Equal(t, 0, l.wait(), l.err.String())
	require.FileExists(t, filepath.Join(b.dir, "gone"))
}

func TestABeforeThatFails(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	l := b.hooked("n", `echo x >> $DIR/tries; echo "no such mount" >&2; exit 3`, record, ": > $DIR/started",
		"--standalone", "--max-restarts=2")
	require.Equal(t, 10, l.wait(), l.err.String())
	require.Contains(t, l.err.String(), `the command of --before failed, last output "no such mount"`)
	require.Contains(t, l.err.String(), "role before")
	require.Len(t, b.lines("tries"), 3)
	require.NoFileExists(t, filepath.Join(b.dir, "started"))
	require.NoFileExists(t, filepath.Join(b.dir, "hooks.n"))
}

func TestABeforeThatHangs(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	l := b.hooked("n", `[ -e $DIR/again ] && exit 0; : > $DIR/again; trap '' TERM; sleep 600 & sleep 600`, "", ":",
		"--standalone", "--max-restarts=1", "--hook-timeout=1s")
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Contains(t, l.err.String(), "did not end within 1s (--hook-timeout), and was killed")
	b.noneLeft()
}

// A signal stops the command with its children; one that has passed by then has its --after.
func TestASignalDuringBefore(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ trap, hooks string }{
		"killed": {"trap '' TERM", ""},
		"passes": {"trap 'exit 0' TERM", "after 1.0 0/1 0/0 start:stopped:"},
	} {
		b := newBench(t)
		l := b.hooked("n", c.trap+`; sleep 600 & : > $DIR/up; while :; do sleep 0.05; done`, record, ": > $DIR/started",
			"--standalone", "--shutdown-timeout=60")
		eventually(t, "before", b.exists("up"))
		began := time.Now()
		l.signal(syscall.SIGTERM)
		require.Equal(t, 128+15, l.wait(), name)
		require.Less(t, time.Since(began), 30*time.Second)
		require.Equal(t, []string{c.hooks}, b.hooksOf("n"), name)
		require.NoFileExists(t, filepath.Join(b.dir, "started"))
		b.noneLeft()
	}
}

func TestAfterASignal(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	l := b.hooked("n", "", record+"; : > $DIR/after; sleep 600", hold, "--standalone", "--shutdown-timeout=2")
	eventually(t, "up", b.exists("up.1.0"))
	l.signal(syscall.SIGTERM)
	eventually(t, "after", b.exists("after"))
	require.Equal(t, 128+15, l.wait())
	require.Equal(t, []string{"after 1.0 0/1 0/0 start:stopped:"}, b.hooksOf("n"))
	require.Contains(t, l.err.String(), "the command of --after was stopped")
}

// Both nodes run their commands. A third one joins later: the reason is in the environment.
func TestHooksOfSeveralNodes(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	opts := b.c10d("2:3", "--rdzv-conf=last_call_timeout=0.2,growth_delay=0.1", "--max-restarts=1", "--nproc-per-node=1")
	script := `trap 'exit 1' TERM; ` + hold
	nodes := []*launched{b.hooked("a", record, record, script, opts...), b.hooked("b", record, record, script, opts...)}
	eventually(t, "two nodes", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	nodes = append(nodes, b.hooked("c", record, record, script, opts...))
	for rank := range 3 {
		eventually(t, "three nodes", b.exists(fmt.Sprintf("up.3.%d", rank)))
	}
	b.release()
	for _, l := range nodes {
		require.Equal(t, 0, l.wait(), l.err.String())
	}
	ranks := map[string]bool{}
	for _, name := range []string{"a", "b"} {
		got := b.hooksOf(name)
		require.Len(t, got, 4)
		rank := strings.Fields(got[0])[2]
		ranks[rank] = true
		require.Equal(t, []string{fmt.Sprintf("before 1.0 %s 0/1 start::", rank),
			fmt.Sprintf("after 1.0 %s 0/1 start:stopped:", rank)}, got[:2])
		require.Regexp(t, `^before 2\.0 [012]/3 0/1 growth::$`, got[2])
		require.Regexp(t, `^after 2\.0 [012]/3 0/1 growth:success:0$`, got[3])
	}
	require.Equal(t, map[string]bool{"0/2": true, "1/2": true}, ranks)
	require.Len(t, b.hooksOf("c"), 2)
}

// An order of dlroverctl reaches a node whose command runs, and its heartbeats go on.
func TestAnOrderDuringBefore(t *testing.T) {
	t.Parallel()
	r := rule(t, "1")
	l := r.start("dlrover-run", append([]string{"POD_NAME=n0", "NAME=n0"}, r.env...), r.sh(ruledWorker, "--nnodes=1",
		"--rdzv-id=job", "--exit-code-policy=reason",
		`--before=[ $DLROVER_CAUSE != start ] || { : > $DIR/up; sleep 600; }; `+record)...)
	r.nodes = append(r.nodes, l)
	eventually(t, "before", r.exists("up"))
	r.ctl(0, "restart", "job")
	r.started("n0:0/1", 1)
	r.release()
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Contains(t, l.err.String(), "the command of --before was stopped")
	require.Contains(t, r.text("hooks.n0"), " operator::")
}
