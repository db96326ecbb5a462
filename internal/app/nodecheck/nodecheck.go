// Package nodecheck examines one node for the launcher: the site's own check, its network interfaces, its devices and
// the links between them, and then its network, together with the other nodes.
package nodecheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/app/token"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/healthcheck"
	"dlrover-run/netcheck/node"
	"dlrover-run/netcheck/probe"
	"dlrover-run/netcheck/serve"
	"dlrover-run/switchbox"
)

// Config has the settings of an examination and its tools.
type Config struct {
	Run  string
	Spec netcheck.Spec
	// Node is this one: its ID, Name and Addr, how many devices were counted, and whether there must be some.
	Node netcheck.Node
	// Alone: no other node can join, so a pass without partners is as good as one with.
	Alone bool
	// Health is the site's own check; "" for none. It may take HealthTime.
	Health     string
	HealthTime time.Duration
	// Start starts the commands of a check.
	Start healthcheck.Start
	// Devices examines the accelerators and the links between them; nil skips this. An examination that is not possible
	// here has the State Skipped.
	Devices func(context.Context) switchbox.Report
	// Torch starts PyTorch's tests, whose import goes on in the background; nil leaves them out.
	Torch func(context.Context) (node.Torch, error)
	// Env is the environment of the workers.
	Env func(name string) string
	// Transport reaches the meeting point of the nodes; Final reports whether one of its errors is permanent.
	Transport serve.Transport
	Final     func(error) bool
	Log       *slog.Logger
}

// Result is the answer of one examination.
type Result struct {
	netcheck.Verdict
	Domain string    // of NVLink, "" if unknown
	Until  time.Time // how long a pass holds; zero: for this launcher's life
}

// Checker examines this node, once for each call of Check. It is not safe for concurrent use.
type Checker struct {
	cfg    Config
	host   probe.Host
	choice probe.Choice
	mark   string // fingerprint of the node when the last examination passed; "" if it failed
}

// New returns a Checker, or an error that names the variable that cannot be used. Nothing is started.
func New(cfg Config) (*Checker, error) {
	c := &Checker{cfg: cfg}
	addr, err := resolve(cfg.Node.Addr)
	if err != nil {
		return nil, err
	}
	c.choice, err = probe.ChoiceOf(cfg.Env, addr)
	return c, err
}

// resolveTimeout bounds the lookup of this node's own name.
const resolveTimeout = 5 * time.Second

// resolve is the address that the other nodes find under the name of this one.
func resolve(addr string) (string, error) {
	if net.ParseIP(addr) != nil || strings.Contains(addr, "%") {
		return addr, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", addr)
	if err == nil && len(ips) == 0 {
		err = errors.New("the name has no address")
	}
	if err != nil {
		return "", fmt.Errorf("this node's address %q cannot be resolved (%w): give it as --local-addr=IP", addr, err)
	}
	if token.Loopback(addr) {
		return ips[0].Unmap().String(), nil
	}
	return choose(ips, ownAddresses()).String(), nil
}

// choose prefers an address that an interface of this node has. Many hosts give their own name one on loopback, such as
// 127.0.1.1, in place of the external address or in addition to it.
func choose(ips, own []netip.Addr) netip.Addr {
	best := ips[0].Unmap()
	for _, ip := range slices.Backward(ips) {
		if ip = ip.Unmap(); slices.Contains(own, ip) && (!ip.IsLoopback() || !slices.Contains(own, best)) {
			best = ip
		}
	}
	if i := slices.IndexFunc(own, netip.Addr.IsGlobalUnicast); i >= 0 && best.IsLoopback() {
		return own[i]
	}
	return best
}

func ownAddresses() []netip.Addr {
	var own []netip.Addr
	as, _ := net.InterfaceAddrs() // after an error there are none
	for _, a := range as {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			own = append(own, p.Addr().Unmap())
		}
	}
	return own
}

// Check examines the node. It ends within a second after ctx, and leaves nothing running. An error means that there is
// no verdict.
func (c *Checker) Check(ctx context.Context) (Result, error) {
	c.mark = ""
	mark := c.host.Fingerprint(c.choice)
	noticed := c.watch()
	torch, noTorch := c.startTorch(ctx)
	self := c.announced(ctx)
	self.Torch, self.NoTorch = torch != nil, cmp.Or(noTorch, self.NoTorch)
	rdma := c.rdma(&self)
	prober := c.prober(ctx, self, rdma)
	v, err := node.Run(ctx, node.Config{
		Run: c.cfg.Run, Node: self, Transport: c.cfg.Transport, Prober: prober, Torch: torch,
		Noticed: func() []netcheck.Finding { return append(noticed(), prober.Noticed()...) },
		Final:   c.cfg.Final, Log: c.cfg.Log,
	})
	if err = cmp.Or(err, ctx.Err()); err != nil {
		return Result{}, err // the tests may have failed because they were cancelled
	}
	v.Excluded = v.Excluded && !c.cfg.Spec.ReportOnly
	c.tellLater(self, v)
	if !v.Excluded {
		c.mark = mark
	}
	return Result{Verdict: v, Domain: self.Domain, Until: c.until(v)}, nil
}

