package replica

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/checkpointd/shm/shmtest"
)

// script is a connection whose other end sends r, and receives w.
type script struct {
	r io.Reader
	w bytes.Buffer
}

func (s *script) Read(b []byte) (int, error)  { return s.r.Read(b) }
func (s *script) Write(b []byte) (int, error) { return s.w.Write(b) }

// record runs an honest handshake, and returns the bytes of each end.
func record(t *testing.T) (client, server []byte) {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	var toServer, toClient bytes.Buffer
	done := make(chan error, 1)
	go func() {
		done <- welcome(&pair{io.TeeReader(b, &toServer), b}, []string{token})
	}()
	require.NoError(t, greet(&pair{io.TeeReader(a, &toClient), a}, token))
	require.NoError(t, <-done)
	return toServer.Bytes(), toClient.Bytes()
}

type pair struct {
	io.Reader
	io.Writer
}

func TestHandshakeAttacks(t *testing.T) {
	client, server := record(t)
	t.Run("replayed client", func(t *testing.T) {
		require.ErrorIs(t, welcome(&script{r: bytes.NewReader(client)}, []string{token}), errToken)
	})
	t.Run("replayed server", func(t *testing.T) {
		require.ErrorIs(t, greet(&script{r: bytes.NewReader(server)}, token), errToken)
	})
	t.Run("reflection to a client", func(t *testing.T) {
		// The attacker echoes the client's own bytes, as a server would answer.
		a, b := net.Pipe()
		defer b.Close()
		go func() {
			var h [helloSize]byte
			io.ReadFull(a, h[:])
			h[10] = byte(roleServer)
			a.Write(h[:])
			var p [32]byte
			io.ReadFull(a, p[:])
			a.Write(p[:])
			a.Close()
		}()
		require.ErrorIs(t, greet(b, token), errToken)
	})
	t.Run("own role", func(t *testing.T) {
		h := newHello(roleClient)
		require.ErrorContains(t, greet(&script{r: bytes.NewReader(h.bytes())}, token), "role")
	})
	t.Run("strangers hear nothing that depends on the token", func(t *testing.T) {
		h := newHello(roleClient)
		s := &script{r: bytes.NewReader(append(h.bytes(), make([]byte, 32)...))}
		require.ErrorIs(t, welcome(s, []string{token}), errToken)
		require.Equal(t, helloSize, s.w.Len())
	})
	t.Run("version", func(t *testing.T) {
		h := newHello(roleClient)
		h.version = 2
		s := &script{r: bytes.NewReader(h.bytes())}
		require.ErrorIs(t, welcome(s, []string{token}), errVersion)
		answer, err := parseHello(s.w.Bytes(), roleServer)
		require.NoError(t, err, "the other end learns our version")
		require.EqualValues(t, protocolVersion, answer.version)
		h.role = roleServer
		require.ErrorIs(t, greet(&script{r: bytes.NewReader(h.bytes())}, token), errVersion)
	})
	t.Run("another protocol", func(t *testing.T) {
		require.ErrorContains(t,
			welcome(&script{r: strings.NewReader("GET / HTTP/1.1\r\nHost: example.com:4433\r\nAccept: */*\r\n\r\n")},
				[]string{token}), "GET /")
	})
	t.Run("too short", func(t *testing.T) {
		require.ErrorIs(t, welcome(&script{r: strings.NewReader(helloMagic)}, []string{token}), io.ErrUnexpectedEOF)
	})
}

func TestProofDependsOnEverything(t *testing.T) {
	c, s := newHello(roleClient), newHello(roleServer)
	want := proof(token, roleClient, c, s)
	c2, s2, v := c, s, c
	c2.nonce[31] ^= 1
	s2.nonce[0] ^= 1
	v.version++
	for name, other := range map[string][]byte{
		"token": proof(token+"x", roleClient, c, s), "role": proof(token, roleServer, c,
			s), "client's nonce": proof(token, roleClient, c2, s),
		"server's nonce": proof(token, roleClient, c, s2), "version": proof(token, roleClient, v,
			s), "order": proof(token, roleClient, s, c),
	} {
		require.NotEqual(t, want, other, name)
	}
}

func framed(body string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(body)))
	b = binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE([]byte(body)))
	return append(b, body...)
}

func TestReadMessage(t *testing.T) {
	whole, err := message{Op: "join", ID: "x"}.bytes()
	require.NoError(t, err)
	m, err := readMessage(bytes.NewReader(whole))
	require.NoError(t, err)
	require.Equal(t, message{Op: "join", ID: "x"}, m)
	flipped := bytes.Clone(whole)
	flipped[len(flipped)-3] ^= 1
	for _, tc := range []struct {
		name string
		in   []byte
		want error
	}{
		{"empty", nil, io.EOF},
		{"half a head", whole[:5], io.ErrUnexpectedEOF},
		{"half a body", whole[:len(whole)-1], io.ErrUnexpectedEOF},
		{"oversized", []byte{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0}, errDamaged},
		{"just over the limit", framed(strings.Repeat(" ", maxMessage+1)), errDamaged},
		{"flipped bit", flipped, errDamaged},
		{"no JSON", framed("{"), errDamaged},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := readMessage(bytes.NewReader(tc.in))
			require.ErrorIs(t, err, tc.want)
		})
	}
	_, err = message{Error: strings.Repeat("x", maxMessage)}.bytes()
	require.ErrorContains(t, err, "limit")
}

