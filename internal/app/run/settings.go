package run

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/app/token"
	"dlrover-run/internal/console"
	"dlrover-run/internal/duration"
	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/pyenv"
	"dlrover-run/launcher/scheduler"
	"dlrover-run/rendezvous"
)

// backend is how the nodes of this job meet.
type backend string

const (
	local  backend = "local"          // one node; the rendezvous stays inside this process
	static backend = "static"         // node rank 0 serves it at the master's address and port
	c10d   backend = "c10d"           // the node that owns the endpoint's host serves it
	master backend = "dlrover-master" // dlrover-master serves it
)

// Default ports, torchrun's.
const (
	defaultMasterPort = 29500
	defaultC10dPort   = 29400
)

// settings are all values that the command line, the environment and the host decide. They are checked before
// anything is started.
type settings struct {
	backend   backend
	host      string // of the rendezvous
	port      int
	isHost    *bool // rdzv-conf is_host
	runID     string
	role      string
	params    rendezvous.Params
	node      rendezvous.Node
	addrWhy   string // why its address is not the one from which it reaches the rendezvous; "": it is
	slots     int
	slotsWhy  string
	share     string // preset.Vars'
	connect   time.Duration
	scheduler scheduler.Facts // without a name if there is none
	token     string
	tokenFrom string // the private key of ssh that it is derived from, if it is
	insecure  bool
	peers     scheduler.Peers // that are served without a token; none where there is one
	topology  string
	program   program
	policy    policy.Config
	codes     policy.CodePolicy
	preset    preset.Preset
	presetWhy string // in one line, with --preset=auto
	// servicePort is the port of the framework's own service if the user chose one; 0: the first that node 0 offers.
	servicePort int
	devices     int // accelerators of this node, if the preset needs them
	device      string
	servers     int // side processes of the framework
	virtual     bool
	oldTorch    bool // the workers' torch is older than 2.2
	signals     []syscall.Signal
	signalText  string
	shutdown    time.Duration
	restart     launcher.Restart
	logs        logSettings
	cpus        func(localRank int) []int
	memory      func(localRank int) *proc.MemoryPolicy
	shmDir      string // --ckpt-shm-dir
	features    []feature
	findPython  func() (string, error) // that runs scripts
	workdir     string                 // of the workers; "": the launcher's
	onResume    *job.Command           // given in advance; nil: none
	meanwhile   []string               // argv of the command that runs while the run is held
	leaveGrace  time.Duration          // for a node that leaves; 0: no bound
	dryRun      bool
	called      invocation
	warnings    []string
}

type logSettings struct {
	format         console.Format // of the launcher's own lines
	dir            string
	redirects, tee argv.StdMap
	ranks          map[int]bool
	outFilters     []string
	errFilters     []string
	prefix         string
	rotateSize     int64
	rotateCount    int
}

// files reports whether output of any of the workers goes to a file.
func (l *logSettings) files(workers int) bool {
	for i := range workers {
		if l.redirects.For(i) != 0 || l.tee.For(i) != 0 {
			return true
		}
	}
	return false
}

// resolver gathers settings; the first error wins and ends the resolution.
type resolver struct {
	c    *argv.Line
	env  argv.LookupEnv
	host hostFacts
	s    settings
}

func resolveAs(as invocation, c *argv.Line, env argv.LookupEnv, host hostFacts) (settings, error) {
	r := &resolver{c: c, env: as.variables(env), host: host, s: settings{features: features(), called: as}}
	return r.resolve()
}

func (r *resolver) resolve() (settings, error) {
	steps := []func() error{r.schedule, r.size, r.identity, r.rendezvous, r.names, r.secret, r.restarts, r.shutdownLadder,
		r.logging, r.pickWorkdir, r.pickPreset, r.features, r.entrypoint, r.environment, r.binding, r.numaAffinity,
		r.withoutEffect}
	for _, step := range steps {
		if err := step(); err != nil {
			return r.s, err
		}
	}
	return r.s, r.s.params.Validate()
}

// names refuses names that cannot be printed, because every node shows them.
func (r *resolver) names() error {
	node := "host name"
	if r.lookup("POD_NAME") != "" {
		node = "$POD_NAME"
	}
	for _, n := range [][2]string{{"run id (--rdzv-id)", r.s.runID}, {"--role", r.s.role}, {node, r.s.node.Name},
		{"$NODE_NAME", cmp.Or(r.s.node.Machine, r.s.node.Name)}} {
		if !text.Printable(n[1]) {
			return fmt.Errorf("%s %.100q: %s", n[0], n[1], text.PrintableRule)
		}
	}
	return nil
}

