package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/trace"
	"dlrover-run/internal/job"
	"dlrover-run/internal/tempdir"
)

func frames(words ...string) (out []hang.Frame) {
	for i, w := range words {
		out = append(out, hang.Frame{Func: w, File: "/job/train.py", Line: 10 + i})
	}
	return out
}

// A dump that is asked for, another one and that of a verdict may write the same files.
func TestStacktracesAreWrittenAtOnce(t *testing.T) {
	dir := t.TempDir()
	files := map[string][]byte{}
	for i := range 8 {
		files[fmt.Sprintf("0000%d-00008.stacktrace", i)] = bytes.Repeat([]byte("x"), 1<<16)
	}
	errs := make([]error, 16)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			for range 5 {
				errs[i] = errors.Join(errs[i], WriteStacktraces(dir, files))
			}
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, len(files))
}

// stuck is an incident of four ranks: 2 sleeps, 3 is silent.
func stuck() Incident {
	c := Incident{
		Job: "job 7/x", At: time.Unix(1790000000, 0),
		World: hang.World{
			Epoch: job.EpochID{Term: 1, Round: 2, Epoch: 3},
			Nodes: []hang.WorldNode{{Name: "gpu-06", Slots: 2}, {Name: "gpu-07", RankBase: 2, Slots: 2}},
		},
		Verdict: hang.Verdict{
			Kind: hang.KindBehind, Confidence: hang.High, Age: 31 * time.Second, Waiting: "0-1", In: "all_reduce #246",
			Suspects: []hang.Suspect{{
				Rank: 2, Node: "gpu-07", GroupRank: 1, PID: 12, Doing: "asleep", Where: frames("load_batch")[0],
				Phase: hang.PhaseData,
			}},
			NoData: "3", Line: "rank 2 (node 1 gpu-07) hung for 31 s: asleep in load_batch at train.py:10; ranks 0-1 wait",
		},
		Store: []hang.StoreWait{{Key: "k", Age: time.Minute, Waiters: []string{"a:1"}}},
		RAS:   []string{"gpu-07: one\ntwo\x1b[2J\n"},
		Notes: []string{"1 of 2 nodes have not answered"},
	}
	for r := range 3 {
		e := hang.Evidence{Worker: hang.Worker{Rank: r, PID: 10 + r}, Node: "gpu-06", Stacks: &hang.Stacks{}}
		page := &hang.Page{
			Rank: r, Steps: 200, LastStep: 5 * time.Second, Phase: hang.PhaseTrain, PhaseSince: time.Second,
			StepTimes: []time.Duration{3 * time.Second, 4 * time.Second, 5 * time.Second},
			Groups:    []hang.GroupState{{ID: 9, Seq: 246, Since: 5 * time.Second}},
		}
		main := hang.Thread{TID: 10 + r, Main: true, Python: frames("all_reduce", "step", "main")}
		if r == 2 {
			e.Node, main.Python = "gpu-07", frames("load_batch", "step", "main")
		}
		main.Native = []hang.Frame{{Func: "futex_wait", File: "libc.so.6"}}
		e.Groups = []hang.Group{{ID: 9, Name: "0", Desc: "default_pg", Backend: "gloo", Ranks: "0-3"}}
		e.Samples = []hang.Sample{{At: 36 * time.Second, Proc: hang.Proc{State: 'S'}, Page: page}}
		e.Flight = &hang.Flight{Entries: []hang.FlightEntry{{Group: "0", Seq: 246, Op: "all_reduce", State: "started"}}}
		e.Stacks.Threads = []hang.Thread{main, {TID: 20 + r, Python: frames("poll", "run")}}
		c.Evidence = append(c.Evidence, e)
	}
	return c
}

