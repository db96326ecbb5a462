package topology

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/rendezvous"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	before = "a p 10.0.0.1\nb p 10.0.0.2\n"
	after  = "# swapped\nb p 10.0.0.1\na p 10.0.0.2\n"
)

var (
	parsedBefore = rendezvous.Topology{"10.0.0.1": "a", "10.0.0.2": "b"}
	parsedAfter  = rendezvous.Topology{"10.0.0.1": "b", "10.0.0.2": "a"}
)

// followed is a file that is followed in a bubble, and all that came of it.
type followed struct {
	t    *testing.T
	path string
	log  bytes.Buffer
	got  []rendezvous.Topology
}

// follow calls act while the file at path is followed.
func follow(t *testing.T, path string, act func(*followed)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f, err := Open(path)
		require.NoError(t, err)
		require.Equal(t, parsedBefore, f.First())
		w := &followed{t: t, path: path}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			f.Follow(ctx, slog.New(slog.NewTextHandler(&w.log, nil)),
				func(topo rendezvous.Topology) { w.got = append(w.got, topo) })
		}()
		act(w)
		cancel()
		<-done
	})
}

// settle lets every change be noticed.
func (w *followed) settle() {
	time.Sleep(4 * Interval)
	synctest.Wait()
}

func (w *followed) write(text string) {
	w.t.Helper()
	require.NoError(w.t, os.WriteFile(w.path, []byte(text), 0o600))
}

func file(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "topology")
	require.NoError(t, os.WriteFile(path, []byte(before), 0o600))
	return path
}

func TestAFileThatStaysIsReadOnce(t *testing.T) {
	follow(t, file(t), func(w *followed) {
		time.Sleep(time.Hour)
		require.Empty(t, w.got)
		require.Empty(t, w.log.String())
	})
}

func TestAFileThatIsWrittenOrReplaced(t *testing.T) {
	for name, change := range map[string]func(w *followed){
		"written": func(w *followed) { w.write(after) },
		"replaced": func(w *followed) {
			require.NoError(w.t, os.WriteFile(w.path+"~", []byte(after), 0o600))
			require.NoError(w.t, os.Rename(w.path+"~", w.path))
		},
		"with its old time": func(w *followed) {
			fi, err := os.Stat(w.path)
			require.NoError(w.t, err)
			w.write(after)
			require.NoError(w.t, os.Chtimes(w.path, fi.ModTime(), fi.ModTime()))
		},
		"away for a while": func(w *followed) {
			require.NoError(w.t, os.Remove(w.path))
			time.Sleep(Interval)
			w.write(after)
		},
	} {
		t.Run(name, func(t *testing.T) {
			follow(t, file(t), func(w *followed) {
				change(w)
				w.settle()
				require.Equal(t, []rendezvous.Topology{parsedAfter}, w.got)
				require.Contains(t, w.log.String(), "nodes=2")
				require.NotContains(t, w.log.String(), "WARN")
			})
		})
	}
}

// A ConfigMap's file is a link to a file below ..data, a link that is swapped when the ConfigMap changes.
func TestTheLinkOfAConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(name, text string) {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "topology"), []byte(text), 0o600))
		require.NoError(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("..1", before)
	path := filepath.Join(dir, "topology")
	require.NoError(t, os.Symlink("..data/topology", path))
	follow(t, path, func(w *followed) {
		version("..2", after)
		require.NoError(t, os.RemoveAll(filepath.Join(dir, "..1")))
		w.settle()
		require.Equal(t, []rendezvous.Topology{parsedAfter}, w.got)
	})
}

func TestABrokenFileChangesNothingAndIsToldOnce(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(w *followed)
		want   string
	}{
		"a line":  {func(w *followed) { w.write(before + "c 10.0.0.3\n") }, `line 3: .*need three: asw psw ip`},
		"no file": {func(w *followed) { require.NoError(w.t, os.Remove(w.path)) }, `no such file`},
		"directory": {func(w *followed) { _ = os.Remove(w.path); require.NoError(w.t, os.Mkdir(w.path, 0o700)) },
			`not a regular file`},
		"pipe": {func(w *followed) { _ = os.Remove(w.path); require.NoError(w.t, syscall.Mkfifo(w.path, 0o600)) },
			`not a regular file`},
	} {
		t.Run(name, func(t *testing.T) {
			follow(t, file(t), func(w *followed) {
				c.damage(w)
				time.Sleep(time.Hour)
				synctest.Wait()
				require.Empty(t, w.got)
				require.Equal(t, 1, bytes.Count(w.log.Bytes(), []byte("WARN")), w.log.String())
				require.Regexp(t, c.want, w.log.String())
				require.NoError(t, os.RemoveAll(w.path))
				w.write(after)
				w.settle()
				require.Equal(t, []rendezvous.Topology{parsedAfter}, w.got, "mended")
			})
		})
	}
}

func TestAFileThatIsBeingWrittenIsNotRead(t *testing.T) {
	follow(t, file(t), func(w *followed) {
		time.Sleep(Interval / 2) // between two looks
		for text := ""; len(text) < 10*len("a p 10.0.0.1\n"); text += "a p 10.0.0.1\n" {
			w.write(text + "half a")
			time.Sleep(Interval)
		}
		w.write(after)
		w.settle()
		require.Equal(t, []rendezvous.Topology{parsedAfter}, w.got)
		require.NotContains(t, w.log.String(), "WARN")
	})
}

// A pipe, such as the shell's <(...), can be read once.
func TestAPipeIsReadOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	go func() { _ = os.WriteFile(path, []byte(before), 0o600) }()
	f, err := Open(path)
	require.NoError(t, err)
	require.Equal(t, parsedBefore, f.First())
	f.Follow(t.Context(), slog.New(slog.DiscardHandler), func(rendezvous.Topology) { t.Error("changed") })
}

func TestOpen(t *testing.T) {
	f, err := Open("")
	require.NoError(t, err)
	require.Nil(t, f.First())
	f.Follow(t.Context(), nil, nil) // returns at once

	_, err = Open(filepath.Join(t.TempDir(), "nowhere"))
	require.ErrorContains(t, err, "--topology-file: open ")

	path := file(t)
	require.NoError(t, os.WriteFile(path, []byte("a p 10.0.0.1\na b c d\n"), 0o600))
	_, err = Open(path)
	require.ErrorContains(t, err, "--topology-file "+path+": topology line 2")
}
