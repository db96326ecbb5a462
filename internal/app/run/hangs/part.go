package hangs

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/hang"
	"dlrover-run/hang/dump"
	"dlrover-run/hang/flight"
	"dlrover-run/hang/hangtell"
	"dlrover-run/hang/page"
	"dlrover-run/hang/pystack"
	"dlrover-run/hang/ras"
	"dlrover-run/hang/serve"
	"dlrover-run/hang/sockets"
	"dlrover-run/hang/watch"
	"dlrover-run/internal/app/nodecheck"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/pypath"
	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous/tcpstore"
	"dlrover-run/switchbox"
)

// lookAuto is the interval of the looks at workers with a shim.
const lookAuto = time.Second

// outsideEvery is the least interval of reports about workers without one.
const outsideEvery = 30 * time.Second

// hangs is the part of the launcher that observes its workers and follows the requests of the run's judge.
type hangs struct {
	hangSettings
	node    feature.Node
	log     *slog.Logger
	judge   func() serve.Transport // for when this node has joined
	pages   *hangPages             // nil but with the shim
	metrics *hangMetrics           // nil: metrics are off
	stacks  func() *pystack.Reader
	writing sync.WaitGroup // of the files that are written after a verdict
	refused sync.Once      // an unreachable judge has been logged

	mu      sync.Mutex
	epoch   launcher.Epoch // the newest
	watcher *watch.Watcher // of its workers; nil before and after
	heard   hang.Ask       // the newest of the judge's requests
	teller  hangtell.Teller
	present present

	stacktraces stacktraces
	dumps       *dump.Server // nil: there is no server for dump requests
}

func openHangs(n feature.Node, k hangSettings) *hangs {
	h := &hangs{hangSettings: k, node: n, log: n.Log(), stacks: sync.OnceValue(pystack.New)}
	h.judge = sync.OnceValue(func() serve.Transport { return judgeOf(n.Rendezvous()) })
	if k.mode == hangAuto {
		n.Python().Add(pypath.Shim)
		if h.pages = newHangPages(n.Job().ShmDir, n.Log()); h.pages != nil {
			n.Python().SetImportEnv("DLROVER_HANG_DIR=" + h.pages.root.Path())
		}
	}
	return h
}

func (h *hangs) opened() *feature.Opened {
	o := &feature.Opened{
		Part: launcher.Part{Start: h.start, Run: h.run, Stop: h.stop, End: h.end}, Joined: h.joined,
		Configure: func(cfg *launcher.Config) {
			cfg.Examiner = launcher.Examiner{Name: "hang detection", Examine: h.examine}
			cfg.OnNotice = append(cfg.OnNotice, h.notice)
		},
		Release: h.release,
	}
	if h.pages != nil {
		o.Steps = h.pages.progress
		o.Profile = h.profile
	}
	return o
}

// judgeOf returns the connection to the job's judge, at the daemon that serves the rendezvous.
func judgeOf(r feature.Rendezvous) serve.Transport {
	if served := r.Served(); served != nil {
		return served.Hangs
	}
	return serve.Over(r.Client())
}

// joined starts the metrics and the server for dumps.
func (h *hangs) joined() {
	h.serveDumps()
	if m := newHangMetrics(h.node.Job()); h.node.Scrape(m.tell) {
		h.metrics = m
	}
}

func (h *hangs) start(r *launcher.StartRequest) {
	h.mu.Lock()
	h.epoch = r.Epoch
	h.mu.Unlock()
	h.pages.begin(r.Epoch)
	r.Setenv(h.environ()...)
}

// environ is for the workers of the present epoch: --hang=outside changes nothing in their environment.
func (h *hangs) environ() []string {
	dir := h.pages.dir()
	if dir == "" {
		return nil
	}
	return append(h.recorder().Environ(), "DLROVER_HANG_DIR="+dir)
}

// recorder is PyTorch's flight recorder in the workers of the present epoch.
func (h *hangs) recorder() *flight.Recorder {
	return flight.New(h.pages.dir(), h.pages.dumps(), os.LookupEnv)
}

func (h *hangs) stop(r launcher.StopRequest) {
	if !r.Early {
		h.pages.end()
	}
}

