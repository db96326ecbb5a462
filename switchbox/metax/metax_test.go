package metax

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/switchbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// minute is ample for whatever is to happen.
const minute = time.Minute

// tree makes a sysfs of files; root is where the layout lies.
func tree(t *testing.T, root string, cpus int, sockets ...int) string {
	t.Helper()
	sysfs := t.TempDir()
	write(t, filepath.Join(sysfs, root, "properties"), fmt.Sprintf("platform_id 1\nnum_cpu_nodes %d\n", cpus))
	for i := range cpus {
		write(t, filepath.Join(sysfs, root, "nodes", strconv.Itoa(i), "properties"), "cpu_cores_count 64\nmgpu_ids 0\n")
	}
	for i, s := range sockets {
		text := fmt.Sprintf("simd_count 416\nmgpu_id %d\n", s)
		write(t, filepath.Join(sysfs, root, "nodes", strconv.Itoa(cpus+i), "properties"), text)
	}
	return sysfs
}

func write(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
}

// tool makes a program of a shell script, in which $1 to $7 are the arguments.
func tool(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mxom-client")
	write(t, path, "#!/bin/sh\n"+script+"\n")
	require.NoError(t, os.Chmod(path, 0o755))
	return path
}

// eight is a node in which sockets and indices differ: socket 0 has index 7.
func eight(t *testing.T) string { return tree(t, roots[0], 2, 7, 6, 5, 4, 3, 2, 1, 0) }

// config is for the guide's pairs and limits.
func config(t *testing.T, script string) Config {
	return Config{
		Sysfs: eight(t), Tool: tool(t, script), Deadline: minute,
		Limits: switchbox.Limits{MinBandwidth: 10000, MinChannels: 2}, Environ: []string{"PATH=" + os.Getenv("PATH")},
	}
}

func check(t *testing.T, c Config) switchbox.Report {
	t.Helper()
	r, err := Check(t.Context(), c)
	require.NoError(t, err)
	return r
}

// told are the findings of pairs, by pair.
func told(r switchbox.Report) map[string]string {
	texts := map[string]string{}
	for _, f := range r.Findings {
		texts[f.Entity] = string(f.Severity) + ": " + f.Text
	}
	return texts
}

func TestEveryFigureIsInTheReport(t *testing.T) {
	// The figure names the arguments, so the sockets were mapped to indices.
	r := check(t, config(t, `[ "$1 $3 $5 $6 $7 $8 $9" = "-l -p -t 1 -c -w 1" ] && echo "bandwidth:1000$2.$4MB/s"`))
	require.Equal(t, switchbox.OK, r.State)
	require.Equal(t, "4 of 4 pairs reach 10000 MB/s; 2 must", r.Reason)
	require.Equal(t, []switchbox.Measurement{
		{Pair: switchbox.Pair{A: 0, B: 1}, MBps: 10007.6}, {Pair: switchbox.Pair{A: 2, B: 4}, MBps: 10005.3},
		{Pair: switchbox.Pair{A: 3, B: 5}, MBps: 10004.2}, {Pair: switchbox.Pair{A: 6, B: 7}, MBps: 10001.0},
	}, r.Pairs)
	require.Len(t, r.Devices, 8)
	require.Len(t, r.Findings, 4)
}

