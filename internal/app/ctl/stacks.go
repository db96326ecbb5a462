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
	"dlrover-run/hang/xpu"
	"dlrover-run/internal/app/answers/remote"
	"dlrover-run/internal/app/bundle"
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
	found, err := c.daemon.collect(c, c.now())
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
func (d *daemon) collect(ctx context.Context, now time.Time) (report.Incident, error) {
	found, err := bundle.Collect(ctx, remote.Hangs(d.client), d.run, now)
	return found, d.noHangs(err)
}

// noHangs explains why a run has no stacks, or the judge does not know it.
func (d *daemon) noHangs(err error) error {
	err = bundle.NoHangs(d.run, err)
	if _, absent := errors.AsType[*bundle.AbsentError](err); absent {
		err = &foundError{err}
	}
	return err
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
