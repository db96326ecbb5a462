//go:build !race

package master

import (
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/pyproto"
)

// frame is one of HTTP/2.
func frame(kind, flags byte, stream uint32, payload string) string {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	return string(binary.BigEndian.AppendUint32(append(b, flags), stream)) + payload
}

// greeting begins a connection of HTTP/2 that takes no answers.
var greeting = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, "\x00\x04\x00\x00\x00\x00")

// The headers of a request, which HPACK could make smaller.
func headers(method, path string) string {
	return method + "\x86\x04" + string(rune(len(path))) + path + "\x01\x01x"
}

const (
	get, post = "\x82", "\x83"
	call      = pyproto.GRPCPath + "get"
)

// held is the memory in use.
func held() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc + m.StackInuse)
}

// Strangers who open streams and read nothing, send halves of requests, reset what they have begun or end no header
// cost the master no more memory than there is room, and callers are answered meanwhile.
func TestStrangersTakeLittleMemory(t *testing.T) {
	const conns, streams = 40, 100
	ask := string(pyproto.RequestBody(pyproto.Caller{NodeType: "worker"}, pyproto.Comm.New("KeyValuePair",
		pyproto.Field{Name: "key", Value: "k"})))
	each := func(f func(stream uint32) string) string {
		var b strings.Builder
		for i := range uint32(streams) {
			b.WriteString(f(2*i + 1))
		}
		return b.String()
	}
	asked := func(stream uint32) string {
		return frame(1, 4, stream, headers(post, call)) + frame(0, 1, stream, ask)
	}
	long := strings.Repeat("\x00\x01a\x64"+strings.Repeat("b", 100), 150) // 15 kB
	const little, room, garbage = 24 << 20, 64 << 20, 192 << 20           // what calls leave that go on counts, too
	for name, c := range map[string]struct {
		say  string
		most int
	}{
		"answers that are not read": {greeting + each(asked), room},
		"metrics that are not read": {greeting + each(func(s uint32) string {
			return frame(1, 5, s, headers(get, "/metrics"))
		}), little},
		"halves of requests": {greeting + each(func(s uint32) string {
			return frame(1, 4, s, headers(post, call)) + frame(0, 0, s, "\x00\x01\x00\x00\x00"+strings.Repeat("x", 4000))
		}), little},
		"large frames that do not come": {greeting + frame(1, 4, 1, headers(post, call)) +
			"\x0f\xff\xff\x00\x00\x00\x00\x00\x01", little},
		"headers that are too long": {greeting + each(func(s uint32) string {
			return frame(1, 1, s, headers(get, "/")) + frame(9, 0, s, long) + frame(9, 4, s, long)
		}), little},
		"rapid reset": {greeting + each(func(s uint32) string {
			return asked(s) + frame(3, 0, s, "\x00\x00\x00\x08")
		}), garbage},
		"headers without an end": {greeting + frame(1, 0, 1, headers(get, "/")) +
			strings.Repeat(frame(9, 0, 1, long), 200), little},
		"HTTP/1.1 that is not read": {strings.Repeat("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 2000), little},
		"half a header":             {"GET /metrics HTTP/1.1\r\nHost: " + strings.Repeat("x", 14<<10), little},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, at, end := served(t, "--python-agents=open", "--open-metrics")
			defer end()
			at = strings.TrimPrefix(at, "http://")
			agent := pyproto.NewClient(pyproto.ClientConfig{Addr: at, Caller: pyproto.Caller{NodeType: "worker"}})
			defer agent.Close()
			require.NoError(t, agent.Report(t.Context(), agent.New("KeyValuePair", pyproto.Field{Name: "key", Value: "k"},
				pyproto.Field{Name: "value", Value: make([]byte, 1<<20)}, pyproto.Field{Name: "op", Value: "set"})))
			before := held()
			for range conns {
				nc, err := net.Dial("tcp", at)
				require.NoError(t, err)
				defer nc.Close()
				require.NoError(t, nc.SetWriteDeadline(time.Now().Add(time.Second))) // it may be read no more
				_, _ = io.WriteString(nc, c.say)
			}
			for range 3 {
				began := time.Now()
				_, err := agent.Get(t.Context(), agent.New("HeartBeat"))
				require.NoError(t, err)
				resp, err := http.Get("http://" + at + "/metrics")
				require.NoError(t, err)
				_ = resp.Body.Close()
				require.Less(t, time.Since(began), 20*time.Second)
				more := held() - before
				t.Logf("%d connections took %d kB", conns, more>>10)
				require.Less(t, more, c.most)
			}
		})
	}
}
