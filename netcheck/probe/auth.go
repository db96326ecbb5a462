package probe

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"net"

	"dlrover-run/netcheck"
)

// The handshake of every connection. The server sends no ID before the dialer has proved that it has the key of this
// very test. Both nonces are in both proofs, so that a recorded handshake is of no use:
//
//	server: magic, nonce of the server
//	dialer: number of the stream, nonce of the dialer, proof of the dialer
//	server: proof of the server
//
// The streams of a test are proved with a key that its first connection, the control connection, has agreed on: they
// cannot be given to another test. A peer that fails is disconnected without a message.
const (
	magic    = "dlrover-netcheck1"
	nonceLen = 32
	macLen   = sha256.Size
)

// ticket has the facts about a test that both ends know; no other process can prove them.
type ticket struct {
	key            []byte
	test           string
	round, rail    int
	dialer, server string // ids of the nodes: the direction
}

func newTicket(a netcheck.Assignment, rail int, own string, r role) ticket {
	t := ticket{key: a.Key, test: a.Test, round: a.Round, rail: rail, dialer: own, server: a.Peer.ID}
	if r == serverRole {
		t.dialer, t.server = t.server, t.dialer
	}
	return t
}

// role is the end of a test.
type role string

const (
	dialerRole role = "dialer"
	serverRole role = "server"
)

func (r role) other() role {
	if r == dialerRole {
		return serverRole
	}
	return dialerRole
}

// nonces are the two nonces of a handshake.
type nonces struct{ server, dialer [nonceLen]byte }

// sum is the MAC of one purpose in this test, with key.
func (t ticket) sum(key []byte, purpose string, stream int, n nonces) []byte {
	h := hmac.New(sha256.New, key)
	field := func(b []byte) {
		_ = binary.Write(h, binary.BigEndian, uint32(len(b)))
		h.Write(b)
	}
	field([]byte(magic))
	field([]byte(purpose))
	field(n.server[:])
	field(n.dialer[:])
	field([]byte(t.test))
	field([]byte(t.dialer))
	field([]byte(t.server))
	for _, v := range []int{t.round, t.rail, stream} {
		_ = binary.Write(h, binary.BigEndian, int64(v))
	}
	return h.Sum(nil)
}

var (
	errProof  = errors.New("the other end did not prove that it has the key of this test")
	errRefuse = errors.New("the proof was right, and the test has this connection already")
)

// proveAsDialer goes through the handshake of a stream and returns its nonces. The stage is the last one reached.
func (t ticket) proveAsDialer(c net.Conn, key []byte, stream int) (n nonces, s stage, err error) {
	hello := make([]byte, len(magic)+nonceLen)
	if _, err := io.ReadFull(c, hello); err != nil {
		return n, stageHello, err
	}
	if string(hello[:len(magic)]) != magic {
		return n, stageProof, errProof
	}
	copy(n.server[:], hello[len(magic):])
	_, _ = rand.Read(n.dialer[:])
	msg := append([]byte{byte(stream)}, n.dialer[:]...)
	msg = append(msg, t.sum(key, string(dialerRole), stream, n)...)
	if _, err := c.Write(msg); err != nil {
		return n, stageProof, err
	}
	var proof [macLen]byte
	if _, err := io.ReadFull(c, proof[:]); err != nil {
		return n, stageProof, err
	}
	if !hmac.Equal(proof[:], t.sum(key, string(serverRole), stream, n)) {
		return n, stageProof, errProof
	}
	return n, stageDone, nil
}

// stage is how far a handshake came.
type stage int

const (
	stageHello stage = iota // nothing was received from the server
	stageProof              // the dialer was showing its proof
	stageDone
)

// proveAsServer goes through the handshake of a connection. keyOf returns the key of a stream, nil for none. After a
// valid proof, claim decides whether this stream is wanted.
func (t ticket) proveAsServer(c net.Conn, streams int, keyOf func(int) []byte, claim func(int, nonces) bool) error {
	var n nonces
	_, _ = rand.Read(n.server[:])
	if _, err := c.Write(append([]byte(magic), n.server[:]...)); err != nil {
		return err
	}
	var msg [1 + nonceLen + macLen]byte
	if _, err := io.ReadFull(c, msg[:]); err != nil {
		return err
	}
	stream := int(msg[0])
	copy(n.dialer[:], msg[1:])
	if stream > streams {
		return errProof
	}
	key := keyOf(stream)
	if key == nil || !hmac.Equal(msg[1+nonceLen:], t.sum(key, string(dialerRole), stream, n)) {
		return errProof
	}
	if !claim(stream, n) {
		return errRefuse
	}
	_, err := c.Write(t.sum(key, string(serverRole), stream, n))
	return err
}

// sessionKey is the key that the handshake of the control connection agreed on.
func (t ticket) sessionKey(n nonces) []byte { return t.sum(t.key, "session", 0, n) }
