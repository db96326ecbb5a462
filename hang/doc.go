// Package hang finds out whether the workers of a run hang, and for which of them the others wait.
//
// The observer of each node looks at its workers from outside, and at the pages that a shim in them writes
// (Detector). A worker without progress for too long is a suspicion; it costs nothing and stops nothing. The judge of
// the run then asks all nodes for evidence (Incident): samples some seconds apart, stacks, the workers' store. Judge
// compares the ranks with each other, and its verdict names the culprits, not the ranks that wait for them.
//
// The package is pure: no clock, no file, no socket. Times of one node are its CLOCK_MONOTONIC, as durations since
// the boot; times of different nodes are never compared.
package hang
