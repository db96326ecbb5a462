package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// list runs go list without cgo, as the programs are built.
func list(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	require.NoError(t, err)
	return strings.Fields(string(out))
}

// Every library may import these, wherever they are: they import nothing of ours.
var leaves = []string{"dlrover-run/rendezvous/api/httperr"}

// Arrows point down: the libraries know neither each other nor the command line.
func TestImportPolicy(t *testing.T) {
	for _, c := range []struct{ pkgs, never, why string }{
		{"dlrover-run/launcher/...", "dlrover-run/rendezvous", "the launcher declares the small interface that it needs"},
		{"dlrover-run/rendezvous/...", "dlrover-run/launcher", "the rendezvous knows no workers"},
		{"dlrover-run/launcher/...", "dlrover-run/cmd", "libraries do not import mains"},
		{"dlrover-run/rendezvous/...", "dlrover-run/cmd", "libraries do not import mains"},
		{"dlrover-run/launcher/...", "github.com/urfave/cli", "only cmd knows the command line"},
		{"dlrover-run/launcher/...", "github.com/prometheus", "only cmd knows metrics"},
		{"dlrover-run/checkpointd/...", "dlrover-run/launcher", "checkpoints know no launcher"},
		{"dlrover-run/checkpointd/...", "dlrover-run/rendezvous", "the daemons meet through a Coordinator"},
		{"dlrover-run/checkpointd/...", "dlrover-run/cmd", "libraries do not import mains"},
		{"dlrover-run/checkpointd", "github.com/", "checkpoints are the standard library's alone"},
		{"dlrover-run/launcher/...", "dlrover-run/checkpointd", "the launcher declares the small interface that it needs"},
		{"dlrover-run/rendezvous/...", "dlrover-run/checkpointd", "cmd joins them"},
		{"dlrover-run/rendezvous/...", "github.com/", "the rendezvous is the standard library's alone"},
		{"dlrover-run/cmd/dlrover-run", "google.golang.org/grpc", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "github.com/prometheus", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "google.golang.org/protobuf", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "testing", "what tests use stays out of programs"},
		{"dlrover-run/cmd/dlrover-run", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/checkpointd", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/dlroverctl", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/dlrover-master", "runtime/cgo", "one static file for any image"},
	} {
		for _, dep := range list(t, "-deps", c.pkgs) {
			never := strings.HasPrefix(dep, c.never) && !slices.Contains(leaves, dep)
			require.False(t, never, "%s imports %s: %s", c.pkgs, dep, c.why)
		}
	}
	for _, leaf := range leaves {
		for _, dep := range list(t, "-deps", leaf) {
			require.False(t, dep != leaf && strings.HasPrefix(dep, "dlrover-run/"), "%s imports %s", leaf, dep)
		}
	}
}

// The decisions are pure: no clock is read, nothing is opened.
func TestPurePackages(t *testing.T) {
	for _, pkg := range []string{"rendezvous", "launcher/argv", "launcher/policy", "launcher/verdict", "launcher/preset"} {
		imports := list(t, "-f", `{{join .Imports "\n"}}`, "dlrover-run/"+pkg)
		for _, never := range []string{"os", "os/exec", "net", "net/http", "log/slog", "context", "sync"} {
			require.False(t, slices.Contains(imports, never), "%s imports %s", pkg, never)
		}
	}
}

// Every exec of every program, guard and daemon included, would pay for it.
func TestNoPatternIsCompiledInAnInit(t *testing.T) {
	files := 0
	require.NoError(t, filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		files++
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		require.NoError(t, err)
		for _, d := range f.Decls {
			if v, ok := d.(*ast.GenDecl); ok {
				require.False(t, compiles(v), "%s: compile the pattern at its first use (sync.OnceValue), or check by hand", path)
			}
		}
		return nil
	}))
	require.Greater(t, files, 100)
}

// compiles says whether n calls something of package regexp, other than in a function that somebody may call later.
func compiles(n ast.Node) (found bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			return false
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.SelectorExpr); ok {
				pkg, _ := f.X.(*ast.Ident)
				found = found || pkg != nil && pkg.Name == "regexp"
			}
		}
		return true
	})
	return found
}
