package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVersions(t *testing.T) {
	for version, want := range map[string][2]string{
		"v1.2.3":                 {"1.2.3", "1.2.3-1"},
		"1.2":                    {"1.2", "1.2-1"},
		"v1.2.3-dirty":           {"1.2.3+dirty", "1.2.3+dirty-1"},
		"v1.2.0-rc1":             {"1.2.0rc1", "1.2.0~rc1-1"},
		"v1.2.0-beta.2":          {"1.2.0b2", "1.2.0~beta2-1"},
		"v1.2.3-4-g0123abc":      {"1.2.3.post4+g0123abc", "1.2.3+4.g0123abc-1"},
		"v1.2.0-rc1-4-g0123abc":  {"1.2.0rc1.post4+g0123abc", "1.2.0~rc1+4.g0123abc-1"},
		"v1.2.3-4-g0123ab-dirty": {"1.2.3.post4+g0123ab.dirty", "1.2.3+4.g0123ab.dirty-1"},
		"c7cde902":               {"0.0.dev0+gc7cde902", "0.0~git.gc7cde902-1"},
		"c7cde902-dirty":         {"0.0.dev0+gc7cde902.dirty", "0.0~git.gc7cde902.dirty-1"},
		"26226568":               {"0.0.dev0+g26226568", "0.0~git.g26226568-1"},
		"dev":                    {"0.0.dev0", "0.0~git-1"},
	} {
		python, debian, err := versions(version)
		require.NoError(t, err)
		require.Equal(t, want, [2]string{python, debian}, version)
	}
	for _, version := range []string{"", "newest", "v1.2.3 ", "v1.2.3/4", "-dirty"} {
		_, _, err := versions(version)
		require.ErrorContains(t, err, "as git describe prints it", version)
	}
}