func (r *resolver) warn(format string, args ...any) {
	r.s.warnings = append(r.s.warnings, fmt.Sprintf(format, args...))
}

func (r *resolver) lookup(name string) string {
	v, _ := r.env(name)
	return v
}

// size decides the numbers of nodes and of workers.
func (r *resolver) size() error {
	lo, hi, err := argv.ParseNNodes(r.c.String("nnodes"))
	if err != nil {
		return err
	}
	if r.c.Bool("auto-config") {
		lo, hi, err = r.autoNodes()
	} else {
		lo, hi, err = r.sizeByScheduler(lo, hi)
	}
	if err != nil {
		return err
	}
	r.s.params.Min, r.s.params.Max = lo, hi
	if r.s.params.Unit = r.c.Int("node-unit"); r.s.params.Unit < 1 {
		return fmt.Errorf("--node_unit=%d: need a number of nodes from 1", r.s.params.Unit)
	}
	if r.s.share = r.s.scheduler.Share; r.s.sideOnly() {
		r.s.slotsWhy = r.s.scheduler.Name + ": this node is the " + r.s.share
		return nil
	}
	if n := r.s.scheduler.Slots; n > 0 && !r.c.IsSet("nproc-per-node") && !r.c.Bool("auto-config") {
		r.s.slots, r.s.slotsWhy = n, r.s.scheduler.Name
		return nil
	}
	r.s.slots, r.s.slotsWhy, err = r.workers(r.c.String("nproc-per-node"))
	return err
}

// autoNodes is --auto_config: the number of nodes comes from the pod's NODE_NUM.
func (r *resolver) autoNodes() (int, int, error) {
	n, err := strconv.Atoi(r.lookup("NODE_NUM"))
	if err != nil || n < 1 {
		return 0, 0, fmt.Errorf("--auto_config needs $NODE_NUM to be the number of nodes, got %q", r.lookup("NODE_NUM"))
	}
	return n, n, nil
}

func (r *resolver) workers(text string) (int, string, error) {
	gpus, kind := 0, ""
	if r.c.IsSet("accelerator") || r.c.Bool("auto-config") || text == "auto" || text == "gpu" {
		gpus, kind = r.host.gpus()
	}
	if r.c.String("accelerator") == noAccelerator {
		if text == "gpu" {
			return 0, "", fmt.Errorf("--nproc-per-node=gpu and --accelerator=%s contradict each other: use one of them",
				noAccelerator)
		}
		gpus, kind = 0, "" // there may be some that this job does not use
	}
	want := accelerators[r.c.String("accelerator")]
	if r.c.IsSet("accelerator") && gpus > 0 && len(want) > 0 && !slices.Contains(want, kind) {
		return 0, "", fmt.Errorf("--accelerator=%s: the devices of this node are %s; leave the option out or name theirs",
			r.c.String("accelerator"), kind)
	}
	if r.c.Bool("auto-config") && gpus > 0 {
		return gpus, kind + " of this node (--auto_config)", nil
	}
	switch text {
	case "cpu":
		return r.host.cpus(), "CPUs that this process may use", nil
	case "auto":
		if gpus > 0 {
			return gpus, kind, nil
		}
		return r.host.cpus(), "no accelerator to use, so CPUs that this process may use", nil
	case "gpu":
		if gpus == 0 {
			return 0, "", fmt.Errorf("--nproc-per-node=gpu: no GPU is visible here (looked for " + proc.DeviceFiles +
				", and at the visibility variables); use auto, cpu or a number")
		}
		return gpus, kind, nil
	case "xpu":
		return 0, "", fmt.Errorf("--nproc-per-node=xpu: Intel XPUs cannot be counted here; give their number")
	}
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		return 0, "", fmt.Errorf("--nproc-per-node=%s: unsupported nproc_per_node value; use a number, auto, cpu or gpu",
			text)
	}
	if n < 1 || n > 4096 {
		return 0, "", fmt.Errorf("--nproc-per-node=%d: need 1 to 4096 workers", n)
	}
	return n, "--nproc-per-node", nil
}

// noAccelerator is the --accelerator of a job on CPUs, with any devices.
const noAccelerator = "cpu"

// accelerators are the kinds of devices by DLRover's names.
var accelerators = map[string][]string{
	"nvidia.com/gpu":     {"cuda", "rocm", "metax"}, // all that answer to torch.cuda
	"metax-tech.com/gpu": {"metax"},
	"ascend-npu":         {"ascend"},
	"mthreads.com/gpu":   {"musa"},
}

