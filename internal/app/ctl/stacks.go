package ctl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/hang/report"
	"dlrover-run/hang/serve"
	"dlrover-run/hang/xpu"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/text"
)

// viewer is the name of xpu_timer's tool that merges stacks. By that name this program is its command stacks.
const viewer = "xpu_timer_stacktrace_viewer"

// viewerArgs translates a call by the name of xpu_timer's viewer, which takes the working directory by itself.
func viewerArgs(args []string) []string {
	if len(args) == 0 || filepath.Base(args[0]) != viewer {
		return args
	}
	if len(args) == 1 {
		args = append(args, "--path=.")
	}
	return slices.Insert(slices.Clone(args), 1, "stacks")
}

const stacksAbout = `Without RUN it merges xpu_timer's files *.stacktrace in --path=DIR, or a report, into
py_stack.svg and cpp_stack.svg. Called as ` + viewer + ` it does the same.`

// stacksHere is the command without a run.
func (p *program) stacksHere(args *cli.Context) error {
	if !args.IsSet("path") {
		return errors.New("stacks takes RUN, or --path=DIR with stacks that were written; see dlroverctl stacks --help")
	}
	return p.mergeStacks(args.String("path"), args.Bool("json"))
}

func stacksPathOption() cli.Flag {
	return pathOption("with RUN: write a report there, and make the directory if needed; without: read from there")
}

func pathOption(usage string) cli.Flag {
	return &cli.StringFlag{Name: "path", Aliases: []string{"p"}, Usage: "`DIR`: " + usage}
}

const (
	// collectTime is the time limit for the stacks of the nodes: they have 15 s.
	collectTime = 25 * time.Second
	askAgainFor = 200 * time.Millisecond // interval of the looks for them
)

// showStacks collects the stacks of a run's workers, whether anything hangs or not.
func (c *call) showStacks() error {
	if _, err := c.daemon.status(c); err != nil {
		return err
	}
	if dir := c.args.String("path"); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return &foundError{fmt.Errorf("stacks: %w", err)}
		}
	}
	found, err := c.daemon.collect(c, serve.Over(c.daemon.client), c.now())
	if err != nil {
		return err
	}
	if dir := c.args.String("path"); dir != "" {
		path, err := report.Write(dir, found)
		if err != nil {
			return &foundError{err}
		}
		fmt.Fprintf(c.stderr, "dlroverctl: the report is in %s\n", text.EscapeLine(path))
	}
	return c.printIncident(found, c.args.Bool("json"))
}

func (p *program) printIncident(found report.Incident, asJSON bool) error {
	if asJSON {
		return found.WriteJSON(text.JSON(p.stdout))
	}
	return found.WriteText(p.stdout)
}

// collect requests the stacks of the workers of all nodes of the run, and waits for the answers.
func (d *daemon) collect(ctx context.Context, judge serve.Transport, now time.Time) (report.Incident, error) {
	collection, err := judge.Collect(ctx, d.run)
	if err != nil {
		return report.Incident{}, d.noHangs(err)
	}
	if err := d.awaitCollection(ctx, judge, collection); err != nil {
		return report.Incident{}, d.noHangs(err)
	}
	p, err := judge.Picture(ctx, d.run, true)
	if err != nil {
		return report.Incident{}, d.noHangs(err)
	}
	if len(p.Evidence) == 0 {
		return report.Incident{}, &foundError{fmt.Errorf("no node of run %q has answered: "+
			"its launchers were given --hang=off, or are older than this dlroverctl, or its workers do not run", d.run)}
	}
	return report.Of(d.run, now, p), nil
}

// awaitCollection returns when all nodes have answered, or their time is over.
func (d *daemon) awaitCollection(ctx context.Context, judge serve.Transport, collection uint64) error {
	asking, cancel := context.WithTimeout(ctx, collectTime)
	defer cancel()
	for {
		p, err := judge.Picture(asking, d.run, false)
		if err != nil || p.Collected || p.Collection != collection {
			return err // a newer one has all that this one would have
		}
		select {
		case <-time.After(askAgainFor):
		case <-asking.Done():
			return ctx.Err()
		}
	}
}

// noHangs explains why the judge does not know a run that the daemon keeps.
func (d *daemon) noHangs(err error) error {
	if !errors.Is(err, serve.ErrUnknownRun) {
		return err
	}
	return &foundError{fmt.Errorf("nothing is known of hangs of run %q: its workers do not run, or run for less than a "+
		"minute; or its launchers were given --hang=off", d.run)}
}

// mergeStacks does the job of xpu_timer's viewer: it writes py_stack and cpp_stack, and pictures of them, to the
// directory.
func (p *program) mergeStacks(dir string, asJSON bool) error {
	found, err := p.readStacks(dir)
	if err != nil {
		return &foundError{fmt.Errorf("stacks --path=%s: %w", dir, err)}
	}
	err = p.printIncident(found, asJSON)
	if err := report.WriteStacks(dir, found); err != nil {
		return &foundError{fmt.Errorf("stacks --path=%s: write the merged stacks: %w", dir, err)}
	}
	return err
}

// sameHang is the largest time by which xpu_timer's files may be newer than a report of the same hang.
const sameHang = 5 * time.Second

// readStacks takes the newest of xpu_timer's files and our reports. The reports have the stacks of all nodes. Any
// user may be able to write here.
func (p *program) readStacks(dir string) (report.Incident, error) {
	s, err := xpu.Read(dir)
	path, at := report.Newest(dir)
	switch {
	case path != "" && (err != nil || s.At.Before(at.Add(sameHang))):
		if path != dir {
			fmt.Fprintf(p.stderr, "dlroverctl: the newest stacks are those in %s\n", text.EscapeLine(path))
		}
		return readReport(path)
	case errors.Is(err, xpu.ErrNone):
		return report.Incident{}, fmt.Errorf("%w, and no %s, nor a directory hang-* with one", err, report.JSONFile)
	case err != nil:
		return report.Incident{}, err
	}
	return report.Incident{
		Job: filepath.Base(absolute(dir)), At: s.At, World: s.World, Evidence: s.Evidence, Notes: s.Notes,
	}, nil
}

func readReport(dir string) (report.Incident, error) {
	f, err := openfile.Open(filepath.Join(dir, report.JSONFile), os.O_RDONLY, 0)
	if err != nil {
		return report.Incident{}, err
	}
	defer f.Close()
	return report.ReadJSON(f)
}

// absolute is the absolute path, for people.
func absolute(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		return abs
	}
	return dir
}
