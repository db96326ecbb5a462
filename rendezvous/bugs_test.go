package rendezvous

import (
	"testing"

	"dlrover-run/rendezvous/history"
)

// TestBugs plays the histories of testdata.
func TestBugs(t *testing.T) {
	history.Files(t, func(t *testing.T, play func(history.Player)) { play(newModel(t)) })
}
