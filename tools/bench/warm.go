package main

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

//go:embed warm.py
var warmScript []byte

// Warm workers are compared with those that are started afresh, ours and the peer's. Each launcher has two of them.
const (
	warmWorkers  = 2
	warmPrepared = 1 + warmWorkers // processes that a launcher with --warm has ready: the parent, and its forks
	// warmSaid is in a launcher's log then. The processes alone do not tell: a parent first tries forks that load a batch.
	warmSaid = "imported what the next workers need"
	// oneImport is the goal for the first start of a node, in imports by one interpreter.
	oneImport = 1.2
	// warmImports imports what a worker of warm.py has by its first step, and tells when, and the bytes that it has read.
	warmImports = `
import io, time, torch, torch.distributed, torch.nn.parallel
try:
    import torch._dynamo
except ImportError:
    pass
print(time.monotonic_ns(), *[line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar:")])`
)

func warmRows() []row {
	return []row{
		{id: "warm-first", run: warmFirst, torch: true, warm: true, limit: 4 * time.Minute, lines: []line{
			{what: "exec of the launcher to the first step of all ranks, DDP, 1 node of 2", unit: duration},
			{what: "that over the time of one import of the same, alone and right before", unit: count, goal: oneImport},
			{what: "exec to the first step, 1 node of 8", unit: duration},
			{what: "that over the time of one import", unit: count, goal: oneImport},
			{what: "what all processes of that node have read from files, over what one import reads", unit: count,
				goal: oneImport}}},
		{id: "warm", run: warmRestart, torch: true, warm: true, limit: 4 * time.Minute, lines: []line{
			{what: "kill -9 of one rank of 2 nodes of 2, DDP, to all past `import torch`", unit: duration, goal: 300 * ms},
			{what: "and to the next step of all ranks, from a checkpoint in memory", unit: duration, goal: 300 * ms},
			{what: "memory of one launcher's prepared processes, forks included (PSS)", unit: size}}},
		{id: "warm-loss", run: warmLoss, torch: true, warm: true, limit: 4 * time.Minute, lines: []line{
			{what: "one of 1:2 nodes is killed, DDP, to the next step of the survivors; last_call_timeout=1",
				unit: duration, goal: 300 * ms}}},
		{id: "warm-spare", run: warmSpare, torch: true, warm: true, limit: 4 * time.Minute,
			noPeer: "not measured: its agents settle who is a spare by a poll", lines: []line{
				{what: "one of 2 nodes is killed, DDP, to the first step with the node that was a spare",
					unit: duration, goal: 1}}},
	}
}

// warmSides are ours with warm workers, ours without, and the peer.
func (b *bench) warmSides() []side {
	warm, cold := b.ours, b.ours
	// Workers are killed again and again, and nothing sees their steps.
	cold.env = []string{"PYTHON_EXEC=" + b.python, "PET_SAME_FAILURES=-1"}
	warm.env = append(slices.Clone(cold.env), "PET_WARM=auto")
	warm.name, cold.name = "dlrover-run --warm", "dlrover-run"
	return []side{warm, cold, b.peer}
}

// training is a job of warm.py.
type training struct {
	*lab
	log, ckpts string
	args       []string
	nodes      []*process
}

// warmLine is a line of warm.py.
type warmLine struct {
	what             string
	rank, count, pid int
	at               int64
}

// train starts the first node.
func (l *lab) train(ctx context.Context, nnodes string, workers int, more ...string) (*training, error) {
	t := &training{lab: l, log: filepath.Join(l.dir, "train"), ckpts: filepath.Join(l.dir, "ckpts")}
	addr, err := freeAddr()
	if err == nil {
		err = os.Mkdir(t.ckpts, 0o700)
	}
	t.args = slices.Concat(nodes(addr, nnodes, fmt.Sprintf("--nproc_per_node=%d", workers), "--max_restarts=100",
		"--rdzv_conf=last_call_timeout=1"), more, []string{l.bench.warm, t.log, t.ckpts, "1000000", cmp.Or(l.pace, "0.02")})
	if err == nil {
		err = t.node()
	}
	if err == nil {
		err = l.listening(ctx, addr)
	}
	return t, err
}

func (t *training) node() error {
	p, err := t.launch(t.args...)
	t.nodes = append(t.nodes, p)
	return err
}

// ready waits until all ranks train, and until the next workers are prepared, if the launcher prepares any.
func (t *training) ready(ctx context.Context, ranks int) (pids map[int]int, err error) {
	if _, pids, err = t.reached(ctx, "step", 0, ranks); err != nil {
		return nil, err
	}
	if strings.Contains(strings.Join(t.side.env, " "), "PET_WARM") {
		err = t.until(ctx, "prepared processes", func() (bool, error) {
			for _, p := range t.nodes {
				said, err := os.ReadFile(p.out)
				if err != nil || !bytes.Contains(said, []byte(warmSaid)) || len(prepared(p)) < warmPrepared {
					return false, err
				}
			}
			return true, nil
		})
	}
	if err == nil {
		err = settled(ctx)
	}
	return pids, err
}

