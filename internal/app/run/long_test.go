package run

import (
	stdflag "flag"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// runLong has just those tests run that testing.Short skips: make race has run the others.
func runLong() error {
	tests, err := longTests()
	if err != nil {
		return err
	}
	return stdflag.Set("test.run", "^("+strings.Join(tests, "|")+")$")
}

// longTests are the tests of this package that call long or longest, or a function that does.
func longTests() (tests []string, err error) {
	calls := map[string][]string{} // of each function, by name
	files, err := filepath.Glob("*_test.go")
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				calls[fn.Name.Name] = append(calls[fn.Name.Name], callees(fn)...)
			}
		}
	}
	long := map[string]bool{"long": true, "longest": true}
	for more := true; more; {
		more = false
		for name, all := range calls {
			if !long[name] && slices.ContainsFunc(all, func(c string) bool { return long[c] }) {
				long[name], more = true, true
			}
		}
	}
	for name := range long {
		if strings.HasPrefix(name, "Test") {
			tests = append(tests, name)
		}
	}
	slices.Sort(tests)
	return tests, err
}

// callees are the names of the functions that fn calls.
func callees(fn *ast.FuncDecl) (names []string) {
	ast.Inspect(fn, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			switch f := call.Fun.(type) {
			case *ast.Ident:
				names = append(names, f.Name)
			case *ast.SelectorExpr:
				names = append(names, f.Sel.Name)
			}
		}
		return true
	})
	return names
}

func TestLongTestsAreFound(t *testing.T) {
	tests, err := longTests()
	require.NoError(t, err)
	require.Contains(t, tests, "TestKilledLauncherHasSuccessors", "it calls long")
	require.Contains(t, tests, "TestHangsAreNamedWithTorch", "a helper does")
	require.NotContains(t, tests, "TestLongTestsAreFound")

}
