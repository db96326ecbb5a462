package policy

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDecide(t *testing.T) {
	onFailure := Config{}
	never := Config{Restart: Never}
	always := Config{Restart: Always}
	byCode := Config{Restart: ExitCode}
	replaced := Config{
		Restart: ExitCode, Retryable: []CodeRange{{First: 3, Last: 5}, {First: 139, Last: 139}},
	}
	chargedRestartMe := Config{Restart: ExitCode, Retryable: []CodeRange{{First: 138, Last: 138}}}

	for _, tt := range []struct {
		name   string
		config Config
		code   int
		want   Action
	}{
		{"zero config succeeds on 0", onFailure, 0, Succeed},
		{"zero config restarts after 1", onFailure, 1, RestartCharged},
		{"zero config restarts after a signal", onFailure, -11, RestartCharged},
		{"zero config charges 138", onFailure, 138, RestartCharged},
		{"OnFailure restarts after 77", Config{Restart: OnFailure}, 77, RestartCharged},
		{"Never succeeds on 0", never, 0, Succeed},
		{"Never fails on 1", never, 1, Fail},
		{"Never fails on SIGKILL", never, -9, Fail},
		{"Never fails on 138", never, 138, Fail},
		{"Always leaves a success to the rendezvous", always, 0, Succeed},
		{"Always restarts after 1", always, 1, RestartCharged},
		{"ExitCode succeeds on 0", byCode, 0, Succeed},
		{"ExitCode fails on 1", byCode, 1, Fail},
		{"ExitCode fails on 139", byCode, 139, Fail},
		{"ExitCode fails on SIGSEGV", byCode, -11, Fail},
		{"ExitCode fails on SIGABRT", byCode, -6, Fail},
		{"ExitCode retries 130", byCode, 130, RestartCharged},
		{"ExitCode retries SIGINT", byCode, -2, RestartCharged},
		{"ExitCode retries 137", byCode, 137, RestartCharged},
		{"ExitCode retries SIGKILL", byCode, -9, RestartCharged},
		{"ExitCode retries 143", byCode, 143, RestartCharged},
		{"ExitCode retries SIGTERM", byCode, -15, RestartCharged},
		{"ExitCode restarts freely after 138", byCode, 138, RestartFree},
		{"ExitCode restarts freely after SIGUSR1", byCode, -10, RestartFree},
		{"a list replaces the default: inside", replaced, 4, RestartCharged},
		{"a list replaces the default: first", replaced, 3, RestartCharged},
		{"a list replaces the default: last", replaced, 5, RestartCharged},
		{"a list replaces the default: below", replaced, 2, Fail},
		{"a list replaces the default: above", replaced, 6, Fail},
		{"a list replaces the default: SIGSEGV by its shell code", replaced, -11, RestartCharged},
		{"a list replaces the default: SIGKILL", replaced, -9, Fail},
		{"a list without 138 leaves it free", replaced, 138, RestartFree},
		{"a list with 138 charges it", chargedRestartMe, 138, RestartCharged},
	} {
		t.Run(tt.name, func(t *testing.T) {
			require.NoError(t, tt.config.Validate())
			require.Equal(t, tt.want, tt.config.Decide(Exit{Code: tt.code}))
		})
	}
}

// The largest action of a node's workers is the node's.
func TestActionsAreOrdered(t *testing.T) {
	require.True(t,
		slices.IsSorted([]Action{Succeed, RestartFree, RestartCharged, Fail}))
	require.Equal(t, "restart, not charged", RestartFree.String())
}

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config Config
		want   string // part of the error; "" = valid
	}{
		{"zero value", Config{}, ""},
		{"restarts", Config{MaxRestarts: 3}, ""},
		{"unknown rule", Config{Restart: "onfailure"},
			`restart policy "onfailure" is unknown: use OnFailure, Never, Always or ExitCode`},
		{"negative restarts", Config{MaxRestarts: -1}, "--max-restarts=-1: need a number from 0"},
		{"Never with restarts", Config{Restart: Never, MaxRestarts: 2}, "contradicts itself"},
		{"codes without ExitCode", Config{Retryable: []CodeRange{{First: 1, Last: 1}}},
			"no effect without restart policy ExitCode"},
		{"zero is never retryable",
			Config{Restart: ExitCode, Retryable: []CodeRange{{First: 0, Last: 3}}}, "0-3"},
		{"range out of bounds", Config{Restart: ExitCode, Retryable: []CodeRange{{First: 1, Last: 256}}},
			"1-256"},
		{"range backwards", Config{Restart: ExitCode, Retryable: []CodeRange{{First: 9, Last: 3}}},
			"9-3"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.config.Validate()
			if tt.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, tt.want)
		})
	}
}

func TestShellCode(t *testing.T) {
	require.Equal(t, 137, shellCode(-9))
	require.Equal(t, 0, shellCode(0))
	require.Equal(t, 77, shellCode(77))
}

