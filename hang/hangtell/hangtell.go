// Package hangtell reports the findings of the judge of hangs, and keeps the evidence in files.
package hangtell

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/report"
	"dlrover-run/hang/serve"
	"dlrover-run/internal/duration"
	"dlrover-run/internal/text"
)

// Look is how often workers are looked at without a shim in them, and First is when that begins.
const (
	Look  = 5 * time.Second
	First = 5 * time.Second
)

// KeepTime bounds the writing of the evidence, from the judge's answer to the last file.
const KeepTime = 30 * time.Second

// Bounds of XPU_TIMER_HANG_TIMEOUT.
const (
	minTimeout = time.Second
	maxTimeout = 7 * 24 * time.Hour
)

// Timeout reads the value of XPU_TIMER_HANG_TIMEOUT.
func Timeout(text string) (time.Duration, error) {
	d, err := duration.Within(text, minTimeout, maxTimeout)
	if err != nil {
		return 0, fmt.Errorf("$XPU_TIMER_HANG_TIMEOUT: %w", err)
	}
	return d, nil
}

// Teller logs verdicts. It is for one goroutine at a time.
type Teller struct{ told uint64 } // the incident of the newest verdict

// Verdict logs a suspected hang, or one that counts.
func (t *Teller) Verdict(log *slog.Logger, a hang.Ask) {
	t.told = a.Incident
	level := slog.LevelWarn
	if a.Counts() {
		level = slog.LevelError
	}
	log.Log(context.Background(), level, "hang: "+text.EscapeLine(a.Line), "round", a.Epoch.Round, "epoch", a.Epoch.Epoch,
		"kind", a.Kind, "confidence", a.Confidence, "action", a.Action)
}

// Over withdraws suspicions. Most of them were never reported to people.
func (t *Teller) Over(log *slog.Logger, a hang.Ask) {
	level := slog.LevelDebug
	if a.Incident == t.told {
		level = slog.LevelInfo
	}
	log.Log(context.Background(), level, "no hang: "+text.EscapeLine(a.Line), "case", a.Incident)
}

// Keep writes the evidence of an incident, as the judge has it, to files in dir.
func Keep(ctx context.Context, log *slog.Logger, judge serve.Transport, run, dir string, number uint64) {
	p, err := judge.Picture(ctx, run, true)
	if err != nil {
		log.Warn("the evidence of the hang cannot be fetched from the judge", "err", err)
		return
	}
	p.Verdict = verdictOf(p, number)
	Write(log, dir, report.Of(run, time.Now(), p))
}

// verdictOf is the verdict that was reported in an incident; there may be a newer incident by now.
func verdictOf(p hang.Picture, number uint64) hang.Verdict {
	for _, t := range p.Verdicts {
		if t.Incident == number {
			return t.Verdict
		}
	}
	return p.Verdict
}

// Directory is the directory for files about hangs; "" if there is none, which is logged.
func Directory(log *slog.Logger, xpuTimer bool, logs string) string {
	dir, skipped := report.Dir(os.LookupEnv, xpuTimer, logs)
	for _, err := range skipped {
		log.Warn("the evidence of the hang cannot be written where it belongs", "err", err)
	}
	return dir
}

// Write puts an incident into files, and logs their place.
func Write(log *slog.Logger, dir string, c report.Incident) {
	path, err := report.Write(dir, c)
	if err != nil {
		log.Warn("the evidence of the hang cannot be written", "err", err)
		return
	}
	log.Info("the evidence of the hang is written", "dir", path)
	if err := report.Prune(path, time.Now()); err != nil {
		log.Debug("old evidence of hangs stays", "err", err)
	}
}
