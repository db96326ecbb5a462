// Package hangs finds hangs of the workers, and follows the requests of the run's judge.
package hangs

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/hangtell"
	"dlrover-run/hang/report"
	"dlrover-run/internal/app/guarded"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/trainjob"
)

// hangMode is the way in which hangs are found.
type hangMode string

const (
	hangAuto    hangMode = "auto"    // with a shim in the workers' interpreters
	hangOutside hangMode = "outside" // nothing in the workers
	hangOff     hangMode = "off"
)

// hangSettings are the options of the feature.
type hangSettings struct {
	mode   hangMode
	why    string // the option or variable that has chosen the mode; "" by default
	action hang.Action
	slow   hang.Action   // of hang.Spec
	link   bool          // as well, SlowLink
	limit  time.Duration // XPU_TIMER_HANG_TIMEOUT; 0: adaptive
	files  string        // XPU_TIMER_TIMELINE_PATH
	// xpuTimer is set if the job was started for xpu_timer, so its files are written as well.
	xpuTimer bool
}

// xpuTimer begins the names of the variables of DLRover's xpu_timer.
const xpuTimer = "XPU_TIMER_"

// New is the feature.
func New() feature.Feature {
	var k hangSettings
	return feature.Feature{
		Name: "hang detection",
		Settings: func(o feature.Options) (err error) {
			if k, err = read(o, o.Job().Called); err == nil && k.mode != hangOff {
				o.Job().Params.Hang = hang.Spec{Action: k.action, After: k.limit, Slow: k.slow, SlowLink: k.link}.String()
			}
			return err
		},
		Plan: func(p *feature.Plan) {
			if k.mode != hangOff && k.why != "" {
				p.Features["hang"] = k.plan()
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if k.mode == hangOff {
				return nil, nil
			}
			return openHangs(n, k).opened(), nil
		},
	}
}

// read reads the options, and the variables of xpu_timer that stand for some of them.
func read(o feature.Options, name string) (k hangSettings, err error) {
	k = hangSettings{action: hang.Action(o.String("hang-action"))}
	if k.mode, k.why, err = readHangMode(o, name); err != nil {
		return k, err
	}
	if k.mode != hangAuto && o.IsSet("slow-action") {
		return k, fmt.Errorf("--slow-action=%s needs to see steps, but hang detection is %s by %s: use --hang=auto",
			o.String("slow-action"), k.mode, k.why)
	}
	if slow := hang.Action(o.String("slow-action")); slow != hang.ActReport {
		k.slow = slow
	}
	if k.link = o.String("slow-check-link") == "yes"; o.IsSet("slow-check-link") && k.slow != hang.ActCheck {
		return k, fmt.Errorf("--slow-check-link acts only with --slow-action=check: add that, or leave it out")
	}
	k.xpuTimer = k.mode != hangOff && xpuTimerSign(o, name) != ""
	k.files = cmp.Or(o.Lookup("XPU_TIMER_TIMELINE_PATH"), report.Default(o.LookupEnv, k.xpuTimer))
	if k.mode != hangAuto && o.IsSet("start-deadline") {
		return k, fmt.Errorf("--start-deadline needs to see steps, but hangs are found %s by %s: use --hang=auto", k.mode,
			k.why)
	}
	if k.mode == hangOff && o.IsSet("hang-action") {
		return k, fmt.Errorf("--hang-action=%s: hang detection is off by %s: leave one of them out", k.action, k.why)
	}
	if text := o.Lookup("XPU_TIMER_HANG_TIMEOUT"); text != "" && k.mode != hangOff {
		k.limit, err = hangtell.Timeout(text)
	}
	return k, err
}

// readHangMode is the user's choice, or the mode that other options and variables need.
func readHangMode(o feature.Options, name string) (m hangMode, why string, err error) {
	if o.IsSet("hang") {
		m = hangMode(o.String("hang"))
		return m, "--hang=" + string(m), nil
	}
	switch text := o.Lookup("DLROVER_HANG"); hangMode(text) {
	case "":
	case hangAuto, hangOutside, hangOff:
		return hangMode(text), "$DLROVER_HANG", nil
	default:
		return m, "", fmt.Errorf("$DLROVER_HANG=%q: need auto, outside or off", text)
	}
	for _, name := range []string{"hang-action", "slow-action", "start-deadline", "no-progress"} {
		if o.IsSet(name) {
			return hangAuto, "--" + name, nil
		}
	}
	if o.IsSet("total-steps") && o.Lookup(trainjob.URLVariable) != "" {
		return hangAuto, "--total-steps", nil
	}
	if why = xpuTimerSign(o, name); why != "" {
		return hangAuto, why, nil
	}
	return hangOutside, "", nil
}

// xpuTimerSign is the sign that the user means xpu_timer: the name of its launcher, or one of its variables; "" for
// none.
func xpuTimerSign(o feature.Options, name string) string {
	if name == guarded.XPUTimerLaunch || o.Bool("no-python") && byXPUTimer(o.Args()) {
		return guarded.XPUTimerLaunch
	}
	for _, kv := range o.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, xpuTimer) {
			return "$" + name
		}
	}
	return ""
}

// byXPUTimer reports whether a command begins with the name of xpu_timer's launcher.
func byXPUTimer(command []string) bool {
	return len(command) > 0 && filepath.Base(command[0]) == guarded.XPUTimerLaunch
}

// planHang is the feature's part of the --dry-run output.
type planHang struct {
	Mode    hangMode    `json:"mode"`
	From    string      `json:"mode_from"`
	Action  hang.Action `json:"action"`
	Slow    hang.Action `json:"slow_action,omitempty"`
	Link    bool        `json:"slow_check_link,omitempty"`
	Timeout string      `json:"timeout,omitempty"`
	Files   string      `json:"files,omitempty"`
}

func (k *hangSettings) plan() planHang {
	p := planHang{Mode: k.mode, From: k.why, Action: k.action, Slow: k.slow, Link: k.link, Files: k.files}
	if k.limit > 0 {
		p.Timeout = k.limit.String()
	}
	return p
}
