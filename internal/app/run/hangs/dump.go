package hangs

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/dump"
	"dlrover-run/hang/pystack"
	"dlrover-run/hang/report"
	"dlrover-run/hang/watch"
	"dlrover-run/hang/xpu"
	"dlrover-run/launcher"
)

// present are the workers that run now.
type present struct {
	epoch launcher.Epoch
	pids  []int // by local rank; nil: none run
}

// serveDumps lets processes of this user request dumps, if the shim is installed.
func (h *hangs) serveDumps() {
	if h.pages == nil {
		return
	}
	s, err := dump.Serve(h.pages.root.Path(), h.dump)
	if err != nil {
		h.log.Warn("nobody can ask this launcher for a dump", "err", err)
		return
	}
	h.dumps = s
}

// dump answers a request.
func (h *hangs) dump(ctx context.Context, r dump.Request) (a dump.Answer) {
	h.mu.Lock()
	p := h.present
	h.mu.Unlock()
	place := p.epoch.Place
	a.Run, a.World = h.node.Job().RunID, place.WorldSize
	var locals []int
	for local, pid := range p.pids {
		if rank := place.RankBase + local; len(r.Ranks) == 0 || slices.Contains(r.Ranks, rank) {
			a.Workers = append(a.Workers, dump.Worker{Rank: rank, PID: pid})
			locals = append(locals, local)
		}
	}
	if !r.Python && !r.Native && r.Steps == 0 {
		return a
	}
	dir, err := h.dumpDir(r.Dir)
	switch {
	case len(locals) == 0:
		a.Error = "none of these workers run now"
	case err != nil:
		a.Error = err.Error()
	default:
		h.dumpInto(ctx, dir, p, r, locals, &a)
	}
	return a
}

// profile has the worker of a rank write a trace of all its threads.
func (h *hangs) profile(ctx context.Context, rank int, last time.Duration, to string) (note string, err error) {
	h.mu.Lock()
	p := h.present
	h.mu.Unlock()
	local := rank - p.epoch.Place.RankBase
	if local < 0 || local >= len(p.pids) {
		return "", fmt.Errorf("it does not run on node %s now", h.node.Job().Node.Name)
	}
	h.log.Info("somebody profiles a worker", "rank", rank, "for", last)
	return dump.Profile(ctx, h.pages.dir(), local, last, to)
}

// dumpDir is the directory of a dump; workers, which write timelines, may have another working directory.
func (h *hangs) dumpDir(named string) (string, error) {
	switch {
	case named == "":
		if dir := h.directory(); dir != "" {
			if abs, err := filepath.Abs(dir); err == nil {
				return abs, nil
			}
			return dir, nil // the working directory is gone
		}
		return "", fmt.Errorf("there is no directory for the files: name one by --dump-path")
	case !filepath.IsAbs(named):
		return "", fmt.Errorf("%q is not an absolute path", named)
	}
	return named, os.MkdirAll(named, 0o755)
}

func (h *hangs) dumpInto(ctx context.Context, dir string, p present, r dump.Request, locals []int, a *dump.Answer) {
	var files map[string][]byte
	if r.Python || r.Native {
		files = h.dumpStacks(ctx, p, r, locals)
	}
	if err := report.WriteStacktraces(dir, files); err != nil {
		a.Error = err.Error()
		return
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if files[name] == nil {
			a.Notes = append(a.Notes, "nothing could be read for "+name)
			continue
		}
		a.Files = append(a.Files, filepath.Join(dir, name))
	}
	if r.Steps > 0 {
		h.timelines(ctx, dir, p, min(r.Steps, dump.MaxSteps), locals, a)
	}
	h.log.Info("somebody has asked for a dump", "dir", dir, "files", len(a.Files))
}

// timelines has workers record their next steps, all at the same time.
func (h *hangs) timelines(ctx context.Context, dir string, p present, steps int, locals []int, a *dump.Answer) {
	pages := h.pages.dir()
	paths, notes, errs := make([]string, len(locals)), make([]string, len(locals)), make([]error, len(locals))
	var wg sync.WaitGroup
	for i, local := range locals {
		name := fmt.Sprintf("%05d-%05d.trace.json", p.epoch.Place.RankBase+local, p.epoch.Place.WorldSize)
		paths[i] = filepath.Join(dir, name)
		wg.Go(func() { notes[i], errs[i] = dump.Timeline(ctx, pages, local, steps, paths[i]) })
	}
	wg.Wait()
	for i, local := range locals {
		rank := p.epoch.Place.RankBase + local
		if errs[i] != nil {
			a.Notes = append(a.Notes, fmt.Sprintf("no timeline of rank %d: %v", rank, errs[i]))
			continue
		}
		a.Files = append(a.Files, paths[i])
		if notes[i] != "" {
			a.Notes = append(a.Notes, fmt.Sprintf("the timeline of rank %d has %s", rank, notes[i]))
		}
	}
}

// dumpStacks reads the stacks of some workers, as files of xpu_timer.
func (h *hangs) dumpStacks(ctx context.Context, p present, r dump.Request, locals []int) map[string][]byte {
	ctx, cancel := context.WithTimeout(ctx, dump.StackTime)
	defer cancel()
	cfg := h.config(p.epoch, p.pids)
	cfg.Stacks = func(ctx context.Context, pid int) (hang.Stacks, error) {
		if local := slices.Index(p.pids, pid); !slices.Contains(locals, local) {
			return hang.Stacks{}, nil
		}
		return h.readSorts(ctx, pid, r)
	}
	files := map[string][]byte{}
	for _, e := range watch.New(cfg).Once(ctx) {
		if slices.Contains(locals, e.Local) {
			files[xpu.Name(e.Rank, p.epoch.Place.WorldSize)] = xpu.Format(e)
		}
	}
	return files
}

// readSorts reads the requested kinds of stacks of a process. eu-stack finds the native ones where it is installed.
func (h *hangs) readSorts(ctx context.Context, pid int, r dump.Request) (hang.Stacks, error) {
	want := []pystack.Want{}
	if r.Native {
		want = append(want, pystack.Tool)
	}
	s, err := h.stacks().Read(ctx, pid, want...)
	for i := range s.Threads {
		if !r.Python {
			s.Threads[i].Python = nil
		}
	}
	return s, err
}
