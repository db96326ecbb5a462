package switchbox_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox"
	"dlrover-run/switchbox/fake"
)

// report is one with something in every field.
func report(spoil func(g []*fake.GPU)) switchbox.Report {
	box := fake.Box(8)
	for _, g := range box {
		g.Switches.Cluster, g.Switches.Clique = "6c6f6e67-0000-0000-0000-000000000001", 3
	}
	if spoil != nil {
		spoil(box)
	}
	facts := switchbox.Read(fake.Devices(box), nil)
	r := switchbox.Report{Adaptor: "nvml", Driver: "590.1", Devices: facts, Findings: switchbox.Judge(facts)}
	r.Pairs = measured(20000, 20000, 20000, 1)
	_, reason, findings, _ := switchbox.JudgePairs(guide, r.Pairs, switchbox.Limits{MinBandwidth: 10000, MinChannels: 2})
	r.Reason, r.Findings = reason, append(r.Findings, findings...)
	r.Conclude()
	return r
}

func TestAReportComesBackAsItWas(t *testing.T) {
	for _, r := range []switchbox.Report{report(nil), report(func(g []*fake.GPU) {
		g[7].Action = switchbox.RecoverReset
		g[6].Lose(switchbox.ErrLost)
		g[5].Mem.Users = []switchbox.User{{PID: 1, Name: "x"}}
	}), switchbox.Skip("metax", "no such tool:\n/opt/x")} {
		text, err := json.Marshal(r)
		require.NoError(t, err)
		back, err := switchbox.ParseReport(text)
		require.NoError(t, err)
		again, err := json.Marshal(back)
		require.NoError(t, err)
		require.Equal(t, string(text), string(again))
	}
}

func TestConclude(t *testing.T) {
	r := report(nil)
	require.Equal(t, switchbox.OK, r.State)
	require.Equal(t, "3 of 4 pairs reach 10000 MB/s (not 6:7); 2 must", r.Reason)
	require.Equal(t, "6c6f6e67-0000-0000-0000-000000000001.3", r.Domain)
	require.Equal(t, switchbox.Warn, r.Findings[0].Severity)

	r = report(func(g []*fake.GPU) {
		for _, g := range g {
			g.Action = switchbox.RecoverReset
		}
		g[1].Switches.Clique = 4
	})
	require.Equal(t, switchbox.Faulty, r.State)
	require.Equal(t, "GPU 0 must be reset, says the driver; GPU 1 must be reset, says the driver; "+
		"GPU 2 must be reset, says the driver; and 5 more", r.Reason)
	require.Empty(t, r.Domain, "two cliques")
}

// bad is a finding as it is sent.
const bad = `{"check":"nvml","severity":"fatal","text":"x"}`

func finding(s switchbox.Severity, text string) switchbox.Finding {
	return switchbox.Finding{Check: "nvml", Severity: s, Text: text}
}

func TestConcludeBoundsTheFindings(t *testing.T) {
	r := switchbox.Report{Adaptor: "nvml"}
	for range 100 {
		r.Findings = append(r.Findings, finding(switchbox.Info, strings.Repeat("x\n", 999)))
	}
	r.Findings = append(r.Findings, finding(switchbox.Fatal, "the one that counts"))
	r.Conclude()
	require.Len(t, r.Findings, switchbox.MaxFindings)
	require.Equal(t, "the one that counts", r.Findings[0].Text)
	text, err := json.Marshal(r)
	require.NoError(t, err)
	_, err = switchbox.ParseReport(text)
	require.NoError(t, err)
}

func TestAnUnregisteredClusterIsNoDomain(t *testing.T) {
	r := report(func(g []*fake.GPU) {
		for _, g := range g {
			g.Switches.Cluster = "00000000-0000-0000-0000-000000000000"
		}
	})
	require.Empty(t, r.Domain)
}

