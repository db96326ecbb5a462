package ctl

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
)

// committed makes a checkpoint directory with two steps.
func committed(t *testing.T, framework string) string {
	t.Helper()
	dir := t.TempDir()
	store := commit.Store{FS: fsx.OS{}, Now: time.Now}
	for i, step := range []int64{10, 20} {
		text := strconv.FormatInt(step, 10)
		s := commit.Save{
			ID: "000000000000000" + strconv.Itoa(i), Epoch: "0", Dir: dir, Framework: framework, Layout: "00", Step: step,
			Shards: 1, WorldSize: 1, Saved: time.Now(), Trackers: []commit.Tracker{{Path: commit.Latest, Text: text}},
		}
		tmps, err := store.Plan(s, 0, []string{text + "/rank_0.pt"})
		require.NoError(t, err)
		require.NoError(t, fsx.OS{}.WriteFile(tmps[0], []byte("weights")))
		e := commit.Entry{Files: []commit.FileEntry{{Path: text + "/rank_0.pt", Size: 7, Tmp: tmps[0]}}}
		e.Files[0].CRC, _, err = fsx.OS{}.Checksum(t.Context(), tmps[0])
		require.NoError(t, err)
		require.NoError(t, store.Prepared(s, e))
		require.NoError(t, store.Intent(s, []commit.Entry{e}))
		require.NoError(t, store.Place(s, e))
		require.NoError(t, store.Placed(s, 0))
		_, err = store.Publish(s, []commit.Entry{e})
		require.NoError(t, err)
	}
	return dir
}

func TestCheckpoints(t *testing.T) {
	dir := committed(t, "ddp")
	damaged := committed(t, "ddp")
	require.NoError(t, os.WriteFile(filepath.Join(damaged, "10/rank_0.pt"), []byte("weight?"), 0o600))
	for _, c := range []struct {
		name string
		args []string
		code int
		out  string
	}{
		{"ls", []string{"ls", dir}, 0, `(?m)^20 .* 7 B .*ddp +complete, tracked$`},
		{"ls of the older step", []string{"ls", dir}, 0, `(?m)^10 .* 7 B .*ddp +complete$`},
		{"verify one", []string{"verify", dir, "10"}, 0, `^step 10: 1 files, 7 B, good\n$`},
		{"verify all", []string{"verify", dir}, 0, `step 20: 1 files, 7 B, good`},
		{"verify damage", []string{"verify", damaged}, 1, `step 10: damaged: .*rank_0.pt`},
		{"verify another step", []string{"verify", dir, "30"}, 2, `^$`},
		{"rm the tracked step", []string{"rm", dir, "20"}, 2, `^$`},
		{"rm nothing", []string{"rm", dir, "30"}, 2, `^$`},
		{"rm", []string{"rm", dir, "10"}, 0, `^$`},
		{"no step", []string{"rm", dir, "ten"}, 2, `^$`},
		{"too few arguments", []string{"rm", dir}, 2, `^$`},
		{"no such directory", []string{"ls", dir + "/nowhere"}, 2, `^$`},
		{"empty directory", []string{"ls", t.TempDir()}, 2, `^$`},
		{"unknown", []string{"mv", dir}, 2, `^$`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			require.Equal(t, c.code, ctl(&out, append([]string{"checkpoints"}, c.args...)...))
			require.Regexp(t, c.out, out.String())
		})
	}
	require.NoFileExists(t, filepath.Join(dir, "10/rank_0.pt"))
	require.FileExists(t, filepath.Join(dir, "20/rank_0.pt"))
}

// What a directory says and does not keep is damage, and named: without its manifest the tracked step cannot be loaded.
func TestVerifyTheTrackedStep(t *testing.T) {
	manifest := func(dir string) string { return filepath.Join(dir, ".dlrover/20.json") }
	tracker := func(dir string) string { return filepath.Join(dir, commit.Latest) }
	replace := func(path string, text string) error {
		return errors.Join(os.Remove(path), os.WriteFile(path, []byte(text), 0o600))
	}
	for name, c := range map[string]struct {
		damage func(dir string) error
		out    string
		step   string // "": it is not about the step
	}{
		"manifest missing": {func(dir string) error { return os.Remove(manifest(dir)) },
			`step 20 \(tracked\): damaged: .*20\.json is missing`, "20"},
		"manifest empty": {func(dir string) error { return replace(manifest(dir), "") },
			`step 20 \(tracked\): damaged: .*20\.json`, "20"},
		"manifest garbage": {func(dir string) error { return replace(manifest(dir), "{\x00") },
			`step 20 \(tracked\): damaged: .*20\.json`, "20"},
		"manifest of another step": {func(dir string) error {
			return errors.Join(os.Remove(manifest(dir)), os.Link(filepath.Join(dir, ".dlrover/10.json"), manifest(dir)))
		}, `step 20 \(tracked\): damaged: .*is of step 10`, "20"},
		"manifest a pipe": {func(dir string) error {
			return errors.Join(os.Remove(manifest(dir)), syscall.Mkfifo(manifest(dir), 0o600))
		}, `step 20 \(tracked\): damaged: .*not a regular file`, "20"},
		"manifest too long": {func(dir string) error { return os.Truncate(manifest(dir), 1<<30) },
			`step 20 \(tracked\): damaged: .*too long`, "20"},
		"files missing": {func(dir string) error { return os.RemoveAll(filepath.Join(dir, "20")) },
			`step 20 \(tracked\): damaged: .*rank_0\.pt`, "20"},
		"names a step that is not there": {func(dir string) error { return replace(tracker(dir), "30") },
			`step 30 \(tracked\): damaged: .*30\.json is missing`, "30"},
		"an older manifest is damaged": {
			func(dir string) error { return replace(filepath.Join(dir, ".dlrover/10.json"), "") },
			`step 10: damaged: .*10\.json`, "10",
		},
		"tracker garbage": {func(dir string) error { return replace(tracker(dir), "twenty") },
			`dlrover_latest\.txt: damaged: "twenty" is not a step`, ""},
		"tracker missing": {func(dir string) error { return os.Remove(tracker(dir)) },
			`dlrover_latest\.txt: damaged: it is missing`, ""},
		"tracker a pipe": {func(dir string) error {
			return errors.Join(os.Remove(tracker(dir)), syscall.Mkfifo(tracker(dir), 0o600))
		},
			`dlrover_latest\.txt: damaged: .*not a regular file`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := committed(t, "ddp")
			require.NoError(t, c.damage(dir))
			ctl := func(args ...string) (int, string) {
				var out bytes.Buffer
				return ctl(&out, append([]string{"checkpoints"}, args...)...), out.String()
			}
			code, out := ctl("verify", dir)
			require.Equal(t, 1, code, out)
			require.Regexp(t, c.out, out)
			if c.step != "" {
				code, out = ctl("verify", dir, c.step)
				require.Equal(t, 1, code, out)
				require.Regexp(t, c.out, out)
			}
			code, out = ctl("ls", dir)
			require.Zero(t, code, out)
			require.Contains(t, out, "DAMAGED")
		})
	}
}

func TestHostileManifest(t *testing.T) {
	var out bytes.Buffer
	require.Equal(t, 0, ctl(&out, "checkpoints", "ls", committed(t, "a\x1b[2J\t\u202e\x7f\n")))
	require.Contains(t, out.String(), `a\x1b[2J\t\u202e\x7f\n  complete`)
}
