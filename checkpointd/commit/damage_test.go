package commit

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/fsx/crashfs"
)

// begun leaves save 1, of step 10, behind its intent, and returns the path and text of the intent.
func begun(t *testing.T, fs *crashfs.FS, store Store) (intent, text string) {
	t.Helper()
	s := saveOf(1, "0", 10, 1)
	j := newJob(store, s, 0)
	require.NoError(t, steps(j.prepare(), store.Intent(s, []Entry{j.entry})))
	intent = StageDir(dir, s.ID) + "/intent"
	return intent, fs.Tree()[intent]
}

// An interrupted commit that cannot be completed is set aside and logged once. It blocks neither another step nor the
// same one.
func TestDamagedIntent(t *testing.T) {
	for name, damage := range map[string]func(fs *crashfs.FS, intent, text string){
		"empty":       func(fs *crashfs.FS, intent, _ string) { fs.Put(intent, "") },
		"torn":        func(fs *crashfs.FS, intent, text string) { fs.Put(intent, text[:len(text)/2]) },
		"garbage":     func(fs *crashfs.FS, intent, _ string) { fs.Put(intent, "\x00\xff{") },
		"no manifest": func(fs *crashfs.FS, intent, _ string) { fs.Put(intent, "{}") },
		"of another": func(fs *crashfs.FS, intent, text string) {
			fs.Put(intent, strings.Replace(text, `"save":"s1"`, `"save":"s9"`, 1))
		},
		"paths outside": func(fs *crashfs.FS, intent, text string) {
			fs.Put(intent, strings.ReplaceAll(text, stepDir(10)+"/", "../"))
		},
		"our own corner": func(fs *crashfs.FS, intent, text string) {
			fs.Put(intent, strings.ReplaceAll(text, stepDir(10)+"/", metaDir+"/"))
		},
		"a directory": func(fs *crashfs.FS, intent, _ string) {
			_ = fs.Remove(intent)
			_ = fs.MkdirAll(intent)
		},
		"names a file that is gone": func(fs *crashfs.FS, _, _ string) {
			_ = fs.Remove(dir + "/" + temporary(stepDir(10)+"/0_model.pt", "s1"))
		},
		"names a file that was cut": func(fs *crashfs.FS, _, _ string) {
			fs.Put(dir+"/"+temporary(stepDir(10)+"/0_model.pt", "s1"), "short")
		},
	} {
		for _, step := range []int64{10, 20} {
			for _, recovers := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s, then step %d, recovery %v", name, step, recovers), func(t *testing.T) {
					fs, store := modelStore()
					mustWrite(t, store, saveOf(0, "0", 5, 1))
					intent, text := begun(t, fs, store)
					damage(fs, intent, text)
					left := fs.Tree()[intent]
					var aside []string
					store.OnDamaged = func(path string, why error) {
						require.Error(t, why)
						aside = append(aside, path)
					}
					if recovers {
						res, err := store.Recover(context.Background(), dir, nil)
						require.NoError(t, err)
						require.Empty(t, res)
					}
					last := saveOf(2, "0", step, 1)
					mustWrite(t, store, last)
					m, skipped, err := store.Newest(context.Background(), dir, nil)
					require.NoError(t, err)
					require.Empty(t, skipped)
					require.Equal(t, last.ID, m.ID)
					_, err = store.Recover(context.Background(), dir, nil)
					require.NoError(t, err)
					require.Equal(t, []string{StageDir(dir, "s1") + ".damaged"}, aside)
					require.Equal(t, left, fs.Tree()[aside[0]+"/intent"], "for a person")
					require.NoError(t, store.Remove(context.Background(), dir, 5))
				})
			}
		}
	}
}

