package launcher

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
)

// TestAShellReadsTheEnvironment compares what a shell makes of the file with what was meant.
func TestAShellReadsTheEnvironment(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "it's a dir")
	require.NoError(t, os.Mkdir(dir, 0o755))
	nasty := "a'b\"c $HOME `id` \\ !x\n# y; touch hacked\t€ "
	text := shellEnv(proc.Spec{
		Args: []string{"python", "a\ntouch hacked\n'b"}, Dir: dir,
		Env: []string{"A=1", "NASTY=" + nasty, "A=2", "EMPTY=", "BASH_FUNC_x%%=() { :; }", "0X=1", "PWD=/nowhere",
			"noequals"},
	})
	file := filepath.Join(t.TempDir(), "env.sh")
	require.NoError(t, openfile.Replace(file, []byte(text), 0o600))
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())

	cmd := exec.Command("/bin/sh", "-ec", `. "$0"; printf '%s|%s|%s|%s' "$A" "$NASTY" "$EMPTY" "$(pwd)"`, file)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, "2|"+nasty+"||"+dir, string(out))
	_, err = os.Stat(filepath.Join(dir, "hacked"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NotContains(t, text, "PWD=")
}

// holdRun makes the rendezvous of a rig hold the run.
func (s *fakeRdzv) holdRun(hold bool, c *job.Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.d.Hold, s.d.Command = hold, c
	select {
	case <-s.dirs: // the first directive, which nobody has read
		s.dirs <- s.d
	default:
	}
}

func TestAHeldNodeStartsNoWorkers(t *testing.T) {
	r := newRig(t, "echo worker >> $DIR/ran", 0)
	r.cfg.Meanwhile = []string{"/bin/sh", "-c", `cp $DLROVER_ENV_DIR/*.sh .; echo $DLROVER_ENV_DIR > dir; exec sleep 60`}
	r.cfg.Dir = r.dir
	r.cfg.Resolve = func(c job.Command) (Program, error) {
		return Program{Path: "/bin/sh", Args: append([]string{"sh", "-c"}, c.Program...)}, nil
	}
	r.fakeRdzv.holdRun(true, nil)
	done := make(chan Result, 1)
	go func() { done <- r.run(t) }()
	var dir string
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(filepath.Join(r.dir, "dir"))
		dir = strings.TrimSpace(string(text))
		return err == nil && dir != ""
	}, 10*time.Second, 5*time.Millisecond)
	env, err := os.ReadFile(filepath.Join(r.dir, "rank1.env.sh"))
	require.NoError(t, err)
	require.Contains(t, string(env), "export RANK='1'\n")
	require.Contains(t, string(env), "export MASTER_PORT='4242'\n")

	r.fakeRdzv.holdRun(false, &job.Command{Program: []string{"echo other >> ran"}})
	r.fakeRdzv.order(job.Stop, "go")
	require.Equal(t, policy.Success, (<-done).Reason)
	ran, err := os.ReadFile(filepath.Join(r.dir, "ran"))
	require.NoError(t, err)
	require.Equal(t, "other\nother\n", string(ran))
	_, err = os.Stat(dir)
	require.ErrorIs(t, err, os.ErrNotExist, "what was written goes with the launcher")
}

func TestACommandThatCannotBeFound(t *testing.T) {
	r := newRig(t, "true", 3)
	r.cfg.Resolve = func(job.Command) (Program, error) { return Program{}, errors.New("no such program") }
	r.fakeRdzv.holdRun(false, &job.Command{Program: []string{"x"}})
	res := r.run(t)
	require.Equal(t, policy.CannotExecute, res.Reason)
	require.Contains(t, res.Local[0].Message, "no such program")
	require.Contains(t, r.fakeRdzv.said(), "failing: "+policy.Hold.String(), "who has ordered it may order another one")
}

func TestANodeIsDrained(t *testing.T) {
	r := newRig(t, "trap 'exit 0' TERM; echo > $DIR/up.$RANK; while :; do sleep 0.01; done", 0)
	done := make(chan Result, 1)
	go func() { done <- r.run(t) }()
	r.up(t)
	r.fakeRdzv.mu.Lock()
	r.fakeRdzv.d.Leave, r.fakeRdzv.d.Cause.Kind = "mend the fan", job.CauseLeave
	r.fakeRdzv.mu.Unlock()
	r.fakeRdzv.order(job.Stop, "node 0 is leaving")
	res := <-done
	require.Equal(t, policy.Signaled(int(syscall.SIGTERM)), res.Reason)
	require.Equal(t, "drained: mend the fan", res.Left)
	require.Contains(t, r.fakeRdzv.said(), "leave: drained: mend the fan")
	require.NotContains(t, r.fakeRdzv.said(), "rejoin")
}

// up waits until both workers run.
func (r *rig) up(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		found, _ := filepath.Glob(filepath.Join(r.dir, "up.*"))
		return len(found) == 2
	}, 10*time.Second, 5*time.Millisecond)
}

func TestTheRendezvousHearsBeforeTheWorkers(t *testing.T) {
	r := newRig(t, "trap 'echo > $DIR/told; exit 0' TERM; echo > $DIR/up.$RANK; while :; do sleep 0.01; done", 0)
	stops := &diary{}
	notices := make(chan string, 1)
	r.cfg.Leaves = notices
	r.cfg.Parts = []Part{{Name: "stops", Stop: func(r StopRequest) {
		if r.Early && r.Leaving {
			stops.write("early")
		} else {
			stops.write("ended")
		}
	}}}
	r.cfg.LeaveGrace = 10 * time.Second
	done := make(chan Result, 1)
	begun := time.Now()
	go func() { done <- r.run(t) }()
	r.up(t)
	notices <- "notice"
	res := <-done
	require.Equal(t, "notice", res.Left)
	require.WithinRange(t, res.Deadline, begun.Add(10*time.Second), time.Now().Add(10*time.Second))
	require.Equal(t, []string{"ready", "leaving: notice", "leave: notice"}, r.fakeRdzv.said())
	require.Equal(t, []string{"early", "ended"}, stops.read(), "what they have is saved before they are told to end")
}

func TestGraceOfALeave(t *testing.T) {
	l := &leaver{cfg: &Config{ShutdownTimeout: 30 * time.Second}}
	require.Equal(t, 30*time.Second, l.grace())
	for left, want := range map[time.Duration]time.Duration{
		28 * time.Second: 23 * time.Second, 8 * time.Second: 6 * time.Second, 300 * time.Second: 30 * time.Second,
		-time.Second: 0,
	} {
		l.deadline = time.Now().Add(left)
		require.InDelta(t, want, l.grace(), float64(500*time.Millisecond))
	}
}
