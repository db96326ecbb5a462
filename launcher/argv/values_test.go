package argv

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseNNodes(t *testing.T) {
	for _, tc := range []struct {
		in        string
		low, high int
		err       string
	}{
		{in: "1", low: 1, high: 1},
		{in: "2:8", low: 2, high: 8},
		{in: " 2 : 0_8 ", low: 2, high: 8},
		{in: "100000", low: 100000, high: 100000},
		{in: "1:2:3", err: `--nnodes: nnodes=1:2:3 is not in "MIN:MAX" format; write 4 or 2:8`},
		{in: "two", err: "--nnodes: 'two' is not a number of nodes; write 4 or 2:8"},
		{in: "", err: "--nnodes: '' is not a number"},
		{in: "2:", err: "--nnodes: '2:' is not a number"},
		{in: "99999999999999999999", err: "is not a number of nodes"},
		{in: "0", err: "--nnodes: '0' breaks 0 < MIN <= MAX <= 100000; write 4 or 2:8"},
		{in: "-1", err: "breaks 0 < MIN"},
		{in: "3:2", err: "breaks 0 < MIN"},
		{in: "1:100001", err: "breaks 0 < MIN"},
	} {
		low, high, err := ParseNNodes(tc.in)
		requireError(t, tc.err, err, tc.in)
		require.Equal(t, [2]int{tc.low, tc.high}, [2]int{low, high}, tc.in)
	}
}

func TestParseConf(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want map[string]string
		err  string
	}{
		{in: "", want: map[string]string{}},
		{in: "  ", want: map[string]string{}},
		{in: "''", want: map[string]string{}},
		{in: "a=1", want: map[string]string{"a": "1"}},
		{in: " a = 1 , b=x=y ", want: map[string]string{"a": "1", "b": "x=y"}},
		{in: "a=1,a=2", want: map[string]string{"a": "2"}},
		{in: "'join_timeout=5,timeout=6'", want: map[string]string{"join_timeout": "5", "timeout": "6"}},
		{in: `"a=1"`, want: map[string]string{"a": "1"}},
		{in: "'a=1", want: map[string]string{"'a": "1"}},
		{
			in: "a=1,",
			err: "--rdzv-conf: 'a=1,': The rendezvous configuration string must be in format " +
				"<key1>=<value1>,...,<keyN>=<valueN>",
		},
		{in: "=1", err: "must be in format"},
		{in: "a",
			err: "--rdzv-conf: 'a': The rendezvous configuration option 'a' must have a value specified; write a=VALUE"},
		{in: "a= ,b=1", err: "option 'a' must have a value"},
	} {
		got, err := ParseConf(tc.in)
		requireError(t, tc.err, err, tc.in)
		require.Equal(t, tc.want, got, tc.in)
	}
}

func TestParseStd(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want []std // local ranks 0, 1, 12
		err  string
	}{
		{in: "0", want: []std{stdNone, stdNone, stdNone}},
		{in: "3", want: []std{stdBoth, stdBoth, stdBoth}},
		{in: "1:2", want: []std{stdNone, stdErr, stdNone}},
		{in: "0:1,1:3,12:2", want: []std{stdOut, stdBoth, stdErr}},
		{in: "0:1,0:0", want: []std{stdNone, stdNone, stdNone}},
		{in: "4", err: `--tee: 4 does not match: <^[0123]$> or <^(\d+:[0123],)*(\d+:[0123])$>; ` +
			"write 3 or 0:3,1:2 (0 none, 1 stdout, 2 stderr, 3 both)"},
		{in: "", err: "does not match"},
		{in: "0:4", err: "does not match"},
		{in: "0:1,", err: "does not match"},
		{in: "+1:1", err: "does not match"},
		{in: "0:1:2", err: "does not match"},
		{in: " 1", err: "does not match"},
	} {
		m, err := ParseStd("--tee", tc.in)
		requireError(t, tc.err, err, tc.in)
		if err == nil {
			require.Equal(t, tc.want, []std{m.For(0), m.For(1), m.For(12)}, tc.in)
		}
	}
	require.Equal(t, stdNone, StdMap{}.For(0), "the zero value")
}