func (c *Checker) startTorch(ctx context.Context) (t node.Torch, why string) {
	if c.cfg.Torch == nil {
		return nil, c.cfg.Node.NoTorch
	}
	t, err := c.cfg.Torch(ctx)
	if err != nil {
		c.cfg.Log.Warn("no tests with PyTorch on this node", "err", err)
		return nil, err.Error()
	}
	return t, ""
}

// tellLater logs the verdict's findings about this node alone that it did not know when it introduced itself.
func (c *Checker) tellLater(self netcheck.Node, v netcheck.Verdict) {
	for _, f := range v.Findings {
		own := strings.HasPrefix(f.Kind, "host.") || strings.HasSuffix(f.Kind, ".skipped")
		if own && !f.In(self.Findings) {
			c.tell(f)
		}
	}
}

// watch returns a function that lists the findings of this node's own counters from now on. Growth that is normal on
// healthy networks is left out.
func (c *Checker) watch() func() []netcheck.Finding {
	before := c.host.Snapshot(c.choice)
	return func() []netcheck.Finding {
		return slices.DeleteFunc(probe.Delta(before, c.host.Snapshot(c.choice)),
			func(f netcheck.Finding) bool { return f.Severity == netcheck.Info })
	}
}

// rdma is the tool for RDMA. Cards without tests are reported; most nodes have none.
func (c *Checker) rdma(self *netcheck.Node) string {
	tool, why := c.host.FindRDMA()
	cards := slices.ContainsFunc(self.NICs, func(n netcheck.NIC) bool { return n.HCA != "" })
	self.RDMA = tool != ""
	if tool == "" && cards && c.cfg.Spec.Level != netcheck.LevelLocal && !c.cfg.Alone {
		f := netcheck.Finding{Check: "host", Kind: probe.RDMASkipped, Severity: netcheck.Warn,
			Text: "not tested by RDMA: " + why}
		c.tell(f)
		self.Findings = append(self.Findings, f)
	}
	return tool
}

// until is how long a pass holds. One without a partner is provisional: it lets the node wait, and the next world in
// which there are partners tests it.
func (c *Checker) until(v netcheck.Verdict) time.Time {
	switch {
	case c.cfg.Spec.Level != netcheck.LevelLocal && !v.Paired && !c.cfg.Alone:
		return time.Now()
	case c.cfg.Spec.TTL == 0:
		return time.Time{}
	}
	return time.Now().Add(c.cfg.Spec.TTL)
}

// Doubt describes a change of this node since its examination that makes the pass void, or returns "".
func (c *Checker) Doubt() string {
	mark := c.host.Fingerprint(c.choice)
	if c.mark == "" || mark == c.mark {
		return ""
	}
	was := c.mark
	c.mark = ""
	return fmt.Sprintf("the host or a link has been down since: %s, was %s", mark, was)
}

// announced introduces the node, and meanwhile announces to the service that it is there.
func (c *Checker) announced(ctx context.Context) netcheck.Node {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { node.Announce(ctx, c.cfg.Run, c.cfg.Node.ID, c.cfg.Transport) })
	defer wg.Wait()
	defer cancel()
	return c.introduce(ctx)
}

// introduce does the local checks, all at the same time: none of them uses a resource that another one measures.
func (c *Checker) introduce(ctx context.Context) netcheck.Node {
	self := c.cfg.Node
	var wg sync.WaitGroup
	var health, devices []netcheck.Finding
	var covered []string
	if c.cfg.Health != "" {
		wg.Go(func() { health = c.health(ctx) })
	}
	if c.cfg.Devices != nil {
		wg.Go(func() {
			r := c.cfg.Devices(ctx)
			self.Domain, devices, covered = r.Domain, findings(r), aspects(r)
			self.GPUs = max(self.GPUs, len(r.Devices))
		})
	}
	nics := append(starved(self.CPU), c.nics(ctx)...)
	self.NICs, _ = c.host.NICs(c.choice) // no interface is a finding
	wg.Wait()
	self.Findings = append(append(health, nics...), devices...)
	if len(health) > 0 && health[0].Severity == netcheck.Info {
		covered = append(covered, netcheck.AspectHealth)
	}
	self.Covered = covered
	for _, f := range self.Findings {
		c.tell(f)
	}
	return self
}