// Workers of data loaders are part of what their rank does.
func TestChildrenAreShown(t *testing.T) {
	c := stuck()
	child := hang.Thread{TID: 900, Name: "python3, one of 2 alike", Python: frames("decode", "getitem", "main")}
	tool := hang.Thread{TID: 901, Name: "nvcc\x1b", Native: []hang.Frame{{Func: "compile", File: "nvcc"}}}
	for _, i := range []int{1, 2} {
		c.Evidence[i].Stacks.Children = []hang.Thread{child, tool}
	}
	c.Verdict.Suspects[0].Exception = "ValueError: x"
	var text, picture, doc bytes.Buffer
	require.NoError(t, c.WriteText(&text))
	require.Contains(t, text.String(), "\nchildren of rank 2, innermost function first\n"+
		"  pid 900 python3, one of 2 alike\n    decode at /job/train.py:10\n    getitem at /job/train.py:11\n"+
		"    main at /job/train.py:12\n  pid 901 nvcc_\n    compile at nvcc\n")
	require.NotContains(t, text.String(), "children of rank 1", "it is no suspect")
	require.Contains(t, text.String(), "train.py:10, after its main thread has ended by ValueError: x")
	require.NoError(t, c.writePicture(&picture, false))
	require.Contains(t, picture.String(), ">children of ranks, such as workers of data loaders<")
	require.Contains(t, picture.String(), "decode@/job/train.py:10@1-2|0/3 (2 ranks, 100.00%): 1-2")
	require.NoError(t, c.WriteJSON(&doc))
	back, err := ReadJSON(&doc)
	require.NoError(t, err)
	require.Equal(t, c.Evidence[2].Stacks.Children, back.Evidence[2].Stacks.Children)

	c.Verdict = hang.Verdict{}
	text.Reset()
	require.NoError(t, c.WriteText(&text))
	require.Contains(t, text.String(), "children of rank 1,")
	require.Contains(t, text.String(), "children of rank 2,")
}

func read(t *testing.T, path ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(path...))
	require.NoError(t, err)
	return string(b)
}

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestReportIsADirectoryWithAllFiles(t *testing.T) {
	dir := t.TempDir()
	path, err := Write(dir, stuck())
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "hang-job_7_x-1790000000-1.2.3"), path)
	require.Equal(t, []string{NativeStacks, NativePicture, JSONFile, textFile, PythonStacks, PythonPicture, traceFile},
		names(t, path))
	link, err := os.Readlink(filepath.Join(dir, Latest))
	require.NoError(t, err)
	require.Equal(t, filepath.Base(path), link)

	again, err := Write(dir, stuck())
	require.NoError(t, err)
	require.Equal(t, path+"-2", again)
	require.Len(t, names(t, dir), 3, "nothing else is left")
	link, _ = os.Readlink(filepath.Join(dir, Latest))
	require.Equal(t, filepath.Base(again), link)

	require.Contains(t, read(t, path, PythonStacks), "\nmain@/job/train.py:12@0-2|3;step@/job/train.py:11@0-2|3;"+
		"load_batch@/job/train.py:10@2|0-1/3 1\n")
	require.Contains(t, read(t, path, NativeStacks), "futex_wait@libc.so.6@0-2|3 1\n")
	for _, picture := range []string{PythonPicture, NativePicture} {
		svg := read(t, path, picture)
		require.NoError(t, xml.Unmarshal([]byte(svg), new(struct{})))
		require.Contains(t, svg, "no data: 3")
	}
	require.True(t, json.Valid([]byte(read(t, path, traceFile))))
}

func TestTextSaysWhoAndWhere(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, stuck().WriteText(&b))
	lines := strings.Split(b.String(), "\n")
	require.Equal(t, `HANG job="job 7/x" epoch=1.2.3 step=200 in="all_reduce #246" seq=246 stuck=0-1 suspects=2 `+
		`reason=behind `+
		`node=gpu-07 at=/job/train.py:10 func=load_batch age=31s confidence=high no_data=3`, lines[0])
	require.Equal(t, stuck().Verdict.Line, lines[1])
	text := b.String()
	for _, want := range []string{
		"4 ranks on 2 nodes", "no data: ranks 3 (1)",
		"rank 2 (node 1 gpu-07, pid 12): asleep in load_batch at /job/train.py:10",
		"  2 ranks 0-1, S (sleeping)", "    all_reduce at /job/train.py:10\n    step at", "native: futex_wait at libc.so.6",
		"k: for 1m0s by 1", "3 ranks 0-2: all_reduce #246 of 0 started", "NCCL's RAS\n  gpu-07: one\n  two_[2J\n",
		"note: 1 of 2 nodes have not answered",
	} {
		require.Contains(t, text, want)
	}
	require.Less(t, strings.Index(text, "  rank 2, S"), strings.Index(text, "2 ranks 0-1"), "suspects first")

	healthy := stuck()
	healthy.Verdict = hang.Verdict{}
	b.Reset()
	require.NoError(t, healthy.WriteText(&b))
	require.True(t, strings.HasPrefix(b.String(), `STACKS job="job 7/x"`), b.String())
	require.NotContains(t, b.String(), "hung")
}

