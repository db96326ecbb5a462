package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/rendezvous/api"
)

// row is one experiment; it measures one value for each of its lines.
type row struct {
	id    string
	lines []line
	run   func(ctx context.Context, l *lab) ([]float64, error)
	// maxReps and maxPeerReps bound the repetitions of slow rows; 0 does not.
	maxReps, maxPeerReps int
	// limit bounds one repetition; 0 is a minute. peerLimit does so for the peer.
	limit, peerLimit time.Duration
	// torch is set if the workers need PyTorch. noPeer is the reason why the peer has no counterpart. slowPeer is set
	// if the peer's counterpart takes minutes.
	torch    bool
	noPeer   string
	slowPeer bool
	// kube is set for those that need the API server of Kubernetes.
	kube bool
	// files is how many the daemon has to open.
	files int
	// ckpt is set for checkpoints, which have peers of their own. memory is the number of bytes of shared memory and of
	// the worker's own that they need.
	ckpt   bool
	memory int64
	// warm is set for warm workers, which are compared with our cold ones, too.
	warm bool
}

// line is one value of a row.
type line struct {
	what string
	unit unit
	goal float64 // 0: none
	// oursOnly is the reason why the peer has no such value.
	oursOnly string
}

const ms = 1e-3

func rows(o options) []row {
	all := []row{
		{id: "start", run: start, lines: []line{
			{what: "exec of the launcher to its first worker's first instruction, 2 workers",
				unit: duration, goal: 10 * ms}}},
		{id: "exit", run: trivialJob, lines: []line{
			{what: "exec to exit, job of 2 workers that do nothing", unit: duration}}},
		{id: "help", run: help, lines: []line{{what: "`--help`", unit: duration}}},
		{id: "restart", run: restart, lines: []line{
			{what: "worker exits 1 to its replacement's first instruction, 1 node of 2 workers",
				unit: duration, goal: 25 * ms}}},
		{id: "restart2", run: restartTwoNodes, lines: []line{
			{what: "worker exits 1 to the first instruction of both new workers, 2 nodes of 1 worker",
				unit: duration, goal: 60 * ms}}},
		{id: "loss", run: nodeLoss((*lab).kill), torch: true, maxPeerReps: 2, limit: 90 * time.Second, lines: []line{
			{what: "one node's processes are killed, 1:2 nodes in gloo all_reduce, to the survivor's new worker; " +
				"last_call_timeout=1, which is kind to torchrun", unit: duration, goal: 1}}},
		{id: "loss-one", run: nodeLoss((*lab).killExecuted), torch: true, maxPeerReps: 2, limit: 90 * time.Second,
			lines: []line{{what: "the same, but only what was executed is killed: the guard, or torchrun's agent",
				unit: duration, goal: 110 * ms}}},
		{id: "loss-below", run: nodeLoss((*lab).killBelow), torch: true, noPeer: "has no guard", lines: []line{
			{what: "the same, but only the launcher below the guard is killed", unit: duration, goal: 110 * ms}}},
		{id: "join", run: scaleUp, lines: []line{
			{what: "second launcher of a running 1:2 job: its exec to the first instruction of both new workers",
				unit: duration, goal: 15 * ms}}},
		{id: "fail", run: finalFailure, slowPeer: true, peerLimit: 330 * time.Second, maxPeerReps: 1, lines: []line{
			{what: "worker fails for good on one of 2 nodes, to the other launcher's exit", unit: duration, goal: 1}}},
		{id: "footprint", run: footprint, maxReps: 3, maxPeerReps: 1, limit: o.idle + time.Minute, lines: []line{
			{what: "resident memory of the launcher, 2 sleeping workers", unit: size, goal: 13e6},
			{what: "and of its guard", unit: size, oursOnly: "has none"},
			{what: fmt.Sprintf("both, processor time of one core over %s without events", o.idle), unit: percent, goal: 0.05}}},
		{id: "daemon", run: daemonDeath, maxReps: 3, maxPeerReps: 1, limit: 90 * time.Second, lines: []line{
			{what: fmt.Sprintf("workers run on for %s after kill -9 of the process that serves the rendezvous "+
				"(of torchrun: its first agent)", o.daemonless), unit: yesno, goal: 1},
			{what: "a new daemon re-adopts them, none is restarted", unit: yesno, goal: 1, oursOnly: "cannot"},
			{what: "exec of the new daemon to the world being whole", unit: duration, oursOnly: "cannot"}}},
	}
	return slices.Concat(all, masterRows(), checkRows(), scaleRows(o), ckptRows(o), warmRows(), goodputRows(o))
}

