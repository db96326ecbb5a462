package elector

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/member"
	"dlrover-run/rendezvous"
)

// A helper that says what cannot be read is ended, and does not keep the launcher from ending.
func TestUnreadableHelper(t *testing.T) {
	program := filepath.Join(t.TempDir(), "helper")
	script := "#!/bin/sh\nread config\necho '{\"leader\":\"a:1\",\"term\":1}'\necho '{\"leader\":7}'\n" +
		"exec cat >/dev/null\n"
	require.NoError(t, os.WriteFile(program, []byte(script), 0o700))
	e := New(Config{
		Program: program, Member: member.Config{Patience: time.Minute}, Observe: func(rendezvous.Note) {},
		Start: func(cmd *exec.Cmd) (func() error, error) { return cmd.Wait, cmd.Start() },
		Log:   slog.New(slog.DiscardHandler),
	})
	leader, _, err := e.Meet(t.Context())
	require.NoError(t, err)
	require.Equal(t, "a:1", leader)
	closed := make(chan struct{})
	go func() {
		time.Sleep(200 * time.Millisecond) // the second line is read
		e.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(30 * time.Second):
		require.Fail(t, "Close does not return")
	}
}

// A helper that is frozen is replaced by one that knows the present leader.
func TestFrozenHelper(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "helper")
	script := "#!/bin/sh\nread config\n" +
		"say() { echo '{\"leader\":\"'$1'\",\"term\":1'$2'}'; }\n" +
		"if mkdir " + dir + "/second 2>/dev/null; then say a:1 ',\"beats\":true'; kill -STOP $$; fi\n" +
		"say b:1\nexec cat\n"
	require.NoError(t, os.WriteFile(program, []byte(script), 0o700))
	e := New(Config{
		Program: program, Member: member.Config{Patience: time.Minute}, Observe: func(rendezvous.Note) {},
		Start: func(cmd *exec.Cmd) (func() error, error) { return cmd.Wait, cmd.Start() },
		Log:   slog.New(slog.DiscardHandler),
	})
	e.silence = 300 * time.Millisecond
	leader, _, err := e.Meet(t.Context())
	require.NoError(t, err)
	require.Equal(t, "a:1", leader)
	require.Eventually(t, func() bool { return e.Leader() == "b:1" }, 30*time.Second, 10*time.Millisecond)
	time.Sleep(2 * e.silence) // this one repeats nothing, as older versions do, and is left alone
	require.Equal(t, "b:1", e.Leader())
	e.mu.Lock()
	require.NotNil(t, e.helper)
	e.mu.Unlock()
	e.Close()
}
