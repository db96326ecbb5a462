package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/rendezvous/pyproto"
)

// dlroverPackages names a folder with dlrover-0.6.1/bin/python.
const dlroverPackages = "DLROVER_PACKAGES"

const (
	dlroverRun  = "elastic-training" // DLRover's name of its rendezvous
	agentsUID   = "bench"
	agentsBusy  = 64              // connections that ask as fast as they can
	agentsFor   = 4 * time.Second // that long is measured
	agentsWarm  = time.Second
	agentsBeat  = 15 * time.Second
	agentsStart = time.Minute // for the import of DLRover
)

// agentRows measure the master as agents of DLRover load it, beside DLRover's own.
func agentRows(o options) []row {
	const joined = 1000
	busy := row{id: "agents", agents: true, maxReps: 3, maxPeerReps: 2, limit: agentsStart + time.Minute,
		files: joined + 1000, run: func(ctx context.Context, l *lab) ([]float64, error) { return busyAgents(ctx, l, joined) },
		lines: []line{
			{what: fmt.Sprintf("DLRover's agents, %d in a world, %d ask as fast as they can: answers for a second of the "+
				"master's processor time", joined, agentsBusy), unit: rate},
			{what: "and for a second", unit: rate}}}
	rs := []row{busy, pollRow(joined, 10)}
	if !o.quick {
		large := pollRow(10*joined, 1)
		large.noPeer = "not run"
		rs = append(rs, large)
	}
	return rs
}

// pollRow is of agents that ask whether nodes wait, each of them so often a second.
func pollRow(agents, perSecond int) row {
	return row{id: "agents", agents: true, maxReps: 3, maxPeerReps: 2, limit: agentsStart + 2*time.Minute,
		files: agents + 1000,
		run:   func(ctx context.Context, l *lab) ([]float64, error) { return pollingAgents(ctx, l, agents, perSecond) },
		lines: []line{
			{what: fmt.Sprintf("%d agents, a connection each, ask %d times a second: answers, of those that are due",
				agents, perSecond), unit: share, goal: 99},
			{what: "an answer takes: median", unit: duration},
			{what: "and 99 of 100 at most", unit: duration, goal: 20 * ms},
			{what: "processor time of the master, of one core", unit: percent},
			{what: "its resident memory", unit: size}}}
}

// agentSides are our master and DLRover's.
func (b *bench) agentSides() []side {
	ours, theirs := b.ours, side{name: "DLRover's master", peer: true, reps: b.peerN}
	ours.name = "dlrover-master"
	python := filepath.Join(os.Getenv(dlroverPackages), "dlrover-0.6.1", "bin", "python")
	theirs.command = []string{python, "-m", "dlrover.python.master.main", "--platform", "local", "--job_name", "bench"}
	if _, err := os.Stat(python); err != nil || os.Getenv(dlroverPackages) == "" {
		theirs.missing = dlroverPackages + " names no folder with dlrover-0.6.1/bin/python"
	}
	return []side{ours, theirs}
}

// agentMaster starts the master of this side for a number of agents, and waits until it listens.
func (l *lab) agentMaster(ctx context.Context, agents int) (p *process, port string, err error) {
	if port, err = freePort(); err != nil {
		return nil, "", err
	}
	if l.side.peer {
		p, err = l.start(nil, nil, append(slices.Clone(l.side.command), "--port", port, "--node_num",
			strconv.Itoa(agents))...)
	} else {
		p, err = l.start([]string{"DLROVER_TOKEN=" + l.token}, nil, l.master, "--listen=0.0.0.0:"+port,
			"--python-agents", "--job-uid="+agentsUID)
	}
	if err != nil {
		return nil, "", err
	}
	return p, port, l.listening(ctx, "127.0.0.1:"+port)
}

// simAgent is an agent of DLRover that has no workers.
type simAgent struct {
	*caller
	poll, beat []byte          // the frames of its calls
	sent       atomic.Int64    // when it asked what is not answered yet, in ns since the fleet's begin; 0: nothing
	took       []time.Duration // what answers took
}

// fleet is agents that are in one world.
type fleet struct {
	agents  []*simAgent
	begin   time.Time
	readers sync.WaitGroup
	over    atomic.Bool
	failed  chan error // the first error of a reader
}

