package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/replica"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/plainhttp"
)

//go:embed ckpt.py
var ckptScript []byte

const (
	gib = 1 << 30
	// dlroverPython names an interpreter with PyTorch and DLRover.
	dlroverPython = "BENCH_DLROVER_PYTHON"
	sharedMemory  = "/dev/shm"
)

// ckptLine is a line whose value the worker calls key. A value that a side does not report stays empty.
type ckptLine struct {
	key  string
	what string
	unit unit
	goal float64
}

func ckptRows(o options) []row {
	state := fmt.Sprintf("%d MiB", o.state)
	return []row{
		ckptRow(o, "save", 4, []ckptLine{
			{"first", "training blocked by the first memory save of a fresh job, a second after its start, " +
				state + " of model and Adam; peers: in memory, or torch.save with fsync", speed, 6},
			{"later", "later ones, two threads copy", speed, 24},
			{"later_share", "of that, share of a plain memcpy by two threads", share, 0},
			{"later_memcpy", "that memcpy", speed, 0},
			{"one", "later ones, one thread copies", speed, 0},
			{"one_share", "of that, share of a plain memcpy by one thread", share, 90},
			{"one_memcpy", "that memcpy", speed, 0}}),
		ckptRow(o, "flush", 6, []ckptLine{
			{"rate", "DISK save of " + state +
				", from its return to the tracker naming its step (torch.save with fsync: all of it)", speed, 0},
			{"share", "of that, share of what O_DIRECT and fsync write just before", share, 90},
			{"direct", "O_DIRECT and fsync", speed, 0},
			{"cpu", "processor time of the daemon for 1 GiB", duration, 0.15},
			{"saves", "memory saves during one such flush", count, 0},
			{"skipped", "of them skipped", count, 0},
			{"none_skipped", "no memory save is skipped during a flush", yesno, 1},
			{"kept", "the flushed save gets to the disk, within 20 s, in spite of them", yesno, 1},
			{"extra", "what such a save blocks longer than as many right after it: median", duration, 5 * ms},
			{"most", "and the longest, longer than the longest of those", duration, 5 * ms},
			{"wait", "what it blocks at most when nothing is being copied", duration, 5 * ms}}),
		ckptRow(o, "small", 2, []ckptLine{
			{"blocked", fmt.Sprintf("training blocked by a memory save of %d tensors of 4 KiB", 32*o.state),
				duration, 60 * ms}}),
		ckptRow(o, "load", 4, []ckptLine{
			{"load", "load_checkpoint after the worker has failed, " + state + " in memory " +
				"(torch.load of a file in the page cache; DLRover: in the same process)", duration, 0.1},
			{"copied", "and copied into the tensors of a model", duration, 0}}),
		{id: "ckpt-copy", ckpt: true, maxReps: 1, memory: 4 * o.state << 20, noPeer: "not measured",
			run: copyToPeer, lines: []line{
				{what: "copy of " + state + " to the daemon of another node, over loopback: the first one", unit: speed},
				{what: "later ones", unit: speed, goal: 4},
				{what: "processor time of both ends for 1 GiB", unit: duration}}},
	}
}

// ckptRow is a row that the worker measures; states is how many copies of the state it
// needs memory for.
func ckptRow(o options, name string, states int64, lines []ckptLine) row {
	r := row{
		id: "ckpt-" + name, ckpt: true, torch: true, maxReps: 2, maxPeerReps: 1, memory: states * o.state << 20,
		limit: 90 * time.Second,
	}
	var keys []string
	for _, ln := range lines {
		keys = append(keys, ln.key)
		r.lines = append(r.lines, line{what: ln.what, unit: ln.unit, goal: ln.goal})
	}
	r.run = func(ctx context.Context, l *lab) ([]float64, error) { return l.checkpoints(ctx, name, keys) }
	return r
}

const (
	handSide    = "torch.save" // the worker has the sides under their names
	dlroverSide = "DLRover"
)

// findCkptPeers runs after the search for torchrun, which comes with PyTorch.
func (b *bench) findCkptPeers() {
	b.byHand = side{name: handSide, peer: true, command: b.ours.command, reps: b.peerN, missing: b.peer.missing}
	b.dlrover = side{name: dlroverSide, peer: true, reps: b.peerN, missing: dlroverPython + " is not set"}
	if python := os.Getenv(dlroverPython); python != "" {
		b.dlrover.command, b.dlrover.missing = []string{python}, ""
	}
}

// freeMemory is how many bytes checkpoints can take.
func freeMemory() int64 {
	n, err := shm.Free(sharedMemory)
	if err != nil {
		return 0
	}
	return n
}

