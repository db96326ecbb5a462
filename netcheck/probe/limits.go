package probe

import "time"

// limits bound the steps of a test. A Prober of a test of this package may have others than usual.
type limits struct {
	bound   time.Duration // of an attempt to connect that is bound to the interface: one SYN may get lost
	connect time.Duration // of one that is not: two
	retry   time.Duration // after that no further attempt begins
	proof   time.Duration // of the whole handshake
	answer  time.Duration // of the other end, and of its data
	bye     time.Duration // of the last message, which the other end may not take
	why     time.Duration // of the other end's last message, once its data ended
	rung    time.Duration // of a try of the ladder
	tool    time.Duration // of one direction by RDMA, with the tool's start
	listen  time.Duration // of the start of the tool's server
	output  time.Duration // of what a tool has left when it ends
}

var usual = limits{
	bound:   1600 * time.Millisecond,
	connect: 3200 * time.Millisecond,
	retry:   2 * time.Second,
	proof:   2 * time.Second,
	answer:  2 * time.Second,
	bye:     100 * time.Millisecond,
	why:     200 * time.Millisecond,
	rung:    200 * time.Millisecond,
	tool:    5 * time.Second,
	listen:  2 * time.Second,
	output:  200 * time.Millisecond,
}
