package commit

import (
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func manifestSeed() []byte {
	b, err := json.Marshal(Manifest{Version: version, Save: saveOf(1, "0", 10, 1),
		Files: []FileEntry{fileOf("s1", "10/a.pt", 0)}})
	if err != nil {
		panic(err)
	}
	return b
}

// FuzzManifest checks that an accepted manifest stays the same when written again. Neither a recovery with it as an
// intent nor the removal of a step with it as the manifest touches a file outside of the directory.
func FuzzManifest(f *testing.F) {
	f.Add(manifestSeed())
	for _, path := range []string{"../x", "/etc/x", "a/../../x", "/data/run/10/a.pt", ".dlrover/20.json"} {
		f.Add([]byte(strings.ReplaceAll(string(manifestSeed()), "10/a.pt", path)))
	}
	f.Add([]byte(strings.ReplaceAll(string(manifestSeed()), `"latest"`, `"../victim"`)))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseManifest(b)
		if err != nil {
			return
		}
		again, err := json.Marshal(m)
		require.NoError(t, err)
		m2, err := parseManifest(again)
		require.NoError(t, err)
		again2, err := json.Marshal(m2)
		require.NoError(t, err)
		require.Equal(t, string(again), string(again2))
		for _, file := range m.Files {
			require.True(t, filepath.IsAbs(file.Path) || filepath.IsLocal(file.Path), file.Path)
		}
		stayInside(t, m, again)
	})
}

func stayInside(t *testing.T, m Manifest, b []byte) {
	fs, store := modelStore()
	store.OnDamaged = nil
	mustWrite(t, store, saveOf(99, "z", m.Step/2+1, 1))
	for _, file := range m.Files {
		fs.Put("/outside"+file.Path, "victim")
		if filepath.IsAbs(file.Path) && !strings.HasPrefix(file.Path, dir+"/") &&
			!strings.Contains(dir, strings.TrimRight(file.Path, "/")) {
			fs.Put(file.Path, strings.Repeat("v", int(min(file.Size, 100))))
		}
	}
	outside := func() map[string]string {
		tree := fs.Tree()
		for path := range tree {
			if strings.HasPrefix(path, dir+"/") {
				delete(tree, path)
			}
		}
		return tree
	}
	before := outside()
	ctx := context.Background()
	fs.Put(filepath.Join(dir, metaDir, itoa(m.Step)+".json"), string(b))
	_ = store.Remove(ctx, dir, m.Step)
	fs.Put(filepath.Join(StageDir(dir, m.ID), "intent"), string(b))
	_, _ = store.Recover(ctx, dir, nil)
	_, _ = store.Retain(ctx, dir)
	require.Equal(t, before, outside())
}

// FuzzPlan checks that any plan removes only temporary files of its own save.
func FuzzPlan(f *testing.F) {
	f.Add([]byte(`["10/.a.pt.s1.tmp"]`), "s1")
	f.Add([]byte(`["../.a.pt.s1.tmp", "/data/.b.s1.tmp"]`), "s1")
	f.Add([]byte(`["dlrover_latest.txt", ".dlrover/10.json"]`), "s1")
	f.Add([]byte(`["/etc/passwd"]`), "")
	f.Fuzz(func(t *testing.T, b []byte, save string) {
		paths, err := parsePlan(b, save)
		if err != nil {
			return
		}
		for _, path := range paths {
			require.True(t, filepath.IsAbs(path) || filepath.IsLocal(path), path)
			base := filepath.Base(path)
			require.True(t, strings.HasPrefix(base, ".") && strings.HasSuffix(base, "."+save+".tmp"), path)
		}
		fs, store := modelStore()
		mustWrite(t, store, saveOf(99, "z", 10, 1))
		fs.Put(filepath.Join(StageDir(dir, save), "shard-0.plan"), string(b))
		before := fs.Tree()
		fs.Advance(2 * orphanAge)
		_, _ = store.Recover(context.Background(), dir, nil)
		for path := range before {
			if _, still := fs.Tree()[path]; !still && !strings.Contains(path, "/stage/") {
				require.True(t, strings.HasSuffix(path, ".tmp"), path)
			}
		}
	})
}
