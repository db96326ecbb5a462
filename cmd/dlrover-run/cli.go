package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/urfave/cli/v2"

	"dlrover-run/cmd/internal/help"
	"dlrover-run/cmd/internal/version"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/printable"
)

const description = `Starts --nproc-per-node copies of a training script on this node, joins the
other nodes of the job, restarts what fails, and says which rank failed first
and why. It takes torchrun's command line; PET_<OPTION> variables give defaults.`

// parse turns the command line and the PET_ environment into the context that holds
// every option with its type and default. A nil context without an error means that
// what was asked for has been printed.
func parse(args []string, env argv.LookupEnv, stdout io.Writer) (*cli.Context, error) {
	opts := argv.Options()
	canonical, err := argv.Normalize(opts, args, env)
	var shell *argv.CompletionRequest
	switch {
	case errors.Is(err, argv.ErrHelp):
		help.Print(stdout, newApp(opts, nil), "[options] [--] training_script [script arguments]")
		return nil, nil
	case errors.Is(err, argv.ErrVersion):
		fmt.Fprintln(stdout, "dlrover-run", version.Version)
		return nil, nil
	case errors.As(err, &shell):
		text, err := argv.Completion(shell.Shell, opts)
		fmt.Fprint(stdout, text)
		return nil, err
	case err != nil:
		return nil, err
	}
	var parsed *cli.Context
	app := withNames(newApp(opts, func(c *cli.Context) error { parsed = c; return nil }), opts)
	err = app.Run(append([]string{"dlrover-run"}, canonical...))
	return parsed, err
}

func newApp(opts []argv.Option, action cli.ActionFunc) *cli.App {
	app := &cli.App{
		Name: "dlrover-run", Usage: "launcher of distributed training jobs", Description: description,
		Action: action, Writer: io.Discard, ErrWriter: io.Discard,
		HideHelp: true, HideHelpCommand: true, HideVersion: true,
		OnUsageError:   func(_ *cli.Context, err error, _ bool) error { return &argv.UsageError{Msg: err.Error()} },
		ExitErrHandler: func(*cli.Context, error) {},
	}
	for _, o := range opts {
		app.Flags = append(app.Flags, flag(o))
	}
	return app
}

// named is a flag with its names at hand. Those of the library run a regular expression for every flag, each time that
// one is looked up, which was a quarter of the launcher's start.
type named struct {
	cli.Flag
	names []string
}

// Names implements cli.Flag.
func (n named) Names() []string { return n.names }

// withNames needs the options that the flags were made of.
func withNames(app *cli.App, opts []argv.Option) *cli.App {
	for i, o := range opts {
		app.Flags[i] = named{app.Flags[i], append([]string{o.Name}, short(o)...)}
	}
	return app
}

func short(o argv.Option) []string {
	if o.Short == 0 {
		return nil
	}
	return []string{string(o.Short)}
}

func flag(o argv.Option) cli.Flag {
	usage := o.Usage
	if o.Meta != "" {
		usage = "`" + o.Meta + "`: " + usage
	}
	switch {
	case o.Kind == argv.Flag:
		return &cli.BoolFlag{Name: o.Name, Aliases: short(o), Usage: usage, Category: o.Category}
	case o.Type == argv.Int:
		return &cli.IntFlag{Name: o.Name, Aliases: short(o), Usage: usage, Category: o.Category, Value: number(o.Default)}
	case o.Type == argv.Float:
		return &cli.Float64Flag{
			Name: o.Name, Aliases: short(o), Usage: usage, Category: o.Category, Value: decimal(o.Default),
		}
	default:
		return &cli.StringFlag{Name: o.Name, Aliases: short(o), Usage: usage, Category: o.Category, Value: o.Default}
	}
}

// number and decimal read defaults of our own table.
func number(s string) (n int) {
	fmt.Sscan(s, &n)
	return n
}

func decimal(s string) (f float64) {
	fmt.Sscan(s, &f)
	return f
}

// usage prints an error of the command line as argparse does.
func usage(err error) {
	fmt.Fprintf(os.Stderr, "usage: dlrover-run [options] [--] training_script [script arguments]\n"+
		"dlrover-run: error: %s\nSee dlrover-run --help.\n", printable.Text(err.Error()))
}
