package launcher

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
)

// rule has the agent decide by rules.
func (r *rig) rule(t *testing.T, texts ...string) *rig {
	t.Helper()
	for _, text := range texts {
		rule, err := policy.ParseRule(text)
		require.NoError(t, err)
		rule.From = "here"
		r.cfg.Policy.Rules = append(r.cfg.Policy.Rules, rule)
	}
	return r
}

const python = `Traceback (most recent call last):\n  File \"a.py\", line 1\n`

func TestRulesSeeWhatIsKnownOfAnEnd(t *testing.T) {
	for name, tt := range map[string]struct{ script, rule, want string }{
		"exit code": {`exit 14`, "exit 14 -> retry-elsewhere", "failing: restart elsewhere"},
		"signal":    {`kill -USR1 $$$$; sleep 9`, "signal SIGUSR1 -> shrink", "failing: shrink"},
		"exception": {`printf '` + python + `a.b.Error: x\n' >&2; exit 1`,
			"exception Error -> hold", "failing: hold"},
		"error file": {`echo '{"message":"ValueError: x"}' > $TORCHELASTIC_ERROR_FILE; exit 1`,
			"exception ValueError -> hold", "failing: hold"},
		"line of standard output": {`echo 'ECC error'; seq 2000; exit 1`, "pattern /^ECC/ -> hold", "failing: hold"},
		"line of standard error":  {`echo 'ECC error' >&2; seq 2000 >&2; exit 1`, "pattern /^ECC/ -> hold", "failing: hold"},
		"timeout": {`printf '` + python + `RuntimeError: Socket Timeout\n' >&2; exit 1`,
			"event hang -> hold", "failing: hold"},
		"none": {`exit 1`, "exit 2 -> hold", "failing: restart"},
		"follower": {`printf '` + python + `RuntimeError: Connection reset by peer\n' >&2; exit 1`, "exit 1 -> hold",
			"failing: restart"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 0 ] && exec sleep 60; `+
				strings.ReplaceAll(tt.script, `\"`, `"`), 1).rule(t, tt.rule)
			seen := &observed{}
			r.cfg.Observers = []func(Event){seen.event}
			require.Equal(t, policy.Success, r.run(t).Reason)
			require.Equal(t, tt.want, r.fakeRdzv.said()[1])
			if name == "none" {
				require.NotContains(t, strings.Join(seen.read(), "\n"), "decided")
			} else {
				require.Contains(t, strings.Join(seen.read(), "\n"), "decided rank 1: ")
			}
		})
	}
}

func TestRuleThatStopsIsTold(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && exec sleep 60; exit 3`, 5).rule(t, "exit 3 -> stop-job because bad data")
	res := r.run(t)
	require.Equal(t, policy.WorkerPermanent, res.Reason)
	require.Contains(t, res.Verdict, "not retried by rule exit 3 -> stop-job because bad data (here)")
}

func TestRuleThatIsUsedUpStops(t *testing.T) {
	r := newRig(t, `echo x >> $DIR/starts.$RANK; [ $RANK = 0 ] && exec sleep 60; exit 3`, 100).
		rule(t, "exit 3 -> retry max 2 per 1h")
	res := r.run(t)
	require.Equal(t, policy.WorkerPermanent, res.Reason)
	require.Contains(t, res.Verdict, "rule exit 3 -> retry max 2 per 1h (here) is used up")
	require.Equal(t, "x\nx\nx\n", r.read(t, "starts.1"))
}

// What failed first may only have followed what failed in a way that no restart helps.
func TestLaterFailureThatAsksForMoreIsTold(t *testing.T) {
	r := newRig(t, `[ $RANK = 0 ] && { : > $DIR/up.0; while [ ! -e $DIR/go ]; do sleep 0.01; done; exit 5; }; `+
		timedOut[len(`[ $RANK = 0 ] && { : > $DIR/up.0; exec sleep 60; }; `):], 5).rule(t, "exit 5 -> stop-job")
	x := &examiner{do: func(ctx context.Context, pids []int) {
		require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
		for ctx.Err() == nil && syscall.Kill(pids[0], 0) == nil {
			time.Sleep(time.Millisecond) // its parent, this process, collects it
		}
	}}
	r.cfg.Examiner = x.examiner()
	require.Equal(t, policy.WorkerPermanent, r.run(t).Reason)
	said := r.fakeRdzv.said()
	require.Contains(t, said, "failing: restart")
	require.Contains(t, said, "failing: fail")
}

// Where rank 0 decides alone, the rendezvous says what the failure of another worker leads to.
func TestFailuresBesideRankZero(t *testing.T) {
	const script = `if [ $RANK = 0 ]; then : > $DIR/up.0; while [ ! -e $DIR/go ]; do sleep 0.01; done; exit 0; fi; ` +
		`: > $DIR/up.1; exit 3`
	begin := func(t *testing.T, success string, rules ...string) *rig {
		r := newRig(t, script, 0).rule(t, rules...)
		<-r.fakeRdzv.dirs
		r.fakeRdzv.d.Rules = Rules{Success: success, Alone: true}
		r.fakeRdzv.order(job.Lead, "")
		return r
	}
	for name, rules := range map[string][]string{"no rule": nil, "retry": {"exit 3 -> retry"}} {
		t.Run(name, func(t *testing.T) {
			r := begin(t, "rank0", rules...)
			r.cfg.Policy.Restart = policy.Never
			r.whenUp(t, func() {
				require.Eventually(t, func() bool { return strings.Contains(strings.Join(r.fakeRdzv.said(), "\n"), "1 left") },
					10*time.Second, time.Millisecond)
				require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
			})
			require.Equal(t, policy.Success, r.run(t).Reason)
			require.Contains(t, r.fakeRdzv.said(), "success")
		})
	}
	t.Run("a rule stops the job", func(t *testing.T) {
		r := begin(t, "rank0", "exit 3 -> stop-job")
		require.Equal(t, policy.WorkerPermanent, r.run(t).Reason)
	})
	t.Run("all of node 0 decide", func(t *testing.T) {
		r := begin(t, "node0")
		require.Equal(t, policy.WorkerFailed, r.run(t).Reason)
	})
	t.Run("behind a node without workers, too", func(t *testing.T) {
		r := begin(t, "node0")
		<-r.fakeRdzv.dirs
		r.fakeRdzv.d.Place.GroupRank, r.fakeRdzv.d.Place.GroupWorldSize = 1, 2
		r.fakeRdzv.order(job.Lead, "")
		require.Equal(t, policy.WorkerFailed, r.run(t).Reason)
	})
}

func TestOurOwnSignalsAreNoFailures(t *testing.T) {
	r := newRig(t, `trap '' TERM; if [ $RANK = 0 ]; then : > $DIR/up.0; exec sleep 60; fi; `+
		`while [ ! -e $DIR/up.0 ]; do sleep 0.01; done; exit 1`, 0).rule(t, "signal KILL -> stop-job", "exit 1 -> retry")
	r.cfg.ShutdownTimeout = 0
	r.run(t)
	require.Contains(t, r.fakeRdzv.said(), "failing: restart")
	require.NotContains(t, r.fakeRdzv.said(), "failing: fail")
}
