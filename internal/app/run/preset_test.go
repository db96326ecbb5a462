package run

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/preset"
)

// resolvedScript resolves a command line where the files are, by name.
func resolvedScript(t *testing.T, files map[string]string, line string, env map[string]string) (settings, error) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	t.Chdir(dir)
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	c, err := parse(strings.Fields(line), lookup, io.Discard)
	require.NoError(t, err)
	return resolve(c, lookup, testHost())
}

func TestAutoPreset(t *testing.T) {
	files := map[string]string{
		"jax.py": "# import torch\nimport jax\n", "plain.py": "import os\n", "pkg/mod.py": "import mindspore\n",
		"run/__main__.py": "import paddle\n", "ds.py": "import deepspeed",
		"local.py": "import deepspeed\nadd_argument('--local_rank')", "sub/tf.py": "import tensorflow",
		"large.py": "import jax\n" + strings.Repeat("#", preset.MaxScript),
	}
	const unseen = "the program is not a Python script that can be looked at"
	for line, want := range map[string][2]string{
		"--preset=auto jax.py":                                 {"jax", "line 2 of jax.py: import jax"},
		"--preset=auto plain.py":                               {"torch", "plain.py imports no framework that is known"},
		"--preset=auto large.py":                               {"torch", unseen},
		"--preset=auto -m pkg.mod":                             {"mindspore", "line 1 of pkg/mod.py: import mindspore"},
		"--preset=auto -m run":                                 {"paddle", "line 1 of run/__main__.py: import paddle"},
		"--preset=auto -m elsewhere":                           {"torch", unseen},
		"--preset=auto --no-python true":                       {"torch", unseen},
		"--preset=auto --no-python /usr/bin/python3 -u jax.py": {"jax", "line 2 of jax.py: import jax"},
		"--preset=auto --workdir=sub tf.py":                    {"tensorflow", "line 1 of tf.py: import tensorflow"},
		"--preset=auto ds.py":                                  {"deepspeed", "line 1 of ds.py: import deepspeed"},
		"--preset=auto local.py":                               {"deepspeed", "line 1 of local.py: import deepspeed"},
		"--preset=deepspeed ds.py":                             {"deepspeed", ""},
		"--nproc-per-node=2 --preset=jax jax.py":               {"jax", ""},
		"plain.py":                                             {"torch", ""},
	} {
		s, err := resolvedScript(t, files, line, map[string]string{"PYTHON_EXEC": "/usr/bin/python3"})
		require.NoError(t, err, line)
		require.Equal(t, want, [2]string{s.framework.preset.Name, s.framework.why}, line)
		require.Equal(t, s.framework.preset.Name == "deepspeed" && line != "--preset=auto ds.py",
			s.framework.preset.Args != nil, line)
	}
	_, err := resolvedScript(t, files, "--preset=tf plain.py", nil)
	require.ErrorContains(t, err, `preset "tf" is unknown: use torch, deepspeed,`)
}

func TestPresetWarnings(t *testing.T) {
	files := map[string]string{
		"tf.py": "import tensorflow as tf\n", "mpi.py": "from mpi4py import MPI\n", "torch.py": "import torch, tensorflow\n",
		"ft.py": "import torchft\n",
	}
	for line, want := range map[string]string{
		"--nproc-per-node=2 tf.py": "tf.py: line 1 of the script (import tensorflow as tf) speaks for --preset=tensorflow: " +
			"with --preset=torch its 2 workers do not know of each other, and would fail or be 2 jobs of one replica",
		"--nproc-per-node=2 --preset=mindspore tf.py":  "speaks for --preset=tensorflow: with --preset=mindspore",
		"--nproc-per-node=2 --preset=mpi mpi.py":       "mpi.py: line 1 (from mpi4py import MPI) may call MPI_Init",
		"--nproc-per-node=2 --preset=auto mpi.py":      "mpi.py: line 1 (from mpi4py import MPI) may call MPI_Init",
		"--preset=torchft ft.py":                       "--preset=torchft: $TORCHFT_LIGHTHOUSE is not set",
		"tf.py":                                        "",
		"--nproc-per-node=2 torch.py":                  "",
		"--nproc-per-node=2 --preset=tensorflow tf.py": "",
		"--nproc-per-node=2 --preset=auto tf.py":       "",
	} {
		s, err := resolvedScript(t, files, line, map[string]string{"OMP_NUM_THREADS": "1"})
		require.NoError(t, err)
		if want == "" {
			require.Empty(t, s.warnings, line)
		} else {
			require.Contains(t, strings.Join(s.warnings, "\n"), want, line)
		}
	}
}