// meetAgents connects agents, lets them join and waits until all have been told their world. They end with ctx.
func meetAgents(ctx context.Context, port string, n int) (*fleet, error) {
	f := &fleet{agents: make([]*simAgent, n), begin: time.Now(), failed: make(chan error, 1)}
	for i := range f.agents {
		f.agents[i] = &simAgent{}
	}
	err := f.each(func(i int) error { return f.agents[i].join(ctx, port, n, i) })
	if err == nil {
		err = f.meet(ctx)
	}
	if err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// each calls do for every agent, some at a time.
func (f *fleet) each(do func(i int) error) error {
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, min(dialers, len(f.agents)))
	for d := range errs {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(f.agents) && errs[d] == nil; i = int(next.Add(1)) - 1 {
				if err := do(i); err != nil {
					errs[d] = fmt.Errorf("agent %d: %w", i, err)
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// join makes the agent one of n, each with its own connection.
func (a *simAgent) join(ctx context.Context, port string, n, i int) (err error) {
	from := pyproto.Caller{NodeID: i, NodeType: "worker", JobUID: agentsUID}
	if a.caller, err = dialCaller(ctx, daemonAddr(i, port), from); err != nil {
		return err
	}
	if err := a.report(pyproto.Comm.New("RendezvousParams", field("min_nodes", n), field("max_nodes", n),
		field("waiting_timeout", 30), field("node_unit", 1), field("join_timeout", 600))); err != nil {
		return err
	}
	_, err = a.get(pyproto.Comm.New("JoinRendezvousRequest", field("node_id", i), field("node_rank", i),
		field("local_world_size", 8), field("rdzv_name", dlroverRun), field("node_ip", "127.0.0.1")))
	a.poll = a.encode("get", pyproto.Comm.New("WaitingNodeNumRequest", field("rdzv_name", dlroverRun)))
	a.beat = a.encode("get", pyproto.Comm.New("HeartBeat", field("timestamp", int(time.Now().Unix()))))
	return err
}

func field(name string, value any) pyproto.Field { return pyproto.Field{Name: name, Value: value} }

// meet asks for the world until every agent knows it. Whoever knows it first says where the workers meet, as the agent
// of the first rank does, for which the others wait.
func (f *fleet) meet(ctx context.Context) error {
	told := make([]bool, len(f.agents))
	var once sync.Once
	for slices.Contains(told, false) {
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("waited for the world of all agents: %w", err)
		}
		if err := f.each(func(i int) (err error) {
			if told[i] {
				return nil
			}
			told[i], err = f.agents[i].world(&once)
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// world reports whether the agent is told one.
func (a *simAgent) world(once *sync.Once) (told bool, err error) {
	m, err := a.get(pyproto.Comm.New("CommWorldRequest", field("node_id", a.from.NodeID), field("rdzv_name", dlroverRun)))
	if err != nil || len(m.Dict("world").Pairs) == 0 {
		return false, err
	}
	once.Do(func() {
		prefix := fmt.Sprintf("%s/torch.rendezvous.%s.%d.0/", dlroverRun, dlroverRun, m.Int("round"))
		for _, kv := range [][2]string{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}} {
			err = errors.Join(err, a.report(pyproto.Comm.New("KeyValuePair", field("key", prefix+kv[0]),
				field("value", []byte(kv[1])), field("op", "set"))))
		}
	})
	return true, err
}

// close ends all calls, and waits for the readers.
func (f *fleet) close() {
	f.over.Store(true)
	for _, a := range f.agents {
		if a.caller != nil {
			_ = a.w.Close()
		}
	}
	f.readers.Wait()
}

// read has an agent's answers read, each of which calls then, until the end of the fleet.
func (f *fleet) read(a *simAgent, then func() error) {
	f.readers.Go(func() {
		for {
			body, err := a.receive()
			if err == nil {
				err = checkAnswer(body)
			}
			if err == nil {
				err = then()
			}
			if err != nil {
				f.fail(err)
				return
			}
		}
	})
}

func (f *fleet) fail(err error) {
	if f.over.Load() {
		return
	}
	select {
	case f.failed <- err:
	default:
	}
}

// checkAnswer fails unless a body is the answer to a poll, or to a heartbeat.
func checkAnswer(body []byte) error {
	if !bytes.Contains(body, []byte("RendezvousState")) && !bytes.Contains(body, []byte("HeartbeatResponse")) {
		return fmt.Errorf("%w: %.100q", errNoAnswer, body)
	}
	return nil
}

// wait lets the load run.
func (f *fleet) wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case err := <-f.failed:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

// window lets the load run, and returns how long, and what processor time a process took meanwhile, in seconds.
func (f *fleet) window(ctx context.Context, pid int) (wall, cpu float64, err error) {
	before, err := cpuOfAll(pid)
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := f.wait(ctx, agentsFor); err != nil {
		return 0, 0, err
	}
	after, err := cpuOfAll(pid)
	return time.Since(began).Seconds(), after - before, err
}

// cpuOfAll is the processor time of a process in seconds, to the hundredth, with that of threads that have ended.
func cpuOfAll(pid int) (float64, error) {
	const user, system, perSecond = 11, 12, 100 // the fields behind the name; Linux has 100 for all programs
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(data), ") ") // the names of masters have no parentheses
	fields := strings.Fields(rest)
	if len(fields) <= system {
		return 0, fmt.Errorf("/proc/%d/stat: %q", pid, data)
	}
	u, err := strconv.ParseFloat(fields[user], 64)
	s, err2 := strconv.ParseFloat(fields[system], 64)
	return (u + s) / perSecond, errors.Join(err, err2)
}

// metAgents starts a master and n agents, which are to be closed.
func (l *lab) metAgents(ctx context.Context, n int) (f *fleet, pid int, err error) {
	p, port, err := l.agentMaster(ctx, n)
	if err != nil {
		return nil, 0, err
	}
	f, err = meetAgents(ctx, port, n)
	return f, p.cmd.Process.Pid, err
}

// busyAgents has some agents ask again as soon as they are answered.
func busyAgents(ctx context.Context, l *lab, n int) ([]float64, error) {
	f, pid, err := l.metAgents(ctx, n)
	if err != nil {
		return nil, err
	}
	defer f.close()
	answers := f.rush(agentsBusy)
	if err := f.wait(ctx, agentsWarm); err != nil {
		return nil, err
	}
	before := answers.Load()
	wall, cpu, err := f.window(ctx, pid)
	if err != nil {
		return nil, err
	}
	n64 := float64(answers.Load() - before)
	return []float64{n64 / cpu, n64 / wall}, nil
}

// rush has the first agents ask until the end of the fleet, and counts the answers.
func (f *fleet) rush(agents int) *atomic.Int64 {
	var answers atomic.Int64
	for _, a := range f.agents[:min(agents, len(f.agents))] {
		if err := a.send(a.poll); err != nil {
			f.fail(err)
		}
		f.read(a, func() error {
			answers.Add(1)
			return a.send(a.poll)
		})
	}
	return &answers
}

// pollingAgents has all agents ask, each at its own time.
func pollingAgents(ctx context.Context, l *lab, n, perSecond int) ([]float64, error) {
	f, pid, err := l.metAgents(ctx, n)
	if err != nil {
		return nil, err
	}
	defer f.close()
	load := f.pace(ctx, perSecond)
	err = f.wait(ctx, agentsWarm)
	wall, cpu := 0.0, 0.0
	if err == nil {
		wall, cpu, err = f.window(ctx, pid)
	}
	due, took := load()
	if err != nil {
		return nil, err
	}
	resident, err := rss(pid)
	if err == nil && len(took) == 0 {
		err = errNoAnswer
	}
	if err != nil {
		return nil, err
	}
	answered := 100 * float64(len(took)) / float64(due)
	return []float64{answered, percentile(took, 0.5), percentile(took, 0.99), 100 * cpu / wall, resident}, nil
}

// pace has every agent ask so often a second until end is called. That waits for answers that are under way, ends the
// fleet, and returns how many questions were due, and what the answers took, sorted. An agent that waits for an answer
// still does not ask.
func (f *fleet) pace(ctx context.Context, perSecond int) (end func() (due int, took []time.Duration)) {
	for _, a := range f.agents {
		f.read(a, func() error {
			a.took = append(a.took, time.Since(f.begin)-time.Duration(a.sent.Load()))
			a.sent.Store(0)
			return nil
		})
	}
	ctx, cancel := context.WithCancel(ctx)
	paced := make(chan int, 1)
	go func() { paced <- f.ask(ctx, perSecond) }()
	return func() (due int, took []time.Duration) {
		cancel()
		due = <-paced
		for range 200 { // two seconds
			if !slices.ContainsFunc(f.agents, func(a *simAgent) bool { return a.sent.Load() != 0 }) {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		f.close()
		for _, a := range f.agents {
			took = append(took, a.took...)
		}
		slices.Sort(took)
		return due, took
	}
}

// ask spreads the questions of the agents evenly over time, and returns how many were due.
func (f *fleet) ask(ctx context.Context, perSecond int) (due int) {
	n := len(f.agents)
	every := time.Second / time.Duration(n*perSecond)
	beats := int(agentsBeat.Seconds()) * perSecond // questions of one agent, one of which is a heartbeat
	for began := time.Now(); ctx.Err() == nil; time.Sleep(time.Millisecond) {
		for ; time.Duration(due)*every < time.Since(began); due++ {
			a, frames := f.agents[due%n], f.agents[due%n].poll
			if (due/n+due%n)%beats == 0 {
				frames = a.beat
			}
			if !a.sent.CompareAndSwap(0, int64(time.Since(f.begin))) {
				continue
			}
			if err := a.send(frames); err != nil {
				f.fail(err)
				return due
			}
		}
	}
	return due
}

// percentile is in seconds; p is above 0.
func percentile(sorted []time.Duration, p float64) float64 {
	return sorted[int(math.Ceil(p*float64(len(sorted))))-1].Seconds()
}
