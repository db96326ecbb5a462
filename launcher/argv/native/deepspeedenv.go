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

// bindCores shares out cores evenly.
func (j *deepSpeedJob) bindCores() error {
	if !j.line.Bool("bind_cores_to_rank") {
		if j.line.IsSet("bind_core_list") {
			j.cmd.Note("--bind_core_list has no effect without --bind_cores_to_rank")
		}
		return nil
	}
	if _, set := j.sys.Env("KMP_AFFINITY"); set {
		return usageErrorf("--bind_cores_to_rank: $KMP_AFFINITY binds threads, too; unset it, or leave the option out")
	}
	cores, err := j.cores()
	if err != nil {
		return err
	}
	n := len(cores) / len(j.devices)
	if n == 0 {
		return usageErrorf("--bind_cores_to_rank: there are %d cores (%s) for %d ranks, and each needs one; run fewer, "+
			"or leave the option out", len(cores), numa.Format(cores), len(j.devices))
	}
	for i := range j.devices {
		j.cmd.CPUs = append(j.cmd.CPUs, cores[i*n:(i+1)*n])
	}
	j.env("OMP_NUM_THREADS", strconv.Itoa(n))
	return nil
}

// cores returns the CPUs of --bind_core_list, or one CPU of each physical core that this process may use.
func (j *deepSpeedJob) cores() ([]int, error) {
	allowed, err := j.sys.CPUs()
	if err != nil {
		return nil, err
	}
	if !j.line.IsSet("bind_core_list") {
		return j.physical(allowed), nil
	}
	cores, err := numa.ParseCPUs(j.line.String("bind_core_list"))
	if err != nil || len(cores) == 0 {
		return nil, usageErrorf("--bind_core_list=%s: need numbers and ranges, as in 1,3-5", j.line.String("bind_core_list"))
	}
	for _, c := range cores {
		if !slices.Contains(allowed, c) {
			return nil, usageErrorf("--bind_core_list=%s: this process may not use core %d; it may use %s",
				j.line.String("bind_core_list"), c, numa.Format(allowed))
		}
	}
	return cores, nil
}

// physical leaves out the second threads of cores.
func (j *deepSpeedJob) physical(cpus []int) []int {
	taken := map[int]bool{}
	var first []int
	for _, c := range cpus {
		if taken[c] {
			continue
		}
		first = append(first, c)
		text, err := j.sys.ReadFile(fmt.Sprintf("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", c))
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

// interpreter is that of the virtual environment that --venv_script activates.
func (j *deepSpeedJob) interpreter() error {
	script := j.line.String("venv_script")
	if script == "" {
		return nil
	}
	bin, name := path.Split(script)
	if name != "activate" || path.Base(path.Clean(bin)) != "bin" {
		j.cmd.Note("--venv_script=%[1]s is no bin/activate of a virtual environment, and is not read: source %[1]s before",
			script)
		return nil
	}
	bin = path.Clean(bin)
	j.env("PYTHON_EXEC", path.Join(bin, "python"))
	j.env("VIRTUAL_ENV", path.Dir(bin))
	j.env("PATH", bin+":"+j.sys.lookup("PATH"))
	return nil
}

// envFiles reads the variables that DeepSpeed gives to the workers of several nodes: a file in the home directory, and
// then one in the working directory.
func (j *deepSpeedJob) envFiles() error {
	if j.sys.Handed != nil {
		return j.readEnvFiles(j.sys.Handed.EnvFiles)
	}
	if j.cmd.Remote == nil && j.hi < 2 && !j.line.Bool("force_multi") {
		return nil
	}
	name := ".deepspeed_env"
	text, named := j.sys.Env("DS_ENV_FILE")
	if named {
		name = text
	}
	files := []string{name}
	if home := j.sys.lookup("HOME"); home != "" && !path.IsAbs(name) {
		files = []string{path.Join(home, name), name}
	}
	missing := 0
	var found []envFile
	for _, file := range files {
		text, err := j.sys.ReadFile(file)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			missing++
		case err != nil:
			return usageErrorf("variables of the workers in %s: %v", file, err)
		default:
			found = append(found, envFile{file, string(text)})
		}
	}
	if r := j.cmd.Remote; r != nil {
		r.Handed.EnvFiles = found
	}
	if named && missing == len(files) {
		j.cmd.Note("DS_ENV_FILE=%s: there is no %s: the workers get no variables from it", name,
			strings.Join(files, " and no "))
	}
	return j.readEnvFiles(found)
}

func (j *deepSpeedJob) readEnvFiles(files []envFile) error {
	for _, file := range files {
		if err := j.variables(file.Text); err != nil {
			return usageErrorf("variables of the workers in %s: %v", file.Path, err)
		}
	}
	return nil
}

// variables reads lines NAME=value.
func (j *deepSpeedJob) variables(text string) error {
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
		j.env(name, j.expand(unquote(strings.TrimSpace(value))))
		j.cmd.Unshown = append(j.cmd.Unshown, name)
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
func (j *deepSpeedJob) expand(text string) string {
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
		b.WriteString(j.value(name))
	}
}

// value is that of a variable of the workers.
func (j *deepSpeedJob) value(name string) string {
	for _, kv := range slices.Backward(j.cmd.Env) {
		if value, is := strings.CutPrefix(kv, name+"="); is {
			return value
		}
	}
	return j.sys.lookup(name)
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
