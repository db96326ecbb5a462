package commit

import (
	"encoding/json"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/checkpointd/fsx"
)

var update = flag.Bool("update", false, "write the golden directories anew")

// goldenDir has the directories that the Go and the Python half of the protocol are both held against; its README.md
// has the format.
const goldenDir = "../testdata/stage"

// goldenState is the view of a reader in a directory.
type goldenState struct {
	Tracked *int64  `json:"tracked"`
	Steps   []int64 `json:"steps"`
	Good    []int64 `json:"good"`
}

// goldenOutcome is the result of a recovery of stages that were quiet for so long.
type goldenOutcome struct {
	StageAge int `json:"stage_age_s"`
	goldenState
	Files []string `json:"files"`
}

type golden struct {
	About    string          `json:"about"`
	Before   goldenState     `json:"before"`
	Outcomes []goldenOutcome `json:"outcomes"`
}

// crashed makes the directory of a golden case, in which step 10 is committed already.
type crashed struct {
	t     *testing.T
	store Store
	dir   string
}

func newCrashed(t *testing.T) crashed {
	now := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	store := Store{FS: fsx.OS{}, Now: func() time.Time { now = now.Add(time.Minute); return now }}
	c := crashed{t, store, filepath.Join(t.TempDir(), "run")}
	require.NoError(t, os.Mkdir(c.dir, 0o755))
	c.commit(c.save(1, "e1", 10))
	return c
}

func (c crashed) save(nth int, epoch string, step int64) Save {
	s := saveOf(nth, epoch, step, 2)
	s.Dir = c.dir
	return s
}

// jobs are the writers of a save, of one file each.
func (c crashed) jobs(s Save) (jobs []*job, entries []Entry) {
	for shard := range s.Shards {
		j := newJob(c.store, s, shard)
		j.entry.Files = j.entry.Files[:1]
		jobs, entries = append(jobs, j), append(entries, j.entry)
	}
	return jobs, entries
}

func (c crashed) commit(s Save) {
	c.intend(s, s.Shards)
	_, entries := c.jobs(s)
	_, err := c.store.Publish(s, entries)
	require.NoError(c.t, err)
}

// plan leaves a plan of shard 0 and half of its file.
func (c crashed) plan(s Save) {
	tmps, err := c.store.Plan(s, 0, []string{stepDir(s.Step) + "/0_model.pt"})
	require.NoError(c.t, err)
	require.NoError(c.t, os.WriteFile(tmps[0], []byte("half"), 0o644))
}

func (c crashed) prepare(s Save) {
	jobs, _ := c.jobs(s)
	for _, j := range jobs {
		require.NoError(c.t, j.prepare())
	}
}

// intend writes the intent, and gives so many shards their final names.
func (c crashed) intend(s Save, placed int) {
	c.prepare(s)
	jobs, entries := c.jobs(s)
	require.NoError(c.t, c.store.Intent(s, entries))
	for _, j := range jobs[:placed] {
		require.NoError(c.t, j.place())
	}
}

// publish writes the manifest, perhaps the trackers, and leaves the stage.
func (c crashed) publish(s Save, track bool) {
	c.intend(s, s.Shards)
	d, err := c.store.at(c.dir)
	require.NoError(c.t, err)
	_, entries := c.jobs(s)
	m, err := d.future(s, entries)
	require.NoError(c.t, err)
	m.Committed = c.store.Now()
	require.NoError(c.t, d.storage.put(d.storage.manifest(s.Step), m))
	if track {
		require.NoError(c.t, d.storage.track(m.Trackers))
	}
}

func (c crashed) intent(id string) string { return filepath.Join(StageDir(c.dir, id), "intent") }

// rewrite changes a file of the tree.
func (c crashed) rewrite(path string, change func(string) string) {
	b, err := os.ReadFile(path)
	require.NoError(c.t, err)
	require.NoError(c.t, os.WriteFile(path, []byte(change(string(b))), 0o644))
}

var fresh = []int{0}

