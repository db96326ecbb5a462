package simulate

import (
	"cmp"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"dlrover-run/internal/job"
	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous/history"
)

// TestHistories plays random histories of the control plane. A history that breaks a rule is shrunk, and can become a
// file of testdata.
func TestHistories(t *testing.T) {
	first := "" // the rule that was broken: a shorter history breaks the same one
	met := map[string]int{}
	testkit.Histories(t, func(r *rapid.T) {
		m := newModel(r)
		watchdog := time.AfterFunc(endless, func() { panic("without an end:\n" + m.history()) })
		defer watchdog.Stop()
		rule, failure := bubble(t, func(*testing.T) { anyHistory(r, m) })
		switch first = cmp.Or(first, rule); {
		case rule == "" && failure != nil:
			panic(failure) // rapid wants other choices
		case failure != nil && rule == first:
			panic(failure)
		}
		for _, c := range m.clusters() {
			for what, times := range c.marks {
				met[what] += times
			}
		}
	})
	for _, what := range []string{
		"a worker has failed", "an order was carried out", "note break", "note failed", "note gate-opened", "note node-leave",
		"note node-loss", "note node-succeeded", "note resumed", "note run",
	} {
		require.NotZero(t, met[what], "sometimes: %s; met: %v", what, met)
	}
}

// endless is how long no history takes, not on a virtual clock, which may stand still.
const endless = time.Minute

// TestBugs plays the histories of testdata.
func TestBugs(t *testing.T) {
	history.Files(t, func(t *testing.T, play func(history.Player)) {
		if _, failure := bubble(t, func(t *testing.T) { newModel(t).plays(play) }); failure != nil {
			panic(failure)
		}
	})
}

// bubble does f on a virtual clock of its own. It returns the failure of a rapid.T, and the rule that was broken.
func bubble(t *testing.T, f func(*testing.T)) (rule string, failure any) {
	synctest.Test(t, func(t *testing.T) {
		defer func() {
			if failure = recover(); failure != nil && fmt.Sprintf("%T", failure) != "rapid.invalidData" {
				rule = where()
			}
		}()
		f(t)
	})
	return rule, failure
}

// where is the line of this package that panics.
func where() string {
	callers := make([]uintptr, 50)
	frames := runtime.CallersFrames(callers[:runtime.Callers(3, callers)])
	for f, more := frames.Next(); more; f, more = frames.Next() {
		if strings.Contains(f.File, "/simulate/") {
			return fmt.Sprint(f.File, ":", f.Line)
		}
	}
	return "elsewhere"
}

func newModel(t rapid.TB) *model { return &model{t: t} }

// plays ends all goroutines of a history after it.
func (m *model) plays(f func(history.Player)) {
	defer func() {
		m.old.end()
		for _, c := range m.clusters() {
			c.close()
		}
	}()
	f(m)
}

func anyHistory(t *rapid.T, m *model) {
	held := false
	defer func() {
		if !held {
			t.Logf("the history:\n%s", m.history())
		}
	}()
	options := history.Options(t)
	if rapid.Bool().Draw(t, "kept") {
		options = append(options, "keep=1h")
	}
	m.Do("run %s", strings.Join(options, " "))
	m.plays(func(history.Player) {
		for range rapid.IntRange(0, 4).Draw(t, "first") {
			m.starts(t)
		}
		for range 2 { // longer than one Repeat
			t.Repeat(m.moves())
		}
		m.Rest()
	})
	held = true
}