func rowIDs(all []row) (ids []string) {
	for _, r := range all {
		if !slices.Contains(ids, r.id) {
			ids = append(ids, r.id)
		}
	}
	return ids
}

func selectRows(all []row, list string) ([]row, error) {
	if list == "" {
		return all, nil
	}
	var out []row
	for id := range strings.SplitSeq(list, ",") {
		n := len(out)
		for _, r := range all {
			if r.id == id {
				out = append(out, r)
			}
		}
		if len(out) == n {
			return nil, fmt.Errorf("-rows: no row %q; there are %s", id, strings.Join(rowIDs(all), ", "))
		}
	}
	return out, nil
}

func (r *row) reps(s side) int {
	limit := r.maxReps
	if s.peer {
		limit = r.maxPeerReps
	}
	if limit == 0 {
		return s.reps
	}
	return min(s.reps, limit)
}

func (r *row) bound(s side) time.Duration {
	if s.peer && r.peerLimit > 0 {
		return r.peerLimit
	}
	if r.limit > 0 {
		return r.limit
	}
	return time.Minute
}

// missing is why a side cannot have a value in a line; "" when it can.
func (r *row) missing(b *bench, s side, ln int) string {
	switch {
	case openFiles() < uint64(r.files):
		return fmt.Sprintf("needs %d open files, the limit is %d (ulimit -n)", r.files, openFiles())
	case r.memory > 0 && freeMemory() < r.memory:
		return fmt.Sprintf("needs %d MiB of memory, %s has %d", r.memory>>20, sharedMemory, freeMemory()>>20)
	case r.torch && b.torch == "":
		return b.peer.missing
	case !s.peer && r.kube && os.Getenv(apiServerVariable) == "":
		return "NOT MEASURED: " + apiServerVariable + " names no API server of Kubernetes. make e2e-kube builds one, the " +
			"first time in 15 minutes, and make bench finds it there"
	case !s.peer:
		return ""
	case r.noPeer != "":
		return r.noPeer
	case s.missing != "":
		return s.missing
	case r.lines[ln].oursOnly != "":
		return r.lines[ln].oursOnly
	case s.reps == 0:
		return "not run (-peer-n 0)"
	case r.slowPeer && !b.slow:
		return "not run (-slow)"
	}
	return ""
}

// openFiles is how many files a process may open.
func openFiles() uint64 {
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) != nil {
		return 0
	}
	return r.Max
}

// standalone are the options of a one-node job.
func standalone(workers int, more ...string) []string {
	return append([]string{"--standalone", fmt.Sprintf("--nproc_per_node=%d", workers)}, more...)
}

// nodes are the options of one node of a job whose first node serves the rendezvous.
func nodes(addr, nnodes string, more ...string) []string {
	return append([]string{"--rdzv_backend=c10d", "--rdzv_endpoint=" + addr, "--rdzv_id=bench", "--nnodes=" + nnodes,
		"--nproc_per_node=1"}, more...)
}

// settled is a pause before an event, of no fixed phase to any polling interval.
func settled(ctx context.Context) error {
	return pause(ctx, 300*time.Millisecond+rand.N(200*time.Millisecond))
}

func start(ctx context.Context, l *lab) ([]float64, error) {
	p, err := l.launch(append(standalone(2), l.worker("wait")...)...)
	if err != nil {
		return nil, err
	}
	ss, err := l.await(ctx, "the workers", 2, started(p.began))
	if err != nil {
		return nil, err
	}
	return []float64{seconds(p.began, first(ss))}, nil
}

func trivialJob(ctx context.Context, l *lab) ([]float64, error) {
	return l.runToEnd(ctx, append(standalone(2), l.worker("once")...)...)
}

func help(ctx context.Context, l *lab) ([]float64, error) { return l.runToEnd(ctx, "--help") }

func (l *lab) runToEnd(ctx context.Context, args ...string) ([]float64, error) {
	p, err := l.launch(args...)
	if err != nil {
		return nil, err
	}
	ended, err := l.exited(ctx, p)
	if err == nil && !p.cmd.ProcessState.Success() {
		err = fmt.Errorf("%s: %s", l.side.name, p.cmd.ProcessState)
	}
	return []float64{seconds(p.began, ended)}, err
}

