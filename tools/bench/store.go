package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// storeCommand makes this program a worker that is many clients of the workers' store.
const storeCommand = "store"

// storeRow has n clients of the store set a key each, and wait until all have.
func storeRow(n int) row {
	return row{id: "store", limit: 2 * time.Minute, maxReps: 3, maxPeerReps: 1, files: n + 1000,
		run: func(ctx context.Context, l *lab) ([]float64, error) { return crowdStore(ctx, l, n) },
		lines: []line{
			{what: fmt.Sprintf("%d clients of the workers' store: each sets a key, and waits until all have", n),
				unit: duration, goal: 1},
			{what: "of that and of their connections, processor time of the launcher", unit: duration},
			{what: "memory of the launcher for each client", unit: size, goal: 2048},
		}}
}

func crowdStore(ctx context.Context, l *lab, n int) ([]float64, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	file := l.stamps + ".store"
	p, err := l.launch(append(standalone(1), l.worker("exec", self, storeCommand, strconv.Itoa(n), file)...)...)
	if err != nil {
		return nil, err
	}
	ws, err := l.await(ctx, "the worker", 1, started(p.began))
	if err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	var pids []int
	for _, pid := range append(descendants(p.cmd.Process.Pid), p.cmd.Process.Pid) {
		if pid != ws[0].pid {
			pids = append(pids, pid)
		}
	}
	empty, err := sum(pids, rss)
	if err != nil {
		return nil, err
	}
	before, err := sum(pids, cpuSeconds)
	if err != nil {
		return nil, err
	}
	took, err := l.barrier(ctx, file)
	if err != nil {
		return nil, err
	}
	after, err := sum(pids, cpuSeconds)
	if err != nil {
		return nil, err
	}
	peak, err := sum(pids, func(pid int) (float64, error) { return memory(pid, "status", "VmHWM") })
	return []float64{took, after - before, (peak - empty) / float64(n)}, err
}

// barrier lets the crowd begin, and returns how long it took.
func (l *lab) barrier(ctx context.Context, file string) (took float64, err error) {
	if err := os.WriteFile(file+".begin", nil, 0o600); err != nil {
		return 0, err
	}
	err = l.until(ctx, "the clients of the store", func() (bool, error) {
		data, err := os.ReadFile(file)
		if err != nil {
			return false, nil
		}
		took, err = strconv.ParseFloat(strings.TrimSpace(string(data)), 64)
		return true, err
	})
	return took, err
}

// storeCrowd is the worker: N FILE. It begins once FILE.begin exists, writes the seconds into FILE, and waits.
func storeCrowd(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	for {
		if _, err := os.Stat(args[1] + ".begin"); err == nil {
			break
		}
		time.Sleep(2 * time.Millisecond)
	}
	c := &crowd{addr: net.JoinHostPort(os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT")), n: n,
		dialing: make(chan struct{}, dialers), conns: make([]net.Conn, n)}
	if err := c.each(c.connect); err != nil {
		return err
	}
	began := time.Now()
	if err := c.each(c.meet); err != nil {
		return err
	}
	text := fmt.Sprint(time.Since(began).Seconds())
	if err := os.WriteFile(args[1]+".new", []byte(text), 0o600); err != nil {
		return err
	}
	if err := os.Rename(args[1]+".new", args[1]); err != nil {
		return err
	}
	select {}
}

// crowd are clients of PyTorch 1.8 to 2.0 for a store.
type crowd struct {
	addr    string
	n       int
	dialing chan struct{} // holds one for each that dials
	conns   []net.Conn
}

// each does f for all clients at once, and returns the first error.
func (c *crowd) each(f func(i int) error) error {
	failed := make(chan error, c.n)
	var wg sync.WaitGroup
	for i := range c.n {
		wg.Go(func() {
			if err := f(i); err != nil {
				failed <- fmt.Errorf("client %d: %w", i, err)
			}
		})
	}
	wg.Wait()
	close(failed)
	return <-failed
}

// connect opens one connection, and sends something, as a store's clients do. At most dialers do so at once.
func (c *crowd) connect(i int) error {
	c.dialing <- struct{}{}
	defer func() { <-c.dialing }()
	nc, err := net.Dial("tcp", c.addr)
	if err != nil {
		return err
	}
	c.conns[i] = nc
	_, err = nc.Write(request("\x00", word("hello/"+strconv.Itoa(i)), word("here")))
	return err
}

// meet is one client's part: SET, ADD, by the last one another SET, and WAIT.
func (c *crowd) meet(i int) error {
	nc := c.conns[i]
	if _, err := nc.Write(request("\x00", word("client/"+strconv.Itoa(i)), word("here"), "\x03", word("clients"),
		"\x01\x00\x00\x00\x00\x00\x00\x00")); err != nil {
		return err
	}
	var count [8]byte
	if _, err := io.ReadFull(nc, count[:]); err != nil {
		return err
	}
	if binary.LittleEndian.Uint64(count[:]) == uint64(c.n) {
		if _, err := nc.Write(request("\x00", word("all"), word("here"))); err != nil {
			return err
		}
	}
	if _, err := nc.Write(request("\x05\x01\x00\x00\x00\x00\x00\x00\x00", word("all"))); err != nil {
		return err
	}
	_, err := io.ReadFull(nc, count[:1])
	return err
}

func request(parts ...string) []byte { return []byte(strings.Join(parts, "")) }

// word is a text after its length.
func word(s string) string { return string(binary.LittleEndian.AppendUint64(nil, uint64(len(s)))) + s }
