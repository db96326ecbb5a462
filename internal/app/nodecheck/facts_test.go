package nodecheck

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/netcheck/probe"
	"dlrover-run/switchbox"
	"dlrover-run/switchbox/fake"
)

// training is a machine with two workers.
func (m *machine) training() *Training {
	m.set("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw")
	m.set("proc/self/cgroup", "0::/")
	return &Training{Addr: "10.0.0.1", Env: func(string) string { return "" }, PIDs: []int{7, 8}, RankBase: 4,
		host: m.host(), proc: filepath.Join(m.dir, "proc"), cgroup: filepath.Join(m.dir, "cg")}
}

// sums sets the kernel's sums after so many seconds.
func (m *machine) sums(after int) {
	m.set("proc/stat", fmt.Sprintf("cpu  0 0 0 %d 0 0 0 %d 0 0", 700+160*after, 100+40*after))
	m.set("proc/pressure/memory", fmt.Sprintf("some avg10=0.00 total=%d", 500_000*after))
	m.set("proc/pressure/io", fmt.Sprintf("some avg10=0.00 total=%d", 9_000_000))
	m.set("proc/net/snmp", fmt.Sprintf("Tcp: OutSegs RetransSegs\nTcp: %d %d", 1000*after, 30*after))
	m.set("devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", fmt.Sprint(7+after))
	m.set("proc/8/cgroup", "0::/x")
	m.set("cg/x/cpu.stat", fmt.Sprintf("nr_periods %d\nnr_throttled %d", 50+10*after, 40+9*after))
}

// factsIn are facts by kind and part.
func factsIn(facts []hang.Fact) map[string]any {
	by := map[string]any{}
	for _, f := range facts {
		by[f.Kind+" "+f.Of] = f.Value
		if f.Fault != "" {
			by[f.Kind+" "+f.Of] = f.Fault
		}
	}
	return by
}

func TestFacts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t)
		m.set("class/net/eth0/speed", "10000")
		m.set("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
		m.set("class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)")
		m.set("class/infiniband/mlx5_0/ports/2/state", "1: DOWN")
		tr := m.training()
		tr.Devices = func(context.Context) switchbox.Report {
			box := fake.Box(2)
			box[1].Speed = switchbox.Clocks{MHz: 900, Held: []string{"its temperature"}}
			for _, g := range box {
				g.Mem.Used = g.Mem.Total // by the job
			}
			r := switchbox.Report{Adaptor: "nvml", Devices: switchbox.Read(fake.Devices(box), nil)}
			r.Findings = switchbox.Judge(r.Devices)
			r.Conclude()
			return r
		}
		began := time.Now()
		tr.host.Links = func() ([]probe.Link, error) {
			l := m.link
			l.RxErrors = uint64(time.Since(began) / time.Second)
			return []probe.Link{l}, nil
		}
		m.sums(0)
		time.AfterFunc(time.Second, func() { m.sums(2) })
		by := factsIn(tr.Facts(t.Context()))
		require.Positive(t, by["cpu.count the node"])
		delete(by, "cpu.count the node")
		require.Equal(t, map[string]any{
			"cpu.stolen the hypervisor": 20.0, "cpu.memory some process": 50.0, "cpu.io some process": 0.0,
			"cpu.hot cores":    2.0,
			"cpu.quota rank 4": 0.0, "cpu.quota rank 5": 90.0, "link.resent TCP": 3.0,
			"link.host.nic.rx_errors eth0": "eth0 received damaged packets during the check: rx_errors grew by 2",
			"link.speed eth0":              10.0, "link.mtu eth0": 1500.0, "link.speed mlx5_0:1": 200.0,
			"device.clock GPU 0": 1980.0, "device.clock GPU 1": 900.0, "device.links GPU 0": 18.0, "device.links GPU 1": 18.0,
			"device.lanes GPU 0": 16.0, "device.lanes GPU 1": 16.0,
			"device.gpu.clocks.clock GPU 1": "GPU 1 has its clocks held down by its temperature: 900 MHz",
		}, by)
	})
}

// Unknown facts are left out, and nothing waits longer than the caller.
func TestFactsOfABareHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t)
		tr := m.training()
		tr.Devices = func(ctx context.Context) switchbox.Report {
			<-ctx.Done()
			return switchbox.Skip("nvml", "it hangs")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.Equal(t, map[string]any{"link.mtu eth0": 1500.0}, factsIn(tr.Facts(ctx)))
		tr.Devices, tr.Addr = nil, "10.9.9.9"
		by := factsIn(tr.Facts(t.Context()))
		require.Contains(t, by, "link.host.nic. ", "its address is gone")
		require.NotContains(t, by, "link.mtu eth0")
		m.link.Up = false
		require.Contains(t, factsIn(m.training().Facts(t.Context())), "link.host.nic. eth0")
	})
}

// The interfaces and the kernel of this machine can be read.
func TestFactsOfThisHost(t *testing.T) {
	here := Training{Addr: "127.0.0.1", Env: func(string) string { return "" }, PIDs: []int{1}}
	facts := here.Facts(t.Context())
	require.Contains(t, factsIn(facts), "link.mtu lo")
	require.Empty(t, probe.Host{Sys: t.TempDir()}.Ports(probe.Choice{}))
}

// Two nodes test the links between them with what each has said of its end, once, and nothing stays open.
func TestLinksOfTwoNodes(t *testing.T) {
	env := func(string) string { return "" }
	a, b := Training{Addr: "127.0.0.1", Env: env}, Training{Addr: "127.0.0.1", Env: env}
	ends := []json.RawMessage{a.End(t.Context()), b.End(t.Context())}
	require.Less(t, len(ends[0]), 1000)
	key := []byte("0123456789abcdef0123456789abcdef")
	served := make(chan []hang.Fact)
	go func() { served <- b.Test(t.Context(), hang.Link{Test: "x", Key: key, Serve: true, Peer: ends[0]}) }()
	facts := a.Test(t.Context(), hang.Link{Test: "x", Key: key, Peer: ends[1]})
	for _, facts := range [][]hang.Fact{facts, <-served} {
		require.Len(t, facts, 1)
		require.Equal(t, "test.received", facts[0].Kind, facts[0].Fault)
		require.Equal(t, "lo", facts[0].Of)
		require.Greater(t, facts[0].Value, 0.1)
	}
	again := a.Test(t.Context(), hang.Link{Test: "y", Key: key, Peer: ends[1]})
	require.Equal(t, []hang.Fact{{Kind: "test.failed", Fault: "this end is not ready"}}, again)
	require.NotNil(t, a.End(t.Context()))
	refused := a.Test(t.Context(), hang.Link{Test: "z", Key: key, Peer: ends[1]})
	require.Contains(t, refused[0].Fault, "refused: ", "the other end has closed")
	strange := Training{Addr: "10.9.9.9", Env: env}
	require.Nil(t, strange.End(t.Context()), "it has no such interface")
}
