// gpucheck asks NVIDIA's driver for the state of the GPUs of this machine and the links between them. It copies memory
// between pairs of them, and prints its findings. It is a process of its own, the only one with cgo, because a driver
// may hang or crash. The launcher starts it as a child, under a deadline, and does without it where it cannot run.
package main

import "dlrover-run/internal/app/gpucheck"

func main() { gpucheck.Main() }
