// Package logrules watches the output of the workers for lines, and for lines that stay away.
package logrules

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
	logrule "dlrover-run/launcher/logs/rule"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// watch watches the workers' output.
type watch struct {
	node  feature.Node
	slots int
	rules []logrule.Rule

	unread sync.Once // skipped output has been logged

	mu      sync.Mutex
	workers []*watchedLog // of the newest epoch, by local rank
	news    chan struct{} // something was found in it
}

// New is the feature.
func New() feature.Feature {
	var rules []logrule.Rule
	return feature.Feature{
		Name:     "log rules",
		Settings: func(o feature.Options) (err error) { rules, err = readLogRules(o); return err },
		Plan: func(p *feature.Plan) {
			if len(rules) > 0 {
				p.Features["log_rules"] = planLogRules(rules)
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if len(rules) == 0 {
				return nil, nil
			}
			l := &watch{node: n, slots: n.Job().Slots, rules: rules}
			return &feature.Opened{Part: launcher.Part{Start: l.start, Run: l.run, Stop: l.stop}, Tap: l.tap}, nil
		},
	}
}

// maxRulesFile bounds --log-rules, in bytes.
const maxRulesFile = 1 << 20

// readLogRules returns the rules of the command line, then those of the file.
func readLogRules(o feature.Options) (rules []logrule.Rule, err error) {
	for _, text := range o.Strings("log-rule") {
		one, err := logrule.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("--log-rule: %w", err)
		}
		rules = append(rules, one)
	}
	if path := o.String("log-rules"); path != "" {
		text, err := openfile.ReadNamed(path, maxRulesFile)
		if err != nil {
			return nil, fmt.Errorf("--log-rules=%s: %w; give the path of a file with rules", path, err)
		}
		more, err := logrule.ParseFile(string(text))
		if err != nil {
			return nil, fmt.Errorf("--log-rules=%s: %w", path, err)
		}
		rules = append(rules, more...)
	}
	if len(rules) == 0 {
		return nil, nil
	}
	if err := logrule.Check(rules); err != nil {
		return nil, fmt.Errorf("--log-rule: %w", err)
	}
	return rules, nil
}

// planRule is the --dry-run output of a rule.
type planRule struct {
	Name    string         `json:"name"`
	Pattern string         `json:"pattern"`
	First   string         `json:"first,omitempty"`
	Every   string         `json:"every,omitempty"`
	Below   *float64       `json:"below,omitempty"`
	Above   *float64       `json:"above,omitempty"`
	NaN     bool           `json:"nan,omitempty"`
	Times   int            `json:"times"`
	Ranks   string         `json:"ranks"`
	Action  logrule.Action `json:"action"`
}

func planLogRules(rules []logrule.Rule) (plans []planRule) {
	for _, r := range rules {
		p := planRule{Name: r.Name, Pattern: r.Pattern.String(), Below: r.Below, Above: r.Above, NaN: r.NaN, Times: r.Times,
			Ranks: r.RankText(), Action: r.Action}
		if r.First > 0 {
			p.First = r.First.String()
		}
		if r.Every > 0 {
			p.Every = r.Every.String()
		}
		plans = append(plans, p)
	}
	return plans
}

// watchedLog is the output of one worker. Its two streams are read by goroutines of their own.
type watchedLog struct {
	begun time.Time // of its clock
	news  chan<- struct{}

	mu    sync.Mutex
	rules *logrule.Worker
	found []logrule.Finding // not reported yet
	due   time.Duration     // when run looks for overdue lines
	share share
}

// never is a time that is not reached.
const never time.Duration = math.MaxInt64

func (w *watchedLog) clock(t time.Time) time.Duration { return t.Sub(w.begun) }

