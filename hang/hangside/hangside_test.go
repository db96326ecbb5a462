package hangside

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/serve"
	"dlrover-run/hang/watch"
	"dlrover-run/internal/job"
)

// sleeper is a process that nobody but the code under test ends.
func sleeper(t *testing.T) (watch.Process, *exec.Cmd) {
	t.Helper()
	c := exec.Command("sleep", "600")
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.Process.Pid))
	require.NoError(t, err)
	p := watch.Process{PID: c.Process.Pid}
	_, err = fmt.Sscan(strings.Fields(string(text))[21], &p.Start)
	require.NoError(t, err)
	return p, c
}

func TestWhoIsEnded(t *testing.T) {
	now := job.EpochID{Epoch: 3}
	restart, stop := hang.Order{Action: hang.ActRestart, Epoch: now}, hang.Order{Action: hang.ActStop, Epoch: now}
	for name, c := range map[string]struct {
		order  hang.Order
		blamed []int
		world  int
		want   [3]bool // torchrun and both workers live
	}{
		"to blame":                    {restart, []int{5}, 8, [3]bool{true, true, false}},
		"nobody is to blame":          {restart, nil, 2, [3]bool{true, false, false}},
		"nobody here is to blame":     {restart, nil, 8, [3]bool{true, true, true}},
		"the job":                     {stop, []int{5}, 8, [3]bool{false, true, true}},
		"workers that are gone since": {hang.Order{Action: hang.ActStop}, []int{5}, 8, [3]bool{true, true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			torchrun, tc := sleeper(t)
			first, fc := sleeper(t)
			second, sc := sleeper(t)
			s := &side{Config: Config{Run: "j", Log: slog.New(slog.DiscardHandler)}, hub: serve.New(serve.Config{}), epoch: now,
				watcher: &watch.Watcher{}, blamed: c.blamed,
				set: &watch.Set{Workers: []watch.Process{first, second}, Parent: torchrun, RankBase: 4, WorldSize: c.world}}
			s.act("j", c.order)
			for i, cmd := range []*exec.Cmd{tc, fc, sc} {
				_ = cmd.Process.Signal(syscall.SIGINT) // comes after what act has sent
				_ = cmd.Wait()
				by := cmd.ProcessState.Sys().(syscall.WaitStatus).Signal()
				require.Equal(t, c.want[i], by == syscall.SIGINT, "%d: %v", i, by)
			}
		})
	}
}

// A pid that another process has got is left alone.
func TestAnotherProcessIsLeftAlone(t *testing.T) {
	p, c := sleeper(t)
	p.Start++
	s := &side{Config: Config{Log: slog.New(slog.DiscardHandler)}}
	s.signal(p, syscall.SIGKILL, "killed")
	_ = c.Process.Signal(syscall.SIGINT)
	_ = c.Wait()
	require.Equal(t, syscall.SIGINT, c.ProcessState.Sys().(syscall.WaitStatus).Signal())
}

func TestSettings(t *testing.T) {
	env := func(value string) func(string) (string, bool) {
		return func(string) (string, bool) { return value, value != "" }
	}
	c, err := Settings(Off, "report", false, env("x"))
	require.NoError(t, err)
	require.Nil(t, c)
	c, err = Settings(outside, "restart", true, env("60"))
	require.NoError(t, err)
	require.Equal(t, "action=restart after=1m0s", c.Spec.String())
	_, err = Settings(outside, "report", false, env("x"))
	require.ErrorContains(t, err, "$XPU_TIMER_HANG_TIMEOUT")
}

// A torchrun's place among others is kept, though nothing is known of these.
func TestWorldOfAPod(t *testing.T) {
	s := &side{node: "pod-2", set: &watch.Set{Workers: make([]watch.Process, 4), RankBase: 8, GroupRank: 2, WorldSize: 16}}
	w, err := s.world("")
	require.NoError(t, err)
	require.Equal(t, "8-11", w.Ranks().String())
	require.Equal(t, 12, w.Elsewhere)
	require.Equal(t, 1, w.Working())
	require.Equal(t, hang.WorldNode{Name: "pod-2", RankBase: 8, Slots: 4}, w.Nodes[2])
}
