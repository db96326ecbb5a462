package watch

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// machine is a /proc of made-up processes.
type machine struct {
	t    *testing.T
	root string
}

func (m machine) add(pid, parent int, start uint64, state string, env ...string) {
	dir := filepath.Join(m.root, strconv.Itoa(pid))
	require.NoError(m.t, os.MkdirAll(dir, 0o755))
	line := fmt.Sprintf("%d (py) 3) %s %d %s%d 0\n", pid, state, parent, strings.Repeat("0 ", 17), start)
	require.NoError(m.t, os.WriteFile(filepath.Join(dir, "stat"), []byte(line), 0o600))
	require.NoError(m.t, os.WriteFile(filepath.Join(dir, "environ"), []byte(strings.Join(env, "\x00")), 0o600))
}

// worker is the environment of one of two workers of a torchrun.
func worker(group, world, local, restarts int) []string {
	return []string{"PATH=/bin", fmt.Sprint("RANK=", 2*group+local), fmt.Sprint("LOCAL_RANK=", local),
		"LOCAL_WORLD_SIZE=2", fmt.Sprint("WORLD_SIZE=", world), fmt.Sprint("GROUP_RANK=", group), "MASTER_PORT=29400",
		fmt.Sprint("TORCHELASTIC_RESTART_COUNT=", restarts)}
}

func TestFindSet(t *testing.T) {
	pod := []string{"RANK=1", "WORLD_SIZE=2", "MASTER_PORT=29400"} // an operator's, about nodes
	for name, c := range map[string]struct {
		build func(m machine)
		want  []int // pids; nil: there is no set
		base  int
	}{
		"nothing": {func(m machine) { m.add(7, 1, 9, "S", pod...) }, nil, 0},
		"both workers": {func(m machine) {
			m.add(12, 7, 21, "S", worker(1, 4, 1, 0)...)
			m.add(11, 7, 20, "R", worker(1, 4, 0, 0)...)
		}, []int{11, 12}, 2},
		"one is missing": {func(m machine) { m.add(12, 7, 21, "S", worker(1, 4, 1, 0)...) }, nil, 0},
		"one has ended": {func(m machine) {
			m.add(11, 7, 20, "Z", worker(0, 2, 0, 0)...)
			m.add(12, 7, 21, "S", worker(0, 2, 1, 0)...)
		}, nil, 0},
		"their children, and one that has lost its parent": {func(m machine) {
			m.add(11, 1, 20, "S", worker(0, 2, 0, 0)...)
			m.add(12, 1, 21, "S", worker(0, 2, 1, 0)...)
			m.add(13, 11, 30, "S", worker(0, 2, 0, 0)...)
			m.add(10, 1, 31, "S", worker(0, 2, 0, 0)...)
		}, []int{11, 12}, 0},
		"the newest": {func(m machine) {
			m.add(11, 7, 20, "S", worker(0, 2, 0, 0)...)
			m.add(12, 7, 21, "S", worker(0, 2, 1, 0)...)
			m.add(21, 7, 50, "S", worker(0, 2, 0, 1)...)
			m.add(22, 7, 51, "S", worker(0, 2, 1, 1)...)
		}, []int{21, 22}, 0},
		"a newer one that is not whole": {func(m machine) {
			m.add(11, 7, 20, "S", worker(0, 2, 0, 0)...)
			m.add(12, 7, 21, "S", worker(0, 2, 1, 0)...)
			m.add(21, 7, 50, "S", worker(0, 2, 0, 1)...)
		}, []int{11, 12}, 0},
		"ranks of no torchrun": {func(m machine) {
			m.add(11, 7, 20, "S", worker(0, 4, 0, 0)...)
			m.add(12, 7, 21, "S", worker(1, 4, 1, 0)...)
		}, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			m := machine{t, t.TempDir()}
			m.add(7, 1, 5, "S", pod...)
			c.build(m)
			s := findSet(m.root)
			if c.want == nil {
				require.Nil(t, s)
				return
			}
			require.NotNil(t, s)
			for i, p := range s.Workers {
				require.Equal(t, c.want[i], p.PID)
			}
			require.Len(t, s.Workers, len(c.want))
			require.Equal(t, []int{c.base, c.base / 2, 2 + c.base}, []int{s.RankBase, s.GroupRank, s.WorldSize})
			require.EqualValues(t, 29400, s.MasterPort)
			require.True(t, s.Same(findSet(m.root)))
		})
	}
	require.Nil(t, findSet("/nowhere"))
}

func FuzzEnviron(f *testing.F) {
	f.Add([]byte(strings.Join(worker(1, 4, 1, 3), "\x00")))
	f.Add([]byte("RANK=-1\x00LOCAL_RANK=99999999999999999999\x00=\x00\x00LOCAL_WORLD_SIZE"))
	f.Fuzz(func(t *testing.T, env []byte) {
		var c candidate
		if c.parse(env) {
			require.True(t, 0 <= c.local && c.local < c.localSize && c.localSize <= c.world, c)
			require.True(t, c.local <= c.rank && c.rank < c.world && c.world <= maxWorld, c)
			require.True(t, 0 <= c.group && c.group < maxGroup, c)
		}
	})
}
