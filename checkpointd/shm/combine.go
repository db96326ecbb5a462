package shm

import "hash/crc32"

// combiner joins checksums of neighbouring bytes. A CRC is a polynomial over GF(2) modulo P; to append n bytes
// multiplies it by x^(8n). Bit 31 is the coefficient of x^0. Not for concurrent use.
type combiner struct {
	pow   [66]uint32       // x^(2^i), enough for any int64 of bytes
	shift map[int64]uint32 // x^(8n) of the lengths seen: most tensors of a model share a few
}

func newCombiner() *combiner {
	c := &combiner{shift: map[int64]uint32{}}
	c.pow[0] = 1 << 30 // x
	for i := 1; i < len(c.pow); i++ {
		c.pow[i] = multiply(c.pow[i-1], c.pow[i-1])
	}
	return c
}

// combine returns the checksum of a followed by b, given theirs and the length of b in bytes.
func (c *combiner) combine(a, b uint32, n int64) uint32 {
	x, ok := c.shift[n]
	if !ok {
		x = 1 << 31 // x^0
		for i := 3; n>>(i-3) > 0; i++ {
			if n>>(i-3)&1 == 1 {
				x = multiply(x, c.pow[i])
			}
		}
		c.shift[n] = x
	}
	return multiply(a, x) ^ b
}

// multiply returns a·b mod P.
func multiply(a, b uint32) uint32 {
	var p uint32
	for i := 31; i >= 0; i-- {
		p ^= b & -(a >> i & 1)
		b = b>>1 ^ crc32.IEEE&-(b&1)
	}
	return p
}
