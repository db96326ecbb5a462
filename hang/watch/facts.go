package watch

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/retry"
)

// The examination of a node whose ranks slow the job, or that it is compared with.
const (
	factsTime   = 30 * time.Second // for all
	workersTime = 2 * time.Second  // for which its processes are looked at
	betweenMost = 60 * time.Millisecond
)

// examine answers AskFacts and AskLink.
func (w *Watcher) examine(ctx context.Context, own *looker, a hang.Ask) {
	limited, cancel := context.WithTimeout(ctx, factsTime)
	defer cancel()
	r := hang.Report{Ask: a.Seq}
	switch {
	case a.What == hang.AskFacts:
		r.Facts = w.facts(limited, own)
		if a.Listen && w.cfg.End != nil {
			r.End = w.cfg.End(limited)
		}
	case a.Link != nil && w.cfg.Test != nil:
		r.Facts = w.cfg.Test(limited, *a.Link)
	}
	if len(r.Facts) > 0 {
		w.send(ctx, r)
	}
}

// facts are all that are known of this node.
func (w *Watcher) facts(ctx context.Context, own *looker) []hang.Fact {
	others := make(chan []hang.Fact, 1)
	go func() {
		if w.cfg.Facts != nil {
			others <- w.cfg.Facts(ctx)
		}
		close(others)
	}()
	facts := own.facts(ctx)
	select {
	case more := <-others:
		return append(facts, more...)
	case <-ctx.Done():
		return facts
	}
}

// facts tell what the workers, and other processes, have done for a while.
func (l *looker) facts(ctx context.Context) (facts []hang.Fact) {
	fs := l.sampler.fs.another()
	before, began := fs.processes(), l.sampler.now()
	var series [][]hang.Sample
	waits := l.fileWaits()
	for l.sampler.now()-began < workersTime {
		look := l.look(ctx, false)
		if look == nil || !retry.Sleep(ctx, 1+rand.N(betweenMost)) { // a worker may be stopped at a fixed pace
			return nil
		}
		series = append(series, look)
		for i := range look {
			waits[i].look(fs, &look[i])
		}
	}
	took := l.sampler.now() - began
	for i := range l.state {
		facts = append(append(facts, ofRank(series, i)...), waits[i].fact(series[0][i].Rank))
	}
	return append(facts, fs.others(before, took, l.roots()))
}

// ofRank tells in which states a worker was found.
func ofRank(series [][]hang.Sample, i int) []hang.Fact {
	of, stopped, blocked := fmt.Sprintf("rank %d", series[0][i].Rank), 0, 0
	for _, look := range series {
		switch look[i].Proc.State {
		case 'T', 't':
			stopped++
		case 'D':
			blocked++
		}
	}
	share := func(n int) float64 { return float64(100*n) / float64(len(series)) }
	facts := []hang.Fact{{Kind: "cpu.stopped", Of: of, Value: share(stopped)},
		{Kind: "cpu.blocked", Of: of, Value: share(blocked)}}
	first, last := &series[0][i], &series[len(series)-1][i]
	waited, took := last.Proc.MainWait-first.Proc.MainWait, last.At-first.At
	if first.Proc.Thread != last.Proc.Thread || first.Worker != last.Worker || waited < 0 || took <= 0 {
		waited, took = 0, 1
	}
	return append(facts, hang.Fact{Kind: "cpu.waiting", Of: of, Value: min(100*float64(waited)/float64(took), 100)})
}

// roots are this process and the workers: what they have started is the job's.
func (l *looker) roots() map[int]bool {
	all := map[int]bool{os.Getpid(): true}
	for i := range l.state {
		all[l.state[i].pid] = true
	}
	return all
}

// maxAll bounds how many processes of a node are looked at.
const maxAll = 1 << 14

// another reads the same, for another goroutine.
func (p *procfs) another() *procfs { return newProcfs(p.root) }

// processes are all that can be seen, by pid.
func (p *procfs) processes() map[int]stat {
	dir, err := os.Open(p.root)
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	all := map[int]stat{}
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && len(all) < maxAll {
			if s, err := p.stat(pid); err == nil {
				all[pid] = s
			}
		}
	}
	return all
}

// others are processes that are not the job's: how much of the CPUs they have used since before, and which used most.
func (p *procfs) others(before map[int]stat, took time.Duration, roots map[int]bool) hang.Fact {
	now, used, most, top := p.processes(), time.Duration(0), time.Duration(0), 0
	for pid, s := range now {
		was, known := before[pid]
		if !known || was.start != s.start || s.cpu <= was.cpu || descends(now, pid, roots) {
			continue
		}
		cpu := s.cpu - was.cpu
		used += cpu
		if cmp.Or(cmp.Compare(cpu, most), cmp.Compare(top, pid)) > 0 {
			most, top = cpu, pid
		}
	}
	f := hang.Fact{Kind: "cpu.others", Of: "other processes"}
	if comm, err := p.file(top, "comm"); err == nil && top != 0 {
		f.Of += fmt.Sprintf(" such as %s (pid %d)", strings.TrimSpace(string(comm)), top)
	}
	f.Value = min(100*float64(used)/float64(took)/float64(runtime.NumCPU()), 100)
	return f
}

// descends reports whether a process descends from one of the roots, or is one.
func descends(all map[int]stat, pid int, roots map[int]bool) bool {
	for range maxAll {
		if roots[pid] {
			return true
		}
		s, known := all[pid]
		if !known || s.parent == pid {
			return false
		}
		pid = s.parent
	}
	return false
}
