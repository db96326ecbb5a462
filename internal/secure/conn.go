package secure

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"dlrover-run/internal/httperr"
)

// Conn is one end of a connection that speaks TLS. To net/http it is not a *tls.Conn, but a connection as any other.
type Conn struct {
	*tls.Conn
	to   string    // a client's: HOST:PORT of the server
	id   *identity // a server's
	once sync.Once
	err  error // why the peer of a server is not served
}

// Prove passes ok to the connection below, which may count peers that are not known.
func (c *Conn) Prove(ok bool) {
	if p, can := c.NetConn().(interface{ Prove(bool) }); can {
		p.Prove(ok)
	}
}

// Read explains errors of the protocol.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		err = c.explain(err)
	}
	return n, err
}

// Handshake is done before the first byte is written. Its errors name the cause.
func (c *Conn) Handshake(ctx context.Context) error { return c.explain(c.HandshakeContext(ctx)) }

// Error is an error of TLS that people can mend.
type Error struct {
	text string
	err  error
}

func (e *Error) Error() string { return e.text }
func (e *Error) Unwrap() error { return e.err }

// explain turns an error of the protocol into one that names the fix. A client that speaks no TLS is told so.
func (c *Conn) explain(err error) error {
	plain, isPlain := errors.AsType[tls.RecordHeaderError](err)
	alert, isAlert := errors.AsType[tls.AlertError](err)
	switch {
	case isPlain && c.to == "":
		c.turnAway(plain)
		return io.EOF
	case isPlain:
		return &Error{fmt.Sprintf("what answers at %s does not speak TLS: give it --tls, or the certificate of "+
			"--tls-cert, as well, or leave out --tls, --tls-ca and --tls-cert here", c.to), err}
	case isAlert && c.to != "":
		return &Error{fmt.Sprintf("%s ends the TLS handshake: %v", c.to, alert), err}
	case c.to != "" && errors.Is(err, io.EOF) && !c.ConnectionState().HandshakeComplete:
		return fmt.Errorf("%s has ended the TLS handshake: %w", c.to, err)
	}
	return err
}

// plainHint is for a client whose first bytes are no handshake of TLS.
const plainHint = "this server speaks TLS, and the client does not: give the client --tls=auto if the server has it, " +
	"or else the server's authority by --tls-ca (DLROVER_TLS, DLROVER_TLS_CA)"

// lingerTime is how long such a client may take to read the answer.
const lingerTime = time.Second

// turnAway answers a client that speaks HTTP without TLS.
func (c *Conn) turnAway(e tls.RecordHeaderError) {
	if e.Conn == nil || e.RecordHeader[0] < 'A' || e.RecordHeader[0] > 'Z' {
		return
	}
	body, _ := json.Marshal(httperr.Body{Code: "tls", Error: plainHint}) // two strings
	_ = e.Conn.SetDeadline(time.Now().Add(lingerTime))
	_, _ = fmt.Fprintf(e.Conn, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nConnection: close\r\n"+
		"Content-Length: %d\r\n\r\n%s", http.StatusBadRequest, http.StatusText(http.StatusBadRequest), len(body), body)
	if t := TCP(e.Conn); t != nil {
		_ = t.CloseWrite() // to close with bytes unread would drop the answer
		_, _ = io.CopyN(io.Discard, e.Conn, 1<<20)
	}
}

// Check returns why the peer of a server's connection is not served, nil for a connection without TLS: a server that
// has --tls-ca requires a certificate. It is checked after the handshake, for an error that says more than an alert.
func Check(nc net.Conn) error {
	for nc != nil {
		if c, ok := nc.(*Conn); ok {
			return c.check()
		}
		u, ok := nc.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		nc = u.NetConn()
	}
	return nil
}

func (c *Conn) check() error {
	c.once.Do(func() {
		if c.id != nil && c.id.admits != nil {
			c.err = c.id.admits(c.ConnectionState())
		}
	})
	return c.err
}

// TCP is the connection of TCP below nc; nil: there is none.
func TCP(nc net.Conn) *net.TCPConn {
	for {
		if t, ok := nc.(*net.TCPConn); ok {
			return t
		}
		u, ok := nc.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		nc = u.NetConn()
	}
}

// Plain is the connection of TCP whose bytes are those of nc; nil: there is none.
func Plain(nc net.Conn) *net.TCPConn {
	for {
		switch c := nc.(type) {
		case *net.TCPConn:
			return c
		case interface{ ConnectionState() tls.ConnectionState }:
			return nil
		case interface{ NetConn() net.Conn }:
			nc = c.NetConn()
		default:
			return nil
		}
	}
}
