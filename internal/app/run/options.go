package run

import (
	"fmt"
	"path/filepath"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/preflight"
	"dlrover-run/internal/duration"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/scheduler"
)

// options are the sources of the settings: the command line, the environment and this host.
type options struct {
	*argv.Line
	env      argv.LookupEnv
	host     hostFacts
	warnings []string
}

// Warn adds a warning, which is logged when the job starts.
func (o *options) Warn(format string, args ...any) {
	o.warnings = append(o.warnings, fmt.Sprintf(format, args...))
}

// Lookup is the value of a variable of the environment; "" if it is not set.
func (o *options) Lookup(name string) string {
	v, _ := o.env(name)
	return v
}

// LookupEnv is the value of a variable of the environment, if it is set.
func (o *options) LookupEnv(name string) (string, bool) { return o.env(name) }

// Environ are all variables, as KEY=VALUE.
func (o *options) Environ() []string { return o.host.environ() }

// LookPath finds a program.
func (o *options) LookPath(program string) (string, error) { return o.host.lookPath(program) }

// GPUs counts the accelerators of this node.
func (o *options) GPUs() (n int, kind string) { return o.host.gpus() }

// SharedMemory is the room in /dev/shm, if it is known.
func (o *options) SharedMemory() (free int64, known bool) {
	if o.host.shmFree == nil {
		return 0, false
	}
	free, err := o.host.shmFree()
	return free, err == nil
}

// maxGrace bounds the time that workers may get to end.
const maxGrace = 180 * 24 * time.Hour

func (o *options) grace(option string) (time.Duration, error) {
	return o.Within(option, 0, maxGrace)
}

// Within is the value of an option of type Duration within bounds, both of them inclusive.
func (o *options) Within(option string, least, most time.Duration) (time.Duration, error) {
	d := o.Duration(option)
	if d < least || d > most {
		return 0, fmt.Errorf("--%s=%ss is out of range: want %s to %s", option, o.String(option), duration.Text(least),
			duration.Text(most))
	}
	return d, nil
}

// Python finds the workers' interpreter: $PYTHON_EXEC, then that of the venv with the launcher in its bin, then the
// first in PATH. torchrun runs the interpreter of its own installation.
func (o *options) Python() (string, error) {
	if p := o.Lookup("PYTHON_EXEC"); p != "" {
		path, err := o.host.lookPath(p)
		if err != nil {
			return "", &unusableError{fmt.Errorf("$PYTHON_EXEC=%q cannot be executed: %w", p, err)}
		}
		return path, nil
	}
	for _, bin := range o.host.venvs() {
		for _, name := range []string{"python3", "python"} {
			if path, err := o.host.lookPath(filepath.Join(bin, name)); err == nil {
				return path, nil
			}
		}
	}
	for _, name := range []string{"python3", "python"} {
		if path, err := o.host.lookPath(name); err == nil {
			return path, nil
		}
	}
	return "", &unusableError{
		fmt.Errorf("no python3 or python in PATH; set PYTHON_EXEC to the interpreter, or use --no-python"),
	}
}

// devices counts the accelerators of a node that has any.
func (o *options) devices() (n int) {
	if preflight.HasDevices(o.host.root) {
		n, _ = o.host.gpus()
	}
	return n
}

// system is the source of a scheduler's variables; most is the number of nodes that the user requests.
func (o *options) system(most int) scheduler.System {
	return scheduler.System{Env: o.env, ReadFile: o.host.readFile, Host: o.host.name, Nodes: most}
}

// namesRendezvous reports whether an option sets the meeting point.
func (o *options) namesRendezvous() bool {
	return o.Bool("standalone") || o.String("rdzv-endpoint") != "" || o.IsSet("master-addr") ||
		o.IsSet("master-port") || o.String("rdzv-backend") == string(master)
}

// featureOptions are the options for a feature, with the settings that were read before.
type featureOptions struct {
	*options
	s *settings
}

// Job implements feature.Options.
func (o featureOptions) Job() *feature.Job { return o.s.job() }

// job is the features' view of the settings.
func (s *settings) job() *feature.Job {
	return &feature.Job{
		Called: s.called.Name, Command: &s.called.command, RunID: s.runID, Params: &s.params, Node: &s.node,
		Slots: s.size.slots,
		First: s.surelyFirst(), Port: s.rdzv.port, Preset: &s.framework.preset, Workdir: string(s.program.dir),
		ShmDir: s.shmDir, Local: s.rdzv.backend == local, Master: s.rdzv.backend == master || s.rdzv.backend == etcd,
		Meeting: fmt.Sprintf("%s|%s:%d", s.rdzv.backend, s.rdzv.host, s.rdzv.port),
		Token:   s.auth.token, TokenFile: s.auth.job.Path(), TLS: s.auth.chosen(s.rdzv.backend), Insecure: s.auth.insecure,
		LogDir: s.logs.dir, LogFormat: s.logs.format, Bare: s.size.sideOnly(), World: s.assumedWorld,
	}
}
