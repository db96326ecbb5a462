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
