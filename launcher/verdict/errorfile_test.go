package verdict

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const recorded = `{"message": {"message": "ValueError: <b>", "extraInfo": {"py_callstack": "Traceback\n  x\n", ` +
	`"timestamp": "1700000001"}}}`

func TestParseErrorFile(t *testing.T) {
	seven := 7
	when := time.Unix(1700000001, 0)
	for _, tt := range []struct {
		name string
		data string
		want ErrorReport
		err  string
	}{
		{"@record", recorded, ErrorReport{Message: "ValueError: <b>", Traceback: "Traceback\n  x\n", Time: when}, ""},
		{"passed on by an inner launcher",
			`{"message": {"message": "E", "extraInfo": {"timestamp": 1700000001}, "errorCode": 7}}`,
			ErrorReport{Message: "E", Time: when, ExitCode: &seven}, ""},
		{"plain, number", `{"message": "E", "timestamp": 1700000001}`, ErrorReport{Message: "E", Time: when}, ""},
		{"plain, string", `{"message": "E", "timestamp": " 1700000001 "}`, ErrorReport{Message: "E", Time: when}, ""},
		{"plain, fraction", `{"message": "E", "timestamp": 1700000001.9}`, ErrorReport{Message: "E", Time: when}, ""},
		{"plain, no time", `{"message": "E"}`, ErrorReport{Message: "E"}, ""},
		{"a time that is none", `{"message": "E", "timestamp": "yesterday"}`, ErrorReport{Message: "E"}, ""},
		{"a time out of range", `{"message": "E", "timestamp": 1e30}`, ErrorReport{Message: "E"}, ""},
		{"a time before all times", `{"message": "E", "timestamp": -5}`, ErrorReport{Message: "E"}, ""},
		{"NaN as a string", `{"message": "E", "timestamp": "nan"}`, ErrorReport{Message: "E"}, ""},
		{"no extraInfo", `{"message": {"message": "E"}}`, ErrorReport{Message: "E"}, ""},
		{"extraInfo of another type", `{"message": {"message": "E", "extraInfo": []}}`,
			ErrorReport{Message: "E"}, ""},
		{"message of another type", `{"message": {"message": {"a": 1}}}`, ErrorReport{Message: `{"a": 1}`}, ""},
		{"outer message of another type", `{"message": [1]}`, ErrorReport{Message: `[1]`}, ""},
		{"null", `{"message": null}`, ErrorReport{}, ""},
		{"exit code of another type", `{"message": {"message": "E", "errorCode": "x"}}`,
			ErrorReport{Message: "E"}, ""},
		{"lone surrogate", `{"message": "\ud800"}`, ErrorReport{Message: "\uFFFD"}, ""},

		{"empty", " \n", ErrorReport{}, "error file is empty"},
		{"cut off", recorded[:40], ErrorReport{}, "error file is not a JSON object"},
		{"two files in one", recorded + recorded, ErrorReport{}, "error file is not a JSON object"},
		{"array", `[]`, ErrorReport{}, "error file is not a JSON object"},
		{"null file", `null`, ErrorReport{}, "error file is not a JSON object"},
		{"no message", `{"Message": "E"}`, ErrorReport{}, `error file has no "message"`},
		{"too large", strings.Repeat(" ", maxErrorFile) + recorded,
			ErrorReport{}, "at most 16777216 are read"},
		{"nested without end", `{"message":` + strings.Repeat("[", 1<<20),
			ErrorReport{}, "error file is not a JSON object"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseErrorFile([]byte(tt.data))
			if tt.err != "" {
				require.ErrorContains(t, err, tt.err)
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, tt.want, got)
		})
	}
}

func TestParseErrorFileIsBounded(t *testing.T) {
	long := strings.Repeat("a", 1<<20)
	got, err := ParseErrorFile([]byte(`{"message": {"message": "begin` + long +
		`", "extraInfo": {"py_callstack": "` + long + `end"}}}`))
	require.NoError(t, err)
	require.LessOrEqual(t, len(got.Message), 64<<10)
	require.LessOrEqual(t, len(got.Traceback), 64<<10)
	require.True(t, strings.HasPrefix(got.Message, "begin"))
	require.True(t, strings.HasSuffix(got.Traceback, "end"))
}

func TestAmendErrorFile(t *testing.T) {
	for _, tt := range []struct {
		name string
		data string
		code int
		want string // JSON; "" = data unchanged
	}{
		{"adds the code", recorded, -11, `{"message": {"message": "ValueError: <b>", "errorCode": -11,
			"extraInfo": {"py_callstack": "Traceback\n  x\n", "timestamp": "1700000001"}}}`},
		{"replaces the code and keeps the rest",
			`{"message": {"message": "E", "errorCode": 1, "x": [1.50]}, "y": {"z": 1e400}}`, 3,
			`{"message": {"message": "E", "errorCode": 3, "x": [1.50]}, "y": {"z": 1e400}}`},
		{"plain message", `{"message": "E", "timestamp": 5}`, 3, ""},
		{"no message", `{"a": 1}`, 3, ""},
		{"null", `{"message": null, "timestamp": 5}`, 3, ""},
		{"code 0", recorded, 0, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := AmendErrorFile([]byte(tt.data), tt.code)
			require.NoError(t, err)
			if tt.want == "" {
				require.Equal(t, tt.data, string(got))
				return
			}
			if strings.Contains(tt.want, "1e400") { // not a float64, so not for JSONEq
				require.Equal(t, `{"message":{"errorCode":3,"message":"E","x":[1.50]},"y":{"z":1e400}}`, string(got))
				return
			}
			require.JSONEq(t, tt.want, string(got))
			require.NotContains(t, string(got), `\u003c`)
		})
	}
	_, err := AmendErrorFile([]byte("{"), 1)
	require.ErrorContains(t, err, "error file is not a JSON object")
}

