// bench measures dlrover-run and its peer, torchrun, side by side. For every row it runs one of ours, one of the
// peer's and so on, so that a change of the machine's load affects both. The workers are the same program for both
// (see stamp). The peers of our checkpoints are torch.save with fsync and DLRover, if BENCH_DLROVER_PYTHON names an
// interpreter with it.
//
//	go run ./tools/bench [-rows start,restart] [-quick] [-slow]
//
// It expects the binaries of `make build` and runs in the root of the repository. Times are CLOCK_MONOTONIC, read by
// the worker itself. All traffic is on loopback.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == simulateCommand {
		exit(simulate(os.Args[2:], os.Stdout))
	}
	if len(os.Args) > 1 && os.Args[1] == judgeCommand {
		exit(judge(os.Args[2:]))
	}
	if len(os.Args) == 4 && os.Args[1] == storeCommand {
		exit(storeCrowd(os.Args[2:]))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	exit(run(ctx, os.Args[1:]))
}

func exit(err error) {
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
		os.Exit(0)
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type options struct {
	rows        string
	n           int // repetitions of ours
	peerN       int
	tls         string // of the row scale
	quick, slow bool
	bin         string
	python      string
	idle        time.Duration // over which idle CPU is measured
	daemonless  time.Duration // how long workers must survive without a daemon
	state       int64         // of a checkpoint, MiB
	inner       int           // repetitions within one worker that saves checkpoints
}

// tlsVariable has the choice of TLS.
const tlsVariable = "DLROVER_TLS"

func parse(args []string) (o options, err error) {
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.StringVar(&o.rows, "rows", "",
		"measure only these, separated by commas: "+strings.Join(rowIDs(rows(options{})), ", "))
	fs.IntVar(&o.n, "n", 7, "`repetitions`; slow rows have fewer")
	fs.IntVar(&o.peerN, "peer-n", 3, "`repetitions` of the peer, 0 leaves it out")
	fs.BoolVar(&o.quick, "quick", false, "two repetitions, one of the peers, at most 1000 simulated nodes")
	fs.BoolVar(&o.slow, "slow", false, "also measure what takes the peer minutes")
	fs.StringVar(&o.tls, "tls", "", "`auto`: the row scale is measured under TLS")
	fs.StringVar(&o.bin, "bin", "bin", "`directory` of dlrover-run and dlrover-master")
	fs.StringVar(&o.python, "python", cmp.Or(os.Getenv("TORCH_PYTHON"), "/usr/bin/python3"),
		"`interpreter` with PyTorch, whose torchrun is the peer; $TORCH_PYTHON if set")
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if fs.NArg() > 0 || o.n < 1 || o.peerN < 0 {
		return o, fmt.Errorf("want options only, -n from 1 and -peer-n from 0; see -help")
	}
	o.idle, o.daemonless, o.state, o.inner = 20*time.Second, 5*time.Second, 1024, 3
	if o.quick {
		o.n, o.peerN, o.idle, o.daemonless, o.inner = 2, min(o.peerN, 1), 3*time.Second, time.Second, 1
	}
	return o, nil
}

func run(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	selected, err := selectRows(rows(o), o.rows)
	if err != nil {
		return err
	}
	if err := os.Setenv(tlsVariable, o.tls); err != nil { // for simulated nodes, here and elsewhere
		return err
	}
	b, err := newBench(ctx, o)
	if err != nil {
		return err
	}
	defer b.close()
	rep := report{Machine: describeMachine(b)}
	for _, r := range selected {
		rep.Results = append(rep.Results, b.measure(ctx, r)...)
	}
	rep.Machine.LoadAtEnd = loadAverage()
	fmt.Print(rep.markdown())
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return rep.failed()
}
