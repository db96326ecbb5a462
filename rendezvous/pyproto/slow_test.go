package pyproto

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/pickle"
)

// pipes is a listener that accepts what is put into it.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	nc, ok := <-p
	if !ok {
		return nil, net.ErrClosed
	}
	return nc, nil
}

func (p pipes) Close() error { close(p); return nil }

func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

// frame2 is a frame of HTTP/2.
func frame2(kind, flags byte, stream uint32, payload string) string {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	return string(binary.BigEndian.AppendUint32(append(b, flags), stream)) + payload
}

// preface begins a connection of HTTP/2 whose streams have a window for answers.
func preface(window uint32) string {
	setting := binary.BigEndian.AppendUint32([]byte{0, 4}, window)
	return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame2(4, 0, 0, string(setting))
}

// headers2 begins a call of get on stream 1: POST, http, :path, :authority.
var headers2 = frame2(1, 4, 1, "\x83\x86\x04"+string(rune(len(GRPCPath+"get")))+GRPCPath+"get"+"\x01\x01x")

// speak2 says something to a server of HTTP/2, and returns the kinds of frames on stream 1 until it ends, and when.
func speak2(t *testing.T, h http.Handler, window uint32, say string) (kinds []byte, after time.Duration) {
	t.Helper()
	l := make(pipes, 1)
	s := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetUnencryptedHTTP2(true)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	ours, theirs := net.Pipe()
	l <- theirs
	began := time.Now()
	go func() {
		_, _ = io.WriteString(ours, preface(window)+say)
	}()
	for r := bufio.NewReader(ours); ; {
		var head [9]byte
		_, err := io.ReadFull(r, head[:])
		require.NoError(t, err)
		_, err = r.Discard(int(head[0])<<16 | int(head[1])<<8 | int(head[2]))
		require.NoError(t, err)
		if binary.BigEndian.Uint32(head[5:]) != 1 {
			continue
		}
		kinds = append(kinds, head[3])
		if head[3] == 3 || head[4]&1 != 0 && head[3] < 2 { // RST_STREAM, or END_STREAM
			break
		}
	}
	after = time.Since(began)
	_ = ours.Close()
	require.NoError(t, s.Close())
	<-served
	return kinds, after
}

// TestStrangersAreNotReadFrom: who is refused hears it at once, whatever it does not send, and does not take.
func TestStrangersAreNotReadFrom(t *testing.T) {
	for _, body := range []string{"", frame2(0, 0, 1, "\x00\x01\x00\x00\x00 a little of it")} {
		synctest.Test(t, func(t *testing.T) {
			kinds, after := speak2(t, Handler(&backend{uid: "mine"}), 0, headers2+body)
			require.Zero(t, after)
			require.Equal(t, "\x01\x01", string(kinds), "headers alone, which need no window")
		})
	}
}

// TestSlowCallers: who does not send all of a call, or does not take its answer, is not waited for without end.
func TestSlowCallers(t *testing.T) {
	headers := headers2
	good := string(frame(envelope{Data: pickle.Encode(Comm.New("HeartBeat"))}.marshal()))
	for _, c := range []struct {
		name   string
		window uint32
		say    string
		after  time.Duration
		kinds  string
	}{
		{"all of it", 1 << 16, headers + frame2(0, 1, 1, good), 0, "\x01\x00\x01"},
		{"no body", 1 << 16, headers, bodyTimeout, "\x01\x01"},
		{"half a body", 1 << 16, headers + frame2(0, 0, 1, good[:9]), bodyTimeout, "\x01\x01"},
		{"no end", 1 << 16, headers + frame2(0, 0, 1, good), bodyTimeout, "\x01\x01"},
		{"no window", 0, headers + frame2(0, 1, 1, good), bodyTimeout, "\x01\x03"},
		{"half a window", 9, headers + frame2(0, 1, 1, good), bodyTimeout, "\x01\x00\x03"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				kinds, after := speak2(t, Handler(&backend{answer: echo}), c.window, c.say)
				require.Equal(t, c.after, after.Round(time.Second))
				require.Equal(t, []byte(c.kinds), kinds)
			})
		})
	}
}