func restart(ctx context.Context, l *lab) ([]float64, error) {
	p, err := l.launch(append(standalone(2, "--max_restarts=3"), l.worker("wait")...)...)
	if err != nil {
		return nil, err
	}
	ss, err := l.await(ctx, "the workers", 2, started(p.began))
	if err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	failed, err := l.fail(ctx, ss[1])
	if err != nil {
		return nil, err
	}
	again, err := l.await(ctx, "the replacement", 1,
		func(s stamp) bool { return started(failed)(s) && s.rank == ss[1].rank })
	if err != nil {
		return nil, err
	}
	return []float64{seconds(failed, first(again))}, nil
}

// pair starts the two nodes of a job and waits until workers run on both.
func (l *lab) pair(ctx context.Context, args func(addr string) []string) (ps [2]*process, workers [2]stamp, err error) {
	addr, err := freeAddr()
	if err != nil {
		return ps, workers, err
	}
	for i := range ps {
		if ps[i], err = l.launch(args(addr)...); err != nil {
			return ps, workers, err
		}
		if err = l.listening(ctx, addr); err != nil { // the first launcher serves
			return ps, workers, err
		}
	}
	workers, err = l.both(ctx, ps, 0)
	return ps, workers, err
}

// both waits for a worker of each launcher in a world of two.
func (l *lab) both(ctx context.Context, ps [2]*process, after int64) (workers [2]stamp, err error) {
	for i, p := range ps {
		ss, err := l.await(ctx, "the workers of both nodes", 1,
			func(s stamp) bool { return startedBy(p, after)(s) && s.world == 2 })
		if err != nil {
			return workers, err
		}
		workers[i] = ss[0]
	}
	return workers, nil
}

func restartTwoNodes(ctx context.Context, l *lab) ([]float64, error) {
	ps, ws, err := l.pair(ctx,
		func(addr string) []string { return append(nodes(addr, "2", "--max_restarts=3"), l.worker("wait")...) })
	if err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	failed, err := l.fail(ctx, ws[1])
	if err != nil {
		return nil, err
	}
	again, err := l.both(ctx, ps, failed)
	return []float64{seconds(failed, last(again[:]))}, err
}

func nodeLoss(kill func(*lab, *process)) func(context.Context, *lab) ([]float64, error) {
	return func(ctx context.Context, l *lab) ([]float64, error) { return l.nodeLoss(ctx, kill) }
}

func (l *lab) nodeLoss(ctx context.Context, kill func(*lab, *process)) ([]float64, error) {
	ps, _, err := l.pair(ctx, func(addr string) []string {
		return append(nodes(addr, "1:2", "--max_restarts=3", "--rdzv_conf=last_call_timeout=1"),
			l.worker("exec", l.python, "-u", l.allreduce, l.stamps)...)
	})
	if err != nil {
		return nil, err
	}
	if _, err := l.await(ctx, "training", 2, func(s stamp) bool { return s.event == "train" }); err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	killed := now()
	kill(l, ps[1])
	again, err := l.await(ctx, "the survivor's new worker", 1,
		func(s stamp) bool { return startedBy(ps[0], killed)(s) && s.world == 1 })
	if err != nil {
		return nil, err
	}
	return []float64{seconds(killed, first(again))}, nil
}

func scaleUp(ctx context.Context, l *lab) ([]float64, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	args := append(nodes(addr, "1:2", "--rdzv_conf=last_call_timeout=1"), l.worker("wait")...)
	one, err := l.launch(args...)
	if err != nil {
		return nil, err
	}
	if _, err := l.await(ctx, "the first node's worker", 1, startedBy(one, 0)); err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	two, err := l.launch(args...)
	if err != nil {
		return nil, err
	}
	again, err := l.both(ctx, [2]*process{one, two}, two.began)
	return []float64{seconds(two.began, last(again[:]))}, err
}

func finalFailure(ctx context.Context, l *lab) ([]float64, error) {
	ps, ws, err := l.pair(ctx,
		func(addr string) []string { return append(nodes(addr, "2", "--max_restarts=0"), l.worker("wait")...) })
	if err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	failed, err := l.fail(ctx, ws[1])
	if err != nil {
		return nil, err
	}
	ended, err := l.exited(ctx, ps[0])
	return []float64{seconds(failed, ended)}, err
}

