package netcheck

// fifo is a queue. Its zero value is empty.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int { return len(q.items) - q.head }

func (q *fifo[T]) push(x T) { q.items = append(q.items, x) }

// pop takes the oldest of a queue that is not empty.
func (q *fifo[T]) pop() T {
	var blank T
	x := q.items[q.head]
	q.items[q.head] = blank
	if q.head++; q.head > len(q.items)/2 {
		q.items = append(q.items[:0], q.items[q.head:]...)
		q.head = 0
	}
	return x
}
