package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	durations "dlrover-run/internal/duration"
	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous/api"
)

// masterCount is how many masters elect one of them.
const masterCount = 3

func masterRows() []row {
	const noPeer = "speaks version 2 of etcd's API, which is gone since etcd 3.6"
	return []row{
		{id: "masters", run: masterLoss(syscall.SIGKILL, false), noPeer: noPeer, lines: []line{
			{what: "kill -9 of the master that serves, 3 masters on etcd, to the next one serving", unit: duration, goal: 0.1},
			{what: "to the world of 2 nodes being whole there", unit: duration},
			{what: "no worker is restarted", unit: yesno, goal: 1}}},
		{id: "masters-frozen", run: masterLoss(syscall.SIGSTOP, false), noPeer: noPeer, lines: []line{
			{what: "SIGSTOP of the master that serves, to the next one serving", unit: duration, goal: 1},
			{what: "to the world of 2 nodes being whole there, when the frozen one was killed", unit: duration},
			{what: "no worker is restarted", unit: yesno, goal: 1}}},
		{id: "masters-silent", run: masterLoss(syscall.SIGSTOP, true), noPeer: noPeer, lines: []line{
			{what: "SIGSTOP of the master that serves, whose host answers nothing to the others, to the next one serving",
				unit: duration, goal: 2.5},
			{what: "to the world of 2 nodes being whole there, when the frozen one was killed", unit: duration},
			{what: "no worker is restarted", unit: yesno, goal: 1}}},
		leaseRow("killed", "kill -9 of the master that serves, 2 masters on a Lease, to the next one serving", 0.5),
		leaseRow("frozen", "SIGSTOP of it, to the next one serving", 0),
		leaseRow("silent", "SIGSTOP of it, whose host answers nothing to the other, to the next one serving", 6),
		{id: "server-lost", run: serverLoss, noPeer: "ends then: its store was on that node", lines: []line{
			{what: "kill -9 of all processes of the node that serves c10d, of 4, to the next one serving",
				unit: duration, goal: 1},
			{what: "to the workers of the other 3 nodes having started again, if none of them fails", unit: duration},
			{what: "none of them is stopped before another node serves", unit: yesno, goal: 1}}},
	}
}

// apiServerVariable names Kubernetes' API server, for the test of make e2e-kube.
const apiServerVariable = "KUBE_APISERVER"

// leaseRow times masters on a Lease by the test of make e2e-kube. That loses ten masters, one repetition each.
func leaseRow(how, what string, goal float64) row {
	var times []float64
	run := func(ctx context.Context, l *lab) (_ []float64, err error) {
		if len(times) == 0 {
			if times, err = leaseLosses(ctx, how); err != nil {
				return nil, err
			}
		}
		next := times[0]
		times = times[1:]
		return []float64{next}, nil
	}
	return row{id: "lease-" + how, run: run, kube: true, limit: 5 * time.Minute, noPeer: "has no daemon",
		lines: []line{{what: what, unit: duration, goal: goal}}}
}

func leaseLosses(ctx context.Context, how string) ([]float64, error) {
	out, err := exec.CommandContext(ctx, "go", "test", "-count=1", "-v", "-run", "^TestKubernetes$/^Masters$/^"+how+"$",
		"./internal/app/kube").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return lossTimes(string(out), how)
}

// lossTimes reads a line of the test, such as "lease_test.go:85: killed: [98ms 1.2s]".
func lossTimes(log, how string) (times []float64, err error) {
	_, list, _ := strings.Cut(log, ": "+how+": [")
	list, _, _ = strings.Cut(list, "]")
	for text := range strings.FieldsSeq(list) {
		d, err := durations.Parse(text)
		if err != nil {
			return nil, err
		}
		times = append(times, d.Seconds())
	}
	if len(times) == 0 {
		return nil, fmt.Errorf("the test has told no times: %s", log)
	}
	return times, nil
}

// serverLoss kills the node that serves a job without a daemon.
func serverLoss(ctx context.Context, l *lab) ([]float64, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	args := append(nodes(addr, "3:4", "--max_restarts=3", "--rdzv_conf=last_call_timeout=1"), l.worker("wait")...)
	for range 4 {
		if _, err := l.launch(args...); err != nil {
			return nil, err
		}
		if err := l.listening(ctx, addr); err != nil {
			return nil, err
		}
	}
	if _, err := l.await(ctx, "the workers of all nodes", 4, started(0)); err != nil {
		return nil, err
	}
	if err := settled(ctx); err != nil {
		return nil, err
	}
	killed, at := now(), time.Now()
	l.kill(l.procs[0])
	again, err := l.await(ctx, "the workers of the other nodes", 3, started(killed))
	if err != nil {
		return nil, err
	}
	var served, stopped []time.Time
	for _, p := range l.procs[1:] {
		served = append(served, p.said("this one was elected to serve it")...)
		stopped = append(stopped, p.said("stopping the workers")...)
	}
	if len(served) != 1 || len(stopped) != 3 {
		return nil, fmt.Errorf("%d nodes serve, and %d have stopped workers; want 1 and 3", len(served), len(stopped))
	}
	waits := slices.MinFunc(stopped, time.Time.Compare).After(served[0])
	return []float64{served[0].Sub(at).Seconds(), seconds(killed, last(again)), yes(waits)}, nil
}

