package main

import (
	"bytes"
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// metric is one that a program serves, as its source describes it.
type metric struct{ name, help string }

func metrics(b *bytes.Buffer, root string) error {
	for _, s := range []struct{ folder, title, text string }{
		{"internal/app/run", "## Metrics",
			"Those of `dlrover-run --metrics-addr=HOST:PORT`, of this node. `/healthz` answers there, too. [Who may\n" +
				"read them](../tasks/job-token.md#metrics).\n"},
		{"internal/app/master", "### Metrics of dlrover-master",
			"At `/metrics` of its address, [with the job token](../tasks/job-token.md#metrics), beside those of the Go\n" +
				"runtime. Earlier versions had\n" +
				"`hang_NAME` for `dlrover_hang_NAME`, but `hang_suspicions_total` for `dlrover_hang_incidents_total`, and\n" +
				"`hang_verdicts_total` for `dlrover_hang_incident_verdicts_total`.\n"},
	} {
		found, err := described(filepath.Join(root, s.folder))
		if err != nil {
			return err
		}
		heading(b, s.title, s.text, "metric", "kind", "meaning")
		for _, m := range found {
			kind := "gauge"
			if strings.HasSuffix(m.name, "_total") {
				kind = "counter"
			}
			row(b, code(m.name), kind, m.help)
		}
	}
	return nil
}

// described returns the metrics that the Go files of a folder describe: a name and then, as the next argument or
// element, a sentence. A name without dlrover_ in front gets the prefix that a function of the file puts in front of
// it.
func described(folder string) (found []metric, err error) {
	err = filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err == nil {
			found = append(found, inFile(f)...)
		}
		return err
	})
	slices.SortFunc(found, func(a, b metric) int { return cmp.Compare(a.name, b.name) })
	return slices.Compact(found), err
}

func inFile(f *ast.File) (found []metric) {
	prefix := ""
	name, sentence := regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`), regexp.MustCompile(`^[A-Z1].* .*\.$`)
	pair := func(list []ast.Expr) {
		for i := 1; i < len(list); i++ {
			n, help := text(list[i-1]), text(list[i])
			if name.MatchString(n) && sentence.MatchString(help) {
				found = append(found, metric{n, help})
			}
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			pair(n.Args)
		case *ast.CompositeLit:
			pair(n.Elts)
		case *ast.BinaryExpr:
			if t := text(n.X); n.Op == token.ADD && strings.HasPrefix(t, "dlrover_") {
				prefix = t
			}
		}
		return true
	})
	for i := range found {
		if !strings.HasPrefix(found[i].name, "dlrover_") {
			found[i].name = prefix + found[i].name
		}
	}
	return found
}

// text is the value of a string in the source, also of one in parts or behind a field's name; "" for anything else.
func text(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.KeyValueExpr:
		return text(e.Value)
	case *ast.BinaryExpr:
		if x, y := text(e.X), text(e.Y); e.Op == token.ADD && x != "" && y != "" {
			return x + y
		}
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			s, _ := strconv.Unquote(e.Value) // the parser has accepted it
			return s
		}
	}
	return ""
}
