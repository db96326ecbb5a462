package run

import (
	"log/slog"

	"dlrover-run/internal/app/run/feature"
)

// logLevel lets a user who watches a job change its launchers' log level: a notice of the topic log-level holds
// until the next one.
type logLevel struct {
	level *slog.LevelVar
	log   *slog.Logger
}

func logLevelFeature() row {
	return row{
		name: "log level",
		open: func(j *nodeJob) (*feature.Opened, error) {
			return feature.OnNotice(logLevel{j.level, j.log}.notice), nil
		},
	}
}

// logLevels are the valid bodies of a notice.
var logLevels = map[string]slog.Level{
	"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
}

// maxQuoted bounds the quotation of an invalid level, in bytes.
const maxQuoted = 40

// notice follows a notice of the topic log-level.
func (l logLevel) notice(topic, body string) {
	if topic != "log-level" {
		return
	}
	level, known := logLevels[body]
	if !known {
		l.log.Warn("a notice asks for a log level that is none: use debug, info, warn or error",
			"level", body[:min(len(body), maxQuoted)])
		return
	}
	l.log.Info("the log level changes as a notice says", "from", l.level.Level().String(), "to", level.String())
	l.level.Set(level)
}
