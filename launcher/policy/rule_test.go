package policy

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func rule(t *testing.T, text string) Rule {
	t.Helper()
	r, err := ParseRule(text)
	require.NoError(t, err)
	r.From = "here"
	return r
}

func rules(t *testing.T, texts ...string) (out []Rule) {
	t.Helper()
	for _, text := range texts {
		out = append(out, rule(t, text))
	}
	return out
}

func TestParseRule(t *testing.T) {
	r := rule(t, `  exit 1,3-5 and signal kill,SIGTERM,40 and exception ValueError,torch.cuda.Ünï_1 and `+
		`pattern /a \/ b\\\d -> x/ and event oom,hang  ->  retry-elsewhere max 2 per 90m because it is -> broken max 3 `)
	require.Equal(t, []CodeRange{{First: 1, Last: 1}, {First: 3, Last: 5}}, r.Exit)
	require.Equal(t, []int{9, 15, 40}, r.Signal)
	require.Equal(t, []string{"ValueError", "torch.cuda.Ünï_1"}, r.Exception)
	require.Equal(t, `a / b\\\d -> x`, r.Pattern.String())
	require.Equal(t, []event{eventOOM, eventHang}, r.Event)
	require.Equal(t, RestartElsewhere, r.Action)
	require.Equal(t, 2, r.Max)
	require.Equal(t, 90*time.Minute, r.Per)
	require.Equal(t, "it is -> broken max 3", r.Reason)
	require.Equal(t, `exit 1,3-5 and signal SIGKILL,SIGTERM,40 and exception ValueError,torch.cuda.Ünï_1 and `+
		`pattern /a \/ b\\\d -> x/ and event oom,hang -> retry-elsewhere max 2 per 1h30m because it is -> broken max 3`,
		r.String())
	for _, text := range []string{"any -> retry", "any -> retry-free", "any -> shrink", "any -> hold", "any -> stop-job",
		"exit 255 -> retry max 1 per 1s", "signal 1,64 -> hold max 1000 per 720h", "any -> hold because x",
		"exception A -> retry max 3 per 1h0m1s", "pattern /^$x/ -> retry", `pattern /a\\/ -> retry`} {
		got := rule(t, text)
		require.Equal(t, strings.Replace(text, "signal 1,64", "signal SIGHUP,64", 1), got.String())
	}
}

