package ctl

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/report"
)

// dumped are files of xpu_timer of a world of four ranks: rank 2 is somewhere else, rank 3 has left no file.
func dumped(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for rank, function := range []string{"all_reduce", "all_reduce", "load_batch"} {
		frame := "\x0a" + string(rune(len(function))) + function + "\x12\x04t.py"
		thread := "\x1a\x0aMainThread\x3a" + string(rune(len(frame))) + frame
		text := "\x12" + string(rune(len(thread))) + thread + "\x5a\x0cS (sleeping)"
		name := filepath.Join(dir, "0000"+string(rune('0'+rank))+"-00004.stacktrace")
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	return dir
}

const merged = "State@S (sleeping)@0-2|3 1\nall_reduce@t.py@0-1|2-3 1\nload_batch@t.py@2|0-1/3 1\n"

func TestFilesOfXPUTimerAreMerged(t *testing.T) {
	for name, args := range map[string][]string{
		"by the command": {"dlroverctl", "stacks", "--path"}, "by its short option": {"dlroverctl", "stacks", "-p"},
		"by the viewer's name": {"/usr/bin/" + viewer, "--path"}, "by that and its short option": {viewer, "-p"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := dumped(t)
			var out strings.Builder
			p := &program{stdout: &out, stderr: io.Discard, env: noEnv, now: time.Now}
			require.Zero(t, p.run(t.Context(), append(args, dir)))
			require.Contains(t, out.String(), "no data: ranks 3 (1)")
			require.Contains(t, out.String(), "2 ranks 0-1, S (sleeping)\n    all_reduce at t.py\n")
			text, err := os.ReadFile(filepath.Join(dir, report.PythonStacks))
			require.NoError(t, err)
			require.Equal(t, merged, string(text))
			for _, name := range []string{report.PythonPicture, report.NativePicture, report.NativeStacks} {
				require.FileExists(t, filepath.Join(dir, name))
			}
		})
	}
}

func noEnv(string) (string, bool) { return "", false }

// Without arguments the viewer takes the working directory.
func TestViewerOfTheWorkingDirectory(t *testing.T) {
	t.Chdir(dumped(t))
	p := &program{stdout: io.Discard, stderr: io.Discard, env: noEnv, now: time.Now}
	require.Zero(t, p.run(t.Context(), []string{viewer}))
	require.FileExists(t, report.PythonStacks)
	var out strings.Builder
	p.stdout = &out
	require.Zero(t, p.run(t.Context(), []string{viewer, "--help"}))
	require.Contains(t, out.String(), viewer)
}

func TestReportsAreMergedAgain(t *testing.T) {
	dir := t.TempDir()
	path, err := report.Write(dir, report.Incident{
		Job: "j", At: time.Unix(1790000000, 0), World: hang.World{Nodes: []hang.WorldNode{{Name: "n", Slots: 2}}},
		Evidence: []hang.Evidence{{Stacks: &hang.Stacks{Threads: []hang.Thread{{Main: true,
			Python: []hang.Frame{{Func: "f"}}}}}}},
	})
	require.NoError(t, err)
	require.NoError(t, os.Remove(filepath.Join(path, report.PythonStacks)))
	var out strings.Builder
	require.Zero(t, ctl(&out, "stacks", "--path", path))
	require.Contains(t, out.String(), "STACKS job=j")
	text, err := os.ReadFile(filepath.Join(path, report.PythonStacks))
	require.NoError(t, err)
	require.Equal(t, "f@??@0|1 1\n", string(text))
}

