// Package checkpoints keeps the saves of the workers in memory, with a daemon.
package checkpoints

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/python"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/app/ckptd"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/pypath"
	"dlrover-run/internal/job"
	"dlrover-run/internal/pytree"
	"dlrover-run/launcher"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/proc"
)

// checkpointClient is the module that training processes import to save checkpoints. It stands before the user's
// path. If the user has a package of the same name, the client itself gives way to it.
var checkpointClient = pypath.Tree{
	Source: pytree.Source{Name: "checkpoint-client", Files: python.Files},
	What:   "checkpoint client", Loss: "workers cannot import dlrover",
}

// ckptSettings are the options of the feature.
type ckptSettings struct {
	off        bool
	breakpoint bool // save when workers fail
	replicas   int
	writeRate  string
	sidecar    string
}

// checkpoints keeps the workers' saves in memory, with a daemon.
type checkpoints struct {
	ckptSettings
	node     feature.Node
	opening  sync.WaitGroup
	daemon   *ckptd.Supervisor // nil: workers save by themselves; known when opening is over
	began    atomic.Int64      // when the newest epoch did, in nanoseconds since 1970
	newest   newest
	signaled bool  // the job was ordered to end; belongs to the launcher's loop
	unsaved  error // why saves may not be on disk at the end; known after end
}

// New is the feature.
func New() feature.Feature {
	var k ckptSettings
	var shmDir string
	return feature.Feature{
		Name: "checkpoints",
		Settings: func(o feature.Options) (err error) {
			k, err = read(o)
			shmDir = o.Job().ShmDir
			return err
		},
		Plan: func(p *feature.Plan) {
			if !k.off {
				p.Checkpoints = &planCheckpoints{
					ShmDir: shmDir, Sidecar: k.sidecar, SaveAtBreakpoint: k.breakpoint, Replicas: k.replicas, WriteRate: k.writeRate,
				}
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			return openCheckpoints(n, k).opened(), nil
		},
	}
}

// maxReplicas bounds the nodes that hold a shard: more than a few only cost memory.
const maxReplicas = 16

func read(o feature.Options) (k ckptSettings, err error) {
	k.off, k.breakpoint = o.String("ckpt-daemon") == "off", !o.Bool("no-save-at-breakpoint")
	k.replicas, k.sidecar, k.writeRate = o.Int("ckpt-replicas"), o.String("ckpt-sidecar"),
		o.String("ckpt-write-rate")
	dir := o.Job().ShmDir
	switch {
	case !k.breakpoint && o.Bool("save-at-breakpoint"):
		err = fmt.Errorf("--save-at-breakpoint and --no-save-at-breakpoint contradict each other: use one of them")
	case k.replicas < 0 || k.replicas > maxReplicas:
		err = fmt.Errorf("--ckpt-replicas=%d: need 0 to %d nodes", k.replicas, maxReplicas)
	case k.replicas > 1 && o.Job().Local:
		err = fmt.Errorf("--ckpt-replicas=%d: this job has one node; leave the option out", k.replicas)
	case !filepath.IsAbs(dir):
		err = fmt.Errorf("--ckpt-shm-dir=%s: need an absolute path", dir)
	case o.IsSet("ckpt-shm-dir") && !isDir(dir):
		err = fmt.Errorf("--ckpt-shm-dir=%s: there is no such directory", dir)
	case k.sidecar != "" && !shm.ValidKey(k.sidecar):
		err = fmt.Errorf("--ckpt-sidecar=%s: need 1 to 128 letters, digits and ._-, a letter, digit or _ first", k.sidecar)
	case k.off && k.sidecar != "":
		err = fmt.Errorf("--ckpt-daemon=off and --ckpt-sidecar contradict each other: use one of them")
	case k.writeRate != "":
		if n, e := argv.ParseSize(k.writeRate); e != nil || n == 0 {
			err = fmt.Errorf("--ckpt-write-rate=%s: need bytes a second, such as 500M", k.writeRate)
		}
	}
	return k, err
}

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}

