package nodechecks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"dlrover-run/internal/app/nodecheck"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/launcher"
	"dlrover-run/launcher/proc"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/checkview"
	"dlrover-run/netcheck/node"
	"dlrover-run/netcheck/python"
	"dlrover-run/netcheck/serve"
	"dlrover-run/rendezvous/api"
	"dlrover-run/switchbox"
	"dlrover-run/switchbox/metax"
)

// nodeChecks is the part of the launcher that examines this node at the rendezvous's request.
type nodeChecks struct {
	checkSettings
	node    feature.Node
	devices func(context.Context) switchbox.Report
	checker *nodecheck.Checker
	own     *serve.Hub // under a master of DLRover, which has none
	log     *slog.Logger
}

func (c *nodeChecks) opened() *feature.Opened {
	return &feature.Opened{
		Part: launcher.Part{Check: c.check, Start: c.start, End: c.end}, Joined: c.joined, Configure: c.configure,
		Close: c.close, Upstream: c.pythonCheck,
	}
}

// openNodeChecks finds the options that this node cannot satisfy.
func openNodeChecks(n feature.Node, k checkSettings) (*nodeChecks, error) {
	c := &nodeChecks{checkSettings: k, node: n, log: n.Log()}
	var err error
	c.devices, err = c.adaptor()
	return c, feature.Unusable(err)
}

// noDevices is the message if detection has found no device that this job uses.
const noDevices = "no accelerator was found that this job uses; looked for " + proc.DeviceFiles +
	"; what --accelerator names is tested all the same"

// adaptor returns the function that examines the devices of this node, nil if there is nothing to examine. The error
// is about the user's --switchbox-pairs.
func (c *nodeChecks) adaptor() (func(context.Context) switchbox.Report, error) {
	switch {
	case c.kind == "metax" && c.box != nil:
		return c.metax()
	case c.kind == "cuda":
		return c.nvidia, nil
	case c.box == nil:
		return nil, nil
	case c.kind == "" && c.box.limits.Given:
		_, _, err := switchbox.SelectPairs(c.box.pairs, nil, true)
		return nil, fmt.Errorf("%w: %s", err, noDevices)
	}
	why := noDevices
	if c.kind != "" {
		why = "there is no way to test the links between devices of the kind " + c.kind
	}
	return func(context.Context) switchbox.Report { return switchbox.Skip("switchbox", why) }, nil
}

// metax tests pairs of sockets with MetaX' tool.
func (c *nodeChecks) metax() (func(context.Context) switchbox.Report, error) {
	cfg := metax.Config{Pairs: c.box.pairs, Limits: c.box.limits, Environ: os.Environ(), Start: c.startCommand}
	return func(ctx context.Context) switchbox.Report {
		r, err := metax.Check(ctx, cfg)
		if err != nil { // the devices have changed since the launcher looked
			return switchbox.Skip(metax.Adaptor, err.Error())
		}
		return r
	}, metax.Validate(cfg)
}

// gpucheckTime limits gpucheck, which reports by itself if a call hangs.
const gpucheckTime = 25 * time.Second

// nvidia asks NVIDIA's driver, and copies between devices on request.
func (c *nodeChecks) nvidia(ctx context.Context) switchbox.Report {
	ctx, cancel := context.WithTimeout(ctx, gpucheckTime+5*time.Second)
	defer cancel()
	return nodecheck.NVIDIA(ctx, c.startCommand, c.gpucheckArgs()...)
}

// gpucheckArgs are gpucheck's arguments; it has the default pairs itself.
func (c *nodeChecks) gpucheckArgs() []string {
	timeout := "--timeout=" + gpucheckTime.String()
	if c.box == nil {
		return []string{"--level=links", timeout}
	}
	args := []string{"--level=copy", timeout, fmt.Sprintf("--min-bandwidth=%g", c.box.limits.MinBandwidth),
		fmt.Sprintf("--min-channels=%d", c.box.limits.MinChannels)}
	if c.box.limits.Given || c.box.limits.Ring {
		args = append(args, "--pairs="+c.box.list())
	}
	return args
}

// joined starts the parts that need the address at which other nodes reach this one.
func (c *nodeChecks) joined() {
	j, r := c.node.Job(), c.node.Rendezvous()
	cfg := nodecheck.Config{
		Run: j.RunID, Spec: c.spec, Alone: j.Params.Max == 1, Health: c.health, HealthTime: c.spec.Timeout,
		Node: netcheck.Node{
			ID: j.Node.ID, Name: j.Node.Name, Addr: j.Node.Addr, GPUs: c.gpus, Wants: c.wants, NoTorch: c.noTorch(),
			Bare: j.Bare,
			CPU:  int(100 * proc.CPUs("", "")),
		},
		Devices: c.devices, Env: os.Getenv, Start: c.startCommand, Final: api.Final, Log: c.log,
	}
	if c.spec.Level == netcheck.LevelFull && c.noPy == nil && !j.Bare {
		cfg.Torch = c.torch
	}
	if p := r.Upstream(); p != nil {
		c.own = c.alone(p)
		cfg.Transport, cfg.Alone, cfg.Spec.Level, cfg.Torch = c.own, true, netcheck.LevelLocal, nil
	} else if served := r.Served(); served != nil {
		cfg.Transport = served.Checks
	} else {
		cfg.Transport = node.Over(r.Client())
	}
	var err error
	if c.checker, err = nodecheck.New(cfg); err != nil {
		c.log.Error("this node cannot be checked", "err", err)
	}
}

