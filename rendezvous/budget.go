package rendezvous

import (
	"fmt"
	"strings"
	"time"

	"dlrover-run/internal/duration"
)

// Budget bounds the cost of a run's recovery, and defines the end of the run. The zero value of a field is its default.
// The Budget of the node that opened the run applies to all.
type Budget struct {
	// BackoffLimit is how many restarts in a row may bring no progress, including those that MaxRestarts does not count;
	// -1 is no limit. Restarts because nodes come or go are not counted.
	BackoffLimit int `json:"backoff_limit,omitempty"`
	// Sum lets BackoffLimit bound all restarts of the run together, those that have brought progress included.
	Sum bool `json:"sum,omitempty"`
	// BackoffMin and BackoffMax bound the time from a failure to the next start. The first restart after progress does
	// not wait, the second one BackoffMin, and each further one twice as long. A BackoffMax below 0 is no wait at all.
	BackoffMin time.Duration `json:"backoff_min,omitempty"`
	BackoffMax time.Duration `json:"backoff_max,omitempty"`
	// Windows bound the restarts within some time, whether they bring progress or not.
	Windows [MaxWindows]Window `json:"windows,omitzero"`
	// SameFailures is how often in a row workers may fail alike before their first step; -1 is no limit. An epoch whose
	// progress is unknown is not counted.
	SameFailures int `json:"same_failures,omitempty"`
	// NoProgress is how many restarts in a row may bring neither a newer checkpoint nor more steps; 0 is no limit. Where
	// neither is known, an epoch of ten minutes is progress.
	NoProgress int `json:"no_progress,omitempty"`
	// Deadline bounds the time from the first start of workers to the end of the run, without pauses; 0 is no limit.
	Deadline time.Duration `json:"deadline,omitempty"`
	// StartDeadline bounds the time from every start of workers to the first step; 0 is no limit.
	StartDeadline time.Duration `json:"start_deadline,omitempty"`
	// Success selects the workers whose success is the run's.
	Success SuccessRule `json:"success,omitempty"`
	// Alone: they decide alone. A failure of another worker that no restart may follow leaves the run as it is.
	Alone bool `json:"alone,omitempty"`
	// CleanUp is the treatment of workers that still run then.
	CleanUp CleanUp `json:"clean_up,omitempty"`
	// HoldFailed pauses a run that would fail because of its workers, for HoldFor; 0 is until an order.
	HoldFailed bool          `json:"hold_failed,omitempty"`
	HoldFor    time.Duration `json:"hold_for,omitempty"`
	// Tolerate lets an epoch go on when one of its workers fails, as long as another one is left.
	Tolerate bool `json:"tolerate,omitempty"`
}

// SuccessRule selects the workers whose success is the run's.
type SuccessRule string

// The success rules.
const (
	SuccessAll   SuccessRule = "all"   // all workers
	SuccessRank0 SuccessRule = "rank0" // rank 0
	SuccessNode0 SuccessRule = "node0" // all workers of the first node that has any
	SuccessAny   SuccessRule = "any"   // any worker
)

// CleanUp is the treatment of workers that still run when the run has succeeded.
type CleanUp string

// The ways to clean up.
const (
	CleanNone       CleanUp = "none"       // they run on, and how they end does not count
	CleanUnfinished CleanUp = "unfinished" // they are stopped
	CleanAll        CleanUp = "all"        // they are stopped; nothing is left of others in any case
)

// Window bounds the restarts of a rank, of a node or of the job within a time. The zero Window bounds nothing.
type Window struct {
	Scope WindowScope   `json:"scope,omitempty"`
	Max   int           `json:"max,omitempty"`
	Per   time.Duration `json:"per,omitempty"`
}

// WindowScope selects the restarts that a Window counts: those after a failure in the scope.
type WindowScope string

// The scopes of a Window.
const (
	windowRank WindowScope = "rank"
	windowNode WindowScope = "node"
	windowJob  WindowScope = "job"
)

// Bounds of a Budget.
const (
	MaxWindows   = 4
	maxWindowMax = 1000
	maxDuration  = 366 * 24 * time.Hour
)

// Defaults of a Budget.
const (
	defaultBackoffLimit = 100
	defaultBackoffMin   = 10 * time.Millisecond
	defaultBackoffMax   = 30 * time.Second
	defaultSameFailures = 5
)

// longEpoch counts as progress unless steps show otherwise: a failure after so long causes neither a delay nor a stop.
const longEpoch = 10 * time.Minute

// earlyEpoch bounds an epoch that counts as one without a first step where steps are unknown.
const earlyEpoch = 2 * time.Minute

