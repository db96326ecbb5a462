package master

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"
)

// A master that only checks its options knows no marks, and those of the master that leads have the same owner: it
// changes no node.
func TestMasterThatWaitsChangesNoNode(t *testing.T) {
	s := inPod(t, taintRights...)
	s.Requests()
	a := app(io.Discard)
	a.Action = func(c *cli.Context) error {
		d, err := newDaemon(c, nil)
		if err != nil {
			return err
		}
		defer d.close(0)
		require.NoError(t, d.marks.Mark(t.Context(), "gpu-01", "me", "smoke"))
		require.Nil(t, d.marks.List().Nodes[0].Record, "nobody acts on it")
		for _, r := range s.Requests() {
			require.Equal(t, "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews", r, "it only asks what it may do")
		}
		return nil
	}
	require.NoError(t, a.Run([]string{"dlrover-master", "--ha=lease", "--node-action=taint"}))
}
