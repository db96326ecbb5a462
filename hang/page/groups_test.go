package page_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/page"
	"dlrover-run/hang/rankset"
)

func TestParseGroups(t *testing.T) {
	got, err := page.ParseGroups([]byte(`[
		{"id": 18446744073709551615, "name": "0", "desc": "default_pg", "backend": "cpu:gloo,cuda:nccl", "ranks": "0-3"},
		{"id": 7, "name": "1", "backend": "gloo", "ranks": "0,2", "later": [1]}]`))
	require.NoError(t, err)
	require.Equal(t, []hang.Group{
		{ID: 1<<64 - 1, Name: "0", Desc: "default_pg", Backend: "cpu:gloo,cuda:nccl", Ranks: "0-3"},
		{ID: 7, Name: "1", Backend: "gloo", Ranks: "0,2"},
	}, got)
}

func TestParseGroupsRefuses(t *testing.T) {
	for text, want := range map[string]string{
		``:                         "process groups: unexpected end of JSON input",
		`{}`:                       "process groups: json: cannot unmarshal object",
		`[{"name":"a"}]`:           `process group "a": its id, 0, is 0 or another one's`,
		`[{"id":1},{"id":1}]`:      `process group "": its id, 1, is 0 or another one's`,
		`[{"id":1,"ranks":"3-1"}]`: `process group "": ranks "3-1": "3-1" does not follow`,
		"[" + strings.Repeat(`{"id":1},`, 48) + `{"id":1}]`: "49 process groups: a page has 48",
		strings.Repeat(" ", page.GroupsSize+1):              "process groups in 4194305 bytes: at most 4194304 are read",
	} {
		_, err := page.ParseGroups([]byte(text))
		require.ErrorContains(t, err, want)
	}
}

func FuzzParseGroups(f *testing.F) {
	f.Add([]byte(`[{"id":1,"name":"0","ranks":"0-3,8"}]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		groups, err := page.ParseGroups(b)
		if err != nil {
			require.Nil(t, groups)
			return
		}
		for _, g := range groups {
			_, err := rankset.Parse(g.Ranks)
			require.NoError(t, err)
		}
	})
}
