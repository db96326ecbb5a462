package dump

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// served is a directory as a launcher has it.
func served(t *testing.T, answer func(context.Context, Request) Answer) (path string, s *Server) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "hang-x")
	require.NoError(t, mkdir(dir))
	s, err := Serve(dir, answer)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return filepath.Join(dir, socket), s
}

func mkdir(dir string) error { return os.MkdirAll(dir, 0o700) }

func TestLaunchersAreFoundAndAnswer(t *testing.T) {
	path, s := served(t, func(_ context.Context, r Request) Answer {
		return Answer{Run: r.Dir, World: r.Steps, Workers: []Worker{{Rank: r.Ranks[0], PID: 7}}}
	})
	found, err := Find()
	require.NoError(t, err)
	require.Contains(t, found, path)
	a, err := Ask(t.Context(), path, Request{Dir: "/x", Steps: 4, Ranks: []int{3}})
	require.NoError(t, err)
	require.Equal(t, Answer{Run: "/x", World: 4, Workers: []Worker{{3, 7}}}, a)
	require.NoError(t, s.Close())
	_, err = Ask(t.Context(), path, Request{})
	require.True(t, Gone(err), "%v", err)
	found, err = Find()
	require.NoError(t, err)
	require.NotContains(t, found, path)
}

// A launcher that is stopped, or whose storage hangs, holds up nobody who asks.
func TestALauncherThatIsSilent(t *testing.T) {
	path, _ := served(t, func(ctx context.Context, _ Request) Answer {
		<-ctx.Done()
		return Answer{}
	})
	_, err := askWithin(t.Context(), path, Request{Native: true}, 100*time.Millisecond)
	require.ErrorIs(t, err, ErrSilent)
	require.EqualError(t, err, "the launcher at "+path+" has not answered for 100ms: it is stopped, or the machine or "+
		"the storage of the files hangs")
	require.Equal(t, 5*time.Second, Request{}.limit())
	require.Equal(t, 30*time.Second, Request{Native: true}.limit())
	require.Equal(t, 630*time.Second, Request{Python: true, Steps: 1}.limit())
}

// Whoever asks may go: the launcher stops what it does for them.
func TestWhoAsksMayGo(t *testing.T) {
	began, ended := make(chan struct{}), make(chan struct{})
	path, _ := served(t, func(ctx context.Context, _ Request) Answer {
		close(began)
		<-ctx.Done()
		close(ended)
		return Answer{}
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	_, err := Ask(ctx, path, Request{})
	require.ErrorIs(t, err, context.Canceled)
	<-ended
}

func TestALauncherThatEnds(t *testing.T) {
	began := make(chan struct{})
	path, s := served(t, func(ctx context.Context, _ Request) Answer {
		close(began)
		<-ctx.Done()
		return Answer{}
	})
	go func() { <-began; _ = s.Close() }()
	_, err := Ask(t.Context(), path, Request{})
	require.ErrorContains(t, err, "the launcher has ended meanwhile")
}

// The storage that a dump goes to may hang: the launcher ends all the same.
func TestAnAnswerThatHangs(t *testing.T) {
	began, release, closed := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	path, s := served(t, func(context.Context, Request) Answer {
		close(began)
		<-release
		return Answer{}
	})
	defer close(release)
	go func() { _, _ = Ask(t.Context(), path, Request{}) }()
	<-began
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		require.NoError(t, err)
	case <-time.After(patience):
		t.Fatal("it waits for the answer")
	}
}

// A socket may be anybody's.
func TestWhoListens(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: WHO LISTENS AT A SOCKET IS NOT TESTED: it takes root")
	}
	path, s := served(t, func(context.Context, Request) Answer { return Answer{Run: "j"} })
	const other = 65534
	listenAs(t, s, other)
	_, err := Ask(t.Context(), path, Request{})
	require.ErrorContains(t, err, "uid 65534 listens at "+path)
	require.NoError(t, os.Chown(filepath.Dir(path), other, other))
	a, err := Ask(t.Context(), path, Request{})
	require.NoError(t, err, "root asks the launchers of other users")
	require.Equal(t, "j", a.Run)
}

// listenAs makes the listener another user's: the kernel notes who has called listen.
func listenAs(t *testing.T, s *Server, uid uintptr) {
	t.Helper()
	raw, err := s.l.SyscallConn()
	require.NoError(t, err)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // which ends with this goroutine, and its user
		const same = ^uintptr(0)
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, same, uid, same); e != 0 {
			done <- e
			return
		}
		var inner error
		err := raw.Control(func(fd uintptr) { inner = syscall.Listen(int(fd), 8) })
		done <- errors.Join(err, inner)
	}()
	require.NoError(t, <-done)
}

func TestWhatIsNoRequest(t *testing.T) {
	path, _ := served(t, func(context.Context, Request) Answer { return Answer{Run: "j"} })
	for text, want := range map[string]string{"{\n": "need the same version", "{}\n": `"run":"j"`, "[1]\n": "version"} {
		c, err := net.Dial("unix", path)
		require.NoError(t, err)
		_, err = c.Write([]byte(text))
		require.NoError(t, err)
		var b [4096]byte
		n, err := c.Read(b[:])
		require.NoError(t, err)
		require.Contains(t, string(b[:n]), want)
		require.NoError(t, c.Close())
	}
}

func TestSocketsAreKnownByTheirPlace(t *testing.T) {
	require.Equal(t, []string{"/dev/shm/dlrover-0/hang-ab/dump", "/tmp/my shm/hang-c/dump"}, sockets(
		"Num       RefCount Protocol Flags    Type St Inode Path\n"+
			"0000: 00000002 00000000 00010000 0001 01 17 /tmp/my shm/hang-c/dump\n"+
			"0000: 00000002 00000000 00010000 0001 01 18 /dev/shm/dlrover-0/hang-ab/dump\n"+
			"0000: 00000002 00000000 00010000 0001 03 19 /dev/shm/dlrover-0/hang-ab/dump\n"+
			"0000: 00000002 00000000 00010000 0001 01 20 /run/dump\n"+
			"0000: 00000002 00000000 00010000 0001 01 21 @/hang-x/dump/more\n"+
			"0000: 00000002 00000000 00010000 0001 01 22\n"))
}

func TestAPathThatIsTooLong(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("x", 100))
	require.NoError(t, mkdir(dir))
	_, err := Serve(dir, nil)
	require.ErrorContains(t, err, "longer than a socket's may be")
}

func FuzzSockets(f *testing.F) {
	f.Add("0000: 00000002 00000000 00010000 0001 01 17 /tmp/hang-c/dump\n")
	f.Fuzz(func(t *testing.T, table string) {
		for _, path := range sockets(table) {
			require.True(t, filepath.IsAbs(path))
			require.NotContains(t, path, "\n")
		}
	})
}
