package main

import (
	"context"
	"os"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/report"
	"dlrover-run/hang/xpu"
)

// keepTime bounds the writing of the evidence, from the judge's answer to the last file.
const keepTime = 30 * time.Second

// keep writes what is known of a verdict to files: the stacks of this node's ranks for who looks for xpu_timer's files,
// and, on the node of group rank 0, the evidence of all nodes. That is the newer one, and so what the viewer takes.
func (h *hangs) keep(a hang.Ask, first bool) {
	ctx, cancel := context.WithTimeout(context.Background(), keepTime)
	defer cancel()
	dir := h.directory()
	if dir == "" {
		return
	}
	h.writeStacktraces(dir, a.Epoch)
	if !first {
		return
	}
	p, err := h.judge().Picture(ctx, h.job.s.runID, true)
	if err != nil {
		h.log.Warn("the evidence of the hang cannot be fetched from the judge", "err", err)
		return
	}
	p.Verdict = verdictOf(p, a.Case)
	h.write(dir, report.Of(h.job.s.runID, time.Now(), p))
}

// stacktraces are the newest stacks of this node's ranks, as files of xpu_timer.
type stacktraces struct {
	epoch hang.Epoch
	files map[string][]byte // by name; nil: nothing is known of the rank
}

// collected keeps the evidence that the judge gets for keep.
func (h *hangs) collected(e hang.Epoch, world int) func([]hang.Evidence) {
	return func(ev []hang.Evidence) {
		if len(ev) == 0 {
			return
		}
		files := map[string][]byte{}
		for _, x := range ev {
			files[xpu.Name(x.Rank, world)] = xpu.Format(x)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.stacktraces = stacktraces{e, files}
	}
}

func (h *hangs) writeStacktraces(dir string, e hang.Epoch) {
	h.mu.Lock()
	s := h.stacktraces
	h.mu.Unlock()
	if s.epoch != e || len(s.files) == 0 {
		return
	}
	if err := report.WriteStacktraces(dir, s.files); err != nil {
		h.log.Warn("the stacks of this node's workers cannot be written", "dir", dir, "err", err)
		return
	}
	h.log.Info("the stacks of this node's workers are written", "dir", dir)
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
func (h *hangs) write(dir string, c report.Case) {
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
