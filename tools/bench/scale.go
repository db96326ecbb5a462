package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

// simulateCommand makes this program a process of simulated nodes.
const simulateCommand = "simulate"

// nodesPerProcess bounds the simulated nodes of one process.
const nodesPerProcess = 5000

func scaleRows(o options) []row {
	rs := []row{smallWorld(8, 0), smallWorld(32, 0), smallWorld(128, 0.1), largeWorld(1000, 0.5)}
	rs[2].slowPeer = true
	if o.quick {
		return append(rs, elasticWorld(1000), checkedWorld(1000), hangRow(1000), storeRow(1000))
	}
	return append(rs, largeWorld(10_000, 5), elasticWorld(10_000), checkedWorld(10_000), hangRow(10_000), storeRow(10_000))
}

func world(n int, goal float64) row {
	return row{
		id: "scale", limit: 2 * time.Minute,
		run: func(ctx context.Context, l *lab) ([]float64, error) { return meet(ctx, l, n) },
		lines: []line{
			{what: fmt.Sprintf("rendezvous of %d nodes: arrival of the last one until all have their ranks", n),
				unit: duration, goal: goal},
		},
	}
}

func smallWorld(n int, goal float64) row {
	r := world(n, goal)
	r.lines[0].what += " (of torchrun: its handler alone)"
	return r
}

// detailed is the size from which a row also reports the daemon's resources.
const detailed = 1000

func largeWorld(n int, goal float64) row {
	r := world(n, goal)
	r.maxReps, r.noPeer = 3, "not run"
	// A node that joins again may have a second connection for seconds; a daemon that
	// can open no more files accepts it later.
	r.files = n + 1000
	r.lines = append(r.lines,
		line{what: "of that, processor time of the daemon", unit: duration},
		line{what: "one worker's failure until all nodes have stopped, met and got their ranks again", unit: duration},
		line{what: "of that, processor time of the daemon", unit: duration},
		line{what: "peak resident memory of the daemon", unit: size, goal: 1 << 30},
		line{what: "and that for each node", unit: size})
	return r
}

