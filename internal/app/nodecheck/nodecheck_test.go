package nodecheck

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/job"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/node"
	"dlrover-run/netcheck/probe"
	"dlrover-run/netcheck/serve"
	"dlrover-run/switchbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine is a node with one interface, whose sysfs is a directory.
type machine struct {
	t    *testing.T
	dir  string
	link probe.Link
}

func newMachine(t *testing.T) *machine {
	m := &machine{t: t, dir: t.TempDir(), link: probe.Link{
		Name: "eth0", MTU: 1500, Up: true, Oper: "up", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")},
	}}
	m.set("sys/kernel/random/boot_id", "b1")
	m.carrier("1")
	return m
}

func (m *machine) set(path, text string) {
	path = filepath.Join(m.dir, path)
	require.NoError(m.t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(m.t, os.WriteFile(path, []byte(text+"\n"), 0o600))
}

// carrier sets how often the interface has got or lost its link.
func (m *machine) carrier(n string) {
	m.set("class/net/eth0/carrier_changes", n)
	m.set("class/net/eth0/carrier_down_count", n)
}

func (m *machine) host() probe.Host {
	return probe.Host{Sys: m.dir, Proc: m.dir, Links: func() ([]probe.Link, error) { return []probe.Link{m.link}, nil }}
}

// checker examines the machine; change changes what it is told.
func (m *machine) checker(change func(*Config)) *Checker {
	m.t.Helper()
	cfg := Config{
		Run:  "r",
		Spec: netcheck.Spec{Level: netcheck.LevelLocal, TTL: time.Hour, Timeout: netcheck.DefaultTimeout},
		Node: netcheck.Node{ID: "id0", Name: "n0", Addr: "10.0.0.1"}, HealthTime: time.Minute,
		Start: func(c *exec.Cmd) (func() error, error) { return c.Wait, c.Start() },
		Env:   func(string) string { return "" }, Log: slog.New(slog.DiscardHandler),
	}
	change(&cfg)
	if cfg.Transport == nil {
		cfg.Transport = meet(m.t, cfg.Spec, cfg.Node.ID)
	}
	c, err := New(cfg)
	require.NoError(m.t, err)
	c.host = m.host()
	return c
}

// meet is the service of a check to which nodes were told to come.
func meet(t *testing.T, spec netcheck.Spec, ids ...string) *serve.Hub {
	hub := serve.New(serve.Config{
		Spec: func(string) (netcheck.Spec, error) { return spec, nil },
		Bar:  func(string, string, string, string) {}, Note: func(string, job.Note) {},
	})
	t.Cleanup(hub.Close)
	require.NoError(t, hub.Expect("r", ids, nil))
	return hub
}

// Devices may take as long as the check's limit to be examined: the service hears meanwhile that the node is there.
func TestLongLocalChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMachine(t).checker(func(c *Config) {
			c.Devices = func(context.Context) switchbox.Report {
				time.Sleep(50 * time.Second)
				return switchbox.Skip("test", "slow")
			}
		})
		r := check(t, c)
		require.Equal(t, netcheck.StateOK, r.State)
		require.False(t, r.Excluded)
	})
}

// decided is a service that has made up its mind about whoever comes.
type decided struct {
	verdict netcheck.Verdict
	before  func() // called before it says so

	mu   sync.Mutex
	who  netcheck.Node
	last netcheck.Result // that was reported
}

func (d *decided) Next(_ context.Context, _ string, q serve.Request) (netcheck.Assignment, error) {
	if q.Arrive != nil {
		d.mu.Lock()
		d.who = *q.Arrive
		d.mu.Unlock()
	}
	if q.Report != nil {
		d.mu.Lock()
		d.last = *q.Report
		d.mu.Unlock()
		return netcheck.Assignment{}, nil
	}
	if d.before != nil {
		d.before()
	}
	return netcheck.Assignment{Seq: q.Seq + 1, Duty: netcheck.Decided, Verdict: &d.verdict}, nil
}

