package nodecheck

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/retry"
	"dlrover-run/launcher/proc"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/healthcheck"
	"dlrover-run/netcheck/probe"
	"dlrover-run/switchbox"
	"dlrover-run/switchbox/gpuchild"
)

// Training is a node with workers at work. They must not notice its examination.
type Training struct {
	Addr     string                   // of the node
	Env      func(name string) string // of the workers
	PIDs     []int                    // of the workers, by local rank
	RankBase int
	Devices  func(context.Context) switchbox.Report // asks the driver; nil skips this

	mu     sync.Mutex
	prober *probe.Prober // of the next test of links

	host         probe.Host // in tests, as all that follow
	proc, cgroup string
}

// watched is for how long counters grow.
const watched = 2 * time.Second

// Facts examines the node. It takes little longer than watched, and Devices.
func (t *Training) Facts(ctx context.Context) (facts []hang.Fact) {
	var devices []hang.Fact
	var wg sync.WaitGroup
	if t.Devices != nil {
		wg.Go(func() { devices = ofDevices(t.Devices(ctx)) })
	}
	choice, err := t.choice()
	before := t.count(choice)
	if retry.Sleep(ctx, watched) {
		facts = append(t.growth(before, t.count(choice)), hang.Fact{Kind: "cpu.count", Of: "the node",
			Value: proc.CPUs(t.proc, t.cgroup)})
	}
	if err == nil {
		facts = append(facts, t.links(choice)...)
	}
	wg.Wait()
	return append(facts, devices...)
}

// choice selects the interfaces of the job.
func (t *Training) choice() (probe.Choice, error) {
	addr, err := resolve(t.Addr)
	if err != nil {
		return probe.Choice{}, err
	}
	return probe.ChoiceOf(t.Env, addr)
}

// counts are the sums at one moment.
type counts struct {
	strain proc.Strain
	quotas []map[string]proc.Periods // by local rank
	links  probe.Counters
}

func (t *Training) count(c probe.Choice) counts {
	n := counts{strain: proc.ReadStrain(t.proc, t.cgroup, t.host.Sys), links: t.host.Snapshot(c)}
	for _, pid := range t.PIDs {
		n.quotas = append(n.quotas, proc.Quotas(t.proc, t.cgroup, pid))
	}
	return n
}

// growth compares two moments.
func (t *Training) growth(a, b counts) (facts []hang.Fact) {
	x, y := a.strain, b.strain
	for _, f := range []struct {
		kind, of     string
		grown, of100 int64
	}{
		{"cpu.stolen", "the hypervisor", y.Stolen - x.Stolen, y.Ticks - x.Ticks},
		{"cpu.memory", "some process", int64(y.Memory - x.Memory), int64(watched)},
		{"cpu.io", "some process", int64(y.IO - x.IO), int64(watched)},
		{"link.resent", "TCP", y.Resent - x.Resent, max(y.Sent-x.Sent, leastSent)},
	} {
		facts = append(facts, hang.Fact{Kind: f.kind, Of: f.of, Value: share(f.grown, f.of100)})
	}
	for i := range a.quotas {
		f := hang.Fact{Kind: "cpu.quota", Of: fmt.Sprint("rank ", t.RankBase+i)}
		for dir, p := range b.quotas[i] {
			was := a.quotas[i][dir]
			f.Value = max(f.Value, share(p.Spent-was.Spent, p.All-was.All))
		}
		facts = append(facts, f)
	}
	facts = append(facts, hang.Fact{Kind: "cpu.hot", Of: "cores", Value: float64(max(y.Hot-x.Hot, 0))})
	for _, f := range probe.Delta(a.links, b.links) {
		facts = append(facts, faults("link.", f)...)
	}
	return facts
}

// leastSent is a number of segments: of fewer, a share tells nothing.
const leastSent = 200

// share of a whole, in percent.
func share(part, whole int64) float64 {
	if part <= 0 || whole <= 0 {
		return 0
	}
	return min(100*float64(part)/float64(whole), 100)
}

// faults is a finding, if it is a warning at least.
func faults(area string, f netcheck.Finding) []hang.Fact {
	if f.Severity == netcheck.Info {
		return nil
	}
	return []hang.Fact{{Kind: area + f.Kind + "." + f.Metric, Of: f.Entity, Fault: f.Text,
		Fatal: f.Severity == netcheck.Fatal}}
}

