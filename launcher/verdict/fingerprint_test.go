package verdict

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFingerprint(t *testing.T) {
	a := Failure{Rank: 3, LocalRank: 3, PID: 4711, NodeName: "gpu-a", Host: "host-a", ExitCode: 1}
	b := Failure{Rank: 17, LocalRank: 1, Node: 2, PID: 9, NodeName: "gpu-b", Host: "host-b", ExitCode: 1}
	with := func(f Failure, change func(*Failure)) Failure {
		change(&f)
		return f
	}
	message := func(text string) func(*Failure) { return func(f *Failure) { f.Message = text } }
	output := func(text string) func(*Failure) { return func(f *Failure) { f.LastLines = text } }
	killed := func(limit int64) func(*Failure) {
		return func(f *Failure) { f.ExitCode, f.OOM = -9, &OOM{Limit: limit, Peak: limit} }
	}
	for name, same := range map[string][2]func(*Failure){
		"nothing said": {message(""), message("")},
		"addresses": {message("E: [10.0.0.7]:29500, [fd00::a7]:1 and 0x7f3afe at 10.0.0.8:2"),
			message("E: [10.0.0.9]:31234, [fe80::1:2]:22 and 0x1 at 10.0.0.11:44")},
		"times":          {message("E: after 3.2s (300ms)"), message("E: after 1m12s (4ms)")},
		"hosts":          {message("E: gpu-a: on host-a."), message("E: gpu-b: on host-b.")},
		"output":         {output("x\n[rank3]: pid 4711 gave up"), output("y\n[rank17]: pid 9 gave up")},
		"exceptions":     {output(trace("ValueError: row 7")), output("more\n" + trace("ValueError: row 12345"))},
		"no memory left": {killed(1 << 30), killed(1 << 20)},
		"a timer": {func(f *Failure) { f.ExitCode, f.Timer = -9, "timer of pid 7 expired" },
			func(f *Failure) { f.ExitCode, f.Timer = -9, "timer of pid 12 expired" }},
	} {
		require.Equal(t, with(a, same[0]).Fingerprint(), with(b, same[1]).Fingerprint(), name)
		require.NotEqual(t, with(a, same[0]).Fingerprint(), with(b, func(f *Failure) {
			same[1](f)
			f.ExitCode = 3
		}).Fingerprint(), name)
	}
	kinds := map[string]bool{}
	for _, change := range []func(*Failure){
		message(""), message("ValueError: x"), message("KeyError: x"), message("ValueError: y"), killed(1),
		output("bad batch"), output("ValueError: x, more"), func(f *Failure) { f.ExitCode = 2 },
		func(f *Failure) { f.ExitCode = -11 },
	} {
		kinds[with(a, change).Fingerprint()] = true
	}
	require.Len(t, kinds, 9)

	require.Equal(t, "ValueError: x (exit code 1)", with(a, message("ValueError: x")).Fingerprint())
	require.LessOrEqual(t, len(with(a, output(strings.Repeat("é1 \x1b", 9999))).Fingerprint()), 256)
}
