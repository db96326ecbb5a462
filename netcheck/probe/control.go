package probe

import (
	"bufio"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/netcheck"
)

// kind is the type of a message on the control connection.
type kind byte

const (
	kindOffer kind = 'o' // capabilities of this end; from the dialer, then from the server
	kindMTU   kind = 'm' // this end's ladder is done
	kindPing  kind = 'p' // and its answer
	kindGo    kind = 'g' // the receiver wants data
	kindStop  kind = 's' // the receiver has seen enough
	kindSent  kind = 'e' // the sender has stopped
	kindRDMA  kind = 'r' // a step of a test with RDMA
	kindBye   kind = 'b' // the end, with this end's class
)

// A message is: kind (1 byte), length of the body (2), body, MAC over role, number, kind and body (16).
const (
	headLen  = 3
	frameMAC = 16
	maxBody  = 4096
	pingBody = 64 - headLen - frameMAC // a ping is 64 bytes
)

// control is the connection on which the two ends agree. Messages carry a MAC, so that a process that takes over the
// connection can only break it. recv is for one goroutine; send and abort for any.
type control struct {
	net.Conn
	key   []byte
	role  role
	limit time.Time // when the test must be over
	in    *bufio.Reader
	seen  uint64
	cause atomic.Pointer[fault] // of abort

	mu   sync.Mutex
	sent uint64
}

func newControl(c net.Conn, key []byte, r role, limit time.Time) *control {
	return &control{Conn: c, key: key, role: r, limit: limit, in: bufio.NewReaderSize(c, 1024)}
}

func (c *control) mac(r role, number uint64, head, body []byte) []byte {
	h := hmac.New(sha256.New, c.key)
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], number)
	h.Write([]byte(r))
	h.Write(n[:])
	h.Write(head)
	h.Write(body)
	return h.Sum(nil)[:frameMAC]
}

func (c *control) send(k kind, body []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	frame := binary.BigEndian.AppendUint16([]byte{byte(k)}, uint16(len(body)))
	frame = append(frame, body...)
	frame = append(frame, c.mac(c.role, c.sent, frame[:headLen], body)...)
	n, err := c.Write(frame)
	if n > 0 { // else the bye of an end whose time is over would have a number too high
		c.sent++
	}
	return err
}

var errFrame = errors.New("a message that is not in order")

// recv returns the next message. It waits for at most wait, and not after limit.
func (c *control) recv(wait time.Duration) (kind, []byte, error) {
	_ = c.SetReadDeadline(earlier(time.Now().Add(wait), c.limit))
	// abort sets cause before the deadline, and here it is looked at after the deadline: none is missed.
	if f := c.cause.Load(); f != nil {
		return 0, nil, f
	}
	k, body, err := c.read()
	if f := c.cause.Load(); err != nil && f != nil {
		err = f
	}
	return k, body, err
}

func (c *control) read() (kind, []byte, error) {
	var head [headLen]byte
	if _, err := io.ReadFull(c.in, head[:]); err != nil {
		return 0, nil, err
	}
	n := int(binary.BigEndian.Uint16(head[1:]))
	if n > maxBody {
		return 0, nil, errFrame
	}
	body := make([]byte, n+frameMAC)
	if _, err := io.ReadFull(c.in, body); err != nil {
		return 0, nil, err
	}
	body, mac := body[:n], body[n:]
	if !hmac.Equal(mac, c.mac(c.role.other(), c.seen, head[:], body)) {
		return 0, nil, errFrame
	}
	c.seen++
	return kind(head[0]), body, nil
}

// want returns the body of the next message, which must be of kind k; doing names the awaited step in errors.
func (c *control) want(k kind, wait time.Duration, doing string) ([]byte, error) {
	got, body, err := c.recv(wait)
	switch {
	case err != nil:
		return nil, asFault(err, doing)
	case got == kindBye:
		return nil, peerFault(body, doing)
	case got != k:
		return nil, faultf(netcheck.Reset, "%s: the other end sent message %q in place of %q", doing, got, k)
	}
	return body, nil
}

// abort ends a recv that waits, and all later ones, with f.
func (c *control) abort(f *fault) {
	c.cause.CompareAndSwap(nil, f)
	_ = c.SetReadDeadline(time.Unix(1, 0))
}

// bye reports the result of this end to the other one, if that takes it.
func (c *control) bye(f *fault, within time.Duration) {
	body := []byte{0}
	if f != nil {
		body = append(append([]byte{byte(len(f.class))}, f.class...), f.text...)
	}
	_ = c.SetWriteDeadline(time.Now().Add(within))
	_ = c.send(kindBye, body)
}

// told are the classes that an end may give to the other by its bye. An end that fails by itself, or calls the test
// off, is nobody's fault for the other.
var told = map[netcheck.Class]netcheck.Class{
	netcheck.Stalled: netcheck.Stalled, netcheck.Reset: netcheck.Reset, netcheck.MTU: netcheck.MTU,
	netcheck.Own: netcheck.Canceled, netcheck.Canceled: netcheck.Canceled,
}

// peerFault translates the other end's bye into a fault of this end.
func peerFault(body []byte, doing string) *fault {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return faultf(netcheck.Reset, "%s: the other end ended the test", doing)
	}
	theirs, text := netcheck.Class(body[1:1+body[0]]), string(body[1+body[0]:])
	class, ok := told[theirs]
	if !ok {
		return faultf(netcheck.Reset, "%s: the other end ended the test: %s", doing, text)
	}
	return faultf(class, "the other end: %s", text)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
