package launcher

import (
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// MaxErrorFile bounds the part of a worker's error file that is read: a Python traceback is a few KiB.
const MaxErrorFile = 1 << 20

// lastLines is how much of a failed worker's standard error travels with its failure.
const lastLines = 2 << 10

// bare is a failure without evidence from files.
func (a *Agent) bare(g *group, w *worker, exit proc.Exit) verdict.Failure {
	return verdict.Failure{
		Node: g.epoch.Place.GroupRank, NodeName: a.cfg.NodeName, Host: a.cfg.Host,
		Rank: w.id.Rank, LocalRank: w.id.LocalRank, PID: w.proc.PID(), Role: w.id.Role,
		ExitCode: exit.Code, At: exit.At, Stopped: g.stoppedIt(exit), ErrorFile: w.out.ErrorFile(),
	}
}

// concurrent is how long after the first failure a sibling's own end can still be on
// its way: no interpreter handles SIGTERM and exits within it.
const concurrent = 2 * time.Millisecond

// stoppedIt distinguishes an end that our own signals caused from a coincidence.
func (g *group) stoppedIt(e proc.Exit) bool {
	since := g.signaledAt.Load()
	if since == nil {
		return false
	}
	return e.Signal == g.stopSignal || e.Signal == syscall.SIGKILL || e.At.Sub(*since) > concurrent
}

// describe collects all that is known about why a worker ended.
func (a *Agent) describe(g *group, w *worker, exit proc.Exit) verdict.Failure {
	f := a.bare(g, w, exit)
	f.Timer = w.timer
	a.readErrorFile(&f)
	stdout, stderr := w.out.Tail()
	f.LastLines = tailText(stderr)
	if !f.Tells() && (exit.Signal == 0 || f.Stopped) { // some loggers write to standard output
		f.LastLines = withStdout(plainText(stdout), plainText(stderr))
	}
	if f.Timer == "" && (exit.Signal == syscall.SIGKILL || f.LostChild()) {
		f.OOM = a.oomSince(g.oomKills)
	}
	return f
}

func (a *Agent) readErrorFile(f *verdict.Failure) {
	path := f.ErrorFile
	data, err := ReadBounded(path, MaxErrorFile)
	if err != nil {
		f.ErrorFile = "" // @record was not used, or the worker had no time to write
		return
	}
	rep, err := verdict.ParseErrorFile(data)
	if err != nil {
		a.log.Warn("cannot read a worker's error file", "path", path, "err", err)
		return
	}
	f.Message, f.Traceback, f.ErrorTime = rep.Message, rep.Traceback, rep.Time
}

// ReadBounded reads a file that the workers can replace. Of a JSON text of more than limit bytes it reads the beginning
// and the end.
func ReadBounded(path string, limit int64) ([]byte, error) {
	if path == "" {
		return nil, os.ErrNotExist
	}
	f, err := openfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readEnds(f, limit)
}

func readEnds(f *os.File, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil || int64(len(data)) <= limit {
		return data, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	end := make([]byte, limit/2)
	if _, err = f.ReadAt(end, max(0, size-limit/2)); err != nil {
		return nil, err
	}
	return verdict.Splice(data[:limit/2], end), nil
}

// plainText is the text of a worker without terminal colours. On a terminal, Python 3.13 and later colour tracebacks.
func plainText(b []byte) string {
	return verdict.Unfold(strings.TrimRight(verdict.Plain(b), "\n\t "))
}

// tailText keeps whole last lines.
func tailText(b []byte) string { return verdict.Ending(plainText(b), lastLines) }

// withStdout is the end of stderr, below an error that stdout ends in: an earlier one was survived.
func withStdout(stdout, stderr string) string {
	if verdict.EndsInError(stdout) {
		stderr = strings.TrimRight(stdout+"\n"+stderr, "\n")
	}
	return verdict.Ending(stderr, lastLines)
}

func (a *Agent) oomKills() int64 {
	if a.cfg.Memory == nil {
		return 0
	}
	s, err := a.cfg.Memory()
	if err != nil {
		return 0
	}
	return s.OOMKills
}

// oomSince reports whether the kernel killed for memory in this container since the group started.
func (a *Agent) oomSince(before int64) *verdict.OOM {
	if a.cfg.Memory == nil {
		return nil
	}
	s, err := a.cfg.Memory()
	if err != nil || s.OOMKills <= before {
		return nil
	}
	return &verdict.OOM{Limit: s.Limit, Peak: s.Peak}
}

// cannotStart is the failure of a worker that never ran.
func (a *Agent) cannotStart(g *group, err error) verdict.Failure {
	i := len(g.workers)
	return verdict.Failure{
		Node: g.epoch.Place.GroupRank, NodeName: a.cfg.NodeName, Host: a.cfg.Host,
		Rank: g.epoch.Place.RankBase + i, LocalRank: i, Role: a.cfg.Role,
		ExitCode: cannotStartCode, At: now(), Message: err.Error(),
	}
}

// cannotStartCode is a shell's exit code for a program that cannot be executed.
const cannotStartCode = 126

// decide asks the policy for the answer to a failure of this node, and notes that in f.
func (a *Agent) decide(g *group, w *worker, f *verdict.Failure) policy.Action {
	return a.decideBy(g, f, w.out.Tail)
}

// decideBy is decide with the end of the worker's output.
func (a *Agent) decideBy(g *group, f *verdict.Failure, tail func() (stdout, stderr []byte)) policy.Action {
	e := policy.Exit{
		Code: f.ExitCode, Exceptions: f.Exceptions(), OOM: f.OOM != nil, Hung: f.Timer != "" || f.Timeout() != "",
		Follows: f.Follows(),
	}
	if a.cfg.Policy.NeedsText() {
		stdout, stderr := tail()
		e.Text = strings.Join([]string{f.Message, f.Traceback, verdict.Plain(stderr), verdict.Plain(stdout)}, "\n")
	}
	d := a.decider.Decide(now(), e)
	f.Policy, f.Permanent = d.Why(), d.Action == policy.Fail
	if f.Policy != "" {
		a.cfg.observe(DecideInfo{g.epoch, *f, d})
	}
	return d.Action
}

// reasonOf classifies the end of the job for --exit-code-policy.
func reasonOf(v verdict.Verdict, causeKind job.CauseKind) policy.Reason {
	if r, ordered := orderReason(causeKind); ordered {
		return r
	}
	switch {
	case v.Loss != nil:
		return policy.NodeLost
	case causeKind == job.CauseTimeout:
		return policy.RendezvousTimeout
	case v.Root == nil:
		return policy.RendezvousClosed
	case v.Root.OOM != nil:
		return policy.OutOfMemory
	case v.Root.PID == 0 && v.Root.ExitCode == cannotStartCode:
		return policy.CannotExecute
	case v.Root.Permanent:
		return policy.WorkerPermanent
	default:
		return policy.WorkerFailed
	}
}

// orderReason is the reason of a job that something outside of it has ended; false if its own nodes and workers did.
func orderReason(causeKind job.CauseKind) (policy.Reason, bool) {
	switch causeKind {
	case job.CauseCheck:
		return policy.TooFewPassed, true
	case job.CauseHang:
		return policy.Hung, true
	case job.CauseDeadline:
		return policy.Deadline, true
	case job.CauseNoStep:
		return policy.NoFirstStep, true
	case job.CauseOperator:
		return policy.OperatorStop, true
	}
	return 0, false
}

// blameOf reports whether a machine has ended the job, and which one, for --exit-code-policy=dlrover. This node is to
// blame also when another one, which failed in the same way, was the first.
func (a *Agent) blameOf(v verdict.Verdict, causeKind job.CauseKind) policy.Blame {
	if _, ordered := orderReason(causeKind); ordered || causeKind == job.CauseTimeout || v.Root == nil {
		return policy.Nobody
	}
	switch own := a.hasFailed(v.Class); {
	case v.Class == verdict.OOMKernel && own:
		return policy.OwnMemory
	case v.Class == verdict.Hardware && own:
		return policy.OwnHardware
	case v.Class == verdict.Hardware:
		return policy.OtherHardware
	}
	return policy.Nobody
}

// hasFailed reports whether a worker of this node has failed with class c.
func (a *Agent) hasFailed(c verdict.Class) bool {
	return slices.ContainsFunc(own(a.fails), func(f verdict.Failure) bool { return f.Class() == c })
}

func reasonOfErr(err error) policy.Reason {
	var re *ReasonError
	if errors.As(err, &re) {
		return re.Reason
	}
	return policy.Unclassified
}
