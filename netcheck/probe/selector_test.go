package probe

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSelector(t *testing.T) {
	for _, tt := range []struct {
		value        string
		match, never []string
	}{
		{"", []string{"eth0", "lo", "docker0"}, nil},
		{"eth", []string{"eth0", "eth1", "ethx"}, []string{"ib0", "veth0"}},
		{"eth0,ib", []string{"eth0", "eth01", "ib0"}, []string{"eth1"}},
		{"=eth0,eth2", []string{"eth0", "eth2"}, []string{"eth01", "eth1"}},
		{"^docker,lo", []string{"eth0", "ib0"}, []string{"docker0", "lo", "lo0"}},
		{"^=eth0", []string{"eth01", "lo"}, []string{"eth0"}},
		{" eth0 , eth1 ,", []string{"eth0", "eth1"}, []string{"eth2"}},
	} {
		s, err := parseSelector("NCCL_SOCKET_IFNAME", tt.value)
		require.NoError(t, err, tt.value)
		for _, name := range tt.match {
			require.True(t, s.match(name, 0), "%q: %s", tt.value, name)
		}
		for _, name := range tt.never {
			require.False(t, s.match(name, 0), "%q: %s", tt.value, name)
		}
	}
}

func TestSelectorPorts(t *testing.T) {
	s, err := parseSelector("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:2,mlx5_2")
	require.NoError(t, err)
	require.True(t, s.match("mlx5_0", 1))
	require.False(t, s.match("mlx5_0", 2))
	require.True(t, s.match("mlx5_1", 2))
	require.True(t, s.match("mlx5_2", 1))
	require.True(t, s.match("mlx5_2", 2))
	require.False(t, s.match("mlx5_10", 1))

	s, err = parseSelector("NCCL_IB_HCA", "^mlx5_0:2")
	require.NoError(t, err)
	require.True(t, s.match("mlx5_0", 1))
	require.False(t, s.match("mlx5_0", 2))
}

func TestSelectorNamesWhatMustBeThere(t *testing.T) {
	s, err := parseSelector("NCCL_SOCKET_IFNAME", "eth0,ib")
	require.NoError(t, err)
	require.True(t, s.Names("eth0"))
	require.False(t, s.Names("ib0"), "a prefix asks for no device in particular")
	s, err = parseSelector("NCCL_SOCKET_IFNAME", "^eth0")
	require.NoError(t, err)
	require.False(t, s.Names("eth0"))
}

func TestSelectorRefuses(t *testing.T) {
	for value, says := range map[string]string{
		"^":                          "no name follows",
		"=":                          "no name follows",
		"^=,":                        "no name follows",
		":1":                         "no name before the colon",
		"eth0 eth1":                  "separate names by commas",
		"=eth0,=eth1":                "stand once",
		"eth0,^eth1":                 "stand once",
		"mlx5_0:0":                   "from 1 to 255",
		"mlx5_0:":                    "from 1 to 255",
		"mlx5_0:1:2":                 "from 1 to 255",
		"mlx5_0:x":                   "from 1 to 255",
		"mlx5_0:99999999999999":      "from 1 to 255",
		"eth0\x1b[2J":                "separate names by commas",
		strings.Repeat("e,", 65):     "at most",
		strings.Repeat("eth0", 2000): "too many",
	} {
		_, err := parseSelector("NCCL_IB_HCA", value)
		require.ErrorContains(t, err, says, "%q", value)
		require.ErrorContains(t, err, "NCCL_IB_HCA=")
		require.NotContains(t, err.Error(), "\x1b")
	}
}

func FuzzSelector(f *testing.F) {
	for _, s := range []string{"", "eth0", "^docker,lo", "=mlx5_0:1,mlx5_1:2", "^=a", " a , b:2", "a:b"} {
		f.Add(s, "eth0", 1)
	}
	f.Fuzz(func(t *testing.T, value, name string, port int) {
		s, err := parseSelector("V", value)
		if err != nil {
			require.LessOrEqual(t, len(err.Error()), 4*maxSelector)
			return
		}
		again, err := parseSelector("V", s.String())
		require.NoError(t, err)
		require.Equal(t, s, again)
		require.Equal(t, s.match(name, port), again.match(name, port))
		if s.Names(name) && !strings.Contains(name, ":") {
			require.True(t, s.match(name, 0))
		}
	})
}
