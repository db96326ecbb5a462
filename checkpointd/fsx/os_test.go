package fsx

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// source is a Source in page-aligned memory, as a mapped segment is.
type source struct {
	data  []byte
	ready func(ctx context.Context, end int64) error // nil: always ready
}

func (s *source) Len() int64    { return int64(len(s.data)) }
func (s *source) Bytes() []byte { return s.data }
func (s *source) Ready(ctx context.Context, end int64) error {
	if s.ready == nil {
		return nil
	}
	return s.ready(ctx, end)
}

func newSource(t testing.TB, size int) *source {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, (size/align+1)*align, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(mem)) })
	rand.NewChaCha8([32]byte{1}).Read(mem) // the padding is not zero
	return &source{data: mem[:size]}
}

// tempDir is without links on the way.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := OS{}.Resolve(t.TempDir())
	require.NoError(t, err)
	return dir
}

func names(t *testing.T, dir string) (names []string) {
	t.Helper()
	es, err := OS{}.List(dir)
	require.NoError(t, err)
	for _, e := range es {
		names = append(names, e.Name)
	}
	return names
}

func TestWriteFrom(t *testing.T) {
	const umask = 0o027
	defer syscall.Umask(syscall.Umask(umask))
	modes := map[string]OS{"direct": {}, "paced": {Paced: true}, "limited": {Rate: NewLimiter(1 << 40)}}
	sizes := []int{0, 1, 4095, 4096, 4097, directBlock, directBlock + pacedBlock + 5, pacedWindow + 2*pacedBlock + 1}
	for name, o := range modes {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(tempDir(t), "file")
			for _, size := range sizes {
				src := newSource(t, size)
				require.NoError(t, o.WriteFrom(t.Context(), path, src)) // in place of the one before
				got, err := os.ReadFile(path)
				require.NoError(t, err)
				require.True(t, bytes.Equal(src.data, got), size)
				crc, n, err := o.Checksum(t.Context(), path)
				require.NoError(t, err)
				require.Equal(t, int64(size), n)
				require.Equal(t, crc32.ChecksumIEEE(src.data), crc)
				st, err := os.Stat(path)
				require.NoError(t, err)
				require.Equal(t, os.FileMode(0o666&^umask), st.Mode())
			}
		})
	}
}

func TestWriteFromMemoryThatDoesNotSuitTheDevice(t *testing.T) {
	path := filepath.Join(tempDir(t), "file")
	whole := newSource(t, 3*align).data
	cases := map[string][]byte{"not aligned": whole[7:], "no room for padding": whole[: align+1 : align+1]}
	for name, data := range cases {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, OS{}.WriteFrom(t.Context(), path, &source{data: data}))
			got, err := os.ReadFile(path)
			require.NoError(t, err)
			require.True(t, bytes.Equal(data, got))
		})
	}
}

// TestRefusedBlock is a file system that takes O_DIRECT and then refuses a write.
func TestRefusedBlock(t *testing.T) {
	f, err := os.Create(filepath.Join(tempDir(t), "file"))
	require.NoError(t, err)
	defer f.Close()
	if err := setDirect(f, true); err != nil {
		t.Skipf("SKIPPED: no O_DIRECT in %s: %v", os.TempDir(), err)
	}
	data := newSource(t, align+1).data[1:] // a device of other alignment would return EINVAL
	w := writer{f: f, data: data, direct: true}
	require.NoError(t, w.write(data, 0))
	got, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
}

func TestBlockThatNeverGetsReady(t *testing.T) {
	src := newSource(t, 3*directBlock)
	wrong := errors.New("the memory is gone")
	src.ready = func(_ context.Context, end int64) error {
		if end > directBlock {
			return wrong
		}
		return nil
	}
	dir := tempDir(t)
	require.ErrorIs(t, OS{}.WriteFrom(t.Context(), filepath.Join(dir, "file"), src), wrong)
	require.Empty(t, names(t, dir))
}

// TestABlockIsReadyWhenItIsWritten: the source hears of a block right before its write, after the limiter.
func TestABlockIsReadyWhenItIsWritten(t *testing.T) {
	o := OS{Rate: NewLimiter(pacedBlock * 5), Paced: true}
	begin, ends := time.Now(), []int64(nil)
	require.NoError(t, o.Rate.Wait(t.Context(), pacedBlock))
	src := newSource(t, pacedBlock+1)
	src.ready = func(_ context.Context, end int64) error {
		ends = append(ends, end)
		require.GreaterOrEqual(t, time.Since(begin), time.Duration(len(ends))*200*time.Millisecond)
		return nil
	}
	require.NoError(t, o.WriteFrom(t.Context(), filepath.Join(tempDir(t), "file"), src))
	require.Equal(t, []int64{pacedBlock, pacedBlock + 1}, ends)
}

func TestWriteFromCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	src := newSource(t, 2*directBlock)
	src.ready = func(ctx context.Context, end int64) error {
		if end < src.Len() {
			return nil
		}
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}
	dir := tempDir(t)
	require.ErrorIs(t, OS{}.WriteFrom(ctx, filepath.Join(dir, "file"), src), context.Canceled)
	require.Empty(t, names(t, dir))
}

