package proc

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MemoryMode is the kernel's reaction when the NUMA node of a MemoryPolicy has no memory left.
type MemoryMode int

// The memory modes, by the kernel's numbers (linux/mempolicy.h).
const (
	// PreferNode takes memory of other nodes then.
	PreferNode MemoryMode = 1
	// BindNode takes none: the process swaps, or the kernel's OOM killer ends it.
	BindNode MemoryMode = 2
)

// MemoryPolicy is the source of the memory of a process and of its children.
type MemoryPolicy struct {
	Mode MemoryMode
	Node int // from 0
}

// maxNUMANodes is more than any kernel is built for.
const maxNUMANodes = 1024

// nodeMask is a set of NUMA nodes as the kernel reads it on 64-bit machines.
type nodeMask [maxNUMANodes / 64]uint64

// Words are the arguments of the system call set_mempolicy, its number first, for a process that is not ours: mode, and
// the set of nodes in words of 64 bits.
func (p MemoryPolicy) Words() (call, mode int, nodes []uint64) {
	mask := p.mask()
	return unix.SYS_SET_MEMPOLICY, int(p.Mode), mask[:]
}

func (p MemoryPolicy) mask() (m nodeMask) {
	m[p.Node/64] = 1 << (p.Node % 64)
	return m
}

// Try reports why this process could not give a worker the policy: the node has no memory or is not this container's,
// or a seccomp filter forbids it, such as Docker's without CAP_SYS_NICE.
func (p MemoryPolicy) Try() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	restore, err := p.ofThread()
	if err == nil {
		restore()
	}
	return err
}

// ofThread gives the calling thread the policy, which its children inherit, until restore is called.
func (p MemoryPolicy) ofThread() (restore func(), err error) {
	if p.Node < 0 || p.Node >= maxNUMANodes {
		return nil, fmt.Errorf("NUMA node %d: must be 0 to %d", p.Node, maxNUMANodes-1)
	}
	old, err := memoryPolicy()
	if err != nil {
		return nil, fmt.Errorf("read the memory policy: %w", err)
	}
	if err := setMemoryPolicy(int(p.Mode), p.mask()); err != nil {
		return nil, fmt.Errorf("set the memory policy for NUMA node %d: %w", p.Node, err)
	}
	return func() { _ = setMemoryPolicy(old.mode, old.nodes) }, nil
}

// threadPolicy is the memory policy of a thread.
type threadPolicy struct {
	mode  int
	nodes nodeMask
}

// maskBits is one more than the mask has: the kernel takes the number of the first bit that it must not read.
const maskBits = maxNUMANodes + 1

func memoryPolicy() (p threadPolicy, err error) {
	var mode int32
	_, _, errno := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)),
		uintptr(unsafe.Pointer(&p.nodes)), maskBits, 0, 0, 0)
	if p.mode = int(mode); errno != 0 {
		return p, errno
	}
	return p, nil
}

func setMemoryPolicy(mode int, nodes nodeMask) error {
	_, _, errno := unix.Syscall(unix.SYS_SET_MEMPOLICY, uintptr(mode), uintptr(unsafe.Pointer(&nodes)), maskBits)
	if errno != 0 {
		return errno
	}
	return nil
}
