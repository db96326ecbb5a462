package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestThreatsHaveTests: every line about a threat names its tests, and they exist.
func TestThreatsHaveTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs/reference/threats.md"))
	require.NoError(t, err)
	named := regexp.MustCompile("`([a-z0-9/]+)\\.(Test[A-Za-z0-9]+)`")
	all := named.FindAllStringSubmatch(string(text), -1)
	require.Greater(t, len(all), 40)
	for _, n := range all {
		files, err := filepath.Glob(filepath.Join(root, n[1], "*_test.go"))
		require.NoError(t, err)
		found := false
		for _, f := range files {
			source, err := os.ReadFile(f)
			require.NoError(t, err)
			found = found || strings.Contains(string(source), "\nfunc "+n[2]+"(t *testing.T)")
		}
		require.True(t, found, "%s has no %s", n[1], n[2])
	}
	inTable := false
	for line := range strings.Lines(string(text)) {
		inTable = strings.HasPrefix(line, "|") && (inTable || strings.HasSuffix(line, "| test |\n"))
		if inTable && !strings.HasSuffix(line, "| test |\n") && !strings.HasPrefix(line, "|-") {
			require.True(t, named.MatchString(line), "no test holds this line: %s", line)
		}
	}
}
