// Package events writes the events of a node to its event log.
package events

import (
	"log/slog"

	"dlrover-run/internal/eventlog"
	"dlrover-run/launcher"
	logrule "dlrover-run/launcher/logs/rule"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/streams"
	"dlrover-run/launcher/streams/node"
	"dlrover-run/launcher/warm"
	"dlrover-run/rendezvous"
)

// Writer writes the events of this node; docs/reference/events.md has their names and fields. Without a log it writes
// nothing.
type Writer struct{ log *eventlog.Log }

// To returns a Writer to a log.
func To(log *eventlog.Log) Writer { return Writer{log} }

// Close closes the log.
func (w Writer) Close() error { return w.log.Close() }

// Observe writes an event of the launcher.
func (w Writer) Observe(e launcher.Event) {
	switch i := e.(type) {
	case launcher.StartInfo:
		w.started(i)
	case launcher.ExitInfo:
		w.log.Event("worker-exit", slog.Int("rank", i.Worker.Rank), slog.Int("local_rank", i.Worker.LocalRank),
			slog.Int("pid", i.PID), slog.Int("exit_code", i.ExitCode), slog.Bool("stopped", i.Stopped))
	case launcher.SuccessInfo:
		w.log.Event("workers-succeeded")
	case launcher.StopInfo:
		w.log.Event("workers-stopped", slog.Int("round", i.Epoch.Round), slog.Int("epoch", i.Epoch.Epoch))
	case launcher.SignalInfo:
		w.signaled(i)
	case launcher.LeaveInfo:
		w.log.Event("leaving", slog.String("reason", i.Reason), slog.Float64("grace", i.Grace.Seconds()))
	case launcher.TimerInfo:
		w.timerExpired(i)
	case launcher.CheckInfo:
		w.checked(i)
	case launcher.BarInfo:
		w.log.Event("barred", slog.String("cause", i.Cause.Text), slog.String("cause_kind", string(i.Cause.Kind)))
	case launcher.FaultInfo:
		w.faulted(i)
	case launcher.DecideInfo:
		w.decided(i)
	}
}

func (w Writer) started(i launcher.StartInfo) {
	e, p := i.Epoch, i.Epoch.Place
	w.log.Event("start", slog.Int("round", e.Round), slog.Int("epoch", e.Epoch), slog.Int("node", p.GroupRank),
		slog.Int("nodes", p.GroupWorldSize), slog.Int("world_size", p.WorldSize), slog.Int("restart_count", p.RestartCount),
		slog.String("cause", e.Cause.Text), slog.String("cause_kind", string(e.Cause.Kind)), slog.Any("pids", i.PIDs))
}

func (w Writer) signaled(i launcher.SignalInfo) {
	name := "signal"
	if i.Again {
		name = "signal-again"
	}
	w.log.Event(name, slog.String("signal", proc.SignalName(i.Signal)))
}

func (w Writer) timerExpired(i launcher.TimerInfo) {
	w.log.Event("timer-expired", slog.Int("rank", i.Worker.Rank), slog.Int("local_rank", i.Worker.LocalRank),
		slog.Int("pid", i.PID), slog.String("scope", i.Scope), slog.String("timeout", i.After.String()),
		slog.String("signal", proc.SignalName(i.Signal)))
}

func (w Writer) checked(i launcher.CheckInfo) {
	attrs := []slog.Attr{slog.Bool("passed", i.Passed), slog.String("check", i.Part), slog.String("reason", i.Reason),
		slog.Float64("took", i.Took.Seconds())}
	if !i.Until.IsZero() {
		attrs = append(attrs, slog.Time("until", i.Until))
	}
	w.log.Event("check", attrs...)
}

func (w Writer) faulted(i launcher.FaultInfo) {
	w.log.Event("fault", slog.Int("round", i.Epoch.Round), slog.Int("epoch", i.Epoch.Epoch), slog.String("part", i.Part),
		slog.Int("rank", i.Failure.Rank), slog.Int("local_rank", i.Failure.LocalRank), slog.Int("pid", i.Failure.PID),
		slog.String("why", i.Failure.Reason()), slog.String("action", i.Action.String()))
}

func (w Writer) decided(i launcher.DecideInfo) {
	w.log.Event("policy", slog.Int("round", i.Epoch.Round), slog.Int("epoch", i.Epoch.Epoch),
		slog.Int("rank", i.Failure.Rank), slog.Int("local_rank", i.Failure.LocalRank),
		slog.String("why", i.Failure.Reason()), slog.String("action", i.Decision.Action.Word()),
		slog.String("rule", i.Failure.Policy))
}

// LogRule writes a finding of a log rule.
func (w Writer) LogRule(f logrule.Finding) {
	w.log.Event("log-rule", slog.String("rule", f.Rule.Name), slog.Int("rank", f.Rank), slog.String("found", f.Text),
		slog.Bool("over", f.Over), slog.String("action", string(f.Rule.Action)))
}

// WarmPrepared writes that the modules of warm workers have been imported.
func (w Writer) WarmPrepared(i warm.Preparation) {
	w.log.Event("warm-prepared", slog.Int("pid", i.PID), slog.Int("modules", i.Modules), slog.Int("failed", len(i.Failed)),
		slog.Float64("took", i.Took.Seconds()))
}

// WarmStart writes how a worker was started.
func (w Writer) WarmStart(i warm.Start) {
	w.log.Event("warm-start", slog.Int("rank", i.Worker.Rank), slog.Int("local_rank", i.Worker.LocalRank),
		slog.Int("pid", i.PID), slog.String("how", string(i.How)), slog.String("why", i.Why),
		slog.Float64("took", i.Took.Seconds()))
}

// Exec writes that a command is executed next to a worker.
func (w Writer) Exec(c node.Command) {
	w.log.Event("exec", slog.Int("rank", c.Rank), slog.Int("local_rank", c.LocalRank), slog.Int("pid", c.PID),
		slog.String("from", c.From), slog.Any("command", c.Args))
}

// ExecEnded writes how a command has ended.
func (w Writer) ExecEnded(c node.Command, e streams.Exit) {
	w.log.Event("exec-ended", slog.Int("rank", c.Rank), slog.Int("pid", c.PID), slog.Int("exit_code", e.Code),
		slog.String("why", e.Error))
}

// Rendezvous writes the events of the rendezvous that this node serves.
func (w Writer) Rendezvous(n rendezvous.Note) {
	w.log.Event("rendezvous-"+string(n.Event), slog.Int("round", n.Round), slog.Int("epoch", n.Epoch),
		slog.String("who", n.Node), slog.String("text", n.Text), slog.Int("nodes", n.Nodes))
}

// Ended writes how the job ended for this node.
func (w Writer) Ended(res launcher.Result) {
	w.log.Event("end", slog.String("reason", res.Reason.String()), slog.String("verdict", res.Verdict),
		slog.String("class", string(res.Judged.Class)))
}