// planCheckpoints is the feature's part of the --dry-run output.
type planCheckpoints struct {
	ShmDir           string `json:"shm_dir"`
	Sidecar          string `json:"sidecar,omitempty"`
	SaveAtBreakpoint bool   `json:"save_at_breakpoint"`
	Replicas         int    `json:"replicas"`
	WriteRate        string `json:"write_rate,omitempty"`
}

func (c *checkpoints) opened() *feature.Opened {
	o := &feature.Opened{
		Part: launcher.Part{Start: c.start, Stop: c.stop, End: c.end}, Joined: c.joined,
		Configure: func(cfg *launcher.Config) { cfg.Saved = c.saved }, Release: c.release,
		Unsaved: func() error { return c.unsaved },
	}
	if !c.off {
		o.Saves = c.saves
	}
	return o
}

// openCheckpoints creates the runtime directory in the background; joined waits for it.
func openCheckpoints(n feature.Node, k ckptSettings) *checkpoints {
	c := &checkpoints{ckptSettings: k, node: n}
	c.newest.ask = c.status
	n.Python().Add(checkpointClient)
	if k.off {
		return c
	}
	cfg := c.daemonConfig()
	c.opening.Go(func() {
		var err error
		if c.daemon, err = ckptd.NewSupervisor(cfg); err != nil {
			n.Log().Warn("no checkpoint daemon: workers save by themselves", "err", err)
		}
	})
	return c
}

func (c *checkpoints) daemonConfig() ckptd.SupervisorConfig {
	j := c.node.Job()
	sum := sha256.Sum256([]byte(j.RunID + "|" + j.Meeting))
	return ckptd.SupervisorConfig{
		ShmDir: j.ShmDir, Key: hex.EncodeToString(sum[:6]), Sidecar: c.sidecar, Run: j.RunID,
		Replicas: c.replicas, WriteRate: c.writeRate, LogFormat: j.LogFormat, Start: c.startDaemon, Logger: c.node.Log(),
	}
}

// daemonProcess adapts a daemon for its supervisor.
type daemonProcess struct{ *proc.Process }

func (p daemonProcess) Code() int { return p.Exit().Code }

func (c *checkpoints) startDaemon(cmd ckptd.Command) (ckptd.Process, error) {
	p, err := c.node.Processes().Start(proc.Spec{
		Path: "/proc/self/exe", Args: cmd.Args, Env: cmd.Env, Dir: "/", Stdin: cmd.Stdin, Stderr: os.Stderr, Survives: true,
	})
	if errors.Is(err, proc.ErrClosed) {
		return nil, ckptd.ErrClosed
	}
	return daemonProcess{p}, err
}

// joined starts the daemon, whose address for other nodes is known now.
func (c *checkpoints) joined() {
	c.opening.Wait()
	if c.daemon != nil {
		c.node.Scrape(ckptMetrics{c.daemon}.tell)
		r, j := c.node.Rendezvous(), c.node.Job()
		if c.replicas > 1 && r.Upstream() != nil {
			c.node.Log().Warn("--ckpt-replicas has no effect under a master of DLRover, " +
				"which brings no checkpoint daemons together")
		}
		master := r.Daemons()
		c.daemon.Serve(ckptd.Network{Master: master, Token: j.Token, File: j.TokenFile, Addr: j.Node.Addr, TLS: j.TLS})
		follow(r, master, c.daemon.Move)
		c.daemon.RemoveStale()
	}
}

// follow has move called with every address of r.Daemons after the one that is known, also if it has changed before.
func follow(r feature.Rendezvous, known string, move func(addr string)) {
	r.FollowDaemons(move)
	for now := r.Daemons(); now != known; now = r.Daemons() {
		move(now)
		known = now
	}
}

