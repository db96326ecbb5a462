package hangs

import (
	"context"
	"os"

	"dlrover-run/hang"
	"dlrover-run/hang/hangtell"
	"dlrover-run/hang/report"
	"dlrover-run/hang/xpu"
	"dlrover-run/internal/job"
)

// keep writes the evidence of a verdict to files. Every node may write the stacks of its ranks, for readers of
// xpu_timer's files. The node of group rank 0 writes the evidence of all nodes. That file is newer, so the viewer
// takes it.
func (h *hangs) keep(a hang.Ask, first bool) {
	ctx, cancel := context.WithTimeout(context.Background(), hangtell.KeepTime)
	defer cancel()
	dir := h.directory()
	if dir == "" {
		return
	}
	h.writeStacktraces(dir, a.Epoch)
	if !first {
		return
	}
	hangtell.Keep(ctx, h.log, h.judge(), h.node.Job().RunID, dir, a.Incident)
}

// stacktraces are the newest stacks of this node's ranks, as files of xpu_timer.
type stacktraces struct {
	epoch job.EpochID
	files map[string][]byte // by name; nil: no stacks of the rank
}

// collected keeps the evidence that the judge gets for keep.
func (h *hangs) collected(e job.EpochID, world int) func([]hang.Evidence) {
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

func (h *hangs) writeStacktraces(dir string, e job.EpochID) {
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

// directory is the place for files about hangs; "" if there is none, which has been logged.
func (h *hangs) directory() string {
	logs := h.node.Job().LogDir
	if logs == os.DevNull {
		logs = ""
	}
	return hangtell.Directory(h.log, h.xpuTimer, logs)
}
