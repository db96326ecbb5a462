package main

import (
	"context"
	"crypto/rand"
	_ "embed"
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

//go:embed allreduce.py
var allreduceScript []byte

//go:embed handlers.py
var handlersScript []byte

// side is one of the launchers that are compared.
type side struct {
	name    string
	peer    bool
	command []string
	env     []string
	reps    int
	missing string // why this side cannot run at all
}

// bench is shared by all measurements.
type bench struct {
	options
	dir        string // temporary; holds the scripts and one folder a measurement
	stamp      string // the worker
	master     string
	allreduce  string
	handlers   string
	ckpt       string
	warm       string
	ours, peer side
	byHand     side   // torch.save and fsync, under our launcher
	dlrover    side   // DLRover's own checkpoints
	torch      string // version, "" without
	token      string // of the daemon that has to listen beyond 127.0.0.1
}

func newBench(ctx context.Context, o options) (*bench, error) {
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return nil, err
	}
	b := &bench{options: o, token: rand.Text(), master: filepath.Join(bin, "dlrover-master")}
	b.ours = side{name: "dlrover-run", command: []string{filepath.Join(bin, "dlrover-run")}, reps: o.n}
	if _, err := os.Stat(b.ours.command[0]); err != nil {
		return nil, fmt.Errorf("%w; run make build", err)
	}
	if err := prepareProcess(); err != nil {
		return nil, err
	}
	if b.dir, err = os.MkdirTemp("", "dlrover-bench-"); err != nil {
		return nil, err
	}
	if err := b.prepare(ctx); err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// prepareProcess makes this process a subreaper, so that it can end the processes that a killed launcher leaves. It
// raises the limit of open files to the need of the simulated nodes.
func prepareProcess() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become child subreaper: %w", err)
	}
	const files = 1 << 16
	// Only root may raise the limit; a row that needs more reports that.
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files})
	return nil
}

func (b *bench) prepare(ctx context.Context) error {
	b.stamp = filepath.Join(b.dir, "stamp")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", b.stamp,
		"./tools/bench/stamp")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the worker (run in the root of the repository): %w\n%s", err, out)
	}
	b.allreduce = filepath.Join(b.dir, "allreduce.py")
	b.handlers = filepath.Join(b.dir, "handlers.py")
	b.ckpt = filepath.Join(b.dir, "ckpt.py")
	b.warm = filepath.Join(b.dir, "warm.py")
	for path, script := range map[string][]byte{
		b.allreduce: allreduceScript, b.handlers: handlersScript, b.ckpt: ckptScript, b.warm: warmScript,
	} {
		if err := os.WriteFile(path, script, 0o600); err != nil {
			return err
		}
	}
	b.findPeer(ctx)
	b.findCkptPeers()
	return nil
}

// findPeer also warms the file cache for the imports of the peer.
func (b *bench) findPeer(ctx context.Context) {
	b.peer = side{
		name: "torchrun", peer: true, reps: b.peerN,
		command: []string{b.python, "-m", "torch.distributed.run", "--monitor_interval=0.1"},
		// Debian's 1.13.1 with Python 3.11 cannot parse its own defaults of these two.
		env: []string{"PET_REDIRECTS=9:1", "PET_TEE=9:1"},
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, b.python,
		"-c", "import torch, torch.distributed.run; print(torch.__version__)").Output()
	if err != nil {
		b.peer.missing = fmt.Sprintf("no PyTorch for %s", b.python)
		return
	}
	b.torch = strings.TrimSpace(string(out))
}

func (b *bench) close() { _ = os.RemoveAll(b.dir) }

// sides are ours and the peers of a row.
func (b *bench) sides(r row) []side {
	if r.ckpt {
		return []side{b.ours, b.byHand, b.dlrover}
	}
	if r.warm {
		return b.warmSides()
	}
	return []side{b.ours, b.peer}
}

// measure runs a row: ours and the peers in turns.
func (b *bench) measure(ctx context.Context, r row) []result {
	sides := b.sides(r)
	cells := make([][]cell, len(sides))
	for i, s := range sides {
		cells[i] = make([]cell, len(r.lines))
		for l := range cells[i] {
			cells[i][l] = cell{Side: s.name, Missing: r.missing(b, s, l)}
		}
	}
	for rep := range max(b.ours.reps, b.peer.reps) { // no side has more
		for i, s := range sides {
			if rep < r.reps(s) && r.missing(b, s, 0) == "" && ctx.Err() == nil {
				b.sample(ctx, r, s, cells[i])
			}
		}
	}
	var out []result
	for l, ln := range r.lines {
		res := result{ID: r.id, What: ln.what, Unit: ln.unit, Goal: ln.goal, Ours: cells[0][l]}
		for _, c := range cells[1:] {
			res.Peers = append(res.Peers, c[l])
		}
		res.finish()
		out = append(out, res)
	}
	return out
}

// sample is one repetition on one side. An error is kept with the row's first line.
func (b *bench) sample(ctx context.Context, r row, s side, cells []cell) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.bound(s), fmt.Errorf("not over within %s", r.bound(s)))
	defer cancel()
	values, err := b.once(ctx, r, s)
	fmt.Fprintf(os.Stderr, "%s %s: %s\n", r.id, s.name, progress(r.lines, values, err))
	if err != nil {
		cells[0].Errors = append(cells[0].Errors, err.Error())
		return
	}
	for i, v := range values {
		if cells[i].Missing == "" {
			cells[i].add(v)
		}
	}
}

func (b *bench) once(ctx context.Context, r row, s side) ([]float64, error) {
	l, err := newLab(b, s)
	if err != nil {
		return nil, err
	}
	defer l.close()
	values, err := r.run(ctx, l)
	if err != nil {
		err = fmt.Errorf("%w%s", err, l.lastWords())
	}
	return values, err
}

func progress(lines []line, values []float64, err error) string {
	if err != nil {
		return "failed: " + err.Error()
	}
	texts := make([]string, 0, len(values))
	for i, v := range values {
		if math.IsNaN(v) {
			texts = append(texts, "-")
		} else {
			texts = append(texts, lines[i].unit.format(v))
		}
	}
	return strings.Join(texts, ", ")
}

// cleanEnv is our environment without variables that would configure a launcher.
func cleanEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool {
		for _, prefix := range []string{
			"PET_", "TORCH", "DLROVER_", "OMP_NUM_THREADS=", "RANK=", "WORLD_SIZE=", "MASTER_", "NODE_", "POD_",
			"WORKER_RANK=", "ELASTIC_",
		} {
			if strings.HasPrefix(kv, prefix) {
				return true
			}
		}
		return false
	})
}
