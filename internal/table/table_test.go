package table

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTable(t *testing.T) {
	var out strings.Builder
	table := New(&out, "NODE", "RANKS", "WHY")
	table.Row("a", "0-7", "")
	table.Row("long\x1b[2J\tname\n", "", strings.Repeat("w", 200))
	require.NoError(t, table.Flush())
	require.Equal(t, "NODE                 RANKS  WHY\n"+
		"a                    0-7\n"+
		`long\x1b[2J\tname\n         `+strings.Repeat("w", 200)+"\n", out.String())

	out.Reset()
	table = Numbers(&out)
	table.Row("from", "0")
	table.Row("n", "100")
	require.NoError(t, table.Flush())
	require.Equal(t, "  from    0\n     n  100\n", out.String())
}

// Every table of every program is one of these.
func TestNothingElseMakesTables(t *testing.T) {
	files := 0
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || path == "table.go" ||
			filepath.Base(path) == "table.go" && filepath.Base(filepath.Dir(path)) == "table" {
			return err
		}
		files++
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		require.NoError(t, err)
		for _, i := range f.Imports {
			require.NotEqual(t, `"text/tabwriter"`, i.Path.Value, "%s: use internal/table", path)
		}
		return nil
	}))
	require.Greater(t, files, 500)
}
