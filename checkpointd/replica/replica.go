// Package replica keeps copies of shards in the memory of other nodes.
//
// Partners returns the nodes that keep the copies of a node. A Client pushes a pinned segment to the Server of a
// partner, or fetches a copy back. Both ends map the bytes and move them between the mapping and the socket without a
// buffer.
//
// Both ends of a connection prove that they know the token of the job, which is never sent. Every byte is covered by a
// checksum, and a copy becomes visible only when all of it has arrived. The bytes are not encrypted, and a checksum is
// no protection against an attacker who changes packets: use a network that only the job's nodes share.
package replica

import (
	"errors"
	"fmt"
	"time"
)

const (
	handshakeTime = 5 * time.Second
	// idleTime is how long nothing may move in either direction before the other end counts as dead.
	idleTime = 30 * time.Second
	// beat is how often a busy end sends a sign of life.
	beat = 5 * time.Second
	// lastWordTime bounds the exchange of the reason of a failed transfer.
	lastWordTime = time.Second
	// lateTime is how long a finished transfer waits for a connection that still is in its handshake.
	lateTime = 250 * time.Millisecond

	defaultConns = 2
	maxConns     = 4 // for one transfer
)

var (
	// errToken reports that the other end does not know the token, or that it rejects our proof.
	errToken = errors.New("the tokens differ")
	// errVersion reports that the other end has another version of the protocol.
	errVersion = errors.New("protocol version differs")
	// ErrRefused reports that the receiver does not want the copy: no memory, or it has a newer one.
	ErrRefused = errors.New("peer refuses the copy")
	// ErrMissing reports that the peer does not hold the copy.
	ErrMissing = errors.New("peer does not hold the copy")
	// errDamaged reports that bytes changed on the way, or contradict each other.
	errDamaged = errors.New("transfer is damaged")
	// errClosed reports that the server was closed.
	errClosed = errors.New("replica server is closed")

	errOver       = errors.New("no such transfer, it is over, or it has enough connections")
	errSuperseded = fmt.Errorf("%w: its owner has begun to push another one", ErrRefused)
)
