package tcpstore

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
)

// The wire format is that of torch/csrc/distributed/c10d/TCPStore.cpp: no framing, a query number and its arguments,
// integers in the client's byte order (little-endian on every machine that runs PyTorch), strings as u64 length +
// bytes. Checked against the client and the server of 1.13.1 (generation A) and of 2.15.0 (generation B).

// op is a query, with the number that generation B gives it on the wire.
type op byte

const (
	opValidate op = iota
	opSet
	opCompareSet
	opGet
	opAdd
	opCheck
	opWait
	opNumKeys
	opDeleteKey
	opAppend
	opMultiGet
	opMultiSet
	opCancelWait
	opPing
	opQueuePush
	opQueuePop
	opQueueLen
	opListKeys
	opBarrier
	opWatchKey // generation A only: not a wire number of generation B
)

func (o op) String() string {
	names := [...]string{"VALIDATE", "SET", "COMPARE_SET", "GET", "ADD", "CHECK", "WAIT", "NUMKEYS", "DELETE_KEY",
		"APPEND", "MULTI_GET", "MULTI_SET", "CANCEL_WAIT", "PING", "QUEUE_PUSH", "QUEUE_POP", "QUEUE_LEN",
		"LIST_KEYS", "BARRIER", "WATCH_KEY"}
	return names[o]
}

// lastByteA is the greatest byte that a store client can open a connection with: generation A's DELETE_KEY.
const lastByteA = 8

// generation distinguishes the two incompatible numberings.
type generation byte

const (
	genA generation = iota + 1 // 1.8 to 2.0
	genB                       // 2.1 and later
)

// greeting is VALIDATE with its magic number. As the start of a generation A SET it would announce a key of 1 GB.
const greeting = "\x00\xce\xf7\x85\x3c"

// Answers of CHECK, WAIT, BARRIER, CANCEL_WAIT and WATCH_KEY.
const (
	ready, notReady                = 0, 1
	stopWaiting, waitCanceled      = 0, 1
	keyUpdated, keyCreated         = 0, 1
	keyDeleted, callbackRegistered = 2, 3
)

// opOf is the query that gen writes as n; ok is false if the server closes on it.
func opOf(n byte, gen generation) (o op, ok bool) {
	switch {
	case gen == genB:
		return op(n), op(n) > opValidate && op(n) <= opBarrier // the server closes on a second VALIDATE
	case n == 7:
		return opWatchKey, true
	case n == lastByteA:
		return opDeleteKey, true
	default:
		return op(n) + 1, n < 7
	}
}

// request is one decoded query.
type request struct {
	op     op
	gen    generation
	keys   []string // one, except for CHECK, WAIT, MULTI_GET and MULTI_SET
	values [][]byte // COMPARE_SET: expected, new; MULTI_SET: one for each key
	num    int64    // ADD: delta; BARRIER: world size; PING: nonce
}

func appendString[S string | []byte](b []byte, s S) []byte {
	return append(binary.LittleEndian.AppendUint64(b, uint64(len(s))), s...)
}

// limitError names the limit of Config that a connection exceeded.
type limitError struct {
	What       string // in plain words: users cannot set the limits
	Value, Max uint64
}

func (e *limitError) Error() string {
	return fmt.Sprintf("tcpstore: %s: %d, the most is %d", e.What, e.Value, e.Max)
}

var errUnknownQuery = errors.New("tcpstore: not a TCPStore query")

// decoder reads requests from one connection. It allocates for bytes that arrived, never for a length that was
// announced: a port scanner's text is a length of many exabytes.
type decoder struct {
	r    *bufio.Reader
	cfg  *Config
	gen  generation // 0 until the first bytes decide
	left uint64     // bytes that the current request may still take

	receiving *atomic.Int64 // of all decoders of a server, for requests beyond the first bytes of each
	held      int64         // of this one's request
}

// next returns io.EOF when the stream ends between two requests, and io.ErrUnexpectedEOF inside one.
func (d *decoder) next() (request, error) {
	if d.gen == 0 {
		if err := d.detect(); err != nil {
			return request{}, err
		}
	}
	n, err := d.r.ReadByte()
	if err != nil {
		return request{}, err
	}
	o, ok := opOf(n, d.gen)
	if !ok {
		return request{}, fmt.Errorf("%w: first byte %#02x", errUnknownQuery, n)
	}
	req := request{op: o, gen: d.gen}
	d.left = uint64(d.cfg.MaxRequestBytes)
	if err = d.arguments(&req); err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return req, err
}

