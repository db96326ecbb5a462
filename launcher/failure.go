package launcher

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

// MaxErrorFile bounds the part of a worker's error file that is read: a Python traceback is a few KiB.
const MaxErrorFile = 1 << 20

// lastLines is how much of a failed worker's standard error travels with its failure.
const lastLines = 2 << 10

// failures describes the failures of this node's workers, and decides on the answer.
type failures struct {
	cfg     *Config
	memory  memory
	decider *policy.Decider
}

func newFailures(c *Config) *failures { return &failures{c, c.Memory, policy.NewDecider(c.Policy)} }

// bare is a failure without evidence from files.
func (r *failures) bare(g *group, w *worker, exit proc.Exit) verdict.Failure {
	return verdict.Failure{
		Node: g.epoch.Place.GroupRank, NodeName: r.cfg.NodeName, Host: r.cfg.Host,
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
func (r *failures) describe(g *group, w *worker, exit proc.Exit) verdict.Failure {
	f := r.bare(g, w, exit)
	f.Timer = w.timer
	r.readErrorFile(&f)
	stdout, stderr := w.out.Tail()
	f.LastLines = tailText(stderr)
	if !f.Tells() && (exit.Signal == 0 || f.Stopped) { // some loggers write to standard output
		f.LastLines = withStdout(plainText(stdout), plainText(stderr))
	}
	if f.Timer == "" && (exit.Signal == syscall.SIGKILL || f.LostChild()) {
		f.OOM = r.memory.since(g.oomKills)
	}
	return f
}

func (r *failures) readErrorFile(f *verdict.Failure) {
	path := f.ErrorFile
	data, err := ReadBounded(path, MaxErrorFile)
	if err != nil {
		f.ErrorFile = "" // @record was not used, or the worker had no time to write
		return
	}
	rep, err := verdict.ParseErrorFile(data)
	if err != nil {
		r.cfg.Logger.Warn("cannot read a worker's error file", "path", path, "err", err)
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

// memory reads the OOM kills of this container; nil when it cannot be read.
type memory func() (proc.MemoryState, error)

// kills is how many there were.
func (m memory) kills() int64 {
	if m == nil {
		return 0
	}
	s, err := m()
	if err != nil {
		return 0
	}
	return s.OOMKills
}

// since returns nil unless the kernel has killed for memory since there were so many kills.
func (m memory) since(before int64) *verdict.OOM {
	if m == nil {
		return nil
	}
	s, err := m()
	if err != nil || s.OOMKills <= before {
		return nil
	}
	return &verdict.OOM{Limit: s.Limit, Peak: s.Peak}
}

// cannotStart is the failure of a worker that never ran.
func (r *failures) cannotStart(g *group, err error) verdict.Failure {
	i := len(g.workers)
	return verdict.Failure{
		Node: g.epoch.Place.GroupRank, NodeName: r.cfg.NodeName, Host: r.cfg.Host,
		Rank: g.epoch.Place.RankBase + i, LocalRank: i, Role: r.cfg.Role,
		ExitCode: cannotStartCode, At: now(), Message: err.Error(),
	}
}

// cannotStartCode is a shell's exit code for a program that cannot be executed.
const cannotStartCode = 126

// decide asks the policy for the answer to a failure of this node, and notes that in f.
func (r *failures) decide(g *group, w *worker, f *verdict.Failure) policy.Action {
	return r.decideBy(g, f, w.out.Tail)
}

// decideBy is decide with the end of the worker's output.
func (r *failures) decideBy(g *group, f *verdict.Failure, tail func() (stdout, stderr []byte)) policy.Action {
	e := policy.Exit{
		Code: f.ExitCode, Exceptions: f.Exceptions(), OOM: f.OOM != nil, Hung: f.Timer != "" || f.Timeout() != "",
		Follows: f.Follows(),
	}
	if r.cfg.Policy.NeedsText() {
		stdout, stderr := tail()
		e.Text = strings.Join([]string{f.Message, f.Traceback, verdict.Plain(stderr), verdict.Plain(stdout)}, "\n")
	}
	d := r.decider.Decide(now(), e)
	f.Policy, f.Permanent = d.Why(), d.Action == policy.Fail
	if f.Policy != "" {
		r.cfg.observe(DecideInfo{g.epoch, *f, d})
	}
	return d.Action
}

// complete fills in the missing fields of a failure from outside.
func (r *failures) complete(g *group, f *verdict.Failure) {
	f.Node, f.NodeName, f.Host = g.epoch.Place.GroupRank, r.cfg.NodeName, r.cfg.Host
	f.Role = cmp.Or(f.Role, r.cfg.Role)
	f.ExitCode = cmp.Or(f.ExitCode, 1)
	if f.At.IsZero() {
		f.At = now()
	}
}

// ofSide is the failure of a side process, and its consequence. The node's first rank stands for it, where it has none
// that of the next node that has some.
func (r *failures) ofSide(g *group, s *side, exit proc.Exit) (verdict.Failure, policy.Action) {
	out := s.out.Tail(drainBudget)
	f := verdict.Failure{
		Rank: g.epoch.Place.RankBase, PID: s.proc.PID(), Role: s.name, ExitCode: exit.Code, At: exit.At,
		LastLines: tailText(out),
	}
	if exit.Signal == syscall.SIGKILL {
		f.OOM = r.memory.since(g.oomKills)
	}
	r.complete(g, &f)
	f.Message = "the " + s.name + " beside the workers ended before they did"
	if said := strings.TrimSpace(f.LastLines); said != "" && exit.Code > 0 { // a signal explains itself
		f.Message += `, last output "` + said[strings.LastIndexByte(said, '\n')+1:] + `"`
	}
	return f, r.decideBy(g, &f, func() (_, _ []byte) { return nil, out })
}

// ofWorld is the failure to fetch the world of e. It blames the first worker of this node, as none has been started.
func (r *failures) ofWorld(e Epoch, err error) verdict.Failure {
	return verdict.Failure{
		Node: e.Place.GroupRank, NodeName: r.cfg.NodeName, Host: r.cfg.Host, Rank: e.Place.RankBase, Role: r.cfg.Role,
		ExitCode: 1, At: now(),
		Message: fmt.Sprintf("cannot fetch the world of round %d, epoch %d from the rendezvous: %s",
			e.Round, e.Directive.Epoch, err),
	}
}
