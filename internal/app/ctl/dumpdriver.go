package ctl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/urfave/cli/v2"

	"dlrover-run/hang/dump"
	"dlrover-run/hang/rankset"
	"dlrover-run/hang/xpu"
	"dlrover-run/internal/help"
	"dlrover-run/internal/text"
)

// driver is the name of xpu_timer's tool that dumps stacks. By that name this program sends requests to the
// launchers of this machine.
const driver = "xpu_timer_dump_driver"

const driverAbout = `It writes the present stacks of the workers on this machine to files
<rank>-<world size>.stacktrace for xpu_timer_stacktrace_viewer. It asks launchers of this
user that look into their workers: by --hang=auto, a variable XPU_TIMER_... or
xpu_timer_launch. Root asks launchers of all users. Without --gdb, --pyspy and --timeline
it writes native and Python stacks. Only --gdb traces a process, for a moment, where
eu-stack is installed.

Exit status: 0 success; 1 something is missing, and a message says what; 2 the command
line is wrong.`

// unusedTools are options that name programs: dlrover-run reads stacks itself.
func unusedTools() []string { return []string{"gdb-bin", "pyspy-bin", "pstack-bin"} }

// dumpDriver is the program under that name.
type dumpDriver struct{ stdout, stderr io.Writer }

func (d dumpDriver) app(ctx context.Context) *cli.App {
	const options, own = "Options", "Of dlrover-run alone"
	a := &cli.App{
		Name: driver, Usage: "dumps the stacks of the workers on this machine", Description: driverAbout,
		HideHelp: true, HideHelpCommand: true, HideVersion: true, Writer: io.Discard, ErrWriter: io.Discard,
		ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError:   func(_ *cli.Context, err error, _ bool) error { return help.Misuse(driver, err) },
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "dump-path", Category: options, Usage: "`DIR`: directory for the files, made if needed " +
				"(default: the launcher's for evidence of hangs, such as $XPU_TIMER_TIMELINE_PATH)"},
			&cli.IntFlag{Name: "pid", Category: options, Value: -1, Usage: "`PID`: only this worker"},
			&cli.IntFlag{Name: "rank", Category: options, Value: -1, Usage: "`R`: only the worker of this rank"},
			&cli.IntFlag{Name: "world-size", Category: options, Value: -1,
				Usage: "`N`: only jobs with this many ranks"},
			&cli.BoolFlag{Name: "gdb", Category: options, Usage: "dump stacks of native code"},
			&cli.BoolFlag{Name: "pyspy", Category: options, Usage: "dump stacks of Python"},
		},
		Action: func(c *cli.Context) error { return d.drive(ctx, c) },
	}
	for _, name := range unusedTools() {
		a.Flags = append(a.Flags, &cli.StringFlag{Name: name, Category: options,
			Usage: "`FILE`: accepted and ignored with a message: no such tool is needed"})
	}
	a.Flags = append(a.Flags, &cli.IntFlag{Name: "timeline", Category: own, Usage: fmt.Sprintf("`STEPS`: have PyTorch's "+
		"profiler record STEPS steps of each worker, 1 to %d, after the end of its next step. The file is "+
		"<rank>-<world size>.trace.json, for Perfetto. Stacks need --gdb or --pyspy then", dump.MaxSteps)},
		&cli.BoolFlag{Name: "help", Aliases: []string{"h"}, Category: options,
			Usage: "show this text, and exit"})
	return a
}

func (d dumpDriver) run(ctx context.Context, args []string) error {
	a := d.app(ctx)
	if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		help.Print(d.stdout, a, "[options]")
		return nil
	}
	return a.RunContext(ctx, args)
}

// asked is a launcher of this machine and the request to it.
type asked struct {
	path   string
	answer dump.Answer // its workers
	ranks  []int       // of the requested workers
}

func (d dumpDriver) drive(ctx context.Context, c *cli.Context) error {
	r, err := d.request(c)
	if err != nil {
		return err
	}
	all, err := d.launchers(ctx)
	if err != nil {
		return &foundError{err}
	}
	wanted, err := choose(all, c.Int("pid"), c.Int("rank"), c.Int("world-size"))
	if err != nil {
		return &foundError{err}
	}
	return d.askAll(ctx, wanted, r)
}

func (d dumpDriver) request(c *cli.Context) (dump.Request, error) {
	r := dump.Request{Native: c.Bool("gdb"), Python: c.Bool("pyspy"), Steps: c.Int("timeline")}
	if c.NArg() > 0 {
		return r, fmt.Errorf("%q is not an option; see %s --help", c.Args().First(), driver)
	}
	for _, name := range []string{"pid", "rank", "world-size"} {
		if n := c.Int(name); c.IsSet(name) && (n < -1 || n == 0 && name != "rank") {
			return r, fmt.Errorf("--%s=%d: there is no such one; leave it out for all", name, n)
		}
	}
	if c.IsSet("timeline") && (r.Steps < 1 || r.Steps > dump.MaxSteps) {
		return r, fmt.Errorf("--timeline=%d: need 1 to %d steps", r.Steps, dump.MaxSteps)
	}
	if dir := c.String("dump-path"); dir != "" {
		r.Dir = absolute(dir)
	}
	for _, name := range unusedTools() {
		if c.IsSet(name) {
			fmt.Fprintf(d.stderr, "%s: --%s has no effect: dlrover-run reads stacks itself\n", driver, name)
		}
	}
	if !r.Native && !r.Python && r.Steps == 0 {
		r.Native, r.Python = true, true
	}
	return r, nil
}