func (h *hangs) run(ctx context.Context, r launcher.RunRequest) {
	e := r.Epoch
	h.attend(present{e, r.PIDs})
	defer h.leave(e)
	if h.node.Rendezvous().Upstream() != nil {
		<-ctx.Done() // DLRover's master has no judge of hangs
		return
	}
	cfg := h.config(e, r.PIDs)
	room := outputRoom / max(1, e.Place.WorldSize)
	cfg.Output = func(local int) string { return ending(r.Output(local), room) }
	cfg.Exception = verdict.LastException
	w := watch.New(cfg)
	h.mu.Lock()
	h.watcher = w
	h.mu.Unlock()
	w.Watch(ctx)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watcher == w {
		h.watcher = nil
	}
}

// attend notes which workers run now.
func (h *hangs) attend(p present) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.present = p
}

// leave notes that these workers run no more, unless workers of another epoch do.
func (h *hangs) leave(e launcher.Epoch) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.present.epoch.EpochID == e.EpochID {
		h.present.pids = nil
	}
}

// outputRoom is how many bytes of the workers' output the judge gets of all ranks together.
const outputRoom = 8 << 20

// ending is the end of a text.
func ending(text string, room int) string {
	return strings.ToValidUTF8(text[max(len(text)-room, 0):], "")
}

func (h *hangs) config(e launcher.Epoch, pids []int) watch.Config {
	cfg := watch.Config{
		Epoch: e.EpochID, Node: h.node.Job().Node.Name, GroupRank: e.Place.GroupRank, RankBase: e.Place.RankBase, PIDs: pids,
		First: hangtell.First, Every: hangtell.Look, Summaries: hang.Summaries(e.Place.GroupWorldSize),
		Pages: h.pages.dir(), Parse: page.Read, Groups: page.ParseGroups,
		Detector: hang.NewDetector(hang.DetectorConfig{Limit: h.limit, Outside: h.mode == hangOutside}),
		Stacks:   h.read, Trace: h.trace, Sockets: storeSockets(e.Place),
		Traffic: sockets.Traffic(uint16(e.Place.MasterPort)), Post: h.post, Log: h.log,
	}
	auto := h.mode == hangAuto
	switch {
	case auto && e.Place.WorldSize < 2, !auto && e.Place.GroupWorldSize < 2:
		cfg.Summaries = 0 // it is compared with nobody
	case !auto:
		cfg.Summaries = max(cfg.Summaries, outsideEvery)
	}
	if auto {
		cfg.First, cfg.Every = lookAuto, lookAuto
	}
	if cfg.Pages != "" {
		cfg.Flight = h.recorder().Read
	}
	if addr := ras.Address(os.LookupEnv); addr != "" {
		cfg.RAS = func(ctx context.Context) string {
			text, _ := ras.Query(ctx, addr) // most have none
			return text
		}
	}
	if e.Place.GroupRank == 0 {
		cfg.Store = h.storeWaits
	}
	if auto {
		t := h.training(e, pids)
		cfg.Facts, cfg.End, cfg.Test = t.Facts, t.End, t.Test
	}
	if h.metrics != nil {
		cfg.Looked = h.metrics.looked
	}
	if h.xpuTimer {
		cfg.Collected = h.collected(cfg.Epoch, e.Place.WorldSize)
	}
	return cfg
}

// driverTime is for an answer of a device's driver.
const driverTime = 20 * time.Second

// training is this node while the workers train.
func (h *hangs) training(e launcher.Epoch, pids []int) *nodecheck.Training {
	return &nodecheck.Training{Addr: h.node.Job().Node.Addr, Env: os.Getenv, PIDs: pids, RankBase: e.Place.RankBase,
		Devices: func(ctx context.Context) switchbox.Report {
			if _, kind := proc.GPUCount("", os.LookupEnv); kind != "cuda" {
				return switchbox.Report{}
			}
			return nodecheck.NVIDIA(ctx, h.node.Processes().Command, "--level=links", "--timeout="+driverTime.String())
		}}
}

// read reads the stacks of one process.
func (h *hangs) read(ctx context.Context, pid int) (hang.Stacks, error) {
	return h.stacks().Read(ctx, pid, pystack.Native)
}

