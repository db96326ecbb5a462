package preset_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/preset"
)

func names(src string) (all []string) {
	for _, i := range preset.Imports([]byte(src)) {
		all = append(all, fmt.Sprintf("%d %s", i.Line, i.Name))
	}
	return all
}

func TestImports(t *testing.T) {
	for _, tt := range []struct {
		name, src string
		want      []string
	}{
		{"nothing", "", nil},
		{"plain", "import a\nimport b.c", []string{"1 a", "2 b.c"}},
		{"a list", "import a, b as x, c.d", []string{"1 a", "1 b", "1 c.d"}},
		{"from", "from a.b import c", []string{"1 a.b", "1 a.b.c"}},
		{"many lines", "from a import (  # why\n  b,\n  c as d,\n)\nimport e", []string{"1 a", "2 a.b", "3 a.c", "5 e"}},
		{"everything", "from a import *", []string{"1 a"}},
		{"relative", "from . import a\nfrom .b import c\nimport d", []string{"3 d"}},
		{"indented", "def f():\n\timport a\n    from b import c", []string{"2 a", "3 b", "3 b.c"}},
		{"behind a colon", "if x: import a\ntry: from b import c", []string{"1 a", "2 b", "2 b.c"}},
		{"behind a semicolon", "x = 1; import a; import b", []string{"1 a", "1 b"}},
		{"continued", "import \\\n  a, \\\r\n  b", []string{"2 a", "3 b"}},
		{"comments", "# import a\nx = 1 # import b\nimport c # , d", []string{"3 c"}},
		{"strings", "'import a'\nx = 'it\\'s; import b'\nimport c", []string{"3 c"}},
		{"long strings",
			"\"\"\"\nimport a\n\\\"\"\"\"\nimport b\nr'''\nimport c\\'''\n'''\nimport d", []string{"4 b", "8 d"}},
		{"a string without an end", "x = 'import a\nimport b", []string{"2 b"}},
		{"formatted", "f'{import a}'\nRb\"import b\"\nimport c", []string{"3 c"}},
		{"in brackets", "x = [\nimport_a,\n'x']\ny = {1:\n2}\nimport b", []string{"6 b"}},
		{"other words", "x.import_a\nimporta\nyield from a\nraise X from b", nil},
		{"used", "import jax\njax.distributed.initialize()\njax.distributed.shutdown()",
			[]string{"1 jax", "2 jax.distributed", "2 jax.distributed.initialize", "3 jax.distributed.shutdown"}},
		{"used by another name", "import tensorflow as tf\ns = tf.distribute.MultiWorkerMirroredStrategy()\nx.tf.y",
			[]string{"1 tensorflow", "2 tensorflow.distribute", "2 tensorflow.distribute.MultiWorkerMirroredStrategy"}},
		{"used, from", "from paddle import distributed as dist\ndist.init_parallel_env()",
			[]string{"1 paddle", "1 paddle.distributed", "2 paddle.distributed.init_parallel_env"}},
		{"Windows", "import a\r\nimport b\r\n", []string{"1 a", "2 b"}},
		{"broken", "import\nimport a.\nfrom x\nimport b as\nfrom c import (d", []string{"4 b", "5 c", "5 c.d"}},
	} {
		t.Run(tt.name, func(t *testing.T) { require.Equal(t, tt.want, names(tt.src)) })
	}
	require.Equal(t, "from a import b  # c", preset.Imports([]byte("x\n\tfrom a import b  # c\ny"))[0].Text)
}

func TestChoose(t *testing.T) {
	for src, want := range map[string]string{
		"import numpy": "", "": "",
		"import torch":                                     "torch",
		"import lightning as L":                            "torch",
		"import torch\nimport deepspeed":                   "deepspeed",
		"import torch, mindspore":                          "mindspore",
		"import paddle":                                    "paddle",
		"import torch\nimport paddle.distributed":          "paddle",
		"import tensorflow as tf":                          "tensorflow",
		"from tensorflow import keras":                     "tensorflow",
		"import jax, tensorflow as tf":                     "jax",
		"import jax, tensorflow as tf\ntf.distribute.x":    "tensorflow",
		"import torch, jax\njax.distributed.initialize()":  "jax",
		"import torch, tensorflow":                         "torch",
		"import torch\nfrom torchft import Manager":        "torchft",
		"import torch, horovod.torch as hvd":               "mpi",
		"from mpi4py import MPI":                           "mpi",
		"import jaxtyping, torchvision, deepspeed_nothing": "",
	} {
		got, by, ok := preset.Choose(preset.Imports([]byte(src)))
		require.Equal(t, want, got, src)
		require.Equal(t, want != "", ok)
		require.Equal(t, want != "", by.Line > 0)
	}
}

func TestMisfit(t *testing.T) {
	for _, tt := range []struct{ preset, src, want string }{
		{"torch", "import tensorflow as tf", "tensorflow"},
		{"torch", "import mindspore", "mindspore"},
		{"torch", "import paddle.distributed as dist", "paddle"},
		{"torch", "import jax\njax.distributed.initialize()", "jax"},
		{"deepspeed", "import jax\njax.distributed.initialize()", "jax"},
		{"mindspore", "import tensorflow", "tensorflow"},
		{"jax", "import mindspore", "mindspore"},
		{"torch", "import jax", ""}, // may be one process
		{"torch", "import paddle", ""},
		{"torch", "import torch, tensorflow\ntensorflow.distribute.x", ""},
		{"torch", "import numpy", ""},
		{"torch", "import deepspeed", ""},
		{"tensorflow", "import tensorflow, jax\njax.distributed.initialize()", ""},
		{"mpi", "import tensorflow", ""},
		{"jax", "import torch", ""},
	} {
		got := preset.Misfit(tt.preset, preset.Imports([]byte(tt.src)), 2)
		if tt.want == "" {
			require.Empty(t, got, tt.src)
		} else {
			require.Contains(t, got, "speaks for --preset="+tt.want+": with --preset="+tt.preset+" its 2 workers")
		}
		require.Empty(t, preset.Misfit(tt.preset, preset.Imports([]byte(tt.src)), 1))
	}
}

func TestTelling(t *testing.T) {
	require.True(t, preset.Telling([]byte("import jax")))
	require.False(t, preset.Telling([]byte("import torch")))
}

func FuzzImports(f *testing.F) {
	for _, seed := range []string{"import a.b as c, d\nc.e.f", "from a import (b,\nc)", "'''\nimport a\n'''",
		"x=[1,\n2]; import y",
		"r\"\\\"", "import a\\\r\nb", "\"\"\"", "from . import x"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, src []byte) {
		lines := bytes.Count(src, []byte("\n")) + 1
		seen := map[string]bool{}
		for _, i := range preset.Imports(src) {
			require.True(t, i.Line >= 1 && i.Line <= lines, "%+v", i)
			require.False(t, seen[i.Name], "%+v", i)
			seen[i.Name] = true
			for part := range strings.SplitSeq(i.Name, ".") {
				require.Contains(t, string(src), part)
			}
			require.NotContains(t, i.Text, "\n")
		}
	})
}

func BenchmarkImports(b *testing.B) {
	src := []byte(strings.Repeat("import jax\nx = jax.numpy.ones((3, 4))  # a comment\nprint('a string', x)\n", 1000))
	b.SetBytes(int64(len(src)))
	for b.Loop() {
		preset.Imports(src)
	}
}
