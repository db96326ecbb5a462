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
	deps := map[string][]string{}
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
		{"dlrover-run/launcher/...", "dlrover-run/netcheck", "the launcher declares the small interface that it needs"},
		{"dlrover-run/launcher/...", "dlrover-run/switchbox", "the launcher declares the small interface that it needs"},
		{"dlrover-run/rendezvous/...", "dlrover-run/netcheck", "cmd joins them"},
		{"dlrover-run/rendezvous/...", "dlrover-run/switchbox", "cmd joins them"},
		{"dlrover-run/checkpointd/...", "dlrover-run/netcheck", "checkpoints know no checks"},
		{"dlrover-run/checkpointd/...", "dlrover-run/switchbox", "checkpoints know no checks"},
		{"dlrover-run/netcheck/...", "dlrover-run/cmd", "libraries do not import mains"},
		{"dlrover-run/netcheck/...", "dlrover-run/launcher", "checks of nodes know no launcher"},
		{"dlrover-run/netcheck/...", "dlrover-run/rendezvous", "a Transport is all that they need"},
		{"dlrover-run/netcheck/...", "dlrover-run/checkpointd", "checks of nodes know no checkpoints"},
		{"dlrover-run/netcheck/...", "dlrover-run/switchbox", "devices are findings to them; cmd joins them"},
		{"dlrover-run/netcheck/...", "github.com/urfave/cli", "only cmd knows the command line"},
		{"dlrover-run/netcheck/...", "github.com/prometheus", "only cmd knows metrics"},
		{"dlrover-run/netcheck/...", "runtime/cgo", "only NVIDIA's library needs C"},
		{"dlrover-run/switchbox/...", "dlrover-run/cmd", "libraries do not import mains"},
		{"dlrover-run/switchbox/...", "dlrover-run/launcher", "checks of devices know no launcher"},
		{"dlrover-run/switchbox/...", "dlrover-run/rendezvous", "checks of devices know no rendezvous"},
		{"dlrover-run/switchbox/...", "dlrover-run/checkpointd", "checks of devices know no checkpoints"},
		{"dlrover-run/switchbox/...", "dlrover-run/netcheck", "checks of devices know no network"},
		{"dlrover-run/switchbox/...", "github.com/urfave/cli", "only cmd knows the command line"},
		{"dlrover-run/switchbox/...", "github.com/prometheus", "only cmd knows metrics"},
		{"dlrover-run/cmd/dlrover-run", "dlrover-run/switchbox/nvml", "with cgo it would link C"},
		{"dlrover-run/cmd/dlrover-run", "github.com/NVIDIA", "with cgo it would link C"},
		{"dlrover-run/cmd/dlrover-run", "google.golang.org/grpc", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "github.com/prometheus", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "google.golang.org/protobuf", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "testing", "what tests use stays out of programs"},
		{"dlrover-run/cmd/dlrover-run", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/checkpointd", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/dlroverctl", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/dlrover-master", "runtime/cgo", "one static file for any image"},
	} {
		if deps[c.pkgs] == nil {
			deps[c.pkgs] = list(t, "-deps", c.pkgs)
		}
		for _, dep := range deps[c.pkgs] {
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
	for _, pkg := range []string{
		"rendezvous", "launcher/argv", "launcher/policy", "launcher/verdict", "launcher/preset", "netcheck", "switchbox",
	} {
		imports := list(t, "-f", `{{join .Imports "\n"}}`, "dlrover-run/"+pkg)
		for _, never := range []string{"os", "os/exec", "net", "net/http", "log/slog", "context", "sync"} {
			require.False(t, slices.Contains(imports, never), "%s imports %s", pkg, never)
		}
	}
}

// What decides about a node can be read, and tested, with nothing else at hand.
func TestDecisionsNeedTheStandardLibraryOnly(t *testing.T) {
	for _, pkg := range []string{"dlrover-run/netcheck", "dlrover-run/switchbox"} {
		for _, dep := range list(t, "-f", `{{if not .Standard}}{{.ImportPath}}{{end}}`, "-deps", pkg) {
			require.Equal(t, pkg, dep)
		}
	}
}

// Only what speaks to NVIDIA's library is made with a C compiler.
func TestOnlyTheCheckOfGPUsNeedsC(t *testing.T) {
	cmd := exec.Command("go", "list", "-f", `{{if .CgoFiles}}{{.ImportPath}}{{end}}`, "dlrover-run/...")
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=1")
	out, err := cmd.Output()
	require.NoError(t, err)
	for _, pkg := range strings.Fields(string(out)) {
		require.Regexp(t, `^dlrover-run/(switchbox/nvml|cmd/gpucheck)(/|$)`, pkg)
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
