package main

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"dlrover-run/hang/pystack"
)

//go:embed pystack.py
var pystackScript []byte

const (
	stackReads   = 10_000 // of a process that works
	stackWindows = 40     // in so many pieces, with as many without reads between them
	stackPause   = time.Millisecond
	stackWorkers = 8
)

func pystackRows() []row {
	return []row{{id: "pystack", run: stacks, maxReps: 2, limit: 5 * time.Minute, noPeer: "has none", lines: []line{
		{what: "Python stacks of a process of 50 threads: the first time", unit: duration},
		{what: "and again", unit: duration},
		{what: "the same by `py-spy dump --nonblocking`, its start included", unit: duration},
		{what: fmt.Sprintf("%d such processes at once, with native frames", stackWorkers), unit: duration, goal: 1},
		{what: fmt.Sprintf("a process that works is unharmed by %d reads", stackReads), unit: yesno, goal: 1},
		{what: "its turns a second of its processor time meanwhile, of what they were", unit: share, goal: 99},
	}}}
}

func stacks(ctx context.Context, l *lab) ([]float64, error) {
	script := filepath.Join(l.dir, "pystack.py")
	if err := os.WriteFile(script, pystackScript, 0o600); err != nil {
		return nil, err
	}
	workers, err := l.stackWorkers(ctx, script)
	if err != nil {
		return nil, err
	}
	values := []float64{math.NaN(), math.NaN(), pySpy(ctx, workers[0].pid()), math.NaN(), 0, math.NaN()}
	r := pystack.New()
	for i := range 2 {
		if values[i], err = timeRead(ctx, r, workers[0].pid()); err != nil {
			return nil, err
		}
	}
	if values[3], err = readAll(ctx, r, workers); err != nil {
		return nil, err
	}
	for _, w := range workers[1:] {
		l.kill(w.process)
	}
	if values[5], err = workers[0].throughput(ctx, r); err != nil {
		return nil, err
	}
	values[4] = 1
	return values, nil
}

// stackWorker is a process that works.
type stackWorker struct {
	*process
	file string
}

func (w stackWorker) pid() int { return w.cmd.Process.Pid }

func (l *lab) stackWorkers(ctx context.Context, script string) (all []stackWorker, err error) {
	for i := range stackWorkers {
		w := stackWorker{file: filepath.Join(l.dir, "turns-"+strconv.Itoa(i))}
		if err := os.WriteFile(w.file, make([]byte, 16), 0o600); err != nil {
			return nil, err
		}
		if w.process, err = l.start(nil, nil, l.python, script, w.file); err != nil {
			return nil, err
		}
		all = append(all, w)
	}
	for _, w := range all {
		err := l.until(ctx, "the first turns", func() (bool, error) {
			turns, _, err := w.state()
			return turns > 10, err
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// state is how many turns it has done, and the processor time that it has used for them in ns.
func (w stackWorker) state() (turns, cpu float64, err error) {
	select {
	case <-w.done:
		return 0, 0, fmt.Errorf("the process that works has ended: %s", w.cmd.ProcessState)
	default:
	}
	b, err := os.ReadFile(w.file)
	if err != nil || len(b) < 16 {
		return 0, 0, errors.Join(err, errors.New("it has not counted"))
	}
	return float64(binary.LittleEndian.Uint64(b)), float64(binary.LittleEndian.Uint64(b[8:])), nil
}

// rate is turns a ns of processor time, while something is done.
func (w stackWorker) rate(do func() error) (float64, error) {
	turns, cpu, err := w.state()
	if err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	later, used, err := w.state()
	if err == nil && later == turns {
		err = errors.New("the process that works does nothing any more")
	}
	return (later - turns) / (used - cpu), err
}

// throughput is the median over pairs of windows, with reads and without, in percent.
func (w stackWorker) throughput(ctx context.Context, r *pystack.Reader) (float64, error) {
	const each = stackReads / stackWindows
	var ratios []float64
	for range stackWindows {
		began := time.Now()
		with, err := w.rate(func() error { return w.readOften(ctx, r, each) })
		if err != nil {
			return 0, err
		}
		took := time.Since(began)
		without, err := w.rate(func() error { return pause(ctx, took) })
		if err != nil {
			return 0, err
		}
		ratios = append(ratios, 100*with/without)
	}
	slices.Sort(ratios)
	return (ratios[(len(ratios)-1)/2] + ratios[len(ratios)/2]) / 2, nil
}

func (w stackWorker) readOften(ctx context.Context, r *pystack.Reader, n int) error {
	for range n {
		if _, err := timeRead(ctx, r, w.pid()); err != nil {
			return err
		}
		if err := pause(ctx, stackPause); err != nil {
			return err
		}
	}
	return nil
}

func timeRead(ctx context.Context, r *pystack.Reader, pid int, want ...pystack.Want) (float64, error) {
	began := time.Now()
	s, err := r.Read(ctx, pid, want...)
	if err == nil && len(s.Threads) < 50 {
		err = fmt.Errorf("%d threads are read of 50: %s", len(s.Threads), s.Error)
	}
	return time.Since(began).Seconds(), err
}

func readAll(ctx context.Context, r *pystack.Reader, workers []stackWorker) (float64, error) {
	began := time.Now()
	errs := make([]error, len(workers))
	var all sync.WaitGroup
	for i, w := range workers {
		all.Go(func() { _, errs[i] = timeRead(ctx, r, w.pid(), pystack.Native) })
	}
	all.Wait()
	return time.Since(began).Seconds(), errors.Join(errs...)
}

// pySpy is how long py-spy takes; NaN if it is not installed, or cannot read the process.
func pySpy(ctx context.Context, pid int) float64 {
	began := time.Now()
	if err := exec.CommandContext(ctx, "py-spy", "dump", "--nonblocking", "--pid", strconv.Itoa(pid)).Run(); err != nil {
		return math.NaN()
	}
	return time.Since(began).Seconds()
}
