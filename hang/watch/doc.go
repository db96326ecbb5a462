// Package watch is the observer of one node: it looks at the workers from outside, some times a minute, and collects
// evidence when the judge of the run asks for it.
//
// Whatever reads a worker may block for as long as the kernel likes: on the lock of its memory, or on one that it holds
// while it executes another program. So it runs in a goroutine of its own with a deadline; what is late is left behind,
// and of that process nothing but its last sample is told any more. No worker is stopped or signaled.
//
// Goroutines: those of Watch; it waits for them, but for those that are left behind.
package watch