// environ is for the workers of an epoch.
func (c *checkpoints) environ(e launcher.Epoch) []string {
	env := []string{fmt.Sprintf("DLROVER_CKPT_EPOCH=%d.%d.%d", e.Term, e.Round, e.Epoch)}
	if c.daemon != nil {
		env = append(env, "DLROVER_CKPT_RUNTIME="+c.daemon.Dir())
	}
	if p := c.node.Job().Params; p.Max > p.Min { // ElasticTrainer keeps the batch size of MAX nodes
		env = append(env, fmt.Sprintf("DLROVER_MAX_NODES=%d", p.Max))
	}
	return env
}

func (c *checkpoints) start(r *launcher.StartRequest) {
	r.Setenv(c.environ(r.Epoch)...)
	if c.daemon == nil {
		return
	}
	c.began.Store(time.Now().UnixNano())
	c.newest.forget()
	p := r.Place
	c.daemon.World(checkpointd.World{
		Term: r.Term, Round: r.Round, Epoch: r.Epoch.Epoch, GroupRank: p.GroupRank, GroupWorldSize: p.GroupWorldSize,
		RankBase: p.RankBase, WorldSize: p.WorldSize, LocalWorldSize: c.node.Job().Slots,
	})
}

// stop has the daemon save the workers' state from memory. A node that leaves is
// not a failure that the next workers recover from, so --no-save-at-breakpoint does not count. Nor does it count on
// the nodes that stay, because the whole step needs their shards.
func (c *checkpoints) stop(r launcher.StopRequest) {
	c.signaled = c.signaled || r.Leaving
	if c.daemon != nil && (c.breakpoint || c.signaled || r.CauseKind == job.CauseLeave) {
		c.daemon.Breakpoint(r.Reason, pace(r))
	}
}

// pace puts training first where the same nodes go on: their memory has all that they need.
func pace(r launcher.StopRequest) checkpointd.Pace {
	switch {
	case r.Early:
		return checkpointd.Early
	case !r.Leaving && (r.CauseKind == job.CauseFailure || r.CauseKind == job.CauseHang):
		return checkpointd.AfterRestart
	}
	return checkpointd.AtOnce
}

// status is that of the daemon; nil without an error: there is none now.
func (c *checkpoints) status(ctx context.Context) (*checkpointd.Status, error) {
	if c.daemon == nil {
		return nil, nil
	}
	return c.daemon.Status(ctx)
}

// saved reports whether the daemon has a whole save of at least one of this node's ranks.
func (c *checkpoints) saved(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, statusTime)
	defer cancel()
	st, err := c.status(ctx)
	if err != nil || st == nil {
		return false
	}
	return slices.ContainsFunc(st.Segments, func(s checkpointd.SegmentStatus) bool { return !s.Copy })
}

// saves are those of the newest epoch, as far as all workers of this node have made them that make any.
func (c *checkpoints) saves() job.Progress {
	st := c.newest.get()
	if st == nil {
		return job.Progress{}
	}
	return progressOf(st, time.Unix(0, c.began.Load()), time.Now())
}

// progressOf leaves the time that saves have taken since out of the age of a save: nothing was trained then.
func progressOf(st *checkpointd.Status, began, now time.Time) job.Progress {
	u := st.Usage
	p := job.Progress{Loaded: u.Loaded, Resumed: u.Resumed, Blocked: u.Blocked}
	for _, r := range st.Ranks {
		step, at := r.MemoryStep, r.MemoryAt
		if r.DurableAt.After(at) {
			step, at = r.DurableStep, r.DurableAt
		}
		if at.After(began) && (!p.Saving || step < p.Checkpoint) {
			p.Checkpoint, p.Saving, p.Kept = step, true, max(now.Sub(at)-(u.Blocked-u.Before), 1)
		}
	}
	return p
}

// end waits for the saves that are being written to disk.
func (c *checkpoints) end(r launcher.EndRequest) {
	c.opening.Wait() // this node may not have joined
	if c.daemon != nil {
		c.unsaved = c.daemon.End(r.Budget, r.Enough)
	}
}

func (c *checkpoints) release() {
	c.opening.Wait()
	if c.daemon != nil {
		c.daemon.Close()
	}
}
