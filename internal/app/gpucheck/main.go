// Package gpucheck is the program of that name. It asks NVIDIA's driver for the state of the GPUs of this machine and
// the links between them. It copies memory between pairs of them, and prints its findings. It is a process of its own,
// the only one with cgo, because a driver may hang or crash. The launcher starts it as a child, under a deadline, and
// does without it where it cannot run.
package gpucheck

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"dlrover-run/internal/duration"
	"dlrover-run/internal/version"
	"dlrover-run/switchbox"
)

// Exit statuses. A report is printed with all of them but exitUsage.
const (
	exitOK      = 0 // nothing is wrong, or nothing could be checked
	exitFaulty  = 1
	exitUsage   = 2
	exitTimeout = 3
)

// level is how much is checked. Each includes those before it.
type level string

const (
	inventory level = "inventory" // the GPUs, and their memory in use
	links     level = "links"     // the driver's data about GPUs and their links
	copies    level = "copy"      // memory is copied between pairs
)

// options are those of the command line.
type options struct {
	level   level
	pairs   []switchbox.Pair
	limits  switchbox.Limits
	timeout time.Duration
	json    bool
}

// defaultTimeout is enough for the copies between eight GPUs; initialising drivers without a persistence daemon takes
// longest.
const defaultTimeout = 20 * time.Second

// Main is the program; it does not return.
func Main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr, system, os.Exit)) }

// run is main. exit ends the process when the watchdog finds a driver that hangs: run itself cannot return then.
func run(args []string, stdout, stderr io.Writer, d drivers, exit func(int)) int {
	o, err := parse(args, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return exitOK
	case err != nil:
		fmt.Fprintln(stderr, "gpucheck:", err)
		return exitUsage
	}
	p := newProgress(func(r switchbox.Report) { show(stdout, r, o.json) })
	stop := p.watch(o.timeout, exit)
	defer stop()
	r, err := check(o, d, p)
	if err != nil {
		fmt.Fprintln(stderr, "gpucheck:", err)
		return exitUsage
	}
	p.finish(r)
	if r.State == switchbox.Faulty {
		return exitFaulty
	}
	return exitOK
}

const usage = `gpucheck [options]: check the NVIDIA GPUs of this machine, and the links between them

`

func parse(args []string, help io.Writer) (options, error) {
	o := options{level: links, timeout: defaultTimeout}
	f := flag.NewFlagSet("gpucheck", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.BoolVar(&o.json, "json", false, "print a line of JSON instead of text")
	f.Func("level", "`LEVEL` of checks: inventory, links or copy, each with those before it (default: links)", o.setLevel)
	addPairs := func(text string) error { return o.addPairs(text) }
	f.Func("pairs", "`A:B` ...: GPUs to copy between, by the driver's numbers, as in 0:1 2:3, or ring: each with the "+
		"next. It implies --level=copy, whose default is 0:1 2:4 3:5 6:7, and then the GPUs left over, in order", addPairs)
	f.Func("box-pairs", "`A:B` ...: the launcher's name of --pairs", addPairs)
	f.Float64Var(&o.limits.MinBandwidth, "min-bandwidth", 0,
		"`MB/S` (10^6 bytes a second) that each direction of a pair must reach; 0: measure only")
	f.IntVar(&o.limits.MinChannels, "min-channels", 0, "`NUMBER` of pairs that must reach --min-bandwidth; 0: report only")
	f.Var((*duration.Value)(&o.timeout), "timeout", "`DURATION`: time for a driver to answer, 1s to 1h")
	showVersion := f.Bool("version", false, "print the version")
	if err := parseAll(f, args, addPairs); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprint(help, usage)
			f.SetOutput(help)
			f.PrintDefaults()
		}
		return o, err
	}
	if *showVersion {
		fmt.Fprintln(help, "gpucheck", version.Version)
		return o, flag.ErrHelp
	}
	return o, o.complete()
}

// parseAll takes words between the options for further pairs: `--pairs 0:1 2:3 --json` is how people write lists.
func parseAll(f *flag.FlagSet, args []string, addPairs func(string) error) error {
	for {
		if err := f.Parse(args); err != nil {
			return err
		}
		if args = f.Args(); len(args) == 0 {
			return nil
		}
		if err := addPairs(args[0]); err != nil {
			return err
		}
		args = args[1:]
	}
}

func (o *options) setLevel(text string) error {
	if o.level = level(text); !slices.Contains([]level{inventory, links, copies}, o.level) {
		return fmt.Errorf("need inventory, links or copy")
	}
	return nil
}

func (o *options) addPairs(text string) error {
	for _, word := range strings.FieldsFunc(text, func(c rune) bool { return c == ',' || c == ' ' }) {
		if word == switchbox.RingWord {
			o.limits.Ring = true
			continue
		}
		var p switchbox.Pair
		if err := p.UnmarshalText([]byte(word)); err != nil {
			return err
		}
		o.pairs = append(o.pairs, p)
	}
	return nil
}

func (o *options) complete() error {
	if o.timeout < time.Second || o.timeout > time.Hour {
		return fmt.Errorf("--timeout=%s: need 1s to 1h", duration.Text(o.timeout))
	}
	o.limits.Given = len(o.pairs) > 0
	if !o.limits.Given && !o.limits.Ring {
		return nil
	}
	if o.level = copies; o.limits.Given && o.limits.Ring {
		return fmt.Errorf("--pairs has ring beside %s: ring is all pairs there are; use one of them", o.pairs[0])
	}
	return switchbox.CheckPairs(o.pairs, o.limits)
}