// What the nodes have written of a hang is in files of xpu_timer and in a report, which has all nodes. What was dumped
// later is newer.
func TestTheNewestStacksAreFound(t *testing.T) {
	dir := dumped(t)
	put := func(job string, at time.Time) string {
		path, err := report.Write(dir, report.Incident{
			Job: job, At: at, World: hang.World{Nodes: []hang.WorldNode{{Name: "n", Slots: 4}}},
			Evidence: []hang.Evidence{{Stacks: &hang.Stacks{Threads: []hang.Thread{{Main: true,
				Python: []hang.Frame{{Func: "f"}}}}}}},
		})
		require.NoError(t, err)
		return path
	}
	put("old", time.Now().Add(-time.Hour))
	path := put("new", time.Now())
	require.NoError(t, os.Remove(filepath.Join(dir, report.Latest))) // storage without links has none
	view := func() (out, stderr string) {
		var text, log strings.Builder
		p := &program{stdout: &text, stderr: &log, env: noEnv, now: time.Now}
		require.Zero(t, p.run(t.Context(), []string{viewer, "--path", dir}), log.String())
		return text.String(), log.String()
	}
	out, note := view()
	require.Contains(t, out, "STACKS job=new")
	require.Equal(t, "dlroverctl: the newest stacks are those in "+path+"\n", note)
	text, err := os.ReadFile(filepath.Join(dir, report.PythonStacks))
	require.NoError(t, err)
	require.Equal(t, "f@??@0|1-3 1\n", string(text), "where xpu_timer's viewer writes it")

	later := time.Now().Add(time.Minute)
	require.NoError(t, os.Chtimes(filepath.Join(dir, "00000-00004.stacktrace"), later, later))
	out, note = view()
	require.Contains(t, out, "all_reduce at t.py")
	require.Empty(t, note)
}

func TestWrongUsesOfStacks(t *testing.T) {
	d := newServed(t)
	empty := t.TempDir()
	d.fails(2, "RUN, or --path=DIR", "stacks")
	d.fails(2, `stacks takes \[RUN\], but was given "a" "b"`, "stacks", "a", "b")
	d.fails(2, `no run is called ".."`, "stacks", "..")
	d.fails(1, "there is no file <rank>-<world size>.stacktrace.*no hang_report.json", "stacks", "--path", empty)
	d.fails(1, "no such file", "stacks", "--path", filepath.Join(empty, "none"))
	d.fails(1, `keeps no run "nobody"`, "stacks", "nobody")
	d.fails(1, `keeps no run "nobody"`, "bundle", "nobody")
	d.fails(2, "--path needs a value", "stacks", "--path")
	require.NoError(t, os.Symlink("/etc/passwd", filepath.Join(empty, report.JSONFile)))
	d.fails(1, "a link, which is not followed here", "stacks", "--path", empty)
}

// unpack returns the files of an archive, without the name of the directory that all are in.
func unpack(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	require.NoError(t, err)
	files := map[string]string{}
	for in := tar.NewReader(zip); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		dir, name, _ := strings.Cut(h.Name, "/")
		require.Equal(t, strings.TrimSuffix(filepath.Base(path), ".tar.gz"), dir)
		data, err := io.ReadAll(in)
		require.NoError(t, err)
		files[name] = string(data)
	}
}

func TestBundleHasWhatTheDaemonKnows(t *testing.T) {
	d := newServed(t)
	d.join("job 7", "a", 1)
	d.fail("job 7", "a", d.start("job 7", "a"))
	dir := t.TempDir()
	path := strings.TrimSpace(d.ok("bundle", "job 7", "--path", dir))
	require.Regexp(t, `/dlrover-bundle-job_7-\d{8}T\d{6}Z\.tar\.gz$`, path)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing else is left")
	files := unpack(t, path)
	require.Contains(t, files["status.json"], `"job 7"`)
	require.Contains(t, files["events.json"], `"join"`)
	require.Contains(t, files["verdict.json"], `"line"`)
	require.Contains(t, files["failures.json"], "rank ")
	require.Contains(t, files["missing.txt"], "checks.json: ")
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "logs may hold secrets")

	deep := filepath.Join(dir, "is", "made")
	require.FileExists(t, strings.TrimSpace(d.ok("bundle", "job 7", "-p", deep)))
	d.fails(1, "not a directory", "bundle", "job 7", "--path", filepath.Join(path, "none"))
	d.fails(1, "not a directory", "stacks", "job 7", "--path", filepath.Join(path, "none"))
}
