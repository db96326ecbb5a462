package page

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/answers"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

func TestRowsAreBounded(t *testing.T) {
	var f answers.Facts
	for i := range 1001 {
		f.Events = append(f.Events, api.Event{Seq: uint64(i + 1)})
		f.Run.Nodes = append(f.Run.Nodes, rendezvous.NodeStatus{Name: "n", Slots: 2})
	}
	v := runView(f)
	require.Len(t, v.Events, maxEventRows)
	require.Equal(t, 1001-maxEventRows, v.Older)
	require.Len(t, v.Nodes, maxNodeRows)
	require.Equal(t, 1001, v.Grid.Nodes)
	require.Equal(t, 2002, v.Grid.Workers)
}
