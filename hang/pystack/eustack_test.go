package pystack

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/testkit"
)

// fakeTool puts a script in the place of eu-stack.
func fakeTool(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, testkit.WriteProgram(filepath.Join(dir, "eu-stack"), "#!/bin/sh\n"+script))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

func sleeper(t *testing.T) *target {
	t.Helper()
	all := pythons()
	if len(all) == 0 {
		t.Skip("SKIPPED: " + t.Name() + " IS NOT RUN: there is no Python")
	}
	x, _ := start(t, all[0], "testdata/states.py", "asleep")
	x.arrives(t, "asleep", "S")
	return x
}

func TestTool(t *testing.T) {
	x := sleeper(t)
	fakeTool(t, `for last; do :; done
echo "PID $last - process"
echo "TID $last:"
echo "#0  0x00007f14562dd545 clock_nanosleep@GLIBC_2.2.5 - /usr/lib/libc.so.6"
echo "#1  0x00000000005d64b4 - /usr/bin/python3.11"
echo "#1  0x00000000005d64b6 - /usr/bin/python3.11"
echo "#2  0x00000000005d64b5 _ZN4c10d7Reducer17finalize_backwardEv - /usr/lib/libtorch_cpu.so"
echo "eu-stack: no more" >&2
exit 1
`)
	s, err := New().Read(t.Context(), x.pid, Tool)
	require.NoError(t, err)
	require.Empty(t, s.Error)
	require.Equal(t, []hang.Frame{
		{Func: "clock_nanosleep", File: "/usr/lib/libc.so.6"}, {Func: "[python3.11]", File: "/usr/bin/python3.11"},
		{Func: "c10d::Reducer::finalize_backward", File: "/usr/lib/libtorch_cpu.so"},
	}, mainOf(t, s).Native)
	require.False(t, mainOf(t, s).Approximate)
}

// The tool itself, where it is installed: its frames are no approximation, and the process goes on.
func TestToolThatIsInstalled(t *testing.T) {
	if _, err := exec.LookPath("eu-stack"); err != nil {
		t.Skip("SKIPPED: EU-STACK IS NOT TESTED: it is not installed (elfutils)")
	}
	x := sleeper(t)
	s, err := New().Read(t.Context(), x.pid, Tool)
	require.NoError(t, err)
	require.Empty(t, s.Error)
	main := mainOf(t, s)
	require.False(t, main.Approximate)
	require.Regexp(t, "nanosleep", main.Native[0].Func)
	require.Contains(t, strings.Join(text(main.Native), " "), "PyEval")
	x.arrives(t, "asleep", "S")
}

// A tool that is killed may leave the process stopped: it goes on, and its frames are found without.
func TestToolThatHangs(t *testing.T) {
	x := sleeper(t)
	fakeTool(t, fmt.Sprintf("kill -STOP %d\nexec sleep 1000\n", x.pid))
	s, err := New().Read(t.Context(), x.pid, Tool)
	require.NoError(t, err)
	require.Contains(t, s.Error, "eu-stack did not end within 2s")
	require.True(t, x.arrives(t, "asleep", "S").Approximate)
}

// What cannot be traced safely is not.
func TestToolIsNotUsedWhereItHarms(t *testing.T) {
	dir := t.TempDir()
	fakeTool(t, "touch "+dir+"/used\n")
	for _, state := range "DTtZX" {
		require.False(t, traceable([]task{{state: 'S'}, {state: byte(state)}}))
		s := survey{pid: os.Getpid(), tasks: []task{{state: byte(state)}}}
		s.tool(t.Context())
	}
	require.NoFileExists(t, dir+"/used")
	require.True(t, traceable([]task{{state: 'S'}, {state: 'R'}, {state: 'I'}}))
}
