package verdict_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/verdict"
)

// tracebacks are the outputs in testdata/tracebacks, by "library kind".
func tracebacks(t testing.TB) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("testdata/tracebacks/*.txt")
	require.NoError(t, err)
	out := map[string]string{}
	kind := regexp.MustCompile(`(?m)^=== (\w+)\n`)
	for _, path := range paths {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		at := kind.FindAllSubmatchIndex(data, -1)
		for i, m := range at {
			end := len(data)
			if i+1 < len(at) {
				end = at[i+1][0]
			}
			out[strings.TrimSuffix(filepath.Base(path), ".txt")+" "+string(data[m[2]:m[3]])] = string(data[m[1]:end])
		}
	}
	require.Greater(t, len(out), 90)
	return out
}

// What libraries make of a traceback is understood: the class, the message, and the classes that rules go by.
func TestTracebacksOfLibraries(t *testing.T) {
	want := map[string]struct {
		says    string // an expression
		classes string
		class   verdict.Class
	}{
		"plain":   {`^ValueError: bad batch: b$`, "ValueError", verdict.UserException},
		"chained": {`^ValueError: bad batch: b$`, "ValueError", verdict.UserException},
		"context": {`^ValueError: bad batch: b$`, "ValueError", verdict.UserException},
		"lines":   {`^ValueError: bad batch: b$`, "ValueError", verdict.UserException},
		"empty":   {`^AssertionError:?( |$)`, "AssertionError", verdict.Assertion},
		"module": {`^(configparser\.)?NoSectionError: No section: 'train'$`, "(configparser.)?NoSectionError",
			verdict.UserException},
		"misconfiguration": {`^lightning\.fabric\.utilities\.exceptions\.MisconfigurationException: ` +
			"No `training_step\\(\\)` method defined\\. Lightning `Trainer` expects as minimum ",
			`lightning\.fabric\.utilities\.exceptions\.MisconfigurationException`, verdict.UserException},
		"group": {`^ExceptionGroup: two shards failed \(2 sub-exceptions\), first ValueError: bad batch: b$`,
			"ExceptionGroup ValueError OSError", verdict.DiskFull},
	}
	unlisted := regexp.MustCompile(`^(better-exceptions|ipython-\w+|structlog-dict)$`) // of them groups are not listed
	noise := strings.Repeat("step 1 loss 0.5\n", 400)
	for name, text := range tracebacks(t) {
		library, kind, _ := strings.Cut(name, " ")
		w := want[kind]
		switch {
		case kind == "group" && unlisted.MatchString(library):
			w.says, w.classes, w.class = `^ExceptionGroup: two shards failed`, "ExceptionGroup", verdict.UserException
		case kind == "group" && library == "rich-log": // in a narrow column
			w.says = `^ExceptionGroup: two shards failed \(2, first ValueError: bad batch: b$`
		case kind != "group" && library == "ray":
			w.classes += ` ray\.exceptions\.RayTaskError`
		}
		for variant, text := range map[string]string{"": text, "late": noise + text,
			"of a rank": strings.ReplaceAll("\n"+text, "\n", "\n[rank3]: ")} {
			if variant == "of a rank" && strings.Contains(library, "json") {
				continue
			}
			t.Run(name+" "+variant, func(t *testing.T) {
				f := verdict.Failure{ExitCode: 1, LastLines: verdict.Ending(
					verdict.Unfold(strings.TrimRight(verdict.Plain([]byte(text)), " \n")), 2048)}
				said := strings.TrimSuffix(f.Reason(), " (exit code 1)")
				require.Regexp(t, w.says, said)
				require.Regexp(t, "^"+w.classes+"$", strings.Join(f.Exceptions(), " "))
				require.Equal(t, w.class, f.Class())
				require.True(t, f.Tells())
			})
		}
	}
}

