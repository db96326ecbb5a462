package run

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/help"
	"dlrover-run/internal/text"
	"dlrover-run/internal/version"
	"dlrover-run/launcher/argv"
)

const ownUsage = "[options] [--] training_script [script arguments]"

const description = `Starts --nproc-per-node copies of a training script on this node, joins the
other nodes of the job, restarts what fails, and says which rank failed first
and why. It takes torchrun's command line; PET_<OPTION> variables give defaults.`

// parse reads the command line and the PET_ environment. It returns nil without an error if the requested text, such
// as the help, has been printed.
func parse(args []string, env argv.LookupEnv, stdout io.Writer) (*argv.Line, error) {
	opts := argv.Options()
	line, err := argv.Parse(opts, args, env)
	var shell *argv.CompletionRequest
	switch {
	case errors.Is(err, argv.ErrHelp):
		help.Print(stdout, newApp("dlrover-run", description, opts), ownUsage)
		return nil, nil
	case errors.Is(err, argv.ErrVersion):
		fmt.Fprintln(stdout, "dlrover-run", version.Version)
		if path, err := os.Executable(); err == nil {
			fmt.Fprintf(stdout, "%s is of dlrover-run-go, not of the Python package dlrover\n", text.EscapeLine(path))
		}
		return nil, nil
	case errors.As(err, &shell):
		script, err := argv.Completion(shell.Shell, opts)
		fmt.Fprint(stdout, script)
		return nil, err
	}
	return line, err
}

// newApp describes the program for its help; the library does not support torchrun's abbreviations and variables.
func newApp(name, description string, opts []argv.Option) *cli.App {
	app := &cli.App{Name: name, Usage: "launcher of distributed training jobs", Description: description}
	for _, o := range opts {
		app.Flags = append(app.Flags, flag(o))
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
	if o.Kind == argv.Flag {
		return &cli.BoolFlag{Name: o.Name, Aliases: short(o), Usage: usage, Category: o.Category}
	}
	return &cli.StringFlag{Name: o.Name, Aliases: short(o), Usage: usage, Category: o.Category}
}

// usage prints an error of the command line as argparse does.
func (as *invocation) usage(err error) {
	fmt.Fprintf(os.Stderr, "usage: %[1]s %[2]s\n%[1]s: error: %[3]s\nSee %[1]s --help.\n", as.Name, as.Usage,
		text.Escape(err.Error()))
}