func TestParseSignals(t *testing.T) {
	for _, tc := range []struct {
		in       string
		want     []syscall.Signal
		warnings []string
		err      string
	}{
		{in: "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
			want: []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT}},
		{in: " SIGUSR1 ,SIGUSR2,SIGUSR1", want: []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2}},
		{in: "SIGPOLL,SIGIOT,SIGRTMIN,SIGRTMAX", want: []syscall.Signal{syscall.SIGIO, syscall.SIGABRT, 34, 64}},
		{in: "SIGTERM,sigint", want: []syscall.Signal{syscall.SIGTERM},
			warnings: []string{"--signals-to-handle: no signal 'sigint' on this system; ignored"}},
		{in: "", warnings: []string{"--signals-to-handle: no signal '' on this system; ignored"}},
		{in: "SIGTERM,SIGKILL", err: "--signals-to-handle: SIGKILL cannot be caught by any process; remove it"},
		{in: "SIGSTOP", err: "SIGSTOP cannot be caught"},
		{in: "SIGURG", err: "SIGURG is used by the launcher itself"},
		{in: "SIGCLD", err: "SIGCLD is used by the launcher itself"},
	} {
		signals, warnings, err := ParseSignals(tc.in)
		requireError(t, tc.err, err, tc.in)
		require.Equal(t, tc.want, signals, tc.in)
		require.Equal(t, tc.warnings, warnings, tc.in)
	}
}

func TestParseRanks(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want map[int]bool
		err  string
	}{
		{in: ""},
		{in: "0", want: map[int]bool{0: true}},
		{in: "0, 12 ,0", want: map[int]bool{0: true, 12: true}},
		{in: "-1", want: map[int]bool{-1: true}},
		{in: "0,a",
			err: "--local-ranks-filter: '0,a' must be a comma-separated list of integers e.g. --local-ranks-filter=0,1,2"},
		{in: "0,", err: "must be a comma-separated list"},
	} {
		got, err := ParseRanks(tc.in)
		requireError(t, tc.err, err, tc.in)
		require.Equal(t, tc.want, got, tc.in)
	}
}

func TestParseFilters(t *testing.T) {
	for in, want := range map[string][]string{
		"":             nil,
		"apple":        {"apple"},
		"apple,orange": {"apple", "orange"},
		"a,,b,c":       {"a,b", "c"},
		",,,":          {",", ""},
		"a,":           {"a", ""},
		" a , b ":      {" a ", " b "},
	} {
		require.Equal(t, want, ParseFilters(in), in)
	}
}

func TestParsePairs(t *testing.T) {
	for _, tc := range []struct {
		in   []string
		want [][2]int
		err  string
	}{
		{},
		{in: []string{"0:1"}, want: [][2]int{{0, 1}}},
		{in: []string{"0:1,2:4", "3:5 6:7"}, want: [][2]int{{0, 1}, {2, 4}, {3, 5}, {6, 7}}},
		{in: []string{"0-1"}, err: "--box-pairs: '0-1' is not a list of device pairs; write 0:1,2:4"},
		{in: []string{""}, err: "is not a list"},
		{in: []string{"ring,0:1"}, err: "is not a list of device pairs; write 0:1,2:4, or ring alone"},
		{in: []string{"0:1:2"}, err: "is not a list"},
		{in: []string{"0:1,2:2"}, err: "--box-pairs: '2:2' does not name two different devices; write 0:1,2:4"},
		{in: []string{"0:99999999999999999999"}, err: "does not name two"},
	} {
		got, err := ParsePairs(tc.in)
		requireError(t, tc.err, err, tc.in)
		require.Equal(t, tc.want, got, tc.in)
	}
}

