package main

import (
	"context"
	"os"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/report"
)

// keepTime bounds the writing of the evidence, from the judge's answer to the last file.
const keepTime = 30 * time.Second

// keep writes the evidence of a verdict to files.
func (h *hangs) keep(a hang.Ask) {
	ctx, cancel := context.WithTimeout(context.Background(), keepTime)
	defer cancel()
	p, err := h.judge().Picture(ctx, h.job.s.runID, true)
	if err != nil {
		h.log.Warn("the evidence of the hang cannot be fetched from the judge", "err", err)
		return
	}
	p.Verdict = verdictOf(p, a.Case)
	h.write(report.Of(h.job.s.runID, time.Now(), p))
}

// verdictOf is the verdict that was told in a case; there may be a newer case by now.
func verdictOf(p hang.Picture, number uint64) hang.Verdict {
	for _, t := range p.Verdicts {
		if t.Case == number {
			return t.Verdict
		}
	}
	return p.Verdict
}

// directory is where files about hangs belong; "" if there is no such place, which has been said.
func (h *hangs) directory() string {
	logs := h.job.s.logs.dir
	if logs == os.DevNull {
		logs = ""
	}
	dir, skipped := report.Dir(os.LookupEnv, h.xpuTimer, logs)
	for _, err := range skipped {
		h.log.Warn("the evidence of the hang cannot be written where it belongs", "err", err)
	}
	return dir
}

// write puts a case into files, and says where they are.
func (h *hangs) write(c report.Case) {
	dir := h.directory()
	if dir == "" {
		return
	}
	path, err := report.Write(dir, c)
	if err != nil {
		h.log.Warn("the evidence of the hang cannot be written", "err", err)
		return
	}
	h.log.Info("the evidence of the hang is written", "dir", path)
	if err := report.Prune(path, time.Now()); err != nil {
		h.log.Debug("old evidence of hangs stays", "err", err)
	}
}
