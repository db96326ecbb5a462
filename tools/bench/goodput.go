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

// A job of two nodes with failures: goodputSteps steps in eight parts of equal length. One rank is killed after the
// parts 1, 3, 5 and 7, which is every 500 steps, and all processes of a node after part 4. Its launcher is started
// again at once.
const (
	goodputSteps = 2000
	goodputParts = 8
	goodputLoss  = goodputParts / 2
	goodputRanks = 2 * warmWorkers
	// goodputScale divides the length of a part, unless -slow is set. The failures stay the same, and so do their costs,
	// which are then set against the time of all goodputSteps.
	goodputScale = 2.5
)

func goodputRows(o options) []row {
	scaled := "; measured in " + fmt.Sprint(goodputParts*goodputPart(o)) + " steps"
	if o.slow {
		scaled = ""
	}
	return []row{{id: "goodput", run: goodput, torch: true, warm: true, maxReps: 1, maxPeerReps: 1,
		limit: 4 * time.Minute, peerLimit: 8 * time.Minute, lines: []line{
			{what: fmt.Sprintf("%d steps with pauses of 50 ms, DDP, 2 nodes of 2: a rank is killed every 500 steps, and once a "+
				"node, whose launcher is started again at once; the time beyond that without failures%s", goodputSteps, scaled),
				unit: percent, goal: 3},
			{what: "of that for one killed rank (the median of 4)", unit: duration},
			{what: "and for the lost node", unit: duration},
			{what: "a step without failures", unit: duration}}}}
}

// goodputPart is the number of steps of a part.
func goodputPart(o options) int {
	if o.slow {
		return goodputSteps / goodputParts
	}
	return int(goodputSteps / goodputParts / goodputScale)
}

// goodput has saves in memory at every step, of which each node holds those of the other, too. The peer's are in files.
func goodput(ctx context.Context, l *lab) ([]float64, error) {
	t, s, err := failing(ctx, l)
	if err != nil {
		return nil, err
	}
	first, part := s.newest+1, goodputPart(l.options)
	for i := 1; i < goodputParts; i++ {
		if err := t.steps(ctx, s, first+i*part); err != nil {
			return nil, err
		}
		switch {
		case i == goodputLoss:
			l.kill(t.nodes[1])
			err = t.node()
		case i%2 == 1:
			err = unix.Kill(s.pids[goodputRanks-1], unix.SIGKILL)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := t.steps(ctx, s, first+goodputParts*part); err != nil {
		return nil, err
	}
	return s.lost(first, part), nil
}

// failing starts the job, and returns when it trains.
func failing(ctx context.Context, l *lab) (*training, *progressed, error) {
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
		return nil, nil, err
	}
	f, err := os.Open(t.log)
	if err != nil {
		return nil, nil, err
	}
	l.files = append(l.files, f)
	s := &progressed{from: f, pids: map[int]int{}, ranks: map[int]map[int]bool{}, at: map[int]int64{}}
	return t, s, s.read()
}

// steps waits until all ranks have made a step.
func (t *training) steps(ctx context.Context, s *progressed, step int) error {
	return t.until(ctx, fmt.Sprintf("step %d", step), func() (bool, error) {
		err := s.read()
		return s.at[step] != 0, err
	})
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

// lost is the cost of the failures, in percent of the time of goodputSteps without any; the seconds that a killed rank
// and the lost node have cost; and the time of a step. The second halves of the parts are the time without failures. A
// cost is the time of a first half beyond that of its steps.
func (p *progressed) lost(first, part int) []float64 {
	half, quiet := part/2, 0.0
	between := func(from, to int) float64 { return seconds(p.at[first+from], p.at[first+to]) }
	for i := range goodputParts {
		quiet += between(i*part+half, (i+1)*part)
	}
	step := quiet / float64(goodputParts*(part-half))
	all := between(0, goodputParts*part) - step*float64(goodputParts*part)
	cost := func(i int) float64 { return between(i*part, i*part+half) - step*float64(half) }
	var kills []float64
	for i := 1; i < goodputParts; i += 2 {
		kills = append(kills, cost(i))
	}
	slices.Sort(kills)
	return []float64{100 * all / (step * goodputSteps), median(kills), cost(goodputLoss), step}
}
