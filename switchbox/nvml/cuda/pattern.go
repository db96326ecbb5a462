package cuda

import (
	"fmt"
	"hash/fnv"
)

// Corruption is the error of a copy whose data differs from the source.
type Corruption struct {
	Words, Bytes int64 // differing words of 8 bytes, of so many bytes
	// The first difference: its offset in bytes, the value sent, the value received.
	At         int64
	Sent, Came uint64
}

func (c *Corruption) Error() string {
	return fmt.Sprintf("%d of %d words differ, the first at byte %d: sent %#016x, received %#016x",
		c.Words, c.Bytes/8, c.At, c.Sent, c.Came)
}

// word is the pattern: it depends on the place, so that a part that lands elsewhere is noticed, and on the sender.
func word(i, seed uint64) uint64 { return (i+seed)*0x9e3779b97f4a7c15 ^ i>>7 }

// pattern fills words with the pattern from its first-th word on.
func pattern(words []uint64, first, seed uint64) {
	for i := range words {
		words[i] = word(first+uint64(i), seed)
	}
}

// compare counts the words that are not the pattern's.
func (c *Corruption) compare(words []uint64, first, seed uint64) {
	for i, came := range words {
		sent := word(first+uint64(i), seed)
		if came == sent {
			continue
		}
		if c.Words == 0 {
			c.At, c.Sent, c.Came = int64(first+uint64(i))*8, sent, came
		}
		c.Words++
	}
}

// seedOf makes the patterns of two devices differ.
func seedOf(pci string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(pci))
	return h.Sum64()
}
