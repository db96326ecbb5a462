package rule

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func parse(t *testing.T, text string) Rule {
	t.Helper()
	r, err := Parse(text)
	require.NoError(t, err)
	return r
}

func TestParse(t *testing.T) {
	r := parse(t, `loss:train_loss: ([-+.\w]+):above=1e3:nan:times=3:ranks=0-3,8:action=restart`)
	require.Equal(t, []any{"loss", `train_loss: ([-+.\w]+)`, 1e3, true, 3, []rankRange{{0, 3}, {8, 8}}, Restart},
		[]any{r.Name, r.Pattern.String(), *r.Above, r.NaN, r.Times, r.Ranks, r.Action})
	r = parse(t, `progress:step \d+:every=5m:first=900`)
	require.Equal(t, []any{5 * time.Minute, 15 * time.Minute, Report, 1}, []any{r.Every, r.First, r.Action, r.Times})
	require.Equal(t, `loss\:nan`, func() string { r := parse(t, `x:loss\:nan`); return r.Pattern.String() }())
	require.Equal(t, "loss", func() string { r := parse(t, `x:loss:nan`); return r.Pattern.String() }())
	require.Equal(t, "(?:a|b)::[[:alpha:]]+ lr=(.*)",
		func() string { r := parse(t, `x:(?:a|b)::[[:alpha:]]+ lr=(.*):below=1`); return r.Pattern.String() }())
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":               "has no expression",
		"loss":           "has no expression; write NAME:REGEX",
		"my loss:x":      `the name "my loss" needs`,
		"x:":             "there is no expression",
		"x:every=300s":   "stands before the end",
		"x:(":            "the expression cannot be used",
		"x:.*":           "matches every line",
		"x:a:every=0":    `every=0: "0" is out of range: want 1s to 720h`,
		"x:a:every=soon": `"soon" is not a duration`,
		"x:a:first=900h": "is out of range",
		"x:a:below=low":  "need a number such as",
		"x:a:above=nan":  "need a number such as",
		"x:a:evry=300s": `there is no option evry; if evry=300s is part of the expression, write ` +
			`\:evry=300s`,
		"x:every=300s:a":                  "every=300s stands before the end of the expression",
		"x:a:nan:nan":                     "nan is given twice",
		"x:a:action=kill":                 "action=kill: need report, restart or stop",
		"x:a:ranks=3-1":                   "need ranks of the job",
		"x:a:ranks=":                      "need ranks of the job",
		"x:a:times=0":                     "need a number of lines",
		"x:a:every=9s:times=2":            "times counts lines that are bad",
		"x:a:below=5:above=1":             "leave no good number",
		"x:(a)(b):nan":                    "has 2 groups",
		"x:" + strings.Repeat("a", 1<<13): "is longer than",
	} {
		_, err := Parse(text)
		require.ErrorContains(t, err, want, text)
	}
}

func TestParseFile(t *testing.T) {
	rules, err := ParseFile("# what to watch\n\n  loss:loss=:nan  \r\nstep:step:every=60s\n")
	require.NoError(t, err)
	require.Equal(t, []string{"loss:loss=:nan", "step:step:every=60s"}, []string{rules[0].String(), rules[1].String()})
	require.NoError(t, Check(rules))
	_, err = ParseFile("# x\nloss:loss=:nan\nbad\n")
	require.ErrorContains(t, err, `line 3: "bad" has no expression`)
	require.ErrorContains(t, Check(append(rules, rules[0])), "two rules are called loss")
	require.ErrorContains(t, Check(make([]Rule, 257)), "257 rules; at most 256")
}

// follow feeds lines one second apart, and asks for what is due after each; "" is a second without a line.
func follow(t *testing.T, text string, rank int, lines ...string) (said []string) {
	t.Helper()
	w := NewWorker([]Rule{parse(t, text)}, rank, 0)
	s := NewStream(w)
	for i, line := range lines {
		now := time.Duration(i+1) * time.Second
		if line != "" {
			line += "\n"
		}
		for _, f := range append(s.Feed([]byte(line), now), w.Due(now)...) {
			require.Equal(t, rank, f.Rank)
			said = append(said, fmt.Sprintf("%d %t %s", i+1, f.Over, f.Text))
		}
	}
	return said
}