func TestFullStorage(t *testing.T) {
	dir := tempDir(t)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("SKIPPED: what happens on a full storage is not tested: cannot mount a small tmpfs: %v", err)
	}
	defer func() { require.NoError(t, unix.Unmount(dir, 0)) }()
	src := newSource(t, 2<<20)
	src.ready = func(context.Context, int64) error { return errors.New("a byte was to be written") }
	for name, o := range map[string]OS{"direct": {}, "paced": {Paced: true}} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, o.WriteFrom(t.Context(), filepath.Join(dir, "file"), src), syscall.ENOSPC)
			require.Empty(t, names(t, dir))
		})
	}
	require.NoError(t, OS{}.WriteFrom(t.Context(), filepath.Join(dir, "file"), newSource(t, 5000)))
	require.ErrorIs(t, OS{}.WriteFile(filepath.Join(dir, "small"), make([]byte, 2<<20)), syscall.ENOSPC)
	require.Equal(t, []string{"file"}, names(t, dir))
	f, err := os.Open(filepath.Join(dir, "file"))
	require.NoError(t, err)
	defer f.Close()
	require.ErrorIs(t, room(f, 2<<20), syscall.ENOSPC)
	require.NoError(t, room(f, 4096))
}

func TestWriteFile(t *testing.T) {
	dir := tempDir(t)
	path := filepath.Join(dir, "tracker")
	require.NoError(t, OS{}.WriteFile(path, []byte("10")))
	require.NoError(t, OS{}.WriteFile(path, []byte("20")))
	b, err := OS{}.ReadFile(path, 2)
	require.NoError(t, err)
	require.Equal(t, "20", string(b))
	_, err = OS{}.ReadFile(path, 1)
	require.ErrorIs(t, err, ErrTooLong)
	require.ErrorContains(t, err, "2 bytes, at most 1")
	require.Equal(t, []string{"tracker"}, names(t, dir))
	require.ErrorIs(t, OS{}.WriteFile(filepath.Join(dir, "no", "tracker"), nil), fs.ErrNotExist)
}

func TestTemporary(t *testing.T) {
	require.True(t, Temporary(temporaryName("latest")))
	require.NotEqual(t, temporaryName("latest"), temporaryName("latest"))
	for _, name := range []string{"latest", ".latest.tmp", ".latest.0123456789abcdef.tmp", ".w0123456789abcdef.tmp"} {
		require.False(t, Temporary(name), name)
	}
}