func TestParseCodes(t *testing.T) {
	got, err := ParseCodes("130, 137,200-210 , 1 - 2")
	require.NoError(t, err)
	require.Equal(t, []CodeRange{{First: 130, Last: 130}, {First: 137, Last: 137}, {First: 200, Last: 210},
		{First: 1, Last: 2}}, got)

	for in, want := range map[string]string{
		"":          "an item is empty",
		"130,,137":  "an item is empty",
		"SIGKILL":   `"SIGKILL" is neither a number nor a range`,
		"1-2-3":     `"1-2-3" is neither`,
		"-9":        `"-9" is neither`,
		"0":         "within 1 to 255",
		"250-256":   "within 1 to 255",
		"9-3":       "9-3",
		"1e2":       "neither",
		"137 or 88": "neither",
	} {
		_, err := ParseCodes(in)
		require.ErrorContains(t, err, want, "input %q", in)
		require.ErrorContains(t, err, fmt.Sprintf("%q", in))
	}
}

func FuzzParseCodes(f *testing.F) {
	for _, s := range []string{"130,137,143", "1-255", " 1 - 2 ", "", "-", "1-", "999999999999999999999", "+5"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ranges, err := ParseCodes(s)
		if err != nil {
			require.Empty(t, ranges)
			return
		}
		require.NotEmpty(t, ranges)
		require.NoError(t, Config{Restart: ExitCode, Retryable: ranges}.Validate())
	})
}

func TestReasonCodes(t *testing.T) {
	seen := map[int]Reason{}
	texts := map[string]Reason{}
	// Statuses with a meaning to schedulers, shells and other launchers.
	taken := []int{14, 93, 99, 101, 102, 126, 127, 130, 137, 138, 143, 200, 201, 202, 210}
	for _, r := range Reasons() {
		code := r.Code(ReasonCodes, OwnHardware)
		require.NotContains(t, seen, code, "%v and %v", r, seen[code])
		require.NotContains(t, texts, r.String())
		require.NotContains(t, taken, code, "%v", r)
		require.False(t, 64 <= code && code <= 78, "%v is a sysexits code", r)
		require.Less(t, code, 128, "%v", r)
		require.NotContains(t, r.String(), "reason ", "%d has no text", code)
		seen[code], texts[r.String()] = r, r
	}

	require.Equal(t, 143, Signaled(15).Code(ReasonCodes, OwnHardware))
	require.Equal(t, 1, Signaled(15).Code(TorchrunCodes, OwnHardware))
	require.Equal(t, "ended by SIGTERM", Signaled(15).String())
	require.Equal(t, "reason 163", Signaled(35).String())

	for _, p := range []CodePolicy{"", TorchrunCodes} {
		require.NoError(t, p.Validate())
		for _, r := range Reasons() {
			want := 1
			switch r {
			case Success:
				want = 0
			case Usage:
				want = 2
			}
			require.Equal(t, want, r.Code(p, OtherHardware), "%v", r)
		}
	}
	require.NoError(t, ReasonCodes.Validate())
	require.ErrorContains(t, CodePolicy("shell").Validate(),
		`exit code policy "shell" is unknown: use torchrun, reason or dlrover`)
}

// DLRover's master knows these statuses; whatever is not one of its own is 1.
func TestDLRoverCodes(t *testing.T) {
	require.NoError(t, DLRoverCodes.Validate())
	blames := []Blame{Nobody, OwnMemory, OwnHardware, OtherHardware}
	for _, r := range append(Reasons(), Signaled(1), Signaled(2), Signaled(15)) {
		want := []int{1, 247, 201, 202}
		switch r {
		case Success:
			want = []int{0, 0, 0, 0}
		case Usage:
			want = []int{2, 2, 2, 2}
		case NodeCheckFailed:
			want = []int{201, 201, 201, 201}
		case TooFewPassed:
			want = []int{202, 202, 201, 202}
		case Signaled(1), Signaled(2):
			want = []int{1, 1, 1, 1}
		case Signaled(15):
			want = []int{143, 143, 143, 143}
		}
		for i, b := range blames {
			require.Equal(t, want[i], r.Code(DLRoverCodes, b), "%v, blame %d", r, b)
		}
	}
}

func TestReasonsAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/exit-codes.md")
	require.NoError(t, err)
	ours, _, _ := strings.Cut(string(doc), "\nWith `--exit-code-policy=dlrover`")
	var listed, known []string
	for _, row := range regexp.MustCompile(`(?m)^\| (\d+) \|`).FindAllStringSubmatch(ours, -1) {
		listed = append(listed, row[1])
	}
	for _, r := range Reasons() {
		known = append(known, strconv.Itoa(int(r)))
	}
	require.Equal(t, known, listed)
}

// The statuses are an interface: this list only grows.
func TestReasonsKeepTheirCodes(t *testing.T) {
	var codes []int
	for _, r := range Reasons() {
		codes = append(codes, int(r))
	}
	require.Equal(t, []int{0, 1, 2, 10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 40, 41, 42, 43, 44, 45}, codes)
	require.Equal(t, "an operator stopped the job", OperatorStop.String())
}
