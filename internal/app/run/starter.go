package run

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/app/ckptd"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/console"
	"dlrover-run/internal/duration"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/argv/native"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc/guard"
	"dlrover-run/launcher/proc/inbox"
	"dlrover-run/launcher/remote"
	"dlrover-run/launcher/scheduler"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// A starter starts the launchers of several hosts, prints their output, passes signals on to them, and ends as they
// end. It takes no part in the job itself: its own host's launcher is a process like the others'.

// defaultFanOut bounds the connections that are being made at the same time.
const defaultFanOut = 128

// starter is the job's launchers.
type starter struct {
	as       *invocation
	link     *guard.Link // nil: there is none
	job      *native.Remote
	codes    policy.CodePolicy
	memo     remote.Memo // of every host, but for its rank
	program  *remote.Program
	out, err *remote.Printer

	muster     *remote.Muster
	sessions   []*remote.Session // nil: not begun, or over
	begun      int
	connecting int
	events     chan event
	told       syscall.Signal // that ends the job; 0: none
	ending     <-chan time.Time
	late       <-chan time.Time
	until      time.Time // the time at which late fires
}

// event is a host with a launcher that is being started, or with a session that is over.
type event struct {
	host int
	over bool
}

// start runs a job of several hosts.
func (as *invocation) start(in *inbox.Inbox, link *guard.Link, stdout io.Writer) int {
	if as.command.DryRun {
		return as.printStart(stdout)
	}
	runtime.LockOSThread() // remote shells end with this thread
	defer runtime.UnlockOSThread()
	s, err := as.newStarter(os.LookupEnv)
	s.link = link
	if err != nil {
		as.usage(err)
		return policy.Usage.Code(policy.TorchrunCodes, policy.Nobody)
	}
	defer s.program.Close()
	signals := make(chan os.Signal, 16)
	in.Catch(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	console.OutliveReaders()
	console.Stderr.Through(s.err)
	defer console.Stderr.Through(nil)
	for _, n := range as.command.Notes {
		s.say(slog.LevelInfo, "%s", n)
	}
	for s.muster.Left() > 0 {
		s.connect()
		s.await(signals)
	}
	return s.code()
}

func (as *invocation) newStarter(env argv.LookupEnv) (*starter, error) {
	job := as.command.Remote
	s := &starter{as: as, job: job, out: remote.NewPrinter(os.Stdout), err: remote.NewPrinter(os.Stderr),
		muster: remote.NewMuster(len(job.Hosts), job.Least), sessions: make([]*remote.Session, len(job.Hosts)),
		events: make(chan event, 2*len(job.Hosts))}
	value, _ := env("PET_EXIT_CODE_POLICY")
	s.codes = policy.CodePolicy(value)
	err := s.codes.Validate()
	if err == nil {
		err = s.writeMemo(env)
	}
	if err == nil {
		s.program, err = remote.OpenProgram()
	}
	return s, err
}

// writeMemo gathers the settings that every host gets.
func (s *starter) writeMemo(env argv.LookupEnv) (err error) {
	m := &s.memo
	m.Name = s.as.Name
	if m.Dir, err = os.Getwd(); err != nil {
		return fmt.Errorf("working directory: %w", err)
	}
	m.Env = native.Exported(os.Environ(), m.Dir)
	o := options{env: env, host: thisHost(env)}
	if python, err := o.Python(); err == nil { // DeepSpeed's hosts run its own Python, too
		m.Env = append(m.Env, "PYTHON_EXEC="+python)
	}
	if _, set := env(console.FormatVariable); !set && console.IsTerminal(os.Stderr) {
		m.Env = append(m.Env, console.FormatVariable+"="+string(console.Text)) // the hosts have no terminal
	}
	handed := s.job.Handed
	handed.PID = os.Getppid() // the guard is the process that was started
	if m.Handed, err = json.Marshal(handed); err != nil {
		return err
	}
	if m.Token, err = jobToken(env); err != nil {
		return err
	}
	m.Grace, m.Drain = endGrace(env), maxDrain
	_, err = m.Encode()
	return err
}

// jobToken is the user's, or a new one for the nodes of this job alone.
func jobToken(env argv.LookupEnv) (string, error) {
	lookup := func(name string) string { v, _ := env(name); return v }
	given, err := token.Find(lookup("PET_TOKEN_FILE"), env)
	elsewhere := lookup("DLROVER_MASTER_ADDR") + lookup("PET_RDZV_ENDPOINT")
	if err != nil || given != "" || elsewhere != "" || strings.Trim(lookup("PET_INSECURE"), "0") != "" {
		return given, err
	}
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b), nil
}

