// dlroverctl is for people: it shows and tends what the other programs keep.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/cmd/internal/console"
	"dlrover-run/cmd/internal/help"
	"dlrover-run/cmd/internal/version"
)

const description = `A running job, which its --rdzv-id names:
  runs                           what the daemon keeps
  status RUN                     the state of the run, its nodes and checkpoints;
                                 --conditions: as training operators put it, too
  nodes RUN                      its nodes: state, age, chief, GPUs, machine
  events RUN [-f]                what has happened; -f: and what happens
  logs RUN [-f]                  what its workers print, on all nodes, by rank;
                                 -f: go on; --rank, --node: of these only
  exec RUN RANK -- COMMAND       execute a command beside the worker of that
                                 rank, with its environment and directory; exits
                                 as the command does
  verdict RUN                    who failed first, and why
  hang RUN                       whether its workers hang, and who is to blame
  stacks RUN                     what all workers are doing, hung or not
  bundle RUN                     all that is known of the run in one archive:
                                 stacks, recorders, events, ends of logs
  check RUN                      what the nodes found out about each other
  forget RUN                     drop what is kept of a run that has ended, so
                                 that its name can be used for a new one
  restart RUN [-- ARGUMENTS]     stop all workers and start them anew
  stop RUN                       end the run as failed
  pause RUN [-- ARGUMENTS]       stop all workers; the launchers stay; --command
                                 and ARGUMENTS say what resume will execute
  resume RUN [-- ARGUMENTS]      end a pause or a hold; --command COMMAND: the
                                 workers execute that, or the job's own script
                                 with other ARGUMENTS, from now on
  start RUN [-- ARGUMENTS]       the same as resume
  bar RUN NODE                   no workers on the nodes of this name
  unbar RUN NODE                 end a bar
  drain RUN NODE                 save, and have the node leave; then as bar
  log-level RUN LEVEL            least level of its launchers' log lines:
                                 debug, info, warn or error

Machines, across jobs, of dlrover-master with
--data-dir or --node-action:
  nodes                          what was found out about them, and which are
                                 marked: no replacement should go there
  node mark NODE --reason TEXT   mark one until it is cleared
  node clear NODE                remove its mark and forget what was found

A checkpoint directory:
  checkpoints ls DIR             the committed steps
  checkpoints verify DIR [STEP]  read all files, or a step's, and compare
                                 them with their checksums
  checkpoints rm DIR STEP        remove a step; not the one that the tracker
                                 names

Stacks that were written:
  stacks --path DIR              merge the files *.stacktrace of xpu_timer, or a
                                 report, into py_stack.svg and cpp_stack.svg;
                                 as does the name xpu_timer_stacktrace_viewer

Names of other launchers:
  install-names DIR [NAME...]    links in DIR by which dlrover-run answers to
                                 deepspeed, msrun, torchrun and xpu_timer_launch,
                                 and dlroverctl to xpu_timer_stacktrace_viewer
                                 and xpu_timer_dump_driver

Exit status: 0 done; 1 the daemon refuses, is not there, or has nothing of that
name, or a checkpoint is damaged; 2 the command line is wrong, or there are no
such checkpoints. exec: that of the command; 124 it took longer than --timeout;
125 it was not tried, or its end is not known; 126 it cannot be executed; 127
it is not found; 128 and the signal that has ended it.`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	p := &program{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, env: os.LookupEnv, now: time.Now,
		terminal: console.IsTerminal(os.Stdout)}
	os.Exit(p.run(ctx, os.Args))
}

// program is dlroverctl and what it uses of the process that it is.
type program struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	terminal       bool // stdout is one
	env            func(string) (string, bool)
	now            func() time.Time
	behind         []string // the words behind "--", of a command that hands them on; nil: there is no "--"
}

// foundError is exit status 1: the command was understood, and this is how it ended. Every other error is one of the
// command line.
type foundError struct{ error }

func (e *foundError) Unwrap() error { return e.error }

