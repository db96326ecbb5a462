package ras

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// status is in the form of NCCL's.
const status = `NCCL version 2.24.3 compiled with CUDA 12.4
Warnings
========

#0-0 (12ab) MISMATCH
  3 ranks have launched up to operation 17
  1 ranks have launched up to operation 16
  Rank 2 -- GPU 2 managed by process 4711 on node 192.0.2.7
`

// fake serves one client: answer is what it does after the commands.
func fake(t *testing.T, answer func(nc net.Conn)) (addr string, commands <-chan string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	got := make(chan string, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		in := bufio.NewReader(nc)
		first, _ := in.ReadString('\n')
		second, _ := in.ReadString('\n')
		got <- first + second
		answer(nc)
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String(), got
}

func TestQuery(t *testing.T) {
	addr, commands := fake(t, func(nc net.Conn) { _, _ = io.WriteString(nc, "OK\n"+status) })
	ctx, cancel := context.WithTimeout(t.Context(), 7500*time.Millisecond)
	defer cancel()
	got, err := Query(ctx, addr)
	require.NoError(t, err)
	require.Equal(t, status, got)
	require.Equal(t, "TIMEOUT 6\nVERBOSE STATUS\n", <-commands)
}

func TestNobodyListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	_, err = Query(t.Context(), l.Addr().String())
	require.ErrorIs(t, err, errNone)
}

// What has come until the deadline is worth having.
func TestAServerThatStalls(t *testing.T) {
	addr, _ := fake(t, func(nc net.Conn) {
		_, _ = io.WriteString(nc, "OK\n"+status)
		_, _ = nc.Read(make([]byte, 1))
	})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	got, err := Query(ctx, addr)
	require.True(t, errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
	require.Equal(t, status, got)
}

func TestAServerThatNeverEnds(t *testing.T) {
	addr, _ := fake(t, func(nc net.Conn) {
		for {
			if _, err := io.WriteString(nc, strings.Repeat("\xffé", 1000)); err != nil {
				return
			}
		}
	})
	got, err := Query(t.Context(), addr)
	require.NoError(t, err)
	require.Less(t, len(got), maxText+100)
	require.Contains(t, got, "bytes left out]")
	require.Equal(t, got, strings.ToValidUTF8(got, ""))
}

func TestBothEndsOfALongStatusAreKept(t *testing.T) {
	got := shown([]byte("OK\nthe summary" + strings.Repeat("x", 100_000) + "the warnings"))
	require.True(t, strings.HasPrefix(got, "the summary"))
	require.True(t, strings.HasSuffix(got, "the warnings"))
	require.Contains(t, got, "\n[83639 bytes left out]\n")
}

func TestAddress(t *testing.T) {
	for want, user := range map[string]map[string]string{
		defaultAddress: {"NCCL_RAS_ENABLE": "1"},
		"[::1]:1":      {"NCCL_RAS_ADDR": "[::1]:1"},
		"":             {"NCCL_RAS_ADDR": "[::1]:1", "NCCL_RAS_ENABLE": "0"},
	} {
		require.Equal(t, want, Address(func(name string) (string, bool) { v, ok := user[name]; return v, ok }))
	}
}
