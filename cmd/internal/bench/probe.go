package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"time"

	"dlrover-run/netcheck/probe"
)

func probeRows() []row {
	return []row{
		{id: "check", run: checkPair, maxReps: 3, noPeer: "has none", lines: []line{
			{what: "2 nodes on links of 1 Gbit/s check each other, host level: exec of the second to both workers",
				unit: duration, goal: 10},
			{what: "of that, processor time of one node", unit: duration, goal: 1}}},
		{id: "probe", run: probeLoopback, noPeer: "has none", lines: []line{
			{what: "TCP over loopback, 4 streams, 1 s", unit: speed},
			{what: "the same by iperf3", unit: speed},
			{what: "ours, of iperf3's", unit: share, goal: 90}}},
	}
}

// probeLoopback measures with the sockets and buffers of a node check, and then with iperf3.
func probeLoopback(ctx context.Context, l *lab) ([]float64, error) {
	const gib = 1 << 30
	mbps, err := probe.Throughput(ctx, time.Second)
	if err != nil {
		return nil, err
	}
	theirs, err := iperf3(ctx, l)
	if err != nil {
		return nil, err
	}
	ours := mbps * 1e6 / 8 / gib
	return []float64{ours, theirs / 8 / gib, 100 * ours / (theirs / 8 / gib)}, nil
}

// iperf3 returns bit/s as its receiver counts them.
func iperf3(ctx context.Context, l *lab) (float64, error) {
	addr, err := freeAddr()
	if err != nil {
		return 0, err
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return 0, err
	}
	server, err := l.start(nil, nil, "iperf3", "-s", "-B", "127.0.0.1", "-p", port)
	if errors.Is(err, exec.ErrNotFound) {
		return 0, errors.New("iperf3 is not installed")
	}
	if err != nil {
		return 0, err
	}
	defer l.kill(server)
	var rate float64
	err = l.until(ctx, "iperf3's report", func() (bool, error) {
		out, _ := exec.CommandContext(ctx, "iperf3", "-c", "127.0.0.1", "-p", port, "-t", "1", "-P", "4", "-J").Output()
		rate = iperf3Rate(out)
		return rate > 0, nil
	})
	return rate, err
}

// iperf3Rate is 0 in a report without a rate: the server has not listened yet.
func iperf3Rate(out []byte) float64 {
	var report struct {
		End struct {
			Received struct {
				Rate float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	_ = json.Unmarshal(out, &report) // nothing, if it is no JSON
	return report.End.Received.Rate
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
		_ = exec.Command("ip", "netns", "del", host).Run() // it may not have come into being
	}
}