// Stacks that tell of no exception, and exceptions that ended nothing, are no errors.
func TestStacksWithoutAnError(t *testing.T) {
	const frame = "  File \"/srv/train.py\", line 7, in step\n    step(batch)\n"
	for name, text := range map[string]string{
		"a logged stack":  "Stack (most recent call last):\n" + frame + "Loss: 0.3\n",
		"a fault handler": "Current thread 0x1 (most recent call first):\n  File \"a.py\", line 3 in f\nSegmentation fault\n",
		"print_stack":     frame + "INFO:root:step 5\n",
		"a data file":     "cannot read File \"a.csv\", line 3\ncolumn missing: x\n",
	} {
		f := verdict.Failure{ExitCode: 1, LastLines: text}
		require.False(t, f.Tells(), name)
		require.Empty(t, f.Exceptions(), name)
	}
	ignored := "Exception ignored in: <function A.__del__>\n" + traceback("AttributeError: x")
	require.Equal(t, []string{"AttributeError"}, verdict.Failure{ExitCode: 1, LastLines: ignored}.Exceptions())
	require.Equal(t, []string{"ValueError"},
		verdict.Failure{ExitCode: 1, LastLines: traceback("ValueError: x") + "\n" + ignored}.Exceptions())
	syntax := "  File \"/srv/train.py\", line 3\n    f(\n     ^\nSyntaxError: '(' was never closed\n"
	require.Equal(t, []string{"SyntaxError"}, verdict.Failure{ExitCode: 1, LastLines: syntax}.Exceptions())
}

// What stands in the line of a traceback's header, such as a progress bar, need not stand before the lines below.
func TestHeaderBehindProgressBar(t *testing.T) {
	const bar = "Epoch 0:  50%|█████     | 2/4 [00:01<00:01,  1.23it/s]"
	group := tracebacks(t)["python group"]
	chain := tracebacks(t)["python chained"]
	for text, want := range map[string]string{
		bar + group + bar + "\n": "ExceptionGroup: two shards failed (2 sub-exceptions), first ValueError: bad batch: b",
		bar + chain + bar + "\n": "ValueError: bad batch: b",
	} {
		for _, prefix := range []string{"", "[rank3]: "} {
			text := prefix + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+prefix)
			f := verdict.Failure{ExitCode: 1, LastLines: text}
			require.Equal(t, want+" (exit code 1)", f.Reason(), text)
			short := verdict.Ending(text, len(text)*2/3)
			first, _, _ := strings.Cut(short, "…")
			require.NotContains(t, first, "load(batch)", "source is no error")
			require.Equal(t, want+" (exit code 1)", verdict.Failure{ExitCode: 1, LastLines: short}.Reason(), short)
		}
	}
}

func TestUnfold(t *testing.T) {
	const escaped = `Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nValueError: \u00e9 \ud83d \/ \t.`
	const want = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nValueError: é "
	for _, line := range []string{
		`{"e": "` + escaped + `", "n": 1}`, `x e="` + escaped, `{"e":"` + escaped + "\"}\nmore\n",
	} {
		got := verdict.Unfold(line)
		require.Contains(t, got, "\n"+want)
		require.Equal(t, []string{"ValueError"}, verdict.Failure{ExitCode: 1, LastLines: got}.Exceptions())
	}
	for _, same := range []string{"", escaped, "a\nb", `"exc_type": 7`, `{"exc_type": "no class", "exc_value": "x"}`} {
		require.Equal(t, same, verdict.Unfold(same))
	}
}

func FuzzTraceback(f *testing.F) {
	for _, text := range tracebacks(f) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		text = verdict.Plain([]byte(text))
		flat := verdict.Unfold(text)
		require.True(t, utf8.ValidString(flat))
		require.LessOrEqual(t, len(flat), 4*len(text)+256)
		fail := verdict.Failure{ExitCode: 1, LastLines: verdict.Ending(flat, 2048)}
		fail.Exceptions()
		fail.Class()
		fail.Explains()
		fail.LostChild()
		require.LessOrEqual(t, len(fail.Reason()), 1024)
	})
}
