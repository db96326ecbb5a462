package replica

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"
)

const (
	helloMagic      = "DLRREPL\n"
	protocolVersion = 1
	helloSize       = 48
)

type role byte

const (
	roleClient role = 1
	roleServer role = 2
)

// hello is the first message of each end: magic, version u16, role u8, 5 zero bytes, nonce.
type hello struct {
	version uint16
	role    role
	nonce   [32]byte
}

func newHello(r role) hello {
	h := hello{version: protocolVersion, role: r}
	rand.Read(h.nonce[:]) // never fails
	return h
}

func (h hello) bytes() []byte {
	b := append(make([]byte, 0, helloSize), helloMagic...)
	b = binary.LittleEndian.AppendUint16(b, h.version)
	b = append(b, byte(h.role), 0, 0, 0, 0, 0)
	return append(b, h.nonce[:]...)
}

// parseHello reads the hello of an end that is to have role want. Any version is read; check compares it.
func parseHello(b []byte, want role) (hello, error) {
	if len(b) != helloSize || string(b[:8]) != helloMagic {
		return hello{}, fmt.Errorf("peer does not speak the replica protocol: it starts with %.16q", b)
	}
	h := hello{version: binary.LittleEndian.Uint16(b[8:]), role: role(b[10]), nonce: [32]byte(b[16:])}
	if h.role != want {
		return hello{}, fmt.Errorf("peer has role %d instead of %d", h.role, want)
	}
	return h, nil
}

func (h hello) check() error {
	if h.version != protocolVersion {
		return fmt.Errorf("%w: peer speaks %d, this is %d: run the same release on all nodes", errVersion, h.version,
			protocolVersion)
	}
	return nil
}

// proof can be computed only by an end that knows the token. It covers the role, both nonces and the version, so that
// it is invalid for the other end, or in another connection.
func proof(token string, r role, client, server hello) []byte {
	m := hmac.New(sha256.New, []byte(token))
	m.Write([]byte("dlrover replica proof\x00"))
	m.Write([]byte{byte(r)})
	m.Write(client.bytes())
	m.Write(server.bytes())
	return m.Sum(nil)
}

// greet is the client's side of the handshake. The client proves first: a stranger who connects learns nothing that
// depends on the token.
func greet(rw io.ReadWriter, token string) error {
	mine := newHello(roleClient)
	if _, err := rw.Write(mine.bytes()); err != nil {
		return err
	}
	var b [helloSize]byte
	if _, err := io.ReadFull(rw, b[:]); err != nil {
		return fmt.Errorf("peer does not answer, it may have too many connections: %w", err)
	}
	theirs, err := parseHello(b[:], roleServer)
	if err == nil {
		err = theirs.check()
	}
	if err != nil {
		return err
	}
	if _, err := rw.Write(proof(token, roleClient, mine, theirs)); err != nil {
		return err
	}
	_, err = believe(rw, proof(token, roleServer, mine, theirs))
	return err
}

// welcome runs the server's side of the handshake. The client may know any of the tokens.
func welcome(rw io.ReadWriter, tokens []string) error {
	var b [helloSize]byte
	if _, err := io.ReadFull(rw, b[:]); err != nil {
		return err
	}
	theirs, err := parseHello(b[:], roleClient)
	if err != nil {
		return err
	}
	mine := newHello(roleServer)
	if _, err := rw.Write(mine.bytes()); err != nil {
		return err
	}
	if err := theirs.check(); err != nil { // only now: the client shall learn our version
		return err
	}
	var proofs [][]byte
	for _, token := range tokens {
		proofs = append(proofs, proof(token, roleClient, theirs, mine))
	}
	known, err := believe(rw, proofs...)
	if err != nil {
		return err
	}
	_, err = rw.Write(proof(tokens[known], roleServer, theirs, mine))
	return err
}

// believe reads the other end's proof, and returns which one it is.
func believe(r io.Reader, proofs ...[]byte) (int, error) {
	var got [sha256.Size]byte
	if _, err := io.ReadFull(r, got[:]); err != nil {
		return 0, fmt.Errorf("%w, or peer is gone: %w", errToken, err)
	}
	for i, want := range proofs {
		if hmac.Equal(got[:], want) {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%w: give all nodes of the job the same one", errToken)
}

// handshake runs one side's part within handshakeTime, bytes or not: a stranger gets no more than that.
func handshake(ctx context.Context, nc net.Conn, part func(io.ReadWriter) error) error {
	nc.SetDeadline(time.Now().Add(handshakeTime))
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	err := part(nc)
	if !stop() {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	return nil
}

func loopback(a net.Addr) bool {
	t, ok := a.(*net.TCPAddr)
	return ok && t.IP.IsLoopback()
}
