package run

import (
	"dlrover-run/internal/app/run/binding"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/scheduler"
	"dlrover-run/rendezvous"
)

// settings are all values that the command line, the environment and the host decide. They are checked before
// anything is started.
type settings struct {
	called    invocation
	dryRun    bool
	runID     string
	params    rendezvous.Params
	node      rendezvous.Node
	size      size
	replicas  replicas
	scheduler scheduler.Facts // without a name if there is none
	rdzv      rdzvSettings
	auth      auth
	restarts  restarts
	shutdown  shutdown
	logs      logSettings
	program   program
	framework framework
	binding   binding.Binding
	hold      holding
	shmDir    string // --ckpt-shm-dir
	features  []row
	warnings  []string
}

func resolveAs(as invocation, c *argv.Line, env argv.LookupEnv, host hostFacts) (settings, error) {
	return settings{features: features(), called: as}.resolve(&options{Line: c, env: as.variables(env), host: host})
}

func (s settings) resolve(o *options) (settings, error) {
	err := s.read(o)
	s.warnings = o.warnings
	return s, err
}

// read stops at the first error, so the order of its steps decides which error the user sees.
func (s *settings) read(o *options) (err error) {
	s.shmDir = o.String("ckpt-shm-dir")
	for _, step := range []func(){
		func() { s.scheduler, err = findScheduler(o, &s.called) },
		func() { s.params.Min, s.params.Max, s.params.Unit, err = readNodes(o, &s.scheduler) },
		func() { s.size, err = readSize(o, &s.scheduler) },
		func() { s.node, err = readNode(o, &s.scheduler, s.size.slots, s.params.Max) },
		func() { err = s.meet(o) },
		func() { err = checkNames(o, s.runID, &s.node) },
		func() { err = s.readGroups(o) },
		func() { err = s.secure(o) },
		func() { err = s.checkTLS() },
		func() { err = s.restarts.read(o, &s.params, s.rdzv.backend == local) },
		func() { s.shutdown, err = readShutdown(o) },
		func() { s.logs, err = readLogging(o, s.called.command.RankLogs) },
		func() { s.program.dir, err = readWorkdir(o) },
		func() { err = s.framework.pick(o, &s.scheduler, s.program.dir, s.params.Max*s.size.slots) },
		func() { err = s.readFeatures(o) },
		func() { s.onlyCheck(o) },
		func() { err = s.program.find(o, s.called.command.Alone) },
		func() { s.framework.look(o, s.program.path); warnOfVariables(o) },
		func() { err = s.binding.Assign(featureOptions{o, s}, o.host.root, s.called.command.CPUs, s.size.slots) },
		func() { s.binding.Near(featureOptions{o, s}, o.host.root, s.size.slots); warnOfOptions(o) },
		func() { err = s.params.Validate() },
	} {
		if step(); err != nil {
			return err
		}
	}
	s.dryRun = o.Bool("dry-run")
	return nil
}

// onlyCheck makes a job of --check-only: the job itself has not begun, and there is no work to be done again.
func (s *settings) onlyCheck(o *options) {
	if !o.Bool("check-only") {
		return
	}
	s.runID += "-check"
	s.size.slots, s.node.Slots, s.size.why = 1, 1, "--check-only"
	s.params.CheckOnly, s.params.Always, s.restarts.policy.Restart = true, false, policy.Never
}

// work is a digest of the workers' program; "" if they execute nothing.
func (s *settings) work() string {
	if s.params.CheckOnly {
		return ""
	}
	return s.program.work()
}

// warnOfVariables names the variables that torchrun's agent reads and that have no effect here.
func warnOfVariables(o *options) {
	for _, v := range [][2]string{
		{"TORCHELASTIC_HEALTH_CHECK_PORT",
			"PyTorch's health check does not exist outside of Meta; --metrics-addr serves /healthz"},
		{"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "workers that the kernel does not interrupt are waited for"},
		{"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "a node whose workers succeeded waits for the others without a limit"},
		{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
			"the launcher of rank 0 always serves the workers' store, empty after every restart"},
	} {
		if value := o.Lookup(v[0]); value != "" && value != "0" {
			o.Warn("$%s=%q has no effect: %s", v[0], value, v[1])
		}
	}
}

// warnOfOptions names options of DLRover that are accepted and do nothing.
func warnOfOptions(o *options) {
	if o.IsSet("ucp-device-type") {
		o.Warn("--ucp-device-type=%s has no effect, as in DLRover itself, which converts universal checkpoints on the CPU",
			o.String("ucp-device-type"))
	}
	if o.Bool("auto-tunning") {
		o.Warn("--auto-tunning has no effect: the settings of the data loader come from the tuner in DLRover's Python " +
			"master, and the rendezvous of this job has none")
	}
}
