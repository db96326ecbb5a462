package rule

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/text"
)

// Finding reports that a worker's lines break a rule, or no longer do.
type Finding struct {
	Rule *Rule
	Rank int
	// Text is the finding in a few words. It may hold a part of the worker's line: escape it for a terminal.
	Text string
	// Over: the earlier finding has passed. It asks for no action.
	Over bool
}

// quiet is the shortest time between two findings of one rule and rank: a rule that breaks with every line would
// otherwise fill the launcher's log.
const quiet = time.Minute

// Worker follows the lines of one worker of an epoch.
type Worker struct {
	rank  int
	rules []state
}

// state is the state of one rule.
type state struct {
	*Rule
	seen   bool          // a line has come; until then only First counts
	last   time.Duration // of the newest line, or of the start
	away   bool          // the absence of lines has been reported
	bad    int           // lines, one after the other
	broken bool          // the newest lines are bad
	once   bool          // broken has been reported,
	told   time.Duration // at this time,
	unsaid int           // and so many times more it was not
}

// NewWorker returns a Worker of a global rank with a process that starts at now. It does not change rules.
func NewWorker(rules []Rule, rank int, now time.Duration) *Worker {
	w := &Worker{rank: rank}
	for i := range rules {
		if rules[i].Covers(rank) {
			w.rules = append(w.rules, state{Rule: &rules[i], last: now})
		}
	}
	return w
}

// line takes a line that has the rule's literal.
func (w *Worker) line(s *state, line []byte, now time.Duration) (f Finding, ok bool) {
	m := s.Pattern.FindSubmatchIndex(line)
	if m == nil {
		return f, false
	}
	away := s.away
	s.seen, s.away, s.last = true, false, now
	why := ""
	switch {
	case s.itself():
		why = "it says " + quoted(line)
	case s.numbers():
		if why, ok = s.judge(line, m); !ok {
			return f, false
		}
	}
	if why == "" {
		s.bad = 0
		return w.good(s, away, line)
	}
	if s.bad++; s.bad < s.Times {
		return f, false
	}
	return w.broken(s, why, now)
}

// judge returns why the number of a line is bad, "" if it is good; false: there is no number.
func (s *state) judge(line []byte, match []int) (why string, ok bool) {
	n, text, ok := s.numberIn(line, match)
	switch {
	case !ok || math.IsNaN(n) && !s.NaN: // not to be compared
		return "", false
	case !finite(n):
		if s.NaN {
			why = text + " is not a number"
		} else if s.Above != nil && n > *s.Above || s.Below != nil && n < *s.Below {
			why = text + " is out of bounds"
		}
	case s.Below != nil && n < *s.Below:
		why = fmt.Sprintf("%s is below %v", text, *s.Below)
	case s.Above != nil && n > *s.Above:
		why = fmt.Sprintf("%s is above %v", text, *s.Above)
	}
	if why != "" {
		why += " in " + quoted(line)
	}
	return why, true
}

// numberForm is a number, or the text that Python, C and NumPy print in place of one, that does not stand in a word.
const numberForm = `(?i)(?:^|[^\w.])([+-]?(?:nan\b|inf(?:inity)?\b|` +
	`(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?))`

// numberIn finds the number of a line: in the first group of the expression or, without one, the first behind the
// match.
func (r *Rule) numberIn(line []byte, match []int) (n float64, text string, ok bool) {
	from, to := match[1], len(line)
	if len(match) > 2 {
		if match[2] < 0 {
			return 0, "", false
		}
		from, to = match[2], match[3]
	}
	m := r.number.FindSubmatch(line[from:to])
	if m == nil {
		return 0, "", false
	}
	text = string(m[1])
	n, err := strconv.ParseFloat(strings.ReplaceAll(text, ",", ""), 64)
	return n, text, err == nil || math.IsInf(n, 0)
}

func finite(f float64) bool { return !math.IsNaN(f) && !math.IsInf(f, 0) }

// broken is a finding, unless it was reported lately.
func (w *Worker) broken(s *state, why string, now time.Duration) (Finding, bool) {
	s.broken = true
	if s.once && now-s.told < quiet {
		s.unsaid++
		return Finding{}, false
	}
	if s.unsaid > 0 {
		why += fmt.Sprintf(" (and %d times more in the last %s)", s.unsaid, (now - s.told).Round(time.Second))
	}
	s.once, s.told, s.unsaid = true, now, 0
	return Finding{Rule: s.Rule, Rank: w.rank, Text: why}, true
}

// good is the end of a finding, if there was one. It is reported once for numbers that are bad again and again.
func (w *Worker) good(s *state, away bool, line []byte) (Finding, bool) {
	over := away || s.broken && s.unsaid == 0
	s.broken = false
	return Finding{Rule: s.Rule, Rank: w.rank, Text: "good again: " + quoted(line), Over: true}, over
}

// limit is how long the rule waits for a line now; 0: for none.
func (s *state) limit(rank int) time.Duration {
	switch {
	case s.seen:
		return s.Every
	case s.expects(rank):
		return s.First
	}
	return 0
}

// Due finds lines that have stayed away. Each absence is found once.
func (w *Worker) Due(now time.Duration) (found []Finding) {
	for i := range w.rules {
		s := &w.rules[i]
		limit := s.limit(w.rank)
		if limit == 0 || s.away || now-s.last < limit {
			continue
		}
		s.away = true
		why := fmt.Sprintf("no such line for %s", limit)
		if !s.seen {
			why = fmt.Sprintf("no such line within %s of the start", limit)
		}
		found = append(found, Finding{Rule: s.Rule, Rank: w.rank, Text: why})
	}
	return found
}

// Next is when Due may find something; false: not before another line.
func (w *Worker) Next() (at time.Duration, ok bool) {
	for i := range w.rules {
		s := &w.rules[i]
		limit := s.limit(w.rank)
		if limit > 0 && !s.away && (!ok || s.last+limit < at) {
			at, ok = s.last+limit, true
		}
	}
	return at, ok
}

// Skip reports that lines were not read: their content is unknown, so none counts as missing.
func (w *Worker) Skip(now time.Duration) {
	for i := range w.rules {
		w.rules[i].last = now
	}
}

// maxQuoted bounds the quoted part of a line, in bytes.
const maxQuoted = 160

func quoted(line []byte) string {
	return strconv.Quote(strings.TrimSpace(text.Head(string(line[:min(len(line), maxQuoted+1)]), maxQuoted)))
}