func (d *decided) node() netcheck.Node {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.who
}

func (d *decided) reported() netcheck.Result {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

func check(t *testing.T, c *Checker) Result {
	t.Helper()
	r, err := c.Check(t.Context())
	require.NoError(t, err)
	return r
}

func TestHealthCommand(t *testing.T) {
	for command, want := range map[string]struct {
		state  netcheck.State
		out    bool
		reason string
	}{
		"true":                             {netcheck.StateOK, false, ""},
		"echo GPU 3 is hot >&2; exit 1":    {netcheck.StateFaulty, true, "has failed: exit status 1: GPU 3 is hot"},
		"/no/such/check":                   {netcheck.StateOK, false, ""},
		`echo '{"verdict": "warn"}'`:       {netcheck.StateOK, false, ""},
		`echo '{"failed_checks":["ecc"]}'`: {netcheck.StateFaulty, true, "has failed: ecc"},
	} {
		c := newMachine(t).checker(func(c *Config) { c.Health = command })
		r := check(t, c)
		require.Equal(t, want.state, r.State, command)
		require.Equal(t, want.out, r.Excluded, command)
		require.Contains(t, r.Reason, want.reason, command)
	}
}

// What is unclear is told, and does not decide.
func TestUnclearHealthCheckIsAWarning(t *testing.T) {
	d := &decided{}
	c := newMachine(t).checker(func(c *Config) { c.Health, c.Transport = "exit 127", d })
	check(t, c)
	require.Len(t, d.node().Findings, 1)
	require.Equal(t, netcheck.Warn, d.node().Findings[0].Severity)
	require.Equal(t, "health.skipped", d.node().Findings[0].Kind, "the table says: not tested")
	require.Contains(t, d.node().Findings[0].Text, "says nothing of use: could not be run")
}

func TestHealthCheckThatDoesNotEnd(t *testing.T) {
	c := newMachine(t).checker(func(c *Config) { c.Health, c.HealthTime = "sleep 1000", 50*time.Millisecond })
	r := check(t, c)
	require.True(t, r.Excluded)
	require.Contains(t, r.Reason, "no answer within 50ms")
}

func TestDevices(t *testing.T) {
	faulty := switchbox.Report{State: switchbox.Faulty, Adaptor: "nvml", Domain: "rack1", Findings: []switchbox.Finding{
		{Check: "nvml", Kind: "gpu.link", Severity: switchbox.Fatal, Entity: "GPU 3", Text: "link 2 of GPU 3 is down"},
	}}
	devices := func(r switchbox.Report) func(*Config) {
		return func(c *Config) { c.Devices = func(context.Context) switchbox.Report { return r } }
	}
	r := check(t, newMachine(t).checker(devices(faulty)))
	require.True(t, r.Excluded)
	require.Equal(t, "gpu.link", r.Kind)
	require.Equal(t, "link 2 of GPU 3 is down", r.Reason)
	require.Equal(t, "rack1", r.Domain)

	// What the examination has found counts, whatever was found before it.
	d := &decided{verdict: netcheck.Verdict{State: netcheck.StateOK}}
	c := newMachine(t).checker(devices(switchbox.Report{State: switchbox.OK, Devices: make([]switchbox.Facts, 8)}))
	c.cfg.Transport = d
	check(t, c)
	require.Equal(t, 8, d.node().GPUs)

	c = newMachine(t).checker(devices(switchbox.Skip("nvml", "no gpucheck")))
	c.cfg.Transport = d
	require.False(t, check(t, c).Excluded)
	require.Equal(t, []netcheck.Finding{{
		Check: "nvml", Kind: "gpu.skipped", Severity: netcheck.Warn, Text: "devices were not checked: no gpucheck",
	}}, d.node().Findings)
}

// With --check-action=report all is told, and nobody is left out.
func TestReportOnly(t *testing.T) {
	m := newMachine(t)
	report := func(c *Config) { c.Spec.ReportOnly = true }
	r := check(t, m.checker(func(c *Config) { report(c); c.Health = "exit 7" }))
	require.False(t, r.Excluded)
	require.Equal(t, netcheck.StateFaulty, r.State)
	require.Contains(t, r.Reason, "exit status 7")

	d := &decided{verdict: netcheck.Verdict{State: netcheck.StateOK}, before: func() { m.carrier("2") }}
	r = check(t, m.checker(func(c *Config) { report(c); c.Transport = d }))
	require.False(t, r.Excluded)
	require.Equal(t, netcheck.Fatal, r.Findings[0].Severity)
}

// A node whose link was lost while it was tested is at fault, whatever the others say.
func TestLinkLostInTheCheck(t *testing.T) {
	m := newMachine(t)
	d := &decided{verdict: netcheck.Verdict{State: netcheck.StateOK, Paired: true}, before: func() { m.carrier("2") }}
	r := check(t, m.checker(func(c *Config) { c.Transport = d }))
	require.True(t, r.Excluded)
	require.Equal(t, netcheck.StateFaulty, r.State)
	require.Equal(t, "host.nic", r.Kind)
	require.Equal(t, "eth0 lost its link during the check: carrier_down_count grew by 1", r.Reason)
	require.Len(t, r.Findings, 1)

	m.link.RxDropped = 0
	d.before = func() { m.link.RxErrors++ }
	r = check(t, m.checker(func(c *Config) { c.Transport = d }))
	require.False(t, r.Excluded, "a warning is told")
	require.Len(t, r.Findings, 1)

	require.Equal(t, netcheck.AfterVerdict, d.reported().Test, "the service hears of it, too")
	require.Equal(t, "rx_errors", d.reported().Findings[0].Metric)

	d.verdict = netcheck.Verdict{State: netcheck.StateFaulty, Kind: "net.tx", Excluded: true, Reason: "sends slowly"}
	d.before = func() { m.carrier("3") }
	require.Equal(t, "sends slowly", check(t, m.checker(func(c *Config) { c.Transport = d })).Reason)
}

// flaps loses the link once the node has introduced itself.
type flaps struct {
	*serve.Hub
	m *machine
}

func (f flaps) Next(ctx context.Context, run string, q serve.Request) (netcheck.Assignment, error) {
	if q.Arrive != nil {
		f.m.carrier("2")
	}
	return f.Hub.Next(ctx, run, q)
}

// What leaves a node out is in the table of the check.
func TestALinkThatFlapsIsInTheTable(t *testing.T) {
	for _, report := range []bool{false, true} {
		m := newMachine(t)
		var hub *serve.Hub
		r := check(t, m.checker(func(c *Config) {
			c.Spec.ReportOnly = report
			hub = meet(t, c.Spec, c.Node.ID)
			c.Transport = flaps{hub, m}
		}))
		require.Equal(t, !report, r.Excluded)
		p, err := hub.Picture("r")
		require.NoError(t, err)
		require.Equal(t, r.Verdict, p.Nodes[0].Verdict)
		require.Equal(t, "eth0 lost its link during the check: carrier_down_count grew by 1", r.Reason)
		require.NotContains(t, p.Summary, "1 ok")
	}
}

func TestHowLongAPassHolds(t *testing.T) {
	for name, c := range map[string]struct {
		level         netcheck.Level
		ttl           time.Duration
		paired, alone bool
		want          time.Duration // from now; -1: for good
	}{
		"paired":                         {netcheck.LevelHost, time.Hour, true, false, time.Hour},
		"without a partner, provisional": {netcheck.LevelHost, time.Hour, false, false, 0},
		"and for the run as well":        {netcheck.LevelFull, 0, false, false, 0},
		"nobody else can come":           {netcheck.LevelHost, time.Hour, false, true, time.Hour},
		"local needs no partner":         {netcheck.LevelLocal, time.Minute, false, false, time.Minute},
		"as long as the node stays":      {netcheck.LevelHost, 0, true, false, -1},
		"local, as long as it stays":     {netcheck.LevelLocal, 0, false, false, -1},
	} {
		k := &Checker{cfg: Config{Spec: netcheck.Spec{Level: c.level, TTL: c.ttl}, Alone: c.alone}}
		until := k.until(netcheck.Verdict{State: netcheck.StateOK, Paired: c.paired})
		if c.want < 0 {
			require.Zero(t, until, name)
		} else {
			require.WithinDuration(t, time.Now().Add(c.want), until, 30*time.Second, name)
		}
	}
}

func TestDoubt(t *testing.T) {
	m := newMachine(t)
	c := m.checker(func(*Config) {})
	require.Empty(t, c.Doubt(), "nothing was found that could be doubted")
	check(t, c)
	require.Empty(t, c.Doubt())
	m.carrier("3")
	why := c.Doubt()
	require.Contains(t, why, "eth0.carrier_changes=3")
	require.Contains(t, why, "was boot=b1 eth0.carrier_changes=1")
	require.Empty(t, c.Doubt(), "it is said once")

	c = m.checker(func(*Config) {})
	check(t, c)
	m.set("sys/kernel/random/boot_id", "b2")
	require.Contains(t, c.Doubt(), "boot=b2")

	c = m.checker(func(c *Config) { c.Health = "exit 1" })
	check(t, c)
	m.carrier("4")
	require.Empty(t, c.Doubt(), "it has not passed")
}

func TestInterfacesThatAreNotThere(t *testing.T) {
	m := newMachine(t)
	name := func(value string) func(*Config) {
		return func(c *Config) {
			c.Env = func(name string) string { return map[string]string{"NCCL_SOCKET_IFNAME": value}[name] }
		}
	}
	r := check(t, m.checker(name("ib")))
	require.True(t, r.Excluded)
	require.Equal(t, `NCCL_SOCKET_IFNAME="ib" selects no network interface that is up and has an address; there are: `+
		`eth0 10.0.0.1`, r.Reason)
	r = check(t, m.checker(name("eth")))
	require.False(t, r.Excluded)
	m.link.Oper = "down"
	r = check(t, m.checker(name("")))
	require.True(t, r.Excluded)

	cfg := Config{Node: netcheck.Node{Addr: "10.0.0.1"}}
	name("^")(&cfg)
	_, err := New(cfg)
	require.ErrorContains(t, err, "NCCL_SOCKET_IFNAME=")
}

func TestAddresses(t *testing.T) {
	for addr, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "::1": "::1", "::ffff:10.0.0.1": "10.0.0.1", "fe80::1%eth0": "fe80::1",
	} {
		c, err := New(Config{Node: netcheck.Node{Addr: addr}, Env: func(string) string { return "" }})
		require.NoError(t, err, addr)
		require.Equal(t, want, c.choice.Addr.String())
	}
	c, err := New(Config{Node: netcheck.Node{Addr: "localhost"}, Env: func(string) string { return "" }})
	require.NoError(t, err)
	require.True(t, c.choice.Addr.IsLoopback())
	_, err = New(Config{Node: netcheck.Node{Addr: "no-such-host.invalid"}, Env: func(string) string { return "" }})
	require.ErrorContains(t, err, `this node's address "no-such-host.invalid" cannot be resolved`)
	require.ErrorContains(t, err, "--local-addr=IP")

	ips := func(list string) (as []netip.Addr) {
		for _, s := range strings.Fields(list) {
			as = append(as, netip.MustParseAddr(s))
		}
		return as
	}
	for _, x := range [][3]string{
		{"127.0.1.1 10.0.0.1", "127.0.0.1 10.0.0.1", "10.0.0.1"},
		{"127.0.0.1 10.0.0.1", "127.0.0.1 10.0.0.1", "10.0.0.1"},
		{"10.0.0.2 10.0.0.1", "10.0.0.1 10.0.0.2", "10.0.0.2"},
		{"127.0.0.1 10.0.0.9", "127.0.0.1 10.0.0.1", "10.0.0.1"},
		{"127.0.0.1", "127.0.0.1 10.0.0.1", "10.0.0.1"},
		{"::1 127.0.0.1", "127.0.0.1", "127.0.0.1"},
		{"::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1"},
		{"10.0.0.9", "", "10.0.0.9"},
		{"127.0.1.1", "127.0.0.1 ::1 fe80::1 10.0.0.1 172.17.0.1", "10.0.0.1"},
		{"127.0.1.1", "127.0.0.1", "127.0.1.1"},
	} {
		require.Equal(t, x[2], choose(ips(x[0]), ips(x[1])).String(), x[0])
	}
}

