//go:build cgo && linux

package cuda

/*
#include "driver.h"
*/
import "C"

import (
	"fmt"
	"slices"
)

// Copy copies the pattern of one GPU to another one, or within one device, measures that, and then compares the data.
// The error is a *Corruption or the driver's. Both GPUs must be idle: copies that share a device take turns.
func Copy(from, to *GPU) (Rate, error) {
	r := Rate{Bytes: min(from.bytes, to.bytes)}
	if err := to.spoil(r.Bytes); err != nil {
		return r, fmt.Errorf("%s: %w", to.name, err)
	}
	if err := measure(from, to, &r); err != nil {
		return r, fmt.Errorf("%s to %s: %w", from.name, to.name, err)
	}
	if err := to.verify(from, r.Bytes); err != nil {
		return r, fmt.Errorf("%s to %s: %w", from.name, to.name, err)
	}
	return r, nil
}

// measure takes the samples on a stream of the sending GPU.
func measure(from, to *GPU, r *Rate) error {
	leave, err := from.enter()
	if err != nil {
		return err
	}
	defer leave()
	s, err := newStopwatch(from, to, r.Bytes)
	defer s.close()
	if err != nil {
		return err
	}
	seconds, err := s.time(warmups)
	if err != nil {
		return err
	}
	n := loops(seconds / warmups)
	rates := make([]float64, samples)
	for i := range rates {
		if seconds, err = s.time(n); err != nil {
			return err
		}
		rates[i] = float64(n) * float64(r.Bytes) / 1e6 / seconds
	}
	slices.Sort(rates)
	r.MBps, r.Low, r.Moved = rates[samples/2], rates[0], int64(warmups+samples*n)*r.Bytes
	return nil
}

// stopwatch times copies between two events on one stream, so that the host's own delays are no part of it.
type stopwatch struct {
	from, to           *GPU
	bytes              C.size_t
	stream, start, end C.cu_handle
}

func newStopwatch(from, to *GPU, bytes int64) (*stopwatch, error) {
	const nonBlocking = 1
	s := &stopwatch{from: from, to: to, bytes: C.size_t(bytes)}
	if err := check("cuStreamCreate", C.cuda_stream_create(&s.stream, nonBlocking)); err != nil {
		return s, err
	}
	if err := check("cuEventCreate", C.cuda_event_create(&s.start, 0)); err != nil {
		return s, err
	}
	return s, check("cuEventCreate", C.cuda_event_create(&s.end, 0))
}

func (s *stopwatch) close() {
	for _, event := range []C.cu_handle{s.start, s.end} {
		if event != nil {
			C.cuda_event_destroy(event)
		}
	}
	if s.stream != nil {
		C.cuda_stream_destroy(s.stream)
	}
}

func (s *stopwatch) enqueue(n int) error {
	for range n {
		if err := s.one(); err != nil {
			return err
		}
	}
	return nil
}

func (s *stopwatch) one() error {
	if s.from == s.to {
		return check("cuMemcpyDtoDAsync", C.cuda_copy_within(s.to.in, s.from.out, s.bytes, s.stream))
	}
	return check("cuMemcpyPeerAsync", C.cuda_copy_peer(s.to.in, s.to.ctx, s.from.out, s.from.ctx, s.bytes, s.stream))
}

// time is how many seconds n copies take.
func (s *stopwatch) time(n int) (float64, error) {
	if err := check("cuEventRecord", C.cuda_event_record(s.start, s.stream)); err != nil {
		return 0, err
	}
	if err := s.enqueue(n); err != nil {
		return 0, err
	}
	if err := check("cuEventRecord", C.cuda_event_record(s.end, s.stream)); err != nil {
		return 0, err
	}
	if err := check("cuStreamSynchronize", C.cuda_stream_wait(s.stream)); err != nil {
		return 0, err
	}
	var ms C.float
	if err := check("cuEventElapsedTime", C.cuda_event_elapsed(&ms, s.start, s.end)); err != nil {
		return 0, err
	}
	if ms <= 0 {
		return 0, fmt.Errorf("the driver says that %d copies took %g ms", n, float64(ms))
	}
	return float64(ms) / 1e3, nil
}
