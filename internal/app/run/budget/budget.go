// Package budget limits the cost of recovery and decides when the job has succeeded.
package budget

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/duration"
	"dlrover-run/rendezvous"
)

// New is the feature. The rendezvous counts.
func New() feature.Feature {
	var b rendezvous.Budget
	return feature.Feature{
		Name: "budget",
		Settings: func(o feature.Options) (err error) {
			j := o.Job()
			b, err = read(o, j.Params.Budget, j.Preset.Success)
			j.Params.Budget = b
			return err
		},
		Plan: func(p *feature.Plan) {
			if b != defaultBudget() {
				p.Features["budget"] = b.String()
			}
		},
	}
}

func defaultBudget() rendezvous.Budget { return rendezvous.Params{}.WithDefaults().Budget }

// read reads the options. given is the budget of --policy, success the rule of the preset.
func read(o feature.Options, given rendezvous.Budget, success string) (b rendezvous.Budget, err error) {
	b = rendezvous.Budget{
		BackoffLimit: o.Int("backoff-limit"), SameFailures: o.Int("same-failures"), NoProgress: o.Int("no-progress"),
		Success: rendezvous.SuccessRule(o.String("success-rule")), CleanUp: rendezvous.CleanUp(o.String("clean-up")),
		Tolerate: o.String("on-rank-exit") == "tolerate",
		Alone:    true,
		Sum:      given.Sum,
	}
	if b.BackoffLimit == 0 || b.SameFailures == 0 {
		return b, fmt.Errorf("--backoff-limit=%d, --same-failures=%d: need numbers from 1, or -1 for no limit; "+
			"--restart-policy=Never restarts nothing", b.BackoffLimit, b.SameFailures)
	}
	if b.Sum && !o.IsSet("same-failures") { // the limit of all restarts is the only one then
		b.SameFailures = -1
	}
	if !o.IsSet("success-rule") { // --policy has one, or the preset
		b.Success = cmp.Or(given.Success, rendezvous.SuccessRule(success), b.Success)
		b.Alone = given.Alone
	}
	b.Alone = b.Alone && (b.Success == rendezvous.SuccessRank0 || b.Success == rendezvous.SuccessNode0)
	for _, step := range []func(feature.Options, *rendezvous.Budget) error{readBackoff, readWindows, readDeadlines,
		readOnFailure} {
		if err = step(o, &b); err != nil {
			return b, err
		}
	}
	return b, rendezvous.Params{Min: 1, Max: 1, Budget: b}.Validate()
}

// readBackoff reads MIN:MAX, or 0.
func readBackoff(o feature.Options, b *rendezvous.Budget) (err error) {
	text := o.String("restart-backoff")
	if text == "0" {
		b.BackoffMax = -1
		return nil
	}
	lo, hi, ok := strings.Cut(text, ":")
	if ok {
		if b.BackoffMin, err = duration.Parse(lo); err == nil {
			b.BackoffMax, err = duration.Parse(hi)
		}
	}
	if !ok || err != nil || b.BackoffMin <= 0 || b.BackoffMax <= 0 {
		return fmt.Errorf("--restart-backoff=%s: need MIN:MAX, such as 10ms:30s, or 0 for none", text)
	}
	return nil
}

// readWindows reads SCOPE=N/DURATION, separated by commas or by repeating the option.
func readWindows(o feature.Options, b *rendezvous.Budget) error {
	n := 0
	for _, value := range o.Strings("restart-window") {
		for text := range strings.SplitSeq(value, ",") {
			w, err := parseWindow(strings.TrimSpace(text))
			if err != nil {
				return fmt.Errorf("--restart-window=%s: %w", text, err)
			}
			if n == rendezvous.MaxWindows {
				return fmt.Errorf("--restart-window=%s: at most %d windows are possible", text, rendezvous.MaxWindows)
			}
			b.Windows[n] = w
			n++
		}
	}
	return nil
}

func parseWindow(text string) (w rendezvous.Window, err error) {
	scope, rest, ok := strings.Cut(text, "=")
	count, per, both := strings.Cut(rest, "/")
	if w.Scope = rendezvous.WindowScope(scope); ok && both {
		if w.Max, err = strconv.Atoi(count); err == nil {
			w.Per, err = duration.Parse(per)
		}
	}
	if !ok || !both || err != nil || w.Max < 1 || w.Per <= 0 {
		return w, fmt.Errorf("need SCOPE=N/DURATION with rank, node or job, such as job=3/1h")
	}
	return w, nil
}

// readDeadlines reads durations; 0 is for no deadline.
func readDeadlines(o feature.Options, b *rendezvous.Budget) (err error) {
	if b.Deadline, err = o.Within("deadline", 0, feature.MaxDeadline); err == nil {
		b.StartDeadline, err = o.Within("start-deadline", 0, feature.MaxDeadline)
	}
	return err
}

// readOnFailure reads exit, hold or hold=DURATION.
func readOnFailure(o feature.Options, b *rendezvous.Budget) (err error) {
	what, per, timed := strings.Cut(o.String("on-failure"), "=")
	b.HoldFailed = what == "hold"
	if timed {
		b.HoldFor, err = duration.Parse(per)
	}
	if what != "hold" && (what != "exit" || timed) || err != nil || timed && b.HoldFor <= 0 {
		return fmt.Errorf("--on-failure=%s: need exit, hold or hold=DURATION, such as hold=2h", o.String("on-failure"))
	}
	return nil
}
