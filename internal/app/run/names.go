package run

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"

	"dlrover-run/internal/app/run/binding"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/console"
	"dlrover-run/internal/help"
	"dlrover-run/internal/text"
	"dlrover-run/internal/version"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/argv/native"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/remote"
)

// The program can be called by the names of other launchers, with their command lines. It translates each into one
// of its own; after that the name matters for messages only.

// invocation is the name that the program was called by, and the meaning of the command line behind it.
type invocation struct {
	native.Launcher
	command native.Command
	starter *remote.Handed // nil: a user has started this launcher
	handed  *native.Handed
}

func ownName() invocation {
	return invocation{Launcher: native.Launcher{Name: "dlrover-run", Usage: ownUsage}}
}

// calledAs finds the name in argv. Any name that is not another launcher's is the program's own.
func calledAs(args []string) invocation {
	if len(args) > 0 {
		if l, found := native.Find(filepath.Base(args[0])); found {
			return invocation{Launcher: l}
		}
	}
	return ownName()
}

// parse reads the command line behind the name, and the PET_ environment. It returns nil without an error if the
// requested text, such as the help, has been printed.
func (as *invocation) parse(args []string, env argv.LookupEnv, h hostFacts, stdout io.Writer) (*argv.Line, error) {
	if as.Translate == nil {
		return parse(args, env, stdout)
	}
	var idle *native.IdleError
	var err error
	sys := systemOf(env, h)
	sys.Handed = as.handed
	as.command, err = as.Translate(args, sys)
	switch {
	case errors.Is(err, argv.ErrHelp):
		as.help(stdout)
		return nil, nil
	case errors.Is(err, argv.ErrVersion):
		fmt.Fprintln(stdout, as.Name, "of dlrover-run", version.Version)
		return nil, nil
	case errors.As(err, &idle):
		fmt.Fprintf(stdout, "%s: %s\n", as.Name, text.EscapeLine(idle.Why))
		return nil, nil
	case err != nil:
		return nil, err
	}
	if as.command.Become != nil || as.command.Remote != nil {
		return nil, nil
	}
	if as.command.NoDefaults {
		env = withoutDefaults(env)
	}
	return parse(as.command.Args, env, stdout)
}

// logLevel is the least level of the launcher's own lines.
func (as *invocation) logLevel() slog.Level {
	switch level := as.command.LogLevel; level {
	case "":
		return console.Level()
	case "warning":
		return slog.LevelWarn
	case "critical":
		return slog.LevelError
	default:
		return logLevels[level]
	}
}

// variables is the environment with the variables that the command line sets for the workers.
func (as *invocation) variables(env argv.LookupEnv) argv.LookupEnv {
	return func(name string) (string, bool) {
		for _, kv := range slices.Backward(as.command.Env) {
			if value, is := strings.CutPrefix(kv, name+"="); is {
				return value, true
			}
		}
		return env(name)
	}
}

func (as *invocation) help(w io.Writer) {
	var opts []argv.Option
	if as.Options != nil {
		opts = as.Options()
	}
	help.Print(w, newApp(as.Name, as.About+"\n\n"+native.HelpFooter, opts), as.Usage)
}

func (as *invocation) plan() *planCalled {
	if as.Name == ownName().Name {
		return nil
	}
	return &planCalled{Name: as.Name, Options: as.command.Args, Env: shown(as.command), Notes: as.command.Notes}
}

// shown are the variables that a command line gives to the workers, for people.
func shown(c native.Command) (env []string) {
	for _, kv := range c.Env {
		if name, _, _ := strings.Cut(kv, "="); slices.Contains(c.Unshown, name) {
			kv = name + "=<not shown>"
		}
		env = append(env, kv)
	}
	return env
}

func systemOf(env argv.LookupEnv, h hostFacts) *native.System {
	return &native.System{
		Env: env, ReadFile: readNamed, Abs: absolute, Host: h.name, Owns: h.owns, CPUs: binding.Affinity,
		Devices:   func() int { n, _ := h.gpus(); return n },
		Installed: func() (int, string) { return proc.GPUCount("/", func(string) (string, bool) { return "", false }) },
		Has:       inPath,
		RankedBy:  func() string { return rankedBy(env, h) },
		AddrTo:    func(host string) string { return h.route(host, 1) },
		KeyToken: func(job string) (string, string) {
			home, _ := env("HOME")
			return token.OfKey(h.root, home, job)
		},
	}
}

// withoutDefaults is an environment without defaults of options, which are for other launchers.
func withoutDefaults(env argv.LookupEnv) argv.LookupEnv {
	return func(name string) (string, bool) {
		if strings.HasPrefix(name, "PET_") {
			return "", false
		}
		return env(name)
	}
}

// absolute is the path itself where the working directory is gone.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}
