// Package secure puts TLS below the protocols of the programs: around the connections that a listener accepts, and
// around those that a dialer makes. HTTP, its clients, and the code that parks or watches connections see a net.Conn,
// as without TLS. It owns no goroutine.
package secure

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"sync"
	"time"
)

const (
	// handshakeTime bounds a client's handshake: when thousands of nodes come at once, a server takes its time.
	handshakeTime = 15 * time.Second
	// lookEvery is the least time between two looks at the files.
	lookEvery = time.Second
	sessions  = 8 // with servers that a client remembers: to go on with one costs less than to prove identities anew
)

// Layer is the TLS of one program. Nil leaves connections as they are. Its methods may be called by any goroutine.
type Layer struct {
	choice Choice
	log    *slog.Logger
	tokens func() []string

	mu     sync.Mutex
	looked time.Time
	seen   [3]stamp // of the files that were read last, or could not be
	known  []string // tokens that were read last, or could not be used
	id     *identity
}

// identity is what the token, or the files at one time, say.
type identity struct {
	server *tls.Config // nil: there is no certificate
	client *tls.Config
	trusts func(addr string, s tls.ConnectionState) error // why a server is not trusted
	admits func(s tls.ConnectionState) error              // why a client is not served; nil: every client is
}

// Listener returns a listener whose connections speak TLS. A handshake comes with the first bytes, not before Accept
// returns.
func (l *Layer) Listener(ln net.Listener) net.Listener {
	if l == nil {
		return ln
	}
	return listener{ln, l}
}

type listener struct {
	net.Listener
	layer *Layer
}

func (l listener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.layer.Server(nc), nil
}

// Server is the server's side of a connection. The handshake comes with the first bytes.
func (l *Layer) Server(nc net.Conn) net.Conn {
	if l == nil {
		return nc
	}
	id := l.identity()
	return &Conn{Conn: tls.Server(nc, id.server), id: id}
}

// Client is the client's side of a connection to addr, HOST:PORT.
func (l *Layer) Client(nc net.Conn, addr string) *Conn {
	id := l.identity()
	cfg := id.client.Clone()
	cfg.ClientSessionCache = sessionsOf{id.client.ClientSessionCache, addr}
	cfg.VerifyConnection = func(s tls.ConnectionState) error { return id.trusts(addr, s) }
	if host, _, err := net.SplitHostPort(addr); err == nil {
		cfg.ServerName = host
	}
	return &Conn{Conn: tls.Client(nc, cfg), to: addr}
}

// DialFunc makes connections.
type DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// Dial returns a DialFunc whose connections have proved that they lead to the right server. Errors of dial, such as
// syscall.ECONNREFUSED, are its own.
func (l *Layer) Dial(dial DialFunc) DialFunc {
	if l == nil {
		return dial
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, handshakeTime)
		defer cancel()
		c := l.Client(nc, addr)
		if err := c.Handshake(ctx); err != nil {
			_ = nc.Close()
			return nil, err
		}
		return c, nil
	}
}

// sessionsOf are the sessions with one address: names may be the same at several ports.
type sessionsOf struct {
	tls.ClientSessionCache
	addr string
}

func (s sessionsOf) Get(string) (*tls.ClientSessionState, bool) {
	return s.ClientSessionCache.Get(s.addr)
}
func (s sessionsOf) Put(_ string, state *tls.ClientSessionState) {
	s.ClientSessionCache.Put(s.addr, state)
}

// protocols are those of HTTP that the programs speak over TLS.
var protocols = []string{"http/1.1"}

func newIdentity(cert *tls.Certificate) *identity {
	id := &identity{client: &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: protocols, CurvePreferences: curves, InsecureSkipVerify: true, // see trusts
		ClientSessionCache: tls.NewLRUClientSessionCache(sessions),
	}}
	if cert != nil {
		id.client.Certificates = []tls.Certificate{*cert}
		id.server = &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: protocols, CurvePreferences: curves,
			Certificates: []tls.Certificate{*cert}}
	}
	return id
}

// curves are the one whose exchange of keys costs least: thousands of nodes come at once. Every client has it. It does
// not withstand quantum computers, as a larger exchange would.
var curves = []tls.CurveID{tls.CurveP256}
