package nodechecks

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/tempdir"
	"dlrover-run/launcher/preset"
	"dlrover-run/netcheck"
	"dlrover-run/netcheck/serve"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto/upstream"
)

// pythonProgram runs DLRover's own test of nodes. The other node of a pair runs it, too, under DLRover's agent or
// ours. It writes the time that it took into its own directory, because DLRover's is shared by the whole host.
const pythonProgram = `import os, sys
import dlrover.python.common.constants as constants
constants.ConfigPath.NETWORK_CHECK_DATA_DIR = sys.argv[2]
import importlib
check = importlib.import_module("dlrover.trainer.torch.node_check." + sys.argv[1])
if hasattr(check, "set_nccl_env"):
    check.set_nccl_env()
check.main()
`

// pythonCheck is the check of this node under DLRover's master. The error is about an option without effect there.
func (c *nodeChecks) pythonCheck(ctx context.Context) (upstream.Check, error) {
	k := upstream.Check{Local: true, ExcludeStraggler: c.spec.ExcludeStraggler, ReportOnly: c.spec.ReportOnly}
	if c.only {
		return k, errors.New("--check-only: a master of DLRover checks nodes only before it trains with them; " +
			"leave it out, or use dlrover-master")
	}
	if c.spec.Level == netcheck.LevelLocal {
		return k, nil
	}
	k.Test, k.Inert = c.pythonTest, strings.Join(c.pythonInert(), " ")
	return k, c.hasDLRover(ctx)
}

// pythonInert lists the options that DLRover's test does not know. It has no collective of all nodes. Every start
// has a test, because a node that stayed away would keep the others waiting. Its limit is that of all partners,
// agents among them, and their verdict comes within a fixed time, too.
func (k *checkSettings) pythonInert() (options []string) {
	if k.spec.Comm {
		options = append(options, "--comm-perf-test")
	}
	switch k.spec.TTL {
	case netcheck.DefaultTTL:
	case 0:
		options = append(options, "--check-ttl=run")
	default:
		options = append(options, "--check-ttl="+k.spec.TTL.String())
	}
	if k.spec.Timeout != netcheck.DefaultTimeout {
		options = append(options, "--check-timeout="+k.spec.Timeout.String())
	}
	return options
}

// hasDLRover returns an error if the test of DLRover cannot run on this node.
func (c *nodeChecks) hasDLRover(ctx context.Context) error {
	interpreter, err := c.interpreter()
	if err != nil {
		return err
	}
	const find = `import importlib.util as u, sys; sys.exit(not u.find_spec("dlrover") or not u.find_spec("torch"))`
	cmd := exec.CommandContext(ctx, interpreter, "-c", find)
	cmd.Env = c.node.Environ()
	wait, err := c.startCommand(cmd)
	if err == nil {
		err = wait()
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("--network-check under a master of DLRover runs DLRover's own test, so that every node can take "+
		"part: %s has no package dlrover, or no torch (%w); install it, or leave --network-check out", interpreter, err)
}

// interpreter is the workers'.
func (c *nodeChecks) interpreter() (string, error) {
	if c.python == "" && c.noPy == nil {
		return "", errors.New("--network-check under a master of DLRover needs the workers' Python: use --check-level=full")
	}
	return c.python, c.noPy
}

// pythonTest runs the test with the nodes of a group, with as many processes as there will be workers.
func (c *nodeChecks) pythonTest(ctx context.Context, g upstream.Group) (float64, error) {
	dir, err := tempdir.Make("dlrover-run-check-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var tests sync.WaitGroup
	errs := make([]error, c.node.Job().Slots)
	for local := range errs {
		tests.Go(func() {
			if errs[local] = c.pythonRank(ctx, g, local, dir); errs[local] != nil {
				cancel() // the others would wait for it
			}
		})
	}
	tests.Wait()
	if err := cmp.Or(errs...); err != nil {
		return 0, err
	}
	return slowest(dir, len(errs))
}

// maxReason bounds the quoted end of a test's output.
const maxReason = 300

func (c *nodeChecks) pythonRank(ctx context.Context, g upstream.Group, local int, dir string) error {
	cmd := exec.CommandContext(ctx, c.python, "-c", pythonProgram, pythonModule(c.kind), dir)
	cmd.Env = preset.MergeEnv(c.torchEnv(), []string{
		"RANK=" + strconv.Itoa(g.RankBase+local), "LOCAL_RANK=" + strconv.Itoa(local),
		"WORLD_SIZE=" + strconv.Itoa(g.WorldSize), "LOCAL_WORLD_SIZE=" + strconv.Itoa(c.node.Job().Slots),
		"MASTER_ADDR=" + g.MasterAddr, "MASTER_PORT=" + strconv.Itoa(g.MasterPort),
		"TORCHELASTIC_USE_AGENT_STORE=False", "PYTHONUNBUFFERED=1",
	})
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	wait, err := c.startCommand(cmd)
	if err == nil {
		err = wait()
	}
	if err != nil {
		lines := strings.TrimSpace(out.String())
		return fmt.Errorf("local rank %d: %w: %s", local, err, lines[max(0, len(lines)-maxReason):])
	}
	c.log.Debug("DLRover's test of this node has passed", "local_rank", local)
	return nil
}

// pythonModule is DLRover's test for a kind of devices.
func pythonModule(kind string) string {
	switch kind {
	case "ascend":
		return "ascend_npu"
	case "musa":
		return "mthreads_gpu"
	}
	return "nvidia_gpu" // MetaX' too; without devices it uses the CPU
}

// maxTold bounds the result of a process of the test, in bytes.
const maxTold = 64 << 10

// slowest is the time of the slowest process, in seconds.
func slowest(dir string, processes int) (most float64, err error) {
	for local := range processes {
		data, err := openfile.Read(filepath.Join(dir, strconv.Itoa(local)+".txt"), maxTold)
		if err != nil {
			return 0, fmt.Errorf("DLRover's test has not told how long it took: %w", err)
		}
		var told struct{ Time float64 }
		if err := json.Unmarshal(data, &told); err != nil {
			return 0, fmt.Errorf("DLRover's test has told %.100q instead of how long it took: %w", data, err)
		}
		most = max(most, told.Time)
	}
	return most, nil
}

// alone has this node examined by itself: DLRover's master does not support our checks.
func (c *nodeChecks) alone(p *upstream.Service) *serve.Hub {
	spec := c.spec
	spec.Level = netcheck.LevelLocal
	hub := serve.New(serve.Config{
		Spec: func(string) (netcheck.Spec, error) { return spec, nil }, Log: c.log,
		Keep: func(string) bool { return true }, Note: func(string, job.Note) {},
		Bar: func(run, id, _, reason string) {
			_ = p.Report(context.Background(), run, rendezvous.Barred{ID: id, Reason: reason}) // the launcher reports it, too
		},
	})
	return hub
}
