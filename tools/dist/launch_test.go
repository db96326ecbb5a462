package main

import (
	"bytes"
	"cmp"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// functions is a script that launches its own functions; the first argument is a part of it.
const functions = "testdata/launch/functions.py"

// launches are tests of the wheel's module.
type launches struct{ bin, python, module string }

func TestLaunch(t *testing.T) {
	t.Parallel()
	l := &launches{bin: built(t), python: cmp.Or(os.Getenv("TORCH_PYTHON"), debianPython)}
	if _, err := os.Stat(l.python); err != nil {
		t.Skip("SKIPPED: NO FUNCTION IS LAUNCHED FROM PYTHON: ", err)
	}
	var err error
	l.module, err = filepath.Abs("python")
	require.NoError(t, err)
	for name, test := range map[string]func(*testing.T){"Functions": l.functions, "WithPyTorch": l.withPyTorch,
		"OnTwoNodes": l.onTwoNodes, "IsStopped": l.isStopped, "WithoutAFile": l.withoutAFile,
		"FromANotebook": l.fromANotebook} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}

// script runs a script that imports the module.
func (l *launches) script(left string, args ...string) *exec.Cmd {
	cmd := command(l.bin, left, l.python, args...)
	cmd.Env = append(cmd.Env, "PYTHONPATH="+l.module, "PYTHONDONTWRITEBYTECODE=1")
	return cmd
}

func (l *launches) functions(t *testing.T) {
	for part, want := range map[string]string{
		"values":   "the result of rank 0 cannot be sent to another process",
		"failures": "ValueError: bad batch of rank 1\n",
		"refused":  "args has to be a tuple, such as args=(5,)\n",
	} {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			left := t.TempDir()
			out, err := l.script(left, functions, part).CombinedOutput()
			require.NoError(t, err, string(out))
			require.Contains(t, string(out), want)
			nothingLeft(t, left)
		})
	}
}

func (l *launches) withPyTorch(t *testing.T) {
	withTorch(t)
	left := t.TempDir()
	out, err := l.script(left, "testdata/launch/jobs.py").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "as PyTorch has it, with ")
}

// Two machines call launch at the same time; each gets what its own ranks return.
func (l *launches) onTwoNodes(t *testing.T) {
	port := strconv.Itoa(freePort(t))
	out := make(chan string, 2)
	for _, role := range []string{"host", "guest"} {
		go func() {
			cmd := l.script(t.TempDir(), functions, "node", "localhost:"+port, role)
			var log bytes.Buffer
			cmd.Stderr = &log
			text, err := cmd.Output()
			if err != nil {
				t.Logf("%s: %v\n%s", role, err, log.String())
			}
			out <- string(text)
		}()
	}
	require.ElementsMatch(t, []string{"{0: 0, 1: 1}\n", "{2: 2, 3: 3}\n"}, []string{<-out, <-out})
}

// freePort is one that no client gets from the kernel meanwhile: those begin at 32768.
func freePort(t *testing.T) int {
	t.Helper()
	for {
		port := 20_000 + rand.IntN(10_000)
		if l, err := net.Listen("tcp", "localhost:"+strconv.Itoa(port)); err == nil {
			require.NoError(t, l.Close())
			return port
		}
	}
}

// Workers get the signal once; when Python is killed, the job ends, too.
func (l *launches) isStopped(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			left, begun := t.TempDir(), filepath.Join(t.TempDir(), "begun")
			cmd := l.script(left, functions, "interrupted", begun)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			require.NoError(t, cmd.Start())
			workers := []int{pidIn(t, begun+".0"), pidIn(t, begun+".1")}
			require.NoError(t, cmd.Process.Signal(sig))
			err := cmd.Wait()
			for _, pid := range workers {
				gone := func() bool { return syscall.Kill(pid, 0) != nil }
				require.Eventually(t, gone, time.Minute, 10*time.Millisecond)
			}
			if sig == syscall.SIGINT {
				require.NoError(t, err)
				require.Contains(t, out.String(), "\ninterrupted\n")
				require.Equal(t, 2, strings.Count(out.String(), "\nKeyboardInterrupt\n"), out.String())
				nothingLeft(t, left)
			}
		})
	}
}

func pidIn(t *testing.T, path string) (pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		data, _ := os.ReadFile(path)
		pid, _ = strconv.Atoi(string(data))
		return pid > 0
	}, time.Minute, 10*time.Millisecond)
	return pid
}

// A function without a file, as in a notebook, needs cloudpickle. A script that launches while its own workers import
// it is told so.
func (l *launches) withoutAFile(t *testing.T) {
	const session = "from dlrover_run import launch\ndef f(): return 5\nprint(launch(f, nproc_per_node=2))"
	run := func(args ...string) (string, error) {
		out, err := l.script(t.TempDir(), args...).CombinedOutput()
		return string(out), err
	}
	out, err := run("-S", "-c", session) // -S hides all packages
	require.Error(t, err)
	require.Contains(t, out, "f, or one of its arguments, cannot be sent to another process (it is defined in this "+
		"session, and in no file): pip install cloudpickle for "+l.python+", or move its definition into a module")

	script := filepath.Join(t.TempDir(), "unguarded.py")
	require.NoError(t, os.WriteFile(script, []byte(session), 0o600))
	out, err = run(script)
	require.Error(t, err)
	require.Contains(t, out, "if __name__ == '__main__':")

	if exec.Command(l.python, "-c", "import cloudpickle").Run() != nil {
		t.Skipf("SKIPPED: NO FUNCTION OF A SESSION IS LAUNCHED: %s has no cloudpickle", l.python)
	}
	for _, args := range [][]string{{"-c", session}, nil} {
		cmd := l.script(t.TempDir(), args...)
		cmd.Stdin = strings.NewReader(session)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Contains(t, string(out), "{0: 5, 1: 5}\n")
	}
}

// A real kernel of Jupyter.
func (l *launches) fromANotebook(t *testing.T) {
	if exec.Command(l.python, "-c", "import ipykernel, jupyter_client, cloudpickle").Run() != nil {
		t.Skipf("SKIPPED: NO NOTEBOOK IS TRIED: %s has no ipykernel, or no cloudpickle", l.python)
	}
	left := t.TempDir()
	cmd := l.script(left, "testdata/launch/notebook.py", t.TempDir())
	cmd.Env = append(cmd.Env, "HOME="+left, "JUPYTER_PLATFORM_DIRS=1", "IPYTHONDIR="+left)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "launched\ninterrupted\nkilled\n")
}