// identity finds the identity of this node: DLRover's pods have it in the environment.
func (r *resolver) identity() error {
	r.s.role = r.c.String("role")
	r.s.node = rendezvous.Node{
		ID: r.host.id, Name: r.host.name, Rank: -1, Slots: r.s.slots, Role: r.s.role,
		Can: []rendezvous.Ability{rendezvous.CanGate, rendezvous.CanNotice, rendezvous.CanStream},
	}
	if pod := r.lookup("POD_NAME"); pod != "" {
		r.s.node.Name = pod
	}
	r.s.node.Machine, r.s.node.Devices = cmp.Or(r.lookup("NODE_NAME"), r.lookup("NODE_IP")), r.devices()
	for _, name := range []string{"NODE_IP", "POD_IP"} {
		if ip := r.lookup(name); ip != "" && r.s.node.IP == "" {
			r.s.node.IP = ip
		}
	}
	if text := r.lookup("NODE_ID"); text != "" {
		id, err := strconv.Atoi(text)
		if err != nil || id < 0 {
			return fmt.Errorf("$NODE_ID=%q: need a number from 0", text)
		}
		r.s.node.Generation = id + 1
	}
	return r.nodeRank()
}

// devices counts the accelerators of a node that has any.
func (r *resolver) devices() (n int) {
	if hasDevices(r.host.root) {
		n, _ = r.host.gpus()
	}
	return n
}

func (r *resolver) nodeRank() error {
	if r.c.IsSet("node-rank") {
		r.s.node.Rank = r.c.Int("node-rank")
	} else {
		for _, name := range []string{"NODE_RANK", "WORKER_RANK"} {
			if text := r.lookup(name); text != "" && r.s.node.Rank < 0 {
				n, err := strconv.Atoi(text)
				if err != nil || n < 0 {
					return fmt.Errorf("$%s=%q: need the rank of this node, a number from 0", name, text)
				}
				r.s.node.Rank = n
				if err := r.sameRank(name); err != nil {
					return err
				}
			}
		}
		if r.s.node.Rank < 0 && r.rankedByScheduler() {
			r.s.node.Rank = r.s.scheduler.NodeRank
		}
	}
	if r.s.node.Rank >= rendezvous.MaxNodes || r.c.IsSet("node-rank") && r.s.node.Rank < 0 {
		return fmt.Errorf("--node-rank=%d: need a number from 0 to %d", r.s.node.Rank, rendezvous.MaxNodes-1)
	}
	return nil
}

// secret finds the job token, and refuses to cross a network without one. A master reports by itself whether it
// needs one; DLRover's needs none.
func (r *resolver) secret() (err error) {
	s := &r.s
	s.insecure = r.c.Bool("insecure")
	s.topology = r.c.String("topology-file")
	if s.token, err = token.Find(r.c.String("token-file"), r.env); err != nil {
		return err
	}
	if s.token == "" {
		s.token = s.called.command.Token
	}
	if s.backend == local || s.backend == master || s.token != "" || s.insecure || token.Loopback(s.host) {
		return nil
	}
	if r.meetsByScheduler() && r.tokenOfKey() {
		return nil
	}
	if s.params.Max > 1 {
		s.peers = scheduler.PeersOf(s.scheduler, r.system(s.params.Max), s.host, s.params.Max)
	}
	switch {
	case len(s.peers.Names) > 0:
		r.warnOfPeers()
		return nil
	case r.meetsByScheduler():
		return r.withoutToken()
	case s.serves(r.host):
		if s.params.Max == 1 {
			return nil // there are no nodes to miss
		}
		r.warn("no job token: the rendezvous is served on loopback only, so nodes on other hosts cannot join; " +
			"give every node the same " + tokenSources)
		return nil
	}
	return fmt.Errorf("the rendezvous at %s:%d is on another host and needs a job token: give every node the same %s; "+
		"--insecure joins without", s.host, s.port, tokenSources)
}

// warnOfPeers warns that peers are served without a token.
func (r *resolver) warnOfPeers() {
	if s := &r.s; s.serves(r.host) {
		r.warn("no job token: the rendezvous at %s serves launchers on %s alone (by %s), and whoever runs a process there "+
			"can end the job; to close that, and for dlroverctl from elsewhere, give every node the same %s",
			s.endpoint(), s.peers, s.peers.From, tokenSources)
	}
}

