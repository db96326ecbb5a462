// Package ctl is dlroverctl, which shows and manages the state of runs, nodes and checkpoints for operators.
package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/console"
	"dlrover-run/internal/help"
	"dlrover-run/internal/version"
)

const description = `RUN is the --rdzv-id of a job. COMMAND --help explains a command. Options may stand
anywhere. No command but top asks for confirmation.

Exit status: 0 success; 1 the daemon is unreachable, refuses or knows no such name, or
a checkpoint is damaged; 2 the command line is wrong, or no such checkpoints exist.
exec has its own.`

func init() { cli.HelpPrinter = help.Printer }

// Main is the program; it does not return.
func Main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p := &program{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, env: os.LookupEnv, now: time.Now,
		terminal: console.IsTerminal(os.Stdout)}
	os.Exit(p.run(ctx, os.Args))
}

// program is dlroverctl with the parts of its process that it uses.
type program struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	terminal       bool // stdout is one
	env            func(string) (string, bool)
	now            func() time.Time
	behind         []string // the words behind "--", for a command that passes them on; nil: there is no "--"
}

// foundError is exit status 1: the command line was valid, and the command failed. Every other error is one of the
// command line.
type foundError struct{ error }

func (e *foundError) Unwrap() error { return e.error }

func (p *program) run(ctx context.Context, args []string) int {
	if len(args) > 0 && filepath.Base(args[0]) == driver {
		return p.exitStatus(driver, dumpDriver{p.stdout, p.stderr}.run(ctx, args))
	}
	a, args := p.app(), viewerArgs(args)
	var err error
	if args[len(args)-1] != "--generate-bash-completion" {
		args, p.behind, err = arrange(a, args)
	} else if slices.Contains(args, "--") {
		return 0 // cli would take the request for an argument, and execute the command
	}
	if err == nil {
		err = a.RunContext(ctx, args)
	}
	return p.exitStatus(self, err)
}

// exitStatus prints the error, and returns the status that the program ends with.
func (p *program) exitStatus(name string, err error) int {
	if err == nil {
		return 0
	}
	if exit, ok := errors.AsType[*exitError](err); ok {
		return exit.code
	}
	console.Complain(p.stderr, name, err)
	if _, ok := errors.AsType[*foundError](err); ok {
		return 1
	}
	return 2
}

func (p *program) app() *cli.App {
	return &cli.App{
		Name: self, HelpName: self, Usage: "shows and changes training jobs and their checkpoints",
		ArgsUsage: "COMMAND ARGUMENTS [options]", Description: description,
		HideHelp: true, HideVersion: true, EnableBashCompletion: true, Writer: p.stdout, ErrWriter: io.Discard,
		ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError:   func(_ *cli.Context, err error, _ bool) error { return help.Misuse(self, err) },
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "print-completion",
				Usage: "`SHELL`: print a completion script for " + shells() + ", and exit"},
			helpOption(),
			&cli.BoolFlag{Name: "version", Usage: "print the version, and exit"},
		},
		Action:   p.withoutCommand,
		Commands: p.commands(),
	}
}

func (p *program) withoutCommand(c *cli.Context) error {
	switch {
	case c.Bool("version"):
		fmt.Fprintln(p.stdout, self, version.Version)
	case c.IsSet("print-completion"):
		script, err := completion(c.String("print-completion"))
		fmt.Fprint(p.stdout, script)
		return err
	default:
		return cli.ShowAppHelp(c)
	}
	return nil
}
