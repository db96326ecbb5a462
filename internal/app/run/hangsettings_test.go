package run

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/report"
)

// hangsOf resolves the options of hang detection.
func hangsOf(t *testing.T, line string, env map[string]string) (hangSettings, error) {
	t.Helper()
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	c, err := parse(strings.Fields(line+" train.py"), lookup, nil)
	require.NoError(t, err)
	h := testHost()
	h.environ = func() (kvs []string) {
		for _, name := range slices.Sorted(maps.Keys(env)) {
			kvs = append(kvs, name+"="+env[name])
		}
		return kvs
	}
	return readHangs(&options{Line: c, env: lookup, host: h}, "dlrover-run")
}

func TestHangOptions(t *testing.T) {
	type vars = map[string]string
	timeline := report.Default(func(string) (string, bool) { return "", false }, true) // root's; others have it at home
	for _, c := range []struct {
		line string
		env  vars
		want hangSettings
	}{
		{"", nil, hangSettings{mode: hangOutside, action: hang.ActReport}},
		{"--hang=off", nil, hangSettings{mode: hangOff, why: "--hang=off", action: hang.ActReport}},
		{"--hang=outside", nil, hangSettings{mode: hangOutside, why: "--hang=outside", action: hang.ActReport}},
		{"", vars{"PET_HANG": "auto"}, hangSettings{mode: hangAuto, why: "--hang=auto", action: hang.ActReport}},
		{"", vars{"DLROVER_HANG": "off"}, hangSettings{mode: hangOff, why: "$DLROVER_HANG", action: hang.ActReport}},
		{"--hang=auto", vars{"DLROVER_HANG": "off"}, hangSettings{mode: hangAuto, why: "--hang=auto",
			action: hang.ActReport}},
		{"--hang-action=report", nil, hangSettings{mode: hangAuto, why: "--hang-action", action: hang.ActReport}},
		{"", vars{"PET_HANG_ACTION": "stop"}, hangSettings{mode: hangAuto, why: "--hang-action", action: hang.ActStop}},
		{"--hang=outside --hang-action=restart", nil,
			hangSettings{mode: hangOutside, why: "--hang=outside", action: hang.ActRestart}},
		{"", vars{"XPU_TIMER_HANG_TIMEOUT": "300"},
			hangSettings{mode: hangAuto, why: "$XPU_TIMER_HANG_TIMEOUT", action: hang.ActReport, limit: 5 * time.Minute,
				files: timeline, xpuTimer: true}},
		{"", vars{"XPU_TIMER_TIMELINE_PATH": "/out"},
			hangSettings{mode: hangAuto, why: "$XPU_TIMER_TIMELINE_PATH", action: hang.ActReport, files: "/out",
				xpuTimer: true}},
		{"", vars{"XPU_TIMER_BASEPORT": "1"}, hangSettings{mode: hangAuto, why: "$XPU_TIMER_BASEPORT",
			action: hang.ActReport, files: timeline, xpuTimer: true}},
		{"--hang=outside", vars{"XPU_TIMER_HANG_TIMEOUT": "1.5"},
			hangSettings{mode: hangOutside, why: "--hang=outside", action: hang.ActReport, limit: 1500 * time.Millisecond,
				files: timeline, xpuTimer: true}},
		{"--no-python /x/xpu_timer_launch", nil, hangSettings{mode: hangAuto, why: "xpu_timer_launch",
			action: hang.ActReport, files: timeline, xpuTimer: true}},
		{"--hang=off", vars{"XPU_TIMER_HANG_TIMEOUT": "soon"},
			hangSettings{mode: hangOff, why: "--hang=off", action: hang.ActReport}},
	} {
		k, err := hangsOf(t, c.line, c.env)
		require.NoError(t, err, "%s %v", c.line, c.env)
		require.Equal(t, c.want, k, "%s %v", c.line, c.env)
	}
}

func TestHangOptionsThatAreRefused(t *testing.T) {
	for _, c := range []struct {
		line string
		env  map[string]string
		want string
	}{
		{"", map[string]string{"DLROVER_HANG": "on"}, `$DLROVER_HANG="on": need auto, outside or off`},
		{"--hang=off --hang-action=restart", nil, "--hang-action=restart: hang detection is off by --hang=off: leave one"},
		{"--hang-action=stop", map[string]string{"DLROVER_HANG": "off"}, "off by $DLROVER_HANG"},
		{"", map[string]string{"XPU_TIMER_HANG_TIMEOUT": "soon"},
			`$XPU_TIMER_HANG_TIMEOUT: "soon" is not a duration`},
		{"", map[string]string{"XPU_TIMER_HANG_TIMEOUT": "0"},
			`$XPU_TIMER_HANG_TIMEOUT: "0" is out of range: want 1s to 168h`},
		{"", map[string]string{"XPU_TIMER_HANG_TIMEOUT": "-5"}, "out of range"},
		{"", map[string]string{"XPU_TIMER_HANG_TIMEOUT": "NaN"}, "is not a duration"},
		{"", map[string]string{"XPU_TIMER_HANG_TIMEOUT": "1e300"}, "is not a duration"},
	} {
		_, err := hangsOf(t, c.line, c.env)
		require.ErrorContains(t, err, c.want, "%s %v", c.line, c.env)
	}
	for _, line := range []string{"--hang=maybe", "--hang-action=kill"} {
		_, err := resolved(t, line+" train.py", nil)
		require.ErrorContains(t, err, "invalid choice", line)
	}
}

// What is done about hangs is the run's, and goes with its parameters.
func TestTheRunHearsWhatIsDoneAboutHangs(t *testing.T) {
	for line, want := range map[string]string{
		"": "action=report", "--hang-action=restart": "action=restart", "--hang=off": "", "--hang=auto": "action=report",
	} {
		s, err := resolved(t, line+" train.py", nil)
		require.NoError(t, err)
		require.Equal(t, want, s.params.Hang, line)
	}
	s, err := resolved(t, "--hang-action=restart train.py", map[string]string{"XPU_TIMER_HANG_TIMEOUT": "90"})
	require.NoError(t, err)
	require.Equal(t, "action=restart after=1m30s", s.params.Hang)
}
