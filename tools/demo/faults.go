package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

//go:embed faults.py
var faultsPy []byte

const (
	betweenFaults = 20 * time.Second
	pageTime      = 3 * time.Minute // after the last fault
)

// faults are planted one after the other, each in a run of its own.
type faults struct {
	*screen
	cluster *cluster
	fabric  fabric
	unbuilt error           // why there is no fabric
	ctx     context.Context // ends with the first signal
}

// planted is a run, of two nodes unless it says otherwise, and its fault.
type planted struct {
	run, what string
	args      []string // of dlrover-run
	script    string   // the fault of faults.py
	env       []string
	plant     func(*faults) error
	machines  int // of the fabric, a node on each
}

// slowMachines is how many a check needs to name a slow one: it has to be slow with three others.
const slowMachines = 4

var allFaults = []planted{
	{run: "run-1", what: "rank 1 hangs in load_batch, some 3 s after its first step", script: "hang",
		env: []string{"XPU_TIMER_HANG_TIMEOUT=4"}},
	{run: "run-2", what: "rank 1 raises a KeyError at step 20 of every start", script: "crash",
		args: []string{"--max-restarts=1000", "--same-failures=-1", "--restart-backoff=2s:10s"}},
	{run: "run-3", what: "the disk of the checkpoints has 1 MB, and they need 3", script: "disk",
		plant: (*faults).smallDisk},
	{run: "run-4", what: "the cable of run-4-d sends a fifth of the others' 100 Mbit/s, as the check of the nodes finds",
		script: "none", args: []string{"--nnodes=4", "--network-check", "--check-level=host"},
		env: []string{"GLOO_SOCKET_IFNAME=eth0"}, machines: slowMachines,
		plant: func(f *faults) error { return f.unbuilt }},
	{run: "run-5", what: "one of two nodes is killed, 20 s from now", script: "none"},
}

// playFaults plants faults while somebody looks for their culprits on the page of the master.
func playFaults(ctx context.Context, s *screen, dir, bin string, _ plan) error {
	py, err := findPython(ctx, s, dir)
	if err != nil {
		return err
	}
	c, err := newCluster(dir, bin, py.path, nil)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Unmount(c.path("disk"), syscall.MNT_DETACH) }() // it may not be mounted
	f := &faults{screen: s, cluster: c, ctx: ctx}
	defer f.fabric.remove()
	defer c.close()
	if f.unbuilt = f.fabric.build(slowMachines); f.unbuilt == nil {
		c.host = address(thisMachine)
	}
	if err := errors.Join(os.WriteFile(c.path("faults.py"), faultsPy, 0o600), os.Mkdir(c.path("disk"), 0o700),
		c.startMaster(ctx)); err != nil {
		return err
	}
	s.began = time.Now()
	if err := f.play(); err != nil && ctx.Err() == nil {
		return err
	}
	return nil // Ctrl-C is how people end this
}

func (f *faults) play() error {
	link, err := f.link()
	if err != nil {
		return err
	}
	f.line("The page of dlrover-master, for one browser, within a minute:\n\n    %s\n\nAnother link:\n\n    %s\n", link,
		"DLROVER_TOKEN_FILE="+f.cluster.path("token")+" DLROVER_MASTER_ADDR="+f.cluster.addr+" "+
			filepath.Join(f.cluster.bin, "dlroverctl")+" open")
	for _, x := range allFaults {
		if err := f.start(x); err != nil {
			return err
		}
		if err := f.wait(betweenFaults); err != nil {
			return err
		}
	}
	lost := f.cluster.nodes["run-5-b"]
	f.tell(time.Now(), "run-5: kill -9 %d, the launcher of run-5-b", lost.cmd.Process.Pid)
	if err := lost.cmd.Process.Kill(); err != nil {
		return err
	}
	f.line("\nAll is planted. This ends by itself in %s, or with Ctrl-C.", pageTime)
	return f.wait(pageTime)
}

// start plants a fault, and tells about it.
func (f *faults) start(x planted) error {
	if x.plant != nil {
		if err := x.plant(f); err != nil {
			f.tell(time.Now(), "%s: NOT PLANTED: %s: %v", x.run, x.what, err)
			return nil
		}
	}
	f.tell(time.Now(), "%s: %s", x.run, x.what)
	for i := range max(x.machines, 2) {
		node := x.run + "-" + string(rune('a'+i))
		args := append([]string{"--rdzv-id=" + x.run, "--nnodes=2"}, x.args...)
		args = append(args, f.cluster.path("faults.py"), x.script, f.cluster.path("disk"))
		env := x.env
		if x.script == "hang" { // its report goes the way of everything else
			env = append(slices.Clone(env), "XPU_TIMER_TIMELINE_PATH="+f.cluster.path("timeline"))
		}
		f.cluster.within = nil
		if x.machines > 0 {
			f.cluster.within = []string{"ip", "netns", "exec", f.fabric.spaces[i]}
		}
		if err := f.cluster.startLauncher(node, args, nil, env...); err != nil {
			return err
		}
	}
	return nil
}

func (f *faults) smallDisk() error {
	return syscall.Mount("tmpfs", f.cluster.path("disk"), "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "size=1m")
}

// link is one to the page, for a browser.
func (f *faults) link() (string, error) {
	cmd := exec.CommandContext(f.ctx, filepath.Join(f.cluster.bin, "dlroverctl"), "open")
	cmd.Env = append(environment(), "DLROVER_TOKEN_FILE="+f.cluster.path("token"), "DLROVER_MASTER_ADDR="+f.cluster.addr)
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("dlroverctl open: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// wait lets the time pass.
func (f *faults) wait(d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-f.ctx.Done():
		return context.Cause(f.ctx)
	}
}
