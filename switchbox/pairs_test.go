package switchbox_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox"
)

// guide are the pairs of the user guide.
var guide = []switchbox.Pair{{A: 0, B: 1}, {A: 2, B: 4}, {A: 3, B: 5}, {A: 6, B: 7}}

func measured(rates ...float64) (ms []switchbox.Measurement) {
	for i, r := range rates {
		ms = append(ms, switchbox.Measurement{Pair: guide[i], MBps: r})
	}
	return ms
}

// need are limits of 10000 MB/s.
func need(channels int) switchbox.Limits {
	return switchbox.Limits{MinBandwidth: 10000, MinChannels: channels}
}

func TestJudgePairs(t *testing.T) {
	for name, c := range map[string]struct {
		measured []switchbox.Measurement
		limits   switchbox.Limits
		state    switchbox.State
		reason   string
		findings []string
	}{
		"exactly the minimum passes": {measured(10000, 10000, 10000, 10000), need(4),
			switchbox.OK, "4 of 4 pairs reach 10000 MB/s; 4 must", []string{
				"info gpu.copy: pair 0:1 reaches 10000 MB/s", "info gpu.copy: pair 2:4 reaches 10000 MB/s",
				"info gpu.copy: pair 3:5 reaches 10000 MB/s", "info gpu.copy: pair 6:7 reaches 10000 MB/s",
			}},
		"just below is a fault": {measured(9999.99, 20000, 0, 30000), need(3),
			switchbox.Faulty, "2 of 4 pairs reach 10000 MB/s (not 0:1, 3:5); 3 must", []string{
				"warn gpu.copy: pair 0:1 reaches 9999.9 MB/s, less than 10000 MB/s", "info gpu.copy: pair 2:4 reaches 20000 MB/s",
				"warn gpu.copy: pair 3:5 reaches 0 MB/s, less than 10000 MB/s", "info gpu.copy: pair 6:7 reaches 30000 MB/s",
				"fatal gpu.copy: 2 of 4 pairs reach 10000 MB/s (not 0:1, 3:5); 3 must",
			}},
		"failed pairs are told when enough pass": {measured(1, 20000, 2, 30000), need(2),
			switchbox.OK, "2 of 4 pairs reach 10000 MB/s (not 0:1, 3:5); 2 must", []string{
				"warn gpu.copy: pair 0:1 reaches 1 MB/s, less than 10000 MB/s", "info gpu.copy: pair 2:4 reaches 20000 MB/s",
				"warn gpu.copy: pair 3:5 reaches 2 MB/s, less than 10000 MB/s", "info gpu.copy: pair 6:7 reaches 30000 MB/s",
			}},
		"devices are missing, enough are left": {measured(20000, 20000), need(2),
			switchbox.OK, "2 of 2 pairs reach 10000 MB/s; 2 must", []string{
				"info gpu.copy: pair 0:1 reaches 20000 MB/s", "info gpu.copy: pair 2:4 reaches 20000 MB/s",
				"info gpu.copy: pair 3:5 is skipped: a device of it is not on this node",
				"info gpu.copy: pair 6:7 is skipped: a device of it is not on this node",
			}},
		"too few are left": {measured(1), need(2),
			switchbox.Skipped, "1 of 4 pairs have both devices on this node, and 2 must pass", []string{
				"warn gpu.copy: pair 0:1 reaches 1 MB/s, less than 10000 MB/s",
				"info gpu.copy: pair 2:4 is skipped: a device of it is not on this node",
				"info gpu.copy: pair 3:5 is skipped: a device of it is not on this node",
				"info gpu.copy: pair 6:7 is skipped: a device of it is not on this node",
			}},
		"none must pass": {measured(1, 1, 1, 1), need(0),
			switchbox.OK, "0 of 4 pairs reach 10000 MB/s (not 0:1, 2:4, 3:5, 6:7); 0 must", nil},
		"an error counts as failed": {[]switchbox.Measurement{
			{Pair: guide[0], MBps: 50000, Error: "data arrived damaged"}, {Pair: guide[1], MBps: math.NaN()},
			{Pair: guide[2], MBps: 5, There: 5, Back: 9}, {Pair: guide[3], MBps: 10, There: 10, Back: 12},
		}, switchbox.Limits{MinBandwidth: 10, MinChannels: 2},
			switchbox.Faulty, "1 of 4 pairs reach 10 MB/s (not 0:1, 2:4, 3:5); 2 must", []string{
				"warn gpu.copy: pair 0:1: data arrived damaged", "warn gpu.copy: pair 2:4 reaches NaN MB/s, less than 10 MB/s",
				"warn gpu.copy: pair 3:5 reaches 5 MB/s, less than 10 MB/s (3 to 5: 5 MB/s, back: 9 MB/s)",
				"info gpu.copy: pair 6:7 reaches 10 MB/s (6 to 7: 10 MB/s, back: 12 MB/s)",
				"fatal gpu.copy: 1 of 4 pairs reach 10 MB/s (not 0:1, 2:4, 3:5); 2 must",
			}},
	} {
		t.Run(name, func(t *testing.T) {
			state, reason, findings, err := switchbox.JudgePairs(guide, c.measured, c.limits)
			require.NoError(t, err)
			require.Equal(t, c.state, state)
			require.Equal(t, c.reason, reason)
			if c.findings != nil {
				require.Equal(t, c.findings, told(findings))
			}
		})
	}
}