// checkpoints runs the worker to its end and returns its measurements.
func (l *lab) checkpoints(ctx context.Context, name string, keys []string) ([]float64, error) {
	out := filepath.Join(l.dir, "values")
	script := []string{l.ckpt, l.side.name, name, filepath.Join(l.dir, "ckpts"), out, strconv.Itoa(l.inner),
		strconv.FormatInt(l.state, 10)}
	p, err := l.ckptWorker(script)
	if err != nil {
		return nil, err
	}
	if _, err := l.exited(ctx, p); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(out)
	if err != nil {
		return nil, fmt.Errorf("the worker has measured nothing (%s): %w", p.cmd.ProcessState, err)
	}
	return valuesOf(data, keys)
}

// valuesOf reads the worker's JSON object; NaN stands for a key that is missing in it.
func valuesOf(data []byte, keys []string) ([]float64, error) {
	var got map[string]float64
	if err := json.Unmarshal(data, &got); err != nil {
		return nil, fmt.Errorf("the worker's values %.80q: %w", data, err)
	}
	var values []float64
	for _, k := range keys {
		v, ok := got[k]
		if !ok {
			v = math.NaN()
		}
		values = append(values, v)
		delete(got, k)
	}
	if len(got) > 0 {
		return nil, fmt.Errorf("the worker has measured more than the row has lines for: %v", got)
	}
	return values, nil
}

// ckptWorker starts a worker of one rank that may fail once. DLRover's own worker has no launcher: a saver that it
// forks replaces its launcher's.
func (l *lab) ckptWorker(script []string) (*process, error) {
	memory, err := l.sharedMemory()
	if err != nil {
		return nil, err
	}
	if l.side.name == dlroverSide {
		run := filepath.Base(memory) // part of the names of its leftovers, see close
		l.garbage = append(l.garbage, filepath.Join("/tmp/ckpt_sock", run))
		return l.start([]string{"TORCHELASTIC_RUN_ID=" + run, "RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"},
			nil, append(slices.Clone(l.side.command), script...)...)
	}
	args := append(standalone(1, "--max_restarts=1", "--ckpt-shm-dir="+memory), script...)
	return l.start([]string{"PYTHON_EXEC=" + l.python}, nil, append(slices.Clone(l.side.command), args...)...)
}

// sharedMemory is a directory of the lab in memory. Files whose names begin with its own are removed with it.
func (l *lab) sharedMemory() (string, error) {
	dir, err := os.MkdirTemp(sharedMemory, ownMemory())
	if err == nil {
		l.garbage = append(l.garbage, dir+"*")
	}
	return dir, err
}

// ownMemory is the prefix of this bench's directories in memory: another bench may run at the same time.
func ownMemory() string { return fmt.Sprintf("dlrover-bench-%d-", os.Getpid()) }

const (
	copyKey    = "bench"
	copiesWarm = 2 // from then on the receiver has memory for one copy that is complete and one that arrives
	copies     = 5
)

// copyToPeer plays the daemon of node 0 and copies its shard to a real one of node 1.
func copyToPeer(ctx context.Context, l *lab) ([]float64, error) {
	memory, err := l.sharedMemory()
	if err != nil {
		return nil, err
	}
	addr, pid, err := l.copyTarget(ctx, memory)
	if err != nil {
		return nil, err
	}
	src, err := newCopySource(memory, l.state<<20)
	if err != nil {
		return nil, err
	}
	defer src.seg.Close()
	client := &replica.Client{Token: l.token}
	var rates, busy []float64
	for step := range int64(copiesWarm + copies) {
		took, cpu, err := src.push(ctx, client, addr, pid, step)
		if err != nil {
			return nil, err
		}
		size := float64(src.size) / gib
		rates, busy = append(rates, size/took), append(busy, cpu/size)
	}
	return []float64{
		rates[0], median(slices.Sorted(slices.Values(rates[copiesWarm:]))),
		median(slices.Sorted(slices.Values(busy[copiesWarm:]))),
	}, nil
}

