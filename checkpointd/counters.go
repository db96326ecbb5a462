package checkpointd

import (
	"sync"
	"time"
)

// Counters only ever grow.
type Counters struct {
	Flushes       int64         `json:"flushes"`
	FlushedBytes  int64         `json:"flushed_bytes"`
	WriteTime     time.Duration `json:"write_ns"`
	Commits       int64         `json:"commits"`
	Failures      int64         `json:"failures"`
	Superseded    int64         `json:"superseded"`
	Retries       int64         `json:"retries"`
	CopiesSent    int64         `json:"copies_sent"`
	CopiedBytes   int64         `json:"copied_bytes"`
	CopiesFailed  int64         `json:"copies_failed"`
	CopiesFetched int64         `json:"copies_fetched"`
	Breakpoints   int64         `json:"breakpoints"`
}

// counters are Counters that several parts add to.
type counters struct {
	mu sync.Mutex
	n  Counters
}

func (c *counters) add(f func(n *Counters)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.n)
}

func (c *counters) snapshot() Counters {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}