func TestPresetsPorts(t *testing.T) {
	files := map[string]string{"train.py": ""}
	_, err := resolvedScript(t, files, "--preset=tensorflow --nproc-per-node=250 --ports=7 train.py", nil)
	require.ErrorContains(t, err, "--preset=tensorflow needs 250 ports for 250 workers: with --ports=7 it is 257 of at "+
		"most 256 for a node; start fewer workers")
	_, err = resolvedScript(t, files, "--preset=jax --nproc-per-node=300 train.py", nil)
	require.NoError(t, err)
}

func TestPresetsSuccessRule(t *testing.T) {
	for line, want := range map[string]string{
		"train.py": "all", "--preset=mindspore train.py": "rank0", "--preset=mindspore --success-rule=all train.py": "all",
	} {
		s, err := resolvedScript(t, map[string]string{"train.py": ""}, line, nil)
		require.NoError(t, err)
		require.Equal(t, want, string(s.params.Budget.Success), line)
	}
}

// What only the rendezvous decides is said so, and nothing is held for a plan.
func TestPresetInThePlan(t *testing.T) {
	s, err := resolvedScript(t, map[string]string{"train.py": "import jax\njax.distributed.initialize()"},
		"--preset=auto --nproc-per-node=2 train.py", nil)
	require.NoError(t, err)
	p, err := makePlan(&s, testHost())
	require.NoError(t, err)
	require.Equal(t, &planPreset{"jax", "line 2 of train.py: jax.distributed.initialize()"}, p.Preset)
	require.Contains(t, p.Workers[1].Env, "JAX_COORDINATOR_ADDRESS="+fromRendezvous)
	require.Contains(t, p.Workers[1].Env, "JAX_PROCESS_ID=1")
	require.Empty(t, s.node.Ports)

	s, err = resolvedScript(t, map[string]string{"train.py": ""}, "--preset=deepspeed train.py --lr=1", nil)
	require.NoError(t, err)
	p, err = makePlan(&s, testHost())
	require.NoError(t, err)
	require.Equal(t, []string{"train.py", "--local_rank=0", "--lr=1"}, p.Workers[0].Argv[2:])
	require.Contains(t, p.Workers[0].Env, "MASTER_PORT="+fromRendezvous)
}

// Two nodes with presets' ports and the user's: the workers of the preset are told of theirs only, and so is who asked.
func TestPresetsPortsOfAllNodes(t *testing.T) {
	b := newBench(t)
	script := `echo $TF_CONFIG > $DIR/tf.$RANK.tmp; mv $DIR/tf.$RANK.tmp $DIR/tf.$RANK
echo $DLROVER_PORTS > $DIR/own.$RANK
cp $DLROVER_WORLD_FILE $DIR/world.$RANK; [ -z "$MASTER_PORT" ]`
	args := b.sh(script, b.c10d("2", "--ports=1", "--preset=tensorflow")...)
	l1, l2 := b.run(args...), b.run(args...)
	require.Equal(t, 0, l1.wait(), l1.err.String())
	require.Equal(t, 0, l2.wait(), l2.err.String())
	var first []string
	for rank := range 4 {
		var tf struct {
			Cluster struct{ Worker []string }
			Task    struct{ Index int }
		}
		require.NoError(t, json.Unmarshal(read(t, filepath.Join(b.dir, "tf."+strconv.Itoa(rank))), &tf))
		require.Len(t, tf.Cluster.Worker, 4)
		require.Equal(t, rank, tf.Task.Index)
		if rank == 0 {
			first = tf.Cluster.Worker
		}
		require.Equal(t, first, tf.Cluster.Worker)
		var world []worldNode
		require.NoError(t, json.Unmarshal(read(t, filepath.Join(b.dir, "world."+strconv.Itoa(rank))), &world))
		for _, n := range world {
			require.Len(t, n.Ports, 1)
			require.NotContains(t, strings.Join(first, " ")+" ", fmt.Sprintf(":%d ", n.Ports[0]))
		}
	}
}

func TestPresetStandalone(t *testing.T) {
	b := newBench(t)
	l := b.run(b.sh(`echo $JAX_COORDINATOR_ADDRESS; env | grep -c "DLROVER_PORTS\|DLROVER_WORLD_FILE\|MASTER_"; exit 0`,
		"--standalone", "--preset=jax")...)
	require.Equal(t, 0, l.wait(), l.err.String())
	require.Regexp(t, `(?m)^127.0.0.1:\d+$`, l.out.String())
	require.Contains(t, l.out.String(), "\n0\n")
}