func FuzzErrorFile(f *testing.F) {
	for _, s := range []string{recorded, `{"message": "E", "timestamp": "1"}`, `{"message": {"errorCode": 3}}`, `{}`,
		`null`, "", "{\"message\": \"\xff\"}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		before := string(data)
		report, err := ParseErrorFile(data)
		if err != nil {
			require.Equal(t, ErrorReport{}, report)
		}
		amended, amendErr := AmendErrorFile(data, 42)
		require.Equal(t, before, string(data), "the input is left alone")
		if amendErr != nil {
			require.Error(t, err)
			return
		}
		again, errAgain := ParseErrorFile(amended)
		require.Equal(t, err == nil, errAgain == nil)
		require.Equal(t, report.Message, again.Message)
		require.Equal(t, report.Traceback, again.Traceback)
		require.True(t, report.Time.Equal(again.Time))
		if again.ExitCode != nil {
			require.Equal(t, 42, *again.ExitCode)
		}
	})
}

// errorFile is one in torch's order.
func errorFile(t *testing.T, message, stack string) []byte {
	t.Helper()
	type extra struct {
		Stack string `json:"py_callstack"`
		Time  string `json:"timestamp"`
	}
	type inner struct {
		Message string `json:"message"`
		Extra   extra  `json:"extraInfo"`
	}
	data, err := json.Marshal(map[string]inner{"message": {message, extra{stack, "1700000000"}}})
	require.NoError(t, err)
	return data
}

// Of a file that is longer than what is read of it, the class, both ends of the message and the time are left.
func TestSplice(t *testing.T) {
	long := func(s string) string { return strings.Repeat(s, 40_000) }
	for name, message := range map[string]string{
		"letters": long("x"), "quotes": long(`"`), "backslashes": long(`\`), "lines": long("\n"), "no ASCII": long("é"),
		"pairs": long("😀"), "control": long("\x01\\"),
	} {
		for _, stack := range []string{"Traceback (most recent call last):\n  File \"a.py\", line 1\nValueError: ", "short"} {
			data := errorFile(t, "ValueError: bad"+message+"of batch", stack+message+"end")
			for cut := range 40 {
				const limit = 8 << 10
				r, err := ParseErrorFile(Splice(data[:limit-cut], data[len(data)-limit+cut:]))
				require.NoError(t, err, "%s %d", name, cut)
				require.True(t, strings.HasPrefix(r.Message, "ValueError: bad"), name)
				require.Equal(t, int64(1700000000), r.Time.Unix(), name)
				require.Equal(t, []string{"ValueError"}, Failure{ExitCode: 1, Message: r.Message}.Exceptions())
			}
		}
	}
	require.Equal(t, "…", string(Splice(nil, nil)))
}

// However long an exception's line is, its class and both ends of its message are left of it.
func TestLongMessages(t *testing.T) {
	for _, n := range []int{0, 500, 5_000, 70_000, 1 << 20} {
		e := "my.Error: bad " + strings.Repeat("x", n) + " batch"
		text := "Traceback (most recent call last):\n" + strings.Repeat("  File \"a.py\", line 1, in f\n    g()\n", n/300) + e
		r, err := ParseErrorFile(errorFile(t, strings.TrimPrefix(e, "my."), text))
		require.NoError(t, err)
		for how, f := range map[string]Failure{
			"error file": {ExitCode: 1, Message: r.Message, Traceback: r.Traceback},
			"output":     {ExitCode: 1, LastLines: Ending(text, 2048)},
			"traceback":  {ExitCode: 1, Traceback: text},
		} {
			f = f.Compact()
			require.Equal(t, []string{"my.Error"}, f.Exceptions(), "%s %d", how, n)
			require.Regexp(t, `^(my\.)?Error: bad`, f.Reason(), "%s %d", how, n)
			require.Contains(t, f.Message+f.Traceback+f.LastLines, "x batch"[min(n, 1)^1:], "%s %d", how, n)
		}
	}
}

func FuzzSplice(f *testing.F) {
	f.Add([]byte(recorded[:60]), []byte(recorded[50:]))
	f.Fuzz(func(t *testing.T, head, end []byte) {
		all := Splice(head, end)
		require.LessOrEqual(t, len(all), len(head)+len(end)+len("…"))
		_, _ = ParseErrorFile(all)
	})
}
