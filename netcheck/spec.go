package netcheck

import (
	"fmt"
	"strings"
	"time"
)

// Bounds of a Spec. Below minTimeout not even the tests of two nodes fit.
const (
	minTimeout = 5 * time.Second
	MaxTimeout = time.Hour
	MaxTTL     = 7 * 24 * time.Hour
)

// Validate refuses a Spec that no check can follow.
func (s Spec) Validate() error {
	switch {
	case s.Level != LevelLocal && s.Level != LevelHost && s.Level != LevelFull:
		return fmt.Errorf("check level %q is unknown: use %s, %s or %s", s.Level, LevelLocal, LevelHost, LevelFull)
	case s.Comm && s.Level != LevelFull:
		return fmt.Errorf("a collective over all nodes needs the check level %s, not %s", LevelFull, s.Level)
	case s.TTL < 0 || s.TTL > MaxTTL:
		return fmt.Errorf("a pass cannot hold for %v: use 0 (the run) to %v", s.TTL, MaxTTL)
	case s.Timeout < minTimeout || s.Timeout > MaxTimeout:
		return fmt.Errorf("a check cannot be bounded by %v: use %v to %v", s.Timeout, minTimeout, MaxTimeout)
	}
	return nil
}

// words are the switches of a Spec, in the order of its text.
func (s *Spec) words() []struct {
	word string
	on   *bool
} {
	return []struct {
		word string
		on   *bool
	}{{"comm", &s.Comm}, {"exclude-straggler", &s.ExcludeStraggler}, {"report-only", &s.ReportOnly}}
}

// String is the text that ParseSpec understands. Specs are equal exactly if their texts are.
func (s Spec) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "level=%s ttl=%v timeout=%v", s.Level, s.TTL, s.Timeout)
	for _, w := range s.words() {
		if *w.on {
			b.WriteString(" " + w.word)
		}
	}
	return b.String()
}

// ParseSpec parses the text of String. Missing keys have their defaults.
func ParseSpec(text string) (Spec, error) {
	s := Spec{Level: LevelFull, TTL: DefaultTTL, Timeout: DefaultTimeout}
	for _, field := range strings.Fields(text) {
		if err := s.set(field); err != nil {
			return Spec{}, fmt.Errorf("check %q: %w", text, err)
		}
	}
	if err := s.Validate(); err != nil {
		return Spec{}, fmt.Errorf("check %q: %w", text, err)
	}
	return s, nil
}

func (s *Spec) set(field string) (err error) {
	key, value, _ := strings.Cut(field, "=")
	switch key {
	case "level":
		s.Level = Level(value)
	case "ttl":
		s.TTL, err = time.ParseDuration(value)
	case "timeout":
		s.Timeout, err = time.ParseDuration(value)
	default:
		return s.turnOn(field)
	}
	return err
}

func (s *Spec) turnOn(word string) error {
	for _, w := range s.words() {
		if w.word == word {
			*w.on = true
			return nil
		}
	}
	return fmt.Errorf("%q is unknown here: all nodes of a run need the same version", word)
}
