//go:build linux

package sockets

import (
	"bytes"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// pair is a connection of this process with itself, which has both ends.
func pair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	a, err = net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = a.Close() })
	b, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close() })
	return a, b
}

func TestTrafficOfAProcess(t *testing.T) {
	a, b := pair(t)
	carried := func(pids []int) uint64 { return Traffic(1)(pids) }
	pids := []int{os.Getpid()}
	before := carried(pids)
	_, err := a.Write(make([]byte, 50_000))
	require.NoError(t, err)
	_, err = io.ReadFull(b, make([]byte, 50_000))
	require.NoError(t, err)
	grown := carried(pids) - before
	require.GreaterOrEqual(t, grown, uint64(50_000))
	require.Less(t, grown, uint64(101_000), "received, and perhaps acknowledged; each connection counts once")
	require.Equal(t, before+grown, carried(append(pids, pids...)))
	require.Zero(t, carried([]int{1 << 30}))
	require.Zero(t, carried(nil))
	kept := Traffic(1)
	require.Equal(t, before+grown, kept(pids))
	_, err = a.Write(make([]byte, 9000))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return kept(pids) > before+grown }, 10*time.Second, 10*time.Millisecond)
	port := a.RemoteAddr().(*net.TCPAddr).Port
	require.LessOrEqual(t, Traffic(uint16(port))(pids), before, "the store's do not count")
}

func FuzzParseAnswer(f *testing.F) {
	whole := make([]byte, answerLen+4+offAcked+16)
	whole[answerLen], whole[answerLen+1], whole[answerLen+2] = byte(4+offAcked+16), 0, attrInfo
	f.Add(whole)
	f.Add(whole[:answerLen+3])
	f.Add(bytes.Repeat([]byte{0xff}, 300))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, ok := parseAnswer(b)
		require.Equal(t, ok, ok && len(b) >= answerLen+4+offAcked+16, "%+v", c)
		_, _ = answer(b, func(connection) {})
	})
}

// BenchmarkTraffic is one look at eight workers.
func BenchmarkTraffic(b *testing.B) {
	b.ReportAllocs()
	t := newTraffic(1)
	for b.Loop() {
		t.at = time.Time{}
		for range 8 {
			t.of([]int{os.Getpid()})
		}
	}
}
