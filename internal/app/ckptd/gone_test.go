package ckptd

import (
	"bufio"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain is also a process that ends by itself.
func TestMain(m *testing.M) {
	if os.Getenv("CKPTD_HANGS") != "" {
		exitAfter(time.Millisecond, slog.New(slog.DiscardHandler))
		time.Sleep(time.Minute)
		os.Exit(0)
	}
	if text := os.Getenv("CKPTD_LAUNCHER"); text != "" {
		launcher, err := strconv.Atoi(text)
		if err != nil {
			panic(err)
		}
		dead := parentDeath(launcher)
		select {
		case <-dead:
			fmt.Println("dead before")
		case <-time.After(10 * time.Millisecond):
			fmt.Println("alive")
		}
		<-dead
		fmt.Println("gone")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A call that hangs does not keep the process.
func TestExitAfter(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "CKPTD_HANGS=1")
	require.Error(t, cmd.Run())
	require.Equal(t, 1, cmd.ProcessState.ExitCode())
}

// The death of the parent is seen, also when it came first.
func TestGone(t *testing.T) {
	for _, c := range []struct{ script, want string }{
		{`CKPTD_LAUNCHER=$$ "$0" & read line`, "alive"},
		{`(CKPTD_LAUNCHER=1$$ "$0" &)`, "dead before"},
	} {
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", c.script, os.Args[0])
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		read, write, err := os.Pipe()
		require.NoError(t, err)
		defer read.Close()
		cmd.Stdout, cmd.Stderr = write, os.Stderr
		require.NoError(t, cmd.Start())
		require.NoError(t, write.Close())
		out := bufio.NewScanner(read)
		require.True(t, out.Scan())
		require.Equal(t, c.want, out.Text())
		require.NoError(t, in.Close())
		require.True(t, out.Scan())
		require.Equal(t, "gone", out.Text())
		_ = cmd.Wait() // the shell read nothing
	}
}
