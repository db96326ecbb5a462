// Package native is the command lines of other launchers by whose names dlrover-run may be called: each is translated
// to one of dlrover-run. What an option of theirs means there, what is done in another way and what is refused stands
// in the table of its file, from which its help is written, too.
//
// The package is pure: what a translator needs of the node comes in as a System.
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

// Command is what a command line of another launcher asks for.
type Command struct {
	// Args is dlrover-run's own command line, without its name. Options of its that are not in it may still be set by
	// PET_ variables.
	Args []string
	// Env are variables of the workers, NAME=VALUE; they replace inherited ones.
	Env []string
	// Unshown are the names of variables in Env whose values are not to be printed, as they may be secrets.
	Unshown []string
	// Notes say, one line each, what was accepted and is done in another way, or has no effect.
	Notes []string
	// Alone: the job has one worker, whose exit status is the launcher's.
	Alone bool
	// NoDefaults: PET_ variables are for other launchers.
	NoDefaults bool
	// RankLogs asks for the log files of that launcher; nil: dlrover-run's options say where output goes.
	RankLogs *RankLogs
	// CPUs are the CPU sets of the workers by local rank; a worker whose set is empty or missing is not bound.
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
	// DryRun: it is only to be shown what would.
	DryRun bool
}

// RankLogs is one file for each worker, which has both of its streams.
type RankLogs struct {
	// Dir is made if it is missing; "" is the working directory.
	Dir string
	// Name of a file; {rank} and {local_rank} stand for the worker's, {time} for the start of the workers, as in
	// 20260131235959.
	Name string
	// Console are the local ranks whose output goes to the console, too.
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

// System is what a translator may ask of the node on which the launcher is.
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
	// Installed is how many accelerators there are, whatever variables make visible, and of which kind.
	Installed func() (n int, kind string)
	// CPUs are those that workers may use, ascending.
	CPUs func() ([]int, error)
	// AddrTo is the address of this node at which a host may reach it; "" if none leads there.
	AddrTo func(host string) string
	// KeyToken derives a job token for a job from the first of the user's private keys of ssh, and names its file; "" if
	// there is none that is a secret.
	KeyToken func(job string) (token, file string)
	// Has reports whether there is a program of that name in PATH, or at that path; nil: there is none.
	Has func(program string) bool
	// RankedBy is the scheduler that starts the command on every node, "" without one; nil: none is known.
	RankedBy func() string
	// Handed is what the process has told this launcher that has started it; nil: a user has.
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

// withDefaults says of each option what it is where it is not given.
func withDefaults(opts []argv.Option) []argv.Option {
	for i, o := range opts {
		if o.Default != "" {
			opts[i].Usage += " (default: " + o.Default + ")"
		}
	}
	return opts
}

// own are the options that a name has besides those of the launcher that it stands for.
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