// copyTarget starts a master and the daemon of node 1, and returns where that accepts
// copies, and its pid.
func (l *lab) copyTarget(ctx context.Context, memory string) (string, int, error) {
	addr, err := freeAddr()
	if err != nil {
		return "", 0, err
	}
	token := "DLROVER_TOKEN=" + l.token
	if _, err := l.daemon(ctx, addr, token); err != nil {
		return "", 0, err
	}
	d, err := l.start([]string{token}, nil, filepath.Join(filepath.Dir(l.master), "checkpointd"),
		"--job="+copyKey, "--shm-dir="+memory, "--replicas=2", "--addr=127.0.0.1", "--master="+addr, "--run="+copyKey)
	if err != nil {
		return "", 0, err
	}
	w := checkpointd.World{Term: 1, GroupRank: 1, GroupWorldSize: 2, RankBase: 1, WorldSize: 2, LocalWorldSize: 1}
	sock := filepath.Join(memory, fmt.Sprintf("dlrover-%d", os.Geteuid()), copyKey, "sock")
	if err := l.enter(ctx, sock, w); err != nil {
		return "", 0, err
	}
	hc := plainhttp.New(nil)
	defer hc.CloseIdleConnections()
	tokens := func() []string { return []string{l.token} }
	client := coordinator.Client("http://"+addr, copyKey, tokens, hc)
	peers, err := client.Peers(ctx, w.Key(), coordinator.Peer{Addr: "127.0.0.1:1"}, w.GroupWorldSize, 30*time.Second)
	if err != nil {
		return "", 0, err
	}
	for _, p := range peers {
		if p.Node == w.GroupRank {
			return p.Addr, d.cmd.Process.Pid, nil
		}
	}
	return "", 0, errors.New("the daemon does not say where it accepts copies")
}

// enter sends the world to the daemon behind a socket, once it listens.
func (l *lab) enter(ctx context.Context, sock string, w checkpointd.World) error {
	var c *checkpointd.Control
	if err := l.until(ctx, "the checkpoint daemon", func() (bool, error) {
		var err error
		c, err = checkpointd.Dial(ctx, sock)
		return err == nil, nil
	}); err != nil {
		return err
	}
	defer c.Close()
	return c.World(ctx, w)
}

// copySource is a segment as a worker makes it.
type copySource struct {
	path string
	size int64
	seg  *shm.Segment
}

func newCopySource(memory string, size int64) (*copySource, error) {
	dir, err := shm.Create(memory, "source")
	if err != nil {
		return nil, err
	}
	const name = "seg/l0-0.seg"
	s := &copySource{path: filepath.Join(dir.Path(), name), size: size}
	if err := s.fill(); err != nil {
		return nil, err
	}
	if err := s.stamp(0); err != nil {
		return nil, err
	}
	s.seg, err = dir.Open(name)
	return s, err
}

func (s *copySource) fill() error {
	f, err := os.OpenFile(s.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i)
	}
	for at := int64(0); at < s.size; at += int64(len(block)) {
		if _, err := f.WriteAt(block, pageSize+at); err != nil {
			return err
		}
	}
	return f.Truncate(s.size + 2*pageSize)
}

const pageSize = 4096

// stamp makes the segment hold the save of a step.
func (s *copySource) stamp(step int64) error {
	meta, err := json.Marshal(shm.Meta{
		Run: copyKey, Epoch: "0", Save: fmt.Sprintf("%016x", step), Step: step,
		WorldSize: 2, LocalWorldSize: 1, Shards: 2, Primary: true,
		Dir: "/", Framework: "ddp", Layout: "00", Resize: "same", Torch: "0",
		Files: []shm.File{{Path: "state", Len: s.size, Kind: "raw"}},
	})
	if err != nil {
		return err
	}
	h := shm.Header{
		State: shm.Complete, Seq: uint64(step + 1), Step: step, Saved: time.Now(), ImageOff: pageSize, ImageLen: s.size,
		FixOff: pageSize + s.size,
	}
	h.SetMeta(pageSize+s.size, meta)
	f, err := os.OpenFile(s.path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt(meta, pageSize+s.size); err != nil {
		return err
	}
	_, err = f.WriteAt(h.Append(nil), 0)
	return err
}

// push copies the save of a step and returns the seconds, and the processor time of both
// ends.
func (s *copySource) push(ctx context.Context, client *replica.Client, addr string, pid int,
	step int64) (took, cpu float64, err error) {
	if err := s.stamp(step); err != nil {
		return 0, 0, err
	}
	p, err := s.seg.Pin()
	if err != nil {
		return 0, 0, err
	}
	defer p.Release()
	both := []int{pid, os.Getpid()}
	before, err := sum(both, cpuSeconds)
	if err != nil {
		return 0, 0, err
	}
	began := now()
	if err := client.Push(ctx, addr, p); err != nil {
		return 0, 0, err
	}
	took = seconds(began, now())
	after, err := sum(both, cpuSeconds)
	return took, after - before, err
}
