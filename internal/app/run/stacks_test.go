package run

import (
	"archive/tar"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const idleWorker = `import os, time
def wait_for_go():
    while not os.path.exists(os.environ["DIR"] + "/go"):
        time.sleep(0.05)
def load_batch():
    while not os.path.exists(os.environ["DIR"] + "/go"):
        time.sleep(0.05)
print("output of rank", os.environ["RANK"], flush=True)
open(os.environ["DIR"] + "/up." + os.environ["RANK"], "w").close()
load_batch() if os.environ["RANK"] == "2" else wait_for_go()
`

// Two nodes with two healthy workers each, of which dlroverctl shows what they are doing.
func TestStacksOfAHealthyJob(t *testing.T) {
	r := rule(t, "2")
	script := filepath.Join(r.dir, "train.py")
	require.NoError(t, os.WriteFile(script, []byte(idleWorker), 0o600))
	for _, name := range []string{"n0", "n1"} {
		r.nodes = append(r.nodes, r.start("dlrover-run", append([]string{"POD_NAME=" + name}, r.env...),
			"--nnodes=2", "--nproc-per-node=2", "--rdzv-id=job", "--no-python", "python3", script))
	}
	for _, rank := range []string{"0", "1", "2", "3"} {
		eventually(t, "rank "+rank, r.exists("up."+rank))
	}
	dir := t.TempDir()
	text := r.ctl(0, "stacks", "job", "--path", dir)
	require.Contains(t, text, "STACKS job=job")
	require.Contains(t, text, "4 ranks on 2 nodes\n")
	require.Regexp(t, `3 ranks 0-1,3, .*\n    wait_for_go at .*/train\.py:4\n`, text)
	require.Regexp(t, `  rank 2, .*\n    load_batch at .*/train\.py:7\n`, text)
	require.NotContains(t, text, "no data")
	stacks, err := os.ReadFile(filepath.Join(dir, "latest", "py_stack"))
	require.NoError(t, err)
	require.Regexp(t, `load_batch@\S+/train\.py:7@2\|0-1/3 1\n`, string(stacks))

	path := strings.TrimSpace(r.ctl(0, "bundle", "job", "--path", dir))
	files := bundled(t, path)
	for _, want := range []string{"status.json", "events.json", "hangs.json", "now/py_stack.svg", "now/hang_report.json"} {
		require.NotEmpty(t, files[want], want)
	}
	require.Equal(t, "output of rank 2", files["now/logs/00002.log"])
	r.release()
	r.ends(0)
}

// bundled are the files of an archive.
func bundled(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	require.NoError(t, err)
	files := map[string]string{}
	for in := tar.NewReader(zip); ; {
		h, err := in.Next()
		if err == io.EOF {
			return files
		}
		require.NoError(t, err)
		_, name, _ := strings.Cut(h.Name, "/")
		data, err := io.ReadAll(in)
		require.NoError(t, err)
		files[name] = string(data)
	}
}
