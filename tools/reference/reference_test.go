package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/policy"
)

var update = flag.Bool("update", false, "write docs/reference/reference.md")

const root = "../.."

func file(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(root, path))
	require.NoError(t, err)
	return string(data)
}

func TestReferenceIsFresh(t *testing.T) {
	want, err := generate(root)
	require.NoError(t, err)
	if *update {
		require.NoError(t, os.WriteFile(filepath.Join(root, pagePath), want, 0o644))
	}
	require.Equal(t, string(want), file(t, pagePath), "docs/reference/reference.md is stale: make docs")
}

// sources visits what programs are made of: Go files without tests, and the client in Python.
func sources(t *testing.T, visit func(path, ext string)) {
	t.Helper()
	for _, folder := range []string{"cmd", "internal", "launcher", "rendezvous", "checkpointd", "netcheck", "switchbox"} {
		require.NoError(t, filepath.WalkDir(filepath.Join(root, folder), func(path string, d fs.DirEntry, err error) error {
			if d.IsDir() && slices.Contains([]string{"bench", "demo", "reference", "tests", "testdata"}, d.Name()) {
				return fs.SkipDir
			}
			if ext := filepath.Ext(path); err == nil && (ext == ".go" && !strings.HasSuffix(path, "_test.go") || ext == ".py") {
				visit(path, ext)
			}
			return err
		}))
	}
}

// readVariables are the names by which the sources ask for variables.
func readVariables(t *testing.T) (names []string) {
	t.Helper()
	python := regexp.MustCompile(`environ(?:\.get\(|\[)"([A-Z_0-9]+)"`)
	sources(t, func(path, ext string) {
		if ext == ".py" {
			data, err := os.ReadFile(path)
			require.NoError(t, err)
			for _, m := range python.FindAllStringSubmatch(string(data), -1) {
				names = append(names, m[1])
			}
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		require.NoError(t, err)
		ast.Inspect(f, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok && asks(call) {
				names = append(names, text(call.Args[len(call.Args)-1]))
			}
			return true
		})
	})
	names = slices.DeleteFunc(names, func(s string) bool { return s == "" })
	slices.Sort(names)
	return slices.Compact(names)
}

// asks reports whether a call looks a variable up.
func asks(call *ast.CallExpr) bool {
	name := ""
	switch f := call.Fun.(type) {
	case *ast.Ident:
		name = f.Name
	case *ast.SelectorExpr:
		name = f.Sel.Name
	}
	return len(call.Args) > 0 && slices.Contains([]string{"Getenv", "LookupEnv", "env", "lookup", "visible"}, name)
}

func TestEveryVariableIsExplained(t *testing.T) {
	// What every program of its kind reads, and what a launcher gives to workers.
	known := strings.Fields(`HOME PATH TZ PYTHONNOUSERSITE PYTHONUSERBASE RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE
		NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS`) // the last are left as they are when they are set
	names := readVariables(t)
	require.Greater(t, len(names), 15)
	docs := file(t, pagePath) + file(t, "docs/start/from-torchrun.md")
	missing := slices.DeleteFunc(names, func(name string) bool {
		return slices.Contains(known, name) || strings.HasPrefix(name, "PET_") || strings.Contains(docs, "`"+name)
	})
	require.Empty(t, missing, "add them to variables.go") // PET_<OPTION> is all of PET_
}

func TestNoVariableIsInvented(t *testing.T) {
	var all strings.Builder
	sources(t, func(path, _ string) {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		all.Write(data)
	})
	for _, v := range variables {
		if v.reader != "make" && v.name != "PET_<OPTION>" && v.name != "TMPDIR" { // os.TempDir
			require.True(t, strings.Contains(all.String(), `"`+v.name+`"`), "nothing reads %s", v.name)
		}
	}
}

func TestEveryMetricIsDescribed(t *testing.T) {
	docs, full := file(t, pagePath), regexp.MustCompile(`"(dlrover_[a-z_]*[a-z])"`)
	sources(t, func(path, _ string) {
		if filepath.Base(filepath.Dir(path)) != "dlrover-run" && filepath.Base(filepath.Dir(path)) != "dlrover-master" {
			return
		}
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, m := range full.FindAllStringSubmatch(string(data), -1) {
			require.True(t, strings.Contains(docs, "`"+m[1]+"`"), "%s in %s: run make docs", m[1], path)
		}
	})
}

// The help of an option is read in a hurry.
func TestOptionsAreExplainedInShortSentences(t *testing.T) {
	options, _, _ := strings.Cut(file(t, pagePath), "\n## Environment\n")
	row, end := regexp.MustCompile("(?m)^\\| `-.* \\| (.*) \\|$"), regexp.MustCompile(`[.;:] |[()]`)
	rows := row.FindAllStringSubmatch(options, -1)
	require.Greater(t, len(rows), 100)
	for _, r := range rows {
		require.NotRegexp(t, `\b(who|whoever|whom|nobody|told|anew)\b`, r[1])
		for _, sentence := range end.Split(r[1], -1) {
			require.LessOrEqual(t, len(strings.Fields(sentence)), 25, sentence)
		}
	}
}

// A dashboard finds all of them by one prefix, and a name means one thing.
func TestOnePrefixForAllMetrics(t *testing.T) {
	seen := map[string]string{}
	for _, program := range []string{"run", "master"} {
		found, err := described(filepath.Join(root, "internal/app", program))
		require.NoError(t, err)
		require.Greater(t, len(found), 20)
		for _, m := range found {
			require.True(t, strings.HasPrefix(m.name, "dlrover_"), "%s of %s", m.name, program)
			require.Empty(t, seen[m.name], "%s of %s", m.name, program)
			seen[m.name] = program
		}
	}
}

func TestExitStatusesAreThoseOfTheCode(t *testing.T) {
	var want, got []string
	dlrover := map[int]bool{policy.Signaled(15).Code(policy.DLRoverCodes, policy.Nobody): true}
	for _, r := range policy.Reasons() {
		want = append(want, fmt.Sprint(int(r)))
		for b := policy.Nobody; b <= policy.OtherHardware; b++ {
			dlrover[r.Code(policy.DLRoverCodes, b)] = true
		}
	}
	for _, code := range slices.Sorted(maps.Keys(dlrover)) {
		want = append(want, fmt.Sprint(code))
	}
	table := regexp.MustCompile(`(?m)^\| (\d+) \|`)
	launcher, _, _ := strings.Cut(file(t, "docs/reference/exit-codes.md"), "\n# Exit status of dlroverctl\n")
	for _, m := range table.FindAllStringSubmatch(launcher, -1) {
		got = append(got, m[1])
	}
	require.Equal(t, want, got, "docs/reference/exit-codes.md")
}
