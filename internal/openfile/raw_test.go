package openfile

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// tools run on a developer's machine, and what they open is their own.
var tools = []string{"tools/bench", "tools/demo", "tools/dist", "tools/reference", "internal/app/kube/apiserver"}

// raw are the functions that open what is there, and why they need not use this package. Those that name what they open
// below /proc, /sys or as /dev/null, make a new file (O_EXCL), or open a directory (O_DIRECTORY) need no line here.
var raw = map[string]string{
	"checkpointd/fsx/os.go create":                   "a new file, O_EXCL",
	"checkpointd/fsx/os.go lock":                     "no links in the whole path, O_NONBLOCK; it is only locked",
	"checkpointd/fsx/os.go open":                     "no links in the whole path; openFile looks what it is",
	"checkpointd/fsx/os.go walk":                     "as open",
	"checkpointd/shm/free.go field":                  "/proc, /sys",
	"internal/app/run/preflight/preflight.go Holder": "/proc",
	"internal/app/run/preflight/preflight.go statOf": "/proc",
	"internal/app/run/starter/starter.go daemonsOf":  "/proc",
	"internal/pytree/pytree.go Sum":                  "in the program itself",
	"internal/pytree/pytree.go extract":              "in the program itself",
	"launcher/numa/topology.go readText":             "/proc, /sys",
	"checkpointd/shm/dir.go openat":                  "O_NOFOLLOW, O_NONBLOCK; the segment looks what it is",
	"hang/flight/recorder.go trigger":                "a FIFO",
	"internal/app/gpucheck/files.go open":            "a device, O_NONBLOCK",
	"hang/sockets/sockets.go eachLink":               "/proc",
	"hang/sockets/sockets.go readTable":              "/proc",
	"hang/watch/facts.go processes":                  "/proc",
	"hang/watch/procfs.go read":                      "/proc",
	"hang/watch/threads.go threads":                  "/proc",
	"launcher/filetimer/fifo.go clearAway":           "a FIFO",
	"launcher/filetimer/fifo.go open":                "a FIFO",
	"launcher/logs/pty.go newPTY":                    "a terminal",
	"launcher/proc/adopt.go move":                    "/sys",
	"launcher/proc/cgroup.go newCgroup":              "/sys",
	"launcher/proc/cgroup.go removeStale":            "/sys",
	"launcher/proc/cgroup.go renew":                  "/sys",
	"launcher/proc/cgroupfs.go cgroupsOf":            "/proc",
	"launcher/proc/cpus.go readFile":                 "/sys",
	"launcher/proc/family/cgroup.go KillCgroup":      "/sys",
	"launcher/proc/family/cgroup.go Members":         "/sys",
	"launcher/proc/family/procfs.go Numbers":         "/proc",
	"launcher/proc/gpus.go countKFD":                 "/sys",
	"launcher/proc/gpus.go countMetaX":               "/sys",
	"launcher/proc/guard/limits.go othersThreads":    "/proc",
	"launcher/proc/memory.go Read":                   "/sys",
	"launcher/proc/memory.go readBytes":              "/sys",
	"netcheck/probe/host.go read":                    "/sys",
	"netcheck/probe/rdma.go listens":                 "/proc",
	"rendezvous/api/user.go userByTable":             "/proc",
	"netcheck/python/host.go descendants":            "/proc",
}

// opens are the functions that open a file by its name.
var opens = map[string][]string{
	"fs":      {"ReadFile"},
	"os":      {"Open", "OpenFile", "ReadFile", "Create", "WriteFile"},
	"syscall": {"Open", "Openat", "Creat"},
	"unix":    {"Open", "Openat", "Openat2", "Creat"},
}

// harmless is what a call holds that needs no helper.
var harmless = []string{`"/proc/`, `"proc/`, `"/sys/`, "os.DevNull", "O_EXCL", "O_DIRECTORY"}

// A new place that opens a file uses this package, or says here why it need not.
func TestNothingElseOpensFiles(t *testing.T) {
	left, unknown := maps.Clone(raw), []string{}
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		name, err := filepath.Rel(root, path)
		require.NoError(t, err)
		if d.IsDir() && (slices.Contains(tools, name) || d.Name() == "testdata" || name == "internal/openfile") {
			return fs.SkipDir
		}
		if strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") {
			for _, where := range rawOpens(t, path, name) {
				if raw[where] == "" {
					unknown = append(unknown, where)
				}
				delete(left, where)
			}
		}
		return nil
	}))
	require.Empty(t, unknown, "these open files: use internal/openfile, or say why not")
	require.Empty(t, left, "these open nothing any more")
}

// rawOpens are the functions of a file that open files by themselves; none of what tests use.
func rawOpens(t *testing.T, path, name string) (found []string) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	for _, i := range file.Imports {
		if i.Path.Value == `"testing"` {
			return nil
		}
	}
	text := textOf(t, path)
	for _, d := range file.Decls {
		in := "a variable"
		if f, ok := d.(*ast.FuncDecl); ok {
			in = f.Name.Name
		}
		ast.Inspect(d, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if ok && isOpen(call.Fun) {
				args := text[set.Position(call.Lparen).Offset:set.Position(call.Rparen).Offset]
				if !slices.ContainsFunc(harmless, func(s string) bool { return strings.Contains(args, s) }) {
					found = append(found, name+" "+in)
				}
				return false
			}
			if isOpen(n) { // a value of a function
				found = append(found, name+" "+in)
			}
			return true
		})
	}
	return found
}

func isOpen(n ast.Node) bool {
	s, ok := n.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	of, ok := s.X.(*ast.Ident)
	return ok && slices.Contains(opens[of.Name], s.Sel.Name)
}

func textOf(t *testing.T, path string) string {
	text, err := Read(path, 1<<20)
	require.NoError(t, err)
	return string(text)
}
