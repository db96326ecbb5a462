package run

import (
	"compress/gzip"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

const profiledWorker = `import os, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def loss_of_the_user(x):
    return model(x).pow(2).mean()
step = 0
while not os.path.exists(os.environ["DIR"] + "/go"):
    optimizer.zero_grad()
    loss_of_the_user(torch.ones(4, 8)).backward()
    if step == 100 and dist.get_rank() == 2:
        open(os.environ["DIR"] + "/up", "w").write(torch.__version__)
        while not os.path.exists(os.environ["DIR"] + "/go"):
            time.sleep(0.05)
    if step <= 100 or dist.get_rank() != 2:
        dist.all_reduce(model.weight.grad)
    optimizer.step()
    step += 1
os._exit(0)
`

// Two nodes have two workers each. Rank 2 does not enter the 101st collective: dlroverctl shows that, and can profile
// each rank.
func TestTorchProfileAndFlight(t *testing.T) {
	r := rule(t, "2")
	r.env = append(r.env, "PYTHON_EXEC="+torchpython.Require(t, "PROFILES AND FLIGHT RECORDERS ARE"),
		"CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1")
	script := filepath.Join(r.dir, "train.py")
	require.NoError(t, os.WriteFile(script, []byte(profiledWorker), 0o600))
	for _, name := range []string{"n0", "n1"} {
		r.nodes = append(r.nodes, r.start("dlrover-run", append([]string{"POD_NAME=" + name}, r.env...),
			"--nnodes=2", "--nproc-per-node=2", "--rdzv-id=job", "--hang=auto", script))
	}
	eventually(t, "rank 2 stands still", r.exists("up"))
	version, err := os.ReadFile(filepath.Join(r.dir, "up"))
	require.NoError(t, err)
	time.Sleep(2 * time.Second) // the shims' threads look twice a second
	dir := t.TempDir()
	flight := r.ctl(0, "flight", "job", "--path", dir)
	refusal := r.start("dlroverctl", r.env, "profile", "job", "2", "--seconds=1", "--path", dir)
	code := refusal.wait()
	if strings.HasPrefix(string(version), "1.") {
		require.Contains(t, flight, "0 of 4 ranks answered\n  no answer of ranks 0-3: its PyTorch has no recorder")
		require.Equal(t, 1, code)
		require.Contains(t, refusal.err.String(), "a profile needs PyTorch 2.7 or newer, and this is "+string(version))
	} else {
		require.Contains(t, flight, "4 of 4 ranks answered\n")
		require.Regexp(t, `  ranks 2: #\d+ all_reduce 8x8 Float, completed\n`+
			`  ranks 0-1,3: #\d+ all_reduce 8x8 Float, scheduled\n`, flight)
		require.Zero(t, code, refusal.err.String())
		require.Regexp(t, `rank 2: \d+\.\d s with 0 steps; open the file`, refusal.err.String())
		requireTrace(t, strings.TrimSpace(refusal.out.String()), "<module>")
		r.ctl(0, "profile", "job", "0", "--seconds=1", "--path", dir, "--json")
	}
	require.Contains(t, r.ctl(1, "profile", "job", "4"), "it has ranks 0 to 3")
	r.release()
	for _, n := range r.nodes {
		n.wait() // gloo of ranks 0, 1 and 3 is cut off, or the job ends before
	}
}

// requireTrace: the file is a trace of PyTorch's, with a function in it.
func requireTrace(t *testing.T, path, function string) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	info, err := f.Stat()
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	zip, err := gzip.NewReader(f)
	require.NoError(t, err)
	var trace struct {
		Events []struct {
			Name any `json:"name"`
		} `json:"traceEvents"`
		Waits map[string]any `json:"wait_counters"`
	}
	require.NoError(t, json.NewDecoder(zip).Decode(&trace))
	require.NotEmpty(t, trace.Waits)
	var names []string
	for _, e := range trace.Events {
		if name, ok := e.Name.(string); ok {
			names = append(names, name)
		}
	}
	require.Contains(t, strings.Join(names, "\n"), function)
}
