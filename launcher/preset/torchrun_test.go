package preset

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// oldTorch tells which of the two generations python has.
func oldTorch(t *testing.T, python string) bool {
	out, err := exec.Command(python,
		"-c", "import torch; print(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 2))").Output()
	require.NoError(t, err)
	return strings.TrimSpace(string(out)) == "True"
}

// TestTorchIsTorchruns has the real torchrun start two workers and demands every variable that it gave them, and no
// others but those that docs/start/from-torchrun.md names.
func TestTorchIsTorchruns(t *testing.T) {
	python := torchpython.Require(t, "THE WORKERS' ENVIRONMENT AGAINST TORCHRUN'S IS")
	old := oldTorch(t, python)
	forks := torchpython.Start(t, python)
	for _, tt := range []struct {
		name   string
		option string
		parent map[string]string
		want   Vars // what is not read from torchrun's own choice
	}{
		{"defaults", "--max_restarts=0", nil, Vars{Role: "default"}},
		{"inherited", "--max_restarts=2",
			map[string]string{"OMP_NUM_THREADS": "3", "NCCL_ASYNC_ERROR_HANDLING": "0",
				"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "PET_ROLE": "t"},
			Vars{MaxRestarts: 2, Role: "t"}},
		{"virtual local rank", "--virtual_local_rank", map[string]string{"CUDA_VISIBLE_DEVICES": " 5, 7 "},
			Vars{VirtualLocalRank: true, Role: "default"}},
		{"virtual local rank on ROCm", "--virtual_local_rank",
			map[string]string{"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "6,7"},
			Vars{VirtualLocalRank: true, Role: "default"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parent := map[string]string{
				"PATH": os.Getenv("PATH"), "HOME": t.TempDir(), "TMPDIR": t.TempDir(), "LANG": "C.UTF-8",
				// torch 1.13 on Python 3.11 fails unless some rank has a redirection.
				"PET_REDIRECTS": "9:1", "PET_TEE": "9:1",
			}
			for name, value := range tt.parent {
				parent[name] = value
			}
			for rank, theirs := range runTorchrun(t, forks, parent, tt.option) {
				v := tt.want
				v.OldTorch = old
				v.LocalRank, v.Rank, v.RoleRank = rank, rank, rank
				v.LocalWorldSize, v.WorldSize, v.RoleWorldSize, v.GroupWorldSize = 2, 2, 2, 1
				v.Parent = lookupIn(parent)
				// torchrun chooses these anew each time, or by its version.
				v.MasterAddr, v.RunID = theirs["MASTER_ADDR"], theirs["TORCHELASTIC_RUN_ID"]
				v.ErrorFile, v.Signals = theirs["TORCHELASTIC_ERROR_FILE"], theirs["TORCHELASTIC_SIGNALS_TO_HANDLE"]
				v.AgentStore = theirs["TORCHELASTIC_USE_AGENT_STORE"] == "True"
				var err error
				v.MasterPort, err = strconv.Atoi(theirs["MASTER_PORT"])
				require.NoError(t, err)
				requireEqual(t, parent, v, theirs)
			}
		})
	}
}

// requireEqual demands that v's environment is theirs and the documented additions.
func requireEqual(t *testing.T, parent map[string]string, v Vars, theirs map[string]string) {
	t.Helper()
	p, err := Lookup("torch")
	require.NoError(t, err)
	overlay, err := p.Environ(v)
	require.NoError(t, err)
	var inherited []string
	for name, value := range parent {
		inherited = append(inherited, name+"="+value)
	}
	ours := toMap(MergeEnv(inherited, overlay))
	require.Contains(t, theirs, "TORCHELASTIC_RESTART_COUNT", "not started by torchrun")
	for name, value := range theirs {
		switch name {
		case "_", "PWD", "OLDPWD", "SHLVL": // the shell's
		default:
			require.Equal(t, value, ours[name], "rank %d: %s", v.Rank, name)
		}
	}
	for name := range ours {
		switch name {
		case "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER":
		case "TORCHELASTIC_SIGNALS_TO_HANDLE": // since torch 2.9
		default:
			require.Contains(t, theirs, name, "rank %d", v.Rank)
		}
	}
}

// runTorchrun returns the environments of two workers, by local rank.
func runTorchrun(t *testing.T, forks *torchpython.Forks, parent map[string]string, option string) []map[string]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir := t.TempDir()
	var env []string
	for name, value := range parent {
		env = append(env, name+"="+value)
	}
	output, code, err := forks.Run(ctx, env,
		"-m", "torch.distributed.run", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
		"--nproc_per_node=2", "--monitor_interval=0.1", option, "--no_python", "sh", "-c", `env > "$0/$RANK"`, dir)
	if strings.Contains(string(output), "unrecognized arguments: "+option) {
		t.Skipf("SKIPPED: this torchrun has no %s", option)
	}
	require.NoError(t, err)
	require.Zero(t, code, string(output))
	var envs []map[string]string
	for rank := range 2 {
		env, err := os.ReadFile(filepath.Join(dir, strconv.Itoa(rank)))
		require.NoError(t, err)
		envs = append(envs, toMap(strings.Split(strings.TrimSpace(string(env)), "\n")))
	}
	return envs
}

func toMap(env []string) map[string]string {
	m := map[string]string{}
	for _, entry := range env {
		name, value, _ := strings.Cut(entry, "=")
		m[name] = value
	}
	return m
}
