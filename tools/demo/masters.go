package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"dlrover-run/rendezvous/api"
)

// Events of the masters, which this program sees.
const (
	evServes = "serves" // a master listens
	evWhole  = "whole"  // both nodes have told it which world runs
)

const (
	memberCount = 3 // of etcd
	masterCount = 3
	electLimit  = 30 * time.Second
)

// electorate is the masters of a training, which elect one of them.
type electorate struct {
	*scenario
	etcd      []*child
	endpoints string // of etcd
	masters   []*child
	addrs     []string // of the masters
	leads     int      // which of them serves
	started   int      // masters so far
	handovers []handover
}

// handover is the effect of killing the master that serves. The steps are the newest ones at that time.
type handover struct {
	killed, next          string
	at, served, whole     time.Time
	stepAtKill, stepWhole int
}

// playMasters is the whole scenario of a training whose master is killed three times.
func playMasters(ctx context.Context, s *screen, dir, bin string, p plan) error {
	etcd, err := exec.LookPath("etcd")
	if err != nil {
		return errors.New("there is no etcd in PATH: install Debian's etcd-server ('make torch' does), or etcd 3.4 or newer")
	}
	py, err := findPython(ctx, s, dir)
	if err != nil {
		return err
	}
	c, err := newCluster(dir, bin, py.path, trainArgs(dir, p))
	if err != nil {
		return err
	}
	c.launch = []string{"--nnodes=2"}
	defer c.close()
	s.began = time.Now()
	s.line("A classifier trains with PyTorch %s DDP for %d steps (%s), while its master is killed three times.\n",
		py.torch, p.steps, py.path)
	e := &electorate{scenario: newScenario(ctx, s, p, c), leads: -1}
	for _, act := range []func() error{
		func() error { return e.elect(etcd) }, e.train, e.killAt(15), e.killAt(40), e.killAt(65), e.finish,
	} {
		if err := act(); err != nil {
			return err
		}
	}
	return e.judge()
}

// elect starts an etcd and the masters.
func (e *electorate) elect(etcd string) error {
	addrs, err := freeAddrs(2*memberCount + masterCount)
	if err != nil {
		return err
	}
	clients, peers := addrs[:memberCount], addrs[memberCount:2*memberCount]
	e.endpoints, e.addrs = strings.Join(clients, ","), addrs[2*memberCount:]
	e.cluster.addr = strings.Join(e.addrs, ",")
	var members []string
	for i, peer := range peers {
		members = append(members, fmt.Sprintf("etcd-%d=http://%s", i+1, peer))
	}
	for i := range members {
		name, client, peer := fmt.Sprintf("etcd-%d", i+1), "http://"+clients[i], "http://"+peers[i]
		ch, err := e.cluster.start(name, etcd, []string{"--name", name, "--data-dir", e.cluster.path(name),
			"--log-level=error", "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
			"--initial-advertise-peer-urls", peer, "--initial-cluster", strings.Join(members, ",")}, nil, nil)
		if err != nil {
			return err
		}
		e.victims[name] = true // SIGTERM ends it with a signal
		e.etcd = append(e.etcd, ch)
	}
	e.tell(time.Now(), "%s", e.paint(bold, fmt.Sprintf("three masters start: dlrover-master --etcd=%s", e.endpoints)))
	for i := range e.addrs {
		e.masters = append(e.masters, nil)
		if err := e.startMaster(i); err != nil {
			return err
		}
	}
	e.lookOut(-1, false)
	r, err := e.expect(evServes, "a master to be elected")
	if err == nil {
		e.tell(r.Time, "%s serves; the others wait, and do not listen", r.From)
	}
	return err
}

// startMaster starts a master at one of the addresses.
func (e *electorate) startMaster(i int) (err error) {
	e.started++
	e.masters[i], err = e.cluster.start(fmt.Sprintf("master-%d", e.started), "dlrover-master",
		[]string{"--listen=" + e.addrs[i], "--etcd=" + e.endpoints}, nil, nil)
	return err
}

func (e *electorate) train() error {
	e.fault("two nodes start",
		"node-a and node-b: dlrover-run --nnodes=2 --nproc-per-node=2 train.py, with the addresses of all masters")
	for _, name := range []string{"node-a", "node-b"} {
		if err := e.cluster.startNode(name); err != nil {
			return err
		}
	}
	return e.recovered()
}

// killAt returns the act that kills the master that serves at a fraction of the training.
func (e *electorate) killAt(percent int) func() error {
	return func() error {
		if err := e.reach(percent); err != nil {
			return err
		}
		dead := e.leads
		m := e.masters[dead]
		h := handover{killed: m.name, stepAtKill: e.last.Step, at: time.Now()}
		e.victims[m.name] = true
		if err := m.cmd.Process.Kill(); err != nil {
			return fmt.Errorf("kill %s: %w", m.name, err)
		}
		e.lookOut(dead, true)
		e.tell(h.at, "%s", e.paint(bold, fmt.Sprintf("kill -9 %d: %s, which serves, at step %d", m.cmd.Process.Pid, m.name,
			h.stepAtKill)))
		r, err := e.expect(evServes, "another master to serve")
		if err != nil {
			return err
		}
		h.next, h.served = r.From, r.Time
		if r, err = e.expect(evWhole, "the run to be whole at "+h.next); err != nil {
			return err
		}
		h.whole, h.stepWhole = r.Time, e.last.Step
		e.handovers = append(e.handovers, h)
		e.tell(h.whole, "%s after %d ms; after %d ms it knows of both nodes, at step %d", e.paint(green, h.next+" serves"),
			h.served.Sub(h.at).Milliseconds(), h.whole.Sub(h.at).Milliseconds(), h.stepWhole)
		if err := e.startMaster(dead); err != nil {
			return err
		}
		e.tell(time.Now(), "%s starts in place of %s, and waits", e.masters[dead].name, h.killed)
		return nil
	}
}

