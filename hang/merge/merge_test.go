package merge

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
	"dlrover-run/internal/testkit"
)

// stack is a Python stack written from the outside in, as "main@t.py:5 step@t.py:9".
func stack(text string) (frames []hang.Frame) {
	for _, word := range strings.Fields(text) {
		name, at, _ := strings.Cut(word, "@")
		f := hang.Frame{Func: name, File: at}
		if file, line, ok := strings.Cut(at, ":"); ok {
			f.File = file
			_, _ = fmt.Sscan(line, &f.Line)
		}
		frames = append([]hang.Frame{f}, frames...)
	}
	return frames
}

// rank is evidence of one: its main thread, then others.
func rank(rank int, state byte, threads ...string) hang.Evidence {
	e := hang.Evidence{Worker: hang.Worker{Rank: rank}, Node: "n", Stacks: &hang.Stacks{}}
	if state != 0 {
		e.Samples = []hang.Sample{{Proc: hang.Proc{State: state}}}
	}
	for i, t := range threads {
		e.Stacks.Threads = append(e.Stacks.Threads, hang.Thread{Main: i == 0, Python: stack(t)})
	}
	return e
}

func world(ranks int) hang.World {
	return hang.World{Nodes: []hang.WorldNode{{Name: "n", Slots: ranks}}}
}

func folded(t *testing.T, tree *Tree) string {
	t.Helper()
	var b bytes.Buffer
	cut, err := tree.Folded(&b)
	require.NoError(t, err)
	require.False(t, cut)
	return b.String()
}

// What xpu_timer's own viewer writes of the same stacks.
func TestFoldedStacksAreThoseOfTheViewer(t *testing.T) {
	ev := []hang.Evidence{
		rank(0, 'R', "main@t.py:5 step@t.py:9 wait@d.py:1", "run@th.py:2"),
		rank(1, 'S', "main@t.py:5 step@t.py:9", "run@th.py:2"),
		rank(2, 'S', "main@t.py:6 load@l.py:3", "run@th.py:2"),
		rank(3, 'S', "main@t.py:5 step@t.py:9 wait@d.py:1", "run@th.py:2", "run@th.py:2 x.lto_priv.0@y z@z"),
	}
	tree := Stacks(world(4), ev, Options{Lines: true, States: true})
	require.Equal(t, strings.Join([]string{
		"State@R (running)@0|1-3 1",
		"main@t.py:5@0-1/3|2;step@t.py:9@0-1/3|2 1",
		"main@t.py:5@0-1/3|2;step@t.py:9@0-1/3|2;wait@d.py:1@0/3|1-2 1",
		"run@th.py:2@0-3| 1",
		"State@S (sleeping)@1-3|0 1",
		"main@t.py:6@2|0-1/3;load@l.py:3@2|0-1/3 1", "",
	}, "\n"), folded(t, tree))
	require.Empty(t, tree.NoData)
}

// As in xpu_timer's own files.
func TestRanksWithoutDataAreInLeak(t *testing.T) {
	dead := hang.Evidence{Worker: hang.Worker{Rank: 2}, Samples: []hang.Sample{{Proc: hang.Proc{State: 'D'}}},
		Stacks: &hang.Stacks{Error: "blocked"}}
	ev := []hang.Evidence{rank(0, 'S', "main@t.py:5"), {Worker: hang.Worker{Rank: 1}}, dead, rank(3, 'S', "other@t.py:5")}
	tree := Stacks(world(6), ev, Options{States: true})
	require.Equal(t, "State@S (sleeping)@0/3|1-2/4-5 1\nmain@t.py@0|1-5 1\n"+
		"State@D (disk sleep)@2|0-1/3-5 1\nother@t.py@3|0-2/4-5 1\n", folded(t, tree))
	require.Equal(t, "1-2,4-5", tree.NoData.String())
	require.Equal(t, "0,3", tree.Known.String())
}

