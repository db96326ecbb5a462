package python

import (
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tree returns the contents of the files below root by their slash-separated names.
func tree(t *testing.T, fsys fs.FS, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, fs.WalkDir(fsys, root, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(fsys, name)
		all[name] = string(data)
		return err
	}))
	return all
}

func TestEmbedsEveryModuleAndNothingElse(t *testing.T) {
	want := map[string]string{}
	for _, pkg := range []string{"dlrover", "dlrover_ckpt"} {
		for name, data := range tree(t, os.DirFS("."), pkg) {
			if strings.HasSuffix(name, ".py") || strings.HasSuffix(name, "/py.typed") {
				want[name] = data
			}
		}
	}
	require.Contains(t, want, "dlrover/trainer/torch/flash_checkpoint/__init__.py")
	require.Equal(t, want, tree(t, Files, "."))
}