// expect waits for an event of the masters.
func (e *electorate) expect(event, what string) (found record, err error) {
	err = e.await(what, electLimit, func(r record) bool { found = r; return r.Event == event })
	for i, m := range e.masters {
		if err == nil && m.name == found.From {
			e.leads = i
		}
	}
	return found, err
}

// lookOut reports which master serves, apart from one, and then when it knows the whole run.
func (e *electorate) lookOut(not int, run bool) {
	masters := slices.Clone(e.masters)
	e.cluster.wg.Go(func() {
		next := -1
		for next < 0 && e.cluster.goesOn() {
			for i, addr := range e.addrs {
				if i == not {
					continue
				}
				if c, err := net.Dial("tcp", addr); err == nil {
					_ = c.Close()
					next = i
				}
			}
		}
		if next < 0 {
			return
		}
		e.cluster.see(record{Time: time.Now(), Event: evServes, From: masters[next].name})
		for run && e.cluster.goesOn() {
			if e.isWhole(e.addrs[next]) {
				e.cluster.see(record{Time: time.Now(), Event: evWhole, From: masters[next].name})
				return
			}
		}
	})
}

// isWhole asks a master.
func (e *electorate) isWhole(addr string) bool {
	token, err := os.ReadFile(e.cluster.path("token"))
	if err != nil {
		return false
	}
	client := api.NewClient(addr, string(token))
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	runs, err := client.Runs(ctx)
	whole := func(r api.RunStatus) bool { return r.Phase == "running" && r.Members == 2 }
	return err == nil && slices.ContainsFunc(runs, whole)
}

// finish waits for the end of the training, and ends the masters and etcd.
func (e *electorate) finish() error {
	if err := e.ended(); err != nil {
		return err
	}
	for _, all := range [][]*child{e.masters, e.etcd} {
		for _, ch := range all {
			if err := ch.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				return fmt.Errorf("stop %s: %w", ch.name, err)
			}
		}
		alive := func(ch *child) bool { return ch.running() }
		if err := e.await("the end of the masters and etcd", exitLimit,
			func(record) bool { return !slices.ContainsFunc(all, alive) }); err != nil {
			return err
		}
	}
	return nil
}

func (e *electorate) judge() error {
	e.line("\n%s", handoverTable(e.handovers, e.began))
	return e.verdict(masterChecks(e.records, e.handovers, e.plan, leftovers(leftoverLimit, false)))
}

func handoverTable(hs []handover, began time.Time) string {
	var b strings.Builder
	row := "%8s  %-9s %-10s %10s %10s %9s %9s\n"
	fmt.Fprintf(&b, row, "", "", "next", "served", "knew both", "step when", "step")
	fmt.Fprintf(&b, row, "at", "killed", "master", "after", "nodes", "killed", "then")
	for _, h := range hs {
		fmt.Fprintf(&b, row, fmt.Sprintf("%.2f s", h.at.Sub(began).Seconds()), h.killed, h.next,
			fmt.Sprintf("%d ms", h.served.Sub(h.at).Milliseconds()), fmt.Sprintf("%d ms", h.whole.Sub(h.at).Milliseconds()),
			fmt.Sprint(h.stepAtKill), fmt.Sprint(h.stepWhole))
	}
	return b.String()
}

// masterChecks judges the whole run.
func masterChecks(rs []record, hs []handover, p plan, left []process) []check {
	var killed []string
	others := true
	for _, h := range hs {
		killed = append(killed, h.killed)
		others = others && h.next != h.killed && h.next != ""
	}
	starts, workers, done := 0, 0, 0
	inOrder := true
	for _, r := range rs {
		switch r.Event {
		case evStart:
			starts++
		case evUp:
			workers++
		case evStep:
			inOrder = inOrder && r.Step == done+1
			done = r.Step
		}
	}
	first, last := losses(rs)
	return []check{
		{others && len(hs) == 3, "another master served after each kill: " + strings.Join(killed, ", ")},
		{starts == 2 && workers == 4,
			fmt.Sprintf("no rank restarted: %d launchers have started %d workers", starts, workers)},
		{inOrder && done > 0, "the steps went on: none is missing, and none was done twice"},
		{trainedSteps(rs) == p.steps, fmt.Sprintf("%d of %d steps are done", trainedSteps(rs), p.steps)},
		{last < first/2, fmt.Sprintf("the loss fell from %.3f to %.3f", first, last)},
		{len(left) == 0, "no process is left" + names(left)},
	}
}

// freeAddrs are addresses of this host where nobody listens yet.
func freeAddrs(n int) (all []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		all = append(all, l.Addr().String())
	}
	return all, nil
}