func TestParseReportIsStrict(t *testing.T) {
	const good = `{"schema":1,"adaptor":"nvml","state":"ok"}`
	_, err := switchbox.ParseReport([]byte(good))
	require.NoError(t, err)
	for name, text := range map[string]string{
		"nothing":             "",
		"something behind it": good + "{}",
		"not closed":          good[:len(good)-1],
		"another version":     `{"schema":2,"adaptor":"nvml","state":"ok"}`,
		"no adaptor":          `{"schema":1,"state":"ok"}`,
		"no state":            `{"schema":1,"adaptor":"nvml"}`,
		"no reason":           `{"schema":1,"adaptor":"nvml","state":"faulty"}`,
		"a terminal's codes":  `{"schema":1,"adaptor":"nvml","state":"faulty","reason":"\u001b[2J"}`,
		"two lines":           `{"schema":1,"adaptor":"nvml","state":"faulty","reason":"a\nb"}`,
		"a long text":         `{"schema":1,"adaptor":"nvml","state":"faulty","reason":"` + strings.Repeat("a", 600) + `"}`,
		"fatal, and ok":       `{"schema":1,"adaptor":"nvml","state":"ok","findings":[` + bad + `]}`,
		"no severity":         `{"schema":1,"adaptor":"nvml","state":"ok","findings":[{"check":"nvml","text":"x"}]}`,
		"no list":             `{"schema":1,"adaptor":"nvml","state":"ok","findings":{}}`,
		"deep":                strings.Repeat("[", 100000),
		"long":                `"` + strings.Repeat(" ", 2<<20) + `"`,
		"no number":           `{"schema":1,"adaptor":"metax","state":"ok","pairs":[{"pair":"0:1","mbps":NaN}]}`,
		"too large a number":  `{"schema":1,"adaptor":"metax","state":"ok","pairs":[{"pair":"0:1","mbps":1e999}]}`,
		"many devices":        `{"schema":1,"adaptor":"nvml","state":"ok","devices":[{}` + strings.Repeat(",{}", 64) + `]}`,
		"many findings":       `{"schema":1,"adaptor":"nvml","state":"ok","findings":[{}` + strings.Repeat(",{}", 64) + `]}`,
	} {
		_, err := switchbox.ParseReport([]byte(text))
		require.ErrorContains(t, err, "the report is", name)
	}
}

// What an older or newer gpucheck says of a device beside its findings does not make its report unreadable.
func TestReportsOfOtherVersions(t *testing.T) {
	for name, field := range map[string]string{"older": `"lost":true`, "newer": `"speed":{"x":[1]}`} {
		text := `{"schema":1,"adaptor":"nvml","state":"faulty","reason":"x","devices":[{"index":3,` + field +
			`}],"findings":[` + bad + `]}`
		r, err := switchbox.ParseReport([]byte(text))
		require.NoError(t, err, name)
		require.Equal(t, 3, r.Devices[0].Index)
		require.Empty(t, r.Devices[0].Lost)
		require.Len(t, r.Findings, 1)
	}
}

func FuzzParseReport(f *testing.F) {
	for _, r := range []switchbox.Report{report(nil), switchbox.Skip("metax", "none")} {
		text, _ := json.Marshal(r)
		f.Add(text)
	}
	f.Add([]byte(`{"schema":1,"adaptor":"nvml","state":"faulty","reason":"x","findings":[` + bad + `]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := switchbox.ParseReport(text)
		if err != nil {
			return
		}
		again, err := json.Marshal(r)
		require.NoError(t, err)
		back, err := switchbox.ParseReport(again)
		require.NoError(t, err)
		require.Equal(t, r.State, back.State)
	})
}

func FuzzPair(f *testing.F) {
	f.Add("0:1")
	f.Fuzz(func(t *testing.T, text string) {
		var p switchbox.Pair
		if p.UnmarshalText([]byte(text)) == nil {
			var back switchbox.Pair
			require.NoError(t, back.UnmarshalText([]byte(p.String())))
			require.Equal(t, p, back)
		}
	})
}