func TestRulesThatCannotBeRead(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     `there is no condition ""; a condition is exit 1,3-5`,
		"exit":                                 "exit has no value",
		"exit -> retry":                        `"->" is neither a number`,
		"exit 1":                               "there is no -> behind the conditions; write CONDITION",
		"exit 1 >retry":                        "there is no -> behind",
		"exit 1 ->":                            `there is no action "": use retry, retry-free`,
		"exit 1 -> restart":                    `there is no action "restart"`,
		"exit 0 -> retry":                      "within 1 to 255",
		"exit 256 -> retry":                    "within 1 to 255",
		"exit 1, 2 -> retry":                   "an item is empty",
		"exit 1 and exit 2 -> retry":           "exit is given twice",
		"exit 1 and -> retry":                  `there is no condition "->"`,
		"exit 1 or exit 2 -> retry":            "there is no ->",
		"code 1 -> retry":                      `there is no condition "code"`,
		"any and exit 1 -> retry":              "any stands alone",
		"exit 1 and any -> retry":              "any stands alone",
		"signal SIGFOO -> retry":               `signal "SIGFOO" is unknown`,
		"signal 0 -> retry":                    `signal "0"`,
		"signal 65 -> retry":                   "from 1 to 64",
		"signal SIGSIGKILL -> retry":           `"SIGSIGKILL" is unknown`,
		"exception 1A -> retry":                "not the name of a Python class",
		"exception a..b -> retry":              "not the name",
		"exception A,, -> retry":               "not the name",
		"exception a-b -> retry":               "not the name",
		"pattern CUDA -> retry":                "between slashes",
		"pattern /CUDA -> retry":               "does not end",
		`pattern /CUDA\/ -> retry`:             "does not end",
		`pattern /CUDA\`:                       "does not end",
		"pattern // -> retry":                  "pattern has no value",
		"pattern /(/ -> retry":                 "missing closing",
		"pattern /.*/ -> retry":                "matches every line",
		"pattern /x?$/ -> retry":               "matches every line",
		"pattern /x/ -> retry because":         "no reason behind because",
		"event fire -> retry":                  `there is no event "fire"`,
		"any -> retry twice":                   `"twice" stands where max or because could`,
		"any -> retry max":                     `max ""`,
		"any -> retry max 2":                   `max "2"`,
		"any -> retry max 0 per 1h":            "a number from 1 to 1000",
		"any -> retry max 1001 per 1h":         "from 1 to 1000",
		"any -> retry max x per 1h":            "max \"x per 1h\"",
		"any -> retry max 2 per 999ms":         "from 1s to 720h",
		"any -> retry max 2 per 720h1s":        "from 1s to 720h",
		"any -> retry max 2 per hour":          "from 1s to 720h",
		"any -> retry max 2 per 1h because ":   "no reason behind because",
		"any -> retry because\tx":              "control characters",
		"any -> retry because \xff":            "need UTF-8",
		"any -> retry because " + long(257):    "longer than 256 bytes",
		"any -> retry because \u202eevil":      "control characters",
		"pattern /" + long(4096) + "/ -> hold": "longer than 4096 bytes",
	} {
		_, err := ParseRule(text)
		require.ErrorContains(t, err, want, "%q", text)
		require.Less(t, len(err.Error()), 10<<10)
	}
	rule(t, "any -> retry because "+long(256))
	rule(t, "pattern /"+long(4096-len("pattern // -> hold"))+"/ -> hold")
}

func long(n int) string { return strings.Repeat("x", n) }

func TestConditions(t *testing.T) {
	oom := Exit{Code: -9, OOM: true}
	newer := Exit{Code: 1, Exceptions: []string{"torch.OutOfMemoryError"}}
	cuda := Exit{Code: 1, Exceptions: []string{"torch.cuda.OutOfMemoryError"}, Text: "noise\nCUDA out of memory\n"}
	for _, tt := range []struct {
		rule string
		exit Exit
		want bool
	}{
		{"exit 137", oom, true},
		{"exit 136,138-255", oom, false},
		{"signal KILL", oom, true},
		{"signal TERM", oom, false},
		{"signal KILL", Exit{Code: 137}, false},
		{"signal KILL", Exit{Code: 9}, false},
		{"event oom", oom, true},
		{"event oom", Exit{Code: -9}, false},
		{"event hang", oom, false},
		{"event hang", Exit{Code: 1, Hung: true}, true},
		{"event oom,hang", Exit{Code: 1, Hung: true}, true},
		{"exception OutOfMemoryError", cuda, true},
		{"exception cuda.OutOfMemoryError", cuda, true},
		{"exception torch.cuda.OutOfMemoryError", cuda, true},
		{"exception MemoryError", cuda, false},
		{"exception torch.cuda.OutOfMemoryError", newer, true},
		{"exception torch.OutOfMemoryError", newer, true},
		{"exception x.torch.OutOfMemoryError", newer, false},
		{"exception x.torch.cuda.OutOfMemoryError", cuda, false},
		{"exception MemoryError,OutOfMemoryError", cuda, true},
		{"exception ValueError", Exit{Code: 1}, false},
		{"pattern /^CUDA .*memory$/", cuda, true},
		{"pattern /noise.CUDA/", cuda, false},
		{"pattern /x/", Exit{Code: 1}, false},
		{"any", cuda, true},
		{"any", Exit{Code: -64}, true},
		{"exit 1 and pattern /CUDA/", cuda, true},
		{"exit 2 and pattern /CUDA/", cuda, false},
		{"exit 1 and pattern /ROCm/", cuda, false},
		{"exit 1 and exception OutOfMemoryError and event oom", cuda, false},
		{"signal KILL and exit 137 and event oom", oom, true},
	} {
		c := Config{Rules: rules(t, tt.rule+" -> hold")}
		require.NoError(t, c.Validate())
		want := RestartCharged
		if tt.want {
			want = Hold
		}
		require.Equal(t, want, c.Decide(tt.exit), "%s for %+v", tt.rule, tt.exit)
	}
}

func TestTheFirstRuleThatMatchesDecides(t *testing.T) {
	c := Config{Restart: ExitCode,
		Rules: rules(t, "exit 1 -> hold", "exit 1-3 -> shrink", "exit 138 -> stop-job")}
	require.NoError(t, c.Validate())
	for code, want := range map[int]Action{
		0: Succeed, 1: Hold, 2: Shrink, 138: Fail, 137: RestartCharged, 4: Fail,
	} {
		require.Equal(t, want, c.Decide(Exit{Code: code}), code)
	}
	require.Equal(t, Succeed, Config{Rules: rules(t, "any -> stop-job")}.Decide(Exit{}))
}

func TestTableIsWhatDecides(t *testing.T) {
	for _, tt := range []struct {
		config Config
		want   []string
	}{
		{Config{}, []string{"any -> retry (--restart-policy=OnFailure)"}},
		{Config{Restart: Always, Rules: rules(t, "exit 3 -> hold")},
			[]string{"exit 3 -> hold (here)", "any -> retry (--restart-policy=Always)"}},
		{Config{Restart: Never}, []string{"any -> stop-job (--restart-policy=Never)"}},
		{Config{Restart: ExitCode}, []string{"exit 130,137,143 -> retry (--restart-policy=ExitCode)",
			"exit 138 -> retry-free (--restart-policy=ExitCode)", "any -> stop-job (--restart-policy=ExitCode)"}},
		{Config{Rules: rules(t, "exit 3 -> hold", "any -> shrink")},
			[]string{"exit 3 -> hold (here)", "any -> shrink (here)"}},
		{Config{Rules: rules(t, "any -> shrink max 1 per 1h")},
			[]string{"any -> shrink max 1 per 1h (here)", "any -> retry (--restart-policy=OnFailure)"}},
	} {
		var got []string
		for _, r := range tt.config.Table() {
			got = append(got, r.String()+" ("+r.From+")")
		}
		require.Equal(t, tt.want, got)
	}
}

func TestRulesWithoutEffectAreRefused(t *testing.T) {
	for _, tt := range []struct {
		config Config
		want   string
	}{
		{Config{Rules: rules(t, "any -> retry", "exit 3 -> hold")},
			`the rule "any -> retry" (here) decides before "exit 3 -> hold" (here) can`},
		{Config{Restart: Never, Rules: rules(t, "any -> retry")}, "restart policy Never has no effect"},
		{Config{Restart: ExitCode, Rules: rules(t, "exit 1 -> hold", "any -> retry")},
			"restart policy ExitCode has no effect"},
		{Config{Restart: ExitCode, Retryable: []CodeRange{{First: 1, Last: 9}},
			Rules: rules(t, "any -> retry")}, "no effect"},
		{Config{Restart: Always, Rules: rules(t, "any -> retry")}, ""},
		{Config{Restart: Never, Rules: rules(t, "any -> retry max 1 per 1h")}, ""},
		{Config{Rules: rules(t, "any -> retry max 1 per 1h", "exit 3 -> hold", "any -> shrink")}, ""},
	} {
		if err := tt.config.Validate(); tt.want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, tt.want)
		}
	}
	require.NoError(t, Check(nil))
	require.NoError(t, Check(rules(t, "exit 1 -> retry max 1 per 1h", "exit 1 -> hold", "any -> hold")))
	require.ErrorContains(t, Check(rules(t, "exit 1 -> retry", "exit 2 -> retry", "exit 1 -> hold max 1 per 1h")),
		`here: the rule "exit 1 -> hold max 1 per 1h" never decides anything, because "exit 1 -> retry" stands before it`)
	require.ErrorContains(t, Check(rules(t, "any -> retry", "exit 1 -> hold")), "never decides anything")
	many := make([]Rule, 257)
	for i := range many {
		many[i] = rule(t, "any -> retry max 1 per 1h")
	}
	require.NoError(t, Check(many[:256]))
	require.ErrorContains(t, Check(many), "257 rules; at most 256")
}

func TestShrinkNeedsASizeToShrinkTo(t *testing.T) {
	c := Config{Rules: rules(t, "exit 1 -> hold", "exit 3 -> shrink")}
	require.NoError(t, c.CheckSize(1, 2))
	require.ErrorContains(t, c.CheckSize(2, 2),
		`here: the rule "exit 3 -> shrink" shrinks a job that needs all of its 2 nodes: use --nnodes=MIN:MAX`)
	require.NoError(t, Config{Rules: rules(t, "exit 1 -> hold")}.CheckSize(2, 2))
}

func TestAloneThereIsNoElsewhere(t *testing.T) {
	c := Config{Rules: rules(t, "exit 1 -> retry-elsewhere", "exit 2 -> hold")}
	require.Equal(t, RestartElsewhere, c.Decide(Exit{Code: 1}))
	c.Alone = true
	require.Equal(t, RestartCharged, c.Decide(Exit{Code: 1}))
	require.Equal(t, Hold, c.Decide(Exit{Code: 2}))
}

func TestNeedsText(t *testing.T) {
	require.False(t, Config{}.NeedsText())
	require.False(t, Config{Rules: rules(t, "exit 1 -> hold")}.NeedsText())
	require.True(t, Config{Rules: rules(t, "exit 1 -> hold", "pattern /x/ -> hold")}.NeedsText())
}

// A failure that only followed another one asks for no more than a restart by its exit code.
func TestFollowersAskForARestartOnly(t *testing.T) {
	reset := Exit{Code: 1, Exceptions: []string{"RuntimeError"}, Text: "Connection reset by peer", Follows: true}
	for _, tt := range []struct {
		config Config
		want   Action
	}{
		{Config{}, RestartCharged},
		{Config{Restart: ExitCode}, RestartCharged},
		{Config{Restart: Never}, Fail},
		{Config{Rules: rules(t, "exit 1 -> stop-job")}, RestartCharged},
		{Config{Rules: rules(t, "exit 1 -> retry-elsewhere")}, RestartCharged},
		{Config{Rules: rules(t, "exit 1 -> shrink")}, RestartCharged},
		{Config{Rules: rules(t, "any -> hold")}, RestartCharged},
		{Config{Rules: rules(t, "any -> retry-free")}, RestartFree},
		{Config{Rules: rules(t, "exception RuntimeError -> hold")}, Hold},
		{Config{Rules: rules(t, "exit 1 and pattern /reset/ -> stop-job")}, Fail},
	} {
		require.Equal(t, tt.want, tt.config.Decide(reset), "%+v", tt.config)
	}
	hung := Exit{Code: 1, Hung: true, Follows: true}
	require.Equal(t, Hold, Config{Rules: rules(t, "event hang -> hold")}.Decide(hung))
	d := NewDecider(Config{Rules: rules(t, "exit 1 -> hold")}).Decide(time.Time{}, reset)
	require.True(t, d.Yielded)
	require.Equal(t, "rule exit 1 -> hold (here), but the failure followed that of another process", d.Why())
}

func TestMaxSlides(t *testing.T) {
	d := NewDecider(Config{Rules: rules(t, "exit 14 -> retry max 2 per 1h",
		"exit 14 -> retry-elsewhere max 1 per 24h", "exit 3 -> hold max 1 per 1s", "exit 4 -> retry")})
	start := time.Unix(1_000_000, 0)
	decide := func(after time.Duration, code int) Decision {
		return d.Decide(start.Add(after), Exit{Code: code})
	}
	require.Equal(t, RestartCharged, decide(0, 14).Action)
	require.Equal(t, RestartCharged, decide(30*time.Minute, 14).Action)
	got := decide(59*time.Minute, 14)
	require.Equal(t, RestartElsewhere, got.Action)
	require.Equal(t, "rule exit 14 -> retry max 2 per 1h (here) is used up, so "+
		"rule exit 14 -> retry-elsewhere max 1 per 24h (here)", got.Why())
	require.Equal(t, RestartCharged, decide(time.Hour, 14).Action, "the first one has left the window")
	got = decide(time.Hour+time.Second, 14)
	require.Equal(t, Fail, got.Action, "the restart policy does not step in")
	require.Nil(t, got.Rule)
	require.Equal(t, "rule exit 14 -> retry max 2 per 1h (here) is used up", got.Why())
	require.Equal(t, RestartCharged, decide(90*time.Minute, 14).Action)
	require.Equal(t, Hold, decide(2*time.Hour, 3).Action)
	require.Equal(t, Fail, decide(2*time.Hour+time.Second-1, 3).Action)
	require.Equal(t, Hold, decide(2*time.Hour+time.Second, 3).Action)
	for range 100 {
		require.Equal(t, RestartCharged, decide(3*time.Hour, 4).Action, "without max")
	}
	require.Empty(t, decide(3*time.Hour, 5).Why(), "no rule has decided")
	require.Equal(t, RestartCharged, decide(3*time.Hour, 5).Action)
	require.Equal(t, "rule exit 4 -> retry (here)", decide(3*time.Hour, 4).Why())
	require.Equal(t, Succeed, decide(3*time.Hour, 0).Action)
}

// A rule that is used up, and one behind it that decides, ask a follower for no more either.
func TestFollowersOfRulesThatAreUsedUp(t *testing.T) {
	d := NewDecider(Config{Rules: rules(t, "exit 1 -> retry max 1 per 1h")})
	e := Exit{Code: 1, Follows: true}
	require.False(t, d.Decide(time.Time{}, e).Yielded)
	got := d.Decide(time.Time{}, e)
	require.True(t, got.Yielded)
	require.Equal(t, RestartCharged, got.Action)
}

func TestActionsHaveWords(t *testing.T) {
	for a := RestartFree; a <= Fail; a++ {
		got, err := parseAction(a.Word())
		require.NoError(t, err)
		require.Equal(t, a, got)
		require.NotContains(t, a.String(), "action ")
	}
	require.Empty(t, Succeed.Word())
	require.Equal(t, "succeed", Succeed.String())
	require.Equal(t, "action 7", (Fail + 1).String())
	_, err := parseAction("")
	require.Error(t, err)
}

func FuzzParseRule(f *testing.F) {
	for _, s := range []string{`exit 1,3-5 and pattern /a\/b\\/ -> retry max 2 per 1h because x`, "any -> hold",
		"signal KILL,7 -> shrink", "exception a.B,c and event oom -> stop-job", `pattern /\/\//->x`,
		"any ->  retry max  1 per  1s"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRule(s)
		if err != nil {
			return
		}
		again, err := ParseRule(r.String())
		require.NoError(t, err, "%q of %q", r, s)
		require.Equal(t, r.String(), again.String())
		require.Equal(t, []any{r.Exit, r.Signal, r.Exception, r.Event, r.Action, r.Max, r.Per, r.Reason},
			[]any{again.Exit, again.Signal, again.Exception, again.Event, again.Action, again.Max, again.Per, again.Reason})
		Config{Rules: []Rule{r}}.Decide(Exit{Code: 1, Text: s})
	})
}
