package run

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
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

// foundation is what every library may import: these packages import nothing of ours but each other.
func foundation(t *testing.T) []string {
	return slices.DeleteFunc(list(t, "dlrover-run/internal/..."), func(pkg string) bool {
		return strings.HasPrefix(pkg, "dlrover-run/internal/app/")
	})
}

// forTests: only tests import the package.
func forTests(pkg string) bool { return pkg == "dlrover-run/rendezvous/history" }

// Arrows point down: the libraries know neither each other nor the command line.
func TestImportPolicy(t *testing.T) {
	t.Parallel()
	deps := map[string][]string{}
	leaves := foundation(t)
	for _, c := range []struct{ pkgs, never, why string }{
		{"dlrover-run/launcher/...", "dlrover-run/rendezvous", "the launcher declares the small interface that it needs"},
		{"dlrover-run/launcher/...", "dlrover-run/rendezvous/pyproto", "cmd translates what masters say"},
		{"dlrover-run/rendezvous/...", "dlrover-run/launcher", "the rendezvous knows no workers"},
		{"dlrover-run/rendezvous", "dlrover-run/rendezvous/pyproto", "a Round knows no wire"},
		{"dlrover-run/rendezvous/api/...", "dlrover-run/rendezvous/pyproto", "agents of DLRover are nodes as all others"},
		{"dlrover-run/rendezvous/pyproto/agents", "dlrover-run/rendezvous/pyproto/upstream", "cmd joins them"},
		{"dlrover-run/launcher/...", "dlrover-run/internal/app", "libraries do not import programs"},
		{"dlrover-run/rendezvous/...", "dlrover-run/internal/app", "libraries do not import programs"},
		{"dlrover-run/launcher/...", "github.com/urfave/cli", "only cmd knows the command line"},
		{"dlrover-run/launcher/...", "github.com/prometheus", "only cmd knows metrics"},
		{"dlrover-run/checkpointd/...", "dlrover-run/launcher", "checkpoints know no launcher"},
		{"dlrover-run/checkpointd/...", "dlrover-run/rendezvous", "the daemons meet through a Coordinator"},
		{"dlrover-run/checkpointd/...", "dlrover-run/internal/app", "libraries do not import programs"},
		{"dlrover-run/checkpointd", "github.com/", "checkpoints are the standard library's alone"},
		{"dlrover-run/launcher/...", "dlrover-run/checkpointd", "the launcher declares the small interface that it needs"},
		{"dlrover-run/rendezvous/...", "dlrover-run/checkpointd", "cmd joins them"},
		{"dlrover-run/rendezvous/...", "github.com/", "the rendezvous is the standard library's alone"},
		{"dlrover-run/internal/app/kube", "dlrover-run/rendezvous/api", "marking nodes needs no rendezvous"},
		{"dlrover-run/internal/app/kube", "testing", "what tests use stays out of programs"},
		{"dlrover-run/cmd/dlrover-run", "dlrover-run/internal/app/kube", "the master marks nodes, launchers do not"},
		{"dlrover-run/launcher/...", "dlrover-run/netcheck", "the launcher declares the small interface that it needs"},
		{"dlrover-run/launcher/...", "dlrover-run/switchbox", "the launcher declares the small interface that it needs"},
		{"dlrover-run/rendezvous/...", "dlrover-run/netcheck", "cmd joins them"},
		{"dlrover-run/rendezvous/...", "dlrover-run/switchbox", "cmd joins them"},
		{"dlrover-run/checkpointd/...", "dlrover-run/netcheck", "checkpoints know no checks"},
		{"dlrover-run/checkpointd/...", "dlrover-run/switchbox", "checkpoints know no checks"},
		{"dlrover-run/netcheck/...", "dlrover-run/internal/app", "libraries do not import programs"},
		{"dlrover-run/netcheck/...", "dlrover-run/launcher", "checks of nodes know no launcher"},
		{"dlrover-run/netcheck/...", "dlrover-run/rendezvous", "a Transport is all that they need"},
		{"dlrover-run/netcheck/...", "dlrover-run/checkpointd", "checks of nodes know no checkpoints"},
		{"dlrover-run/netcheck/...", "dlrover-run/switchbox", "devices are findings to them; cmd joins them"},
		{"dlrover-run/netcheck/...", "github.com/urfave/cli", "only cmd knows the command line"},
		{"dlrover-run/netcheck/...", "github.com/prometheus", "only cmd knows metrics"},
		{"dlrover-run/netcheck/...", "runtime/cgo", "only NVIDIA's library needs C"},
		{"dlrover-run/switchbox/...", "dlrover-run/internal/app", "libraries do not import programs"},
		{"dlrover-run/switchbox/...", "dlrover-run/launcher", "checks of devices know no launcher"},
		{"dlrover-run/switchbox/...", "dlrover-run/rendezvous", "checks of devices know no rendezvous"},
		{"dlrover-run/switchbox/...", "dlrover-run/checkpointd", "checks of devices know no checkpoints"},
		{"dlrover-run/switchbox/...", "dlrover-run/netcheck", "checks of devices know no network"},
		{"dlrover-run/switchbox/...", "github.com/urfave/cli", "only cmd knows the command line"},
		{"dlrover-run/switchbox/...", "github.com/prometheus", "only cmd knows metrics"},
		{"dlrover-run/hang/...", "dlrover-run/internal/app", "libraries do not import programs"},
		{"dlrover-run/hang/...", "dlrover-run/launcher", "hangs know no launcher"},
		{"dlrover-run/hang/...", "dlrover-run/rendezvous", "hangs know no rendezvous"},
		{"dlrover-run/hang/...", "dlrover-run/checkpointd", "hangs know no checkpoints"},
		{"dlrover-run/hang/...", "dlrover-run/netcheck", "hangs know no checks of nodes"},
		{"dlrover-run/hang/...", "dlrover-run/switchbox", "hangs know no devices"},
		{"dlrover-run/hang/...", "github.com/urfave/cli", "only cmd knows the command line"},
		{"dlrover-run/hang/...", "github.com/prometheus", "only cmd knows metrics"},
		{"dlrover-run/hang/...", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/launcher/...", "dlrover-run/hang", "the launcher declares the small interface that it needs"},
		{"dlrover-run/rendezvous/...", "dlrover-run/hang", "cmd joins them"},
		{"dlrover-run/checkpointd/...", "dlrover-run/hang", "checkpoints know no hangs"},
		{"dlrover-run/netcheck/...", "dlrover-run/hang", "checks of nodes know no hangs"},
		{"dlrover-run/launcher/streams", "dlrover-run/launcher/logs", "frames and lines need nothing of ours"},
		{"dlrover-run/cmd/dlrover-run", "dlrover-run/switchbox/nvml", "with cgo it would link C"},
		{"dlrover-run/cmd/dlrover-run", "github.com/NVIDIA", "with cgo it would link C"},
		{"dlrover-run/cmd/dlrover-run", "k8s.io", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/checkpointd", "k8s.io", "only masters speak to Kubernetes"},
		{"dlrover-run/cmd/dlroverctl", "k8s.io", "only masters speak to Kubernetes"},
		{"dlrover-run/cmd/dlrover-run", "google.golang.org/grpc", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "dlrover-run/rendezvous/pyproto/agents", "only dlrover-master serves them"},
		{"dlrover-run/cmd/dlrover-run", "github.com/prometheus", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "google.golang.org/protobuf", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "charm.land", "only dlroverctl draws on a terminal"},
		{"dlrover-run/cmd/dlrover-master", "charm.land", "only dlroverctl draws on a terminal"},
		{"dlrover-run/internal/app/ctl/top", "charm.land", "a picture needs no terminal"},
		{"dlrover-run/cmd/dlrover-run", "go.opentelemetry.io", "start-up time and size of the launcher"},
		{"dlrover-run/cmd/dlrover-run", "testing", "what tests use stays out of programs"},
		{"dlrover-run/cmd/dlrover-run", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/checkpointd", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/dlroverctl", "runtime/cgo", "one static file for any image"},
		{"dlrover-run/cmd/dlrover-master", "runtime/cgo", "one static file for any image"},
	} {
		if deps[c.pkgs] == nil {
			pkgs := slices.DeleteFunc(list(t, c.pkgs), forTests)
			deps[c.pkgs] = list(t, append([]string{"-deps"}, pkgs...)...)
		}
		for _, dep := range deps[c.pkgs] {
			never := strings.HasPrefix(dep, c.never) && !slices.Contains(leaves, dep)
			require.False(t, never, "%s imports %s: %s", c.pkgs, dep, c.why)
		}
	}
	for _, leaf := range leaves {
		for _, dep := range list(t, "-deps", leaf) {
			ours := strings.HasPrefix(dep, "dlrover-run/") && !slices.Contains(leaves, dep)
			require.False(t, ours, "%s imports %s", leaf, dep)
		}
	}
}

// The decisions are pure: no clock is read, nothing is opened.
func TestPurePackages(t *testing.T) {
	for _, pkg := range []string{
		"rendezvous", "rendezvous/successor", "launcher/argv", "launcher/argv/native", "launcher/policy", "launcher/verdict",
		"launcher/preset", "netcheck", "switchbox", "launcher/logs/rule", "launcher/streams", "launcher/hostfile",
		"launcher/scheduler", "internal/app/nodehealth", "internal/job", "hang", "hang/page", "hang/rankset", "hang/slow",
		"hang/straggler", "rendezvous/ledger",
		"internal/app/describe", "internal/app/answers", "internal/app/ctl/top",
	} {
		imports := list(t, "-f", `{{join .Imports "\n"}}`, "dlrover-run/"+pkg)
		for _, never := range []string{"os", "os/exec", "net", "net/http", "log/slog", "context", "sync"} {
			require.False(t, slices.Contains(imports, never), "%s imports %s", pkg, never)
		}
	}
}

// What decides about a node, and what reads DLRover's messages, can be read, and tested, with nothing else at hand.
func TestDecisionsNeedTheStandardLibraryOnly(t *testing.T) {
	for _, pkg := range []string{"dlrover-run/netcheck", "dlrover-run/switchbox", "dlrover-run/rendezvous/pyproto"} {
		for _, dep := range list(t, "-f", `{{if not .Standard}}{{.ImportPath}}{{end}}`, "-deps", pkg) {
			require.True(t, dep == pkg || strings.HasPrefix(dep, "dlrover-run/internal/"), "%s imports %s", pkg, dep)
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
		require.Regexp(t, `^dlrover-run/(switchbox/nvml|cmd/gpucheck|internal/app/gpucheck)(/|$)`, pkg)
	}
}

// It lies in every training image. Whatever looks methods up by name, text/template above all, makes the linker keep
// every exported method: 2 MB. A start costs the same for every size up to the limit.
func TestSizeOfTheLauncher(t *testing.T) {
	program, err := os.ReadFile(filepath.Join(binDir, "dlrover-run"))
	require.NoError(t, err)
	require.False(t, bytes.Contains(program, []byte("text/template.(*state).evalField")), "linked again: who executes it?")
	require.Less(t, len(program), 18_000_000, "see what is new: go tool nm -size -sort size")
}

// One constructor makes all HTTP clients, so that no request goes through a proxy of the environment, which would read
// its token.
func TestClientsAreMadeInOnePlace(t *testing.T) {
	files := 0
	require.NoError(t, filepath.WalkDir("../../..", func(path string, _ fs.DirEntry, err error) error {
		inPlace := strings.Contains(path, "internal/plainhttp/") || strings.Contains(path, "/testdata/")
		if err != nil || inPlace || !slices.Contains([]string{".go", ".py"}, filepath.Ext(path)) {
			return err
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		switch {
		case filepath.Ext(path) == ".py":
			require.NotRegexp(t, `(?m)^\s*(import|from) (urllib\.request|urllib3|http\.client|requests)\b`, string(text), path)
		case !strings.HasSuffix(path, "_test.go"):
			files++
			require.Empty(t, ownClients(t, string(text)), "%s: use internal/plainhttp", path)
		}
		return nil
	}))
	require.Greater(t, files, 100)
}

func TestOwnClientsAreSeen(t *testing.T) {
	for text, seen := range map[string]bool{
		`var c = http.Client{}`:                        true,
		`var c = &http.Client{}`:                       true,
		`var c http.Client`:                            true,
		`var c = new(http.Transport)`:                  true,
		`type c struct{ http.Client }`:                 true,
		`func f() { _, _ = http.Get("") }`:             true,
		`var do = http.DefaultClient.Do`:               true,
		`var t = http.DefaultTransport`:                true,
		`var p = http.ProxyFromEnvironment`:            true,
		`type c struct{ *http.Client }`:                false,
		`func f(t *http.Transport) *http.Client`:       false,
		`func f() { http.NewRequest("", "", nil) }`:    false,
		`func f(hs map[string]http.Handler)`:           false,
		`func f(http struct{ Get string }) { http.x }`: false,
	} {
		require.Equal(t, seen, len(ownClients(t, `package a; import "net/http"; `+text)) > 0, text)
	}
	require.NotEmpty(t, ownClients(t, `package a; import web "net/http"; var c = web.DefaultClient`))
}

// ownClients are the places in a file where it makes or takes an HTTP client that may use a proxy.
func ownClients(t *testing.T, text string) (found []string) {
	f, err := parser.ParseFile(token.NewFileSet(), "", text, 0)
	require.NoError(t, err)
	name := ""
	for _, i := range f.Imports {
		if i.Path.Value == `"net/http"` {
			if name = "http"; i.Name != nil {
				name = i.Name.Name
			}
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.StarExpr: // a client that comes from elsewhere
			_, selected := n.X.(*ast.SelectorExpr)
			return !selected
		case *ast.SelectorExpr:
			pkg, ok := n.X.(*ast.Ident)
			if ok && pkg.Name == name && slices.Contains([]string{"Client", "Transport", "DefaultClient",
				"DefaultTransport", "Get", "Head", "Post", "PostForm", "ProxyFromEnvironment", "ProxyURL"}, n.Sel.Name) {
				found = append(found, n.Sel.Name)
			}
		}
		return true
	})
	return found
}

// Every exec of every program, guard and daemon included, would pay for it.
func TestNoPatternIsCompiledInAnInit(t *testing.T) {
	p, files := callGraph{calls: map[string][]string{}, inits: map[string][]string{}}, 0
	require.NoError(t, filepath.WalkDir("../../..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		files++
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		p.add(t, path, string(text))
		return nil
	}))
	require.Greater(t, files, 100)
	require.Empty(t, p.compiling(), "compile the pattern at its first use (sync.OnceValue), or check by hand")
}

func TestPatternsOfAnInitAreSeen(t *testing.T) {
	for text, seen := range map[string]bool{
		`var a = regexp.MustCompile("a")`:                                                true,
		`func init() { regexp.Compile("a") }`:                                            true,
		`var a = word("a"); func word(s string) any { return regexp.MustCompile(s) }`:    true,
		`var a = f(); func f() any { return g() }; func g() any { return rx.Word("a") }`: true,
		`var a = []any{rx.Word("a")}`:                                                    true,
		`var a = sync.OnceValue(func() any { return regexp.MustCompile("a") })`:          false,
		`var a = sync.OnceValue(f); func f() any { return regexp.MustCompile("a") }`:     false,
		`var a = f(); func f() any { return f() }`:                                       false,
		`var a = regexp.QuoteMeta("a")`:                                                  false,
		`func (x T) init() { regexp.MustCompile("a") }`:                                  false,
	} {
		p := callGraph{calls: map[string][]string{}, inits: map[string][]string{}}
		p.add(t, "../../../a/a.go", `package a; import "regexp"; import rx "dlrover-run/b"; `+text)
		p.add(t, "../../../b/b.go", `package b; import "regexp"; func Word(s string) any { return regexp.MustCompile(s) }`)
		require.Equal(t, seen, len(p.compiling()) == 1, text)
	}
}

// callGraph knows who calls whom, by the names of functions with the paths of their packages. Methods are left out.
type callGraph struct {
	calls map[string][]string // by function
	inits map[string][]string // by file: what its initialization calls
}

func (g callGraph) add(t *testing.T, path, text string) {
	f, err := parser.ParseFile(token.NewFileSet(), path, text, 0)
	require.NoError(t, err)
	own, err := filepath.Rel("../../..", filepath.Dir(path))
	require.NoError(t, err)
	own = "dlrover-run/" + own
	for _, d := range f.Decls {
		fn, isFunc := d.(*ast.FuncDecl)
		switch {
		case !isFunc || fn.Recv == nil && fn.Name.Name == "init":
			g.inits[path] = append(g.inits[path], called(f, own, d)...)
		case fn.Recv == nil:
			g.calls[own+"."+fn.Name.Name] = called(f, own, d)
		}
	}
}

// compiling are the files whose initialization compiles patterns, itself or by the functions that it calls.
func (g callGraph) compiling() (paths []string) {
	for path, names := range g.inits {
		if seen := map[string]bool{}; slices.ContainsFunc(names, func(n string) bool { return g.compiles(n, seen) }) {
			paths = append(paths, path)
		}
	}
	return paths
}

func (g callGraph) compiles(name string, seen map[string]bool) bool {
	if seen[name] {
		return false
	}
	seen[name] = true
	return strings.HasPrefix(name, "regexp.") && strings.Contains(name, "Compile") ||
		slices.ContainsFunc(g.calls[name], func(n string) bool { return g.compiles(n, seen) })
}

// called are the functions that n, a part of a file of package own, calls other than in a function that somebody may
// call later.
func called(f *ast.File, own string, n ast.Node) (names []string) {
	imports := map[string]string{}
	for _, i := range f.Imports {
		path, name := strings.Trim(i.Path.Value, `"`), filepath.Base(strings.Trim(i.Path.Value, `"`))
		if i.Name != nil {
			name = i.Name.Name
		}
		imports[name] = path
	}
	ast.Inspect(n, func(n ast.Node) bool {
		if _, ok := n.(*ast.FuncLit); ok {
			return false
		}
		if call, ok := n.(*ast.CallExpr); ok {
			switch fn := call.Fun.(type) {
			case *ast.Ident:
				names = append(names, own+"."+fn.Name)
			case *ast.SelectorExpr:
				if pkg, ok := fn.X.(*ast.Ident); ok {
					names = append(names, imports[pkg.Name]+"."+fn.Sel.Name)
				}
			}
		}
		return true
	})
	return names
}
