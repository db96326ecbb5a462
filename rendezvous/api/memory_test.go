//go:build !race

package api

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// TestHeldWatchesNeedLittleMemory holds Watches of nodes that have joined over the same connections: 6 kB a node, where
// net/http would take 30.
func TestHeldWatchesNeedLittleMemory(t *testing.T) {
	const nodes, most = 200, 14 << 10
	s := serveHub(t, "")
	conns := make([]net.Conn, nodes)
	before := memory()
	for i := range conns {
		nc, err := net.Dial("tcp", s.addr)
		require.NoError(t, err)
		t.Cleanup(func() { nc.Close() })
		require.NoError(t, nc.SetDeadline(time.Now().Add(time.Minute)))
		conns[i] = nc
		id := fmt.Sprint("n", i)
		body, err := json.Marshal(joinBody{Join: joinOf(id, rendezvous.Params{Min: nodes + 1, Max: nodes + 1})})
		require.NoError(t, err)
		const join = "POST /v1/runs/job/join HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
		exchange(t, nc, fmt.Sprintf(join, len(body), body))
		first := exchange(t, nc, watchOf(id, 0))
		var d rendezvous.Directive
		require.NoError(t, json.Unmarshal([]byte(first), &d))
		_, err = fmt.Fprint(nc, watchOf(id, d.Seq))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return (memory()-before)/nodes < most }, 10*time.Second, 50*time.Millisecond,
		"more than %d bytes a node", most)
}

func watchOf(id string, after uint64) string {
	return fmt.Sprintf("GET /v1/runs/job/watch?node=%s&after=%d HTTP/1.1\r\nHost: a\r\n\r\n", id, after)
}

// exchange sends a request and returns the body of its answer.
func exchange(t *testing.T, nc net.Conn, request string) string {
	_, err := fmt.Fprint(nc, request)
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(nc), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	var b strings.Builder
	_, err = bufio.NewReader(resp.Body).WriteTo(&b)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, b.String())
	return b.String()
}

// memory returns the bytes of heap and stacks in use, as few as the garbage collector makes them.
func memory() int {
	runtime.GC()
	runtime.GC() // empties the pools of net/http
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.StackInuse + m.HeapAlloc)
}
