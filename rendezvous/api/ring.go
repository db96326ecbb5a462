package api

// ring is a queue that grows up to a limit; beyond that, a pushed element replaces the oldest.
type ring[T any] struct {
	limit int
	items []T // a circle from head
	head  int
	count int
}

// firstRing is the room of a ring that has just been used for the first time.
const firstRing = 16

// at is the i-th oldest item, 0 <= i < count.
func (q *ring[T]) at(i int) *T { return &q.items[(q.head+i)%len(q.items)] }

// push appends v. In a full ring it drops the oldest item, which it returns.
func (q *ring[T]) push(v T) (dropped T, full bool) {
	if full = q.count == q.limit; full {
		dropped = q.pop()
	}
	if q.count == len(q.items) {
		q.grow()
	}
	q.count++
	*q.at(q.count - 1) = v
	return dropped, full
}

// pop removes the oldest item of a ring that is not empty.
func (q *ring[T]) pop() T {
	v, none := *q.at(0), *new(T)
	*q.at(0) = none
	q.head = (q.head + 1) % len(q.items)
	q.count--
	return v
}

// remove removes the i-th oldest item, by moving those that are older.
func (q *ring[T]) remove(i int) T {
	at, last := (q.head+i)%len(q.items), len(q.items)-1
	v := q.items[at]
	if at < q.head { // older elements lie on both sides of the end
		copy(q.items[1:at+1], q.items[:at])
		q.items[0] = q.items[last]
		at = last
	}
	copy(q.items[q.head+1:at+1], q.items[q.head:at])
	q.pop()
	return v
}

func (q *ring[T]) grow() { q.resize(max(2*len(q.items), firstRing)) }

// trim gives back the room that nothing is in.
func (q *ring[T]) trim() { q.resize(max(q.count, firstRing)) }

func (q *ring[T]) resize(n int) {
	items := make([]T, min(n, q.limit))
	for i := range q.count {
		items[i] = *q.at(i)
	}
	q.items, q.head = items, 0
}

// from copies the items from the i-th oldest on.
func (q *ring[T]) from(i int) []T {
	if i >= q.count {
		return nil
	}
	out := make([]T, 0, q.count-i)
	for ; i < q.count; i++ {
		out = append(out, *q.at(i))
	}
	return out
}
