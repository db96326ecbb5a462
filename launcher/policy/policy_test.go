package policy_test

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

	"dlrover-run/launcher/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDecide(t *testing.T) {
	onFailure := policy.Config{}
	never := policy.Config{Restart: policy.Never}
	always := policy.Config{Restart: policy.Always}
	byCode := policy.Config{Restart: policy.ExitCode}
	replaced := policy.Config{
		Restart: policy.ExitCode, Retryable: []policy.CodeRange{{First: 3, Last: 5}, {First: 139, Last: 139}},
	}
	chargedRestartMe := policy.Config{Restart: policy.ExitCode, Retryable: []policy.CodeRange{{First: 138, Last: 138}}}

	for _, tt := range []struct {
		name   string
		config policy.Config
		code   int
		want   policy.Action
	}{
		{"zero config succeeds on 0", onFailure, 0, policy.Succeed},
		{"zero config restarts after 1", onFailure, 1, policy.RestartCharged},
		{"zero config restarts after a signal", onFailure, -11, policy.RestartCharged},
		{"zero config charges 138", onFailure, 138, policy.RestartCharged},
		{"OnFailure restarts after 77", policy.Config{Restart: policy.OnFailure}, 77, policy.RestartCharged},
		{"Never succeeds on 0", never, 0, policy.Succeed},
		{"Never fails on 1", never, 1, policy.Fail},
		{"Never fails on SIGKILL", never, -9, policy.Fail},
		{"Never fails on 138", never, 138, policy.Fail},
		{"Always leaves a success to the rendezvous", always, 0, policy.Succeed},
		{"Always restarts after 1", always, 1, policy.RestartCharged},
		{"ExitCode succeeds on 0", byCode, 0, policy.Succeed},
		{"ExitCode fails on 1", byCode, 1, policy.Fail},
		{"ExitCode fails on 139", byCode, 139, policy.Fail},
		{"ExitCode fails on SIGSEGV", byCode, -11, policy.Fail},
		{"ExitCode fails on SIGABRT", byCode, -6, policy.Fail},
		{"ExitCode retries 130", byCode, 130, policy.RestartCharged},
		{"ExitCode retries SIGINT", byCode, -2, policy.RestartCharged},
		{"ExitCode retries 137", byCode, 137, policy.RestartCharged},
		{"ExitCode retries SIGKILL", byCode, -9, policy.RestartCharged},
		{"ExitCode retries 143", byCode, 143, policy.RestartCharged},
		{"ExitCode retries SIGTERM", byCode, -15, policy.RestartCharged},
		{"ExitCode restarts freely after 138", byCode, 138, policy.RestartFree},
		{"ExitCode restarts freely after SIGUSR1", byCode, -10, policy.RestartFree},
		{"a list replaces the default: inside", replaced, 4, policy.RestartCharged},
		{"a list replaces the default: first", replaced, 3, policy.RestartCharged},
		{"a list replaces the default: last", replaced, 5, policy.RestartCharged},
		{"a list replaces the default: below", replaced, 2, policy.Fail},
		{"a list replaces the default: above", replaced, 6, policy.Fail},
		{"a list replaces the default: SIGSEGV by its shell code", replaced, -11, policy.RestartCharged},
		{"a list replaces the default: SIGKILL", replaced, -9, policy.Fail},
		{"a list without 138 leaves it free", replaced, 138, policy.RestartFree},
		{"a list with 138 charges it", chargedRestartMe, 138, policy.RestartCharged},
	} {
		t.Run(tt.name, func(t *testing.T) {
			require.NoError(t, tt.config.Validate())
			require.Equal(t, tt.want, tt.config.Decide(policy.Exit{Code: tt.code}))
		})
	}
}

