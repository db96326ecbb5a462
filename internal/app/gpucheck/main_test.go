package gpucheck

import (
	"bytes"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox"
)

func TestParse(t *testing.T) {
	pair := func(a, b int) switchbox.Pair { return switchbox.Pair{A: a, B: b} }
	for _, c := range []struct {
		args []string
		want options
	}{
		{nil, options{level: links, timeout: 20 * time.Second}},
		{[]string{"--json", "--level=inventory"}, options{json: true, level: inventory, timeout: 20 * time.Second}},
		{
			[]string{"--pairs", "0:1", "2:3,4:5", "--json", "-timeout", "3s"},
			options{
				level: copies, json: true, timeout: 3 * time.Second, pairs: []switchbox.Pair{pair(0, 1), pair(2, 3), pair(4, 5)},
				limits: switchbox.Limits{Given: true},
			},
		},
		{[]string{"--timeout=60"}, options{level: links, timeout: time.Minute}},
		{[]string{"--timeout=60s"}, options{level: links, timeout: time.Minute}},
		{[]string{"--timeout=2m"}, options{level: links, timeout: 2 * time.Minute}},
		{
			[]string{"--box-pairs=0:1 2:3", "--min-bandwidth=1e4", "--min-channels=2"},
			options{
				level: copies, timeout: 20 * time.Second, pairs: []switchbox.Pair{pair(0, 1), pair(2, 3)},
				limits: switchbox.Limits{Given: true, MinBandwidth: 10000, MinChannels: 2},
			},
		},
		{
			[]string{"--pairs", "ring", "--min-channels=9"},
			options{level: copies, timeout: 20 * time.Second, limits: switchbox.Limits{Ring: true, MinChannels: 9}},
		},
	} {
		got, err := parse(c.args, io.Discard)
		require.NoError(t, err, c.args)
		require.Equal(t, c.want, got)
	}
}

func TestUsageErrors(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--level=all"}, "need inventory, links or copy"},
		{[]string{"--pairs=0-1"}, `"0-1" is not a pair of devices such as 0:1`},
		{[]string{"what"}, `"what" is not a pair`},
		{[]string{"--pairs=0:0"}, "0:0 names one device twice"},
		{[]string{"--pairs=0:1", "--min-channels=2"}, "--min-channels=2 is more than the 1 pairs"},
		{[]string{"--pairs=ring,0:1"}, "--pairs has ring beside 0:1: ring is all pairs there are"},
		{[]string{"--timeout=0"}, "need 1s to 1h"},
		{[]string{"--nonsense"}, "flag provided but not defined: -nonsense"},
	} {
		var stdout, stderr bytes.Buffer
		require.Equal(t, exitUsage, run(c.args, &stdout, &stderr, drivers{}, nil), c.args)
		require.Contains(t, stderr.String(), "gpucheck: ")
		require.Contains(t, stderr.String(), c.want)
		require.Empty(t, stdout.String())
	}
}

func TestHelpAndVersion(t *testing.T) {
	for arg, want := range map[string]string{"--help": "-min-bandwidth", "--version": "gpucheck dev"} {
		var stdout bytes.Buffer
		require.Equal(t, exitOK, run([]string{arg}, &stdout, io.Discard, drivers{}, nil))
		require.Contains(t, stdout.String(), want)
	}
}

func TestRoundsHaveNoGPUTwice(t *testing.T) {
	for n := 2; n <= 9; n++ {
		var all []switchbox.Pair
		for a := range n {
			for b := range a {
				all = append(all, switchbox.Pair{A: a, B: b})
			}
		}
		total := 0
		for _, round := range rounds(all) {
			total += len(round)
			require.Len(t, members(round), 2*len(round))
		}
		require.Equal(t, len(all), total)
	}
	require.Len(t, rounds(switchbox.Ring([]int{0, 1, 2, 3, 4, 5, 6, 7})), 2)
}