// moves are what may happen next.
func (m *model) moves() map[string]func(*rapid.T) {
	works := func(n *node) bool { _, works := n.running(); return works }
	return often(map[string]func(*rapid.T){
		"5 pass": func(t *rapid.T) {
			m.Do("pass %s", rapid.SampledFrom([]string{"1ms", "2ms", "20ms", "300ms", "1500ms", "2s", "5s", "15s", "30s"}).
				Draw(t, "time"))
		},
		"3 settle": func(*rapid.T) { m.Do("settle") },
		"3 start":  m.starts,
		"2 order":  m.orders,
		"2 daemon": m.daemons,
		"1 store": func(t *rapid.T) {
			m.Do("store %s", rapid.SampledFrom([]string{fine, refuses, loses, hangs, slow, full, fine}).Draw(t, "store"))
		},
		"1 run":     m.others,
		"2 fail":    m.move(works, []string{"fail"}, history.Decisions...),
		"1 succeed": m.move(works, []string{"succeed"}),
		"1 step":    m.move(works, []string{"step"}),
		"3 check": m.move(func(n *node) bool { return n.hear(nil).Kind == job.Check }, []string{"check"},
			history.Checks...),
		"1 ends":   m.move(nil, []string{"kill", "leave", "leaving", "mute"}),
		"1 broken": m.move(nil, []string{"cut", "lose", "delay", "repeat", "doubt"}),
		"1 slow":   m.move(nil, []string{"slow"}, "1ms", "700ms", "3s"),
		"1 wake":   m.move(func(n *node) bool { return n.link.isDark() }, []string{"wake"}),
		"1 arrive": m.move(func(n *node) bool { return n.link.waits() }, []string{"arrive"}),
	})
}

// often repeats the moves whose names begin with a number.
func often(moves map[string]func(*rapid.T)) map[string]func(*rapid.T) {
	all := map[string]func(*rapid.T){}
	for name, move := range moves {
		for i := range name[0] - '0' {
			all[fmt.Sprint(name[2:], i)] = move
		}
	}
	return all
}

// move is one of some commands about a launcher, with an argument.
func (m *model) move(who func(*node) bool, verbs []string, args ...string) func(*rapid.T) {
	return func(t *rapid.T) {
		var ids []string
		for _, n := range m.live(who) {
			ids = append(ids, n.id)
		}
		if len(ids) == 0 {
			t.Skip()
		}
		line := rapid.SampledFrom(verbs).Draw(t, "verb") + " " + rapid.SampledFrom(ids).Draw(t, "launcher")
		if len(args) > 0 {
			line += " " + rapid.SampledFrom(args).Draw(t, "how")
		}
		m.Do("%s", line)
	}
}

// others begins another run, or does something to one.
func (m *model) others(t *rapid.T) {
	switch rapid.IntRange(0, 3).Draw(t, "run") {
	case 0:
		m.Do("notice%s", m.which(t))
	case 1:
		m.Do("forget%s", m.which(t))
	default:
		if m.other != nil {
			t.Skip()
		}
		m.Do("run %s", strings.Join(history.Options(t), " "))
	}
}

// which is one of the runs.
func (m *model) which(t *rapid.T) string {
	if m.other != nil && rapid.Bool().Draw(t, "other") {
		return " run=other"
	}
	return ""
}

func (m *model) starts(t *rapid.T) {
	c, prefix := m.job, "n"
	if m.which(t) != "" {
		c, prefix = m.other, "o"
	}
	if len(m.live(func(n *node) bool { return n.c == c })) > 7 {
		t.Skip()
	}
	ranks := 0
	if c.params.Static {
		ranks = c.params.Max
	}
	m.Do("%s", history.Start(t, prefix, c.made, ranks))
}

func (m *model) orders(t *rapid.T) {
	line := history.Order(t)
	if strings.HasPrefix(line, "order resume") && rapid.IntRange(0, 3).Draw(t, "command") == 0 {
		line += " command"
	}
	m.Do("%s%s", line, m.which(t))
}

func (m *model) daemons(t *rapid.T) {
	how := rapid.SampledFrom([]string{"ended", "killed", "beside", "empty"}).Draw(t, "daemon")
	away := rapid.SampledFrom([]string{"", "", " away=1s", " away=40s"}).Draw(t, "away")
	if how == "beside" {
		away = ""
	}
	m.Do("daemon %s%s", how, away)
}