func TestVerdicts(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		state  switchbox.State
		pair   string // what is told of 0:1
	}{
		"an integer":          {"echo bandwidth:12345MB/s", switchbox.OK, "info: pair 0:1 reaches 12345 MB/s"},
		"exactly the minimum": {"echo bandwidth:10000MB/s", switchbox.OK, "info: pair 0:1 reaches 10000 MB/s"},
		"with other lines": {"echo start; echo 'avg bandwidth: 20000.5 MB/s, ok'", switchbox.OK,
			"info: pair 0:1 reaches 20000.5 MB/s"},
		"the minimum with a fraction": {"echo bandwidth:10000.0MB/s", switchbox.OK, "info: pair 0:1 reaches 10000 MB/s"},
		"the lower one of two counts, first": {"echo bandwidth:5MB/s; echo bandwidth:20000MB/s", switchbox.Faulty,
			"warn: pair 0:1 reaches 5 MB/s, less than 10000 MB/s"},
		"the lower one of two counts, last": {"echo bandwidth:20000MB/s; echo bandwidth:5MB/s", switchbox.Faulty,
			"warn: pair 0:1 reaches 5 MB/s, less than 10000 MB/s"},
		"a second one that is not a number": {"echo bandwidth:20000MB/s; echo bandwidth:-MB/s", switchbox.Faulty,
			`warn: pair 0:1: mxom-client: its output has no number of MB/s after bandwidth: but "-MB/s\n"`},
		"just below": {"echo bandwidth:9999.999MB/s", switchbox.Faulty,
			"warn: pair 0:1 reaches 9999.9 MB/s, less than 10000 MB/s"},
		"zero": {"echo bandwidth:0MB/s", switchbox.Faulty,
			"warn: pair 0:1 reaches 0 MB/s, less than 10000 MB/s"},
		"nothing": {"true", switchbox.Faulty, "warn: pair 0:1: mxom-client: its output has no bandwidth"},
		"not a number": {"echo bandwidth:NaNMB/s", switchbox.Faulty,
			`warn: pair 0:1: mxom-client: its output has no number of MB/s after bandwidth: but "NaNMB/s\n"`},
		"infinite": {"echo bandwidth:infMB/s", switchbox.Faulty,
			`warn: pair 0:1: mxom-client: its output has no number of MB/s after bandwidth: but "infMB/s\n"`},
		"negative": {"echo bandwidth:-20000MB/s", switchbox.Faulty,
			`warn: pair 0:1: mxom-client: its output has no number of MB/s after bandwidth: but "-20000MB/s\n"`},
		"an exponent": {"echo bandwidth:1e9MB/s", switchbox.Faulty,
			`warn: pair 0:1: mxom-client: its output has no number of MB/s after bandwidth: but "1e9MB/s\n"`},
		"another unit": {"echo bandwidth:20GB/s", switchbox.Faulty,
			`warn: pair 0:1: mxom-client: its output has no number of MB/s after bandwidth: but "20GB/s\n"`},
		"a longer unit": {"echo bandwidth:20000MB/sec", switchbox.Faulty,
			`warn: pair 0:1: mxom-client: its output has no number of MB/s after bandwidth: but "20000MB/sec\n"`},
		"garbage": {`printf '\000\033[2Jbandwidth:\377'`, switchbox.Faulty,
			`warn: pair 0:1: mxom-client: its output has no number of MB/s after bandwidth: but "\xff"`},
		"a figure, and a failure": {"echo bandwidth:20000MB/s; echo first >&2; echo no such device >&2; exit 3",
			switchbox.Faulty,
			"warn: pair 0:1: mxom-client failed: exit status 3: no such device"},
		"a crash": {"kill -SEGV $$", switchbox.Faulty, "warn: pair 0:1: mxom-client failed: signal: segmentation fault"},
	} {
		t.Run(name, func(t *testing.T) {
			r := check(t, config(t, c.script))
			require.Equal(t, c.state, r.State, r.Reason)
			require.Equal(t, c.pair, told(r)["0:1"])
		})
	}
}

// Two bad pairs of four pass, and are told; a third fails the node.
func TestMinChannels(t *testing.T) {
	slow := func(indices string) string {
		return `case "$2" in ` + indices + `) echo bandwidth:9000MB/s;; *) echo bandwidth:20000MB/s;; esac`
	}
	r := check(t, config(t, slow("7|5")))
	require.Equal(t, switchbox.OK, r.State)
	require.Equal(t, "warn: pair 0:1 reaches 9000 MB/s, less than 10000 MB/s", told(r)["0:1"])
	require.Equal(t, "warn: pair 2:4 reaches 9000 MB/s, less than 10000 MB/s", told(r)["2:4"])
	r = check(t, config(t, slow("7|5|1")))
	require.Equal(t, switchbox.Faulty, r.State)
	require.Equal(t, "1 of 4 pairs reach 10000 MB/s (not 0:1, 2:4, 6:7); 2 must", r.Reason)
}

