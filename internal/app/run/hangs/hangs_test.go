package hangs

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/report"
	"dlrover-run/internal/app/run/feature/featuretest"
)

// hangsOf resolves the options of hang detection.
func hangsOf(t *testing.T, line string, env map[string]string) (hangSettings, error) {
	t.Helper()
	return read(featuretest.Read(t, line+" train.py", env), "dlrover-run")
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
		{"--slow-action=drain", nil, hangSettings{mode: hangAuto, why: "--slow-action", action: hang.ActReport,
			slow: hang.ActDrain}},
		{"--slow-action=report --hang=auto", nil, hangSettings{mode: hangAuto, why: "--hang=auto", action: hang.ActReport}},
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
		{"--hang=off --slow-action=drain", nil, "--slow-action=drain needs to see steps, but hang detection is off by " +
			"--hang=off: use --hang=auto"},
		{"--hang=outside --slow-action=report", nil, "hang detection is outside by --hang=outside"},
		{"--slow-action=drain", map[string]string{"DLROVER_HANG": "off"}, "off by $DLROVER_HANG"},
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
}