// What of the devices was looked at depends on how.
func TestWhatTheDevicesReportCovers(t *testing.T) {
	gpu := func(change func(*switchbox.Facts)) []switchbox.Facts {
		f := switchbox.Facts{ECC: &switchbox.ECC{Enabled: true}}
		change(&f)
		return []switchbox.Facts{{ECC: &switchbox.ECC{Enabled: true}}, f}
	}
	sound := gpu(func(*switchbox.Facts) {})
	copied := []switchbox.Measurement{{MBps: 1}}
	for want, r := range map[string]switchbox.Report{
		"devices memory": {Adaptor: "nvml", State: switchbox.OK, Devices: sound},
		"devices memory copies xids": {
			Adaptor: "nvml", State: switchbox.OK, Devices: sound, Pairs: copied,
		},
		"devices": {
			Adaptor: "nvml", State: switchbox.OK, Devices: gpu(func(f *switchbox.Facts) { f.ECC.Uncorrected = 1 }),
			Pairs: []switchbox.Measurement{{MBps: 1}, {Error: "no"}},
		},
		"devices copies": {
			Adaptor: "nvml", State: switchbox.OK, Pairs: copied,
			Devices: gpu(func(f *switchbox.Facts) { f.ECC, f.Unsupported = nil, []string{"Xids"} }),
		},
		"": {Adaptor: "nvml", State: switchbox.Faulty, Devices: sound, Pairs: copied},
	} {
		d := &decided{verdict: netcheck.Verdict{State: netcheck.StateOK}}
		devices := func(context.Context) switchbox.Report { return r }
		check(t, newMachine(t).checker(func(c *Config) { c.Transport, c.Devices = d, devices }))
		require.Equal(t, want, strings.Join(d.node().Covered, " "))
	}
	require.Empty(t, aspects(switchbox.Skip("nvml", "no driver")))
	require.Equal(t, []string{"devices", "copies"}, aspects(switchbox.Report{Adaptor: "metax", State: switchbox.OK,
		Devices: make([]switchbox.Facts, 2), Pairs: copied}))
	for command, want := range map[string][]string{"true": {"health"}, "false": nil, "exit 127": nil} {
		d := &decided{verdict: netcheck.Verdict{State: netcheck.StateOK}}
		check(t, newMachine(t).checker(func(c *Config) { c.Health, c.Transport = command, d }))
		require.Equal(t, want, d.node().Covered, command)
	}
}

