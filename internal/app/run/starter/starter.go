// Package starter starts the launchers of several hosts, prints their output, passes signals on to them, and ends as
// they end. It takes no part in the job itself: its own host's launcher is a process like the others'.
package starter

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/app/ckptd"
	"dlrover-run/internal/console"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/argv/native"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc/guard"
	"dlrover-run/launcher/remote"
)

// defaultFanOut bounds the connections that are being made at the same time.
const defaultFanOut = 128

// Config describes the job.
type Config struct {
	Name  string      // of the launcher, which may be another's
	Level slog.Level  // the least level of the starter's lines
	Link  *guard.Link // nil: there is none
	Job   *native.Remote
	Codes policy.CodePolicy
	Memo  remote.Memo // of every host, but for its rank
}

// Starter is the job's launchers.
type Starter struct {
	Config
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

// New prepares the program that remote hosts execute.
func New(cfg Config) (s *Starter, err error) {
	n := len(cfg.Job.Hosts)
	s = &Starter{Config: cfg, out: remote.NewPrinter(os.Stdout), err: remote.NewPrinter(os.Stderr),
		muster: remote.NewMuster(n, cfg.Job.Least), sessions: make([]*remote.Session, n), events: make(chan event, 2*n)}
	s.program, err = remote.OpenProgram()
	return s, err
}

// Run runs the job to its end, and returns the exit status.
func (s *Starter) Run(signals <-chan os.Signal, notes []string) int {
	defer s.program.Close()
	console.Stderr.Through(s.err)
	defer console.Stderr.Through(nil)
	for _, n := range notes {
		s.say(slog.LevelInfo, "%s", n)
	}
	for s.muster.Left() > 0 {
		s.connect()
		s.await(signals)
	}
	return s.code()
}

// connect begins as many sessions as there may be at a time.
func (s *Starter) connect() {
	for s.begun < len(s.sessions) && s.connecting < cmp.Or(s.Job.FanOut, defaultFanOut) {
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
func (s *Starter) ended() bool { return s.late != nil }

func (s *Starter) follow(host int, session *remote.Session) {
	select {
	case <-session.Ready():
	case <-session.Done():
	}
	s.events <- event{host: host}
	<-session.Done()
	s.events <- event{host: host, over: true}
}

func (s *Starter) target(host int) remote.Target {
	t := remote.Target{Name: s.Job.Hosts[host], SSH: s.Job.SSH, Program: s.program, Memo: s.Memo, Out: s.out, Err: s.err}
	t.Memo.Args = append([]string{fmt.Sprintf("--node_rank=%d", host)}, s.Job.Args...)
	if host != s.Job.Here || s.Job.Forced {
		t.Shell = remote.Command(s.Job.Shell, t.Name, host)
	}
	return t
}

// await waits for the next event.
func (s *Starter) await(signals <-chan os.Signal) {
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
func (s *Starter) leftBehind() string {
	var names []string
	for host, session := range s.sessions {
		if session != nil {
			names = append(names, s.Job.Hosts[host])
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
func (s *Starter) pass(sig syscall.Signal) {
	ends := sig != syscall.SIGUSR1 && sig != syscall.SIGUSR2
	if ends {
		s.told = cmp.Or(s.told, sig)
		s.finish(s.Memo.Grace)
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
func (s *Starter) finish(within time.Duration) {
	s.muster.End()
	if at := time.Now().Add(within); s.late == nil || at.Before(s.until) {
		s.until, s.late = at, time.After(within)
	}
}

// endAll ends a job that has failed. Launchers that are ending may write their last checkpoints.
func (s *Starter) endAll() {
	s.finish(s.Memo.Grace + s.Memo.Drain)
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
func (s *Starter) hostEnded(host int, end remote.Ending) {
	told := s.ended()
	verdict := s.muster.Ended(host, end)
	name := s.Job.Hosts[host]
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

func (s *Starter) sayTheEnd() {
	s.say(slog.LevelWarn, "the other hosts cannot go on without it, and are told to end")
}

// say prints a line of the starter's own.
func (s *Starter) say(level slog.Level, format string, args ...any) {
	if level < s.Level {
		return
	}
	text := text.EscapeLine(fmt.Sprintf(format, args...))
	if level == slog.LevelError {
		text = "error: " + text
	}
	fmt.Fprintf(console.Stderr, "%s: %s\n", s.Name, text)
}

// code is the exit status: that of the host whose end was the job's.
func (s *Starter) code() int {
	host, end := s.muster.Culprit()
	switch {
	case s.told != 0 && s.muster.Succeeded() < len(s.Job.Hosts):
		return policy.Signaled(int(s.told)).Code(s.Codes, policy.Nobody)
	case host < 0:
		return 0
	case end.Failure == nil:
		return end.Status
	case end.Started:
		return policy.NodeLost.Code(s.Codes, policy.Nobody)
	}
	return policy.RendezvousTimeout.Code(s.Codes, policy.Nobody)
}

// bequeath has the guard spare the processes that outlive the starter on this host. An agent ends its launcher as
// agents of other hosts do, with time for the last checkpoints. After the launcher, its checkpoint daemon remains.
func (s *Starter) bequeath(host int) {
	if s.Link == nil || host != s.Job.Here {
		return
	}
	if session := s.sessions[host]; session != nil {
		s.Link.RegisterSurvivors("", []int{session.PID()})
	} else {
		s.Link.RegisterSurvivors("", daemonsOf(os.Getppid()))
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
