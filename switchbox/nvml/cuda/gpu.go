//go:build cgo && linux

package cuda

/*
#include <stdlib.h>
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// spare is the memory that stays free beside the buffers: the driver needs some itself.
const spare = 64 << 20

// GPU is one device with a context and two buffers: one to send from, filled with the device's own pattern, and one to
// receive into. Close gives them back.
type GPU struct {
	name    string // for messages
	dev     C.cu_device
	ctx     C.cu_handle
	bytes   int64
	out, in C.cu_ptr
	seed    uint64 // of its pattern
}

// GPU opens the device at a PCI address (0000:1b:00.0), independent of CUDA's numbers. name is for messages. The error
// is ErrHidden, ErrNoMemory or the driver's.
func (d *Driver) GPU(name, pci string) (*GPU, error) {
	g := &GPU{name: name}
	if err := g.find(pci); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := check("cuDevicePrimaryCtxRetain", C.cuda_context_retain(&g.ctx, g.dev)); err != nil {
		return nil, fmt.Errorf("%s: %w", name, withoutMemory(err))
	}
	if err := g.prepare(); err != nil {
		g.Close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return g, nil
}

func (g *GPU) find(pci string) error {
	bus := C.CString(pci)
	defer C.free(unsafe.Pointer(bus))
	err := check("cuDeviceGetByPCIBusId", C.cuda_device_by_bus(&g.dev, bus))
	if c := code(err); c == invalidDevice || c == invalidValue {
		return fmt.Errorf("%w: %w", ErrHidden, err)
	}
	g.seed = seedOf(pci)
	return err
}

// prepare allocates both buffers and fills the one to send from.
func (g *GPU) prepare() error {
	leave, err := g.enter()
	if err != nil {
		return err
	}
	defer leave()
	var free, total C.size_t
	if err := check("cuMemGetInfo", C.cuda_memory_info(&free, &total)); err != nil {
		return err
	}
	if g.bytes = sizeFor(int64(free)); g.bytes == 0 {
		return fmt.Errorf("%w: %d of %d MiB, and %d are needed", ErrNoMemory, free>>20, total>>20, (2*small+spare)>>20)
	}
	for _, p := range []*C.cu_ptr{&g.out, &g.in} {
		if err := check("cuMemAlloc", C.cuda_allocate(p, C.size_t(g.bytes))); err != nil {
			return withoutMemory(err)
		}
	}
	return g.fill()
}

// sizeFor is how large each of two buffers may be with so many bytes free; 0: there is no room.
func sizeFor(free int64) int64 {
	for _, size := range []int64{Large, small} {
		if free >= 2*size+spare {
			return size
		}
	}
	return 0
}

func withoutMemory(err error) error {
	if code(err) == outOfMemory {
		return fmt.Errorf("%w: %w", ErrNoMemory, err)
	}
	return err
}

// enter makes the device's context that of this thread, until leave is called. A context that cannot be set is an
// error: the thread may have another device's.
func (g *GPU) enter() (leave func(), err error) {
	runtime.LockOSThread()
	if err := check("cuCtxSetCurrent", C.cuda_context_set(g.ctx)); err != nil {
		runtime.UnlockOSThread()
		return nil, err
	}
	return runtime.UnlockOSThread, nil
}

// Bytes is the size of each buffer.
func (g *GPU) Bytes() int64 { return g.bytes }

// Close frees the buffers and the context.
func (g *GPU) Close() {
	if leave, err := g.enter(); err == nil {
		defer leave()
		for _, p := range []C.cu_ptr{g.out, g.in} {
			if p != 0 {
				C.cuda_release(p)
			}
		}
		C.cuda_context_set(nil)
	}
	C.cuda_context_release(g.dev)
}

// Reach makes the memory of each of the two GPUs visible to the other. False: at least one cannot see the other, and a
// copy takes the way through the host's memory.
func Reach(a, b *GPU) (direct bool, err error) {
	for _, p := range [][2]*GPU{{a, b}, {b, a}} {
		var can C.int
		if err := check("cuDeviceCanAccessPeer", C.cuda_can_access(&can, p[0].dev, p[1].dev)); err != nil || can == 0 {
			return false, err
		}
		if err := p[0].enable(p[1]); err != nil {
			return false, fmt.Errorf("%s to %s: %w", p[0].name, p[1].name, err)
		}
	}
	return true, nil
}

func (g *GPU) enable(peer *GPU) error {
	leave, err := g.enter()
	if err != nil {
		return err
	}
	defer leave()
	err = check("cuCtxEnablePeerAccess", C.cuda_enable_access(peer.ctx, 0))
	if code(err) == alreadyEnabled {
		return nil
	}
	return err
}

// buffer is host memory that is C's, so that a transfer never moves or frees it.
type buffer struct{ words []uint64 }

// chunk is the size of a buffer, in bytes; both sizes of device buffers are multiples of it.
const chunk = 16 << 20

func newBuffer() (*buffer, error) {
	p := C.malloc(chunk)
	if p == nil {
		return nil, errors.New("malloc: no memory on the host")
	}
	return &buffer{words: unsafe.Slice((*uint64)(p), chunk/8)}, nil
}

func (b *buffer) pointer() unsafe.Pointer { return unsafe.Pointer(&b.words[0]) }

func (b *buffer) free() { C.free(b.pointer()) }

// fill writes the device's pattern into the buffer that it sends from.
func (g *GPU) fill() error {
	host, err := newBuffer()
	if err != nil {
		return err
	}
	defer host.free()
	for at := int64(0); at < g.bytes; at += chunk {
		pattern(host.words, uint64(at/8), g.seed)
		if err := check("cuMemcpyHtoD", C.cuda_from_host(g.out+C.cu_ptr(at), host.pointer(), chunk)); err != nil {
			return err
		}
	}
	return g.settle()
}

// settle waits for all work of the device: calls that fill memory may return early, and streams that measure do not
// wait for them.
func (g *GPU) settle() error { return check("cuCtxSynchronize", C.cuda_context_wait()) }

// verify compares the first bytes of the receiving buffer with the pattern of the GPU that sent them.
func (g *GPU) verify(from *GPU, bytes int64) error {
	leave, err := g.enter()
	if err != nil {
		return err
	}
	defer leave()
	host, err := newBuffer()
	if err != nil {
		return err
	}
	defer host.free()
	var bad Corruption
	for at := int64(0); at < bytes; at += chunk {
		if err := check("cuMemcpyDtoH", C.cuda_to_host(host.pointer(), g.in+C.cu_ptr(at), chunk)); err != nil {
			return err
		}
		bad.compare(host.words, uint64(at/8), from.seed)
	}
	if bad.Words > 0 {
		bad.Bytes = bytes
		return &bad
	}
	return nil
}

// spoil overwrites the receiving buffer, so that data of an earlier copy cannot pass for this one's.
func (g *GPU) spoil(bytes int64) error {
	leave, err := g.enter()
	if err != nil {
		return err
	}
	defer leave()
	if err := check("cuMemsetD32", C.cuda_set_words(g.in, 0xdeadbeef, C.size_t(bytes/4))); err != nil {
		return err
	}
	return g.settle()
}
