package master

import (
	"fmt"
	"maps"
	"math/rand"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/testkit"
	"dlrover-run/rendezvous/api"
)

// operator marks and clears nodes of its own, one after the other, and knows the reason of each mark that counts.
type operator struct {
	name  string
	kept  map[string]string // acknowledged
	tried map[string]string // kept, and the change that was under way
	n     int
}

// work goes on until the daemon is gone.
func (o *operator) work(t *testing.T, c *api.Client) {
	for {
		o.n++
		node := fmt.Sprintf("%s-%d", o.name, o.n%5)
		ch := marks.Change{Action: "mark", Reason: fmt.Sprintf("%d %s", o.n, strings.Repeat("x", 400))}
		o.tried = maps.Clone(o.kept)
		if o.n%3 == 0 {
			ch = marks.Change{Action: "clear"}
			delete(o.tried, node)
		} else {
			o.tried[node] = ch.Reason
		}
		if c.Global(t.Context(), "nodes/"+node, ch, nil) != nil {
			return
		}
		o.kept = o.tried
	}
}

// reasons are the marks of one operator.
func reasons(known marks.Known, o *operator) map[string]string {
	all := map[string]string{}
	for _, n := range known.Nodes {
		if n.Mark != nil && strings.HasPrefix(n.Name, o.name) {
			all[n.Name] = n.Mark.Reason
		}
	}
	return all
}

// A master is killed 50 times at random while its journal is written. What was acknowledged is there afterwards, what
// was under way is there as a whole or not at all, and nothing is set aside as damaged.
func TestKilledWhileTheJournalIsWritten(t *testing.T) {
	testkit.Long(t, "it starts a master 51 times")
	dir := filepath.Join(t.TempDir(), "data")
	operators := []*operator{{name: "a"}, {name: "b"}, {name: "c"}}
	changes := 0
	for round := range 51 {
		c, kill := child(t, "--data-dir="+dir)
		known := listed(t, c)
		for _, o := range operators {
			got := reasons(known, o)
			if !maps.Equal(got, o.tried) {
				require.Equal(t, o.kept, got, "round %d, operator %s", round, o.name)
			}
			o.kept = got
		}
		if round == 50 {
			kill()
			break
		}
		var wg sync.WaitGroup
		for _, o := range operators {
			wg.Go(func() { o.work(t, c) })
		}
		time.Sleep(time.Duration(rand.Int63n(int64(150 * time.Millisecond))))
		kill()
		wg.Wait()
	}
	for _, o := range operators {
		changes += o.n
	}
	t.Logf("%d changes", changes)
	require.Greater(t, changes, 150, "each operator has tried one a round")
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.False(t, slices.ContainsFunc(files, func(f string) bool { return strings.HasSuffix(f, ".damaged") }), files)
	require.Less(t, len(files), 6, files)
}