// All pairs run at once: each waits for the others.
func TestPairsRunInParallel(t *testing.T) {
	dir := t.TempDir()
	c := config(t, fmt.Sprintf(`touch %s/$2; while [ $(ls %[1]s | wc -l) -lt 4 ]; do sleep 0.01; done
echo bandwidth:20000MB/s`, dir))
	require.Equal(t, switchbox.OK, check(t, c).State)
}

func TestToolsThatMisbehave(t *testing.T) {
	for name, c := range map[string]struct {
		script   string
		deadline time.Duration
		want     string
	}{
		"hangs": {"sleep 1000", 200 * time.Millisecond, "no answer within 200ms"},
		"ignores SIGTERM": {"trap '' TERM INT HUP; while :; do sleep 1000; done",
			200 * time.Millisecond, "no answer within 200ms"},
		"hangs after its figure": {"echo bandwidth:20000MB/s; exec sleep 1000", 200 * time.Millisecond,
			"no answer within 200ms"},
		"floods":             {"exec yes bandwidth:20000MB/s", minute, "it prints more than 64 KiB"},
		"floods with errors": {"exec yes >&2", minute, "it prints more than 64 KiB"},
		"floods and ends":    {"head -c 100000 /dev/zero", minute, "it prints more than 64 KiB"},
	} {
		t.Run(name, func(t *testing.T) {
			pids := filepath.Join(t.TempDir(), "pids")
			cfg := config(t, "echo $$ >> "+pids+"; "+c.script)
			cfg.Deadline = c.deadline
			begun := time.Now()
			r := check(t, cfg)
			require.Less(t, time.Since(begun), minute/2)
			require.Equal(t, switchbox.Faulty, r.State)
			require.True(t, strings.HasPrefix(told(r)["0:1"], "warn: pair 0:1: mxom-client failed: "+c.want), told(r)["0:1"])
			requireGone(t, pids)
		})
	}
}

// A grandchild that holds the output neither delays the answer nor outlives it.
func TestGrandchildThatHoldsTheOutput(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	r := check(t, config(t, "sleep 1000 & echo $! >> "+pids+"; echo bandwidth:20000MB/s"))
	require.Equal(t, switchbox.OK, r.State, r.Reason)
	requireGone(t, pids)
}

// One in a session of its own cannot be killed with the group, but it is not waited for.
func TestGrandchildThatLeavesTheGroup(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	c := config(t, "setsid sleep 1000 & echo $! >> "+pids+"; sleep 0.3; echo bandwidth:20000MB/s")
	r := check(t, c)
	require.Equal(t, switchbox.OK, r.State, r.Reason)
	for _, pid := range numbers(t, pids) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	requireGone(t, pids)
}

func TestCanceled(t *testing.T) {
	pids := filepath.Join(t.TempDir(), "pids")
	c := config(t, "echo $$ >> "+pids+"; sleep 1000 & wait")
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
			if text, _ := os.ReadFile(pids); strings.Count(string(text), "\n") == 4 {
				cancel()
			}
		}
	}()
	r, err := Check(ctx, c)
	require.NoError(t, err)
	require.Equal(t, switchbox.Skipped, r.State)
	require.Equal(t, "the check was stopped", r.Reason)
	requireGone(t, pids)
}

func numbers(t *testing.T, path string) (ns []int) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, f := range strings.Fields(string(text)) {
		n, err := strconv.Atoi(f)
		require.NoError(t, err)
		ns = append(ns, n)
	}
	return ns
}

// requireGone waits until the processes have ended. Orphans are their reaper's, which may not have collected them.
func requireGone(t *testing.T, path string) {
	t.Helper()
	for _, pid := range numbers(t, path) {
		require.Eventually(t, func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			return err != nil || strings.Contains(string(stat), ") Z ")
		}, minute, time.Millisecond)
	}
}

