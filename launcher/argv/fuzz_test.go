package argv

import (
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func FuzzNormalize(f *testing.F) {
	for _, seed := range []string{
		"train.py", "--nnodes\n2\ns\n--x", "-mr3\ns\n--\n--a", "--\n--\ns", "-r=3\n-t\n\ns", "--box-pairs\n0:1\n2:4\ns",
		"--monitor-interval=nan\ns", "--max-r\n-1\n-.5", "--=\n-=\n---\n-", "--nope\n-h", "--nnodes 4\ns",
		"-\x00\ns", "\xff\n--role=\xff\ns",
	} {
		f.Add(seed, "1")
	}
	opts := available()
	f.Fuzz(func(t *testing.T, line, variable string) {
		argv := strings.Split(line, "\n")
		before := slices.Clone(argv)
		env := lookup(map[string]string{"PET_NNODES": variable, "PET_STANDALONE": variable, "PET_MAX_RESTARTS": variable,
			"PET_MONITOR_INTERVAL": variable})
		for _, env := range []LookupEnv{nil, env} {
			got, err := Normalize(opts, argv, env)
			require.Equal(t, before, argv, "argv is the caller's")
			if err != nil {
				continue
			}
			end := slices.Index(got, "--")
			for _, token := range got[:end] {
				require.Regexp(t, `^--[a-z-]+(=|$)`, token)
			}
			script, args := got[end+1], got[end+2:]
			require.Equal(t, argv[len(argv)-len(args):], args, "the script's arguments are the end of the line")
			require.Contains(t, argv[:len(argv)-len(args)], script)
			again, err := Normalize(opts, got, env)
			require.NoError(t, err)
			require.Equal(t, got, again)
		}
	})
}

func FuzzParseNNodes(f *testing.F) {
	addAll(f, "1", "2:8", "1:2:3", " 1 : 2 ", "-1", "0:1", "x", "")
	f.Fuzz(func(t *testing.T, s string) {
		low, high, err := ParseNNodes(s)
		if err != nil {
			return
		}
		require.True(t, 0 < low && low <= high && high <= MaxNodes)
		low2, high2, err := ParseNNodes(strconv.Itoa(low) + ":" + strconv.Itoa(high))
		require.NoError(t, err)
		require.Equal(t, [2]int{low, high}, [2]int{low2, high2})
	})
}

func FuzzParseConf(f *testing.F) {
	addAll(f, "", "a=1", " a = 1 , b=2=3", "'a=1,b=2'", "a", "=1", "a=", "a=1,", `"`, "''")
	f.Fuzz(func(t *testing.T, s string) {
		conf, err := ParseConf(s)
		if err != nil {
			return
		}
		for k, v := range conf {
			require.NotEmpty(t, k)
			require.NotEmpty(t, v)
			require.Equal(t, strings.TrimSpace(k)+strings.TrimSpace(v), k+v)
			require.NotContains(t, k, "=")
		}
	})
}

func FuzzParseStd(f *testing.F) {
	addAll(f, "0", "3", "4", "0:1,1:3", "10:2", "0:1,", ":1", "0:", "+1:1", "99999999999999999999:1")
	grammar := regexp.MustCompile(`^([0-3]|([0-9]{1,9}:[0-3],)*[0-9]{1,9}:[0-3])$`)
	f.Fuzz(func(t *testing.T, s string) {
		m, err := ParseStd("--tee", s)
		if grammar.MatchString(s) {
			require.NoError(t, err)
		}
		for _, rank := range []int{-1, 0, 9, 1 << 20} {
			require.True(t, m.For(rank) >= stdNone && m.For(rank) <= stdBoth)
		}
	})
}

func FuzzParseSignals(f *testing.F) {
	addAll(f, "SIGTERM,SIGINT", "", "SIGFOO", " SIGUSR1 ,SIGUSR1", "SIGKILL", "SIGRTMIN,SIGRTMAX")
	f.Fuzz(func(t *testing.T, s string) {
		signals, warnings, err := ParseSignals(s)
		if err == nil {
			require.NotZero(t, len(signals)+len(warnings))
			require.LessOrEqual(t, len(signals)+len(warnings), 1+strings.Count(s, ","))
		}
		require.NotContains(t, signals, 0)
	})
}

func FuzzParseRanks(f *testing.F) {
	addAll(f, "", "0,1,2", " 1 ,-1", "a", "0,")
	f.Fuzz(func(t *testing.T, s string) {
		ranks, err := ParseRanks(s)
		if err == nil {
			require.Equal(t, s == "", ranks == nil)
			require.LessOrEqual(t, len(ranks), 1+strings.Count(s, ","))
		}
	})
}

func FuzzParseFilters(f *testing.F) {
	addAll(f, "", "a", "a,b", "a,,b", ",", ",,,", "a,")
	f.Fuzz(func(t *testing.T, s string) {
		filters := ParseFilters(s)
		for i := range filters {
			filters[i] = strings.ReplaceAll(filters[i], ",", ",,")
		}
		if !strings.Contains(s, "\x00") {
			require.Equal(t, s, strings.Join(filters, ","))
		}
	})
}

func FuzzParsePairs(f *testing.F) {
	addAll(f, "0:1", "0:1,2:4 3:5", "1:1", "a:b", "", "0:1:2", "99999999999999999999:1")
	f.Fuzz(func(t *testing.T, s string) {
		pairs, err := ParsePairs([]string{s})
		if err != nil {
			return
		}
		require.NotEmpty(t, pairs)
		for _, p := range pairs {
			require.True(t, p[0] >= 0 && p[1] >= 0 && p[0] != p[1])
		}
	})
}

func FuzzParseSize(f *testing.F) {
	addAll(f, "", "0", "4096", "64K", "10m", "1G", "K", "-1", "1.5G", "8589934592G", "9223372036854775807")
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseSize(s)
		require.GreaterOrEqual(t, n, int64(0))
		if err == nil {
			again, err := ParseSize(strconv.FormatInt(n, 10))
			require.NoError(t, err)
			require.Equal(t, n, again)
		}
	})
}

