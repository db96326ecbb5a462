package logs

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/tempdir"
)

func TestLayout(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o027))
	dir := filepath.Join(t.TempDir(), "new", "logs")
	r := newRig(t, Config{Dir: dir, RunID: "team/job 7", Tee: all, StdoutFilters: []string{"b"}})

	for _, want := range []string{"attempt_0", "attempt_0.1", "attempt_0.2"} {
		a := r.begin(t)
		require.Regexp(t, "^"+dir+`/team_job_7_[a-z0-9]{8}/`+want+"$", a.Dir())
		run(t, worker(t, a, 3), sh("echo a; echo b; echo c >&2"))
		a.Close()
		require.Equal(t, "a\nb\n", read(t, a.Dir(), "3", "stdout.log"))
		require.Equal(t, "c\n", read(t, a.Dir(), "3", "stderr.log"))
		require.Equal(t, "[default3]:b\n", read(t, a.Dir(), "filtered_stdout.log"))
	}
	a, err := r.Begin(12)
	require.NoError(t, err)
	require.Equal(t, "attempt_12", filepath.Base(a.Dir()))
	require.Equal(t, filepath.Join(a.Dir(), "5", "error.json"), worker(t, a, 5).ErrorFile())

	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		info, err := d.Info()
		require.NoError(t, err)
		want := fs.FileMode(0o640)
		if d.IsDir() {
			want = 0o750
		}
		require.Equal(t, want, info.Mode().Perm(), path)
		return nil
	}))
	require.NoError(t, r.Close())
	_, err = r.Begin(13)
	require.Error(t, err)
}

func TestRunName(t *testing.T) {
	for in, want := range map[string]string{
		"":                       "none",
		"none":                   "none",
		"a/b c\n":                "a_b_c_",
		"../../etc":              ".._.._etc",
		"größe":                  "gr__e",
		strings.Repeat("x", 500): strings.Repeat("x", maxRunID),
	} {
		require.Equal(t, want, runName(in), "%q", in)
	}
}

func TestNewChecksTheDirectory(t *testing.T) {
	tmp := t.TempDir()
	file := filepath.Join(tmp, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	readOnly := filepath.Join(tmp, "ro")
	require.NoError(t, os.Mkdir(readOnly, 0o555))
	if os.Geteuid() == 0 {
		readOnly = "/sys" // permissions do not stop root
	}
	for _, tc := range []struct {
		name, dir string
		is        error
		say       string
	}{
		{"plain file", file, syscall.ENOTDIR, "a file is in the way"},
		{"below a plain file", filepath.Join(file, "logs"), syscall.ENOTDIR, "a file is in the way"},
		{"read-only", readOnly, fs.ErrPermission, "nothing can be created in it"},
		{"below a read-only one", filepath.Join(readOnly, "logs"), fs.ErrPermission, "cannot be created"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := New(Config{Dir: tc.dir})
			require.ErrorIs(t, err, tc.is)
			require.ErrorContains(t, err, "--log-dir "+tc.dir)
			require.ErrorContains(t, err, tc.say)
		})
	}
}

func TestTempDir(t *testing.T) {
	for _, tc := range []struct {
		name   string
		script string
		tee    func(int) Std
		keep   bool
	}{
		{"nothing written", "true", nil, false},
		{"empty log files", "true", all, false},
		{"error file", "echo {} >$ERR", nil, true},
		{"log file", "echo a", all, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			r := newRig(t, Config{Tee: tc.tee})
			found := func() []string {
				m, _ := filepath.Glob(filepath.Join(tmp, "torchelastic_*"))
				return m
			}
			require.Empty(t, found(), "made lazily")
			a := r.begin(t)
			require.Len(t, found(), 1)
			info, err := os.Stat(found()[0])
			require.NoError(t, err)
			require.Equal(t, fs.FileMode(0o700), info.Mode().Perm())

			w := worker(t, a, 0)
			cmd := sh(tc.script)
			cmd.Env = append(os.Environ(), "ERR="+w.ErrorFile())
			run(t, w, cmd)
			require.NoError(t, r.Close())
			require.Len(t, found(), map[bool]int{true: 1}[tc.keep])
		})
	}
}

func TestManyStartsLeaveNoPile(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	r := newRig(t, Config{})
	var withError string
	for i := range 1000 {
		a := r.begin(t)
		w := worker(t, a, 0)
		if i == 7 {
			withError = w.ErrorFile()
			require.NoError(t, os.WriteFile(withError, []byte("{}"), 0o644))
		}
		a.Close()
	}
	left, err := filepath.Glob(filepath.Join(tmp, "torchelastic_*", "*", "*"))
	require.NoError(t, err)
	require.LessOrEqual(t, len(left), 2, "the one with an error file, and the last, which is being removed")
	require.NoError(t, r.Close())
	require.FileExists(t, withError)
}

