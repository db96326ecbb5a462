// Package watch is the observer of one node: it looks at the workers from outside, some times a minute, and collects
// evidence when the judge of the run asks for it.
//
// A read of a worker may block without limit in the kernel: on the lock of its memory, or on one that it holds while
// it executes another program. So it runs in a goroutine of its own with a deadline; a late one is abandoned, and its
// process is reported by its last sample only. No worker is stopped or signaled.
//
// Goroutines: those of Watch; it waits for all but the abandoned ones.
package watch