// endGrace is how long a launcher may take to end, workers and last checkpoints included.
func endGrace(env argv.LookupEnv) time.Duration {
	shutdown, leave := 30*time.Second, time.Duration(0)
	for _, name := range []string{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"} {
		if text, set := env(name); set {
			if d, err := duration.Within(text, 0, maxGrace); err == nil { // otherwise the launchers report the error
				shutdown = d
			}
		}
	}
	if text, set := env("PET_LEAVE_GRACE"); set {
		if d, err := duration.Within(text, 0, maxLeaveGrace); err == nil {
			leave = d
		}
	}
	return max(2*shutdown, leave) + 30*time.Second
}

// connect begins as many sessions as there may be at a time.
func (s *starter) connect() {
	for s.begun < len(s.sessions) && s.connecting < cmp.Or(s.job.FanOut, defaultFanOut) {
		host := s.begun
		s.begun++
		if s.ended() {
			s.muster.Ended(host, remote.Ending{Failure: errNotStarted})
			continue
		}
		session, err := remote.Start(s.target(host))
		if err != nil {
			s.hostEnded(host, remote.Ending{Failure: err})
			continue
		}
		s.connecting++
		s.sessions[host] = session
		s.bequeath(host)
		go s.follow(host, session)
	}
}

var errNotStarted = errors.New("the job has ended before")

// ended reports whether the job is to end.
func (s *starter) ended() bool { return s.late != nil }

func (s *starter) follow(host int, session *remote.Session) {
	select {
	case <-session.Ready():
	case <-session.Done():
	}
	s.events <- event{host: host}
	<-session.Done()
	s.events <- event{host: host, over: true}
}

func (s *starter) target(host int) remote.Target {
	t := remote.Target{Name: s.job.Hosts[host], SSH: s.job.SSH, Program: s.program, Memo: s.memo, Out: s.out, Err: s.err}
	t.Memo.Args = append([]string{fmt.Sprintf("--node_rank=%d", host)}, s.job.Args...)
	if host != s.job.Here || s.job.Forced {
		t.Shell = remote.Command(s.job.Shell, t.Name, host)
	}
	return t
}

// await waits for the next event.
func (s *starter) await(signals <-chan os.Signal) {
	if s.muster.Left() == 0 {
		return
	}
	select {
	case e := <-s.events:
		if !e.over {
			s.connecting--
			return
		}
		end := s.sessions[e.host].Ending()
		s.sessions[e.host] = nil
		s.bequeath(e.host)
		s.hostEnded(e.host, end)
	case sig := <-signals:
		s.pass(sig.(syscall.Signal))
	case <-s.ending:
		s.sayTheEnd()
		s.endAll()
	case <-s.late:
		s.say(slog.LevelError, "%s", s.leftBehind())
		for _, session := range s.sessions {
			if session != nil {
				session.Close()
			}
		}
	}
}

// maxLeftBehind is how many hosts are named.
const maxLeftBehind = 10