func FuzzParseEndpoint(f *testing.F) {
	addAll(f, "", "host", "host:29400", "[::1]:1", "[::1]", "::1", "fd00::1:99", "host:", ":1", "host:65536", "a b:1",
		"[", "[]")
	f.Fuzz(func(t *testing.T, s string) {
		host, port, err := ParseEndpoint(s, 29400)
		if err != nil {
			return
		}
		require.True(t, port >= 0 && port <= 65535)
		joined := net.JoinHostPort(host, strconv.Itoa(port))
		host2, port2, err := ParseEndpoint(joined, 0)
		require.NoError(t, err)
		require.Equal(t, joined, net.JoinHostPort(host2, strconv.Itoa(port2)))
	})
}

func FuzzSubstituteLocalRank(f *testing.F) {
	addAll(f, "", "${local_rank}", "$local_rank", "$$", "$", "$$$local_rank", "${local_rank", "$local_rankx",
		"${x}$local_rank}", "$LOCAL_RANK")
	macro := regexp.MustCompile(`\$(\$|[_a-zA-Z][_a-zA-Z0-9]*|\{[_a-zA-Z][_a-zA-Z0-9]*\}|)`)
	values := map[string]string{"$$": "$", "$local_rank": "7", "${local_rank}": "7"}
	f.Fuzz(func(t *testing.T, s string) {
		want := macro.ReplaceAllStringFunc(s, func(m string) string {
			if v, ok := values[m]; ok {
				return v
			}
			return m
		})
		require.Equal(t, want, SubstituteLocalRank(s, 7))
	})
}

func addAll(f *testing.F, seeds ...string) {
	for _, s := range seeds {
		f.Add(s)
	}
}
