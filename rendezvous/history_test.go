package rendezvous

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous/history"
)

// TestHistories plays random histories of a run. A history that breaks a rule is shrunk, and can become a file of
// testdata.
func TestHistories(t *testing.T) { testkit.Histories(t, anyHistory) }

func FuzzHistories(f *testing.F) { f.Fuzz(rapid.MakeFuzz(anyHistory)) }

func anyHistory(t *rapid.T) {
	m, held := newModel(t), false
	defer func() {
		if !held {
			t.Logf("the history:\n%s", strings.Join(m.lines, "\n"))
		}
	}()
	options := history.Options(t)
	m.Do("run %s", strings.Join(options, " "))
	for range 3 { // longer than one Repeat
		t.Repeat(m.moves())
	}
	m.Rest()
	held = true
}

// moves are what may happen next.
func (m *model) moves() map[string]func(*rapid.T) {
	moves := map[string]func(*rapid.T){
		"start":  m.starts,
		"order":  func(t *rapid.T) { m.Do("%s", history.Order(t)) },
		"settle": func(*rapid.T) { m.Do("settle") },
		"pass": func(t *rapid.T) {
			m.Do("pass %s", rapid.SampledFrom([]string{"10ms", "300ms", "1500ms", "2s", "5s", "15s", "30s"}).Draw(t, "time"))
		},
		"jump": func(t *rapid.T) { m.Do("jump %s", rapid.SampledFrom([]string{"2s", "1m"}).Draw(t, "time")) },
		"daemon": func(t *rapid.T) {
			how := rapid.SampledFrom([]string{"ended", "killed", "beside", "empty"}).Draw(t, "daemon")
			skew := rapid.SampledFrom([]string{"0s", "0s", "1h", "-1h"}).Draw(t, "skew")
			m.Do("daemon %s %s", how, skew)
			if skew == "1h" {
				m.Do("pass 100ms") // else nobody knows of its terms but launchers, which may forget them
			}
		},
	}
	move := func(name, verb string, who func(p *process) bool, args ...string) {
		moves[name] = func(t *rapid.T) {
			ids := m.alive(who)
			if len(ids) == 0 {
				t.Skip()
			}
			line := verb + " " + rapid.SampledFrom(ids).Draw(t, "launcher")
			if len(args) > 0 {
				line += " " + rapid.SampledFrom(args).Draw(t, "how")
			}
			m.Do("%s", line)
		}
	}
	here := func(p *process) bool { return p.home != nil }
	works := func(p *process) bool { return p.works }
	all := func(*process) bool { return true }
	for i := range 4 { // most of what happens
		move(fmt.Sprint("hear", i), "hear", all)
	}
	move("fail", "fail", works, history.Decisions...)
	move("succeed", "succeed", works)
	move("step", "step", works)
	move("report", "report", works, "0", "1", "4", "9", "20", "41")
	move("check", "check", func(p *process) bool { return p.dir.Kind == "check" }, history.Checks...)
	move("doubt", "doubt", here)
	for _, verb := range []string{"leaving", "leave", "kill", "cut", "mute", "delay", "repeat"} {
		move(verb, verb, here)
	}
	move("wake", "wake", func(p *process) bool { return p.silent })
	move("arrive", "arrive", func(p *process) bool { return len(p.way) > 0 })
	return moves
}

// starts adds a launcher.
func (m *model) starts(t *rapid.T) {
	if len(m.alive(func(*process) bool { return true })) > 7 {
		t.Skip()
	}
	ranks := 0
	if m.p.Static {
		ranks = m.p.Max
	}
	m.Do("%s", history.Start(t, "n", len(m.procs), ranks))
}