func TestJSONCanBeReadAgain(t *testing.T) {
	var b bytes.Buffer
	c := stuck()
	printed := stuck()
	printed.Evidence[0].Log = "password"
	require.NoError(t, printed.WriteJSON(&b))
	require.NotContains(t, b.String(), "password", "whoever may read a report may not read the logs")
	got, err := ReadJSON(&b)
	require.NoError(t, err)
	require.True(t, c.At.Equal(got.At))
	got.At = c.At
	require.Equal(t, c, got)
}

func TestJSONHasEqualProcessGroupsOnce(t *testing.T) {
	c := stuck()
	c.Evidence[1].Groups = append(c.Evidence[1].Groups, hang.Group{ID: 10, Name: "pair", Ranks: "1,3"})
	var b bytes.Buffer
	require.NoError(t, c.WriteJSON(&b))
	require.Equal(t, 1, strings.Count(b.String(), `"default_pg"`))
	got, err := ReadJSON(&b)
	require.NoError(t, err)
	require.Equal(t, c.Evidence, got.Evidence)
}

// What goes wrong on many ranks is one line.
func TestTextSaysWhatWentWrong(t *testing.T) {
	c := stuck()
	for r := range 200 {
		e := hang.Evidence{Worker: hang.Worker{Rank: 4 + r}, Error: fmt.Sprintf("cannot read: %d", r/100)}
		if r == 199 {
			e.Stacks = &hang.Stacks{Error: "it is\x1b[2J no Python"}
		}
		c.Evidence = append(c.Evidence, e)
	}
	var b bytes.Buffer
	require.NoError(t, c.WriteText(&b))
	require.Contains(t, b.String(), "100 ranks 4-103: cannot read: 0\n100 ranks 104-203: cannot read: 1\n")
	require.Contains(t, b.String(), "rank 203: its stacks: it is_[2J no Python\n")
}

func TestJSONHasEqualStacksOnce(t *testing.T) {
	c := stuck()
	for i := range 4000 {
		e := c.Evidence[0]
		e.Rank = 10 + i
		s := *e.Stacks
		e.Stacks = &s
		c.Evidence = append(c.Evidence, e)
	}
	var b bytes.Buffer
	require.NoError(t, c.WriteJSON(&b))
	require.Equal(t, 1, strings.Count(b.String(), `"func":"all_reduce"`))
	require.Equal(t, trace.MaxRanks, strings.Count(b.String(), `"step_times"`))
}

func TestDamagedJSONIsRefused(t *testing.T) {
	for _, text := range []string{
		``, `[]`, `{"ranks":[{"rank":1,"stacks":{"threads":[{"tid":1,"python":3}]}}]}`,
		`{"ranks":[{"stacks":{"threads":[{"native":-1}]}}]}`, `{"world":{"nodes":[{"slots":2000000000}]}}`,
		`{"world":{"nodes":[{"slots":-1}]}}`,
	} {
		_, err := ReadJSON(strings.NewReader(text))
		require.Error(t, err, text)
	}
}

func FuzzReadJSON(f *testing.F) {
	var b bytes.Buffer
	require.NoError(f, stuck().WriteJSON(&b))
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ReadJSON(bytes.NewReader(b))
		if err != nil || c.World.Ranks().Len() > 1000 {
			return
		}
		var out bytes.Buffer
		require.NoError(t, c.WriteText(&out))
		out.Reset()
		require.NoError(t, c.writePicture(&out, false))
		require.NoError(t, xml.Unmarshal(out.Bytes(), new(struct{})))
	})
}

// What is in the way of a report is neither followed nor overwritten.
func TestNothingInTheWayIsOverwritten(t *testing.T) {
	dir := t.TempDir()
	c := stuck()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "precious"), []byte("x"), 0o600))
	require.NoError(t, os.Symlink("precious", filepath.Join(dir, c.name())))
	staged := fmt.Sprintf(".%s.%d", c.name(), os.Getpid())
	require.NoError(t, os.Symlink("/nowhere", filepath.Join(dir, staged)))
	path, err := Write(dir, c)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, c.name()+"-2"), path)
	require.Equal(t, "x", read(t, dir, "precious"))

	require.NoError(t, os.Remove(filepath.Join(dir, Latest)))
	require.NoError(t, os.WriteFile(filepath.Join(dir, Latest), []byte("mine"), 0o600))
	_, err = Write(dir, c)
	require.NoError(t, err)
	require.Equal(t, "mine", read(t, dir, Latest))
}