var goldenCases = []struct {
	name, about string
	ages        []int // of the stages, in seconds
	crash       func(c crashed)
}{
	{"committed", "Two steps are committed and nothing is under way.", fresh, func(c crashed) {
		c.commit(c.save(2, "e1", 20))
	}},
	{"planned", "A shard was being written: it is left alone until it was quiet for an hour.",
		[]int{0, 2 * 3600}, func(c crashed) {
			c.plan(c.save(2, "e1", 20))
		}},
	{"prepared", "All shards are prepared and the leader has not decided: it may still be alive.",
		[]int{0, 2 * 3600}, func(c crashed) {
			c.prepare(c.save(2, "e1", 20))
		}},
	{"superseded", "All shards are prepared, and a later step was committed since: nobody will commit them.",
		[]int{60}, func(c crashed) {
			c.prepare(c.save(2, "e1", 20))
			c.commit(c.save(3, "e1", 30))
		}},
	{"intent", "The intent is written: the save can only be completed.", fresh, func(c crashed) {
		c.intend(c.save(2, "e1", 20), 0)
	}},
	{"placed-half", "One of two shards has its final names.", fresh, func(c crashed) {
		c.intend(c.save(2, "e1", 20), 1)
	}},
	{"placed", "All shards have their final names, and there is no manifest.", fresh, func(c crashed) {
		c.intend(c.save(2, "e1", 20), 2)
	}},
	{"published", "The manifest is written, the trackers are those of the step before.", fresh, func(c crashed) {
		c.publish(c.save(2, "e1", 20), false)
	}},
	{"tracked", "Manifest and trackers are written, the stage is still there.", fresh, func(c crashed) {
		c.publish(c.save(2, "e1", 20), true)
	}},
	{"overtaken", "A later save of the epoch was committed first: the step is completed and the trackers stay.",
		fresh, func(c crashed) {
			c.intend(c.save(2, "e1", 20), 0)
			c.commit(c.save(3, "e1", 30))
		}},
	{"overtaken-by-an-epoch", "A later epoch has committed: the step is completed and the trackers stay.",
		fresh, func(c crashed) {
			c.intend(c.save(2, "e1", 20), 0)
			c.commit(c.save(3, "e2", 30))
		}},
	{"torn-intent", "Half of the intent is there: the save can never be completed and is set aside.",
		fresh, func(c crashed) {
			c.intend(c.save(2, "e1", 20), 0)
			c.rewrite(c.intent("s2"), func(text string) string { return text[:len(text)/2] })
		}},
	{"intent-of-another", "The intent is that of another save, and is set aside.", fresh, func(c crashed) {
		c.intend(c.save(2, "e1", 20), 0)
		c.rewrite(c.intent("s2"), func(text string) string { return strings.Replace(text, `"s2"`, `"s9"`, 1) })
	}},
	{"newer-intent", "The intent is of a version that is not known: it may be sound, and is left alone.",
		fresh, func(c crashed) {
			c.intend(c.save(2, "e1", 20), 0)
			c.rewrite(c.intent("s2"), func(text string) string {
				return strings.Replace(text, `"version":1`, `"version":2`, 1)
			})
		}},
	{"lost-file", "A file of a save with an intent is under neither of its names: the save is set aside.",
		fresh, func(c crashed) {
			c.intend(c.save(2, "e1", 20), 1)
			require.NoError(c.t, os.Remove(filepath.Join(c.dir, stepDir(20), "0_model.pt")))
		}},
	{"short-file", "A file of a save with an intent has lost its end: the save is set aside.", fresh, func(c crashed) {
		c.intend(c.save(2, "e1", 20), 1)
		c.rewrite(filepath.Join(c.dir, stepDir(20), "0_model.pt"), func(text string) string { return text[:10] })
	}},
	{"damaged-manifest", "The manifest of the tracked step is torn: the step before is left.", fresh, func(c crashed) {
		c.commit(c.save(2, "e1", 20))
		c.rewrite(filepath.Join(MetaDir(c.dir), "20.json"), func(text string) string { return text[:len(text)/2] })
	}},
}

// Both halves of the protocol are held against the same directories: a change of either that the other does not follow
// fails here or in the Python suite.
func TestGoldenStages(t *testing.T) {
	for _, g := range goldenCases {
		t.Run(g.name, func(t *testing.T) {
			c := newCrashed(t)
			g.crash(c)
			at := filepath.Join(goldenDir, g.name)
			tree := filepath.Join(at, "tree")
			got := golden{About: g.about, Before: stateOf(t, c.dir)}
			for _, age := range g.ages {
				got.Outcomes = append(got.Outcomes, recovered(t, c.dir, age))
			}
			if *update {
				require.NoError(t, os.RemoveAll(at))
				require.NoError(t, os.CopyFS(tree, os.DirFS(c.dir)))
				writeGolden(t, filepath.Join(at, "expected.json"), got)
			}
			require.Equal(t, contents(t, tree), contents(t, c.dir), "what is written has changed: see README.md")
			var want golden
			b, err := os.ReadFile(filepath.Join(at, "expected.json"))
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(b, &want))
			require.Equal(t, want, got)
		})
	}
	entries, err := os.ReadDir(goldenDir)
	require.NoError(t, err)
	require.Len(t, entries, len(goldenCases)+1, "a folder for each case, and README.md")
}

func writeGolden(t *testing.T, path string, g golden) {
	b, err := json.MarshalIndent(g, "", "  ")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, append(b, '\n'), 0o644))
}

// recovered is the result of a recovery in a copy of tree; another recovery changes nothing.
func recovered(t *testing.T, tree string, age int) goldenOutcome {
	dir := filepath.Join(t.TempDir(), "copy")
	require.NoError(t, os.CopyFS(dir, os.DirFS(tree)))
	stages := filepath.Join(MetaDir(dir), "stage")
	now := time.Now()
	require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if at := now; err == nil && strings.HasPrefix(path, stages+"/") {
			return os.Chtimes(path, at.Add(-time.Duration(age)*time.Second), at.Add(-time.Duration(age)*time.Second))
		}
		return err
	}))
	store := Store{FS: fsx.OS{}, Now: time.Now}
	_, err := store.Recover(t.Context(), dir, nil)
	out := goldenOutcome{StageAge: age, goldenState: stateOf(t, dir)}
	left := contents(t, dir)
	for path := range left {
		out.Files = append(out.Files, path)
	}
	slices.Sort(out.Files)
	_, twice := store.Recover(t.Context(), dir, nil)
	require.Equal(t, left, contents(t, dir), "once more")
	require.Equal(t, err == nil, twice == nil, "%v, then %v", err, twice)
	return out
}

// contents are the files below dir, by path, without the one for locks.
func contents(t *testing.T, dir string) map[string]string {
	all := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || path == (layout{dir}).lock() {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path) // it is below dir
		all[rel] = string(b)
		return err
	}))
	return all
}

func stateOf(t *testing.T, dir string) goldenState {
	store := Store{FS: fsx.OS{}, Now: time.Now}
	s := goldenState{Steps: []int64{}, Good: []int64{}}
	if step, ok := store.Tracked(dir); ok {
		s.Tracked = &step
	}
	ms, err := store.Manifests(dir)
	require.NoError(t, err)
	for _, m := range ms {
		s.Steps = append(s.Steps, m.Step)
		if store.Verify(t.Context(), dir, m, nil) == nil {
			s.Good = append(s.Good, m.Step)
		}
	}
	return s
}
