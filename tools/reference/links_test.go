package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func documents(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(root, "docs/*/*.md"))
	require.NoError(t, err)
	require.Greater(t, len(paths), 5)
	return append(paths, filepath.Join(root, "README.md"), filepath.Join(root, "CONTRIBUTING.md"))
}

// Tables cannot be broken; everything else has at most 120 columns.
func TestDocumentsAreNarrow(t *testing.T) {
	for _, path := range documents(t) {
		requireNarrow(t, path, "|")
	}
}

// Patterns to embed cannot be broken; everything else has at most 120 columns, of which a tab is one.
func TestGoFilesAreNarrow(t *testing.T) {
	files := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if d != nil && d.IsDir() && path != root && strings.HasPrefix(d.Name(), ".") {
			return filepath.SkipDir
		}
		if err == nil && filepath.Ext(path) == ".go" && !d.IsDir() {
			files++
			requireNarrow(t, path, "//go:embed ")
		}
		return err
	}))
	require.Greater(t, files, 300)
}

// requireNarrow fails for a line of more than 120 columns that does not begin with except.
func requireNarrow(t *testing.T, path, except string) {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	n := 0
	for line := range strings.Lines(string(data)) {
		n++
		if !strings.HasPrefix(line, except) {
			require.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), 120, "%s:%d", path, n)
		}
	}
}

// A page is read in one sitting. The reference is looked up.
func TestPagesAreShort(t *testing.T) {
	for _, file := range documents(t) {
		if filepath.Join(root, pagePath) == file {
			continue
		}
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		words := slices.DeleteFunc(strings.Fields(string(data)), func(w string) bool { return w == "|" })
		require.LessOrEqual(t, len(words), 2000, file)
	}
}

// Links between the documents lead somewhere, also those to a heading.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:]*)(#[^)]*)?\)`)
	for _, path := range documents(t) {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, m := range link.FindAllStringSubmatch(string(data), -1) {
			target := path
			if m[1] != "" {
				target = filepath.Join(filepath.Dir(path), m[1])
			}
			if m[2] == "" {
				_, err = os.Stat(target)
				require.NoError(t, err, path)
				continue
			}
			text, err := os.ReadFile(target)
			require.NoError(t, err, path)
			require.Contains(t, anchors(string(text)), m[2], "%s to %s", path, target)
		}
	}
}

// Pages that code names, in comments and messages, are there.
func TestPagesThatCodeNames(t *testing.T) {
	page := regexp.MustCompile(`\bdocs/[a-z/-]+\.(md|yaml)`)
	found := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" && filepath.Ext(path) != ".py" {
			return err
		}
		data, err := os.ReadFile(path)
		for _, name := range page.FindAllString(string(data), -1) {
			found++
			require.FileExists(t, filepath.Join(root, name), path)
		}
		return err
	}))
	require.Positive(t, found)
}

// anchors are the names that headings get.
func anchors(markdown string) (all []string) {
	for line := range strings.Lines(markdown) {
		title := strings.TrimSpace(strings.TrimLeft(line, "#"))
		if !strings.HasPrefix(line, "#") {
			continue
		}
		keep := func(r rune) rune {
			if r == ' ' {
				return '-'
			}
			if strings.ContainsRune("'`,.:()", r) {
				return -1
			}
			return r
		}
		all = append(all, "#"+strings.Map(keep, strings.ToLower(title)))
	}
	return all
}