// prepared are the processes of a launcher that are ready to become workers, and their parent.
func prepared(p *process) (pids []int) {
	for _, pid := range descendants(p.cmd.Process.Pid) {
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(args), "_dlrover_warm") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// reached waits until this number of ranks has logged the line after a moment, and returns the time of the last one.
func (t *training) reached(ctx context.Context, what string, after int64, ranks int) (at int64, pids map[int]int,
	err error) {
	err = t.until(ctx, what, func() (bool, error) {
		data, err := os.ReadFile(t.log)
		if err != nil && !os.IsNotExist(err) {
			return false, err
		}
		at, pids = 0, map[int]int{}
		for text := range strings.Lines(string(data)) {
			var l warmLine
			n, _ := fmt.Sscan(text, &l.what, &l.rank, &l.count, &l.pid, &l.at)
			if n == 5 && l.what == what && l.at > after && pids[l.rank] == 0 {
				pids[l.rank], at = l.pid, max(at, l.at)
			}
		}
		return len(pids) >= ranks, nil
	})
	return at, pids, err
}

// warmFirst starts one job after the other.
func warmFirst(ctx context.Context, l *lab) (took []float64, err error) {
	for _, workers := range []int{warmWorkers, 4 * warmWorkers} {
		one, bytes, err := l.importOnce(ctx)
		if err != nil {
			return nil, err
		}
		t, err := l.train(ctx, "1", workers)
		if err != nil {
			return nil, err
		}
		stepped, _, err := t.reached(ctx, "step", 0, workers)
		if err != nil {
			return nil, err
		}
		first := seconds(t.nodes[0].began, stepped)
		took = append(took, first, first/one)
		if workers > warmWorkers {
			all, err := sum(descendants(t.nodes[0].cmd.Process.Pid), bytesRead)
			if err != nil {
				return nil, err
			}
			took = append(took, all/bytes)
		}
		l.kill(t.nodes[0])
		if err := errors.Join(os.Remove(t.log), os.RemoveAll(t.ckpts)); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// importOnce is the time until an interpreter that does nothing else has imported, and the bytes that it has read.
func (l *lab) importOnce(ctx context.Context) (took, read float64, err error) {
	began := now()
	out, err := exec.CommandContext(ctx, l.python, "-c", warmImports).Output()
	var done int64
	if err == nil {
		_, err = fmt.Sscan(string(out), &done, &read)
	}
	if err != nil {
		err = fmt.Errorf("import what the workers do: %w", err)
	}
	return seconds(began, done), read, err
}

// bytesRead is what a process and the children that it has waited for have read, files in the page cache included. One
// that has ended counts with its parent.
func bytesRead(pid int) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	var n float64
	if err == nil {
		_, err = fmt.Sscanf(string(text), "rchar: %g", &n)
	}
	return n, err
}

// warmRestart counts the first steps after all workers have imported; the earlier ones were those under way.
func warmRestart(ctx context.Context, l *lab) ([]float64, error) {
	t, err := l.train(ctx, "2", warmWorkers)
	if err == nil {
		err = t.node()
	}
	if err != nil {
		return nil, err
	}
	pids, err := t.ready(ctx, 2*warmWorkers)
	if err != nil {
		return nil, err
	}
	memory, err := sum(prepared(t.nodes[0]), pss)
	if err != nil {
		return nil, err
	}
	if memory == 0 {
		memory = math.NaN() // there are none
	}
	killed := now()
	if err := unix.Kill(pids[2*warmWorkers-1], unix.SIGKILL); err != nil {
		return nil, err
	}
	imported, _, err := t.reached(ctx, "imported", killed, 2*warmWorkers)
	if err != nil {
		return nil, err
	}
	stepped, _, err := t.reached(ctx, "step", imported, 2*warmWorkers)
	return []float64{seconds(killed, imported), seconds(killed, stepped), memory}, err
}

func pss(pid int) (float64, error) { return memory(pid, "smaps_rollup", "Pss") }

func warmLoss(ctx context.Context, l *lab) ([]float64, error) {
	return warmAfterLoss(ctx, l, "1:2", 2, warmWorkers)
}

func warmSpare(ctx context.Context, l *lab) ([]float64, error) {
	return warmAfterLoss(ctx, l, "2", 3, 2*warmWorkers)
}

// warmAfterLoss kills the second node.
func warmAfterLoss(ctx context.Context, l *lab, nnodes string, nodes, ranks int) ([]float64, error) {
	t, err := l.train(ctx, nnodes, warmWorkers)
	for i := 1; i < nodes && err == nil; i++ {
		if i == 2 { // a spare is one because the world is whole
			_, _, err = t.reached(ctx, "begun", 0, 2*warmWorkers)
		}
		if err == nil {
			err = t.node()
		}
	}
	if err != nil {
		return nil, err
	}
	if _, err := t.ready(ctx, 2*warmWorkers); err != nil {
		return nil, err
	}
	killed := now()
	l.kill(t.nodes[1])
	loaded, _, err := t.reached(ctx, "loaded", killed, ranks)
	if err != nil {
		return nil, err
	}
	stepped, _, err := t.reached(ctx, "step", loaded, ranks)
	return []float64{seconds(killed, stepped)}, err
}