// serves reports whether this node is the one to serve the rendezvous.
func (s *settings) serves(h hostFacts) bool {
	switch {
	case s.backend == local:
		return true
	case s.backend == static:
		return s.node.Rank == 0
	case s.backend == master:
		return false
	case s.isHost != nil:
		return *s.isHost
	}
	return h.owns(s.host)
}

func (r *resolver) restarts() error {
	s := &r.s
	s.params.MaxRestarts = r.c.Int("max-restarts")
	s.codes = policy.CodePolicy(r.c.String("exit-code-policy"))
	s.policy = policy.Config{Restart: policy.Restart(r.c.String("restart-policy")), MaxRestarts: s.params.MaxRestarts}
	s.params.Always = s.policy.Restart == policy.Always
	if r.c.IsSet("retryable-exit-codes") {
		ranges, err := policy.ParseCodes(r.c.String("retryable-exit-codes"))
		if err != nil {
			return fmt.Errorf("--retryable-exit-codes: %w", err)
		}
		s.policy.Retryable = ranges
	}
	if r.c.Duration("monitor-interval") <= 0 {
		return fmt.Errorf("--monitor-interval=%s: must be greater than 0", r.c.String("monitor-interval"))
	}
	if err := s.codes.Validate(); err != nil {
		return err
	}
	return r.policyRules()
}

// shutdownLadder sets the signals that end the job, and the time that workers have then.
func (r *resolver) shutdownLadder() error {
	signals, warnings, err := argv.ParseSignals(r.c.String("signals-to-handle"))
	if err != nil {
		return err
	}
	r.s.signals, r.s.signalText = signals, r.c.String("signals-to-handle")
	r.s.warnings = append(r.s.warnings, warnings...)
	r.s.shutdown = 30 * time.Second
	if text := r.lookup("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"); r.c.IsSet("shutdown-timeout") {
		r.s.shutdown, err = r.grace("shutdown-timeout")
	} else if text != "" {
		if r.s.shutdown, err = duration.Within(text, 0, maxGrace); err != nil {
			err = fmt.Errorf("$TORCH_ELASTIC_SHUTDOWN_TIMEOUT: %w", err)
		}
	}
	if err != nil {
		return err
	}
	r.s.restart.Always = r.c.IsSet("restart-grace")
	r.s.restart.Grace, err = r.grace("restart-grace")
	return err
}

// maxGrace bounds the time that workers may get to end.
const maxGrace = 180 * 24 * time.Hour

func (r *resolver) grace(option string) (time.Duration, error) {
	return r.duration(option, 0, maxGrace)
}

// duration is the value of an option of type Duration within bounds, both of them inclusive.
func (r *resolver) duration(option string, least, most time.Duration) (time.Duration, error) {
	d := r.c.Duration(option)
	if d < least || d > most {
		return 0, fmt.Errorf("--%s=%ss is out of range: want %s to %s", option, r.c.String(option), duration.Text(least),
			duration.Text(most))
	}
	return d, nil
}