func TestAFractionOfACPUIsTold(t *testing.T) {
	for cpu, want := range map[int]int{0: 0, 33: 1, 99: 1, 100: 0, 6400: 0} {
		d := &decided{verdict: netcheck.Verdict{State: netcheck.StateOK}}
		check(t, newMachine(t).checker(func(c *Config) { c.Transport, c.Node.CPU = d, cpu }))
		require.Len(t, d.node().Findings, want, cpu)
		if want > 0 {
			require.Contains(t, d.node().Findings[0].Text, " % of one CPU")
		}
	}
}

// That there are RDMA cards and no tool is told; that there are none is not.
func TestRDMAWithoutATool(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	m := newMachine(t)
	run := func(change func(*Config)) []netcheck.Finding {
		d := &decided{verdict: netcheck.Verdict{State: netcheck.StateOK}}
		check(t, m.checker(func(c *Config) {
			c.Transport, c.Spec.Level = d, netcheck.LevelHost
			change(c)
		}))
		require.False(t, d.node().RDMA)
		return d.node().Findings
	}
	paired := func(*Config) {}
	require.Empty(t, run(paired))
	m.set("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
	require.Empty(t, run(paired), "no interface that is tested belongs to it")
	m.set("class/net/eth0/device/infiniband/mlx5_0/x", "")
	require.Equal(t, []netcheck.Finding{{Check: "host", Kind: probe.RDMASkipped, Severity: netcheck.Warn,
		Text: "not tested by RDMA: ib_write_bw (package perftest) is not installed"}}, run(paired))
	require.Empty(t, run(func(c *Config) { c.Alone = true }), "there is nobody to test with")
}

// A node that cannot use PyTorch says why, and one that can closes it.
func TestTorch(t *testing.T) {
	d := &decided{verdict: netcheck.Verdict{State: netcheck.StateOK}}
	m := newMachine(t)
	check(t, m.checker(func(c *Config) { c.Transport, c.Node.NoTorch = d, "there is no python3" }))
	require.False(t, d.node().Torch)
	require.Equal(t, "there is no python3", d.node().NoTorch)

	fails := func(context.Context) (node.Torch, error) { return nil, errors.New("no module named torch") }
	check(t, m.checker(func(c *Config) { c.Transport, c.Torch = d, fails }))
	require.Equal(t, "no module named torch", d.node().NoTorch)

	torch := &closed{}
	starts := func(context.Context) (node.Torch, error) { return torch, nil }
	check(t, m.checker(func(c *Config) { c.Transport, c.Torch = d, starts }))
	require.True(t, d.node().Torch)
	require.True(t, torch.done)
}

type closed struct {
	node.Torch
	done bool
}

func (c *closed) Close() { c.done = true }

// What was begun is given up within a second, with nothing left of it; TestMain looks for goroutines.
func TestCancel(t *testing.T) {
	m := newMachine(t)
	pid := filepath.Join(t.TempDir(), "pid")
	hang := func(ctx context.Context) switchbox.Report { <-ctx.Done(); return switchbox.Skip("nvml", "canceled") }
	for name, c := range map[string]struct {
		change func(*Config)
		begun  func() bool
	}{
		"in the local checks": {
			func(c *Config) { c.Health, c.Devices = "echo $$ > "+pid+"; sleep 1000", hang },
			func() bool { text, _ := os.ReadFile(pid); return len(text) > 1 },
		},
		"among the nodes": {
			func(c *Config) {
				c.Spec.Level = netcheck.LevelHost
				c.Transport = meet(t, c.Spec, "id0", "id1") // who does not come
			},
			nil,
		},
	} {
		k := m.checker(c.change)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { _, err := k.Check(ctx); ended <- err }()
		if hub, ok := k.cfg.Transport.(*serve.Hub); ok && c.begun == nil {
			c.begun = func() bool {
				p, err := hub.Picture("r")
				return err == nil && p.Nodes != nil && p.Nodes[0].Node.Addr != ""
			}
		}
		require.Eventually(t, c.begun, time.Minute, 5*time.Millisecond, name)
		at := time.Now()
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled, name)
		require.Less(t, time.Since(at), 5*time.Second, name) // a second, and a busy machine
		require.Empty(t, k.Doubt(), name)
	}
	text, err := os.ReadFile(pid)
	require.NoError(t, err)
	require.NoDirExists(t, "/proc/"+strings.TrimSpace(string(text)))
}
