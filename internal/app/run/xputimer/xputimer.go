// Package xputimer becomes a command, as xpu_timer's launcher does.
package xputimer

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/hang/report"
	"dlrover-run/internal/app/ckptd"
	"dlrover-run/internal/app/guarded"
	"dlrover-run/internal/app/run/pypath"
	"dlrover-run/internal/console"
	"dlrover-run/launcher/policy"
)

// As xpu_timer_launch COMMAND..., the name of xpu_timer's launcher, the program runs any command with hang detection.
// In a worker, or before a launcher, it becomes the command; otherwise the command is the only worker of a job.

const xpuTimerUsage = `usage: xpu_timer_launch COMMAND [ARGUMENT ...]
Runs the command with hang detection, see dlrover-run --hang. Where RANK is set it
becomes the command, and tells the dlrover-run that has started it; before another
launcher, too; otherwise the command is the only worker of a job.
`

// Become executes the command in place of this process, and returns an exit status only if it cannot.
func Become(command, environ []string, stdout, stderr io.Writer) int {
	switch {
	case len(command) == 0:
		fmt.Fprint(stderr, xpuTimerUsage)
		return policy.Usage.Code(policy.TorchrunCodes, policy.Nobody)
	case command[0] == "--help" || command[0] == "-h":
		fmt.Fprint(stdout, xpuTimerUsage)
		return 0
	}
	env, warning := observable(environ)
	if warning != "" {
		fmt.Fprintf(stderr, "%s: warning: %s\n", guarded.XPUTimerLaunch, warning)
	}
	path, err := exec.LookPath(command[0])
	if err == nil {
		err = syscall.Exec(path, command, env)
	}
	console.Complain(stderr, guarded.XPUTimerLaunch, fmt.Errorf("cannot execute %q: %w", command[0], err))
	return ShellStatus(err)
}

// ShellStatus is the exit status of a shell after a failed exec: xpu_timer's launcher is a shell script.
func ShellStatus(err error) int {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return 127
	}
	return 126
}

// observable is an environment in which Python reports its progress. The warning gives the reason if no one will see
// it.
func observable(environ []string) (env []string, warning string) {
	vars := map[string]string{}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		vars[name] = value
	}
	switch {
	case vars["RANK"] == "": // before a launcher, which looks for itself
		return forLauncher(environ, vars), ""
	case vars["DLROVER_HANG_DIR"] != "":
		return withShim(environ, vars["PYTHONPATH"])
	case vars["LOCAL_RANK"] != "" && vars["LOCAL_RANK"] != "0": // one warning a node will do
		return environ, ""
	}
	return environ, "this worker's launcher does not look into it: let dlrover-run --hang=auto start the workers"
}

// forLauncher is the environment of a launcher that observes a job for xpu_timer.
func forLauncher(environ []string, vars map[string]string) []string {
	if vars["DLROVER_HANG"] == "" {
		environ = Setenv(environ, "DLROVER_HANG", "auto")
	}
	lookup := func(name string) (string, bool) { v, ok := vars[name]; return v, ok }
	if dir := report.Default(lookup, true); dir != "" {
		environ = Setenv(environ, report.TimelinePath, dir)
	}
	return environ
}

// withShim puts the shim on PYTHONPATH again, if something between the launcher and this process has taken it away.
func withShim(environ []string, path string) (env []string, warning string) {
	for _, dir := range filepath.SplitList(path) {
		if _, err := os.Stat(filepath.Join(dir, "_dlrover_hang")); err == nil {
			return environ, ""
		}
	}
	base, err := shm.UserDir(ckptd.DefaultShm)
	if err != nil {
		return environ, "hangs are found from outside only: " + err.Error()
	}
	tree, err := pypath.Shim.Take(base)
	if err != nil {
		return environ, "hangs are found from outside only: " + err.Error()
	}
	if path != "" {
		path = string(os.PathListSeparator) + path
	}
	return Setenv(environ, "PYTHONPATH", tree.Dir()+path), ""
}

// Setenv sets a variable. It removes duplicates, because C programs read the first one.
func Setenv(environ []string, name, value string) []string {
	env := slices.DeleteFunc(slices.Clone(environ), func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
	return append(env, name+"="+value)
}