// The example of xpu_timer's guide: seven of sixteen ranks have left a file.
func TestRanksAreFoldedAsInTheGuide(t *testing.T) {
	var ev []hang.Evidence
	for _, r := range []int{11, 1, 2, 3, 9, 12, 13, 14, 15} {
		ev = append(ev, rank(r, 0, "main@t.py:5"))
	}
	require.Equal(t, "main@t.py:5@1-3/9/11-15|0/4-8/10 1\n", folded(t, Stacks(world(16), ev, Options{Lines: true})))
}

func TestNamesCannotBreakTheFormat(t *testing.T) {
	e := rank(0, 0)
	e.Stacks.Threads = []hang.Thread{{Python: []hang.Frame{
		{Func: "evil;x 1\n", File: "\x1b]0;\u202efile\xff"}, {Line: 7}, {Func: "f"},
	}}}
	require.Equal(t, "f@??@0|;??@??:7@0|;evil:x 1_@_]0:_file\ufffd@0| 1\n",
		folded(t, Stacks(world(1), []hang.Evidence{e}, Options{Lines: true})))
}

func TestWithoutLinesRanksInOneFunctionAreTogether(t *testing.T) {
	ev := []hang.Evidence{rank(1, 0, "main@t.py:9"), rank(0, 0, "main@t.py:5"), rank(2, 0, "main@t.py:9")}
	tree := Stacks(world(3), ev, Options{})
	require.Len(t, tree.Roots, 1)
	n := tree.Roots[0]
	require.Equal(t, "0-2", n.Ranks.String())
	require.Equal(t, []int{5, 9}, n.Lines)
	require.Equal(t, 3, n.Stacks)
	require.Equal(t, 3, n.End)
}

func TestThreadsAndRanksAreChosen(t *testing.T) {
	ev := []hang.Evidence{rank(0, 0, "main@t.py", "help@h.py"), rank(1, 0, "main@t.py", "help@h.py"),
		rank(2, 0, "main@t.py")}
	tree := Stacks(world(4), ev, Options{
		Threads: func(t hang.Thread) bool { return !t.Main }, Ranks: func(r int) bool { return r > 0 },
	})
	require.Equal(t, "help@h.py@1|2-3 1\n", folded(t, tree))
	require.Equal(t, "2-3", tree.NoData.String())
}

// Many different functions below one are found by an index.
func TestManyChildren(t *testing.T) {
	var ev []hang.Evidence
	for i := range 300 {
		ev = append(ev, rank(i, 'S', fmt.Sprintf("main@t.py f%d@t.py", i%60)))
	}
	tree := Stacks(world(300), ev, Options{States: true})
	require.Len(t, tree.Roots, 2)
	main := tree.Roots[1]
	require.Len(t, main.Children, 60)
	for i, c := range main.Children {
		require.Equal(t, rankset.Of(i, i+60, i+120, i+180, i+240), c.Ranks)
	}
}

func TestRanksThatShareTheirStacksAreMergedAsOthers(t *testing.T) {
	var shared, apart []hang.Evidence
	one := rank(0, 'S', "main@t.py:5 wait@d.py:1", "run@th.py:2")
	for i := range 50 {
		e := one
		e.Rank = i
		shared = append(shared, e)
		apart = append(apart, rank(i, 'S', "main@t.py:5 wait@d.py:1", "run@th.py:2"))
	}
	o := Options{Lines: true, States: true}
	require.Equal(t, folded(t, Stacks(world(50), apart, o)), folded(t, Stacks(world(50), shared, o)))
	require.Equal(t, Groups(apart, false), Groups(shared, false))
}