func TestNames(t *testing.T) {
	var o OS
	dir := tempDir(t)
	deep := filepath.Join(dir, "a", "b")
	require.NoError(t, o.MkdirAll(deep))
	require.NoError(t, o.MkdirAll(deep))
	require.NoError(t, o.WriteFile(filepath.Join(deep, "x"), []byte("x")))
	require.NoError(t, o.Rename(filepath.Join(deep, "x"), filepath.Join(deep, "y")))
	require.ErrorIs(t, o.Rename(filepath.Join(deep, "x"), filepath.Join(deep, "y")), fs.ErrNotExist)
	require.ErrorIs(t, o.Rename(filepath.Join(deep, "y"), filepath.Join(dir, "y")), syscall.EXDEV)
	require.NoError(t, o.SyncDir(deep))
	size, err := o.Size(filepath.Join(deep, "y"))
	require.NoError(t, err)
	require.Equal(t, int64(1), size)
	_, err = o.Size(filepath.Join(deep, "x"))
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = o.List(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorIs(t, o.Remove(deep), syscall.ENOTEMPTY)
	require.NoError(t, o.Remove(filepath.Join(deep, "y")))
	require.NoError(t, o.Remove(filepath.Join(deep, "y")))
	require.NoError(t, o.Remove(filepath.Join(dir, "none", "y")))
	require.NoError(t, o.Remove(deep))
	require.Empty(t, names(t, filepath.Join(dir, "a")))
	require.ErrorContains(t, o.SyncDir("relative"), "not an absolute")
	require.ErrorContains(t, o.SyncDir(dir+"/../x"), "not an absolute and clean")
}

func TestLinksAreNotFollowed(t *testing.T) {
	var o OS
	dir, other := tempDir(t), tempDir(t)
	secret := filepath.Join(other, "secret")
	require.NoError(t, os.WriteFile(secret, []byte("secret"), 0o600))
	link, sub := filepath.Join(dir, "link"), filepath.Join(dir, "sub")
	require.NoError(t, os.Symlink(secret, link))
	require.NoError(t, os.Symlink(other, sub))
	through := filepath.Join(sub, "secret")

	for _, path := range []string{link, through} {
		_, err := o.ReadFile(path, 100)
		require.Error(t, err)
		_, err = o.Size(path)
		require.Error(t, err)
		_, _, err = o.Checksum(t.Context(), path)
		require.Error(t, err)
	}
	_, err := o.List(sub)
	require.Error(t, err)
	require.Error(t, o.MkdirAll(sub))
	require.Error(t, o.MkdirAll(filepath.Join(sub, "new")))
	require.Error(t, o.SyncDir(sub))
	require.Error(t, o.Remove(through))
	require.Error(t, o.Rename(through, filepath.Join(sub, "moved")))
	require.Error(t, o.WriteFile(through, []byte("x")))
	require.Error(t, o.WriteFrom(t.Context(), through, newSource(t, 1)))

	require.NoError(t, o.WriteFrom(t.Context(), link, newSource(t, 1))) // replaces the link itself
	require.NoError(t, o.Remove(link))
	require.NoError(t, os.Symlink(secret, link))
	require.NoError(t, o.WriteFile(link, []byte("x")))
	require.NoError(t, o.Remove(sub))
	b, err := os.ReadFile(secret)
	require.NoError(t, err)
	require.Equal(t, "secret", string(b))
	require.Equal(t, []string{"secret"}, names(t, other))
}

// TestWalk compares the way of older kernels with openat2.
func TestWalk(t *testing.T) {
	dir := tempDir(t)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a", "f"), nil, 0o600))
	require.NoError(t, os.Symlink("a", filepath.Join(dir, "l")))
	for path, ok := range map[string]bool{"/": true, dir + "/a/b": true, dir + "/a/f": true, dir + "/l": false,
		dir + "/l/f": false, dir + "/no/f": false, dir + "/a/f/x": false} {
		fd, err := walk(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC)
		f, oerr := open(path, unix.O_RDONLY)
		require.Equal(t, ok, err == nil, path)
		require.Equal(t, ok, oerr == nil, path)
		if ok {
			require.NoError(t, unix.Close(fd))
			require.NoError(t, f.Close())
		}
	}
}

func TestResolve(t *testing.T) {
	dir := tempDir(t)
	real := filepath.Join(dir, "real")
	require.NoError(t, os.Mkdir(real, 0o755))
	require.NoError(t, os.Symlink("real", filepath.Join(dir, "link")))
	require.NoError(t, os.Symlink("loop", filepath.Join(dir, "loop")))
	for from, want := range map[string]string{"link": real, "link/new/dir": real + "/new/dir", "none/": dir + "/none",
		"real/../link": real} {
		got, err := OS{}.Resolve(dir + "/" + from)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := OS{}.Resolve("link")
	require.ErrorContains(t, err, "not an absolute path")
	_, err = OS{}.Resolve(filepath.Join(dir, "loop"))
	require.Error(t, err)
}

func TestNotARegularFile(t *testing.T) {
	dir := tempDir(t)
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, unix.Mkfifo(fifo, 0o600))
	_, err := OS{}.ReadFile(fifo, 1) // at once, although the FIFO has no writer
	require.ErrorIs(t, err, ErrNotRegular)
	_, _, err = OS{}.Checksum(t.Context(), dir)
	require.ErrorContains(t, err, "not a regular file")
}

func TestChecksumCancelled(t *testing.T) {
	path := filepath.Join(tempDir(t), "file")
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := OS{}.Checksum(ctx, path)
	require.ErrorIs(t, err, context.Canceled)
}

func BenchmarkWriteFrom(b *testing.B) {
	const size = 256 << 20
	src := newSource(b, size)
	for name, o := range map[string]OS{"direct": {}, "paced": {Paced: true}} {
		b.Run(name, func(b *testing.B) {
			path := filepath.Join(tempDir(b), "file")
			b.SetBytes(size)
			for b.Loop() {
				require.NoError(b, o.WriteFrom(b.Context(), path, src))
			}
		})
	}
}

// A file system without fsync is reported instead of being tried for ever.
func TestFileSystemsWithoutFsync(t *testing.T) {
	var weak []string
	o := OS{Weak: func(path string, _ error) { weak = append(weak, path) }}
	require.NoError(t, o.SyncDir("/proc")) // EINVAL
	for _, err := range []error{unix.ENOTSUP, unix.ENOSYS, unix.EBADF} {
		require.NoError(t, o.synced("/x", &fs.PathError{Op: "sync", Path: "/x", Err: err}))
	}
	require.Equal(t, []string{"/proc", "/x", "/x", "/x"}, weak)
	require.ErrorIs(t, o.synced("/x", unix.EIO), unix.EIO)
	require.NoError(t, o.SyncDir(tempDir(t)))
	require.NoError(t, OS{}.SyncDir("/proc"))
	require.Len(t, weak, 4)
}

// A lock is for one holder at a time, and patience for it ends.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	done, err := OS{}.Lock(path, 0)
	require.NoError(t, err)
	_, err = OS{}.Lock(path, 20*time.Millisecond)
	require.ErrorIs(t, err, unix.EAGAIN)
	time.AfterFunc(50*time.Millisecond, done)
	done, err = OS{}.Lock(path, time.Minute)
	require.NoError(t, err)
	done()
	_, err = OS{}.Lock(filepath.Join(path, "no", "lock"), time.Minute)
	require.ErrorIs(t, err, unix.ENOTDIR)
	link := filepath.Join(filepath.Dir(path), "link")
	require.NoError(t, os.Symlink(path, link))
	_, err = OS{}.Lock(link, time.Minute)
	require.ErrorIs(t, err, unix.ELOOP)
}
