package pyproto

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/pickle"
)

// hog sends most of a large request and no end, until ctx is over. The answer comes when the rest is not wanted.
func hog(ctx context.Context, t *testing.T, addr string, overHTTP bool, n int) (refused chan string) {
	t.Helper()
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(overHTTP)
	tr.Protocols.SetUnencryptedHTTP2(!overHTTP)
	path, head := GRPCPath+"get", string(binary.BigEndian.AppendUint32([]byte{0}, maxMessage))
	if overHTTP {
		path, head = "/get", `{"data": "`
	}
	body, in := io.Pipe()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+path, body)
	require.NoError(t, err)
	refused = make(chan string, 1)
	go func() {
		_, _ = io.Copy(in, io.MultiReader(strings.NewReader(head), bytes.NewReader(bytes.Repeat([]byte("A"), n))))
		<-ctx.Done()
		_ = in.CloseWithError(ctx.Err())
	}()
	go func() {
		defer tr.CloseIdleConnections()
		resp, err := tr.RoundTrip(req)
		if err != nil {
			close(refused)
			return
		}
		text, _ := io.ReadAll(resp.Body)
		refused <- string(text) + resp.Trailer.Get("Grpc-Status")
		_ = resp.Body.Close()
	}()
	return refused
}

// Strangers who send much and never end get no more memory than there is room; agents go on, and large messages are
// taken again afterwards.
func TestRoomForLargeRequests(t *testing.T) {
	const size = 2 << 20 // small, so that slow machines fill it long before a request's time is over
	both(t, func(t *testing.T, overHTTP bool) {
		addr := serve(t, handler(&backend{answer: echo}, newRoom(size)))
		c := client(t, ClientConfig{Addr: addr, HTTP: overHTTP})
		large := c.New("KeyValuePair", Field{"value", make([]byte, 1<<20)})
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		const each = 300 << 10
		var refused []chan string
		for range size/each + 4 { // the last bytes of each may be on their way for ever
			refused = append(refused, hog(ctx, t, addr, overHTTP, each))
		}
		want := "8"
		if overHTTP {
			want = errRoom.Error()
		}
		for said := ""; said == ""; { // one of them
			for _, r := range refused {
				select {
				case said = <-r:
					require.Equal(t, want, strings.TrimSpace(said))
				case <-time.After(time.Millisecond):
				}
			}
		}
		_, err := c.Get(soon(t), c.New("HeartBeat"))
		require.NoError(t, err, "what is small is always taken")

		stop()
		require.Eventually(t, func() bool {
			_, err = c.Get(soon(t), large)
			return err == nil
		}, 30*time.Second, 10*time.Millisecond, "room is given back")
	})
}

// large answers with a message of that many bytes, and keeps nothing of it.
func large(n int) *backend {
	value := make([]byte, n)
	return &backend{message: func(m *Message) *Message {
		if m.Class.Name == "HeartBeat" {
			return m
		}
		return DialectOf(m).New("KeyValuePair", Field{"value", value})
	}}
}

// Answers that nobody reads get no more memory than there is room; small ones go on, and large ones are sent again
// when those are given up.
func TestRoomForLargeAnswers(t *testing.T) {
	const size, each = 24 << 20, 6 << 20 // more than a kernel takes
	ask := frame2(0, 1, 1, string(frame(envelope{Data: pickle.Encode(Comm.New("KeyValuePair"))}.marshal())))
	both(t, func(t *testing.T, overHTTP bool) {
		r, cost := newRoom(size), int64(each)
		if overHTTP {
			cost = each * 4 / 3 // as base64
		}
		addr := serve(t, handler(large(each), r))
		c := client(t, ClientConfig{Addr: addr, HTTP: overHTTP})
		var asked []net.Conn
		for range 8 {
			nc := dialSmall(t, addr)
			if overHTTP {
				body := fmt.Sprintf(`{"data":%q}`, base64.StdEncoding.EncodeToString(pickle.Encode(Comm.New("KeyValuePair"))))
				fmt.Fprintf(nc, "POST /get HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			} else {
				_, _ = io.WriteString(nc, preface(0)+headers2+ask)
			}
			asked = append(asked, nc)
		}
		require.Eventually(t, func() bool {
			taken := r.taken.Load()
			return taken+cost > size && taken <= size
		}, 20*time.Second, time.Millisecond)
		_, err := c.Get(soon(t), c.New("KeyValuePair"))
		require.ErrorContains(t, err, map[bool]string{true: "503", false: errRoom.Error()}[overHTTP])
		_, err = c.Get(soon(t), c.New("HeartBeat"))
		require.NoError(t, err, "what is small is always answered")
		for _, nc := range asked {
			_ = nc.Close()
		}
		require.Eventually(t, func() bool {
			_, err = c.Get(soon(t), c.New("KeyValuePair"))
			return err == nil && r.taken.Load() == 0
		}, 20*time.Second, time.Millisecond)
	})
}

// dialSmall connects with so little room for answers that the server has to wait for their reader.
func dialSmall(t *testing.T, addr string) net.Conn {
	t.Helper()
	d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 1) })
	}}
	nc, err := d.DialContext(t.Context(), "tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	return nc
}

// Callers that are not known make no more than so many calls at once; those that are do not count.
func TestStrangersAreFew(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		r := newRoom(roomSize)
		addr := serve(t, handler(&backend{answer: echo}, r))
		stranger := client(t, ClientConfig{Addr: addr, HTTP: http})
		known := client(t, ClientConfig{Addr: addr, HTTP: http, Caller: Caller{JobUID: "mine"}})
		r.strangers.Store(maxStrangers)
		_, err := stranger.Get(soon(t), stranger.New("HeartBeat"))
		require.ErrorContains(t, err, map[bool]string{true: "503", false: errRoom.Error()}[http])
		_, err = known.Get(soon(t), known.New("HeartBeat"))
		require.NoError(t, err)
		r.strangers.Store(maxStrangers - 1)
		_, err = stranger.Get(soon(t), stranger.New("HeartBeat"))
		require.NoError(t, err)
		require.Eventually(t, func() bool { return r.strangers.Load() == maxStrangers-1 }, 10*time.Second, time.Millisecond)
	})
}

// No answer is longer than a message may be, and none is made before that is known.
func TestAnswersThatAreTooLargeAreNotMade(t *testing.T) {
	both(t, func(t *testing.T, overHTTP bool) {
		c := client(t, ClientConfig{Addr: serve(t, Handler(large(maxMessage+1))), HTTP: overHTTP})
		var err error
		require.Less(t, heap(func() { _, err = c.Get(soon(t), c.New("KeyValuePair")) }), uint64(1<<20))
		require.ErrorContains(t, err, errAnswer.Error())
		require.ErrorContains(t, err, "ask for fewer keys")
		_, err = c.Get(soon(t), c.New("HeartBeat"))
		require.NoError(t, err)
	})
}

// One large pickle at a time is decoded, and who does not wait for that is let go.
func TestLargePicklesAreDecodedInTurn(t *testing.T) {
	r := newRoom(roomSize)
	r.large <- struct{}{}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	_, err := r.read(ctx, make([]byte, largePickle))
	require.ErrorIs(t, err, context.Canceled)
	small := pickle.Encode(Comm.New("HeartBeat"))
	_, err = r.read(ctx, small)
	require.NoError(t, err)
	<-r.large
	_, err = r.read(t.Context(), pickle.Encode(Comm.New("KeyValuePair", Field{"value", make([]byte, largePickle)})))
	require.NoError(t, err)
	require.Empty(t, r.large)
}