// leftBehind lists the hosts that the starter gives up.
func (s *starter) leftBehind() string {
	var names []string
	for host, session := range s.sessions {
		if session != nil {
			names = append(names, s.job.Hosts[host])
		}
	}
	more := ""
	if n := len(names) - maxLeftBehind; n > 0 {
		names, more = names[:maxLeftBehind], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("these hosts have not ended in time, and are cut off: %s%s; see what still runs there",
		strings.Join(names, ", "), more)
}

// pass sends a signal to all launchers. A signal that ends the job ends the sessions without a launcher.
func (s *starter) pass(sig syscall.Signal) {
	ends := sig != syscall.SIGUSR1 && sig != syscall.SIGUSR2
	if ends {
		s.told = cmp.Or(s.told, sig)
		s.finish(s.memo.Grace)
	}
	for _, session := range s.sessions {
		switch {
		case session == nil:
		case session.Running():
			session.Signal(sig)
		case ends:
			session.Close()
		}
	}
}

// finish notes that the job has to end within a time.
func (s *starter) finish(within time.Duration) {
	s.muster.End()
	if at := time.Now().Add(within); s.late == nil || at.Before(s.until) {
		s.until, s.late = at, time.After(within)
	}
}

// endAll ends a job that has failed. Launchers that are ending may write their last checkpoints.
func (s *starter) endAll() {
	s.finish(s.memo.Grace + s.memo.Drain)
	for _, session := range s.sessions {
		switch {
		case session == nil:
		case session.Running():
			session.Leave()
		default:
			session.Close()
		}
	}
}

// hostEnded reacts to the end of a host's launcher.
func (s *starter) hostEnded(host int, end remote.Ending) {
	told := s.ended()
	verdict := s.muster.Ended(host, end)
	name := s.job.Hosts[host]
	switch {
	case told:
	case end.Failure != nil:
		s.say(slog.LevelError, "host %s: %v", name, end.Failure)
	case end.Status != 0:
		s.say(slog.LevelWarn, "host %s: its launcher has ended with status %d", name, end.Status)
	}
	switch {
	case told || s.muster.Left() == 0:
	case verdict == remote.EndNow:
		s.sayTheEnd()
		s.endAll()
	case verdict == remote.EndSoon && s.ending == nil:
		s.ending = time.After(remote.Patience)
	case verdict == remote.GoOn && (end.Failure != nil || end.Status != 0):
		s.say(slog.LevelWarn, "the job goes on with %d hosts", s.muster.Left())
	}
}

func (s *starter) sayTheEnd() {
	s.say(slog.LevelWarn, "the other hosts cannot go on without it, and are told to end")
}

// say prints a line of the starter's own.
func (s *starter) say(level slog.Level, format string, args ...any) {
	if level < s.as.logLevel() {
		return
	}
	text := text.EscapeLine(fmt.Sprintf(format, args...))
	if level == slog.LevelError {
		text = "error: " + text
	}
	fmt.Fprintf(console.Stderr, "%s: %s\n", s.as.Name, text)
}

// code is the exit status: that of the host whose end was the job's.
func (s *starter) code() int {
	host, end := s.muster.Culprit()
	switch {
	case s.told != 0 && s.muster.Succeeded() < len(s.job.Hosts):
		return policy.Signaled(int(s.told)).Code(s.codes, policy.Nobody)
	case host < 0:
		return 0
	case end.Failure == nil:
		return end.Status
	case end.Started:
		return policy.NodeLost.Code(s.codes, policy.Nobody)
	}
	return policy.RendezvousTimeout.Code(s.codes, policy.Nobody)
}

// bequeath has the guard spare the processes that outlive the starter on this host. An agent ends its launcher as
// agents of other hosts do, with time for the last checkpoints. After the launcher, its checkpoint daemon remains.
func (s *starter) bequeath(host int) {
	if s.link == nil || host != s.job.Here {
		return
	}
	if session := s.sessions[host]; session != nil {
		s.link.RegisterSurvivors("", []int{session.PID()})
	} else {
		s.link.RegisterSurvivors("", daemonsOf(os.Getppid()))
	}
}

// daemonsOf are the children of a guard that outlive their launcher.
func daemonsOf(parent int) (pids []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		for _, word := range strings.Fields(string(text)) {
			line, _ := os.ReadFile("/proc/" + word + "/cmdline")
			if pid, err := strconv.Atoi(word); err == nil && strings.HasPrefix(string(line), ckptd.Name+"\x00") {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func (as *invocation) printStart(w io.Writer) int {
	p, r := as.plan(), as.command.Remote
	p.Start = &planStart{Arguments: r.Args}
	for i, host := range r.Hosts {
		h := planHost{Name: host, NodeRank: i}
		if i != r.Here || r.Forced {
			h.Execute = remote.Command(r.Shell, host, i)
		}
		p.Start.Hosts = append(p.Start.Hosts, h)
	}
	for _, kv := range native.Exported(os.Environ(), absolute(".")) {
		name, _, _ := strings.Cut(kv, "=")
		p.Start.Variables = append(p.Start.Variables, name)
	}
	return printJSON(w, as.Name, p)
}

// planStart is the --dry-run output of a starter.
type planStart struct {
	Hosts     []planHost `json:"hosts"`
	Arguments []string   `json:"arguments"` // of every launcher
	Variables []string   `json:"variables"` // names of those that travel
}

type planHost struct {
	Name     string   `json:"name"`
	NodeRank int      `json:"node_rank"`
	Execute  []string `json:"execute,omitempty"` // nothing: this host
}

// started takes the settings that a starter has handed to this launcher.
func (as *invocation) started() {
	as.starter = remote.Received()
	if as.starter == nil {
		return
	}
	var handed native.Handed
	if json.Unmarshal(as.starter.Text, &handed) == nil {
		as.handed = &handed
	}
}

// twice explains the error of a job that was started more than once.
func (as *invocation) twice(err error) error {
	taken := errors.Is(err, rendezvous.ErrTaken) || errors.Is(err, api.ErrUnauthorized) ||
		errors.Is(err, syscall.EADDRINUSE)
	if as.starter == nil || !taken {
		return err
	}
	return fmt.Errorf("%w; this host's place in the job is taken: if %s was started on several hosts, start it on one, "+
		"or give all of them --no_ssh", err, as.Name)
}

// rankedBy is the scheduler that has started this command on every node, "" without one. If an operator's pods have
// ssh keys, it may have started the command in one of them only.
func rankedBy(env argv.LookupEnv, h hostFacts) string {
	name, given := env("PET_SCHEDULER")
	if name == "none" {
		return ""
	}
	f, err := scheduler.Detect(cmp.Or(name, scheduler.Auto),
		scheduler.System{Env: env, ReadFile: h.readFile, Host: h.name})
	switch f.Name {
	case "", "dlrover":
		return ""
	case "mpi", "volcano", "statefulset":
		if !given {
			return ""
		}
	}
	if err != nil || f.Nodes == 1 {
		return ""
	}
	return f.Name
}

// inPath reports whether a program can be executed.
func inPath(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}
