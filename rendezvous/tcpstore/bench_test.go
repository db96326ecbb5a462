package tcpstore

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func BenchmarkSetGet(b *testing.B) {
	_, addr := start(b, Config{})
	for _, size := range []int{16, 4000, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c, ctx, value := dial(b, addr), b.Context(), make([]byte, size)
			b.SetBytes(int64(2 * size))
			b.ReportAllocs()
			for b.Loop() {
				require.NoError(b, c.Set(ctx, "/k", value))
				_, err := c.Get(ctx, "/k")
				require.NoError(b, err)
			}
		})
	}
}

// BenchmarkApply is the cost of a request without sockets.
func BenchmarkApply(b *testing.B) {
	s := newStore(1 << 30)
	set := request{op: opSet, gen: genB, keys: []string{"/k"}, values: [][]byte{make([]byte, 16)}}
	get := request{op: opGet, gen: genB, keys: []string{"/k"}}
	b.ReportAllocs()
	for b.Loop() {
		_, _ = s.apply(1, set)
		_, _ = s.apply(1, get)
	}
}

// Benchmark10kConns reports the memory of an idle connection that waits for a key, and the time until one SET has
// reached all of them. The clients are another process, so that only the server's memory counts.
func Benchmark10kConns(b *testing.B) {
	const conns = 10_000
	var files syscall.Rlimit
	require.NoError(b, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files))
	if files.Cur < conns+100 {
		b.Skipf("needs %d file descriptors, the limit is %d", conns+100, files.Cur)
	}
	for b.Loop() {
		s, addr := start(b, Config{})
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		begin := time.Now()
		crowd := exec.Command(os.Args[0])
		crowd.Env = append(os.Environ(), crowdEnv+"="+addr, crowdSizeEnv+"="+strconv.Itoa(conns))
		crowd.Stderr = os.Stderr
		require.NoError(b, crowd.Start())
		require.Eventually(b, func() bool { return s.stats().Requests == conns }, time.Minute, time.Millisecond)
		b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms-to-connect-all")
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/conns, "heap-B/conn")
		b.ReportMetric(float64(after.StackInuse-before.StackInuse)/conns, "stack-B/conn")
		begin = time.Now()
		require.NoError(b, dial(b, addr).Set(b.Context(), "/go", nil))
		require.NoError(b, crowd.Wait())
		b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms-to-wake-all")
		require.NoError(b, s.Close())
	}
}

// Environment of the test binary that makes it a crowd of clients.
const (
	crowdEnv     = "TCPSTORE_TEST_CROWD"
	crowdSizeEnv = "TCPSTORE_TEST_CROWD_SIZE"
)

// runCrowd connects many clients that wait for one key, and returns when all were woken.
func runCrowd(addr, size string) error {
	n, err := strconv.Atoi(size)
	if err != nil {
		return err
	}
	conns := make([]net.Conn, n)
	for i := range conns {
		if conns[i], err = net.Dial("tcp", addr); err != nil {
			return err
		}
		if _, err := io.WriteString(conns[i], greeting+"\x06"+strs("/go")); err != nil {
			return err
		}
	}
	answer := make([]byte, 1)
	for _, nc := range conns {
		if _, err := io.ReadFull(nc, answer); err != nil {
			return err
		}
	}
	return nil
}
