package run

import (
	"log/slog"

	"dlrover-run/internal/console"
	"dlrover-run/internal/eventlog"
	"dlrover-run/launcher"
	logrule "dlrover-run/launcher/logs/rule"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/streams"
	"dlrover-run/launcher/streams/node"
	"dlrover-run/launcher/warm"
	"dlrover-run/rendezvous"
)

// eventWriter writes the events of this node to the event log; docs/reference/events.md has their names and fields.
// Without a log it writes nothing.
type eventWriter struct{ log *eventlog.Log }

func eventLogFeature() feature {
	var path string
	var onConsole bool
	return feature{
		name: "event log",
		settings: func(o *options, s *settings) error {
			path, onConsole = o.String("event-log"), o.String("event-log-handler") == "console"
			return nil
		},
		open: func(j *nodeJob) (*opened, error) {
			run, host := slog.String("run_id", j.s.runID), slog.String("host", j.s.node.Name)
			switch {
			case path != "":
				l, err := eventlog.Open(path)
				if err != nil {
					return nil, unusableOption(err)
				}
				j.events = eventWriter{l.With(run, host)}
			case onConsole:
				j.events = eventWriter{eventlog.New(console.Stderr).With(run)}
			default:
				return nil, nil
			}
			return &opened{observe: j.events.observe, close: j.events.close}, nil
		},
	}
}

func (w eventWriter) close() error { return w.log.Close() }

// observe writes an event of the launcher.
func (w eventWriter) observe(e launcher.Event) {
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

func (w eventWriter) started(i launcher.StartInfo) {
	e, p := i.Epoch, i.Epoch.Place
	w.log.Event("start", slog.Int("round", e.Round), slog.Int("epoch", e.Epoch), slog.Int("node", p.GroupRank),
		slog.Int("nodes", p.GroupWorldSize), slog.Int("world_size", p.WorldSize), slog.Int("restart_count", p.RestartCount),
		slog.String("cause", e.Cause.Text), slog.String("cause_kind", string(e.Cause.Kind)), slog.Any("pids", i.PIDs))
}

func (w eventWriter) signaled(i launcher.SignalInfo) {
	name := "signal"
	if i.Again {
		name = "signal-again"
	}
	w.log.Event(name, slog.String("signal", proc.SignalName(i.Signal)))
}

func (w eventWriter) timerExpired(i launcher.TimerInfo) {
	w.log.Event("timer-expired", slog.Int("rank", i.Worker.Rank), slog.Int("local_rank", i.Worker.LocalRank),
		slog.Int("pid", i.PID), slog.String("scope", i.Scope), slog.String("timeout", i.After.String()),
		slog.String("signal", proc.SignalName(i.Signal)))
}

func (w eventWriter) checked(i launcher.CheckInfo) {
	attrs := []slog.Attr{slog.Bool("passed", i.Passed), slog.String("check", i.Part), slog.String("reason", i.Reason),
		slog.Float64("took", i.Took.Seconds())}
	if !i.Until.IsZero() {
		attrs = append(attrs, slog.Time("until", i.Until))
	}
	w.log.Event("check", attrs...)
}

func (w eventWriter) faulted(i launcher.FaultInfo) {
	w.log.Event("fault", slog.Int("round", i.Epoch.Round), slog.Int("epoch", i.Epoch.Epoch), slog.String("part", i.Part),
		slog.Int("rank", i.Failure.Rank), slog.Int("local_rank", i.Failure.LocalRank), slog.Int("pid", i.Failure.PID),
		slog.String("why", i.Failure.Reason()), slog.String("action", i.Action.String()))
}

func (w eventWriter) decided(i launcher.DecideInfo) {
	w.log.Event("policy", slog.Int("round", i.Epoch.Round), slog.Int("epoch", i.Epoch.Epoch),
		slog.Int("rank", i.Failure.Rank), slog.Int("local_rank", i.Failure.LocalRank),
		slog.String("why", i.Failure.Reason()), slog.String("action", i.Decision.Action.Word()),
		slog.String("rule", i.Failure.Policy))
}

// logRule writes a finding of a log rule.
func (w eventWriter) logRule(f logrule.Finding) {
	w.log.Event("log-rule", slog.String("rule", f.Rule.Name), slog.Int("rank", f.Rank), slog.String("found", f.Text),
		slog.Bool("over", f.Over), slog.String("action", string(f.Rule.Action)))
}

// warmPrepared writes that the modules of warm workers have been imported.
func (w eventWriter) warmPrepared(i warm.Preparation) {
	w.log.Event("warm-prepared", slog.Int("pid", i.PID), slog.Int("modules", i.Modules), slog.Int("failed", len(i.Failed)),
		slog.Float64("took", i.Took.Seconds()))
}

// warmStart writes how a worker was started.
func (w eventWriter) warmStart(i warm.Start) {
	w.log.Event("warm-start", slog.Int("rank", i.Worker.Rank), slog.Int("local_rank", i.Worker.LocalRank),
		slog.Int("pid", i.PID), slog.String("how", string(i.How)), slog.String("why", i.Why),
		slog.Float64("took", i.Took.Seconds()))
}

// exec writes that a command is executed next to a worker.
func (w eventWriter) exec(c node.Command) {
	w.log.Event("exec", slog.Int("rank", c.Rank), slog.Int("local_rank", c.LocalRank), slog.Int("pid", c.PID),
		slog.String("from", c.From), slog.Any("command", c.Args))
}

// execEnded writes how a command has ended.
func (w eventWriter) execEnded(c node.Command, e streams.Exit) {
	w.log.Event("exec-ended", slog.Int("rank", c.Rank), slog.Int("pid", c.PID), slog.Int("exit_code", e.Code),
		slog.String("why", e.Error))
}

// rendezvous writes the events of the rendezvous that this node serves.
func (w eventWriter) rendezvous(n rendezvous.Note) {
	w.log.Event("rendezvous-"+string(n.Event), slog.Int("round", n.Round), slog.Int("epoch", n.Epoch),
		slog.String("who", n.Node), slog.String("text", n.Text), slog.Int("nodes", n.Nodes))
}

// ended writes how the job ended for this node.
func (w eventWriter) ended(res launcher.Result) {
	w.log.Event("end", slog.String("reason", res.Reason.String()), slog.String("verdict", res.Verdict),
		slog.String("class", string(res.Judged.Class)))
}
