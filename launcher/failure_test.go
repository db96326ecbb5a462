package launcher

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/verdict"
)

// Of an error file that is longer than what is read, the class and both ends of the message are left.
func TestLongErrorFile(t *testing.T) {
	long := strings.Repeat(`\\ué`, 1<<19)
	path := filepath.Join(t.TempDir(), "error.json")
	text := `{"message": {"message": "ValueError: bad` + long + `batch", "extraInfo": {"py_callstack": "Traceback` + long +
		`", "timestamp": "1700000000"}}}`
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	data, err := ReadBounded(path, MaxErrorFile)
	require.NoError(t, err)
	require.LessOrEqual(t, len(data), MaxErrorFile+8)
	r, err := verdict.ParseErrorFile(data)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(r.Message, "ValueError: bad"))
	require.Equal(t, int64(1700000000), r.Time.Unix())
	_, err = verdict.AmendErrorFile(data, 7)
	require.NoError(t, err, "it can be passed on")
}