// footprint measures a launcher whose workers sleep.
func footprint(ctx context.Context, l *lab) ([]float64, error) {
	p, err := l.launch(append(standalone(2), l.worker("wait")...)...)
	if err != nil {
		return nil, err
	}
	ws, err := l.await(ctx, "the workers", 2, started(p.began))
	if err != nil {
		return nil, err
	}
	if err := pause(ctx, 2*time.Second); err != nil { // start-up is over
		return nil, err
	}
	pids := []int{p.cmd.Process.Pid}
	for _, pid := range descendants(pids[0]) {
		if pid != ws[0].pid && pid != ws[1].pid {
			pids = append(pids, pid)
		}
	}
	before, err := sum(pids, cpuSeconds)
	if err != nil {
		return nil, err
	}
	began := now()
	if err := pause(ctx, l.idle); err != nil {
		return nil, err
	}
	after, err := sum(pids, cpuSeconds)
	if err != nil {
		return nil, err
	}
	busy := 100 * (after - before) / seconds(began, now())
	executed, err := rss(pids[0])
	if err != nil {
		return nil, err
	}
	below, err := sum(pids[1:], rss)
	if l.side.peer {
		return []float64{executed, below, busy}, err
	}
	return []float64{below, executed, busy}, err // the executed process is the guard
}

func sum(pids []int, f func(int) (float64, error)) (total float64, err error) {
	for _, pid := range pids {
		v, err := f(pid)
		if err != nil {
			return 0, err
		}
		total += v
	}
	return total, nil
}

// daemonDeath kills the process that serves the rendezvous: our daemon, or torchrun's
// first agent, for the peer has no daemon of its own.
func daemonDeath(ctx context.Context, l *lab) ([]float64, error) {
	if l.side.peer {
		return l.storeHostDeath(ctx)
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	d, err := l.daemon(ctx, addr)
	if err != nil {
		return nil, err
	}
	args := append([]string{"--rdzv_backend=dlrover-master", "--rdzv_endpoint=" + addr,
		"--rdzv_id=bench", "--nnodes=2", "--nproc_per_node=1"}, l.worker("wait")...)
	for range 2 {
		if _, err := l.launch(args...); err != nil {
			return nil, err
		}
	}
	ws, err := l.await(ctx, "the workers of both nodes", 2, started(0))
	if err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	_ = unix.Kill(d.cmd.Process.Pid, unix.SIGKILL)
	<-d.done
	survived, err := l.survive(ctx, ws)
	if err != nil || survived == 0 {
		return []float64{survived, 0, math.NaN()}, err
	}
	return l.readopt(ctx, addr, ws)
}

// survive reports whether the same workers, and no others, run after a while.
func (l *lab) survive(ctx context.Context, ws []stamp) (float64, error) {
	if err := pause(ctx, l.daemonless); err != nil {
		return 0, err
	}
	return yes(l.untouched(ws)), nil
}

func (l *lab) untouched(ws []stamp) bool {
	for _, w := range ws {
		if unix.Kill(w.pid, 0) != nil {
			return false
		}
	}
	all, err := l.pick(func(stamp) bool { return true })
	return err == nil && len(all) == len(ws)
}

// readopt starts a new daemon and waits until it has the running world.
func (l *lab) readopt(ctx context.Context, addr string, ws []stamp) ([]float64, error) {
	d, err := l.daemon(ctx, addr)
	if err != nil {
		return nil, err
	}
	client := api.NewClient(addr, "")
	defer client.Close()
	if err := l.until(ctx, "the world to be whole again", func() (bool, error) {
		rs, err := client.Runs(ctx)
		return len(rs) == 1 && rs[0].Phase == "running" && rs[0].Members == len(ws), err
	}); err != nil {
		return nil, err
	}
	whole := now()
	if err := pause(ctx, time.Second); err != nil {
		return nil, err
	}
	return []float64{1, yes(l.untouched(ws)), seconds(d.began, whole)}, nil
}

func (l *lab) storeHostDeath(ctx context.Context) ([]float64, error) {
	ps, ws, err := l.pair(ctx, func(addr string) []string { return append(nodes(addr, "2"), l.worker("wait")...) })
	if err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	_ = ps[0].cmd.Process.Signal(os.Kill)
	<-ps[0].done
	survived, err := l.survive(ctx, ws[:])
	return []float64{survived}, err
}

func yes(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