func TestUsageErrors(t *testing.T) {
	c := config(t, "echo must not run >&2; exit 9")
	c.Limits.Given = true
	for want, pairs := range map[string][]switchbox.Pair{
		"--box-pairs: 0:8 names a device that is not here; this node has 0, 1, 2, 3, 4, 5, 6, 7": {
			{A: 0, B: 8}, {A: 2, B: 3}},
		"--box-pairs: 4:4 names one device twice; a pair is two devices, as in 0:1": {
			{A: 4, B: 4}, {A: 2, B: 3}},
		"--min-channels=2 is more than the 1 pairs that are tested; name more in --box-pairs, or ask for fewer": {
			{A: 0, B: 1}},
	} {
		c.Pairs = pairs
		_, err := Check(t.Context(), c)
		require.EqualError(t, err, want)
	}
}

// What the default pairs leave out is told, and is no fault; a ring leaves nothing out.
func TestDevicesThatNoPairHas(t *testing.T) {
	c := config(t, "echo bandwidth:20000MB/s")
	c.Sysfs = tree(t, roots[0], 1, 0, 1, 2, 3, 4, 6)
	r := check(t, c)
	require.Equal(t, switchbox.OK, r.State)
	require.Equal(t, "warn: no default pair that is whole on this node has the device of socket 3, 6: "+
		"name pairs in --box-pairs, or ring", told(r)[""])
	c.Limits.Ring = true
	r = check(t, c)
	require.Equal(t, "6 of 6 pairs reach 10000 MB/s; 2 must", r.Reason)
	require.Empty(t, told(r)[""])
	require.NoError(t, Validate(c))
	c.Sysfs = tree(t, roots[0], 1, 5)
	require.Equal(t, switchbox.Skipped, check(t, c).State)
}

func TestSkipped(t *testing.T) {
	good := "echo bandwidth:20000MB/s"
	for name, c := range map[string]struct {
		change func(c *Config)
		want   string
	}{
		"no device": {func(c *Config) { c.Sysfs = "/nowhere" },
			"no MetaX device: /nowhere has neither class/mxcd/mxcd/layout nor class/metax/mxcd/layout"},
		"four of eight devices": {func(c *Config) { c.Sysfs = tree(t, roots[0], 1, 0, 1, 2, 3) },
			"1 of 4 pairs have both devices on this node, and 2 must pass"},
		"four visible": {func(c *Config) { c.Environ = append(c.Environ, "MACA_VISIBLE_DEVICES=7,6,1") },
			"1 of 4 pairs have both devices on this node, and 2 must pass"},
		"none visible": {func(c *Config) { c.Environ = append(c.Environ, "MACA_VISIBLE_DEVICES=") },
			"0 of 4 pairs have both devices on this node, and 2 must pass"},
		"no tool": {func(c *Config) { c.Tool = "/no/mxom-client" },
			"/no/mxom-client cannot be run: no such file or directory; set SWITCHBOX_CHECK_TOOL_PATH"},
		"no program": {func(c *Config) { c.Tool = filepath.Join(c.Sysfs, roots[0], "properties") },
			"cannot be run: it is not a program"},
		"a relative path": {func(c *Config) { c.Tool = "mxom-client" },
			"mxom-client cannot be run: its path is not absolute; set SWITCHBOX_CHECK_TOOL_PATH"},
		"no CPU nodes": {func(c *Config) { write(t, filepath.Join(c.Sysfs, roots[0], "properties"), "x 1\n") },
			"class/mxcd/mxcd/layout/properties does not say num_cpu_nodes"},
		"a socket twice": {func(c *Config) { c.Sysfs = tree(t, roots[0], 2, 0, 1, 1) },
			"class/mxcd/mxcd/layout/nodes: the devices 1 and 2 have the same mgpu_id 1"},
		"no devices": {func(c *Config) { c.Sysfs = tree(t, roots[0], 2) },
			"no MetaX device: no node of class/mxcd/mxcd/layout has a mgpu_id"},
		"no number": {func(c *Config) { write(t, filepath.Join(c.Sysfs, roots[0], "nodes/2/properties"), "mgpu_id 1 2\n") },
			`class/mxcd/mxcd/layout/nodes/2/properties: "mgpu_id 1 2" gives no number from 0 to 65535`},
		"too many CPUs": {func(c *Config) { write(t, filepath.Join(c.Sysfs, roots[0], "properties"), "num_cpu_nodes 3\n") },
			"class/mxcd/mxcd/layout/nodes: a device comes before the CPUs that num_cpu_nodes counts"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config(t, good)
			c.change(&cfg)
			r := check(t, cfg)
			require.Equal(t, switchbox.Skipped, r.State)
			require.Contains(t, r.Reason, c.want)
		})
	}
}

