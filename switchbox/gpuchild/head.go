package gpuchild

import (
	"bytes"
	"sync"
)

// head keeps the first bytes that are written to it and forgets the rest.
type head struct {
	limit int
	line  chan struct{} // closed at the first line's end
	full  chan struct{} // closed when the limit is reached

	mu   sync.Mutex
	kept []byte
}

func newHead(limit int) *head {
	return &head{limit: limit, line: make(chan struct{}), full: make(chan struct{})}
}

// Write takes all of p, even if it keeps only a part: the writer is never stopped.
func (h *head) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	take := p[:min(len(p), h.limit-len(h.kept))]
	if len(take) == 0 {
		return len(p), nil
	}
	hadLine := bytes.IndexByte(h.kept, '\n') >= 0
	h.kept = append(h.kept, take...)
	if !hadLine && bytes.IndexByte(take, '\n') >= 0 {
		close(h.line)
	}
	if len(h.kept) == h.limit {
		close(h.full)
	}
	return len(p), nil
}

func (h *head) text() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return string(h.kept)
}
