package rendezvous

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the states of testdata")

// TestBugs plays the histories of testdata, one a bug. A line of dashes is followed by the state of the run at that
// point, as far as the next empty line.
func TestBugs(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			require.NoError(t, err)
			is := replay(t, string(data))
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(is), 0o644))
			}
			require.Equal(t, string(data), is)
		})
	}
}

// replay plays a history, and returns its text with the states as they are.
func replay(t *testing.T, text string) string {
	m, dashes, out := newModel(t), false, []string{}
	for line := range strings.Lines(text) {
		switch line = strings.TrimSpace(line); {
		case line == "----":
			dashes = true
			out = append(out, line, m.state())
		case line == "":
			dashes = false
			out = append(out, line)
		case dashes:
		default:
			out = append(out, line)
			if !strings.HasPrefix(line, "#") {
				m.do("%s", line)
				t.Logf("%s\n\t%s", line, strings.ReplaceAll(m.state(), "\n", "\n\t"))
			}
		}
	}
	m.rest()
	return strings.Join(out, "\n") + "\n"
}