func TestGroupsOfRanks(t *testing.T) {
	ev := []hang.Evidence{
		rank(3, 'R', "main@t.py:5 wait@d.py:1"), rank(0, 'S', "main@t.py:5 wait@d.py:1", "x@x"),
		rank(1, 'S', "main@t.py:8 wait@d.py:1"), rank(2, 'S', "main@t.py:5 load@l.py:3"), {Worker: hang.Worker{Rank: 4}},
	}
	ev[1].Samples[0].Page = &hang.Page{Phase: hang.PhaseTrain}
	groups := Groups(ev, false)
	require.Len(t, groups, 2)
	require.Equal(t, "0-1,3", groups[0].Ranks.String())
	require.Equal(t, "SR", groups[0].States)
	require.Equal(t, []hang.Phase{hang.PhaseTrain}, groups[0].Phases)
	require.Equal(t, []hang.Frame{{Func: "wait", File: "d.py", Line: 1}, {Func: "main", File: "t.py"}}, groups[0].Frames)
	require.Equal(t, 5, ev[1].Stacks.Threads[0].Python[1].Line, "the evidence is left alone")
	require.Equal(t, "2", groups[1].Ranks.String())
}

// Ranks without any order, in functions deeper than any program's: the text ends with a whole line.
func TestFoldedTextIsBounded(t *testing.T) {
	var ev []hang.Evidence
	for i := range 200 {
		ev = append(ev, rank(2*i, 'S', fmt.Sprintf("main@t.py step@t.py g%d@t.py", i)))
	}
	tree := Stacks(world(400), ev, Options{})
	var b bytes.Buffer
	cut, err := tree.folded(&b, 10_000)
	require.NoError(t, err)
	require.True(t, cut)
	require.LessOrEqual(t, b.Len(), 10_000)
	require.Greater(t, b.Len(), 5_000)
	require.True(t, strings.HasSuffix(b.String(), " 1\n"))
	require.True(t, strings.HasPrefix(folded(t, tree), b.String()))
}

func TestDeepStacksAreCut(t *testing.T) {
	var deep strings.Builder
	for i := range 2 * maxDepth {
		fmt.Fprintf(&deep, "f%d@t.py ", i)
	}
	text := folded(t, Stacks(world(1), []hang.Evidence{rank(0, 0, deep.String())}, Options{}))
	require.Equal(t, maxDepth-1, strings.Count(text, ";"))
	require.True(t, strings.HasPrefix(text, "f0@t.py@0|;f1@"), "from the outermost function on")
}

// many are ranks with eight threads of 25 frames each, of which only one rank in a thousand differs.
func many(ranks int) (ev []hang.Evidence) {
	for i := range ranks {
		e := hang.Evidence{Worker: hang.Worker{Rank: i}, Node: "n", Stacks: &hang.Stacks{},
			Samples: []hang.Sample{{Proc: hang.Proc{State: 'S'}}}}
		for th := range 8 {
			var frames []hang.Frame
			for f := range 25 {
				name := fmt.Sprintf("function_%d_%d", th, f)
				if f == 0 && i%1000 == 7 {
					name = "stuck"
				}
				file := "/opt/conda/lib/python3.11/site-packages/torch/module.py"
				frames = append(frames, hang.Frame{Func: name, File: file, Line: f})
			}
			e.Stacks.Threads = append(e.Stacks.Threads, hang.Thread{Main: th == 0, Python: frames})
		}
		ev = append(ev, e)
	}
	return ev
}

func BenchmarkMerge16384Ranks(b *testing.B) {
	ev, w := many(16384), world(16384)
	runtime.GC()
	for b.Loop() {
		Stacks(w, ev, Options{})
	}
}

func TestManyRanksAreMergedQuickly(t *testing.T) {
	testkit.Long(t, "it measures four million frames")
	ev, w := many(16384), world(16384)
	before := cpu(t)
	tree := Stacks(w, ev, Options{})
	require.Less(t, cpu(t)-before, 2*time.Second)
	require.Len(t, tree.Roots, 8)
}

// cpu is what this process has used.
func cpu(t *testing.T) time.Duration {
	var r syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &r))
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