// The largest action of a node's workers is the node's.
func TestActionsAreOrdered(t *testing.T) {
	require.True(t,
		slices.IsSorted([]policy.Action{policy.Succeed, policy.RestartFree, policy.RestartCharged, policy.Fail}))
	require.Equal(t, "restart, not charged", policy.RestartFree.String())
}

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config policy.Config
		want   string // part of the error; "" = valid
	}{
		{"zero value", policy.Config{}, ""},
		{"restarts", policy.Config{MaxRestarts: 3}, ""},
		{"unknown rule", policy.Config{Restart: "onfailure"},
			`restart policy "onfailure" is unknown: use OnFailure, Never, Always or ExitCode`},
		{"negative restarts", policy.Config{MaxRestarts: -1}, "--max-restarts=-1: need a number from 0"},
		{"Never with restarts", policy.Config{Restart: policy.Never, MaxRestarts: 2}, "contradicts itself"},
		{"codes without ExitCode", policy.Config{Retryable: []policy.CodeRange{{First: 1, Last: 1}}},
			"no effect without restart policy ExitCode"},
		{"zero is never retryable",
			policy.Config{Restart: policy.ExitCode, Retryable: []policy.CodeRange{{First: 0, Last: 3}}}, "0-3"},
		{"range out of bounds", policy.Config{Restart: policy.ExitCode, Retryable: []policy.CodeRange{{First: 1, Last: 256}}},
			"1-256"},
		{"range backwards", policy.Config{Restart: policy.ExitCode, Retryable: []policy.CodeRange{{First: 9, Last: 3}}},
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
	require.Equal(t, 137, policy.ShellCode(-9))
	require.Equal(t, 0, policy.ShellCode(0))
	require.Equal(t, 77, policy.ShellCode(77))
}

func TestParseCodes(t *testing.T) {
	got, err := policy.ParseCodes("130, 137,200-210 , 1 - 2")
	require.NoError(t, err)
	require.Equal(t, []policy.CodeRange{{First: 130, Last: 130}, {First: 137, Last: 137}, {First: 200, Last: 210},
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
		_, err := policy.ParseCodes(in)
		require.ErrorContains(t, err, want, "input %q", in)
		require.ErrorContains(t, err, fmt.Sprintf("%q", in))
	}
}

func FuzzParseCodes(f *testing.F) {
	for _, s := range []string{"130,137,143", "1-255", " 1 - 2 ", "", "-", "1-", "999999999999999999999", "+5"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ranges, err := policy.ParseCodes(s)
		if err != nil {
			require.Empty(t, ranges)
			return
		}
		require.NotEmpty(t, ranges)
		require.NoError(t, policy.Config{Restart: policy.ExitCode, Retryable: ranges}.Validate())
	})
}

func TestReasonCodes(t *testing.T) {
	seen := map[int]policy.Reason{}
	texts := map[string]policy.Reason{}
	// Statuses with a meaning to schedulers, shells and other launchers.
	taken := []int{14, 93, 99, 101, 102, 126, 127, 130, 137, 138, 143, 200, 201, 202, 210}
	for _, r := range policy.Reasons() {
		code := r.Code(policy.ReasonCodes, policy.OwnHardware)
		require.NotContains(t, seen, code, "%v and %v", r, seen[code])
		require.NotContains(t, texts, r.String())
		require.NotContains(t, taken, code, "%v", r)
		require.False(t, 64 <= code && code <= 78, "%v is a sysexits code", r)
		require.Less(t, code, 128, "%v", r)
		require.NotContains(t, r.String(), "reason ", "%d has no text", code)
		seen[code], texts[r.String()] = r, r
	}

	require.Equal(t, 143, policy.Signaled(15).Code(policy.ReasonCodes, policy.OwnHardware))
	require.Equal(t, 1, policy.Signaled(15).Code(policy.TorchrunCodes, policy.OwnHardware))
	require.Equal(t, "ended by SIGTERM", policy.Signaled(15).String())
	require.Equal(t, "reason 163", policy.Signaled(35).String())

	for _, p := range []policy.CodePolicy{"", policy.TorchrunCodes} {
		require.NoError(t, p.Validate())
		for _, r := range policy.Reasons() {
			want := 1
			switch r {
			case policy.Success:
				want = 0
			case policy.Usage:
				want = 2
			}
			require.Equal(t, want, r.Code(p, policy.OtherHardware), "%v", r)
		}
	}
	require.NoError(t, policy.ReasonCodes.Validate())
	require.ErrorContains(t, policy.CodePolicy("shell").Validate(),
		`exit code policy "shell" is unknown: use torchrun, reason or dlrover`)
}

// DLRover's master knows these statuses; whatever is not one of its own is 1.
func TestDLRoverCodes(t *testing.T) {
	require.NoError(t, policy.DLRoverCodes.Validate())
	blames := []policy.Blame{policy.Nobody, policy.OwnMemory, policy.OwnHardware, policy.OtherHardware}
	for _, r := range append(policy.Reasons(), policy.Signaled(1), policy.Signaled(2), policy.Signaled(15)) {
		want := []int{1, 247, 201, 202}
		switch r {
		case policy.Success:
			want = []int{0, 0, 0, 0}
		case policy.Usage:
			want = []int{2, 2, 2, 2}
		case policy.NodeCheckFailed:
			want = []int{201, 201, 201, 201}
		case policy.TooFewPassed:
			want = []int{202, 202, 201, 202}
		case policy.Signaled(1), policy.Signaled(2):
			want = []int{1, 1, 1, 1}
		case policy.Signaled(15):
			want = []int{143, 143, 143, 143}
		}
		for i, b := range blames {
			require.Equal(t, want[i], r.Code(policy.DLRoverCodes, b), "%v, blame %d", r, b)
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
	for _, r := range policy.Reasons() {
		known = append(known, strconv.Itoa(int(r)))
	}
	require.Equal(t, known, listed)
}

// The statuses are an interface: this list only grows.
func TestReasonsKeepTheirCodes(t *testing.T) {
	var codes []int
	for _, r := range policy.Reasons() {
		codes = append(codes, int(r))
	}
	require.Equal(t, []int{0, 1, 2, 10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 40, 41, 42, 43, 44, 45}, codes)
	require.Equal(t, "an operator stopped the job", policy.OperatorStop.String())
}
