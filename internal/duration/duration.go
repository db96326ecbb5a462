// Package duration reads the durations of command lines and files: one syntax for every option.
package duration

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Parse reads 90s, 2m or 1h30m, as time.ParseDuration does, and a plain number such as 60 or 0.5 as seconds.
func Parse(text string) (time.Duration, error) {
	text = strings.TrimSpace(text)
	if d, err := time.ParseDuration(text); err == nil {
		return d, nil
	}
	seconds, err := strconv.ParseFloat(text, 64)
	hex := strings.ContainsAny(text, "xX")
	if ns := seconds * float64(time.Second); err == nil && !hex && math.Abs(ns) < math.MaxInt64 { // false for NaN
		return time.Duration(math.Round(ns)), nil
	}
	return 0, fmt.Errorf("%q is not a duration: want 90s, 2m or 1h30m; a plain number is in seconds", text)
}

// Within is Parse with bounds, both of them inclusive.
func Within(text string, least, most time.Duration) (time.Duration, error) {
	d, err := Parse(text)
	if err == nil && (d < least || d > most) {
		err = fmt.Errorf("%q is out of range: want %s to %s", text, Text(least), Text(most))
	}
	return d, err
}

// Text prints d as a user would type it: 2m, not 2m0s, and 1h, not 1h0m0s.
func Text(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// Value is a duration as a flag of a command line, read by Parse.
type Value time.Duration

// Set implements flag.Value.
func (v *Value) Set(text string) error {
	d, err := Parse(text)
	*v = Value(d)
	return err
}

// String implements flag.Value.
func (v *Value) String() string { return Text(time.Duration(*v)) }