func TestAttemptsOfTheUsersDirectoryStay(t *testing.T) {
	dir := t.TempDir()
	r := newRig(t, Config{Dir: dir})
	for i := range 100 {
		a := r.begin(t)
		worker(t, a, 0)
		a.Close()
		require.DirExists(t, a.Dir())
		if i == 50 {
			require.NoError(t, os.RemoveAll(a.Dir()))
		}
	}
	require.Equal(t, "attempt_0.100", filepath.Base(r.begin(t).Dir()), "not every suffix is tried again")
	a, err := r.Begin(1)
	require.NoError(t, err)
	require.Equal(t, "attempt_1", filepath.Base(a.Dir()))
	a, err = r.Begin(0)
	require.NoError(t, err)
	require.Equal(t, "attempt_0.50", filepath.Base(a.Dir()), "a count that comes back finds a free name")
}

func TestASlowRemovalHoldsNothing(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	r := newRig(t, Config{})
	var removals atomic.Int32
	answer := make(chan struct{})
	r.trash.remove = func(string) error { removals.Add(1); <-answer; return nil }
	for range 50 { // each would wait
		a := r.begin(t)
		worker(t, a, 0)
		a.Close()
	}
	require.NoError(t, r.Close())
	require.EqualValues(t, 1, removals.Load())
	require.Equal(t, 1, strings.Count(r.log.String(), "takes too long"), r.log.String())
	close(answer)
	<-r.trash.gone
}

// As under torchrun, a job with a TMPDIR that is not there has its files elsewhere.
func TestTempDirElsewhere(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "missing"))
	r := newRig(t, Config{Tee: all})
	w := worker(t, r.begin(t), 0)
	require.True(t, strings.HasPrefix(w.ErrorFile(), "/tmp/torchelastic_"), w.ErrorFile())
	w.Started()
	require.NoError(t, r.Close())
	require.NoFileExists(t, w.ErrorFile())
}

func TestNoTempDir(t *testing.T) {
	fallbacks := tempdir.Fallbacks
	tempdir.Fallbacks = nil
	t.Cleanup(func() { tempdir.Fallbacks = fallbacks })
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "missing"))
	r := newRig(t, Config{Tee: func(rank int) Std { return Std(rank) }})
	a := r.begin(t)
	w := worker(t, a, 0)
	require.Empty(t, w.ErrorFile())
	run(t, w, sh("echo hello"))
	require.Equal(t, "hello\n", r.out.String(), "a job that needs no file runs")
	require.Contains(t, r.log.String(), "give --log-dir")
	_, err := a.Worker(WorkerID{LocalRank: 1})
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "temporary log directory")

	b, err := r.Begin(1)
	require.NoError(t, err)
	b.Close()
	require.Equal(t, 1, strings.Count(r.log.String(), "give --log-dir"), "said once")
	_, err = New(Config{Files: true})
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "give --log-dir a directory")
}

func TestDevNull(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	r := newRig(t, Config{Dir: os.DevNull, StdoutFilters: []string{"a"},
		Tee: func(rank int) Std { return Std(rank) }, Redirects: func(rank int) Std { return Std(rank) << 1 }})
	a := r.begin(t)
	w := worker(t, a, 1)
	require.Empty(t, w.ErrorFile())
	require.Empty(t, a.Dir())
	run(t, w, sh("echo a; echo b >&2"))
	require.NoError(t, r.Close())
	require.Equal(t, "[default1]:a\n", r.out.String())
	require.Equal(t, "b\n", r.err.String(), "as with torchrun, a redirect without files is none")
	entries, err := os.ReadDir(tmp)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestPrefix(t *testing.T) {
	host, err := os.Hostname()
	require.NoError(t, err)
	for template, want := range map[string]string{
		"":                                     "[trainer1]:",
		"[rank${rank}]: ":                      "[rank9]: ",
		"${hostname}:$rank":                    host + ":9",
		"${node}/${local_rank} $$5 ${nope}%d:": "2/1 $5 ${nope}%d:",
	} {
		l, err := New(Config{PrefixTemplate: template, Dir: os.DevNull, Stdout: io.Discard, Stderr: io.Discard})
		require.NoError(t, err)
		require.Equal(t, want, string(l.prefix(WorkerID{LocalRank: 1, Rank: 9, Node: 2, Role: "trainer"})))
	}
}

// TestNoSpaceForDirectories: at a restart the disk may be full; the workers start all the same.
func TestNoSpaceForDirectories(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  Config
	}{
		{"redirect", Config{Redirects: all}},
		{"tee and filter", Config{Tee: all, StdoutFilters: []string{"k"}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.cfg.Dir = t.TempDir()
			r := newRig(t, tc.cfg)
			require.NoError(t, os.Remove(r.base))
			require.NoError(t, os.WriteFile(r.base, nil, 0o644)) // now every mkdir fails
			a := r.begin(t)
			w := worker(t, a, 0)
			require.Empty(t, w.ErrorFile())
			cmd := sh("echo lost; read x; echo kept")
			stdin, err := cmd.StdinPipe()
			require.NoError(t, err)
			start(t, w, cmd)
			eventually(t, "the first line was read", func() bool {
				out, _ := w.Tail()
				return string(out) == "lost\n"
			})
			require.NoError(t, os.Remove(r.base))
			require.NoError(t, stdin.Close())
			require.NoError(t, cmd.Wait())
			w.Drain(time.Minute)
			a.Close()
			require.Contains(t, read(t, a.Dir(), "0", "stdout.log"), "kept\n")
			require.Equal(t, 1, strings.Count(r.log.String(), "cannot write a log file"), r.log.String())
		})
	}
}