func TestMergedStacksReplaceWhatHasTheirNames(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "precious"), []byte("x"), 0o600))
	require.NoError(t, os.Symlink("precious", filepath.Join(dir, PythonStacks)))
	require.NoError(t, WriteStacks(dir, stuck()))
	require.Equal(t, []string{NativeStacks, NativePicture, "precious", PythonStacks, PythonPicture}, names(t, dir))
	require.Equal(t, "x", read(t, dir, "precious"))
	require.Contains(t, read(t, dir, PythonStacks), "load_batch")
}

func TestAReportThatCannotBeWrittenLeavesNothing(t *testing.T) {
	_, err := Write(filepath.Join(t.TempDir(), "none"), stuck())
	require.ErrorContains(t, err, "none")
	if os.Getuid() == 0 {
		t.Skip("SKIPPED: " + t.Name() + " IS NOT RUN: root may write everywhere")
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o500))
	_, err = Write(dir, stuck())
	require.Error(t, err)
	require.Empty(t, names(t, dir))
}

func TestWhereReportsBelong(t *testing.T) {
	base := t.TempDir()
	t.Setenv("TMPDIR", filepath.Join(base, "tmp"))
	fallbacks := tempdir.Fallbacks
	tempdir.Fallbacks = nil
	t.Cleanup(func() { tempdir.Fallbacks = fallbacks })
	require.NoError(t, os.Mkdir(filepath.Join(base, "tmp"), 0o777))
	file := filepath.Join(base, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	timeline, logs, named := filepath.Join(base, "timeline"), filepath.Join(base, "logs"), filepath.Join(base, "named",
		"deep")
	env := func(v string) func(string) (string, bool) {
		return func(k string) (string, bool) { return v, v != "" && k == TimelinePath }
	}
	private := filepath.Join(base, "tmp", fmt.Sprintf("dlrover-hang-%d", os.Getuid()))
	for _, step := range []struct {
		env, timeline, logs, want, skipped string
	}{
		{"", timeline, "", private, ""},
		{"", timeline, logs, logs, ""},
		{named, base, logs, named, ""},
		{"", base, logs, base, ""},
		{filepath.Join(file, "x"), timeline, logs, logs, "XPU_TIMER_TIMELINE_PATH.*not a directory"},
		{file, timeline, "", private, "XPU_TIMER_TIMELINE_PATH"},
		{"", timeline, file, private, "the directory of the logs"},
	} {
		got, skipped := choose(env(step.env), step.timeline, "", step.logs)
		require.Equal(t, step.want, got)
		if step.skipped == "" {
			require.Empty(t, skipped)
			continue
		}
		require.Len(t, skipped, 1)
		require.Regexp(t, step.skipped, skipped[0])
	}
	home := filepath.Join(base, "home", "timeline")
	got, skipped := choose(env(""), timeline, home, logs)
	require.Equal(t, home, got)
	require.Empty(t, skipped)
	require.DirExists(t, home, "xpu_timer is meant")
	got, skipped = choose(env(""), timeline, filepath.Join(file, "timeline"), logs)
	require.Equal(t, logs, got)
	require.ErrorContains(t, skipped[0], "no reports in xpu_timer's directory: mkdir "+file+": not a directory")
	require.NoError(t, os.Chmod(private, 0o777))
	_, skipped = choose(env(""), timeline, "", "")
	require.Len(t, skipped, 1)
	require.NoError(t, os.Remove(private))
	require.NoError(t, os.Symlink(base, private))
	got, skipped = choose(env(""), timeline, "", "")
	require.Empty(t, got)
	require.ErrorContains(t, skipped[0], "nobody else may write")
}

func TestDefaultOfXPUTimer(t *testing.T) {
	env := func(vars map[string]string) func(string) (string, bool) {
		return func(k string) (string, bool) { v, ok := vars[k]; return v, ok }
	}
	home := map[string]string{"HOME": "/home/u"}
	require.Empty(t, Default(env(home), false))
	require.Empty(t, Default(env(map[string]string{"HOME": "/home/u", TimelinePath: "/out"}), true))
	if os.Geteuid() == 0 {
		require.Equal(t, "/root/timeline", Default(env(home), true))
		return
	}
	require.Equal(t, "/home/u/timeline", Default(env(home), true))
	require.Empty(t, Default(env(map[string]string{"HOME": "."}), true))
}

// A reader of the directory finds complete files only.
func TestFilesOfAnUmaskedProcess(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	dir := t.TempDir()
	path, err := Write(dir, stuck())
	require.NoError(t, err)
	info, err := os.Stat(filepath.Join(path, textFile))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
}
