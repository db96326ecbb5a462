package preset

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// workers are the cases of every preset's golden file.
var workers = []struct {
	name   string
	parent map[string]string
	change func(*Vars)
}{
	{"nothing inherited", nil, func(*Vars) {}},
	{"everything inherited", map[string]string{
		"NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
		"OMP_NUM_THREADS": "", "PYTHONUNBUFFERED": "",
		"PYTHONFAULTHANDLER": "", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "RANK": "77",
		"MASTER_ADDR": "elsewhere", "LOCAL_RANK": "9",
	}, func(*Vars) {}},
	{"torch before 2.2", nil, func(v *Vars) { v.OldTorch = true }},
	{"one worker on the node", nil, func(v *Vars) { v.LocalWorldSize = 1 }},
	{"no agent store, no error file", nil, func(v *Vars) { v.AgentStore, v.ErrorFile = false, "" }},
	{"virtual local rank", nil, func(v *Vars) { v.VirtualLocalRank = true }},
	{"virtual local rank in CUDA_VISIBLE_DEVICES",
		map[string]string{"CUDA_VISIBLE_DEVICES": " 4, GPU-8f2e ,MIG-1", "HIP_VISIBLE_DEVICES": ""},
		func(v *Vars) { v.VirtualLocalRank = true }},
	{"virtual local rank in HIP_VISIBLE_DEVICES",
		map[string]string{"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "6,7"},
		func(v *Vars) { v.VirtualLocalRank = true }},
}

func worker() Vars {
	return Vars{
		LocalRank: 1, Rank: 5, GroupRank: 2, RoleRank: 3, LocalWorldSize: 2, WorldSize: 8,
		GroupWorldSize: 4, RoleWorldSize: 6,
		Role: "trainer", MasterAddr: "10.0.0.1", MasterPort: 29500, RestartCount: 1, MaxRestarts: 3,
		RunID: "job-1", AgentStore: true,
		ErrorFile: "/logs/job-1/attempt_1/1/error.json", Signals: "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
	}
}

func lookupIn(env map[string]string) LookupEnv {
	return func(name string) (string, bool) {
		value, ok := env[name]
		return value, ok
	}
}

func TestGolden(t *testing.T) {
	for _, name := range presetNames() {
		t.Run(name, func(t *testing.T) {
			p, err := Lookup(name)
			require.NoError(t, err)
			var got strings.Builder
			got.WriteString(goldenWorlds(t, p))
			for _, w := range workers {
				if name != "torch" {
					break // they are made of the same rows
				}
				v := worker()
				v.Parent = lookupIn(w.parent)
				w.change(&v)
				env, err := p.Environ(v)
				require.NoError(t, err)
				got.WriteString("# " + w.name + "\n" + strings.Join(env, "\n") + "\n\n")
			}
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				require.NoError(t, os.WriteFile(golden, []byte(got.String()), 0o644))
			}
			want, err := os.ReadFile(golden)
			require.NoError(t, err)
			require.Equal(t, string(want), got.String())
		})
	}
}

func TestLookup(t *testing.T) {
	p, err := Lookup("torch")
	require.NoError(t, err)
	require.Equal(t, "torch", p.Name)
	_, err = Lookup("Torch")
	require.EqualError(t, err, `preset "Torch" is unknown: use torch, deepspeed, `+
		`mindspore, jax, tensorflow, paddle, mpi, torchft or auto`)
}

func TestNoParentIsAnEmptyEnvironment(t *testing.T) {
	p, err := Lookup("torch")
	require.NoError(t, err)
	v := worker()
	got, err := p.Environ(v)
	require.NoError(t, err)
	v.Parent = lookupIn(nil)
	want, err := p.Environ(v)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestTooFewVirtualDevices(t *testing.T) {
	p, err := Lookup("torch")
	require.NoError(t, err)
	for name, parent := range map[string]map[string]string{
		`CUDA_VISIBLE_DEVICES="5" has 1`: {"CUDA_VISIBLE_DEVICES": "5"},
		`CUDA_VISIBLE_DEVICES="" has 1`:  {"CUDA_VISIBLE_DEVICES": ""}, // as torchrun counts: one device without a name
		`HIP_VISIBLE_DEVICES="7" has 1`:  {"CUDA_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "7"},
	} {
		v := worker()
		v.VirtualLocalRank, v.Parent = true, lookupIn(parent)
		_, err := p.Environ(v)
		require.ErrorContains(t, err,
			"for local rank 1: --virtual-local-rank needs a device for each of 2 workers, but "+name)

		v.VirtualLocalRank = false
		_, err = p.Environ(v)
		require.NoError(t, err)
	}
}

func TestOMPWarning(t *testing.T) {
	require.Contains(t, OMPWarning(8, nil), "every one of the 8 workers gets OMP_NUM_THREADS=1")
	require.Empty(t, OMPWarning(1, nil))
	require.Empty(t, OMPWarning(8, lookupIn(map[string]string{"OMP_NUM_THREADS": ""})))
}

func TestMergeEnv(t *testing.T) {
	for _, tt := range []struct {
		name                  string
		parent, overlay, want []string
	}{
		{"empty", nil, nil, []string{}},
		{"overlay wins", []string{"A=1", "B=2", "C=3"}, []string{"B=x", "D=4"}, []string{"A=1", "C=3", "B=x", "D=4"}},
		{"the last of equals counts", []string{"A=1", "B=2", "A=3"}, []string{"C=1", "C=2"}, []string{"B=2", "A=3", "C=2"}},
		{"names, not prefixes", []string{"RANKS=1", "RANK=2"}, []string{"RANK=3"}, []string{"RANKS=1", "RANK=3"}},
		{"values keep their signs", []string{"A=x=y", "B="}, []string{"C==", "A="}, []string{"B=", "C==", "A="}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			parent, overlay := append([]string{}, tt.parent...), append([]string{}, tt.overlay...)
			require.Equal(t, tt.want, MergeEnv(parent, overlay))
			require.Equal(t, append([]string{}, tt.parent...), parent, "the arguments are left alone")
			require.Equal(t, append([]string{}, tt.overlay...), overlay)
		})
	}
}