// Storage that does not answer, or an intent of a newer version, is no damage: it stays, and nothing overtakes it.
func TestUnreadableIntentStays(t *testing.T) {
	fs, store := modelStore()
	intent, text := begun(t, fs, store)
	fs.Fault(func(o crashfs.Op) error {
		if o.Kind == "read" && o.Path == intent {
			return syscall.EIO
		}
		return nil
	})
	require.ErrorIs(t, write(store, saveOf(2, "0", 20, 1), 0), syscall.EIO)
	fs.Fault(nil)
	fs.Put(intent, strings.Replace(text, `"version":1`, `"version":2`, 1))
	require.ErrorContains(t, write(store, saveOf(3, "0", 20, 1), 0), "version 2 is not known")
	fs.Put(intent, text)
	mustWrite(t, store, saveOf(4, "0", 10, 1))
}

// A file elsewhere may be on storage that is only unmounted: its intent stays, and stops only saves of the same step.
func TestIntentWithAFileElsewhere(t *testing.T) {
	fs, store := modelStore()
	intent, text := begun(t, fs, store)
	var m map[string]any
	require.NoError(t, json.Unmarshal([]byte(text), &m))
	m["files"].([]any)[0].(map[string]any)["path"] = "/elsewhere/model.pt"
	b, err := json.Marshal(m)
	require.NoError(t, err)
	fs.Put(intent, string(b))
	mustWrite(t, store, saveOf(2, "0", 20, 1))
	require.ErrorContains(t, write(store, saveOf(3, "0", 10, 1), 0), "which has the same files")
	_, err = store.Recover(context.Background(), dir, nil)
	require.ErrorContains(t, err, "complete save s1")
}

// The record of a removal that makes no sense is set aside as well.
func TestDamagedRemoval(t *testing.T) {
	fs, store := modelStore()
	mustWrite(t, store, saveOf(1, "0", 10, 1))
	fs.Put(MetaDir(dir)+"/5.gone", "")
	var aside []string
	store.OnDamaged = func(path string, _ error) { aside = append(aside, path) }
	for range 2 {
		_, err := store.Recover(context.Background(), dir, nil)
		require.NoError(t, err)
	}
	require.Equal(t, []string{MetaDir(dir) + "/5.gone.damaged"}, aside)
}

// A directory in the way of a file is found before the commit begins, when nothing is lost by giving up.
func TestDirectoryInTheWay(t *testing.T) {
	for name, path := range map[string]string{"file": stepDir(10) + "/0_model.pt", "tracker": "latest"} {
		t.Run(name, func(t *testing.T) {
			fs, store := modelStore()
			require.NoError(t, fs.MkdirAll(dir+"/"+path+"/sub"))
			s := saveOf(1, "0", 10, 1)
			require.ErrorIs(t, write(store, s, 0), syscall.EISDIR)
			begun, err := store.Begun(dir, s.ID)
			require.NoError(t, err)
			require.False(t, begun)
		})
	}
}

// A tracker that is missing although steps are committed is said, but not while the first commit is under way.
func TestAMissingTracker(t *testing.T) {
	store, root, save := diskStore(t)
	wrong, err := store.Untrue(root)
	require.NoError(t, err)
	require.Empty(t, wrong, "nothing is committed")
	mustWrite(t, store, save(1, "0", 10))
	wrong, err = store.Untrue(root)
	require.NoError(t, err)
	require.Empty(t, wrong)
	require.NoError(t, os.Remove(filepath.Join(root, Latest)))
	wrong, err = store.Untrue(root)
	require.NoError(t, err)
	require.Len(t, wrong, 1)
	require.EqualValues(t, NoStep, wrong[0].Step)
	require.Contains(t, wrong[0].Reason, "missing")
	m, ok := store.Committed(root, 10)
	require.True(t, ok)
	text, err := os.ReadFile(filepath.Join(MetaDir(root), "10.json"))
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(StageDir(root, m.ID), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(StageDir(root, m.ID), "intent"), text, 0o600))
	wrong, err = store.Untrue(root)
	require.NoError(t, err)
	require.Empty(t, wrong, "the tracker comes next")
}