// starved reports a cgroup limit of less than one CPU for this node; cpu is in hundredths.
func starved(cpu int) []netcheck.Finding {
	if cpu <= 0 || cpu >= 100 {
		return nil
	}
	return []netcheck.Finding{{Check: "host", Kind: "host.cpu", Severity: netcheck.Warn, Metric: "CPU time",
		Value: float64(cpu), Unit: "% of a CPU", Threshold: 100,
		Text: fmt.Sprintf("the cgroup leaves this node %d %% of one CPU: workers, and tests of this check, are slow", cpu)}}
}

// A link that has just come up, as that of a new container, may be reported as down for a second.
const (
	linkPatience = 2 * time.Second
	linkPause    = 100 * time.Millisecond
)

// nics looks at the interfaces, for some time where one does not work.
func (c *Checker) nics(ctx context.Context) []netcheck.Finding {
	for begun := time.Now(); ; {
		found := c.host.Local(c.choice)
		down := slices.ContainsFunc(found, func(f netcheck.Finding) bool { return f.Severity == netcheck.Fatal })
		if !down || time.Since(begun) > linkPatience {
			return found
		}
		select {
		case <-time.After(linkPause):
		case <-ctx.Done():
			return found
		}
	}
}

// prober measures the rate of this node's own loopback first; with it a test recognizes its CPU as the limit.
func (c *Checker) prober(ctx context.Context, self netcheck.Node, rdma string) *probe.Prober {
	cfg := probe.Config{ID: netcheck.Alias(self.ID), NICs: self.NICs, Addr: self.Addr, RDMATool: rdma,
		Start: probe.Start(c.cfg.Start)}
	if c.cfg.Spec.Level == netcheck.LevelLocal || c.cfg.Alone {
		return probe.New(cfg) // it will not be used
	}
	cfg.Loopback, _ = probe.Loopback(ctx) // 0 is unknown
	return probe.New(cfg)
}

// tell logs a finding, so that this node's own log is complete.
func (c *Checker) tell(f netcheck.Finding) {
	level := slog.LevelWarn
	if f.Severity == netcheck.Info {
		level = slog.LevelDebug
	}
	c.cfg.Log.Log(context.Background(), level, "check: "+f.Text, "check", f.Check, "kind", f.Kind, "severity", f.Severity)
}

func (c *Checker) health(ctx context.Context) []netcheck.Finding {
	a := healthcheck.Run(ctx, c.cfg.Start, c.cfg.Health, c.cfg.HealthTime)
	f := netcheck.Finding{Check: "health", Kind: "host.health", Severity: netcheck.Info}
	switch a.Outcome {
	case healthcheck.Healthy:
		f.Text = "the site's health check has passed"
	case healthcheck.Unclear:
		f.Kind, f.Severity, f.Text = "health.skipped", netcheck.Warn, "the site's health check says nothing of use"
	case healthcheck.Unhealthy:
		f.Severity, f.Text = netcheck.Fatal, "the site's health check has failed"
	}
	if a.Reason != "" {
		f.Text += ": " + a.Reason
	}
	return []netcheck.Finding{f}
}

// aspects are the aspects of devices that r covers without a finding.
func aspects(r switchbox.Report) (all []string) {
	if r.State != switchbox.OK || len(r.Devices) == 0 {
		return nil
	}
	all = append(all, netcheck.AspectDevices)
	each := func(sound func(switchbox.Facts) bool) bool {
		return !slices.ContainsFunc(r.Devices, func(f switchbox.Facts) bool { return !sound(f) })
	}
	if each(func(f switchbox.Facts) bool { return f.ECC != nil && f.ECC.Enabled && f.ECC.Uncorrected == 0 }) {
		all = append(all, netcheck.AspectMemory)
	}
	failed := func(m switchbox.Measurement) bool { return m.Error != "" }
	if len(r.Pairs) == 0 || slices.ContainsFunc(r.Pairs, failed) {
		return all
	}
	all = append(all, netcheck.AspectCopies)
	if r.Adaptor == "nvml" && each(func(f switchbox.Facts) bool { return !slices.Contains(f.Unsupported, "Xids") }) {
		all = append(all, netcheck.AspectXids)
	}
	return all
}

// findings turns an adaptor's findings into findings of the node.
func findings(r switchbox.Report) []netcheck.Finding {
	var fs []netcheck.Finding
	for _, f := range r.Findings {
		fs = append(fs, netcheck.Finding{
			Check: f.Check, Kind: f.Kind, Severity: netcheck.Severity(f.Severity), Entity: f.Entity, Metric: f.Metric,
			Value: f.Value, Unit: f.Unit, Threshold: f.Threshold, Median: f.Median, Text: f.Text,
		})
	}
	if r.State == switchbox.Skipped {
		fs = append(fs, netcheck.Finding{
			Check: r.Adaptor, Kind: "gpu.skipped", Severity: netcheck.Warn, Text: "devices were not checked: " + r.Reason,
		})
	}
	return fs
}