// segmentOffer is the offer of a small segment: its message, and its body.
func segmentOffer(t testing.TB) (message, []byte) {
	t.Helper()
	b := shmtest.Save{Meta: shmtest.Meta("/ckpt", 20),
		Files: []shmtest.File{{Path: "a", Kind: "raw", Data: []byte("abc")}}}.Bytes(t)
	h, err := shm.ParseHeader(b)
	require.NoError(t, err)
	raw := b[h.MetaOff:][:h.MetaLen]
	return message{Size: int64(len(b)), Meta: len(raw)}, append(bytes.Clone(b[:headerSize]), raw...)
}

func TestReadOffer(t *testing.T) {
	good, body := segmentOffer(t)
	_, err := readOffer(bytes.NewReader(body), good)
	require.NoError(t, err)
	rewrite := func(change func(*shm.Header)) []byte {
		h, err := shm.ParseHeader(body)
		require.NoError(t, err)
		change(&h)
		return append(h.Append(nil), body[headerSize:]...)
	}
	for _, tc := range []struct {
		name string
		m    message
		body []byte
	}{
		{"oversized", message{Size: maxSize + 1, Meta: good.Meta}, body},
		{"negative size", message{Size: -1, Meta: good.Meta}, body},
		{"negative description", message{Size: good.Size, Meta: -1}, body},
		{"oversized description", message{Size: maxSize, Meta: shm.MaxMeta + 1}, body},
		{"description larger than the segment", message{Size: headerSize + 1, Meta: 2}, body},
		{"segment smaller than its parts", message{Size: headerSize + int64(good.Meta), Meta: good.Meta}, body},
		{"no header", good, make([]byte, len(body))},
		{"incomplete", good, rewrite(func(h *shm.Header) { h.State = shm.Writing })},
		{"another description", good, rewrite(func(h *shm.Header) { h.MetaCRC++ })},
		{"another step", good, rewrite(func(h *shm.Header) { h.Step++ })},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := readOffer(bytes.NewReader(tc.body), tc.m)
			require.ErrorIs(t, err, errDamaged)
		})
	}
	_, err = readOffer(bytes.NewReader(body[:len(body)-1]), good)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestChunkHead(t *testing.T) {
	const size = headerSize + chunkSize + 5
	data := make([]byte, chunkSize)
	h := newChunkHead(0, data)
	i, end, err := h.parse(size)
	require.NoError(t, err)
	require.False(t, end)
	require.Zero(t, i)
	require.True(t, h.matches(data))
	data[9]++
	require.False(t, h.matches(data))

	last := newChunkHead(1, data[:5])
	_, _, err = last.parse(size)
	require.NoError(t, err)
	stop := newChunkHead(endOfChunks, nil)
	_, end, err = stop.parse(size)
	require.NoError(t, err)
	require.True(t, end)
	stop[15] ^= 1
	for name, bad := range map[string]chunkHead{
		"short": newChunkHead(0, data[:5]), "long": newChunkHead(1, data), "index": newChunkHead(2, data[:5]),
		"huge index": newChunkHead(1<<63, data), "damaged end": stop, "empty": newChunkHead(0, nil),
	} {
		_, _, err := bad.parse(size)
		require.ErrorIs(t, err, errDamaged, name)
	}
}

func FuzzReadMessage(f *testing.F) {
	b, _ := message{Op: "push", Size: 1, Meta: 2, Rank: 3, Save: "s"}.bytes()
	f.Add(b)
	f.Add(framed(`{"ok":true}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := readMessage(bytes.NewReader(b))
		if err != nil {
			return
		}
		again, err := m.bytes()
		if err != nil {
			return // escapes may make it longer than the limit
		}
		got, err := readMessage(bytes.NewReader(again))
		require.NoError(t, err)
		require.Equal(t, m, got)
	})
}

func FuzzReadOffer(f *testing.F) {
	m, body := segmentOffer(f)
	f.Add(m.Size, m.Meta, body)
	f.Fuzz(func(t *testing.T, size int64, meta int, body []byte) {
		if meta > len(body) {
			meta = len(body) // a larger one costs only time
		}
		o, err := readOffer(bytes.NewReader(body), message{Size: size, Meta: meta})
		if err != nil {
			return
		}
		h, err := shm.ParseHeader(o.head().Append(nil))
		require.NoError(t, err)
		require.False(t, h.Disk)
		require.Equal(t, h.Seq, h.Released)
		require.LessOrEqual(t, h.MetaOff+h.MetaLen, size)
	})
}

func FuzzChunkHead(f *testing.F) {
	h := newChunkHead(1, []byte("12345"))
	f.Add(h[:], int64(headerSize+chunkSize+5))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		if len(b) < 16 || size < headerSize || size > maxSize {
			return
		}
		h := chunkHead(b[:16])
		i, end, err := h.parse(size)
		if err != nil || end {
			return
		}
		from, to := chunkRange(i, size)
		require.True(t, headerSize <= from && from < to && to <= size && to-from <= chunkSize)
	})
}

func FuzzParseHello(f *testing.F) {
	f.Add(newHello(roleClient).bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHello(b, roleClient)
		if err == nil {
			require.Equal(t, b[:11], h.bytes()[:11])
			require.Equal(t, b[16:], h.bytes()[16:])
		}
	})
}
