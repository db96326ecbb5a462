package rendezvous

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"dlrover-run/internal/testkit"
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
	m.do("run %s", strings.Join(options(t), " "))
	for range 3 { // longer than one Repeat
		t.Repeat(m.moves())
	}
	m.rest()
	held = true
}

// options are those of a random run.
func options(t *rapid.T) []string {
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

// moves are what may happen next.
func (m *model) moves() map[string]func(*rapid.T) {
	moves := map[string]func(*rapid.T){
		"start":  m.starts,
		"order":  m.orders,
		"settle": func(*rapid.T) { m.do("settle") },
		"pass": func(t *rapid.T) {
			m.do("pass %s", rapid.SampledFrom([]string{"10ms", "300ms", "1500ms", "2s", "5s", "15s", "30s"}).Draw(t, "time"))
		},
		"jump": func(t *rapid.T) { m.do("jump %s", rapid.SampledFrom([]string{"2s", "1m"}).Draw(t, "time")) },
		"daemon": func(t *rapid.T) {
			how := rapid.SampledFrom([]string{"ended", "killed", "beside", "empty"}).Draw(t, "daemon")
			skew := rapid.SampledFrom([]string{"0s", "0s", "1h", "-1h"}).Draw(t, "skew")
			m.do("daemon %s %s", how, skew)
			if skew == "1h" {
				m.do("pass 100ms") // else nobody knows of its terms but launchers, which may forget them
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
			m.do("%s", line)
		}
	}
	here := func(p *process) bool { return p.home != nil }
	works := func(p *process) bool { return p.works }
	all := func(*process) bool { return true }
	for i := range 4 { // most of what happens
		move(fmt.Sprint("hear", i), "hear", all)
	}
	move("fail", "fail", works, "restart", "restart", "restart-free", "permanent", "elsewhere", "shrink", "hold")
	move("succeed", "succeed", works)
	move("step", "step", works)
	move("check", "check", func(p *process) bool { return p.dir.Kind == "check" },
		"pass", "pass", "10s", "alone", "broken", "undecided", "mute")
	move("doubt", "doubt", here)
	for _, verb := range []string{"leaving", "leave", "kill", "cut", "mute", "delay", "repeat"} {
		move(verb, verb, here)
	}
	move("wake", "wake", func(p *process) bool { return p.silent })
	move("arrive", "arrive", func(p *process) bool { return len(p.way) > 0 })
	return moves
}

// starts adds a launcher, sometimes under a name that another one has, or had.
func (m *model) starts(t *rapid.T) {
	if len(m.alive(func(*process) bool { return true })) > 7 {
		t.Skip()
	}
	line := fmt.Sprintf("start n%d", len(m.procs))
	if name := rapid.IntRange(0, 7).Draw(t, "name"); name < 4 {
		line += fmt.Sprint(" name=n", name)
	}
	if m.p.Static {
		line += fmt.Sprint(" rank=", rapid.IntRange(0, m.p.Max-1).Draw(t, "rank"))
	}
	line += rapid.SampledFrom([]string{"", "", "", "", " old", " slots=0"}).Draw(t, "kind")
	m.do("%s", line)
}

func (m *model) orders(t *rapid.T) {
	kinds := []OrderKind{OrderRestart, OrderPause, OrderResume, OrderBar, OrderUnbar, OrderDrain, OrderResume, OrderStop}
	kind := rapid.SampledFrom(kinds).Draw(t, "order")
	switch kind {
	case OrderStop:
		if rapid.IntRange(0, 9).Draw(t, "stop") < 9 {
			t.Skip()
		}
	case OrderRestart:
		m.do("order %s %s", kind, rapid.SampledFrom([]string{"", "charged"}).Draw(t, "cost"))
		return
	case OrderBar, OrderUnbar, OrderDrain:
		m.do("order %s n%d", kind, rapid.IntRange(0, 5).Draw(t, "name"))
		return
	}
	m.do("order %s", kind)
}