// trace has eu-stack find the native frames, where it is installed.
func (h *hangs) trace(ctx context.Context, pid int) (hang.Stacks, error) {
	return h.stacks().Read(ctx, pid, pystack.Tool)
}

// storeWaits are the keys that the workers wait for in the store of this launcher.
func (h *hangs) storeWaits() []hang.StoreWait {
	return ofStore(h.node.Rendezvous().Store().Waits(), time.Now())
}

func ofStore(waits []tcpstore.Wait, now time.Time) (list []hang.StoreWait) {
	for _, w := range waits {
		s := hang.StoreWait{Key: text.EscapeLine(w.Key), Age: now.Sub(w.Since), More: w.More}
		for _, p := range w.Peers {
			s.Waiters = append(s.Waiters, p.String())
		}
		list = append(list, s)
	}
	return list
}

// storeSockets finds the connections of workers to their store.
func storeSockets(p job.Place) func([]int) map[int][]string {
	var hosts []netip.Addr
	if a, err := netip.ParseAddr(p.MasterAddr); err == nil {
		hosts = append(hosts, a)
	}
	return func(pids []int) map[int][]string {
		ends, _ := sockets.Local(pids, uint16(p.MasterPort), hosts...) // on an error, use the connections found so far
		by := map[int][]string{}
		for pid, list := range ends {
			for _, end := range list {
				by[pid] = append(by[pid], end.String())
			}
		}
		return by
	}
}

// postTime bounds one attempt to reach the judge.
const postTime = 20 * time.Second

// post delivers a report, and follows the judge's request in return.
func (h *hangs) post(ctx context.Context, r hang.Report) error {
	ctx, cancel := context.WithTimeout(ctx, postTime)
	defer cancel()
	r.ID = h.node.Job().Node.ID
	ask, err := h.judge().Post(ctx, h.node.Job().RunID, r)
	switch {
	case err == nil:
		h.hear(ask)
	case misread(err):
		h.refused.Do(func() {
			h.log.Warn("no hang of this job is found: all launchers and the daemon need the same version", "err", err)
		})
		return nil
	case errors.Is(err, serve.ErrNotMember):
		h.log.Debug("the judge of hangs does not want to hear of these workers", "err", err)
		return nil // the watcher repeats a report that still holds
	}
	return err
}

// misread reports whether the judge does not understand our reports, or the Spec of the run. Older judges answer the
// latter with ErrNotMember.
func misread(err error) bool {
	return errors.Is(err, serve.ErrBadRequest) ||
		errors.Is(err, serve.ErrNotMember) && strings.Contains(err.Error(), hang.ErrSpec.Error()+` "`)
}

// notice follows a notice of the judge.
func (h *hangs) notice(topic, body string) {
	if topic != hang.Topic {
		return
	}
	var a hang.Ask
	if err := json.Unmarshal([]byte(body), &a); err != nil {
		h.log.Warn("cannot read what the judge of hangs asks: all launchers and the daemon need the same version",
			"err", err)
		return
	}
	h.hear(a)
}

// hear follows a request, which may arrive twice: as a notice, and in the answer to a report.
func (h *hangs) hear(a hang.Ask) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !a.Follows(&h.heard) {
		return
	}
	h.heard = a
	switch {
	case a.What == hang.TellVerdict:
		h.tellLocked(a)
	case a.What == hang.TellOver:
		h.teller.Over(h.log, a)
		h.metrics.over()
	case h.watcher != nil && a.Epoch == h.epoch.EpochID:
		h.watcher.Ask(a)
	}
}

// tellLocked logs the verdict. The node of group rank 0 keeps the evidence; with xpuTimer, every node keeps its own.
func (h *hangs) tellLocked(a hang.Ask) {
	h.teller.Verdict(h.log, a)
	h.metrics.verdict(a)
	first := h.epoch.Place.GroupRank == 0
	if a.Again || a.Epoch != h.epoch.EpochID || !first && !h.xpuTimer {
		return
	}
	h.writing.Go(func() { h.keep(a, first) })
}

