package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The figures of the house. They only ever become smaller; the goals stand behind them.
const (
	maxRelatives = 2.5  // in 1,000 words of comments: 2
	maxUnused    = 0.05 // of the exported names
	maxLines     = 60   // of a function
	mostMethods  = 40   // of a type
	manyMethods  = 40
	maxLarge     = 0 // types with more methods than manyMethods
)

// source is one Go file of a program, tests and test data apart.
type source struct {
	dir  string // below the root
	file *ast.File
}

// programFiles parses all of them.
func programFiles(t *testing.T) (all []source, fset *token.FileSet) {
	t.Helper()
	return parseFiles(t, func(name string) bool { return !strings.HasSuffix(name, "_test.go") })
}

// parseFiles parses the Go files with such names.
func parseFiles(t *testing.T, wanted func(name string) bool) (all []source, fset *token.FileSet) {
	t.Helper()
	fset = token.NewFileSet()
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && (name == "testdata" || path != root && strings.HasPrefix(name, ".")):
			return filepath.SkipDir
		case filepath.Ext(name) != ".go" || !wanted(name):
			return nil
		}
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		dir, _ := filepath.Rel(root, filepath.Dir(path))
		all = append(all, source{dir, f})
		return err
	}))
	require.Greater(t, len(all), 300)
	return all, fset
}

// TestRelativesInComments: "the node that failed", not "who failed", "what was found" or "whoever asks".
func TestRelativesInComments(t *testing.T) {
	all, _ := programFiles(t)
	relative, word := regexp.MustCompile(`(?i)\b(who|whoever|what|whatever|whose)\b`), regexp.MustCompile(`[A-Za-z]+`)
	relatives, words := map[string]int{}, map[string]int{}
	for _, s := range all {
		top, _, _ := strings.Cut(s.dir, "/")
		for _, c := range s.file.Comments {
			text := c.Text()
			relatives[top] += len(relative.FindAllString(text, -1))
			words[top] += len(word.FindAllString(text, -1))
		}
	}
	for top, n := range words {
		rate := float64(relatives[top]) * 1000 / float64(n)
		require.LessOrEqual(t, rate, maxRelatives, "who, what, whose ... in 1,000 words of the comments of %s", top)
	}
}

// TestExportsAreUsed: a name that no other package uses, nor its tests, is not exported.
func TestExportsAreUsed(t *testing.T) {
	all, _ := programFiles(t)
	exported, used := map[string]bool{}, map[string]bool{}
	for _, s := range all {
		if s.dir == "internal/testkit" { // tests use it
			continue
		}
		for _, name := range exports(s.file) {
			exported[s.dir+"."+name] = true
		}
	}
	users, _ := parseFiles(t, func(string) bool { return true })
	for _, s := range users {
		for name := range uses(s.file) {
			if !strings.HasPrefix(name, s.dir+".") { // as the external tests of a package use their own
				used[name] = true
			}
		}
	}
	var unused []string
	for name := range exported {
		if !used[name] {
			unused = append(unused, name)
		}
	}
	slices.Sort(unused)
	require.LessOrEqual(t, float64(len(unused)), maxUnused*float64(len(exported)), strings.Join(unused, "\n"))
}

// exports are the exported names that f declares for its package.
func exports(f *ast.File) (names []string) {
	add := func(id *ast.Ident) {
		if id.IsExported() {
			names = append(names, id.Name)
		}
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				add(d.Name)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					add(spec.Name)
				case *ast.ValueSpec:
					for _, id := range spec.Names {
						add(id)
					}
				}
			}
		}
	}
	return names
}

// uses are the names of other packages of ours that f uses, as folder.Name.
func uses(f *ast.File) map[string]bool {
	imported := map[string]string{}
	for _, i := range f.Imports {
		path, _ := strconv.Unquote(i.Path.Value)
		dir, ours := strings.CutPrefix(path, "dlrover-run/")
		if !ours {
			continue
		}
		name := filepath.Base(dir)
		if i.Name != nil {
			name = i.Name.Name
		}
		imported[name] = dir
	}
	used := map[string]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if id, ok := sel.X.(*ast.Ident); ok && imported[id.Name] != "" {
				used[imported[id.Name]+"."+sel.Sel.Name] = true
			}
		}
		return true
	})
	return used
}

// TestSizes: no function is long, and few types have many methods.
func TestSizes(t *testing.T) {
	all, fset := programFiles(t)
	methods := map[string]int{}
	for _, s := range all {
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			lines := fset.Position(f.End()).Line - fset.Position(f.Pos()).Line + 1
			require.LessOrEqual(t, lines, maxLines, "%s: %s", fset.Position(f.Pos()), f.Name.Name)
			if f.Recv != nil {
				methods[s.dir+"."+receiver(f)]++
			}
		}
	}
	var large []string
	for name, n := range methods {
		require.LessOrEqual(t, n, mostMethods, name)
		if n > manyMethods {
			large = append(large, fmt.Sprintf("%s has %d methods", name, n))
		}
	}
	require.LessOrEqual(t, len(large), maxLarge, strings.Join(large, "\n"))
}

func receiver(f *ast.FuncDecl) string {
	typ := f.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	if g, ok := typ.(*ast.IndexExpr); ok {
		typ = g.X
	}
	return fmt.Sprint(typ)
}
