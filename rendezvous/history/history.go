// Package history has what the histories of runs share that tests play: their text, their options and orders, and the
// rules of what launchers may be told. Only tests import it. It does not import the rendezvous, whose own tests use it.
package history

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/internal/duration"
)

var update = flag.Bool("update", false, "write the states of testdata")

// Player executes commands, one a line.
type Player interface {
	Do(format string, args ...any)
	State() string // of all, for people
	Rest()         // ends all faults, and holds what is true then
}

// Files plays the histories of testdata, one a bug. A line of dashes is followed by the state at that point, as far as
// the next empty line.
func Files(t *testing.T, play func(t *testing.T, f func(Player))) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			require.NoError(t, err)
			is := ""
			play(t, func(p Player) { is = replay(t, p, string(data)) })
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(is), 0o644))
			}
			require.Equal(t, string(data), is)
		})
	}
}

// replay plays a history, and returns its text with the states as they are.
func replay(t *testing.T, p Player, text string) string {
	dashes, out := false, []string{}
	for line := range strings.Lines(text) {
		switch line = strings.TrimSpace(line); {
		case line == "----":
			dashes = true
			out = append(out, line, p.State())
		case line == "":
			dashes = false
			out = append(out, line)
		case dashes:
		default:
			out = append(out, line)
			if !strings.HasPrefix(line, "#") {
				p.Do("%s", line)
				t.Logf("%s\n\t%s", line, strings.ReplaceAll(p.State(), "\n", "\n\t"))
			}
		}
	}
	p.Rest()
	return strings.Join(out, "\n") + "\n"
}

// options are those of a run, by the fields of its parameters in JSON.
var options = map[string]struct {
	field string
	value any // of an option without one
}{
	"min": {"min", 1}, "max": {"max", 1}, "unit": {"unit", 1}, "restarts": {"max_restarts", 1},
	"join-timeout": {"join_timeout", nil}, "gate": {"gate", true}, "static": {"static", true}, "hold": {"hold", true},
	"always": {"always", true}, "deadline": {"budget.deadline", nil}, "hold-failed": {"budget.hold_for", nil},
	"limit": {"budget.backoff_limit", 1}, "tolerate": {"budget.tolerate", true}, "backoff": {"budget.backoff_max", 0},
}

// Params are the parameters of a run with options, in JSON. Without other options it has one node, gates open after
// twenty seconds, and restarts do not wait.
func Params(given []string) ([]byte, error) {
	budget := map[string]any{"backoff_max": -1}
	all := map[string]any{"min": 1, "max": 1, "gate_timeout": 20 * time.Second, "budget": budget}
	for _, o := range given {
		name, text, _ := strings.Cut(o, "=")
		option, known := options[name]
		if !known {
			return nil, fmt.Errorf("unknown option %s", o)
		}
		value := option.value
		if n, err := strconv.Atoi(text); err == nil {
			value = n
		} else if d, err := duration.Parse(text); err == nil {
			value = d
		}
		if field, of := strings.CutPrefix(option.field, "budget."); of {
			budget[field] = value
		} else {
			all[field] = value
		}
		budget["hold_failed"] = budget["hold_for"] != nil
	}
	if n, ok := all["min"].(int); ok && all["max"].(int) < n {
		all["max"] = n
	}
	return json.Marshal(all)
}

// Options are those of a random run.
func Options(t *rapid.T) []string {
	least := rapid.IntRange(1, 3).Draw(t, "min")
	most := least + rapid.IntRange(0, 3).Draw(t, "more")
	all := []string{fmt.Sprint("min=", least), fmt.Sprint("max=", most),
		fmt.Sprint("restarts=", rapid.IntRange(0, 3).Draw(t, "restarts"))}
	if least == 2 && most == 4 {
		all = append(all, "unit=2")
	}
	if least == most && rapid.Bool().Draw(t, "static") {
		all = append(all, "static")
	}
	for _, o := range []string{"gate", "hold", "always", "tolerate", "backoff", "deadline=1m", "hold-failed=20s",
		"limit=3", "join-timeout=10s"} {
		if rapid.IntRange(0, 5).Draw(t, o) == 5 || o == "gate" && rapid.Bool().Draw(t, "checks") {
			all = append(all, o)
		}
	}
	return all
}

// Start is a command that adds a launcher, the count-th, sometimes under a name that another one has, or had. Ranks is
// how many there are in a static run; 0: it is none.
func Start(t *rapid.T, prefix string, count, ranks int) string {
	line := fmt.Sprintf("start %s%d", prefix, count)
	if name := rapid.IntRange(0, 15).Draw(t, "name"); name < 4 {
		line += fmt.Sprint(" name=n", name)
	}
	if ranks > 0 {
		line += fmt.Sprint(" rank=", rapid.IntRange(0, ranks-1).Draw(t, "rank"))
	}
	return line + rapid.SampledFrom([]string{"", "", "", "", " old", " slots=0"}).Draw(t, "kind")
}

// Order is a command that gives an order.
func Order(t *rapid.T) string {
	kind := rapid.SampledFrom([]string{"restart", "pause", "resume", "bar", "unbar", "drain", "resume", "stop"}).
		Draw(t, "order")
	switch kind {
	case "stop":
		if rapid.IntRange(0, 9).Draw(t, "stop") < 9 {
			t.Skip()
		}
	case "restart":
		kind += rapid.SampledFrom([]string{"", " charged"}).Draw(t, "cost")
	case "bar", "unbar", "drain":
		kind += fmt.Sprint(" n", rapid.IntRange(0, 5).Draw(t, "name"))
	}
	return "order " + kind
}

// Decisions are those about failures of workers.
var Decisions = []string{"restart", "restart", "restart-free", "permanent", "elsewhere", "shrink", "hold"}

// Checks are the results of checks.
var Checks = []string{"pass", "pass", "10s", "alone", "broken", "undecided", "mute"}
