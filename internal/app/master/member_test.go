package master

import (
	"encoding/json"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/member"
	"dlrover-run/rendezvous"
)

// A helper repeats who leads, so that its launcher knows that it is not frozen.
func TestHelperRepeatsTheLeader(t *testing.T) {
	b := &beside{news: make(chan member.News, newsQueue)}
	r, w := io.Pipe()
	defer r.Close()
	go b.tell(t.Context(), w)
	leads := member.News{Leader: "a:1", Term: 7, Beats: true}
	note := member.News{Note: &rendezvous.Note{Text: "x"}}
	b.news <- leads
	b.news <- note
	in := json.NewDecoder(r)
	for _, want := range []member.News{leads, note, leads} {
		var n member.News
		require.NoError(t, in.Decode(&n))
		require.Equal(t, want, n)
	}
}
