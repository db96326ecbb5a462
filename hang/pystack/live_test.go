package pystack

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
)

// What is read from outside is what traceback says inside.
func TestLinesEqualTraceback(t *testing.T) {
	t.Parallel()
	eachPython(t, func(t *testing.T, p python) {
		t.Parallel()
		x, line := start(t, p, "testdata/shapes.py")
		want := map[string][][3]any{}
		require.NoError(t, json.Unmarshal([]byte(line), &want))
		s, err := New().Read(t.Context(), x.pid)
		require.NoError(t, err)
		require.Empty(t, s.Error)
		require.Equal(t, "CPython "+p.version, s.Interpreter)
		require.True(t, s.Threads[0].Main)
		require.Equal(t, x.pid, s.Threads[0].TID)
		require.Len(t, s.Threads, len(want)+1) // one of them reported
		for _, th := range s.Threads {
			if frames, ok := want[strconv.Itoa(th.TID)]; ok {
				require.Equal(t, text(expected(frames)), text(th.Python))
				delete(want, strconv.Itoa(th.TID))
			}
		}
		require.Empty(t, want)
	})
}

func expected(frames [][3]any) (all []hang.Frame) {
	for _, f := range frames {
		all = append(all, hang.Frame{Func: f[0].(string), File: f[1].(string), Line: int(f[2].(float64))})
	}
	return shorten(all)
}
