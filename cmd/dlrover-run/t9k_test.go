package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// stepping makes steps, and asks for a restart.
const stepping = `
import os, sys, torch
open(os.path.join(os.environ["DIR"], "starts"), "a").write("start\n")
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(30):
    optimizer.zero_grad()
    (weight * weight).sum().backward()
    optimizer.step()
sys.exit(138)
`

// Progress gives none of T9k's restarts back.
func TestT9kAddsItsRestartsUp(t *testing.T) {
	long(t)
	b := newBench(t)
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "train.py"), []byte(stepping), 0o600))
	l := b.start("dlrover-run", []string{"PYTHON_EXEC=" + torchpython.Require(t, "THE LIMIT OF ALL RESTARTS IS")},
		"--standalone", "--policy=t9k", "--max-restarts=1", "--backoff-limit=3", "--hang=auto", "train.py")
	require.Equal(t, 1, l.wait(), l.err.String())
	require.Equal(t, 4, len(b.lines("starts")))
	require.Contains(t, strings.Join(strings.Fields(l.err.String()), " "), "3 restarts of the job, whether they have "+
		"brought progress or not (--backoff-limit)")
}