func (c *nodeChecks) noTorch() string {
	switch {
	case c.node.Job().Bare:
		return "it has no workers"
	case c.noPy == nil:
		return ""
	}
	return c.noPy.Error()
}

// torch starts PyTorch's tests with the workers' interpreter.
func (c *nodeChecks) torch(ctx context.Context) (node.Torch, error) {
	r := c.node.Rendezvous()
	return python.Start(ctx, python.Config{
		Interpreter: c.python, Device: torchDevice(c.kind), Devices: c.gpus, Wants: c.wants, Addr: c.node.Job().Node.Addr,
		Env: c.torchEnv(), Start: c.startCommand, Log: c.log,
		Store: func(allow []string) (addr string, end func(), err error) {
			addr, end = r.LendStore(allow)
			return addr, end, nil
		},
	})
}

// torchEnv is the workers' environment. If the links between MetaX boxes have their own test, the collectives leave
// the optical ones out, as MetaX' DLRover does.
func (c *nodeChecks) torchEnv() []string {
	env := c.node.Environ()
	if c.kind == "metax" && c.box != nil {
		env = append(env, "MCCL_DISABLE_OPTIC_LINK=1")
	}
	return env
}

// torchDevice is PyTorch's name of a kind of device.
func torchDevice(kind string) python.Device {
	switch kind {
	case "":
		return python.CPU
	case "ascend":
		return python.NPU
	case "musa":
		return python.MUSA
	}
	return python.CUDA
}

// configure keeps the launcher that serves others, which depend on it.
func (c *nodeChecks) configure(cfg *launcher.Config) {
	cfg.Doubter = launcher.Doubter{Name: "node check", Doubt: c.doubt}
	cfg.StayWhenBarred = c.serves() && c.node.Job().Params.Max > 1
}

// serves reports whether this launcher serves the rendezvous of other nodes.
func (c *nodeChecks) serves() bool {
	return c.node.Rendezvous().Served() != nil && !c.node.Job().Local
}

func (c *nodeChecks) check(ctx context.Context, _ launcher.CheckRequest) (launcher.CheckResult, error) {
	if c.checker == nil {
		return launcher.CheckResult{}, errors.New("its address or an option cannot be used; see its log")
	}
	if c.own != nil {
		if err := c.own.Expect(c.node.Job().RunID, []string{c.node.Job().Node.ID}, nil); err != nil {
			return launcher.CheckResult{}, err
		}
	}
	r, err := c.checker.Check(ctx)
	if err != nil {
		return launcher.CheckResult{}, err
	}
	if c.only {
		c.print(r.Verdict)
	}
	if !r.Excluded && r.State == netcheck.StateNotTested {
		c.log.Info("this node was not tested with others", "reason", r.Reason)
	} else if !r.Excluded && r.State != netcheck.StateOK {
		c.log.Warn("this node takes part in spite of its check", "verdict", r.State, "reason", r.Reason)
	}
	if c.only && !c.spec.ReportOnly && !r.Excluded && !r.Reaches() {
		r.Excluded, r.Again = true, true // no node trains; the exit status reports the result
	}
	return launcher.CheckResult{Passed: !r.Excluded, Again: r.Again, Reason: r.Reason, Aspect: r.Aspect(), Until: r.Until,
		Covered: r.Covered, Domain: r.Domain}, nil
}

// print shows the verdict on this node, and the findings where no table will have them.
func (c *nodeChecks) print(v netcheck.Verdict) {
	self := netcheck.Node{Name: c.node.Job().Node.Name}
	fmt.Printf("%s: %s: %s\n", self.Name, v.State, cmp.Or(v.Reason, "nothing was found against it"))
	if !c.serves() {
		checkview.Findings(os.Stdout, []netcheck.NodePicture{{Node: self, Verdict: v}})
	}
}

func (c *nodeChecks) doubt(context.Context) string {
	if c.checker == nil {
		return ""
	}
	return c.checker.Doubt()
}

// start prints the table with --check-only: there is nothing to start, and the job ends.
func (c *nodeChecks) start(r *launcher.StartRequest) {
	if c.only && r.Place.GroupRank == 0 && c.node.Job().Master {
		c.show()
	}
}

func (c *nodeChecks) end(launcher.EndRequest) {
	if c.only && c.node.Rendezvous() != nil && c.serves() {
		c.show()
	}
}

// showTimeout bounds the wait for the table.
const showTimeout = 10 * time.Second

func (c *nodeChecks) close() error {
	if c.own != nil {
		c.own.Close()
	}
	return nil
}

// show prints the measurements between the nodes.
func (c *nodeChecks) show() {
	ctx, cancel := context.WithTimeout(context.Background(), showTimeout)
	defer cancel()
	p, err := c.picture(ctx)
	if err == nil {
		err = checkview.Table(os.Stdout, p)
	}
	if err != nil {
		c.log.Warn("cannot print the table of the check", "err", err)
	}
}

func (c *nodeChecks) picture(ctx context.Context) (p netcheck.Picture, err error) {
	r, run := c.node.Rendezvous(), c.node.Job().RunID
	if served := r.Served(); served != nil {
		return served.Checks.Picture(run)
	}
	err = r.Client().Mounted(ctx, run, "checks", &p)
	return p, err
}
