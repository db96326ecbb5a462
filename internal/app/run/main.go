// Package run is dlrover-run, which launches the workers of a distributed training job on this node.
package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/app/ckptd"
	"dlrover-run/internal/app/guarded"
	"dlrover-run/internal/app/run/deathnotice"
	"dlrover-run/internal/app/run/elector"
	"dlrover-run/internal/app/run/events"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/findings"
	"dlrover-run/internal/app/run/metrics"
	"dlrover-run/internal/app/run/pypath"
	"dlrover-run/internal/app/run/xputimer"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/console"
	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/proc/guard"
	"dlrover-run/launcher/proc/inbox"
	"dlrover-run/launcher/remote"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Main is the program; it does not return.
func Main() {
	started := time.Now()
	if os.Args[0] == ckptd.Name {
		os.Exit(ckptd.Main(os.Args[1:], os.Stdout))
	}
	if len(os.Args) > 1 && os.Args[1] == remote.Argument {
		os.Exit(remote.Main(os.Args[2:]))
	}
	if guarded.BecomesCommand(os.Args) {
		os.Exit(xputimer.Become(os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
	}
	link, watch, err := guarded.Role()
	if watch != nil {
		var stderr io.Writer = console.Stderr
		if os.Args[0] == guard.ShelterName { // it is the command's
			stderr = io.Discard
		}
		proc.EndLeftovers(watch, stderr)
		console.Stderr.Flush()
		os.Exit(watch.Follow())
	}
	code := run(started, os.Args, os.Stdout, link, err)
	console.Stderr.Flush()
	os.Exit(code)
}

// run gets the link to its guard, or the reason for its absence.
func run(started time.Time, args []string, stdout io.Writer, link *guard.Link, unguarded error) int {
	if errors.Is(unguarded, guard.ErrNoRoom) {
		console.Complain(console.Stderr, "dlrover-run", unguarded)
		return refused(unguarded, policy.CannotExecute, policy.TorchrunCodes)
	}
	in := inbox.New(link)
	defer in.Close()
	host, as := thisHost(os.LookupEnv), calledAs(args)
	if as.started(); as.starter != nil {
		in.Relayed()
	}
	c, err := as.parse(args[1:], os.LookupEnv, host, stdout)
	if err != nil {
		as.usage(err)
		return refused(err, policy.Usage, policy.TorchrunCodes)
	}
	if as.command.Become != nil {
		return as.become(host, in, stdout)
	}
	if as.command.Remote != nil {
		return as.start(in, link, stdout)
	}
	if c == nil {
		return 0
	}
	s, err := resolveAs(as, c, os.LookupEnv, host)
	if err != nil {
		return refuse(err, &s)
	}
	if s.dryRun {
		return printPlan(stdout, &s, host)
	}
	if unguarded != nil {
		s.warnings = append(s.warnings,
			"no guard: whatever workers start lives on if this launcher is killed: "+unguarded.Error())
	}
	return launch(started, &s, host, in, link)
}

// refuse reports why nothing was started.
func refuse(err error, s *settings) int {
	var unusable *unusableError
	if errors.As(err, &unusable) {
		console.Complain(console.Stderr, "dlrover-run", err)
		if s.called.command.Alone {
			return refusedWith(err, policy.CannotExecute, xputimer.ShellStatus(err))
		}
		return refused(err, policy.CannotExecute, s.restarts.codes)
	}
	s.called.usage(err)
	return refused(err, policy.Usage, s.restarts.codes)
}

// nodeJob is this node's part of the job: everything that launch opens, in the order of opening.
type nodeJob struct {
	s        *settings
	level    *slog.LevelVar // of log
	log      *slog.Logger
	runsLog  *slog.Logger  // as log, for lines that name their run themselves
	events   events.Writer // writes nothing without --event-log
	logs     *logs.Logs
	procs    *proc.Supervisor
	endpoint *endpoint
	adapter  *adapter
	findings *findings.Queue
	notice   atomic.Pointer[deathnotice.Notice] // nil: none is ready
	metrics  *metrics.Server                    // nil: metrics are off
	elector  *elector.Elector                   // nil: nobody is elected
	python   *pypath.Path
	opened   []*feature.Opened // the requested features
	ended    bool              // their parts are
	unsaved  error             // why a job that has succeeded lacks checkpoints on disk
	guard    *guard.Link       // nil: there is none
	inbox    *inbox.Inbox
	signals  chan os.Signal
}

// lingerBudget bounds how long the node that serves the rendezvous waits for the others: the death of a node is
// detected within it.
const lingerBudget = 20 * time.Second

func launch(started time.Time, s *settings, host hostFacts, in *inbox.Inbox, link *guard.Link) int {
	_ = os.Unsetenv(guard.TokenVariable) // no child inherits it
	j := &nodeJob{s: s, guard: link, inbox: in, level: new(slog.LevelVar)}
	j.level.Set(s.called.logLevel())
	j.runsLog = console.Logger(console.Stderr, "dlrover-run", s.logs.format, j.level).With("host", s.node.Name)
	j.log = j.runsLog.With("run_id", s.runID)
	console.Libraries(j.log)
	s.auth.job.LogTo(j.log)
	j.python = pypath.New(s.shmDir, j.log)
	for _, w := range s.warnings {
		j.log.Warn(w)
	}
	if text := s.scheduledText(); text != "" {
		j.log.Info(text)
	}
	if s.framework.why != "" {
		j.log.Info("--preset=auto has chosen "+s.framework.preset.Name, "why", s.framework.why)
	}
	for _, n := range s.called.command.Notes {
		j.log.Info(n)
	}
	if w := preset.OMPWarning(s.size.slots, preset.LookupEnv(s.called.variables(os.LookupEnv))); w != "" {
		j.log.Info(w)
	}
	j.catchSignals()
	res, err := j.execute(started, host)
	if err != nil {
		res = launcher.Result{Reason: reasonOf(err), Err: j.s.called.twice(err)}
	}
	if j.logs != nil {
		j.logs.Stderr().FreshLine()
	}
	if res.Reason == policy.Success { // which its last checkpoints decide
		res = j.awaitSaves(res)
	}
	code := res.Reason.Code(s.restarts.codes, res.Blame)
	if s.called.command.Alone {
		code = statusOf(res, code)
	}
	j.conclude(res)
	j.sayLastWords(res, code)
	j.close(res)
	return code
}

func (j *nodeJob) execute(started time.Time, host hostFacts) (res launcher.Result, err error) {
	if err = j.open(); err != nil {
		return res, err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	stop := j.interruptible(cancel)
	session, err := j.join(ctx, started, host)
	stop()
	if sig, ok := errors.AsType[*signalError](context.Cause(ctx)); ok {
		j.notice.Load().Drop()
		if session != nil {
			session.Close()
		}
		return launcher.Result{Reason: policy.Signaled(int(sig.sig)), Signal: sig.sig}, nil
	}
	if err != nil {
		return res, err
	}
	j.s.called.starter.Joined()
	defer j.s.called.starter.Ended()
	j.adapter = newAdapter(session, j.endpoint.acl)
	j.findings = findings.New(j.log, j.sendFinding)
	j.adapter.progress, j.adapter.findings = j.progress, j.findings
	j.adapter.bar, j.adapter.notice = j.barSelf, j.notice.Load()
	j.adapter.notice.Joined(session)
	j.joinedFeatures()
	j.python.Tidy()
	agent, err := launcher.New(j.agentConfig(host))
	if err != nil {
		return res, err
	}
	return agent.Run(), nil
}

func (j *nodeJob) sendFinding(ctx context.Context, text string) error {
	f := service.Finding{ID: j.s.node.ID, Text: text}
	switch {
	case j.endpoint.Upstream() != nil: // DLRover's master stores no findings
		return nil
	case j.endpoint.Served() != nil:
		return j.endpoint.Served().Found(j.s.runID, f)
	}
	return j.endpoint.Client().Call(ctx, j.s.runID, "findings", f, nil)
}

// maxOrderText bounds the text of an order, in bytes.
const maxOrderText = 1024

// barSelf excludes all launchers of this node's name from the world.
func (j *nodeJob) barSelf(ctx context.Context, reason string) error {
	text := text.Clip(text.EscapeLine(reason), maxOrderText)
	return j.endpoint.order(ctx, j.s.runID, rendezvous.Order{
		Kind: rendezvous.OrderBar, Node: j.s.node.Name, Cause: job.CauseHang, Text: text,
	})
}

// retryServing is how long a second launcher on the endpoint's host tries to join the first. Then it tries to serve
// again, because the first may be ending.
const retryServing = 2 * time.Second

// join binds the servers of this node and introduces it to the rendezvous.
func (j *nodeJob) join(ctx context.Context, started time.Time, host hostFacts) (*api.Session, error) {
	if err := j.elect(ctx); err != nil {
		return nil, err
	}
	for begin := time.Now(); ; {
		var err error
		if j.endpoint, err = openEndpoint(ctx, j.s, host, j.log, j.runsLog, j.observe); err != nil {
			return nil, err
		}
		session, err := j.introduce(ctx, started)
		if err == nil || !j.endpoint.second || api.Final(err) || ctx.Err() != nil {
			return session, classify(err)
		}
		if time.Since(begin) > j.s.rdzv.connect {
			return nil, classify(j.endpoint.takenByStranger(err, j.s))
		}
		j.notice.Load().Drop()
		j.endpoint.close()
		j.endpoint = nil
		time.Sleep(50 * time.Millisecond) // a process that is ending still has the port
	}
}

// introduce joins the run, in its group if there are any.
func (j *nodeJob) introduce(ctx context.Context, started time.Time) (*api.Session, error) {
	j.followElected()
	if err := j.enterGroup(ctx); err != nil {
		return nil, err
	}
	j.notice.Store(deathnotice.New(j.guard, j.endpoint.Client(), j.s.runID, j.s.node.ID))
	if m := j.endpoint.master; m != nil {
		m.Check = j.upstreamCheck()
		m.Chosen = func() { j.notice.Load().Drop() } // the death notice is for our own daemon
	}
	cfg := j.sessionConfig(started)
	if j.endpoint.second {
		cfg.ConnectTimeout = min(cfg.ConnectTimeout, retryServing)
	}
	return api.Open(ctx, j.endpoint.svc, cfg)
}

// open prepares all that can fail before any other node is contacted.
func (j *nodeJob) open() (err error) {
	if err = j.openFeatures(); err != nil { // first, because some run in the background
		return err
	}
	if j.logs, err = logs.New(j.logsConfig()); err != nil {
		return &launcher.ReasonError{Reason: policy.LogDir, Err: err}
	}
	console.Stderr.Through(j.logs.Stderr())
	cfg := proc.Config{Logger: j.log}
	if j.guard != nil {
		cfg.RegisterSurvivors = j.guard.RegisterSurvivors
	}
	if j.procs, err = proc.New(cfg); err != nil {
		return err
	}
	j.inbox.WhenOrphaned(j.orphaned)
	return nil
}

// orphaned ends the launcher's processes, while it reports to the rendezvous that this node is lost.
func (j *nodeJob) orphaned() {
	f := j.notice.Load()
	var told sync.WaitGroup
	told.Go(f.Say)
	_ = j.procs.Abandon()
	told.Wait()
}

func (j *nodeJob) observe(run string, n rendezvous.Note) {
	j.events.Rendezvous(n)
	if n.Event == job.EventLastCall || n.Event == job.EventResume || n.Event == job.EventAddress {
		j.log.Info("rendezvous: "+string(n.Event), "text", n.Text)
	}
}

func (j *nodeJob) logsConfig() logs.Config {
	l := &j.s.logs
	cfg := logs.Config{
		Dir: l.dir, RunID: j.s.runID, Files: l.files(max(j.s.size.slots, 1)), PrefixTemplate: l.prefix,
		StdoutFilters: l.outFilters, StderrFilters: l.errFilters,
		Redirects:  func(r int) logs.Std { return logs.Std(l.redirects.For(r)) },
		Tee:        func(r int) logs.Std { return logs.Std(l.tee.For(r)) },
		RotateSize: l.rotateSize, RotateCount: l.rotateCount, Stdout: os.Stdout, Stderr: os.Stderr, Logger: j.log,
	}
	j.tapFeatures(&cfg)
	if l.ranks != nil {
		cfg.ConsoleRank = func(r int) bool { return l.ranks[r] }
	}
	return cfg
}

func (j *nodeJob) sessionConfig(started time.Time) api.SessionConfig {
	cfg := api.SessionConfig{
		Run: j.s.runID, Node: j.s.node, Params: j.s.params, Where: j.endpoint.where, Started: started,
		ConnectTimeout: j.s.rdzv.connect, OnResume: j.s.hold.onResume, Work: j.s.work(), Logger: j.log,
	}
	w := newWaiting(j.log, j.s.logs.format)
	cfg.Waiting, cfg.WaitingEvery = w.told, w.every()
	if j.endpoint.failover != nil {
		cfg.Succession = j.endpoint.failover
	}
	return cfg
}

func (j *nodeJob) agentConfig(host hostFacts) launcher.Config {
	cfg := j.s.agent(host)
	cfg.Rendezvous, cfg.Store, cfg.Processes, cfg.Logs = j.adapter, j.endpoint, j.procs, j.logs
	cfg.Parts, cfg.Env = j.parts(), j.python.Environ(cfg.Env)
	cfg.Signals, cfg.Terminate = j.signals, j.s.shutdown.ends
	cfg.Logger = j.log
	if j.s.called.command.Alone {
		cfg.Substitute = func(arg string, _ int) string { return arg } // the command has no placeholders
	}
	j.configureFeatures(&cfg)
	cfg.LogsKept = j.s.logs.files(max(j.s.size.slots, 1))
	if memory := j.procs.Memory(); memory != nil {
		cfg.Memory = memory.Read
	}
	return cfg
}

// agent is the part of the launcher's configuration that needs no opened parts.
func (s *settings) agent(host hostFacts) launcher.Config {
	return launcher.Config{
		RunID: s.runID, Role: s.node.Role, NodeName: s.node.Name, Host: host.name, Addr: s.node.Addr, Slots: s.size.slots,
		Path: s.program.path, Args: s.program.args, Own: s.program.own, Name: s.program.name,
		Env: s.workerEnv(), Stdin: os.Stdin, Preset: s.framework.preset, MemoryPolicy: s.binding.Memory,
		VirtualLocalRank: s.framework.virtual, OldTorch: s.framework.oldTorch, CPUs: s.binding.CPUs,
		Policy: s.restarts.policy, ShutdownTimeout: s.shutdown.timeout,
		SignalNames: s.shutdown.text, Substitute: argv.SubstituteLocalRank, Dir: string(s.program.dir),
		Meanwhile:   s.hold.meanwhile,
		ServicePort: s.framework.port, Servers: s.framework.servers, Share: s.size.share, Devices: s.framework.devices,
		Device:     s.framework.device,
		LeaveGrace: s.hold.leaveGrace, Resolve: s.program.resolve, Restart: s.shutdown.restart,
	}
}

// workerEnv is the environment that workers inherit. It lacks the job token, which is for launchers (a --dry-run
// still has it), and it has the variables of another launcher's command line.
func (s *settings) workerEnv() []string {
	env := os.Environ()
	if len(s.called.command.Env) > 0 {
		env = preset.MergeEnv(env, s.called.command.Env)
	}
	if extra := s.replicas.env(strconv.Itoa(s.params.Group.Index)); extra != nil {
		env = preset.MergeEnv(env, extra)
	}
	return slices.DeleteFunc(env, func(kv string) bool { return strings.HasPrefix(kv, guard.TokenVariable+"=") })
}

// catchSignals catches the job's signals, and those that a PID 1 has to forward.
func (j *nodeJob) catchSignals() {
	j.signals = make(chan os.Signal, 16)
	j.inbox.Catch(j.signals, j.s.shutdown.signals...)
	j.inbox.Catch(j.signals, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH)
	console.OutliveReaders() // a console that is gone must not end training
}

type signalError struct{ sig syscall.Signal }

func (e *signalError) Error() string { return "received " + e.sig.String() }

// interruptible cancels on a terminating signal until the returned function is called.
func (j *nodeJob) interruptible(cancel context.CancelCauseFunc) (stop func()) {
	quit, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		for {
			select {
			case s := <-j.signals:
				if j.s.shutdown.ends(s) {
					cancel(&signalError{s.(syscall.Signal)})
					return
				}
			case <-quit:
				return
			}
		}
	}()
	return func() { close(quit); <-gone }
}

// conclude logs the end of the job.
func (j *nodeJob) conclude(res launcher.Result) {
	j.events.Ended(res)
	switch {
	case res.Err != nil:
		console.Complain(console.Stderr, "dlrover-run", res.Err)
	case j.summary(res) != "":
		fmt.Fprintln(console.Stderr, j.summary(res))
	}
	if res.Verdict != "" && slices.ContainsFunc(res.Local, func(f verdict.Failure) bool { return !f.Stopped }) {
		fmt.Fprintln(console.Stderr, text.Escape(verdict.Block(j.s.program.name, res.Local, res.Root)))
		j.copyErrorFile(res.Local[res.Root])
	}
}

// jobName is the job in messages; "none" is torchrun's default id, which names nothing.
func (s *settings) jobName() string {
	if s.runID == "none" {
		return "the job"
	}
	return "job " + s.runID
}

// copyErrorFile hands the root cause to the launcher of this launcher, as torchrun does.
func (j *nodeJob) copyErrorFile(f verdict.Failure) {
	to := os.Getenv("TORCHELASTIC_ERROR_FILE")
	if to == "" || f.ErrorFile == "" {
		return
	}
	data, err := launcher.ReadBounded(f.ErrorFile, launcher.MaxErrorFile)
	if err == nil {
		data, err = verdict.AmendErrorFile(data, f.ExitCode)
	}
	if err == nil {
		err = openfile.WriteNamed(to, data, 0o644)
	}
	if err != nil {
		j.log.Warn("cannot copy the error file for the parent launcher", "from", f.ErrorFile, "to", to, "err", err)
	}
}

func (j *nodeJob) close(res launcher.Result) {
	j.endParts(res)
	if j.procs != nil {
		j.closing("end processes", j.endProcesses())
	}
	j.releaseFeatures()
	j.python.Close()
	if j.adapter != nil && res.Err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, _ = j.adapter.Leave(ctx, res.Err.Error(), nil) // the daemon may be why we end
		cancel()
	}
	switch {
	case j.endpoint == nil || j.adapter == nil && res.Signal != 0: // it has not joined
	case res.Signal == 0:
		j.endpoint.linger(j.s.lingers(), j.signals)
		j.lingerElected()
	default:
		j.endpoint.handOver(j.s.runID, j.signals)
	}
	if j.adapter != nil {
		j.adapter.close()
	}
	if j.endpoint != nil {
		j.endpoint.close()
	}
	j.dismiss()
	console.Stderr.Through(nil)
	if j.logs != nil {
		j.closing("close logs", j.logs.Close())
	}
	j.closeFeatures()
}

// awaitSaves ends the parts of a job after its workers have succeeded. A job that has lost its last save has failed.
func (j *nodeJob) awaitSaves(res launcher.Result) launcher.Result {
	j.endParts(res)
	j.unsaved = j.unsavedFeatures()
	if j.unsaved != nil {
		res.Reason = policy.SaveLost
	}
	return res
}

// endParts gives the parts the time that is left at the job's end; the next signal ends it. A second call does
// nothing.
func (j *nodeJob) endParts(res launcher.Result) {
	if len(j.opened) == 0 || j.ended {
		return
	}
	j.ended = true
	enough, done := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-j.signals:
			close(enough)
		case <-done:
		}
	})
	launcher.EndParts(j.parts(), launcher.EndRequest{Result: res, Budget: j.drainBudget(res), Enough: enough})
	close(done)
	wg.Wait()
}

// maxDrain bounds the wait for the last checkpoints of a job that was not ordered to end.
const maxDrain = 10 * time.Minute

// drainBudget limits the time of the last checkpoints. A node that leaves has until its deadline. A signal without a
// deadline allows as long as the workers had.
func (j *nodeJob) drainBudget(res launcher.Result) time.Duration {
	switch {
	case !res.Deadline.IsZero():
		return max(0, time.Until(res.Deadline))
	case res.Signal != 0:
		return j.s.shutdown.timeout
	}
	return maxDrain
}

func (j *nodeJob) closing(what string, err error) {
	if err != nil {
		j.log.Warn(what, "err", err)
	}
}

func reasonOf(err error) policy.Reason {
	if re, ok := errors.AsType[*launcher.ReasonError](err); ok {
		return re.Reason
	}
	return policy.Unclassified
}
