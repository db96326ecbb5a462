// Package guarded divides dlrover-run into guard and launcher before the other packages of the program are
// initialised. Only its main imports it.
//
// Apart from internal/console, which reads TZ, only this package has an init function. In the guard it lasts as
// long as the job. The guard waits, and needs none of the program's packages. Their initialisation would take
// milliseconds before the launcher is started, and memory as long as the job runs. Go initialises packages in the
// order of their import paths as soon as their imports are ready (https://go.dev/ref/spec#Package_initialization),
// so this one, with few imports, is initialised before net/http and the rest. Init functions also run on the main
// thread, which lives as long as the process. The kernel sends the parent-death signal when the parent thread ends:
// see PR_SET_PDEATHSIG in https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html.
package guarded

import (
	"os"

	"dlrover-run/launcher/proc/guard"
)

// Daemon is argv[0] of the checkpoint daemon, which is the same file.
const Daemon = "checkpointd"

// RemoteAgent is the first argument of a command that starts a launcher for another host; launcher/remote has it.
const RemoteAgent = "--dlrover-remote"

// Nothing is argv[0] of the program that --check-only runs in place of workers: the same file, which ends at once.
const Nothing = "dlrover-checked"

// XPUTimerLaunch is the base name of argv[0] of xpu_timer's launcher, to which the program answers.
const XPUTimerLaunch = "xpu_timer_launch"

var (
	link    *guard.Link
	watch   *guard.Watch
	problem error
)

func init() {
	if len(os.Args) > 0 && os.Args[0] == Nothing {
		os.Exit(0)
	}
	if len(os.Args) > 2 && os.Args[0] == guard.ShelterName {
		shelter()
		return
	}
	if exempt(os.Args) {
		return
	}
	link, watch, problem = guard.Divide(func(text string) {
		_, _ = os.Stderr.WriteString("dlrover-run: warning: " + text + "\n")
	})
	if watch != nil && !watch.Leftovers() {
		os.Exit(watch.Follow())
	}
}

// shelter returns if the command has ended and left something.
func shelter() {
	var err error
	if watch, err = guard.Shelter(os.Args); err != nil {
		_, _ = os.Stderr.WriteString(os.Args[1] + ": " + err.Error() + "\n")
		os.Exit(126) // the status of a shell that cannot execute a command
	}
	if !watch.Leftovers() {
		os.Exit(watch.Follow())
	}
}

// Role is the role of this process. A launcher has a link to its guard. A guard, or the shelter of a command, has a
// watch if its launcher has ended and left processes. Without either the process needs no guard, or the error
// explains why the launcher has none.
func Role() (*guard.Link, *guard.Watch, error) { return link, watch, problem }

// exempt reports whether a command starts no workers, and so needs no guard. A test binary is not a launcher, although
// it may contain one.
func exempt(args []string) bool {
	if len(args) == 0 || args[0] == Daemon || hasSuffix(args[0], ".test") || BecomesCommand(args) {
		return true
	}
	if len(args) < 2 {
		return false
	}
	switch args[1] {
	case RemoteAgent, "--help", "-h", "--version", "--dry-run":
		return true
	}
	return false
}

// BecomesCommand reports whether the program was called as xpu_timer_launch and has to execute its arguments. It
// does so in a worker, and before a launcher, which starts the workers itself. It is true without a command, too:
// there is none to start.
func BecomesCommand(args []string) bool {
	if len(args) == 0 || base(args[0]) != XPUTimerLaunch {
		return false
	}
	if os.Getenv("RANK") != "" || len(args) == 1 || args[1] == "--help" || args[1] == "-h" {
		return true
	}
	switch base(args[1]) {
	case "dlrover-run", "torchrun", "accelerate", "deepspeed", "msrun", XPUTimerLaunch:
		return true
	}
	return launchModule(args[1:])
}

// launchModule recognizes python -m torch.distributed.run, or the like, perhaps with options of Python before.
func launchModule(words []string) bool {
	for i := 1; i+1 < len(words) && hasPrefix(words[i], "-"); i++ {
		if words[i] == "-m" {
			return hasPrefix(words[i+1], "torch.distributed.") || hasPrefix(words[i+1], "dlrover.trainer.")
		}
	}
	return false
}

// base, hasPrefix and hasSuffix are those of packages path and strings, which are not ready yet.
func base(path string) string {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			return path[i+1:]
		}
	}
	return path
}

func hasPrefix(s, prefix string) bool { return len(s) >= len(prefix) && s[:len(prefix)] == prefix }

func hasSuffix(s, suffix string) bool {
	return len(s) >= len(suffix) && s[len(s)-len(suffix):] == suffix
}
