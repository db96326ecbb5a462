package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/python"
	"dlrover-run/cmd/internal/ckptd"
	"dlrover-run/cmd/internal/pytree"
	"dlrover-run/launcher"
	"dlrover-run/launcher/proc"
)

// checkpointClient is what training processes import to save checkpoints. It stands before the user's path: of a
// package with one of its names there, the client itself gives way.
var checkpointClient = pythonTree{
	Source: pytree.Source{Name: "checkpoint-client", Files: python.Files},
	what:   "checkpoint client", loss: "workers cannot import dlrover",
}

// checkpoints keeps what the workers save in memory, with a daemon.
type checkpoints struct {
	s        *settings
	daemon   *ckptd.Supervisor // nil: workers save by themselves
	signaled bool              // the job was told to end; belongs to the launcher's loop
}

func openCheckpoints(j *job) *checkpoints {
	c := &checkpoints{s: j.s}
	if !j.s.ckpt.off {
		var err error
		if c.daemon, err = ckptd.NewSupervisor(j.daemonConfig()); err != nil {
			j.log.Warn("no checkpoint daemon: workers save by themselves", "err", err)
		}
	}
	j.python.add(checkpointClient)
	j.python.tidy()
	return c
}

func (j *job) daemonConfig() ckptd.SupervisorConfig {
	s, k := j.s, &j.s.ckpt
	sum := sha256.Sum256(fmt.Appendf(nil, "%s|%s|%s:%d", s.runID, s.backend, s.host, s.port))
	return ckptd.SupervisorConfig{
		ShmDir: k.shmDir, Key: hex.EncodeToString(sum[:6]), Sidecar: k.sidecar, Run: s.runID, Token: s.token,
		Replicas: k.replicas, WriteRate: k.writeRate, LogFormat: s.logs.format,
		Start: j.startDaemon, Logger: j.log,
	}
}

// daemonProcess is a daemon as its supervisor sees it.
type daemonProcess struct{ *proc.Process }

func (p daemonProcess) Code() int { return p.Exit().Code }

func (j *job) startDaemon(c ckptd.Command) (ckptd.Process, error) {
	p, err := j.procs.Start(proc.Spec{
		Path: "/proc/self/exe", Args: c.Args, Env: c.Env, Dir: "/", Stdin: c.Stdin, Stderr: os.Stderr, Survives: true,
	})
	if errors.Is(err, proc.ErrClosed) {
		return nil, ckptd.ErrClosed
	}
	return daemonProcess{p}, err
}

// serve begins to keep the daemon, now that it is known how it reaches others.
func (c *checkpoints) serve(e *endpoint) {
	if c.daemon != nil {
		c.daemon.Serve(ckptd.Network{Master: e.daemons(c.s), Addr: c.s.node.Addr})
		c.daemon.RemoveStale()
	}
}

// Name implements launcher.Part.
func (c *checkpoints) Name() string { return "checkpoints" }

// Environ implements launcher.Environer.
func (c *checkpoints) Environ(e launcher.Epoch, _ int) []string {
	env := []string{fmt.Sprintf("DLROVER_CKPT_EPOCH=%d.%d.%d", e.Term, e.Round, e.Epoch)}
	if c.daemon != nil {
		env = append(env, "DLROVER_CKPT_RUNTIME="+c.daemon.Dir())
	}
	return env
}

// Starting implements launcher.Starter.
func (c *checkpoints) Starting(e launcher.Epoch) {
	if c.daemon == nil {
		return
	}
	p := e.Place
	c.daemon.World(checkpointd.World{
		Term: e.Term, Round: e.Round, Epoch: e.Epoch, GroupRank: p.GroupRank, GroupWorldSize: p.GroupWorldSize,
		RankBase: p.RankBase, WorldSize: p.WorldSize, LocalWorldSize: c.s.slots,
	})
}

// Stopped implements launcher.Stopper: what the workers left in memory is to be saved. A signal is not a failure that
// the next workers recover from, so --no-save-at-breakpoint does not count.
func (c *checkpoints) Stopped(why launcher.StopInfo) {
	c.signaled = c.signaled || why.Early
	if c.daemon != nil && (c.s.ckpt.breakpoint || c.signaled) {
		c.daemon.Breakpoint(why.Reason, why.Early)
	}
}

// End implements launcher.Ender: it waits for what is on its way to the disk.
func (c *checkpoints) End(e launcher.Ending) {
	if c.daemon != nil {
		c.daemon.End(e.Budget, e.Enough)
	}
}

func (c *checkpoints) close() {
	if c != nil && c.daemon != nil {
		c.daemon.Close()
	}
}
