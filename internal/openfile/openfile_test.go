package openfile

import (
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// planted is what a process may put in the place of a file.
var planted = map[string]func(t *testing.T, path string){
	"fifo": func(t *testing.T, path string) { require.NoError(t, syscall.Mkfifo(path, 0o600)) },
	"fifo with both ends open": func(t *testing.T, path string) {
		require.NoError(t, syscall.Mkfifo(path, 0o600))
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
	},
	"link to a device": func(t *testing.T, path string) { require.NoError(t, os.Symlink("/dev/zero", path)) },
	"link to itself":   func(t *testing.T, path string) { require.NoError(t, os.Symlink(path, path)) },
	"directory":        func(t *testing.T, path string) { require.NoError(t, os.Mkdir(path, 0o700)) },
	"socket": func(t *testing.T, path string) {
		l, err := net.Listen("unix", path)
		require.NoError(t, err)
		t.Cleanup(func() { l.Close() })
	},
}

func TestWhatIsNoFileIsRefused(t *testing.T) {
	for name, plant := range planted {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir()) // the name of a socket is short
			plant(t, "x")
			for _, flags := range []int{os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREATE, os.O_RDWR | os.O_CREATE} {
				_, err := Open("x", flags, 0o600)
				require.ErrorContains(t, err, "open x: ")
			}
			_, err := OpenLinked("x")
			require.ErrorContains(t, err, "open x: ")
			_, err = Read("x", 10)
			require.ErrorContains(t, err, "open x: ")
			require.ErrorContains(t, WriteNamed("x", nil, 0o600), "open x: ")
		})
	}
}

func TestLinksAreFollowedOnlyWhereAPersonNamesThem(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	require.NoError(t, os.WriteFile(file, []byte("text"), 0o600))
	require.NoError(t, os.Symlink("file", link))
	_, err := Read(link, 10)
	require.ErrorIs(t, err, ErrLink)
	_, err = Open(link, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	require.ErrorIs(t, err, ErrLink)
	text, err := ReadNamed(link, 10)
	require.NoError(t, err)
	require.Equal(t, "text", string(text))
	f, err := OpenLinked(link)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

func TestBounds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	require.NoError(t, os.WriteFile(path, []byte("0123456789"), 0o600))
	for _, read := range []func(string, int64) ([]byte, error){Read, ReadNamed} {
		text, err := read(path, 10)
		require.NoError(t, err)
		require.Len(t, text, 10)
		_, err = read(path, 9)
		require.ErrorIs(t, err, ErrTooLong)
		require.ErrorContains(t, err, path+": too long: at most 9 bytes are read")
		_, err = read("/proc/self/stat", 9) // its size is 0
		require.ErrorIs(t, err, ErrTooLong)
		_, err = read(filepath.Join(path, "y"), 9)
		require.ErrorIs(t, err, syscall.ENOTDIR)
	}
	_, err := ReadNamed("/dev/zero", 1<<40)
	require.ErrorIs(t, err, ErrNotRegular)
}

// The flag is one of the open file, which a worker may get as its stdout.
func TestChildrenGetNoFlag(t *testing.T) {
	f, err := Open(filepath.Join(t.TempDir(), "x"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o640)
	require.NoError(t, err)
	defer f.Close()
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	require.NoError(t, err)
	require.Zero(t, flags&unix.O_NONBLOCK)
	require.NotZero(t, flags&unix.O_APPEND)
	flags, err = unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.NotZero(t, flags&unix.FD_CLOEXEC)
	_, err = io.WriteString(f, "text")
	require.NoError(t, err)
}

func TestPipesOfAShell(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	_, err = io.WriteString(w, "text")
	require.NoError(t, err)
	require.NoError(t, w.Close())
	text, err := ReadNamed(fmt.Sprintf("/dev/fd/%d", r.Fd()), 10)
	require.NoError(t, err)
	require.Equal(t, "text", string(text))
	text, err = ReadNamed(fmt.Sprintf("/dev/fd/%d", r.Fd()), 10)
	require.NoError(t, err, "a pipe whose writer has ended is an empty file")
	require.Empty(t, text)
	text, err = ReadNamed(os.DevNull, 10)
	require.NoError(t, err)
	require.Empty(t, text)
}

func TestAPipeWhoseWriterComesLater(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	written := make(chan error, 1)
	go func() { written <- os.WriteFile(path, []byte("text"), 0) }() // waits for a reader
	text, err := ReadNamed(path, 10)
	require.NoError(t, err)
	require.NoError(t, <-written)
	require.Equal(t, "text", string(text))
}

func TestAPipeThatStaysSilent(t *testing.T) {
	pipeTime = 10 * time.Millisecond
	t.Cleanup(func() { pipeTime = 10 * time.Second })
	path := filepath.Join(t.TempDir(), "x")
	planted["fifo with both ends open"](t, path)
	planted["fifo"](t, path+"y")
	for _, path := range []string{path, path + "y"} {
		_, err := ReadNamed(path, 10)
		require.EqualError(t, err, "read "+path+": a pipe whose writer has not ended within 10ms")
	}
}

// A file that the user names stays the same one, wherever it is mounted or linked.
func TestWriteNamed(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.Symlink("file", "link"))
	require.NoError(t, WriteNamed("link", []byte("a longer text"), 0o640))
	require.NoError(t, os.Link("file", "same"))
	require.NoError(t, WriteNamed("link", []byte("text"), 0o600))
	text, err := Read("same", 20)
	require.NoError(t, err)
	require.Equal(t, "text", string(text))
	info, err := os.Lstat("link")
	require.NoError(t, err)
	require.Equal(t, fs.ModeSymlink, info.Mode().Type())
}

func TestReplace(t *testing.T) {
	for name, plant := range planted {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			plant(t, "x")
			err := Replace("x", []byte("text"), 0o640)
			if name == "directory" {
				require.Error(t, err)
			} else {
				require.NoError(t, err)
				text, err := Read("x", 10)
				require.NoError(t, err)
				require.Equal(t, "text", string(text))
				info, err := os.Lstat("x")
				require.NoError(t, err)
				require.Equal(t, fs.FileMode(0o640), info.Mode())
			}
			left, err := filepath.Glob(".*.new")
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}
