package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
)

func checkRows() []row {
	return []row{
		{id: "check", run: checkPair, maxReps: 3, noPeer: "has none", lines: []line{
			{what: "2 nodes on links of 1 Gbit/s check each other, host level: exec of the second to both workers",
				unit: duration, goal: 10},
			{what: "of that, processor time of one node", unit: duration, goal: 1}}},
	}
}

// checkPair runs a job of two nodes in network namespaces.
func checkPair(ctx context.Context, l *lab) ([]float64, error) {
	n, err := newNetwork(ctx)
	defer n.close()
	if err != nil {
		return nil, fmt.Errorf("two hosts as network namespaces (needs root, ip and tc): %w", err)
	}
	env := append([]string{"DLROVER_TOKEN=" + l.bench.token}, l.side.env...)
	var ps [2]*process
	for i := range ps {
		argv := append([]string{"ip", "netns", "exec", n.hosts[i]}, l.side.command...)
		argv = append(argv, nodes(n.addr(0)+":29400", "2", "--network-check", "--check-level=host")...)
		if ps[i], err = l.start(env, nil, append(argv, l.worker("wait")...)...); err != nil {
			return nil, err
		}
	}
	ws, err := l.both(ctx, ps, 0)
	if err != nil {
		return nil, err
	}
	node := append(descendants(ps[1].cmd.Process.Pid), ps[1].cmd.Process.Pid)
	busy, err := sum(node, cpuSeconds)
	return []float64{seconds(ps[1].began, last(ws[:])), busy}, err
}

// network is two hosts on a cable of 1 Gbit/s.
type network struct{ hosts [2]string }

func newNetwork(ctx context.Context) (n network, err error) {
	do := func(args ...string) {
		if err != nil {
			return
		}
		if out, e := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); e != nil {
			err = fmt.Errorf("%v: %w: %s", args, e, out)
		}
	}
	for i := range n.hosts {
		n.hosts[i] = "dlbench" + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(i)
		do("ip", "netns", "add", n.hosts[i])
	}
	do("ip", "link", "add", "eth0", "netns", n.hosts[0], "type", "veth", "peer", "name", "eth0", "netns", n.hosts[1])
	for i, host := range n.hosts {
		do("ip", "-n", host, "addr", "add", n.addr(i)+"/24", "dev", "eth0")
		do("ip", "-n", host, "link", "set", "eth0", "up")
		do("ip", "-n", host, "link", "set", "lo", "up")
		do("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "1gbit", "burst", "256kb",
			"latency", "20ms")
	}
	return n, err
}

func (n network) addr(i int) string { return "10.97.3." + strconv.Itoa(i+1) }

func (n network) close() {
	for _, host := range n.hosts {
		_ = exec.Command("ip", "netns", "del", host).Run() // it may not exist
	}
}