func TestPairFindingsCarryTheFigures(t *testing.T) {
	limits := switchbox.Limits{MinBandwidth: 2, MinChannels: 2}
	_, _, findings, err := switchbox.JudgePairs(guide, measured(1, 2, 4, 5), limits)
	require.NoError(t, err)
	require.Equal(t, switchbox.Finding{
		Check: "switchbox", Kind: "gpu.copy", Severity: switchbox.Warn, Entity: "0:1", Metric: "bandwidth", Value: 1,
		Unit: "MB/s", Threshold: 2, Median: 3, Text: "pair 0:1 reaches 1 MB/s, less than 2 MB/s",
	}, findings[0])
}

func TestCheckPairs(t *testing.T) {
	many := make([]switchbox.Pair, switchbox.MaxPairs+1)
	for i := range many {
		many[i] = switchbox.Pair{A: 2 * i, B: 2*i + 1}
	}
	for name, c := range map[string]struct {
		pairs  []switchbox.Pair
		limits switchbox.Limits
		want   string
	}{
		"none": {nil, switchbox.Limits{}, "--box-pairs names no pair; write 0:1,2:4, or ring"},
		"itself": {[]switchbox.Pair{{A: 3, B: 3}}, switchbox.Limits{},
			"--box-pairs: 3:3 names one device twice; a pair is two devices, as in 0:1"},
		"twice": {[]switchbox.Pair{{A: 0, B: 1}, {A: 1, B: 0}}, switchbox.Limits{},
			"--box-pairs: 1:0 is there twice; name every pair once"},
		"too many": {guide, switchbox.Limits{MinChannels: 5},
			"--min-channels=5 is more than the 4 pairs that are tested; name more in --box-pairs, or ask for fewer"},
		"negative":   {guide, switchbox.Limits{MinChannels: -1}, "--min-channels=-1: need a number of pairs from 0"},
		"below zero": {guide, switchbox.Limits{MinBandwidth: -2}, "--min-bandwidth=-2: need a number of MB/s from 0"},
		"no number": {guide, switchbox.Limits{MinBandwidth: math.NaN()},
			"--min-bandwidth=NaN: need a number of MB/s from 0"},
		"too long": {many, switchbox.Limits{}, "--box-pairs names 513 pairs; at most 512 can be tested"},
	} {
		t.Run(name, func(t *testing.T) {
			require.EqualError(t, switchbox.CheckPairs(c.pairs, c.limits), c.want)
			_, _, _, err := switchbox.JudgePairs(c.pairs, nil, c.limits)
			require.EqualError(t, err, c.want)
		})
	}
	require.NoError(t, switchbox.CheckPairs(guide, need(4)))
	require.NoError(t, switchbox.CheckPairs(nil, switchbox.Limits{Ring: true, MinChannels: 9}), "not known yet")
}

