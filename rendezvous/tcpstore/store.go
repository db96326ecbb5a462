package tcpstore

import (
	"bytes"
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// connID names a connection to the store: it is never used twice.
type connID uint64

// message is bytes for one connection. Messages for a connection are sent in the order of creation.
type message struct {
	to   connID
	data []byte
}

// entryCost is the memory charged for one entry of a map or a list besides its key and value, in bytes.
const entryCost = 128

var (
	errNoKey     = errors.New("tcpstore: GET of a key that is not set (a generation A client waits for it first)")
	errNotNumber = errors.New("tcpstore: not a decimal number of 64 bits")
)

// store is the data of one namespace and the connections that wait for it: no socket or lock, and a clock for nothing
// but the ages of waits. A value is never changed in place, so messages share its bytes; APPEND writes only behind the
// end that earlier readers know of.
type store struct {
	limit    int64 // of bytes
	bytes    int64 // keys, values and entryCost of all that is stored or waited for
	values   map[string][]byte
	queues   map[string][]item              // never empty ones
	holds    map[connID]*hold               // items that are kept for a connection
	waiters  map[string]*list.List          // of *wait, the oldest first
	waits    map[connID]*wait               // by connection
	watchers map[string]map[connID]struct{} // of a key: generation A's callback connections
	watched  map[connID][]string            // of a connection: the keys it watches
	out      []message                      // of the current apply; reused by the next one
}

// wait is an unanswered WAIT or BARRIER. A key counts as seen from the moment it is set, even when it is deleted later.
type wait struct {
	conn    connID
	since   time.Time
	missing int
	places  []place
}

// place is the entry of a wait in the list of a key.
type place struct {
	wait *wait
	key  string
	elem *list.Element // nil once the key was seen
}

// item is one value in a queue.
type item struct {
	value []byte
	owner connID // the connection that it is kept for, or 0
}

// hold keeps an item for a connection whose WAIT it has answered: PyTorch's blocking queue_pop is a WAIT and then a
// QUEUE_POP, and raises an error when another client pops in between. A client that waits for another reason must not
// keep the item from others for ever: any other request gives it back, and so does lapse.
type hold struct {
	key string
	old bool // seen by lapse
}

func newStore(limit int64) *store {
	return &store{
		limit:    limit,
		values:   make(map[string][]byte),
		queues:   make(map[string][]item),
		holds:    make(map[connID]*hold),
		waiters:  make(map[string]*list.List),
		waits:    make(map[connID]*wait),
		watchers: make(map[string]map[connID]struct{}),
		watched:  make(map[connID][]string),
	}
}

// inherit takes over the values of an earlier store of the same limit, of keys with this prefix.
func (s *store) inherit(old *store, prefix string) {
	if old == nil || prefix == "" {
		return
	}
	for key, value := range old.values {
		if strings.HasPrefix(key, prefix) {
			_ = s.replace(key, value) // there was room for it
		}
	}
}

// apply carries out one request of connection id. The messages are valid until the next apply. They are also to be sent
// if the error means that the connection must be closed.
func (s *store) apply(id connID, r request) ([]message, error) {
	s.out = s.out[:0]
	// A client has one request open at a time, so a request means that it gave up its wait. Generation A clients do that
	// silently after a timeout; an answer to the wait would then be read as the answer to this request. (A key that is set
	// between the timeout and the next request still has that effect, as with PyTorch's server: the server cannot know.)
	s.forget(id)
	if h := s.holds[id]; h != nil && (r.op != opQueuePop || r.keys[0] != h.key) {
		s.giveBack(id, h)
	}
	err := s.run(id, r)
	return s.out, err
}

func (s *store) run(id connID, r request) error {
	answer := reply{s: s, to: id}
	defer answer.send()
	switch r.op {
	case opSet:
		return s.put(r.keys[0], r.values[0])
	case opCompareSet:
		return s.compareSet(&answer, r)
	case opGet:
		v, ok := s.values[r.keys[0]]
		if !ok && r.gen == genA {
			return errNoKey
		}
		answer.bytes(v) // libuv: an absent key has length 0
	case opAdd:
		return s.add(&answer, r.keys[0], r.num)
	case opCheck:
		answer.byte(s.check(r.keys))
	case opWait:
		return s.wait(&answer, r.keys)
	case opNumKeys:
		answer.int(int64(len(s.values)))
	case opDeleteKey:
		answer.int(s.remove(r.keys[0]))
	case opAppend:
		return s.appendValue(r.keys[0], r.values[0])
	case opMultiGet:
		for _, k := range r.keys {
			answer.bytes(s.values[k])
		}
	case opMultiSet:
		for i, k := range r.keys {
			if err := s.put(k, r.values[i]); err != nil {
				return err
			}
		}
	case opCancelWait:
		answer.byte(waitCanceled) // apply already dropped the wait
	case opPing:
		answer.buf = binary.LittleEndian.AppendUint32(answer.buf, uint32(r.num))
	case opQueuePush:
		return s.push(r.keys[0], r.values[0])
	case opQueuePop:
		s.pop(&answer, r.keys[0])
	case opQueueLen:
		answer.int(int64(len(s.queues[r.keys[0]])))
	case opListKeys:
		answer.int(int64(len(s.values)))
		for k := range s.values {
			answer.buf = appendString(answer.buf, k)
		}
	case opBarrier:
		return s.barrier(&answer, r.keys[0], r.num)
	case opWatchKey:
		return s.watch(&answer, r.keys[0])
	}
	return nil
}

// put stores a value and wakes all clients that wait for the key.
func (s *store) put(key string, value []byte) error {
	err := s.replace(key, value)
	if err == nil {
		s.wakeAll(key)
	}
	return err
}

// replace stores a value and notifies the key's watchers.
func (s *store) replace(key string, value []byte) error {
	old, existed := s.values[key]
	cost, event := len(value)-len(old), byte(keyUpdated)
	if !existed {
		cost, event = cost+len(key)+entryCost, keyCreated
	}
	if err := s.charge(cost); err != nil {
		return err
	}
	s.values[key] = value
	s.notify(event, key, old, value)
	return nil
}

func (s *store) remove(key string) int64 {
	old, ok := s.values[key]
	if !ok {
		return 0
	}
	delete(s.values, key)
	s.bytes -= int64(len(key) + len(old) + entryCost)
	s.notify(keyDeleted, key, old, nil)
	return 1
}

// compareSet answers an absent key and a wrong expectation with that expectation, as if it were the value: callers take
// an answer that differs from their new value as a failure. It wakes waiters when it stored, where 1.13 wakes none
// and libuv wakes them even when it left the key absent.
func (s *store) compareSet(answer *reply, r request) error {
	key, expected, value := r.keys[0], r.values[0], r.values[1]
	current, ok := s.values[key]
	if !bytes.Equal(current, expected) {
		if !ok {
			current = expected
		}
		answer.bytes(current)
		return nil
	}
	if err := s.put(key, value); err != nil {
		return err
	}
	answer.bytes(value)
	return nil
}

// add leaves decimal text and overflows by wrapping, as upstream does.
func (s *store) add(answer *reply, key string, delta int64) error {
	n, err := s.number(key)
	if err != nil {
		return err
	}
	if err := s.put(key, strconv.AppendInt(nil, n+delta, 10)); err != nil {
		return err
	}
	answer.int(n + delta)
	return nil
}

// number reads a value as C's strtoll does, since upstream uses std::stoll: spaces before and anything behind the
// digits are ignored.
func (s *store) number(key string) (int64, error) {
	value, ok := s.values[key]
	if !ok {
		return 0, nil
	}
	text := strings.TrimLeft(string(value), " \t\n\v\f\r")
	digits := strings.TrimLeft(text[min(1, len(text)):], "0123456789")
	n, err := strconv.ParseInt(text[:len(text)-len(digits)], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%w: key %.64q holds %.32q", errNotNumber, key, value)
	}
	return n, nil
}

func (s *store) appendValue(key string, value []byte) error {
	return s.put(key, append(s.values[key], value...))
}

func (s *store) push(key string, value []byte) error {
	cost := len(value) + entryCost
	if len(s.queues[key]) == 0 {
		cost += len(key) + entryCost
	}
	if err := s.charge(cost); err != nil {
		return err
	}
	s.queues[key] = append(s.queues[key], item{value: value})
	s.wakeFree(key)
	return nil
}

// pop answers with the length before popping, and the item that is kept for the connection or the oldest free one. When
// there is neither, the queue is empty for this connection.
func (s *store) pop(answer *reply, key string) {
	owner := connID(0)
	if s.holds[answer.to] != nil {
		owner = answer.to
		delete(s.holds, answer.to)
	}
	queue := s.queues[key]
	i := indexOf(queue, owner)
	if i < 0 {
		answer.int(0)
		return
	}
	answer.int(int64(len(queue)))
	answer.bytes(queue[i].value)
	s.bytes -= int64(len(queue[i].value) + entryCost)
	copy(queue[1:i+1], queue[:i]) // the few that are kept for others
	queue[0] = item{}
	if s.queues[key] = queue[1:]; len(queue) == 1 {
		delete(s.queues, key)
		s.bytes -= int64(len(key) + entryCost)
	}
}

// indexOf returns where the first item of owner is, or -1.
func indexOf(queue []item, owner connID) int {
	return slices.IndexFunc(queue, func(it item) bool { return it.owner == owner })
}

// keep keeps the oldest free item of a queue for a connection. It reports false when there is none.
func (s *store) keep(id connID, key string) bool {
	i := indexOf(s.queues[key], 0)
	if i >= 0 {
		s.queues[key][i].owner = id
		s.holds[id] = &hold{key: key}
	}
	return i >= 0
}

// giveBack offers the item of a hold to the next waiting client.
func (s *store) giveBack(id connID, h *hold) {
	delete(s.holds, id)
	queue := s.queues[h.key]
	queue[indexOf(queue, id)].owner = 0
	s.wakeFree(h.key)
}

// lapse gives back the items kept since the last lapse, and reports whether more are kept.
func (s *store) lapse() ([]message, bool) {
	s.out = s.out[:0]
	for id, h := range s.holds {
		if h.old {
			s.giveBack(id, h)
		}
	}
	for _, h := range s.holds {
		h.old = true
	}
	return s.out, len(s.holds) > 0
}

func (s *store) has(key string) bool {
	_, ok := s.values[key]
	return ok || len(s.queues[key]) > 0
}

func (s *store) check(keys []string) byte {
	for _, k := range keys {
		if !s.has(k) {
			return notReady
		}
	}
	return ready
}

func (s *store) wait(answer *reply, keys []string) error {
	missing := make([]string, 0, len(keys))
	for _, k := range keys {
		_, set := s.values[k]
		if !set && len(keys) == 1 && !s.keep(answer.to, k) || !s.has(k) {
			missing = append(missing, k)
		}
	}
	if len(missing) == 0 {
		answer.byte(stopWaiting)
		return nil
	}
	return s.register(answer.to, missing)
}

// barrier counts the caller at key and answers when the count has reached world. The caller waits on that key, so a SET
// or ADD of it lets the caller go too; the count stays when a caller gives up; both as in libuv.
func (s *store) barrier(answer *reply, key string, world int64) error {
	n, err := s.number(key)
	if err != nil {
		return err
	}
	if err := s.replace(key, strconv.AppendInt(nil, n+1, 10)); err != nil {
		return err
	}
	if n+1 < world {
		return s.register(answer.to, []string{key})
	}
	answer.byte(stopWaiting)
	s.wakeAll(key)
	return nil
}

// register makes id wait for keys.
func (s *store) register(id connID, keys []string) error {
	cost := 0
	for _, k := range keys {
		cost += len(k) + entryCost
	}
	if err := s.charge(cost); err != nil {
		return err
	}
	w := &wait{conn: id, since: time.Now(), missing: len(keys), places: make([]place, len(keys))}
	for i, k := range keys {
		queue := s.waiters[k]
		if queue == nil {
			queue = list.New()
			s.waiters[k] = queue
		}
		p := &w.places[i]
		*p = place{w, k, queue.PushBack(p)}
	}
	s.waits[id] = w
	return nil
}

// wakeAll marks key as seen in every wait for it.
func (s *store) wakeAll(key string) {
	for queue := s.waiters[key]; queue != nil && queue.Len() > 0; {
		s.seen(queue)
	}
}

// wakeFree marks key as seen in the oldest waits while its queue has a free item: a wait for nothing else takes one.
func (s *store) wakeFree(key string) {
	for queue := s.waiters[key]; queue != nil && queue.Len() > 0 && indexOf(s.queues[key], 0) >= 0; {
		s.seen(queue)
	}
}

// seen marks the key of queue as seen in its oldest wait.
func (s *store) seen(queue *list.List) {
	p := queue.Front().Value.(*place)
	s.leave(p)
	w := p.wait
	if w.missing--; w.missing > 0 {
		return
	}
	delete(s.waits, w.conn)
	s.send(w.conn, []byte{stopWaiting})
	if _, ok := s.values[p.key]; !ok && len(w.places) == 1 {
		s.keep(w.conn, p.key)
	}
}

// forget drops the wait of a connection.
func (s *store) forget(id connID) {
	w := s.waits[id]
	if w == nil {
		return
	}
	delete(s.waits, id)
	for i := range w.places {
		if p := &w.places[i]; p.elem != nil {
			s.leave(p)
		}
	}
}

// leave takes a wait off the list of one key.
func (s *store) leave(p *place) {
	queue := s.waiters[p.key]
	queue.Remove(p.elem)
	p.elem = nil
	s.bytes -= int64(len(p.key) + entryCost)
	if queue.Len() == 0 {
		delete(s.waiters, p.key)
	}
}

// watch registers a callback connection for the changes of key.
func (s *store) watch(answer *reply, key string) error {
	ids := s.watchers[key]
	if _, ok := ids[answer.to]; !ok {
		if err := s.charge(len(key) + entryCost); err != nil {
			return err
		}
		if ids == nil {
			ids = make(map[connID]struct{})
			s.watchers[key] = ids
		}
		ids[answer.to] = struct{}{}
		s.watched[answer.to] = append(s.watched[answer.to], key)
	}
	answer.byte(callbackRegistered)
	return nil
}

// notify sends to the watchers of key: event, key, old and new value.
func (s *store) notify(event byte, key string, old, value []byte) {
	for id := range s.watchers[key] {
		note := reply{s: s, to: id}
		note.byte(event)
		note.buf = appendString(note.buf, key)
		note.bytes(old)
		note.bytes(value)
		note.send()
	}
}

// drop forgets a connection that ended.
func (s *store) drop(id connID) []message {
	s.out = s.out[:0]
	s.forget(id)
	if h := s.holds[id]; h != nil {
		s.giveBack(id, h)
	}
	for _, key := range s.watched[id] {
		s.bytes -= int64(len(key) + entryCost)
		if delete(s.watchers[key], id); len(s.watchers[key]) == 0 {
			delete(s.watchers, key)
		}
	}
	delete(s.watched, id)
	return s.out
}

// charge accounts for memory before it is used.
func (s *store) charge(n int) error {
	if total := s.bytes + int64(n); n > 0 && total > s.limit {
		return &limitError{"bytes in the store", uint64(total), uint64(s.limit)}
	}
	s.bytes += int64(n)
	return nil
}

func (s *store) send(to connID, data []byte) {
	s.out = append(s.out, message{to, data})
}

// reply collects the parts of one answer. Long values are sent as they lie in the store, short ones are copied
// together.
type reply struct {
	s   *store
	to  connID
	buf []byte
}

func (r *reply) byte(b byte) { r.buf = append(r.buf, b) }

func (r *reply) int(n int64) { r.buf = binary.LittleEndian.AppendUint64(r.buf, uint64(n)) }

func (r *reply) bytes(v []byte) {
	const long = 4 << 10
	r.int(int64(len(v)))
	if len(v) < long {
		r.buf = append(r.buf, v...)
		return
	}
	r.send()
	r.s.send(r.to, v)
}

func (r *reply) send() {
	if len(r.buf) > 0 {
		r.s.send(r.to, r.buf)
		r.buf = nil
	}
}