// start forgets the earlier workers. Their output that is still read counts as theirs.
func (l *watch) start(r *launcher.StartRequest) {
	now, news := time.Now(), make(chan struct{}, 1)
	workers := make([]*watchedLog, l.slots)
	for i := range workers {
		workers[i] = &watchedLog{begun: now, news: news, rules: logrule.NewWorker(l.rules, r.Place.RankBase+i, 0)}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.workers, l.news = workers, news
}

// tap is the logs.Config.Tap.
func (l *watch) tap(id logs.WorkerID, _ logs.Std) logs.Tap {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !slices.ContainsFunc(l.rules, func(r logrule.Rule) bool { return r.Covers(id.Rank) }) {
		return nil
	}
	w := l.workers[id.LocalRank]
	return &tappedStream{w: w, lines: logrule.NewStream(w.rules)}
}

// tappedStream is one stream of a worker.
type tappedStream struct {
	w     *watchedLog
	lines *logrule.Stream
}

// Feed implements logs.Tap.
func (s *tappedStream) Feed(b []byte, now time.Time) {
	w := s.w
	w.mu.Lock()
	defer w.mu.Unlock()
	begun := time.Now()
	if len(b) >= flooded && !w.share.left(begun) {
		s.lines.Skip(w.clock(now))
		return
	}
	found := s.lines.Feed(b, w.clock(now))
	w.share.spend(time.Since(begun))
	next, ok := w.rules.Next()
	if sooner := ok && next < w.due; len(found) == 0 && !sooner {
		return
	}
	w.found = append(w.found, found...)
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// flooded is the size of one read from a worker that prints faster than it is read.
const flooded = 32 << 10

// share is the time that the reading of a worker's output may spend on rules while the worker floods it: a tenth,
// and a burst. Output beyond that is skipped, so that the worker does not wait for rules.
type share struct {
	since   time.Time
	spent   time.Duration
	skipped bool
}

const (
	shareOf    = 10
	shareBurst = 20 * time.Millisecond
)

func (s *share) left(now time.Time) bool {
	if passed := now.Sub(s.since); s.since.IsZero() || passed >= time.Second {
		s.since, s.spent = now, max(0, s.spent-passed/shareOf)
	}
	if s.spent < shareBurst+now.Sub(s.since)/shareOf {
		return true
	}
	s.skipped = true
	return false
}

func (s *share) spend(d time.Duration) { s.spent += d }

// take returns the findings, and whether output was skipped since the last call.
func (w *watchedLog) take(now time.Time) (found []logrule.Finding, skipped bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	found = append(w.found, w.rules.Due(w.clock(now))...)
	skipped = w.share.skipped
	w.found, w.share.skipped = nil, false
	return found, skipped
}

// next is when a line is due, and run looks again; zero: none is.
func (w *watchedLog) next() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	at, ok := w.rules.Next()
	if !ok {
		w.due = never
		return time.Time{}
	}
	w.due = at
	return w.begun.Add(at)
}

func (l *watch) run(ctx context.Context, r launcher.RunRequest) {
	l.mu.Lock()
	workers, news := l.workers, l.news
	l.mu.Unlock()
	alarm := time.NewTimer(0)
	defer alarm.Stop()
	for {
		l.tell(workers, func(f logrule.Finding, local int) { l.act(r, f, local) })
		next := nextOf(workers)
		if next.IsZero() {
			alarm.Stop()
		} else {
			alarm.Reset(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return
		case <-news:
		case <-alarm.C:
		}
		if !next.IsZero() && time.Since(next) > late && !retry.Sleep(ctx, late) {
			return
		}
	}
}

// late is the delay of a wake-up that shows that the launcher did not run. The line may have come meanwhile, so its
// reader gets as long again.
const late = time.Second

func nextOf(workers []*watchedLog) (next time.Time) {
	for _, w := range workers {
		if at := w.next(); !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

// stop reports the findings in the last lines, which lead to no action.
func (l *watch) stop(r launcher.StopRequest) {
	if r.Early {
		return
	}
	l.mu.Lock()
	workers := l.workers
	l.mu.Unlock()
	l.tell(workers, func(logrule.Finding, int) {})
}

// tell logs the findings, and calls act for the rest.
func (l *watch) tell(workers []*watchedLog, act func(f logrule.Finding, local int)) {
	now := time.Now()
	for local, w := range workers {
		found, skipped := w.take(now)
		for _, f := range found {
			l.say(f)
			if !f.Over && f.Rule.Action != logrule.Report {
				act(f, local)
			}
		}
		if skipped {
			l.unread.Do(func() {
				l.node.Log().Warn("a worker prints more than its log rules can read in a tenth of the time; "+
					"some of it goes by unread",
					"local_rank", local)
			})
		}
	}
}

func (l *watch) say(f logrule.Finding) {
	text := text.EscapeLine(f.Text)
	attrs := []any{"rule", f.Rule.Name, "rank", f.Rank, "found", text}
	if f.Over {
		l.node.Log().Info("log rule: good again", attrs...)
	} else {
		l.node.Log().Warn("log rule", append(attrs, "action", string(f.Rule.Action))...)
		l.node.Finding(f.Rule.Name, f.Rank, f.Text)
	}
	l.node.Events().LogRule(f)
}

func (l *watch) act(r launcher.RunRequest, f logrule.Finding, local int) {
	action := policy.RestartCharged
	if f.Rule.Action == logrule.Stop {
		action = policy.Fail
	}
	r.Fail(verdict.Failure{Rank: f.Rank, LocalRank: local, PID: r.PIDs[local],
		Message: fmt.Sprintf("log rule %s: %s", f.Rule.Name, f.Text)}, action)
}