func (p *program) run(ctx context.Context, args []string) int {
	if len(args) > 0 && filepath.Base(args[0]) == driver {
		return p.driverMain(ctx, args)
	}
	a := p.app()
	if args = viewerArgs(args); len(args) < 2 || slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		help.Print(p.stdout, a, "COMMAND ARGUMENTS [options]")
		return 0
	}
	var err error
	if args, p.behind, err = behind(args); err == nil {
		args, err = arrange(a, args)
	}
	if err == nil {
		err = a.RunContext(ctx, args)
	}
	if err == nil {
		return 0
	}
	if exit, ok := errors.AsType[*exitError](err); ok {
		return exit.code
	}
	console.Complain(p.stderr, "dlroverctl", err)
	if _, ok := errors.AsType[*foundError](err); ok {
		return 1
	}
	return 2
}

func (p *program) app() *cli.App {
	return &cli.App{
		Name: "dlroverctl", Usage: "shows and tends training jobs and their checkpoints", Description: description,
		HideHelp: true, HideHelpCommand: true, HideVersion: true, Writer: io.Discard, ErrWriter: io.Discard,
		ExitErrHandler: func(*cli.Context, error) {},
		OnUsageError:   func(_ *cli.Context, err error, _ bool) error { return help.Misuse("dlroverctl", err) },
		Flags: append(slices.Concat(connection(), viewOptions(),
			[]cli.Flag{jsonOption(), followOption(), reasonOption(), chargeOption(), commandOption(), nodeOption(),
				conditionsOption(), pathOption(), rankOption(), tailOption(), timeoutOption(), forceOption()}),
			&cli.BoolFlag{Name: "help", Aliases: []string{"h"}, Category: "Options", Usage: "show this text, and exit"},
			&cli.BoolFlag{Name: "version", Category: "Options", Usage: "print the version, and exit"},
		),
		Action: func(c *cli.Context) error {
			if c.Bool("version") {
				fmt.Fprintln(p.stdout, "dlroverctl", version.Version)
				return nil
			}
			return fmt.Errorf("unknown command %q; see dlroverctl --help", c.Args().First())
		},
		Commands: slices.Concat(p.runs(), p.checks(), p.hangs(), p.stacks(), p.streams(), p.orders(),
			p.machines(), p.names(), []*cli.Command{p.checkpoints()}),
	}
}

// handsOn are the commands that do not take the words behind "--" for their own.
func handsOn() []string { return []string{"restart", "pause", "resume", "start"} }

// behind takes what stands behind "--" from a command line whose command hands it on.
func behind(args []string) (before, after []string, err error) {
	i := slices.Index(args, "--")
	if i < 0 || !slices.ContainsFunc(args[1:i], func(a string) bool { return slices.Contains(handsOn(), a) }) {
		return args, nil, nil
	}
	return args[:i], append([]string{}, args[i+1:]...), nil
}

// arrange puts the options between the names of the commands and their arguments, where the flag package looks for
// them: people write them anywhere.
func arrange(app *cli.App, args []string) ([]string, error) {
	var options, words []string
	for rest := args[1:]; len(rest) > 0; {
		word := rest[0]
		rest = rest[1:]
		switch {
		case word == "--":
			words, rest = append(words, rest...), nil
		case len(word) < 2 || word[0] != '-':
			words = append(words, word)
		default:
			options = append(options, word)
			if !takesValue(app, word) {
				break
			}
			if len(rest) == 0 || rest[0] == "--" {
				return nil, fmt.Errorf("%s needs a value; see dlroverctl --help", word)
			}
			options, rest = append(options, rest[0]), rest[1:]
		}
	}
	names := 0
	for commands := app.Commands; names < len(words); names++ {
		i := slices.IndexFunc(commands, func(c *cli.Command) bool { return c.Name == words[names] })
		if i < 0 {
			break
		}
		commands = commands[i].Subcommands
	}
	return slices.Concat(args[:1], words[:names], options, []string{"--"}, words[names:]), nil
}

// takesValue says whether the value of an option is the next word. The application knows the options of all commands.
func takesValue(app *cli.App, option string) bool {
	for _, f := range app.Flags {
		if slices.Contains(f.Names(), strings.TrimLeft(option, "-")) {
			_, flag := f.(*cli.BoolFlag)
			return !flag
		}
	}
	return false
}
