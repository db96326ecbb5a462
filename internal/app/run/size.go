package run

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/scheduler"
)

// size is the number of workers of this node.
type size struct {
	slots int
	why   string // where the number comes from
	share string // preset.Vars'
}

// sideOnly reports whether this node has one side process, and no workers.
func (z *size) sideOnly() bool { return z.share != "" && z.share != preset.Workers }

// readNodes decides the number of nodes.
func readNodes(o *options, f *scheduler.Facts) (lo, hi, unit int, err error) {
	if lo, hi, err = argv.ParseNNodes(o.String("nnodes")); err != nil {
		return lo, hi, unit, err
	}
	if o.Bool("auto-config") {
		lo, err = autoNodes(o)
		hi = lo
	} else {
		lo, hi, err = nodesByScheduler(o, f, lo, hi)
	}
	if unit = o.Int("node-unit"); err == nil && unit < 1 {
		err = fmt.Errorf("--node_unit=%d: need a number of nodes from 1", unit)
	}
	return lo, hi, unit, err
}

// autoNodes is --auto_config: the number of nodes comes from the pod's NODE_NUM.
func autoNodes(o *options) (int, error) {
	n, err := strconv.Atoi(o.Lookup("NODE_NUM"))
	if err != nil || n < 1 {
		return 0, fmt.Errorf("--auto_config needs $NODE_NUM to be the number of nodes, got %q", o.Lookup("NODE_NUM"))
	}
	return n, nil
}

// nodesByScheduler compares the numbers of nodes.
func nodesByScheduler(o *options, f *scheduler.Facts, lo, hi int) (int, int, error) {
	switch {
	case !scheduled(f) || f.Nodes == 0:
		return lo, hi, nil
	case !o.IsSet("nnodes"):
		return f.Nodes, f.Nodes, nil
	case lo > f.Nodes:
		return 0, 0, fmt.Errorf("--nnodes=%s needs %d nodes, but %s has started %d (from %s): leave the option out, or give "+
			"--scheduler=none", o.String("nnodes"), lo, f.Name, f.Nodes, strings.Join(f.From, ", "))
	case hi < f.Nodes && hi > 1:
		o.Warn("--nnodes=%s, but %s has started %d nodes: the others are spares", o.String("nnodes"), f.Name, f.Nodes)
	}
	return lo, hi, nil
}

// readSize decides the number of workers.
func readSize(o *options, f *scheduler.Facts) (z size, err error) {
	if z.share = f.Share; z.sideOnly() {
		z.why = f.Name + ": this node is the " + z.share
		return z, nil
	}
	if f.Slots > 0 && !o.IsSet("nproc-per-node") && !o.Bool("auto-config") {
		z.slots, z.why = f.Slots, f.Name
		return z, nil
	}
	z.slots, z.why, err = countWorkers(o, o.String("nproc-per-node"))
	return z, err
}

func countWorkers(o *options, text string) (int, string, error) {
	gpus, kind, err := wantedDevices(o, text)
	if err != nil {
		return 0, "", err
	}
	if o.Bool("auto-config") && gpus > 0 {
		return gpus, kind + " of this node (--auto_config)", nil
	}
	switch text {
	case "cpu":
		return o.host.cpus(), "CPUs that this process may use", nil
	case "auto":
		if gpus > 0 {
			return gpus, kind, nil
		}
		return o.host.cpus(), "no accelerator to use, so CPUs that this process may use", nil
	case "gpu":
		if gpus == 0 {
			return 0, "", fmt.Errorf("--nproc-per-node=gpu: no GPU is visible here (looked for " + proc.DeviceFiles +
				", and at the visibility variables); use auto, cpu or a number")
		}
		return gpus, kind, nil
	case "xpu":
		return 0, "", fmt.Errorf("--nproc-per-node=xpu: Intel XPUs cannot be counted here; give their number")
	}
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		return 0, "", fmt.Errorf("--nproc-per-node=%s: unsupported nproc_per_node value; use a number, auto, cpu or gpu",
			text)
	}
	if n < 1 || n > 4096 {
		return 0, "", fmt.Errorf("--nproc-per-node=%d: need 1 to 4096 workers", n)
	}
	return n, "--nproc-per-node", nil
}

// wantedDevices counts the accelerators of this node, if options ask for them.
func wantedDevices(o *options, text string) (gpus int, kind string, err error) {
	if o.IsSet("accelerator") || o.Bool("auto-config") || text == "auto" || text == "gpu" {
		gpus, kind = o.host.gpus()
	}
	if o.String("accelerator") == feature.NoAccelerator {
		if text == "gpu" {
			return 0, "", fmt.Errorf("--nproc-per-node=gpu and --accelerator=%s contradict each other: use one of them",
				feature.NoAccelerator)
		}
		gpus, kind = 0, "" // there may be some that this job does not use
	}
	want := feature.Kinds(o.String("accelerator"))
	if o.IsSet("accelerator") && gpus > 0 && len(want) > 0 && !slices.Contains(want, kind) {
		return 0, "", fmt.Errorf("--accelerator=%s: the devices of this node are %s; leave the option out or name theirs",
			o.String("accelerator"), kind)
	}
	return gpus, kind, nil
}