// meet measures a rendezvous of n nodes: all but one wait, then the last one arrives.
func meet(ctx context.Context, l *lab, n int) ([]float64, error) {
	if l.side.peer {
		return l.meetHandlers(ctx, n)
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	d, err := l.daemon(ctx, "0.0.0.0:"+port, l.secrets()...)
	if err != nil {
		return nil, err
	}
	empty, err := rss(d.cmd.Process.Pid)
	if err != nil {
		return nil, err
	}
	m, err := l.gather(ctx, d.cmd.Process.Pid, port, n, "")
	if err != nil {
		return nil, err
	}
	defer m.last.close()
	if n < detailed {
		return []float64{m.wall}, nil
	}
	return m.details(ctx, n, empty)
}

// secrets are the variables of a daemon and of simulated nodes that share a token, and TLS if -tls asks for it.
func (l *lab) secrets() []string {
	return []string{"DLROVER_TOKEN=" + l.token, tlsVariable + "=" + os.Getenv(tlsVariable)}
}

// meeting is a world of simulated nodes that have met at the daemon with a pid.
type meeting struct {
	pid   int
	crowd []*bufio.Scanner
	last  *simulation // the node that came last; to be closed
	// wall is the seconds from its arrival until all nodes had their ranks, and cpu the processor time of the daemon.
	wall, cpu float64
}

// gather has n nodes join: all but one wait, then the last one arrives.
func (l *lab) gather(ctx context.Context, pid int, port string, n int, gate gating) (*meeting, error) {
	crowd, err := l.crowd(ctx, port, n, gate)
	if err != nil {
		return nil, err
	}
	m := &meeting{pid: pid, crowd: crowd}
	m.wall, m.cpu, err = m.timed(func() (float64, error) {
		began := now()
		last, err := openNodes(ctx, port, l.token, n, n-1, 1, gate)
		if err != nil {
			return 0, err
		}
		m.last = last
		met, err := all(ctx, last, crowd, "released")
		return seconds(began, met), err
	})
	if err != nil && m.last != nil {
		m.last.close()
	}
	return m, err
}

// timed returns the duration of step, and the processor time that the daemon takes meanwhile.
func (m *meeting) timed(step func() (float64, error)) (took, cpu float64, err error) {
	before, err := cpuSeconds(m.pid)
	if err != nil {
		return 0, 0, err
	}
	if took, err = step(); err != nil {
		return 0, 0, err
	}
	after, err := cpuSeconds(m.pid)
	return took, after - before, err
}

// details are the values of a large world; empty is the daemon's memory, in bytes, before there were nodes.
func (m *meeting) details(ctx context.Context, n int, empty float64) ([]float64, error) {
	again, cpu, err := m.timed(func() (float64, error) { return restartWorld(ctx, m.last, m.crowd) })
	if err != nil {
		return nil, err
	}
	peak, err := memory(m.pid, "status", "VmHWM")
	return []float64{m.wall, m.cpu, again, cpu, peak, (peak - empty) / float64(n)}, err
}

// restartWorld lets a worker fail and returns the seconds until all nodes have their
// next ranks; the nodes stop no workers.
func restartWorld(ctx context.Context, last *simulation, crowd []*bufio.Scanner) (float64, error) {
	if err := pause(ctx, time.Second); err != nil { // until every node watches again
		return 0, err
	}
	began := now()
	if err := last.breakWorld(ctx); err != nil {
		return 0, err
	}
	at, err := all(ctx, last, crowd, "restarted")
	return seconds(began, at), err
}

// crowd starts n-1 nodes and returns their processes when all nodes wait.
func (l *lab) crowd(ctx context.Context, port string, n int, gate gating) (crowd []*bufio.Scanner, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	for from := 0; from < n-1; from += nodesPerProcess {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		defer w.Close()
		count := min(nodesPerProcess, n-1-from)
		if _, err := l.start(l.secrets(), w, self, simulateCommand, port, strconv.Itoa(n),
			strconv.Itoa(from), strconv.Itoa(count), string(gate)); err != nil {
			r.Close()
			return nil, err
		}
		l.files = append(l.files, r)
		context.AfterFunc(ctx, func() { _ = r.SetReadDeadline(time.Unix(0, 1)) }) // wakes the reader
		crowd = append(crowd, bufio.NewScanner(r))
		w.Close() // so that the end of the process is the end of the pipe
	}
	for _, c := range crowd {
		if _, err := expect(c, "joined"); err != nil {
			return nil, err
		}
	}
	return crowd, pause(ctx, time.Second) // until every node's next request is held
}

// expect reads one line "<event> <time>" of a process of simulated nodes.
func expect(c *bufio.Scanner, event string) (int64, error) {
	if !c.Scan() {
		return 0, fmt.Errorf("simulated nodes: the process ended before all had %s: %w",
			event, errors.Join(c.Err(), io.ErrUnexpectedEOF))
	}
	f := strings.Fields(c.Text())
	if len(f) != 2 || f[0] != event {
		return 0, fmt.Errorf("simulated nodes say %q instead of %s", c.Text(), event)
	}
	return strconv.ParseInt(f[1], 10, 64)
}

// all waits until every node has passed a step and returns the time of the last one.
func all(ctx context.Context, mine *simulation, crowd []*bufio.Scanner, step string) (int64, error) {
	at, err := mine.collect(ctx, mine.released)
	if err != nil {
		return 0, err
	}
	for _, c := range crowd {
		t, err := expect(c, step)
		if err != nil {
			return 0, err
		}
		at = max(at, t)
	}
	return at, nil
}

// meetHandlers is the peer's rendezvous without its launcher: with n launchers this
// machine would measure the import of PyTorch.
func (l *lab) meetHandlers(ctx context.Context, n int) ([]float64, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	p, err := l.start(nil, nil, l.python, l.bench.handlers, strconv.Itoa(n), port)
	if err != nil {
		return nil, err
	}
	if _, err := l.exited(ctx, p); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(p.out)
	if err != nil {
		return nil, err
	}
	v, err := strconv.ParseFloat(strings.TrimSpace(string(data)), 64)
	if err != nil {
		return nil, fmt.Errorf("the peer's handlers: %w", err)
	}
	return []float64{v}, nil
}
