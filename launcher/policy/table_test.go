package policy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	printable "dlrover-run/internal/text"
)

const site = `# the site's
base: "t9k"
success-rule: 'all' # not its node0
rules:
  - exit: 3,10-12
    exception: 'ValueError'
    action: retry-elsewhere

    # twice
    max: 2 per 1h
    reason: "bad \"memory\" \\ it's #1"
  - exit: [ 14, 201-202 ]   # hardware
    signal: [SIGBUS]
    action: hold
  - pattern: 'a: b # c ''d'' /'
    action: shrink
    reason: a#b:c -> d
  - event oom -> stop-job because memory   # a comment
  - "pattern /x: y/ -> retry"
  -   exit: 9
      action: stop-job
`

func TestParseTable(t *testing.T) {
	for name, text := range map[string]string{
		"as it is": site, "with a beginning": "---\n" + site,
		"as Windows writes it": "\uFEFF" + strings.ReplaceAll(site, "\n", "\r\n"),
		"without indentation":  strings.ReplaceAll(site, "\n  ", "\n"), "without an end": strings.TrimSuffix(site, "\n"),
	} {
		t.Run(name, func(t *testing.T) {
			table, err := ParseTable("site.yaml", text)
			require.NoError(t, err)
			require.Equal(t, "all", table.Success)
			require.Equal(t, "site.yaml", table.Name)
			var got []string
			for _, r := range table.Rules {
				got = append(got, r.String())
				require.Regexp(t, `^site.yaml:\d+$`, r.From)
			}
			require.Equal(t, []string{
				`exit 3,10-12 and exception ValueError -> retry-elsewhere max 2 per 1h because bad "memory" \ it's #1`,
				`exit 14,201-202 and signal SIGBUS -> hold`,
				`pattern /a: b # c 'd' \// -> shrink because a#b:c -> d`,
				`event oom -> stop-job because memory`,
				`pattern /x: y/ -> retry`,
				`exit 9 -> stop-job`,
			}, got)
			require.Equal(t, ExitCode, table.Restart)
			require.True(t, table.Sum)
			require.True(t, table.Alone)
		})
	}
	table, err := ParseTable("a", site)
	require.NoError(t, err)
	require.Equal(t, "a:5", table.Rules[0].From)
	require.Equal(t, "a:18", table.Rules[3].From)

	table, err = ParseTable("a", "default: hold\nrules:\n- exit 1 -> retry")
	require.NoError(t, err)
	require.Equal(t, "exit 1 -> retry", table.Rules[0].String())
	require.Equal(t, "any -> hold", table.Rules[1].String())
	require.Equal(t, "a:1", table.Rules[1].From)
	require.Empty(t, table.Success)

	table, err = ParseTable("a", "default: hold\nbase: nvrx")
	require.ErrorContains(t, err, `the rule "any -> retry" (nvrx) decides before "any -> hold" (a:1) can: leave one out`)
	table, err = ParseTable("a", "base: t9k\ndefault: hold")
	require.ErrorContains(t, err, `"any -> hold" (a:2) decides before --restart-policy=ExitCode can, which base brings`)
	table, err = ParseTable("a", "base: nvrx\nrules:\n- exit 7 -> hold")
	require.NoError(t, err)
	require.Equal(t, "nvrx", table.Rules[1].From)
	require.Empty(t, table.Restart)
	require.False(t, table.Sum)
	table, err = ParseTable("a", "base: t9k")
	require.NoError(t, err, "it has no rules of its own")
	table, err = ParseTable("a", "success-rule: any\nbase: ms-operator")
	require.NoError(t, err)
	require.Equal(t, "any", table.Success)
	require.True(t, table.Alone, "of a success rule that is not the base's")

	table, err = ParseTable("a", `rules: [{pattern: '\Qa\', action: hold}]`)
	require.NoError(t, err)
	require.Equal(t, Hold, Config{Rules: table.Rules}.Decide(Exit{Code: 1, Text: `a\`}))
	require.Contains(t, table.Rules[0].String(), `\Qa\`, "the end of it escapes nothing")
}

func TestTablesThatCannotBeRead(t *testing.T) {
	const begin = "rules:\n  - exit: 1\n    action: retry\n"
	for text, want := range map[string]string{
		"":                                      "there is nothing in it",
		"# only this\n---":                      "there is nothing in it",
		"---\n# only this":                      "there is nothing in it",
		"success-rule: all":                     "there is nothing in it",
		"rules:":                                "there is nothing in it",
		"\xff\xfe":                              "line 1: need UTF-8",
		"base: t9k\x00":                         "line 1: need UTF-8 without control",
		"base: t9k\n\x1b[31m":                   "line 2: need UTF-8 without control",
		"base: t9k\rdefault: hold":              "line 1: need UTF-8 without control",
		"base: t9k\u0085default: hold":          "line 1: need UTF-8 without control",
		"base: t9k\u2028default: hold":          "line 1: need UTF-8 without control",
		"base:\tt9k":                            "line 1: there is a tab",
		"base: k9t":                             `line 1: there is no policy "k9t": use one of t9k, ms-operator`,
		"base: t9k\nbase: nvrx":                 "line 2: base is given twice; it stands in line 1, too",
		"success-rule: some":                    `line 1: there is no success rule "some"`,
		"default: go-on":                        `line 1: there is no action "go-on"`,
		"max-restarts: 3":                       `line 1: there is no field "max-restarts": use base`,
		"rules: []":                             "there is nothing in it",
		"rules\n- any -> hold":                  "line 1: write keys with values",
		"rules:3":                               "line 1: write keys with values, such as base: t9k",
		"rules: 3":                              "line 1: rules is a list",
		begin + "rules:":                        "line 4: rules is given twice",
		"rules:\ndefault: hold\nrules:":         "line 3: rules is given twice",
		"- exit 1 -> hold":                      "line 1: write keys with values",
		begin + "base: t9k\n  - exit 2 -> hold": "line 4: there is no policy \"t9k - exit 2 -> hold\"",
		"rules:\n  -\n    exit: 1":              "line 3: the rule has no action",
		"rules:\n  - # x\n    exit: 1":          "line 3: the rule has no action",
		"rules:\n  - exit: 1\n   action: hold":  "line 3: \"action: hold\" is not read as YAML",
		"rules:\n  - exit: 1\n      action: hold": "line 3: \"action: hold\" is not read as YAML: " +
			"mapping values are not allowed",
		"rules:\n  exit: 1":                                               "line 1: rules is a list",
		begin + " - exit: 2\n   action: hold":                             "line 4: \"- exit: 2\" is not read as YAML",
		begin + "    - exit: 2":                                           "line 4: \"- exit: 2\" is not read as YAML",
		"rules:\n  - any -> retry\n    max: 3 per 1h":                     "line 3: \"max: 3 per 1h\" is not read as YAML",
		"rules:\n  - exit: 1\n    exit: 2":                                "line 3: exit is given twice; it stands in line 2",
		"rules:\n  - exit: 1":                                             "line 2: the rule has no action",
		"rules:\n  - action: hold":                                        "line 2: the rule has no condition, so it",
		"rules:\n  - any: true\n    action: hold":                         `line 2: there is no condition "any"`,
		"rules:\n  - exit: 1\n    action: hold\n    bogus: 1":             `line 4: there is no condition "bogus"`,
		"rules:\n  - exit: 1\n    action: hold\n    max: 2":               `line 4: max "2"`,
		"rules:\n  - exit: 1\n    action: hold\n    reason: " + long(257): "line 4: reason",
		"rules:\n  - exit: 1\n    action: hold\n    pattern: (":           "line 4: pattern /(/",
		"rules:\n  - exit: 1\n    action: hold\n    pattern: '*'":         "line 4: pattern",
		"rules:\n  - exit: 300\n    action: hold":                         "line 2: exit codes \"300\"",
		"default: hold\n---\nbase: t9k": "line 2: \"---\" is not read as YAML: " +
			"a second document",
		"a: &a [*a]\nbase: *a":                                   "line 1: a: a list has words",
		"rules:\n- [exit 1]":                                     "line 2: a rule is keys with values",
		"? [a]\n: b":                                             "line 1: a key is a word",
		"rules:\n- \"exit\\x1b 1 -> hold\"":                      "need UTF-8 without control",
		"rules:\n- exit: 1\n  <<: {}":                            "line 3: <<: it is a text",
		strings.Repeat("[", 60_000):                              "line 1: longer than 4096 bytes",
		strings.Repeat(strings.Repeat("[", 4000)+"\n", 15):       "is not read as YAML",
		"rules:\n- {" + manyFields(33) + "}":                     "line 2: more than 32 keys",
		"rules:\n  - exit 300 -> hold":                           "line 2: \"exit 300 -> hold\"",
		begin + "  - exit 1 -> hold":                             `a:4: the rule "exit 1 -> hold" never decides`,
		"rules:\n  - any -> hold\n  - exit 1 -> hold":            "never decides",
		"rules:\n  - any -> hold\nbase: t9k":                     "decides before",
		"rules:\n  - exit: 1\n    reason: # x\n    action: hold": "line 3: reason has no value",
		"rules:\n  - exit: 1\n    reason: ''\n    action: hold":  "line 3: reason has no value",
		"rules:\n  - ''": "line 2: a rule is keys with values, such as exit: " +
			"1, or a text",
		"rules:\n  - 'exit 1 -> hold": "line 2: \"- 'exit 1 -> hold\" is not read as YAML: " +
			"found unexpected end of stream",
		"base: \"t9k": "line 1: \"base: \\\"t9k\" is not read as YAML: " +
			"found unexpected end",
		"base: 't9k' x":    "line 1: \"base: 't9k' x\" is not read as YAML",
		"base: [t9k":       "line 1: \"base: [t9k\" is not read as YAML",
		"base: [t9k, 'x']": "line 1: there is no policy \"t9k,x\"",
		"base: [a,,b]":     "line 1: \"base: [a,,b]\" is not read as YAML",
		"base: [-a]":       "line 1: there is no policy \"-a\"",
		"base: [a] b":      "line 1: \"base: [a] b\" is not read as YAML",
		"base: *a": "line 1: \"base: *a\" is not read as YAML: " +
			"unknown anchor 'a'",
		"base: |":      "line 1: base has no value",
		"base: >-":     "line 1: base has no value",
		"base: {a: b}": "line 1: base: it is a text or a list of words",
		"base: a: b": "line 1: \"base: a: b\" is not read as YAML: " +
			"mapping values are not allowed",
		"base: a:":           "line 1: \"base: a:\" is not read as YAML",
		"base: - a":          "line 1: \"base: - a\" is not read as YAML",
		"base: @a":           "line 1: \"base: @a\" is not read as YAML",
		"base: -a":           "line 1: there is no policy \"-a\"",
		"base: ?a":           "line 1: there is no policy \"?a\"",
		"base:t9k":           "line 1: write keys with values",
		"Base: t9k":          "line 1: there is no field \"Base\"",
		": t9k":              "line 1: \": t9k\" is not read as YAML",
		"base":               "line 1: write keys with values",
		"...":                "line 1: \"...\" is not read as YAML",
		"%YAML 1.2":          "line 1: \"%YAML 1.2\" is not read as YAML",
		"rules:\n  - x y: z": "line 2: there is no condition \"x y\"",
		"rules:\n  - exit 1 -> hold because: x": "line 2: there is no condition " +
			"\"exit 1 -> hold because\"",
		strings.Repeat("#\n", 32<<10) + "#":                                 "longer than 65536 bytes",
		"base: " + long(5000):                                               "line 1: longer than 4096 bytes",
		"rules:\n" + strings.Repeat("- exit 1 -> hold max 1 per 1s\n", 257): "line 258: more than 256 rules",
	} {
		_, err := ParseTable("a", text)
		require.ErrorContains(t, err, want, "%q", text)
		require.Less(t, len(err.Error()), 16<<10, "%q", text)
	}
	_, err := ParseTable("a", strings.Repeat("#\n", (64<<10-len("base: t9k\n"))/2)+"base: t9k\n")
	require.NoError(t, err)
	_, err = ParseTable("a", "rules:\n"+strings.Repeat("- exit 1 -> hold max 1 per 1s\n", 256))
	require.NoError(t, err)
}

// The built-in tables, code by code.
func TestBuiltinTables(t *testing.T) {
	const free, retry, elsewhere, stop = RestartFree, RestartCharged, RestartElsewhere, Fail
	most := map[string]Action{"t9k": stop, "nvrx": retry, "paddle": retry, "dlrover": retry}
	codes := map[string]map[int]Action{
		"t9k":     {130: retry, 137: retry, 143: retry, 138: free},
		"nvrx":    {93: stop},
		"paddle":  {101: free, 102: free},
		"dlrover": {247: stop, 14: elsewhere, 201: elsewhere, 202: elsewhere, 137: free, 143: free},
	}
	success := map[string]string{"t9k": "node0", "ms-operator": "node0"}
	require.Len(t, Names(), 6)
	for _, name := range Names() {
		table, ok := Named(name)
		require.True(t, ok)
		require.Equal(t, name, table.Name)
		require.Equal(t, success[name], table.Success)
		require.Equal(t, name == "t9k", table.Sum)
		require.Equal(t, name == "t9k", table.Alone)
		c := Config{MaxRestarts: 3, Rules: table.Rules, Restart: table.Restart}
		require.NoError(t, c.Validate())
		require.NoError(t, Check(table.Rules))
		require.NoError(t, c.CheckSize(1, 1))
		require.Equal(t, Succeed, c.Decide(Exit{}))
		for code := 1; code <= 255; code++ {
			want, ok := codes[name][code]
			if !ok {
				want, ok = most[name], true
			}
			if name == "kubeflow" || name == "ms-operator" {
				if want = stop; code >= 128 {
					want = retry
				}
			}
			require.Equal(t, want, c.Decide(Exit{Code: code}), "%s: exit code %d", name, code)
			if signal := code - 128; signal > 0 && signal <= 64 {
				require.Equal(t, want, c.Decide(Exit{Code: -signal}), "%s: signal %d", name, signal)
			}
		}
		for _, r := range table.Rules {
			require.Equal(t, name, r.From)
		}
	}
	dlrover, _ := Named("dlrover")
	require.Equal(t, stop, Config{Rules: dlrover.Rules}.Decide(Exit{Code: -9, OOM: true}))
	_, ok := Named("T9K")
	require.False(t, ok)
}

// Spellings that people use, and that mean the same.
func TestOrdinaryYAML(t *testing.T) {
	for name, text := range map[string]string{
		"a list below its key": "rules:\n- exit:\n  - 3\n  - 10-12\n  action: hold\n  reason: the fabric is down\n",
		"mappings in braces":   "rules: [{exit: [3, 10-12], action: hold, reason: the fabric is down}]\n",
		"an anchor":            "rules:\n- exit: &some [3, 10-12]\n  action: hold\n  reason: the fabric is down\n",
		"an alias of a rule":   "rules:\n- exit: 3,10-12\n  action: &a hold\n  reason: the fabric is down\ndefault: *a\n",
		"folded text":          "rules:\n- exit: 3,10-12\n  action: hold\n  reason: >\n    the fabric\n    is down\n",
		"text over two lines":  "rules:\n- exit: 3,10-12\n  action: hold\n  reason: the fabric\n    is down\n",
		"literal text":         "rules:\n- |\n  exit 3,10-12 -> hold because the fabric is down\n",
		"an end":               "---\nrules:\n- exit 3,10-12 -> hold because the fabric is down\n...\n",
		"JSON":                 `{"rules": [{"exit": "3,10-12", "action": "hold", "reason": "the fabric is down"}]}`,
		"escapes":              "\"rules\":\n- \"exit 3,10-12 -> hold because the \\x66abric is down\"\n",
	} {
		t.Run(name, func(t *testing.T) {
			table, err := ParseTable("a", text)
			require.NoError(t, err)
			require.Equal(t, "exit 3,10-12 -> hold because the fabric is down", table.Rules[0].String())
		})
	}
}

// Aliases multiply neither time nor memory.
func TestAliasesDoNotGrow(t *testing.T) {
	bomb := "a: &a [x, x, x, x, x, x, x, x]\n"
	for c := 'b'; c < 'z'; c++ {
		bomb += fmt.Sprintf("%c: &%c [%s]\n", c, c, strings.Repeat(fmt.Sprintf("*%c, ", c-1), 8))
	}
	_, err := ParseTable("a", bomb)
	require.ErrorContains(t, err, "line 2: b: a list has words")
}

func manyFields(n int) (text string) {
	for i := range n {
		text += fmt.Sprintf("k%d: v, ", i)
	}
	return text
}

// Whatever is in a file, reading it ends, and all that it says is printable.
func FuzzParseTable(f *testing.F) {
	for _, s := range []string{site, "---\ndefault: hold", "rules:\n- any -> hold", "base: 't''9k' # x", "base: t9k #x",
		"rules:\n  - exit: [1,2]\n    action: hold", "rules:\n  - reason: \"\\\"\n    exit: 1", "default: ho#ld",
		"rules:\n\n  -   exit: ~", "a: &a [*a]\nrules: [*a, {exit: *a}]", "a: !!binary aGk=\n? |\n  b\n: >\n  c",
		"rules:\n - pattern: 'a'\n   action: -", "\uFEFFbase: t9k\r\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		_, _ = ParseTable("a", text)
		fields, items, err := ReadYAML(text)
		if err != nil {
			require.Less(t, len(err.Error()), 16<<10)
			return
		}
		for key, value := range fields {
			require.True(t, printable.Printable(key+value), "%q: %q", key, value)
		}
		require.LessOrEqual(t, len(items), 256)
	})
}
