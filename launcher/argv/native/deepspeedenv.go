package native

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/launcher/numa"
)

// The cores, interpreter and variables of the workers of a deepspeed command line.

// coreBinding gives each rank cores of its own.
type coreBinding struct{ *translation }

// share shares out cores evenly.
func (c *coreBinding) share(ranks int) error {
	if !c.line.Bool("bind_cores_to_rank") {
		if c.line.IsSet("bind_core_list") {
			c.cmd.Note("--bind_core_list has no effect without --bind_cores_to_rank")
		}
		return nil
	}
	if _, set := c.sys.Env("KMP_AFFINITY"); set {
		return usageErrorf("--bind_cores_to_rank: $KMP_AFFINITY binds threads, too; unset it, or leave the option out")
	}
	cores, err := c.cores()
	if err != nil {
		return err
	}
	n := len(cores) / ranks
	if n == 0 {
		return usageErrorf("--bind_cores_to_rank: there are %d cores (%s) for %d ranks, and each needs one; run fewer, "+
			"or leave the option out", len(cores), numa.Format(cores), ranks)
	}
	for i := range ranks {
		c.cmd.CPUs = append(c.cmd.CPUs, cores[i*n:(i+1)*n])
	}
	c.env("OMP_NUM_THREADS", strconv.Itoa(n))
	return nil
}

// cores returns the CPUs of --bind_core_list, or one CPU of each physical core that this process may use.
func (c *coreBinding) cores() ([]int, error) {
	allowed, err := c.sys.CPUs()
	if err != nil {
		return nil, err
	}
	if !c.line.IsSet("bind_core_list") {
		return c.physical(allowed), nil
	}
	cores, err := numa.ParseCPUs(c.line.String("bind_core_list"))
	if err != nil || len(cores) == 0 {
		return nil, usageErrorf("--bind_core_list=%s: need numbers and ranges, as in 1,3-5", c.line.String("bind_core_list"))
	}
	for _, cpu := range cores {
		if !slices.Contains(allowed, cpu) {
			return nil, usageErrorf("--bind_core_list=%s: this process may not use core %d; it may use %s",
				c.line.String("bind_core_list"), cpu, numa.Format(allowed))
		}
	}
	return cores, nil
}

// physical leaves out the second threads of cores.
func (c *coreBinding) physical(cpus []int) []int {
	taken := map[int]bool{}
	var first []int
	for _, cpu := range cpus {
		if taken[cpu] {
			continue
		}
		first = append(first, cpu)
		text, err := c.sys.ReadFile(fmt.Sprintf("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu))
		if err != nil {
			continue
		}
		mates, _ := numa.ParseCPUs(string(text))
		for _, mate := range mates {
			taken[mate] = true
		}
	}
	return first
}

// workerVars are the variables that a command line or files give to the workers.
type workerVars struct{ *translation }

// interpreter is that of the virtual environment that --venv_script activates.
func (w *workerVars) interpreter() error {
	script := w.line.String("venv_script")
	if script == "" {
		return nil
	}
	bin, name := path.Split(script)
	if name != "activate" || path.Base(path.Clean(bin)) != "bin" {
		w.cmd.Note("--venv_script=%[1]s is no bin/activate of a virtual environment, and is not read: source %[1]s before",
			script)
		return nil
	}
	bin = path.Clean(bin)
	w.env("PYTHON_EXEC", path.Join(bin, "python"))
	w.env("VIRTUAL_ENV", path.Dir(bin))
	w.env("PATH", bin+":"+w.sys.lookup("PATH"))
	return nil
}

// envFiles reads the variables that DeepSpeed gives to the workers of several nodes: a file in the home directory, and
// then one in the working directory.
func (w *workerVars) envFiles(nodes int) error {
	if w.sys.Handed != nil {
		return w.readEnvFiles(w.sys.Handed.EnvFiles)
	}
	if w.cmd.Remote == nil && nodes < 2 && !w.line.Bool("force_multi") {
		return nil
	}
	name := ".deepspeed_env"
	text, named := w.sys.Env("DS_ENV_FILE")
	if named {
		name = text
	}
	files := []string{name}
	if home := w.sys.lookup("HOME"); home != "" && !path.IsAbs(name) {
		files = []string{path.Join(home, name), name}
	}
	missing := 0
	var found []envFile
	for _, file := range files {
		text, err := w.sys.ReadFile(file)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			missing++
		case err != nil:
			return usageErrorf("variables of the workers in %s: %v", file, err)
		default:
			found = append(found, envFile{file, string(text)})
		}
	}
	if r := w.cmd.Remote; r != nil {
		r.Handed.EnvFiles = found
	}
	if named && missing == len(files) {
		w.cmd.Note("DS_ENV_FILE=%s: there is no %s: the workers get no variables from it", name,
			strings.Join(files, " and no "))
	}
	return w.readEnvFiles(found)
}

func (w *workerVars) readEnvFiles(files []envFile) error {
	for _, file := range files {
		if err := w.variables(file.Text); err != nil {
			return usageErrorf("variables of the workers in %s: %v", file.Path, err)
		}
	}
	return nil
}

// variables reads lines NAME=value.
func (w *workerVars) variables(text string) error {
	number := 0
	for line := range strings.SplitSeq(text, "\n") {
		number++
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, value, assigned := strings.Cut(line, "=")
		if name = strings.TrimSpace(name); !assigned || identifier(name) != name || name == "" {
			return fmt.Errorf("line %d: need NAME=value, with a name of letters, digits and '_'", number)
		}
		if strings.Contains(value, "\x00") {
			return fmt.Errorf("line %d: a value has no NUL", number)
		}
		w.env(name, w.expand(unquote(strings.TrimSpace(value))))
		w.cmd.Unshown = append(w.cmd.Unshown, name)
	}
	return nil
}

func unquote(text string) string {
	if n := len(text); n > 1 && text[0] == text[n-1] && (text[0] == '"' || text[0] == '\'') {
		return text[1 : n-1]
	}
	return text
}

// expand puts in variables, as the shell does that reads the file on DeepSpeed's nodes.
func (w *workerVars) expand(text string) string {
	var b strings.Builder
	for {
		head, rest, found := strings.Cut(text, "$")
		b.WriteString(head)
		if !found {
			return b.String()
		}
		inner, after, braced := strings.Cut(strings.TrimPrefix(rest, "{"), "}")
		name := identifier(rest)
		switch {
		case strings.HasPrefix(rest, "{") && braced && inner != "" && identifier(inner) == inner:
			name, text = inner, after
		case name != "":
			text = rest[len(name):]
		default:
			b.WriteByte('$')
			text = rest
			continue
		}
		b.WriteString(w.value(name))
	}
}

// value is that of a variable of the workers.
func (w *workerVars) value(name string) string {
	for _, kv := range slices.Backward(w.cmd.Env) {
		if value, is := strings.CutPrefix(kv, name+"="); is {
			return value
		}
	}
	return w.sys.lookup(name)
}

// identifier is the name of a variable that text begins with; "" without one.
func identifier(text string) string {
	end := strings.IndexFunc(text, func(r rune) bool {
		return r != '_' && !(r|0x20 >= 'a' && r|0x20 <= 'z') && !(r >= '0' && r <= '9')
	})
	if end < 0 {
		end = len(text)
	}
	if end > 0 && text[0] >= '0' && text[0] <= '9' {
		return ""
	}
	return text[:end]
}
