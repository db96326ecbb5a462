// demo shows an elastic PyTorch training under dlrover-run. It kills a worker, kills a node and adds one, and checks
// that the training survives all three: "make demo". With --masters it kills the master that serves three times, and
// checks that the training does not notice: "make demo-ha". With --page it plants faults, whose culprits are to be
// found on the page of the master: "make demo-ui".
//
// One goroutine runs the scenario. The cluster owns the goroutines that read the output of its processes, and waits for
// them when it closes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	fast := flags.Bool("fast", false, "train fewer steps, for CI")
	several := flags.Bool("masters", false, "kill the master that serves, of three, instead of workers and nodes")
	page := flags.Bool("page", false, "plant faults, to be found on the page of the master")
	bin := flags.String("bin", "bin", "`directory` of dlrover-run and dlrover-master")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	p := plan{steps: 400, checkpointEvery: 10, stepTime: 30 * time.Millisecond}
	if *fast {
		p.steps = 160
	}
	ctx, stop := onSignal()
	defer stop()
	story := play
	switch {
	case *page:
		story = playFaults
	case *several:
		story = playMasters
	}
	err := demo(ctx, newScreen(os.Stdout), *bin, p, story)
	switch sig, interrupted := errors.AsType[*signalError](err); {
	case interrupted:
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 128 + int(sig.sig)
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo: failed:", err)
		return 1
	}
	return 0
}

type signalError struct{ sig syscall.Signal }

func (e *signalError) Error() string { return "ended by " + e.sig.String() }

// onSignal returns a context that ends with the first signal, and its cause.
func onSignal() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if sig, ok := <-signals; ok {
			cancel(&signalError{sig.(syscall.Signal)})
		}
	}()
	return ctx, func() { signal.Stop(signals); close(signals); <-done; cancel(nil) }
}

// demo runs a story of a training.
func demo(ctx context.Context, s *screen, bin string, p plan,
	story func(ctx context.Context, s *screen, dir, bin string, p plan) error) error {
	if _, err := os.Stat(filepath.Join(bin, "dlrover-run")); err != nil {
		return fmt.Errorf("%w; run 'make build' first, or name the directory with --bin", err)
	}
	if err := adoptOrphans(); err != nil {
		return err
	}
	return inDirectory(ctx, s, func(dir string) error { return story(ctx, s, dir, bin, p) })
}

// inDirectory plays in a directory of its own, which it removes unless there is something in it to look at.
func inDirectory(ctx context.Context, s *screen, play func(dir string) error) error {
	dir, err := os.MkdirTemp("", "dlrover-demo-")
	if err != nil {
		return err
	}
	err = play(dir)
	s.clear()
	if err == nil || ctx.Err() != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	if os.Remove(dir) == nil {
		return err // nothing has run yet
	}
	s.showLogs(dir)
	return fmt.Errorf("%w; all logs are in %s", err, dir)
}

// showLogs prints the ends of the error output of the launchers and their workers.
func (s *screen) showLogs(dir string) {
	const lines = 12
	files, _ := filepath.Glob(filepath.Join(dir, "*.stderr"))
	for _, f := range files {
		if text := lastLines(f, lines); text != "" {
			s.line("\n--- end of %s\n%s", f, text)
		}
	}
}

func play(ctx context.Context, s *screen, dir, bin string, p plan) error {
	py, err := findPython(ctx, s, dir)
	if err != nil {
		return err
	}
	c, err := newCluster(dir, bin, py.path, trainArgs(dir, p))
	if err != nil {
		return err
	}
	c.launch = []string{"--nnodes=1:2", "--warm"}
	defer c.close()
	if err := c.startMaster(ctx); err != nil {
		return err
	}
	s.began = time.Now()
	s.line("A classifier trains with PyTorch %s DDP for %d steps (%s); dlrover-master is at %s.\n",
		py.torch, p.steps, py.path, c.addr)
	scenario := newScenario(ctx, s, p, c)
	if err := scenario.run(); err != nil {
		return err
	}
	return scenario.judge()
}

func trainArgs(dir string, p plan) []string {
	return []string{
		fmt.Sprintf("--steps=%d", p.steps), fmt.Sprintf("--step-seconds=%v", p.stepTime.Seconds()),
		"--checkpoint=" + filepath.Join(dir, "checkpoint.pt"), fmt.Sprintf("--checkpoint-every=%d", p.checkpointEvery),
	}
}

// judge prints the timeline and the results of its checks.
func (s *scenario) judge() error {
	recs, err := recoveries(s.records)
	if err != nil {
		return err
	}
	s.line("\n%s", table(recs, s.began))
	s.line("launchers restarted: from the event until every launcher has started new workers.")
	s.line("training again: until these have done a step.\n")
	return s.verdict(checks(s.records, recs, s.plan, leftovers(leftoverLimit, false)))
}

// verdict prints the checks, and returns an error if one of them has failed.
func (s *scenario) verdict(all []check) error {
	failed := 0
	for _, c := range all {
		mark := s.paint(green, "ok    ")
		if !c.ok {
			mark, failed = s.paint(red, "FAILED"), failed+1
		}
		s.line("%s  %s", mark, c.what)
	}
	if failed > 0 {
		return fmt.Errorf("%d of the checks above", failed)
	}
	return nil
}

// leftoverLimit is ample for the end of processes that were ordered to end.
const leftoverLimit = 3 * time.Second
