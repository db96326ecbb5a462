package run

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"dlrover-run/internal/app/guarded"
	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/launcher"
)

// program is the command of a worker.
type program struct {
	path   string
	args   []string // argv, [0] included
	own    int      // how many of args are no arguments of the script
	name   string   // for the failure report
	dir    workdir
	python func() (string, error) // the interpreter of scripts
}

// work is a digest of the program.
func (p *program) work() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q", p.args))
	return hex.EncodeToString(sum[:16])
}

// workdir is the directory of the workers; "": the launcher's.
type workdir string

func readWorkdir(o *options) (workdir, error) {
	dir := o.String("workdir")
	if dir == "" {
		return "", nil
	}
	if !isDir(dir) {
		return "", fmt.Errorf("--workdir=%s: there is no such directory", dir)
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("--workdir=%s: %w", dir, err)
	}
	if f, err := os.OpenFile(abs, syscall.O_DIRECTORY, 0); err == nil {
		return workdir(abs), f.Close()
	}
	return "", fmt.Errorf("--workdir=%s: it cannot be read", dir)
}

// file is a path as the workers see it.
func (d workdir) file(path string) string {
	if d == "" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(string(d), path)
}

// find finds the interpreter and the script, and checks them now: a typo must not cost a rendezvous. With --check-only
// there is nothing to run. bare is set for a command without options.
func (p *program) find(o *options, bare bool) error {
	p.python = o.Python // for a command that is ordered
	if o.Bool("check-only") {
		p.path, p.args, p.name = "/proc/self/exe", []string{guarded.Nothing}, "--check-only"
		return nil
	}
	args := o.Args()
	script, rest := args[0], args[1:]
	module, noPython, runPath := o.Bool("module"), o.Bool("no-python"), o.Bool("run-path")
	switch {
	case noPython && module:
		return fmt.Errorf("--no-python and --module contradict each other: use one of them")
	case noPython && !runPath:
		return p.findExecutable(o.host, script, rest, bare)
	}
	python, err := o.Python()
	if err != nil {
		return err
	}
	argv := []string{python, "-u"}
	switch {
	case runPath:
		const run = "import runpy,sys; sys.argv=sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
		argv = append(argv, "-c", run, script)
	case module:
		argv = append(argv, "-m", script)
	default:
		argv = append(argv, script)
	}
	if !module && !strings.Contains(script, "$") {
		if err := checkScript(p.dir.file(script)); err != nil {
			return err
		}
	}
	p.path, p.args, p.own, p.name = python, append(argv, rest...), len(argv), script
	return nil
}

func (p *program) findExecutable(h hostFacts, script string, rest []string, bare bool) (err error) {
	found := script
	if strings.Contains(script, "/") {
		found = p.dir.file(script)
	}
	p.path, err = h.lookPath(found)
	switch {
	case err != nil && bare:
		return &unusableError{fmt.Errorf("cannot execute %q: %w", script, err)}
	case err != nil:
		return &unusableError{fmt.Errorf("--no-python: cannot execute %q: %w", script, err)}
	}
	p.args, p.own, p.name = append([]string{script}, rest...), 1, script
	return nil
}

// resolve finds the program of a command of the run on this node. The workers' Python executes a Python file.
func (p *program) resolve(c job.Command) (l launcher.Program, err error) {
	if len(c.Program) == 0 {
		l = launcher.Program{Path: p.path, Args: p.args, Own: p.own}
		if c.Args != nil {
			l.Args = append(append([]string{}, l.Args[:l.Own]...), c.Args...)
		}
		return l, nil
	}
	name := c.Program[0]
	l = launcher.Program{Args: append(append([]string{}, c.Program...), c.Args...), Own: 1}
	if strings.HasSuffix(name, ".py") {
		if err := checkScript(p.dir.file(name)); err != nil {
			return l, err
		}
		if l.Path, err = p.python(); err != nil {
			return l, fmt.Errorf("the command of the run is a script, %s: %w", name, err)
		}
		l.Args, l.Own = append([]string{l.Path, "-u"}, l.Args...), 3
		return l, nil
	}
	if strings.Contains(name, "/") {
		name = p.dir.file(name)
	}
	if l.Path, err = exec.LookPath(name); err != nil {
		return l, fmt.Errorf("the command of the run cannot be executed: %w", err)
	}
	return l, nil
}

// unusableError is the error of a program that cannot be executed: not a usage error as in argparse.
type unusableError struct{ error }

func (e *unusableError) Unwrap() error { return e.error }

// checkScript opens the script as Python will. A directory or a zip file with a
// __main__ is a script, too.
func checkScript(script string) error {
	info, err := os.Stat(script)
	if err == nil && info.Mode().IsRegular() {
		err = readable(script)
	}
	if err != nil {
		wd, _ := os.Getwd()
		return &unusableError{fmt.Errorf("training script: %w (working directory %s)", err, wd)}
	}
	if info.IsDir() {
		if _, err := os.Stat(filepath.Join(script, "__main__.py")); err != nil {
			return &unusableError{fmt.Errorf("training script %s is a directory without a __main__.py", script)}
		}
	}
	return nil
}

func readable(file string) error {
	f, err := openfile.OpenLinked(file)
	if err != nil {
		return err
	}
	return f.Close()
}

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}
