package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A job of two nodes with failures: a rank is killed in every stretch of steps, and in the last but one all processes of
// a node, whose launcher is started again at once.
const (
	goodputStretch = 500 // steps
	goodputKills   = 3
	goodputSteps   = (goodputKills + 2) * goodputStretch
	goodputRanks   = 2 * warmWorkers
)

func goodputRows() []row {
	what := fmt.Sprintf("%d steps of 50 ms, DDP, 2 nodes of 2: %d ranks and one node are killed, whose launcher is started "+
		"again at once; the time beyond that of steps without failures", goodputSteps, goodputKills)
	return []row{{id: "goodput", run: goodput, torch: true, warm: true, maxReps: 1, maxPeerReps: 1, limit: 4 * time.Minute,
		peerLimit: 10 * time.Minute, lines: []line{
			{what: what, unit: percent, goal: 3},
			{what: "of that for a killed rank", unit: duration},
			{what: "and for the lost node", unit: duration}}}}
}

// goodput has saves in memory at every step, of which each node holds those of the other, too. The peer's are in files.
func goodput(ctx context.Context, l *lab) ([]float64, error) {
	l.pace = "0.05"
	var more []string
	if !l.side.peer {
		l.side.env = append(slices.Clone(l.side.env), "DLROVER_TOKEN="+l.bench.token)
		more = append(more, "--ckpt-replicas=2")
	}
	t, err := l.train(ctx, "2", warmWorkers, more...)
	if err == nil {
		err = t.node()
	}
	if err == nil {
		_, err = t.ready(ctx, goodputRanks)
	}
	if err != nil {
		return nil, err
	}
	f, err := os.Open(t.log)
	if err != nil {
		return nil, err
	}
	l.files = append(l.files, f)
	s := &progressed{from: f, pids: map[int]int{}, ranks: map[int]map[int]bool{}, at: map[int]int64{}}
	if err := s.read(); err != nil {
		return nil, err
	}
	first := s.newest + 1
	for i := range goodputKills + 1 {
		if err := t.steps(ctx, s, first+(i+1)*goodputStretch); err != nil {
			return nil, err
		}
		if i < goodputKills {
			err = unix.Kill(s.pids[goodputRanks-1], unix.SIGKILL)
		} else {
			l.kill(t.nodes[1])
			err = t.node()
		}
		if err != nil {
			return nil, err
		}
	}
	if err := t.steps(ctx, s, first+goodputSteps); err != nil {
		return nil, err
	}
	return s.lost(first), nil
}

// steps waits until all ranks have made a step.
func (t *training) steps(ctx context.Context, s *progressed, step int) error {
	for s.at[step] == 0 {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return fmt.Errorf("waited for step %d, after %d: %w", step, s.newest, err)
		}
		if err := s.read(); err != nil {
			return err
		}
	}
	return nil
}

// progressed are the steps in the log of a training.
type progressed struct {
	from   io.Reader
	rest   []byte               // a part of a line
	pids   map[int]int          // the newest process of each rank
	ranks  map[int]map[int]bool // that have made a step
	at     map[int]int64        // when all ranks had made a step for the first time
	newest int                  // of these
}

// read reads the lines that have been added.
func (p *progressed) read() error {
	data, err := io.ReadAll(p.from)
	if err != nil {
		return err
	}
	data = append(p.rest, data...)
	end := bytes.LastIndexByte(data, '\n') + 1
	for text := range bytes.Lines(data[:end]) {
		p.line(string(text))
	}
	p.rest = bytes.Clone(data[end:])
	return nil
}

func (p *progressed) line(text string) {
	var l warmLine
	step := 0
	if n, _ := fmt.Sscan(text, &l.what, &l.rank, &l.count, &l.pid, &l.at, &step); n < 6 || l.what != "step" {
		return
	}
	p.pids[l.rank] = l.pid
	if p.ranks[step] == nil {
		p.ranks[step] = map[int]bool{}
	}
	p.ranks[step][l.rank] = true
	if p.at[step] == 0 && len(p.ranks[step]) == goodputRanks {
		p.at[step], p.newest = l.at, step
	}
}

// lost is the time that failures have cost: of all in percent of the time without any, in seconds of a killed rank and
// of the lost node. The second halves of the stretches are the time without failures.
func (p *progressed) lost(first int) []float64 {
	between := func(from, to int) float64 { return seconds(p.at[first+from], p.at[first+to]) }
	half, quiet := goodputStretch/2, 0.0
	for at := 0; at < goodputSteps; at += goodputStretch {
		quiet += between(at+half, at+goodputStretch)
	}
	step := quiet / (goodputSteps / 2)
	var costs []float64
	for at := goodputStretch; at < goodputSteps; at += goodputStretch {
		costs = append(costs, between(at, at+half)-float64(half)*step)
	}
	kills := slices.Sorted(slices.Values(costs[:goodputKills]))
	return []float64{100 * (between(0, goodputSteps)/(step*goodputSteps) - 1), median(kills), costs[goodputKills]}
}