// detect reads generation B's greeting, or nothing. It needs no second byte unless the first is 0, and then at least
// eight more must follow in generation A: it cannot wait for bytes that never come.
func (d *decoder) detect() error {
	head, err := d.r.Peek(1)
	if err != nil {
		return err
	}
	d.gen = genA
	if head[0] != greeting[0] {
		return nil
	}
	head, err = d.r.Peek(len(greeting))
	if string(head) == greeting {
		d.gen = genB
		_, err = d.r.Discard(len(greeting))
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

func (d *decoder) arguments(r *request) error {
	switch r.op {
	case opSet, opAppend, opQueuePush:
		return d.fields(r, 1, 1)
	case opCompareSet:
		return d.fields(r, 1, 2)
	case opGet, opDeleteKey, opQueuePop, opQueueLen, opWatchKey:
		return d.fields(r, 1, 0)
	case opCheck, opWait, opMultiGet, opMultiSet:
		return d.list(r)
	case opAdd, opBarrier:
		if err := d.fields(r, 1, 0); err != nil {
			return err
		}
		n, err := d.uint(8)
		r.num = int64(n)
		return err
	case opPing:
		n, err := d.uint(4)
		r.num = int64(n)
		return err
	}
	return nil // NUMKEYS, CANCEL_WAIT, LIST_KEYS
}

// list reads a count and that many keys, or pairs of key and value for MULTI_SET.
func (d *decoder) list(r *request) error {
	n, err := d.uint(8)
	if err != nil {
		return err
	}
	if limit := uint64(d.cfg.MaxKeysPerRequest); n > limit {
		return &limitError{"keys in one request", n, limit}
	}
	values := 0
	if r.op == opMultiSet {
		values = 1
	}
	for range n {
		if err := d.fields(r, 1, values); err != nil {
			return err
		}
	}
	return nil
}

func (d *decoder) fields(r *request, keys, values int) error {
	for range keys {
		k, err := d.key()
		if err != nil {
			return err
		}
		r.keys = append(r.keys, k)
	}
	for range values {
		n, err := d.length("bytes in one value", d.cfg.MaxValueBytes)
		if err != nil {
			return err
		}
		v, err := d.bytes(n)
		if err != nil {
			return err
		}
		r.values = append(r.values, v)
	}
	return nil
}

func (d *decoder) key() (string, error) {
	n, err := d.length("bytes in one key", d.cfg.MaxKeyBytes)
	if err != nil {
		return "", err
	}
	if n > d.r.Size() {
		b, err := d.bytes(n)
		return string(b), err
	}
	b, err := d.r.Peek(n)
	if err == nil {
		err = d.hold(n)
	}
	if err != nil {
		return "", err
	}
	k := string(b)
	_, err = d.r.Discard(n)
	return k, err
}

// length reads the length of a string and checks it against the limit of its kind and of the whole request.
func (d *decoder) length(what string, most int) (int, error) {
	n, err := d.uint(8)
	switch {
	case err != nil:
		return 0, err
	case n > uint64(most):
		return 0, &limitError{what, n, uint64(most)}
	case n+8 > d.left:
		total := uint64(d.cfg.MaxRequestBytes)
		return 0, &limitError{"bytes in one request", total - d.left + n + 8, total}
	}
	d.left -= n + 8
	return int(n), nil
}

// bytes reads n bytes into a slice of its own, which grows as they arrive.
func (d *decoder) bytes(n int) ([]byte, error) {
	const first = 4 << 10
	var buf []byte
	for size := min(n, first); ; size = min(n, 2*size) {
		if err := d.hold(size - len(buf)); err != nil {
			return nil, err
		}
		read := len(buf)
		buf = append(make([]byte, 0, size), buf...)[:size]
		if _, err := io.ReadFull(d.r, buf[read:]); err != nil || size == n {
			return buf, err
		}
	}
}

// freeBytes of a request are not counted, so that small requests pass even if others send large ones.
const freeBytes = 64 << 10

// hold counts n more bytes of the request.
func (d *decoder) hold(n int) error {
	counted := d.counted()
	d.held += int64(n)
	if all := d.receiving.Add(d.counted() - counted); all > d.cfg.MaxReceivingBytes && d.counted() > 0 {
		return &limitError{"bytes of unfinished requests of all clients", uint64(all), uint64(d.cfg.MaxReceivingBytes)}
	}
	return nil
}

func (d *decoder) counted() int64 { return max(d.held-freeBytes, 0) }

// done releases the memory of a request that is carried out or given up.
func (d *decoder) done() {
	d.receiving.Add(-d.counted())
	d.held = 0
}

// uint reads an unsigned integer of size bytes.
func (d *decoder) uint(size int) (uint64, error) {
	b, err := d.r.Peek(size)
	if err != nil {
		return 0, err
	}
	var word [8]byte
	copy(word[:], b)
	_, err = d.r.Discard(size)
	return binary.LittleEndian.Uint64(word[:]), err
}