// end waits for the files that are being written.
func (h *hangs) end(r launcher.EndRequest) {
	done := make(chan struct{})
	go func() {
		h.writing.Wait()
		close(done)
	}()
	late := time.NewTimer(min(r.Budget, hangtell.KeepTime))
	defer late.Stop()
	select {
	case <-done:
	case <-r.Enough:
	case <-late.C:
	}
}

func (h *hangs) release() {
	if h.dumps != nil {
		_ = h.dumps.Close()
	}
	h.pages.remove()
}

// hangPages has the files to which the shims of this node's workers write: a directory for each epoch. The methods
// of nil do nothing.
type hangPages struct {
	root    *shm.Dir
	unlock  func() error
	log     *slog.Logger
	mu      sync.Mutex
	present string        // the epoch's; "": there is none
	first   time.Duration // when the first step of the newest epoch was made; 0: not known
	newest  job.Progress  // of the newest epoch without pages
	ended   time.Duration // when that was so
}

// progress is that of the newest epoch: the most steps of a worker that has a page.
func (p *hangPages) progress() job.Progress {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.progressLocked(watch.Monotonic())
}

func (p *hangPages) progressLocked(now time.Duration) (n job.Progress) {
	if p.present == "" {
		return p.newest.Aged(now - p.ended)
	}
	paths, _ := filepath.Glob(filepath.Join(p.present, "*.page")) // the pattern is valid
	for _, path := range paths {
		data, err := openfile.Read(path, page.Size)
		if err != nil {
			continue
		}
		if page, err := page.Read(data); err == nil {
			n = n.With(p.stepsLocked(page, now))
		}
	}
	return n
}

// stepsLocked are the steps of one worker. A page has the times of the newest ones alone, so the first is noted.
func (p *hangPages) stepsLocked(w hang.Page, now time.Duration) job.Progress {
	n := job.Progress{Stepping: true, Step: int64(min(w.Steps, 1<<62)), Blocked: w.Blocked}
	if n.Step == 0 || len(w.StepTimes) == 0 {
		return n
	}
	if at := w.StepTimes[0]; p.first == 0 || at < p.first {
		p.first = at
	}
	n.Ran, n.Idle = max(now-p.first, 1), max(now-w.LastStep, 1)
	return n
}

// newHangPages creates a directory in shared memory, so that a page costs no disk write. The next launcher removes
// the directory of one that was killed.
func newHangPages(base string, log *slog.Logger) *hangPages {
	p := &hangPages{log: log}
	root, err := shm.Create(base, "hang-"+strings.ToLower(rand.Text()))
	if err == nil {
		p.unlock, err = root.Own()
	}
	if err == nil {
		err = os.Mkdir(filepath.Join(root.Path(), "flight"), 0o700)
	}
	if err != nil {
		log.Warn("no room for the pages of hang detection: hangs are found from outside only", "shm_dir", base, "err", err)
		return nil
	}
	p.root = root
	return p
}

func (p *hangPages) begin(e launcher.Epoch) {
	if p == nil {
		return
	}
	p.end()
	dir := filepath.Join(p.root.Path(), fmt.Sprintf("%d.%d.%d", e.Term, e.Round, e.Epoch))
	if err := os.Mkdir(dir, 0o700); err != nil {
		p.log.Warn("no room for the pages of hang detection in this epoch", "err", err)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.present, p.first, p.newest = dir, 0, job.Progress{}
}

// dir is "" without pages.
func (p *hangPages) dir() string {
	if p == nil {
		return ""
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.present
}

// dumps is where flight recorders write, until the launcher ends.
func (p *hangPages) dumps() string { return filepath.Join(p.root.Path(), "flight") }

// end removes the pages of an epoch after its workers have ended.
func (p *hangPages) end() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.present != "" {
		p.ended = watch.Monotonic()
		p.newest = p.progressLocked(p.ended)
		_ = os.RemoveAll(p.present) // remove tries again
		p.present = ""
	}
}

func (p *hangPages) remove() {
	if p == nil {
		return
	}
	if err := errors.Join(p.root.RemoveAll(), p.unlock()); err != nil {
		p.log.Debug("remove the pages of hang detection", "err", err)
	}
}