func (r *resolver) logging() (err error) {
	l := &r.s.logs
	l.dir = r.c.String("log-dir")
	if l.redirects, err = argv.ParseStd("--redirects", r.c.String("redirects")); err != nil {
		return err
	}
	if l.tee, err = argv.ParseStd("--tee", r.c.String("tee")); err != nil {
		return err
	}
	if l.ranks, err = argv.ParseRanks(r.c.String("local-ranks-filter")); err != nil {
		return err
	}
	l.outFilters = argv.ParseFilters(r.c.String("duplicate-stdout-filters"))
	l.errFilters = argv.ParseFilters(r.c.String("duplicate-stderr-filters"))
	if l.prefix = r.c.String("log-line-prefix-template"); l.prefix == "" {
		l.prefix = r.lookup("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
	}
	if l.format, err = console.ParseFormat(r.c.String("log-format")); err != nil {
		return err
	}
	r.s.dryRun = r.c.Bool("dry-run")
	return r.rotation()
}

func (r *resolver) rotation() (err error) {
	l := &r.s.logs
	if text := r.c.String("log-rotate-size"); text != "" {
		if l.rotateSize, err = argv.ParseSize(text); err != nil {
			return fmt.Errorf("--log-rotate-size: %w", err)
		}
	}
	if l.rotateCount = r.c.Int("log-rotate-count"); l.rotateCount < 1 {
		return fmt.Errorf("--log-rotate-count=%d: need at least 1", l.rotateCount)
	}
	return nil
}

func (r *resolver) environment() (err error) {
	r.s.virtual = r.c.Bool("virtual-local-rank")
	python := r.s.program.path
	if r.c.Bool("no-python") && !strings.HasPrefix(filepath.Base(python), "python") {
		python, _ = r.python() // the one that a shell script would start
	}
	if major, minor, ok := pyenv.TorchRelease(python, r.env); ok {
		r.s.oldTorch = major < 2 || major == 2 && minor < 2
	}
	r.agentVariables()
	return nil
}

// agentVariables names the variables that torchrun's agent reads and that have no effect here.
func (r *resolver) agentVariables() {
	for _, v := range [][2]string{
		{"TORCHELASTIC_HEALTH_CHECK_PORT",
			"PyTorch's health check does not exist outside of Meta; --metrics-addr serves /healthz"},
		{"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "workers that the kernel does not interrupt are waited for"},
		{"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "a node whose workers succeeded waits for the others without a limit"},
		{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
			"the launcher of rank 0 always serves the workers' store, empty after every restart"},
	} {
		if value := r.lookup(v[0]); value != "" && value != "0" {
			r.warn("$%s=%q has no effect: %s", v[0], value, v[1])
		}
	}
}

// program is the command of a worker.
type program struct {
	path string
	args []string // argv, [0] included
	own  int      // how many of args are no arguments of the script
	name string   // for the failure report
}

// work is a digest of the workers' program; "" if they execute nothing.
func (s *settings) work() string {
	if s.params.CheckOnly {
		return ""
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%q", s.program.args))
	return hex.EncodeToString(sum[:16])
}

// entrypoint finds the interpreter and the script, and checks them now: a typo must
// not cost a rendezvous.
func (r *resolver) entrypoint() error {
	if r.c.Bool("check-only") {
		r.s.program = nothing()
		return nil
	}
	args := r.c.Args()
	script, rest := args[0], args[1:]
	module, noPython, runPath := r.c.Bool("module"), r.c.Bool("no-python"), r.c.Bool("run-path")
	r.s.findPython = r.python // for a command that is ordered
	switch {
	case noPython && module:
		return fmt.Errorf("--no-python and --module contradict each other: use one of them")
	case noPython && !runPath:
		return r.executable(script, rest)
	}
	python, err := r.python()
	if err != nil {
		return err
	}
	argv := []string{python, "-u"}
	switch {
	case runPath:
		const run = "import runpy,sys; sys.argv=sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
		argv = append(argv, "-c", run, script)
	case module:
		argv = append(argv, "-m", script)
	default:
		argv = append(argv, script)
	}
	if !module && !strings.Contains(script, "$") {
		if err := checkScript(r.s.inWorkdir(script)); err != nil {
			return err
		}
	}
	r.s.program = program{path: python, args: append(argv, rest...), own: len(argv), name: script}
	return nil
}

func (r *resolver) executable(script string, rest []string) error {
	found := script
	if strings.Contains(script, "/") {
		found = r.s.inWorkdir(script)
	}
	path, err := r.host.lookPath(found)
	switch {
	case err != nil && r.s.called.command.Alone:
		return &unusableError{fmt.Errorf("cannot execute %q: %w", script, err)}
	case err != nil:
		return &unusableError{fmt.Errorf("--no-python: cannot execute %q: %w", script, err)}
	}
	r.s.program = program{path: path, args: append([]string{script}, rest...), own: 1, name: script}
	return nil
}

// unusableError is the error of a program that cannot be executed: not a usage error as in argparse.
type unusableError struct{ error }

func (e *unusableError) Unwrap() error { return e.error }

// checkScript opens the script as Python will. A directory or a zip file with a
// __main__ is a script, too.
func checkScript(script string) error {
	info, err := os.Stat(script)
	if err == nil && info.Mode().IsRegular() {
		err = readable(script)
	}
	if err != nil {
		wd, _ := os.Getwd()
		return &unusableError{fmt.Errorf("training script: %w (working directory %s)", err, wd)}
	}
	if info.IsDir() {
		if _, err := os.Stat(filepath.Join(script, "__main__.py")); err != nil {
			return &unusableError{fmt.Errorf("training script %s is a directory without a __main__.py", script)}
		}
	}
	return nil
}

func readable(file string) error {
	f, err := openfile.OpenLinked(file)
	if err != nil {
		return err
	}
	return f.Close()
}

// terminates reports whether the signal ends the job.
func (s *settings) terminates(sig os.Signal) bool {
	n, ok := sig.(syscall.Signal)
	return ok && slices.Contains(s.signals, n)
}