// links tells of the job's interfaces.
func (t *Training) links(c probe.Choice) (facts []hang.Fact) {
	nics, _ := t.host.NICs(c) // no interface is a finding
	for _, n := range append(nics, t.host.Ports(c)...) {
		if n.Mbps > 0 {
			facts = append(facts, hang.Fact{Kind: "link.speed", Of: n.Name, Value: float64(n.Mbps) / 1000})
		}
		if n.MTU > 0 {
			facts = append(facts, hang.Fact{Kind: "link.mtu", Of: n.Name, Value: float64(n.MTU)})
		}
	}
	for _, f := range t.host.Local(c) {
		facts = append(facts, faults("link.", f)...)
	}
	return facts
}

// Bounds of a test of links.
const (
	maxTested = 8                // rails
	listens   = 40 * time.Second // for which this end waits for the other
	testLeft  = 8 * time.Second
)

// End opens this end of a test of the job's links, for a short time.
func (t *Training) End(ctx context.Context) json.RawMessage {
	choice, err := t.choice()
	if err != nil {
		return nil
	}
	nics, err := t.host.NICs(choice)
	if err != nil {
		return nil
	}
	peer := netcheck.Peer{ID: rand.Text(), Addr: t.Addr, NICs: nics[:min(len(nics), maxTested)]}
	p := probe.New(probe.Config{ID: peer.ID, NICs: peer.NICs, Addr: t.Addr})
	if peer.Addrs = p.Listen(ctx); peer.Addrs == nil {
		return nil
	}
	time.AfterFunc(listens, p.Close)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.prober = p
	data, _ := json.Marshal(peer) // texts and numbers
	return data
}

// Test tests the links with the other end, once for each End.
func (t *Training) Test(ctx context.Context, l hang.Link) []hang.Fact {
	t.mu.Lock()
	p := t.prober
	t.prober = nil
	t.mu.Unlock()
	a := netcheck.Assignment{Test: l.Test, Key: l.Key, Left: testLeft, Quick: true, Told: true}
	if err := json.Unmarshal(l.Peer, &a.Peer); err != nil || p == nil {
		return []hang.Fact{{Kind: "test.failed", Fault: "this end is not ready"}}
	}
	defer p.Close()
	var r netcheck.Result
	if l.Serve {
		r = p.Serve(ctx, a, func([]string) error { return nil })
	} else {
		r = p.Dial(ctx, a)
	}
	if r.Class != netcheck.OK {
		return []hang.Fact{{Kind: "test.failed", Fault: fmt.Sprintf("%s: %s", r.Class, r.Text)}}
	}
	facts := []hang.Fact{}
	for _, f := range r.Flows {
		if f.Kind == "" {
			facts = append(facts, hang.Fact{Kind: "test.received", Of: f.NIC, Value: f.Mbps / 1000})
		}
	}
	return facts
}

// ofDevices leaves out the use of the devices' memory: it is the job's.
func ofDevices(r switchbox.Report) (facts []hang.Fact) {
	for _, d := range r.Devices {
		of := fmt.Sprint("GPU ", d.Index)
		if d.Clocks != nil {
			facts = append(facts, hang.Fact{Kind: "device.clock", Of: of, Value: float64(d.Clocks.MHz)})
		}
		if len(d.Links) > 0 {
			facts = append(facts, hang.Fact{Kind: "device.links", Of: of, Value: float64(d.Active())})
		}
		if d.PCIe != nil && d.PCIe.Width > 0 {
			facts = append(facts, hang.Fact{Kind: "device.lanes", Of: of, Value: float64(d.PCIe.Width)})
		}
	}
	for _, f := range findings(r) {
		if f.Metric != "memory_used" && !strings.HasSuffix(f.Kind, ".skipped") {
			facts = append(facts, faults("device.", f)...)
		}
	}
	return facts
}

// NVIDIA runs gpucheck, a separate program, because the driver may hang or kill its caller. ctx needs a deadline.
func NVIDIA(ctx context.Context, start healthcheck.Start, args ...string) switchbox.Report {
	own, _ := os.Executable() // "" is in no directory
	r, err := gpuchild.Program{Path: gpuchild.Find(own), Start: start}.Run(ctx, args...)
	if usage, ok := errors.AsType[*gpuchild.UsageError](err); ok { // a pair of GPUs that are not on this node
		r = switchbox.Report{Adaptor: "nvml", Findings: []switchbox.Finding{
			{Check: "switchbox", Kind: "gpu.pairs", Severity: switchbox.Fatal, Text: usage.Text},
		}}
		r.Conclude()
	} else if err != nil {
		return switchbox.Skip("nvml", err.Error())
	}
	return r
}