func (b Budget) withDefaults() Budget {
	set(&b.BackoffLimit, defaultBackoffLimit)
	set(&b.BackoffMax, defaultBackoffMax)
	if b.BackoffMax < 0 {
		b.BackoffMin = 0
	} else {
		set(&b.BackoffMin, min(defaultBackoffMin, b.BackoffMax))
	}
	set(&b.SameFailures, defaultSameFailures)
	set(&b.Success, SuccessAll)
	set(&b.CleanUp, CleanUnfinished)
	return b
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// validate expects the defaults to be filled in.
func (b Budget) validate() error {
	switch {
	case b.BackoffLimit < -1:
		return fmt.Errorf("--backoff-limit=%d: need a number of restarts from 1, or -1 for no limit", b.BackoffLimit)
	case b.BackoffMax >= 0 && (b.BackoffMin <= 0 || b.BackoffMin > b.BackoffMax || b.BackoffMax > maxDuration):
		return fmt.Errorf("--restart-backoff=%s:%s: need MIN:MAX with 0 < MIN <= MAX, or 0 for none",
			b.BackoffMin, b.BackoffMax)
	case b.SameFailures < -1:
		return fmt.Errorf("--same-failures=%d: need a number of failures from 1, or -1 for no limit", b.SameFailures)
	case b.NoProgress < 0:
		return fmt.Errorf("--no-progress=%d: need a number of restarts from 1, or 0 for no limit", b.NoProgress)
	case min(b.Deadline, b.StartDeadline, b.HoldFor) < 0 || max(b.Deadline, b.StartDeadline, b.HoldFor) > maxDuration:
		return fmt.Errorf("--deadline, --start-deadline and --on-failure=hold need times up to %s (%s, %s, %s)",
			maxDuration, b.Deadline, b.StartDeadline, b.HoldFor)
	case !oneOf(b.Success, SuccessAll, SuccessRank0, SuccessNode0, SuccessAny):
		return fmt.Errorf("--success-rule=%.100s: need all, rank0, node0 or any", b.Success)
	case !oneOf(b.CleanUp, CleanNone, CleanUnfinished, CleanAll):
		return fmt.Errorf("--clean-up=%.100s: need none, unfinished or all", b.CleanUp)
	}
	for _, w := range b.Windows {
		if err := w.validate(); err != nil {
			return err
		}
	}
	return nil
}

func oneOf[T comparable](v T, list ...T) bool {
	for _, o := range list {
		if v == o {
			return true
		}
	}
	return false
}

func (w Window) validate() error {
	known := oneOf(w.Scope, windowRank, windowNode, windowJob)
	if w != (Window{}) && (!known || w.Max < 1 || w.Max > maxWindowMax || w.Per <= 0 || w.Per > maxDuration) {
		return fmt.Errorf("--restart-window=%.100s: need rank, node or job, 1 to %d restarts and a time up to %s, such as "+
			"job=3/1h", w, maxWindowMax, maxDuration)
	}
	return nil
}

// String is w as a user would type it.
func (w Window) String() string { return fmt.Sprintf("%s=%d/%s", w.Scope, w.Max, duration.Text(w.Per)) }

// options lists the fields as a user would type them, defaults included.
func (b Budget) options() (list []option) {
	b = b.withDefaults()
	var windows []string
	for _, w := range b.Windows {
		if w != (Window{}) {
			windows = append(windows, w.String())
		}
	}
	exit := "restart-all"
	if b.Tolerate {
		exit = "tolerate"
	}
	for _, text := range []string{
		b.limitText(), "--restart-backoff=" + b.backoffText(),
		"--restart-window=" + strings.Join(windows, ","),
		fmt.Sprintf("--same-failures=%d", b.SameFailures), fmt.Sprintf("--no-progress=%d", b.NoProgress),
		"--deadline=" + duration.Text(b.Deadline), "--start-deadline=" + duration.Text(b.StartDeadline),
		b.successText(), "--clean-up=" + string(b.CleanUp),
		"--on-failure=" + b.onFailure(), "--on-rank-exit=" + exit,
	} {
		list = append(list, option{text: text})
	}
	return list
}

func (b Budget) limitText() string {
	text := fmt.Sprintf("--backoff-limit=%d", b.BackoffLimit)
	if b.Sum {
		text += " in all"
	}
	return text
}

func (b Budget) successText() string {
	text := "--success-rule=" + string(b.Success)
	if b.Alone {
		text += " alone"
	}
	return text
}

func (b Budget) backoffText() string {
	if b.BackoffMax < 0 {
		return "0"
	}
	return duration.Text(b.BackoffMin) + ":" + duration.Text(b.BackoffMax)
}

func (b Budget) onFailure() string {
	switch {
	case !b.HoldFailed && b.HoldFor == 0:
		return "exit"
	case b.HoldFor == 0:
		return "hold"
	}
	return "hold=" + duration.Text(b.HoldFor)
}

// String lists the fields as a user would type them, defaults included.
func (b Budget) String() string {
	var texts []string
	for _, o := range b.options() {
		texts = append(texts, o.text)
	}
	return strings.Join(texts, " ")
}