func TestNumbers(t *testing.T) {
	for _, tc := range []struct {
		rule  string
		lines []string
		want  []string
	}{
		{"x:loss:nan", []string{"loss=0.3", "loss: nan", "loss: nan", "loss: 1.5"},
			[]string{`2 false nan is not a number in "loss: nan"`}},
		{"x:loss:nan", []string{"loss tensor(-inf, device='cuda:0')", "loss 2e-3"},
			[]string{`1 false -inf is not a number in "loss tensor(-inf, device='cuda:0')"`, `2 true good again: "loss 2e-3"`}},
		{"x:loss:nan", []string{"loss: see info and nanny"}, nil},
		{`x:loss=(\S+):above=10`, []string{"loss=9.99", "loss=nan", "loss=1,234.5 lr=0"},
			[]string{`3 false 1,234.5 is above 10 in "loss=1,234.5 lr=0"`}},
		{`x:speed:below=100:times=2`, []string{"speed 99", "speed 101", "speed 1", "speed 2"},
			[]string{`4 false 2 is below 100 in "speed 2"`}},
		{`x:speed (\d+)?:below=100`, []string{"speed unknown"}, nil},
		{`x:loss=:above=-1`, []string{"loss=-0.5", "loss=-2"}, []string{
			`1 false -0.5 is above -1 in "loss=-0.5"`, `2 true good again: "loss=-2"`}},
		{"x:CUDA out of memory", []string{"CUDA", "x CUDA out of memory. y"},
			[]string{`2 false it says "x CUDA out of memory. y"`}},
		{"x:(?i)error", []string{"ERROR: a"}, []string{`1 false it says "ERROR: a"`}},
		{"x:loss:nan:ranks=1-2", []string{"loss nan"}, nil},
	} {
		require.Equal(t, tc.want, follow(t, tc.rule, 0, tc.lines...), tc.rule)
	}
}

func TestLinesThatStayAway(t *testing.T) {
	for _, tc := range []struct {
		rule  string
		rank  int
		lines []string
		want  []string
	}{
		{"x:step:every=2s", 0, []string{"", "", "", "step 1", "step 2", "other", "other", "", "step 3"},
			[]string{"7 false no such line for 2s", `9 true good again: "step 3"`}},
		{"x:step:first=2s", 0, []string{"", "other", "", "step 1", "", "", ""},
			[]string{"2 false no such line within 2s of the start", `4 true good again: "step 1"`}},
		{"x:step:first=2s:every=1s", 0, []string{"step", "", ""}, []string{"2 false no such line for 1s"}},
		{"x:step:first=2s", 3, []string{"", "", ""}, nil},
		{"x:step:first=2s:ranks=3", 3, []string{"", "", ""}, []string{"2 false no such line within 2s of the start"}},
		{"x:step:first=2s:ranks=all", 9, []string{"", ""}, []string{"2 false no such line within 2s of the start"}},
	} {
		require.Equal(t, tc.want, follow(t, tc.rule, tc.rank, tc.lines...), tc.rule)
	}
}

func TestNextIsWhenALineIsDue(t *testing.T) {
	w := NewWorker([]Rule{parse(t, "a:step:every=300s"), parse(t, "b:save:first=900s")}, 0, time.Second)
	at, ok := w.Next()
	require.Equal(t, []any{901 * time.Second, true}, []any{at, ok}, "before its first line nothing has to come again")
	NewStream(w).Feed([]byte("step 1\n"), 10*time.Second)
	at, _ = w.Next()
	require.Equal(t, 310*time.Second, at)
	require.Len(t, w.Due(at), 1)
	require.Empty(t, w.Due(at), "told once")
	w.Skip(900 * time.Second)
	at, _ = w.Next()
	require.Equal(t, 1800*time.Second, at, "what was not read may have been the line")
	_, ok = NewWorker([]Rule{parse(t, "a:x")}, 0, 0).Next()
	require.False(t, ok)
}