// A pair that fails is named in the verdict wherever it stands; of very many the first ones are.
func TestReasonNamesPairs(t *testing.T) {
	for i := range guide {
		rates := []float64{20000, 20000, 20000, 20000}
		rates[i] = 1
		_, reason, _, err := switchbox.JudgePairs(guide, measured(rates...), need(2))
		require.NoError(t, err)
		require.Equal(t, "3 of 4 pairs reach 10000 MB/s (not "+guide[i].String()+"); 2 must", reason)
	}
	ring := switchbox.Ring([]int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	var ms []switchbox.Measurement
	for _, p := range ring {
		ms = append(ms, switchbox.Measurement{Pair: p})
	}
	_, reason, _, err := switchbox.JudgePairs(ring, ms, need(1))
	require.NoError(t, err)
	require.Contains(t, reason, " (not 0:1, 1:2, 2:3, 3:4, 4:5, 5:6, 6:7, 7:8 and 2 more); 1 must")
}

func pairs(ps []switchbox.Pair) string { return strings.Trim(fmt.Sprint(ps), "[]") }

func TestRing(t *testing.T) {
	for want, found := range map[string][]int{
		"": {0}, "0:1": {0, 1}, "0:1 1:2 2:0": {0, 1, 2}, "0:1 1:2 2:5 5:0": {0, 1, 2, 5},
	} {
		require.Equal(t, want, pairs(switchbox.Ring(found)))
	}
}

func TestRest(t *testing.T) {
	require.Equal(t, guide, switchbox.DefaultPairs)
	for n, want := range []string{
		"", "", "0:1", "0:1 0:2", "0:1 2:3", "0:1 2:4 0:3", "0:1 2:4 3:5", "0:1 2:4 3:5 0:6", "0:1 2:4 3:5 6:7",
		"0:1 2:4 3:5 6:7 0:8", "0:1 2:4 3:5 6:7 8:9", "0:1 2:4 3:5 6:7 8:9 0:10",
	} {
		var found []int
		for i := range n {
			found = append(found, i)
		}
		have, _, err := switchbox.SelectPairs(guide, found, false)
		require.NoError(t, err)
		all := append(have, switchbox.Rest(have, found)...)
		require.Equal(t, want, pairs(all))
		if n > 1 {
			require.Empty(t, switchbox.Untested(all, found))
			require.NoError(t, switchbox.CheckPairs(all, switchbox.Limits{}))
		}
	}
	require.Equal(t, "1:3 1:7", pairs(switchbox.Rest(nil, []int{1, 3, 7})))
	require.Equal(t, "0:2", pairs(switchbox.Rest(guide[1:], []int{0, 2, 3, 4, 5, 6, 7})), "its partner is gone")
	require.Equal(t, "there are 8 pairs of devices on this node, and 9 must pass", switchbox.TooFew(8, 8, 9))
}

func TestSelectPairs(t *testing.T) {
	have, missing, err := switchbox.SelectPairs(guide, []int{4, 2, 1, 0, 3}, false)
	require.NoError(t, err)
	require.Equal(t, guide[:2], have)
	require.Equal(t, guide[2:], missing)

	_, _, err = switchbox.SelectPairs(guide, []int{4, 2, 1, 0, 3}, true)
	require.EqualError(t, err, "--box-pairs: 3:5 names a device that is not here; this node has 0, 1, 2, 3, 4")
	_, _, err = switchbox.SelectPairs(guide, nil, true)
	require.EqualError(t, err, "--box-pairs: 0:1 names a device that is not here; this node has none")
	have, _, err = switchbox.SelectPairs(guide[:1], []int{0, 1}, true)
	require.NoError(t, err)
	require.Equal(t, guide[:1], have)
}

func TestPairAsText(t *testing.T) {
	text, err := json.Marshal(guide)
	require.NoError(t, err)
	require.Equal(t, `["0:1","2:4","3:5","6:7"]`, string(text))
	var back []switchbox.Pair
	require.NoError(t, json.Unmarshal(text, &back))
	require.Equal(t, guide, back)
	for _, bad := range []string{"", "1", "1:", ":1", "1:2:3", "-1:2", "a:b", "1: 2", "1:99999"} {
		require.Error(t, new(switchbox.Pair).UnmarshalText([]byte(bad)), bad)
	}
}
