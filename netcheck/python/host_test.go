package python

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEnvironment(t *testing.T) {
	set := func(c Config) (names []string) {
		for _, kv := range c.environ() {
			if strings.Contains(kv, "SOCKET_IFNAME") {
				names = append(names, kv)
			}
		}
		return names
	}
	require.Equal(t, []string{"GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME==lo"}, set(Config{Addr: "127.0.0.1"}))
	require.Equal(t, []string{"NCCL_SOCKET_IFNAME=ib", "GLOO_SOCKET_IFNAME=lo"},
		set(Config{Addr: "::ffff:127.0.0.1", Env: []string{"NCCL_SOCKET_IFNAME=ib"}}), "what the user has set stays")
	require.Empty(t, set(Config{Addr: "192.0.2.1"}), "an address of nobody's")
	require.Empty(t, set(Config{Addr: "a-name"}))
	require.Empty(t, set(Config{}))
}

func TestFamily(t *testing.T) {
	pid, parent := family([]byte("12 (a) b) (c) S 7 12 12 0"))
	require.Equal(t, []int{12, 7}, []int{pid, parent})
	for _, bad := range []string{"", "12", "12 (x", ") S"} {
		_, parent = family([]byte(bad))
		require.Equal(t, -1, parent)
	}
}

func TestParse(t *testing.T) {
	for name, line := range map[string]string{
		"nothing": "", "no JSON": "x", "another field": `{"id":1,"x":1}`, "negative": `{"id":1,"ok":[{"matmul":-1}]}`,
		"NaN": `{"id":1,"ok":[{"matmul":NaN}]}`, "devices": `{"ready":"2.0","devices":-1}`, "no number": `{"id":"1"}`,
	} {
		_, err := parse([]byte(line))
		require.ErrorContains(t, err, "the probe answers with something else", name)
	}
	a, err := parse([]byte(`{"id":3,"error":"a\u001b[2Jb"}`))
	require.NoError(t, err)
	_, err = a.result(3)
	require.EqualError(t, err, "a [2Jb")
	_, err = a.result(4)
	require.EqualError(t, err, "the probe answers command 3 instead of 4")
	_, err = reply{ID: 1}.result(1)
	require.EqualError(t, err, "the probe answers without a figure")
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"id":1,"ok":[{"matmul":1.5},{"idle":true}]}`))
	f.Add([]byte(`{"ready":"2.0","libraries":"CUDA 12","devices":8,"why":"","seconds":3.5}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		a, err := parse(line)
		if err != nil {
			return
		}
		require.LessOrEqual(t, len(a.Error), maxText)
		for _, m := range a.OK {
			require.GreaterOrEqual(t, m.Matmul, 0.0)
		}
		_, err = json.Marshal(a)
		require.NoError(t, err)
	})
}