func TestParseSize(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want int64
		err  string
	}{
		{in: "", want: 0},
		{in: "0", want: 0},
		{in: "4096", want: 4096},
		{in: "64K", want: 64 << 10},
		{in: "10m", want: 10 << 20},
		{in: "1G", want: 1 << 30},
		{in: "8589934591G", want: 8589934591 << 30},
		{in: "8589934592G", err: "size '8589934592G' is more than 64 bits hold; write a smaller one"},
		{in: "9223372036854775808", err: "more than 64 bits"},
		{in: "K", err: "size 'K' is not a whole number of bytes; write 4096, 64K, 10M or 1G"},
		{in: "1.5G", err: "not a whole number"},
		{in: "-1", err: "not a whole number"},
		{in: "10MB", err: "not a whole number"},
		{in: "10 M", err: "not a whole number"},
		{in: "1\x0b", err: "not a whole number"},
	} {
		got, err := ParseSize(tc.in)
		requireError(t, tc.err, err, tc.in)
		require.Equal(t, tc.want, got, tc.in)
	}
}

func TestParseEndpoint(t *testing.T) {
	for _, tc := range []struct {
		in, host string
		port     int
		err      string
	}{
		{in: "", host: "localhost", port: 29400},
		{in: " node-1.example_x ", host: "node-1.example_x", port: 29400},
		{in: "node:1", host: "node", port: 1},
		{in: "localhost:0", host: "localhost", port: 0},
		{in: "10.0.0.1:65535", host: "10.0.0.1", port: 65535},
		{in: "[::1]:7", host: "::1", port: 7},
		{in: "[::1]", host: "::1", port: 29400},
		{in: "::1", host: "::1", port: 29400},
		{in: "fe80::1", host: "fe80::1", port: 29400},
		{in: "1:2:3:4:5:6:7:8", host: "1:2:3:4:5:6:7:8", port: 29400},
		{in: "fd00::1:29500", host: "fd00::1", port: 29500},
		{in: "fd00::1:99", host: "fd00::1", port: 99}, // torchrun's reading of the ambiguous form
		{
			in: "node:65536",
			err: "--rdzv-endpoint: The port number of the rendezvous endpoint 'node:65536' must be an integer between 0 and " +
				"65535; write host:29400",
		},
		{in: "node:", err: "The port number"},
		{in: "node:x", err: "The port number"},
		{in: "node:000001", err: "The port number"},
		{in: ":1",
			err: "--rdzv-endpoint: The hostname of the rendezvous endpoint ':1' must be a dot-separated list of labels, " +
				"an IPv4 address, or an IPv6 address; write host:29400 or [::1]:29400"},
		{in: "a b", err: "The hostname"},
		{in: "tcp://node:1", err: "The hostname"},
		{in: "[]", err: "The hostname"},
		{in: "[", err: "The hostname"},
	} {
		host, port, err := ParseEndpoint(tc.in, 29400)
		requireError(t, tc.err, err, tc.in)
		require.Equal(t, tc.host, host, tc.in)
		require.Equal(t, tc.port, port, tc.in)
	}
}

func TestSubstituteLocalRank(t *testing.T) {
	for in, want := range map[string]string{
		"":                           "",
		"plain":                      "plain",
		"--r=${local_rank}":          "--r=7",
		"$local_rank/$local_rank":    "7/7",
		"$local_ranks":               "$local_ranks",
		"$$":                         "$",
		"$$$$local_rank":             "$$local_rank",
		"$$${local_rank}":            "$7",
		"${rank} $HOME ${local_rank": "${rank} $HOME ${local_rank",
		"$":                          "$",
		"$LOCAL_RANK":                "$LOCAL_RANK",
		"${ local_rank }":            "${ local_rank }",
		"$é${local_rank}":            "$é7",
	} {
		require.Equal(t, want, SubstituteLocalRank(in, 7), in)
	}
}

// requireError checks for an error whose text contains want, or for none if want is empty.
func requireError(t *testing.T, want string, err error, msg any) {
	t.Helper()
	if want == "" {
		require.NoError(t, err, msg)
		return
	}
	require.ErrorContains(t, err, want, msg)
}