// launchers are the launchers of this machine that answer.
func (d dumpDriver) launchers(ctx context.Context) (all []asked, err error) {
	paths, err := dump.Find()
	if err != nil {
		return nil, err
	}
	answers, errs := make([]dump.Answer, len(paths)), make([]error, len(paths))
	var wg sync.WaitGroup
	for i, path := range paths {
		wg.Go(func() { answers[i], errs[i] = dump.Ask(ctx, path, dump.Request{}) })
	}
	wg.Wait()
	var silent []error
	for i, path := range paths {
		switch {
		case errs[i] == nil:
			all = append(all, asked{path: path, answer: answers[i]})
		case !dump.Gone(errs[i]):
			silent = append(silent, errs[i])
		}
		if errors.Is(errs[i], dump.ErrSilent) {
			fmt.Fprintf(d.stderr, "%s: %s\n", driver, text.EscapeLine(errs[i].Error()))
		}
	}
	switch {
	case len(all) > 0:
		return all, nil
	case len(silent) > 0:
		return nil, fmt.Errorf("no launcher of this machine answers: %w; ask as the user of the job, or as root", silent[0])
	}
	return nil, errors.New("no launcher of this machine looks into its workers: it has to be started by " +
		"xpu_timer_launch, with --hang=auto or with a variable XPU_TIMER_...; or use dlroverctl stacks RUN")
}

// choose picks the requested workers; -1 means all. Two of them must not have the same file.
func choose(all []asked, pid, rank, size int) (wanted []asked, err error) {
	owner := map[string]string{}
	for _, l := range all {
		for _, w := range l.answer.Workers {
			if pid != -1 && w.PID != pid || rank != -1 && w.Rank != rank || size != -1 && l.answer.World != size {
				continue
			}
			name := xpu.Name(w.Rank, l.answer.World)
			if other, taken := owner[name]; taken {
				return nil, fmt.Errorf("the files of run %s and run %s have the same name, %s: choose by --pid, or one after "+
					"the other, with a --dump-path each", other, l.answer.Run, name)
			}
			owner[name] = l.answer.Run
			l.ranks = append(l.ranks, w.Rank)
		}
		if len(l.ranks) > 0 {
			wanted = append(wanted, l)
		}
	}
	if len(wanted) == 0 {
		return nil, fmt.Errorf("no such worker runs here; there are %s", cmp.Or(here(all), "none"))
	}
	return wanted, nil
}

// here are the workers of this machine, for people.
func here(all []asked) string {
	var texts []string
	for _, l := range all {
		var ranks rankset.Set
		var pids []string
		for _, w := range l.answer.Workers {
			ranks.Add(w.Rank)
			pids = append(pids, strconv.Itoa(w.PID))
		}
		if len(ranks) > 0 {
			texts = append(texts, fmt.Sprintf("ranks %s of %d of run %s (pids %s)", ranks, l.answer.World, l.answer.Run,
				strings.Join(pids, ", ")))
		}
	}
	return strings.Join(texts, "; ")
}

// askAll sends all requests at once, and prints the results.
func (d dumpDriver) askAll(ctx context.Context, wanted []asked, r dump.Request) error {
	answers, errs := make([]dump.Answer, len(wanted)), make([]error, len(wanted))
	var wg sync.WaitGroup
	for i, l := range wanted {
		mine := r
		mine.Ranks = l.ranks
		wg.Go(func() { answers[i], errs[i] = dump.Ask(ctx, l.path, mine) })
	}
	wg.Wait()
	failed := false
	var files []string
	for i, a := range answers {
		files = append(files, a.Files...)
		for _, n := range a.Notes {
			fmt.Fprintf(d.stderr, "%s: %s\n", driver, text.EscapeLine(n))
		}
		if a.Error != "" {
			errs[i] = errors.New(a.Error)
		}
		if errs[i] != nil {
			errs[i] = fmt.Errorf("run %s: %w", wanted[i].answer.Run, errs[i])
		}
		failed = failed || len(a.Notes) > 0
	}
	slices.Sort(files)
	for _, f := range files {
		fmt.Fprintln(d.stdout, text.EscapeLine(f))
	}
	if err := errors.Join(errs...); err != nil {
		return &foundError{err}
	}
	if failed {
		return &foundError{errors.New("not all is there")}
	}
	return nil
}
