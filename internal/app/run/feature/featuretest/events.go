package featuretest

import (
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/stretchr/testify/require"

	"dlrover-run/internal/exposition"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

var fifthRound = launcher.Epoch{Directive: launcher.Directive{EpochID: job.EpochID{Round: 5, Epoch: 6}}}

// Events is every launcher.Event, by type, with values that tell their types in JSON.
var Events = map[string][]launcher.Event{
	"StartInfo": {launcher.StartInfo{
		Epoch: launcher.Epoch{Directive: launcher.Directive{
			EpochID: job.EpochID{Round: 5, Epoch: 6},
			Place:   job.Place{GroupRank: 1, GroupWorldSize: 2, WorldSize: 4, RestartCount: 3},
			Cause:   job.Cause{Kind: job.CauseFailure, Text: "exit code 1"},
		}},
		PIDs: []int{7, 8},
	}},
	"ExitInfo": {launcher.ExitInfo{
		Worker: logs.WorkerID{Rank: 3, LocalRank: 1}, PID: 8, ExitCode: -9, Stopped: true,
	}},
	"SuccessInfo": {launcher.SuccessInfo{}},
	"StopInfo":    {launcher.StopInfo{Epoch: fifthRound}},
	"SignalInfo": {
		launcher.SignalInfo{Signal: syscall.SIGTERM}, launcher.SignalInfo{Signal: syscall.SIGINT, Again: true},
	},
	"LeaveInfo": {launcher.LeaveInfo{Reason: "received SIGTERM", Grace: 27500 * time.Millisecond}},
	"TimerInfo": {launcher.TimerInfo{
		Worker: logs.WorkerID{Rank: 3, LocalRank: 1}, PID: 9, Scope: "step", After: 90 * time.Second,
		Signal: syscall.SIGKILL,
	}},
	"CheckInfo": {
		launcher.CheckInfo{
			Part: "speed", Took: 1500 * time.Millisecond,
			CheckResult: launcher.CheckResult{Reason: "slow", Until: time.Date(2030, 1, 2, 3, 4, 5, 6, time.UTC)},
		},
		launcher.CheckInfo{CheckResult: launcher.CheckResult{Passed: true}, Took: 1500 * time.Millisecond},
	},
	"BarInfo": {launcher.BarInfo{Cause: job.Cause{Kind: job.CauseCheck, Text: "slow"}}},
	"FaultInfo": {launcher.FaultInfo{
		Epoch: fifthRound, Part: "hang", Action: policy.RestartCharged,
		Failure: verdict.Failure{Rank: 3, LocalRank: 1, PID: 8, Message: "no progress", ExitCode: 1},
	}},
	"DecideInfo": {launcher.DecideInfo{
		Epoch:    fifthRound,
		Failure:  verdict.Failure{Rank: 3, LocalRank: 1, ExitCode: 138, Policy: "rule exit 138 -> retry-free (t9k)"},
		Decision: policy.Decision{Action: policy.RestartFree},
	}},
}

// WellNamed returns a scrape of metrics. Prometheus' own linter has nothing to say, but about as many names as odd.
func WellNamed(t *testing.T, tell func(*exposition.Scrape), odd int) string {
	t.Helper()
	var s exposition.Scrape
	tell(&s)
	text := string(s.Text())
	for _, name := range regexp.MustCompile(`(?m)^# TYPE (\S+)`).FindAllStringSubmatch(text, -1) {
		require.Regexp(t, `^(dlrover_.*|XPU_TIMER_COMMON_HANG)$`, name[1], "one prefix, but for the name of xpu_timer's")
	}
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	require.NoError(t, err)
	require.Len(t, problems, odd, "%v", problems)
	return text
}
