package verdict_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/verdict"
)

// example is one file of testdata/corpus, see its README.md.
type example struct {
	name     string
	Fault    string           `json:"fault"`
	Rank     *int             `json:"rank"` // nil: all ranks fail alike, or nothing tells
	Node     string           `json:"node"` // that went away; "" if none did
	Class    verdict.Class    `json:"class"`
	Evidence verdict.Evidence `json:"evidence"`
}

func corpus(t testing.TB) []example {
	t.Helper()
	paths, err := filepath.Glob("testdata/corpus/*.json")
	require.NoError(t, err)
	var out []example
	for _, path := range paths {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		e := example{name: strings.TrimSuffix(filepath.Base(path), ".json")}
		require.NoError(t, json.Unmarshal(data, &e), path)
		out = append(out, e)
	}
	return out
}

// rightRank: a node that went away is known by its name.
func (e *example) rightRank(v verdict.Verdict) bool {
	switch {
	case e.Node != "":
		return v.Loss != nil && v.Loss.NodeName == e.Node
	case e.Rank != nil:
		return v.Root != nil && v.Root.Rank == *e.Rank
	}
	return true
}

// Faults that were produced by running them are judged right, as good as always.
func TestCorpus(t *testing.T) {
	t.Parallel()
	all := corpus(t)
	require.GreaterOrEqual(t, len(all), 60)
	faults, named, ranks, classes, missed := map[string]bool{}, 0, 0, 0, []string{}
	for _, e := range all {
		faults[e.Fault] = true
		v := verdict.Judge(e.Evidence)
		rank, class := e.rightRank(v), v.Class == e.Class
		if e.Rank != nil || e.Node != "" {
			named++
			ranks += count(rank)
		}
		classes += count(class)
		if !rank || !class {
			missed = append(missed, fmt.Sprintf("%-40s right rank %-5t class %s, not %s: %s", e.name, rank, v.Class, e.Class,
				v.Line()))
		}
	}
	t.Logf("%d examples of %d faults: right rank %d of %d, right class %d of %d; missed:\n%s", len(all), len(faults),
		ranks, named, classes, len(all), strings.Join(missed, "\n"))
	require.GreaterOrEqual(t, float64(ranks)/float64(named), 0.95)
	require.GreaterOrEqual(t, float64(classes)/float64(len(all)), 0.90)
}

func count(right bool) int {
	if right {
		return 1
	}
	return 0
}
