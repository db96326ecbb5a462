package console

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// full is a pipe that takes nothing until it is read.
func full(t *testing.T) (r, w *os.File, held int) {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { r.Close(); w.Close() })
	require.NoError(t, w.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
	for err == nil {
		var n int
		n, err = w.Write(make([]byte, 4096))
		held += n
	}
	require.NoError(t, w.SetWriteDeadline(time.Time{}))
	return r, w, held
}

// A reader that has stopped costs those that log a tenth of a second in all. Once it reads again it gets what was kept,
// in order, and how much was not.
func TestAReaderThatReadsNothingHoldsUpNobody(t *testing.T) {
	r, w, held := full(t)
	out := newRelay(w)
	log := Logger(out, "prog", Text, slog.LevelInfo)
	const lines = 3000
	pad := strings.Repeat("x", 200)
	begun := time.Now()
	for i := range lines {
		log.Info("line", "pad", pad, "i", i)
	}
	require.Less(t, time.Since(begun), 10*time.Second)

	begun = time.Now()
	out.Flush()
	require.Less(t, time.Since(begun), flushLimit)

	_, err := io.CopyN(io.Discard, r, int64(held))
	require.NoError(t, err)
	in := bufio.NewReader(r)
	read := func() string {
		require.NoError(t, r.SetReadDeadline(time.Now().Add(10*time.Second)))
		line, err := in.ReadString('\n')
		require.NoError(t, err)
		return strings.TrimSpace(line)
	}
	kept := 0
	line := read()
	for ; strings.HasSuffix(line, fmt.Sprintf("x i=%d", kept)); line = read() {
		kept++
	}
	require.Greater(t, kept, 500)
	require.Regexp(t, regexp.MustCompile(`WARN +prog: standard error took nothing for a while: lines were dropped lines=`+
		fmt.Sprint(lines-kept)+`$`), line)
	out.Flush()
	log.Info("back")
	require.Contains(t, read(), "back")
}

// The goroutine that writes tells what was dropped, and does not wait for itself.
func TestTheWriterDoesNotWaitForItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := newRelay(nil)
		Logger(out, "prog", Text, slog.LevelInfo)
		out.dropped, out.idle = 7, make(chan struct{})
		begun := time.Now()
		out.tell()
		require.Zero(t, time.Since(begun))
		_, text := out.next()
		require.Contains(t, string(text), "lines=7")
	})
}

// What is written comes before what happens next.
func TestWritesAreWaitedFor(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	var through strings.Builder
	out := newRelay(w)
	out.Through(&through)
	n, err := io.WriteString(out, "text")
	require.NoError(t, err)
	require.Equal(t, 4, n)
	out.Flush()
	require.Equal(t, "text", through.String())
	out.Through(nil)
	_, err = io.WriteString(out, "direct")
	require.NoError(t, err)
	out.Flush()
	buf := make([]byte, 10)
	n, err = r.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "direct", string(buf[:n]))
	require.NoError(t, r.Close())
	_, err = io.WriteString(out, "nobody reads this")
	require.NoError(t, err)
}
