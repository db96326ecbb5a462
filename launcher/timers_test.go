package launcher

import (
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/filetimer"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
)

// say is a shell function: say PID SCOPE EXPIRES SIGNAL writes a request. EXPIRES 1 has long expired. await EXPIRES
// [COMMAND] goes on until the launcher has handled all requests before and the time has come, and exits.
const say = `say() {
		printf '{"version": 1, "pid": %d, "scope_id": "%s", "expiration_time": %s, "signal": %d}\n' \
			$1 $2 $3 $4 > $TORCHELASTIC_TIMER_FILE
	}
	await() { trap "${2:-:}; exit 0" USR1; say $$$$ await $1 10; while :; do sleep 0.02; done; }
`

// lockedBuffer is a log that the test reads meanwhile.
type lockedBuffer = testkit.Buffer

// newTimerRig is a rig whose workers have a file timer.
func newTimerRig(t *testing.T, script string, maxRestarts int) (*rig, *lockedBuffer) {
	t.Helper()
	r, log := newRig(t, say+script, maxRestarts), &lockedBuffer{}
	f, err := filetimer.Listen("", slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	r.cfg.Timers, r.cfg.Env = f.Requests(), append(r.cfg.Env, "TORCHELASTIC_TIMER_FILE="+f.Path())
	r.cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	return r, log
}

func TestExpiredTimerKillsItsWorkerAndTheJobRestarts(t *testing.T) {
	r, log := newTimerRig(t,
		`[ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && say $$$$ train.py#7 1 9 && exec sleep 60
		[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 60`, 1)
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, `timer "train.py#7" of 0s expired (SIGKILL)`, r.fakeRdzv.failures[0].Reason())
	require.Equal(t, 1, r.fakeRdzv.failures[0].Rank)
	require.Contains(t, log.String(), `expired, sent SIGKILL" rank=1 local_rank=1`)
}

func TestVerdictNamesTheTimer(t *testing.T) {
	r, _ := newTimerRig(t, `[ $RANK = 1 ] && say $$$$ all_reduce $(($(date +%s) + 1)) 9; exec sleep 60`, 0)
	res := r.run(t)
	require.Regexp(t, `rank 1 .* failed first: timer "all_reduce" of [0-9.m]+s expired \(SIGKILL\); `, res.Verdict)
	require.NotContains(t, res.Verdict, "not sent by the launcher")
}

func TestReleasedTimerKillsNobody(t *testing.T) {
	r, log := newTimerRig(t, `soon=$(($(date +%s) + 3)); say $$$$ a $soon 9; say $$$$ b $soon 9; say $$$$ a -1 0; `+
		`say $$$$ b -1 0; await $((soon + 1))`, 0)
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.NotContains(t, log.String(), "sent SIGKILL")
}

// Whoever writes to the pipe can only name processes of the workers' sessions.
func TestTimersOfStrangersKillNobody(t *testing.T) {
	r, log := newTimerRig(t, `[ $RANK = 0 ] && for pid in 1 $SELF 999999999; do say $pid s 1 9; done; await 1`, 0)
	r.cfg.Env = append(r.cfg.Env, "SELF="+strconv.Itoa(os.Getpid()))
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.Equal(t, 1, strings.Count(log.String(), "a timer is refused"), log.String())
	require.Contains(t, log.String(), "process 1 is none of this node's workers")
}

func TestTimerOfAWorkersChild(t *testing.T) {
	r, _ := newTimerRig(t, `[ $RANK = 0 ] && exec sleep 60; sleep 60 & say $! child 1 9; wait $!; exit 3`, 0)
	res := r.run(t)
	require.Regexp(t, `failed first: exit code 3.*, after timer "child" of 0s expired in its process [0-9]+`, res.Verdict)
}

func TestTimersWhileStopping(t *testing.T) {
	r, log := newTimerRig(t, `trap 'say $$$$ a 1 9; sleep 0.3; : > $DIR/saved.$RANK; exit 0' TERM; : > $DIR/up.$RANK; `+
		`while :; do sleep 0.02; done`, 0)
	r.whenUp(t, func() { r.signals <- syscall.SIGTERM })
	require.Equal(t, policy.Signaled(int(syscall.SIGTERM)), r.run(t).Reason)
	r.read(t, "saved.0")
	r.read(t, "saved.1")
	require.NotContains(t, log.String(), "expired")
}

func TestTimersWithOtherSignals(t *testing.T) {
	r, log := newTimerRig(t, `[ $RANK = 0 ] && say $$$$ quiet 1 0 && exec sleep 60
		while [ ! -e $DIR/heard ]; do sleep 0.02; done; trap 'exit 4' USR1; say $$$$ loud 1 10; while :; do sleep 0.02; done`,
		0)
	go func() {
		for range 3000 {
			if strings.Contains(log.String(), "quiet") {
				break
			}
			time.Sleep(5 * time.Millisecond) // the log has no other notice
		}
		_ = os.WriteFile(filepath.Join(r.dir, "heard"), nil, 0o600)
	}()
	res := r.run(t)
	require.Regexp(t, `rank 1 .* failed first: exit code 4, after timer "loud" of 0s expired; `, res.Verdict)
	require.Contains(t, log.String(), `quiet\" of 0s expired; it asks for no signal`)
}

func TestManyTimersOfOneProcessCostOneDescriptor(t *testing.T) {
	r := newRig(t, "", 0)
	p, err := r.cfg.Processes.Start(proc.Spec{
		Path: "/bin/sh", Args: []string{"sh", "-c", "sleep 60 & echo $! > $DIR/pid.new; mv $DIR/pid.new $DIR/pid; wait"},
		Env: r.cfg.Env,
	})
	require.NoError(t, err)
	up := make(chan struct{})
	r.when(t, "pid", func() { close(up) })
	<-up
	child, err := strconv.Atoi(strings.TrimSpace(r.read(t, "pid")))
	require.NoError(t, err)

	g := &group{workers: []*worker{{proc: p}}}
	for i := range 100 {
		for _, pid := range []int{child, p.PID()} {
			require.NoError(t, g.setTimer(filetimer.Request{PID: pid, Scope: strconv.Itoa(i), After: time.Hour}, now()))
		}
	}
	require.Len(t, g.timers.targets, 2)
	require.Equal(t, -1, g.timers.targets[p.PID()].fd, "workers need none")
	require.Equal(t, 1, g.timers.others)
	g.timers.end()
	require.Empty(t, g.timers.targets)
	require.Nil(t, g.timers.alarm)
}

// A launcher that had no time finds the releases of its workers behind the alarm.
func TestLateAlarmTakesRequestsFirst(t *testing.T) {
	g, c := &group{}, &Config{Logger: slog.New(slog.DiscardHandler)}
	ts := &g.timers
	w := &worker{}
	ts.add(7, target{w, -1})
	_, err := ts.table.Set(filetimer.Request{PID: 7, Scope: "s"}, now().Add(-time.Minute))
	require.NoError(t, err)
	ts.set(now().Add(-time.Minute), now())
	ts.onAlarm(c)
	g.onTimer(filetimer.Request{PID: 7, Scope: "s", Release: true}, c.Logger)
	ts.onAlarm(c)
	require.True(t, ts.at.IsZero())

	_, err = ts.table.Set(filetimer.Request{PID: 7, Scope: "quiet"}, now().Add(-time.Minute))
	require.NoError(t, err)
	ts.set(now().Add(-time.Minute), now())
	ts.onAlarm(c)
	require.NotEmpty(t, ts.targets)
	ts.at = now().Add(-time.Minute) // late again
	ts.onAlarm(c)
	require.Empty(t, ts.targets, "put off once")
}
