package token

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFind(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("from-the-file-0123\n"), 0o600))
	env := map[string]string{}
	find := func(path string) string {
		got, err := Find(path, func(n string) (string, bool) { v, ok := env[n]; return v, ok })
		require.NoError(t, err)
		require.Equal(t, got.Token, got.Sent())
		return got.Token
	}
	require.Empty(t, find(""))
	env["DLROVER_TOKEN"] = "from-the-environment"
	require.Equal(t, "from-the-environment", find(""))
	env["DLROVER_TOKEN_FILE"] = file
	require.Equal(t, "from-the-file-0123", find(""))
	delete(env, "DLROVER_TOKEN_FILE")
	require.Equal(t, "from-the-file-0123", find(file))
}

func TestErrorsNeverHoldTheToken(t *testing.T) {
	for _, bad := range []string{"tooshort", "has a space 0123456", "control\x01character0123"} {
		_, err := Find("", func(n string) (string, bool) {
			if n != "DLROVER_TOKEN" {
				return "", false
			}
			return bad, true
		})
		require.Error(t, err)
		require.NotContains(t, err.Error(), bad)
	}
}

func TestLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "127.9.9.9": true, "::1": true, "": false, "0.0.0.0": false,
		"10.0.0.1": false, "node0": false,
	} {
		require.Equal(t, want, Loopback(host), host)
	}
}