// With enough default pairs left the others are skipped, and said.
func TestSomeDevicesAreVisible(t *testing.T) {
	c := config(t, `env | grep -q VISIBLE && exit 1; echo "bandwidth:2000$2MB/s"`)
	c.Environ = append(c.Environ, "CUDA_VISIBLE_DEVICES=0", "MACA_VISIBLE_DEVICES=7,6,5,3")
	r := check(t, c)
	require.Equal(t, switchbox.OK, r.State, r.Reason)
	require.Equal(t, map[string]string{
		"0:1": "info: pair 0:1 reaches 20007 MB/s",
		"2:4": "info: pair 2:4 reaches 20005 MB/s",
		"3:5": "info: pair 3:5 is skipped: a device of it is not on this node",
		"6:7": "info: pair 6:7 is skipped: a device of it is not on this node",
	}, told(r))
}

func TestEnvironment(t *testing.T) {
	c := config(t, "echo bandwidth:20000MB/s")
	c.Environ = append(c.Environ, sysfsVariable+"="+tree(t, roots[1], 1, 0, 1, 2, 3, 4, 5, 6, 7), toolVariable+"="+c.Tool)
	c.Sysfs, c.Tool = "", ""
	r := check(t, c)
	require.Equal(t, switchbox.OK, r.State, r.Reason)
}

func TestVisible(t *testing.T) {
	cards := []card{{0, 3}, {1, 2}, {2, 1}, {3, 0}}
	for list, want := range map[string][]card{
		"": nil, "2": {{2, 1}}, " 3 , 0": {{3, 0}, {0, 3}}, "0,x,1": {{0, 3}}, "1,9,2": {{1, 2}}, "-1": nil,
		"MXC-1234": cards, ",1": cards,
	} {
		lookup := func(name string) (string, bool) { return list, name == "MACA_VISIBLE_DEVICES" }
		require.Equal(t, want, visible(cards, lookup), list)
	}
	require.Equal(t, cards, visible(cards, func(string) (string, bool) { return "", false }))
}

func FuzzBandwidth(f *testing.F) {
	f.Add([]byte("bandwidth:12345.6MB/s"))
	f.Add([]byte("bandwidth: nanMB/s"))
	f.Fuzz(func(t *testing.T, out []byte) {
		mbps, err := bandwidth(out)
		if err == nil {
			require.True(t, mbps >= 0 && mbps < 1e13, mbps)
			require.Contains(t, string(out), "MB/s")
		}
	})
}

func FuzzLayout(f *testing.F) {
	f.Add("num_cpu_nodes 1", "mgpu_id 0", "mgpu_id 1")
	f.Fuzz(func(t *testing.T, top, a, b string) {
		sysfs := tree(t, roots[0], 1, 0, 0)
		write(t, filepath.Join(sysfs, roots[0], "properties"), top)
		write(t, filepath.Join(sysfs, roots[0], "nodes/1/properties"), a)
		write(t, filepath.Join(sysfs, roots[0], "nodes/2/properties"), b)
		cards, err := readLayout(sysfs)
		if err == nil {
			require.NotEmpty(t, cards)
		}
	})
}