// said are the times of the lines of a launcher's log that have a text.
func (p *process) said(text string) (at []time.Time) {
	data, _ := os.ReadFile(p.out) // nothing is said without
	for line := range bytes.Lines(data) {
		var entry struct{ Time time.Time }
		if bytes.Contains(line, []byte(text)) && json.Unmarshal(line, &entry) == nil {
			at = append(at, entry.Time)
		}
	}
	return at
}

// masterLoss sends a signal to the master that serves a running job. Silent masters answer nothing to each other.
func masterLoss(sig syscall.Signal, silent bool) func(context.Context, *lab) ([]float64, error) {
	return func(ctx context.Context, l *lab) ([]float64, error) {
		m, err := l.elect(ctx, silent)
		if err != nil {
			return nil, err
		}
		args := append([]string{"--rdzv_backend=dlrover-master", "--rdzv_endpoint=" + strings.Join(m.addrs, ","),
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
		return m.lose(ctx, sig, ws)
	}
}

// masters are processes that elect one of them.
type masters struct {
	lab   *lab
	addrs []string
	procs []*process
}

// elect starts an etcd and the masters, and waits until one serves.
func (l *lab) elect(ctx context.Context, silent bool) (*masters, error) {
	path, err := exec.LookPath("etcd")
	if err != nil {
		return nil, errors.New("there is no etcd in PATH: install Debian's etcd-server")
	}
	m := &masters{lab: l}
	var at [2]string
	for i := range at {
		if at[i], err = freeAddr(); err != nil {
			return nil, err
		}
	}
	client, peer := "http://"+at[0], "http://"+at[1]
	if _, err = l.start(nil, nil, path, "--data-dir", l.dir+"/etcd", "--log-level=error", "--listen-client-urls", client,
		"--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--initial-cluster", "default="+peer); err != nil {
		return nil, err
	}
	if err := l.listening(ctx, at[0]); err != nil {
		return nil, err
	}
	for range masterCount {
		addr, err := freeAddr()
		if err != nil {
			return nil, err
		}
		advertise := addr
		if silent {
			var end func()
			if advertise, end, err = testkit.Deaf(); err != nil {
				return nil, err
			}
			l.ends = append(l.ends, end)
		}
		p, err := l.start(nil, nil, l.master, "--listen", addr, "--etcd", at[0], "--advertise", advertise)
		if err != nil {
			return nil, err
		}
		m.addrs, m.procs = append(m.addrs, addr), append(m.procs, p)
	}
	_, err = m.serving(ctx, -1)
	return m, err
}

// serving waits for a master that listens, apart from one.
func (m *masters) serving(ctx context.Context, not int) (found int, err error) {
	err = m.lab.until(ctx, "a master to serve", func() (bool, error) {
		for i, addr := range m.addrs {
			if i == not {
				continue
			}
			if c, err := net.Dial("tcp", addr); err == nil {
				found = i
				return true, c.Close()
			}
		}
		return false, nil
	})
	return found, err
}

// lose sends the signal to the master that serves, and times the next one.
func (m *masters) lose(ctx context.Context, sig syscall.Signal, ws []stamp) ([]float64, error) {
	old, err := m.serving(ctx, -1)
	if err != nil {
		return nil, err
	}
	lost := now()
	if err := m.procs[old].cmd.Process.Signal(sig); err != nil {
		return nil, err
	}
	next, err := m.serving(ctx, old)
	if err != nil {
		return nil, err
	}
	served := now()
	_ = m.procs[old].cmd.Process.Kill()
	client := api.NewClient(m.addrs[next], "")
	defer client.Close()
	if err := m.lab.until(ctx, "the world to be whole again", func() (bool, error) {
		rs, err := client.Runs(ctx)
		whole := slices.ContainsFunc(rs, func(r api.RunStatus) bool { return r.Phase == "running" && r.Members == len(ws) })
		return whole, err
	}); err != nil {
		return nil, err
	}
	whole := now()
	if err := pause(ctx, time.Second); err != nil {
		return nil, err
	}
	return []float64{seconds(lost, served), seconds(lost, whole), yes(m.lab.untouched(ws))}, nil
}