// A rule that breaks at every line is told once a minute.
func TestFindingsAreLimited(t *testing.T) {
	lines := make([]string, 130)
	for i := range lines {
		lines[i] = []string{"loss nan", "loss 1"}[i%2]
	}
	require.Equal(t, []string{
		`1 false nan is not a number in "loss nan"`, `2 true good again: "loss 1"`,
		`61 false nan is not a number in "loss nan" (and 29 times more in the last 1m0s)`, `62 true good again: "loss 1"`,
		`121 false nan is not a number in "loss nan" (and 29 times more in the last 1m0s)`, `122 true good again: "loss 1"`,
	}, follow(t, "x:loss:nan", 0, lines...))
}

func TestStreamMakesLines(t *testing.T) {
	w := NewWorker([]Rule{parse(t, "x:b[^\n]*")}, 0, 0)
	feed := func(s *Stream, parts ...string) (said []string) {
		for i, p := range parts {
			for _, f := range s.Feed([]byte(p), time.Duration(i)*2*time.Minute) {
				said = append(said, strings.TrimSuffix(strings.TrimPrefix(f.Text, `it says "`), `"`))
			}
		}
		return said
	}
	require.Equal(t, []string{"a bc"}, feed(NewStream(w), "a ", "b", "c\r", "\n"))
	w = NewWorker(w.rules[0].rules(), 0, 0)
	require.Equal(t, []string{"10% b=1", "20% b=2"}, feed(NewStream(w), "\r10% b=1", "\r20% b=2", "\r"))
	w = NewWorker(w.rules[0].rules(), 0, 0)
	long := "b" + strings.Repeat("x", 3*maxLine)
	s := NewStream(w)
	require.Empty(t, feed(s, long[:maxLine], long[maxLine:]))
	require.LessOrEqual(t, cap(s.pend), 4*maxLine)
	require.Len(t, feed(s, "\n"), 1)
	s.Feed([]byte("b"), 0)
	s.Skip(time.Hour)
	require.Empty(t, feed(s, "\n"), "the rest of a line whose beginning was not read")
}

func (s *state) rules() []Rule { return []Rule{*s.Rule} }

func TestRequired(t *testing.T) {
	for pattern, want := range map[string]string{
		`loss=(\S+)`: "loss=", `a|b`: "", `(?i)loss`: "", `(?:step )+\d`: "step ", `(abc){2,}x`: "abc", `(abc)?x`: "x",
		`x{0}`: "", `\bloss\b: nan`: ": nan", `^\[Rank \d+\] Watchdog`: "] Watchdog",
	} {
		require.Equal(t, want, string(required(pattern)), pattern)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`loss:train_loss: ([-+.\w]+):above=1e3:nan:times=3:ranks=0-3,8:action=restart`)
	f.Add(`a:b\::every=1h:first=2`)
	f.Fuzz(func(t *testing.T, text string) {
		r, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(r.String())
		require.NoError(t, err)
		require.Equal(t, r.Pattern.String(), again.Pattern.String())
		require.True(t, strings.HasPrefix(text, r.Name+":"+r.Pattern.String()))
	})
}

// FuzzStream: however the output is cut, the lines are the same, and the literal never hides one.
func FuzzStream(f *testing.F) {
	f.Add("loss=(.*)x", "a loss=3x\nloss=\rb\n\nloss=x\n", 5)
	f.Add("step|loss", "loss\rstep", 2)
	f.Fuzz(func(t *testing.T, pattern, text string, cut int) {
		p, err := regexp.Compile(pattern)
		if err != nil || len(pattern) > 100 || p.NumSubexp() > 1 || len(text) > maxLine {
			return
		}
		r := Rule{Name: "x", Pattern: p, Times: 1, literal: required(pattern)}
		want := 0
		for _, line := range strings.FieldsFunc(text+"\n", func(c rune) bool { return c == '\n' || c == '\r' }) {
			if p.MatchString(line) {
				want++
			}
		}
		w := NewWorker([]Rule{r}, 0, 0)
		s := NewStream(w)
		cut = min(max(cut, 0), len(text))
		got := len(s.Feed([]byte(text[:cut]), 0)) + len(s.Feed([]byte(text[cut:]), 0)) + len(s.Feed([]byte("\n"), 0))
		if !p.MatchString("") { // empty lines do not count here
			require.Equal(t, want, got+w.rules[0].unsaid)
		}
	})
}
