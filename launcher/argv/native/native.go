// Package native translates the command lines of other launchers to one of dlrover-run, which may be called by their
// names. The table of a launcher's file defines its options: their meaning, differences and refusals. The help is
// written from it, too.
//
// The package is pure: a translator receives the facts about the node in a System.
package native

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/launcher/argv"
)

// Command is a translated command line of another launcher.
type Command struct {
	// Args is dlrover-run's own command line, without its name. Options of its that are not in it may still be set by
	// PET_ variables.
	Args []string
	// Env are variables of the workers, NAME=VALUE; they replace inherited ones.
	Env []string
	// Unshown are the names of variables in Env with values that may be secrets and are not printed.
	Unshown []string
	// Notes name, one line each, accepted options that act in another way, or have no effect.
	Notes []string
	// Alone: the job has one worker; its exit status is the launcher's.
	Alone bool
	// NoDefaults: PET_ variables are for other launchers.
	NoDefaults bool
	// RankLogs requests the log files of that launcher; nil: dlrover-run's options define the outputs.
	RankLogs *RankLogs
	// CPUs are the CPU sets of the workers by local rank; a worker with an empty or missing set is not bound.
	CPUs [][]int
	// Hosts are the names that a host file has for the nodes, by rank.
	Hosts []string
	// Token is a job token for where none is given.
	Token string
	// PIDFiles are files that have the launcher's process id while it runs; {pid} stands for that of the command.
	PIDFiles []string
	// LogLevel is the least level of the launcher's own lines: debug, info, warning, error or critical; "": as usual.
	LogLevel string
	// Remote: this process starts the job's launchers, and is none itself.
	Remote *Remote
	// Become: the workers' Python, with these arguments, takes the place of this program.
	Become []string
	// DryRun: only show the effect.
	DryRun bool
}

// RankLogs is one file for each worker, which has both of its streams.
type RankLogs struct {
	// Dir is made if it is missing; "" is the working directory.
	Dir string
	// Name of a file; {rank} and {local_rank} stand for the worker's, {time} for the start of the workers, as in
	// 20260131235959.
	Name string
	// Console are the local ranks with output on the console, too.
	Console []int
}

// At are the files of workers that are started at that time.
func (l *RankLogs) At(start time.Time) *RankLogs {
	at := *l
	at.Name = strings.ReplaceAll(l.Name, "{time}", start.Format("20060102150405"))
	return &at
}

// Path is the file of a worker.
func (l *RankLogs) Path(rank, localRank int) string {
	name := strings.NewReplacer("{rank}", strconv.Itoa(rank), "{local_rank}", strconv.Itoa(localRank)).Replace(l.Name)
	return path.Join(l.Dir, name)
}

// Note adds a line for people.
func (c *Command) Note(format string, args ...any) {
	c.Notes = append(c.Notes, fmt.Sprintf(format, args...))
}

// System gives a translator the facts about the launcher's node.
type System struct {
	// Env looks a variable up.
	Env argv.LookupEnv
	// ReadFile returns the content of a file; the error is one of package fs where there is none.
	ReadFile func(path string) ([]byte, error)
	// Abs makes a path absolute.
	Abs func(path string) string
	// Host is the name of this node, as the kernel knows it.
	Host string
	// Owns reports whether a host name or an address is this node's.
	Owns func(host string) bool
	// Devices is how many accelerators workers may use, 0 without one.
	Devices func() int
	// Installed returns the number of accelerators, regardless of variables that hide some, and their kind.
	Installed func() (n int, kind string)
	// CPUs returns the CPUs that workers may use, ascending.
	CPUs func() ([]int, error)
	// AddrTo is the address of this node at which a host may reach it; "" if none leads there.
	AddrTo func(host string) string
	// KeyToken derives a job token for a job from the first of the user's private keys of ssh, and names its file; "" if
	// no key is a secret.
	KeyToken func(job string) (token, file string)
	// Has reports whether there is a program of that name in PATH, or at that path; nil: there is none.
	Has func(program string) bool
	// RankedBy is the scheduler that starts the command on every node, "" without one; nil: none is known.
	RankedBy func() string
	// Handed is the input from the process that has started this launcher; nil: a user has.
	Handed *Handed
}

func (s *System) has(program string) bool { return s.Has != nil && s.Has(program) }

// readHostfile reads the host file that the user names, wherever that was.
func (s *System) readHostfile(path string) ([]byte, error) {
	if s.Handed != nil {
		return []byte(s.Handed.Hostfile), nil
	}
	return s.ReadFile(path)
}

// lookup is a variable's value, "" where it is not set.
func (s *System) lookup(name string) string {
	v, _ := s.Env(name)
	return v
}

// Launcher is one of the names.
type Launcher struct {
	// Name is the base name of argv[0].
	Name string
	// Usage is the command line behind the name, for messages.
	Usage string
	// About is one paragraph for its help.
	About string
	// Options is the table of its options; nil: dlrover-run's own.
	Options func() []argv.Option
	// Translate makes a command of the words behind the name; nil: they are dlrover-run's. Its errors are argv's.
	Translate func(args []string, sys *System) (Command, error)
}

// Launchers returns all names other than dlrover-run's own.
func Launchers() []Launcher {
	return []Launcher{torchrun(), deepSpeedLauncher(), msrun(), xpuTimer()}
}

// Find returns the launcher of that name, and whether there is one.
func Find(name string) (Launcher, bool) {
	all := Launchers()
	i := slices.IndexFunc(all, func(l Launcher) bool { return l.Name == name })
	if i < 0 {
		return Launcher{}, false
	}
	return all[i], true
}

// HelpFooter is the end of every launcher's help.
const HelpFooter = `Whatever is not said here is as in dlrover-run --help: its other options are set by
PET_<OPTION> variables, such as PET_MAX_RESTARTS=3.`

// withDefaults adds to each option the value that it has when not given.
func withDefaults(opts []argv.Option) []argv.Option {
	for i, o := range opts {
		if o.Default != "" {
			opts[i].Usage += " (default: " + o.Default + ")"
		}
	}
	return opts
}

// own returns the options that a name has in addition to those of the launcher that it stands for.
func own() []argv.Option {
	return []argv.Option{
		{Name: "dry-run", Kind: argv.Flag, Extra: true, Category: "dlrover-run",
			Usage: "print the plan, with dlrover-run's options in place of these, and exit"},
		{Name: "help", Short: 'h', Kind: argv.Flag, Category: "dlrover-run", Usage: "show this text, and exit"},
		{Name: "version", Kind: argv.Flag, Extra: true, Category: "dlrover-run", Usage: "print the version, and exit"},
	}
}

// usageErrorf is an error of the command line: value, rule, fix.
func usageErrorf(format string, args ...any) error {
	return &argv.UsageError{Msg: fmt.Sprintf(format, args...)}
}

// withScript ends a command line with the script and its arguments, which are taken as they are.
func withScript(args, script []string) []string { return slices.Concat(args, []string{"--"}, script) }
