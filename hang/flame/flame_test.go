package flame

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/merge"
	"dlrover-run/hang/rankset"
)

// drawn is what a picture holds.
type drawn struct {
	Texts  []string `xml:"text"`
	Groups []struct {
		Boxes []drawnBox `xml:"g"`
	} `xml:"g"`
}

type drawnBox struct {
	Class string `xml:"class,attr"`
	Title string `xml:"title"`
	Text  string `xml:"text"`
	Rect  struct {
		X     float64 `xml:"x,attr"`
		Y     float64 `xml:"y,attr"`
		Width float64 `xml:"width,attr"`
		Fill  string  `xml:"fill,attr"`
	} `xml:"rect"`
}

func (d drawn) boxes() (out []drawnBox) {
	for _, g := range d.Groups {
		out = append(out, g.Boxes...)
	}
	return out
}

// find returns the box of a function.
func (d drawn) find(t *testing.T, function string) drawnBox {
	t.Helper()
	boxes := d.boxes()
	i := slices.IndexFunc(boxes, func(b drawnBox) bool { return strings.HasPrefix(b.Title, function+"@") })
	require.GreaterOrEqual(t, i, 0, function)
	return boxes[i]
}

func draw(t *testing.T, p Picture) (drawn, string) {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, SVG(&b, p))
	var d drawn
	require.NoError(t, xml.Unmarshal(b.Bytes(), &d))
	require.Less(t, b.Len(), maxSize)
	return d, b.String()
}

// evidence is that of ranks in these functions, the outermost first.
func evidence(stacks ...string) (ev []hang.Evidence) {
	for i, s := range stacks {
		var frames []hang.Frame
		for _, f := range strings.Fields(s) {
			frames = append([]hang.Frame{{Func: f, File: "t.py", Line: 3}}, frames...)
		}
		ev = append(ev, hang.Evidence{
			Worker: hang.Worker{Rank: i},
			Stacks: &hang.Stacks{Threads: []hang.Thread{{Main: true, Python: frames}}},
		})
	}
	return ev
}

func world(n int) hang.World { return hang.World{Nodes: []hang.WorldNode{{Slots: n}}} }

func picture(ev []hang.Evidence) Picture {
	tree := merge.Stacks(world(len(ev)), ev, merge.Options{})
	return Picture{Title: "job", Sections: []Section{{"main threads", tree}}, NoData: tree.NoData}
}

func TestWidthIsRanksAndSuspectsComeFirst(t *testing.T) {
	p := picture(append(evidence("main b", "main b", "main a", "main z x"), hang.Evidence{Worker: hang.Worker{Rank: 4}}))
	p.Suspects = rankset.Of(3)
	d, _ := draw(t, p)
	main, a, b, z, x := d.find(t, "main"), d.find(t, "a"), d.find(t, "b"), d.find(t, "z"), d.find(t, "x")
	require.InDelta(t, 1580, main.Rect.Width, 0.1)
	require.InDelta(t, 395, a.Rect.Width, 0.1)
	require.InDelta(t, 790, b.Rect.Width, 0.1)
	require.Less(t, z.Rect.X, a.Rect.X, "the suspect's function is the first")
	require.Less(t, a.Rect.X, b.Rect.X, "then by name")
	require.InDelta(t, z.Rect.X, x.Rect.X, 0.01)
	require.InDelta(t, z.Rect.Y-rowHeight, x.Rect.Y, 0.01, "what was called is above")
	require.Equal(t, []string{"", "s", "s", "", ""}, []string{main.Class, z.Class, x.Class, a.Class, b.Class})
	require.Equal(t, "b@t.py:3@0-1|2-4 (2 ranks, 50.00%): 0-1; not here: 2-3; no data: 4", b.Title)
	require.Equal(t, "b@t.py:3@0-1|2-4", b.Text)
	require.Contains(t, d.Texts, "no data: 4 (1 rank)")
}

// The names of xpu_timer's pictures: leak has the ranks that have left nothing, too.
func TestNamesAreThoseOfTheViewer(t *testing.T) {
	var ev []hang.Evidence
	for _, r := range []int{1, 2, 3, 9, 11, 12, 13, 14, 15} {
		e := evidence("main")[0]
		e.Rank = r
		ev = append(ev, e)
	}
	tree := merge.Stacks(world(16), ev, merge.Options{})
	d, _ := draw(t, Picture{Title: "job", Sections: []Section{{"main threads", tree}}, NoData: tree.NoData})
	main := d.find(t, "main")
	require.Equal(t, "main@t.py:3@1-3/9/11-15|0/4-8/10", main.Text)
	require.Equal(t, "main@t.py:3@1-3/9/11-15|0/4-8/10 (9 ranks, 100.00%): 1-3,9,11-15; no data: 0,4-8,10", main.Title)
	all := rankset.Of()
	for r := range 100 {
		all.Add(2 * r)
	}
	l := layout{all: counts(all)}
	require.Equal(t, "0/2 and 48 more|100/102 and 48 more", l.folded(&merge.Node{Ranks: all[:50]}, 2))
}

// The ranks are what a person looks for: a long path does not push them out of the box.
func TestLabelsKeepTheRanks(t *testing.T) {
	const file = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py:1541"
	for _, c := range []struct {
		name, source string
		fits         int
		want         string
	}{
		{"all_reduce", file, 99, "all_reduce@" + file + "@0-1/3|2"},
		{"all_reduce", file, 87, "all_reduce@../python3/dist-packages/torch/distributed/distributed_c10d.py:1541@0-1/3|2"},
		{"all_reduce", file, 48, "all_reduce@../distributed_c10d.py:1541@0-1/3|2"},
		{"all_reduce", file, 30, "all_reduce@0-1/3|2"},
		{"all_reduce", file, 14, "all_..@0-1/3|2"},
		{"all_reduce", file, 13, "all_r..@0-1/3"},
		{"all_reduce", file, 8, "all_re.."},
		{"f", file, 9, "f@0-1/3|2"},
		{"f", file, 7, "f@0-1/3"},
		{"f", "", 20, "f@0-1/3|2"},
		{"größer", "ärmer/größer.py", 29, "größer@../größer.py@0-1/3|2"},
	} {
		got := shorten(c.name, c.source, "@0-1/3|2", c.fits)
		require.Equal(t, c.want, got)
		require.LessOrEqual(t, utf8.RuneCountInString(got), c.fits)
	}
}

// What a search of the stack has found is drawn as that, unless another stack has it for certain.
func TestApproximateFramesAreDrawnAsSuch(t *testing.T) {
	ev := evidence("main search wait", "main wait")
	for i := range ev {
		th := &ev[i].Stacks.Threads[0]
		th.Native, th.Python, th.Approximate = th.Python, nil, i == 0
	}
	p := picture(ev)
	p.Sections[0].Tree = merge.Stacks(world(2), ev, merge.Options{Native: true})
	p.Suspects = rankset.Of(0)
	d, text := draw(t, p)
	require.Equal(t, []string{"", "s a"}, []string{d.find(t, "main").Class, d.find(t, "search").Class})
	require.Equal(t, 2, strings.Count(text, "<title>wait@"))
	require.NotContains(t, text, `class="a"`, "the instruction that a thread is at is known")
	require.Contains(t, text, "Dashed: approximate")
	_, text = draw(t, picture(evidence("main")))
	require.NotContains(t, text, "Dashed")
	require.NotContains(t, text, "Red frame")
	require.Contains(t, text, "function@file:line@stuck|leak")
}

func TestNothingWritesMarkup(t *testing.T) {
	ev := evidence("main")
	ev[0].Stacks.Threads[0].Python[0] = hang.Frame{
		Func: "]]></title><script>alert(1)</script>", File: "a&b\"'\x1b\x00\uffff\xff<x>", Line: 1,
	}
	p := picture(ev)
	p.Title, p.Subtitle = "<b>&\x01", "]]><i>"
	d, text := draw(t, p)
	require.Equal(t, 1, strings.Count(text, "<script>"))
	require.NotContains(t, text, "<i>")
	require.NotContains(t, text, "<x>")
	require.Contains(t, d.boxes()[1].Title, "]]></title><script>alert(1)</script>@a&b\"'")
}

func TestColoursAreThoseOfTheViewer(t *testing.T) {
	hue := func(f hang.Frame, state bool) string {
		var r, g, b int
		_, err := fmt.Sscanf(colour(&merge.Node{Frame: f, State: state}), "#%02x%02x%02x", &r, &g, &b)
		require.NoError(t, err)
		switch {
		case g > r+50 && g > b+50:
			return "green"
		case r > b+50 && g > b+50:
			return "yellow"
		case g > r+50 && b > r+50:
			return "aqua"
		case r > g+50 && b > g+50:
			return "purple"
		}
		return "red"
	}
	for f, want := range map[hang.Frame]string{
		{Func: "c10d::wait", File: "/usr/lib/torch/libc10.so"}:  "green",
		{Func: "ncclAllReduce", File: "x"}:                      "green",
		{Func: "std::mutex::lock", File: "x"}:                   "yellow",
		{Func: "load", File: "data.py", Line: 3}:                "aqua",
		{Func: "PyEval_EvalFrame", File: "/src/Python/ceval.c"}: "aqua",
		{Func: "main", File: "/src/main.c"}:                     "red",
		{Func: "wait", File: "/venv/torch/distributed/c10d.py"}: "green",
	} {
		require.Equal(t, want, hue(f, false), f)
	}
	require.Equal(t, "purple", hue(hang.Frame{Func: "State", File: "S (sleeping)"}, true))
}

func TestAPictureWithoutStacksSaysSo(t *testing.T) {
	d, _ := draw(t, picture([]hang.Evidence{{}}))
	require.Contains(t, d.Texts, "no stacks were collected")
}

// wild are ranks of which no two do the same.
func wild(ranks int) (ev []hang.Evidence) {
	rnd := rand.New(rand.NewPCG(7, 7))
	for r := range ranks {
		s := &hang.Stacks{}
		for th := range 8 {
			var frames []hang.Frame
			for f := range 25 {
				name := strings.Repeat("function<&>", rnd.IntN(4)+1) + strconv.Itoa(f)
				if f < 6 {
					name += strconv.Itoa(rnd.IntN(12))
				}
				frames = append(frames, hang.Frame{Func: name, File: "/a/very/long/path/of/some/package/module.py", Line: f + 1})
			}
			s.Threads = append(s.Threads, hang.Thread{Main: th == 0, Python: frames})
		}
		ev = append(ev, hang.Evidence{Worker: hang.Worker{Rank: r}, Stacks: s})
	}
	return ev
}

// Sixteen thousand ranks without any order, of which every second one is silent.
func TestPicturesStaySmall(t *testing.T) {
	ranks := 16384
	if testing.Short() {
		ranks = 200
	}
	ev := wild(ranks)
	for i := range ev {
		ev[i].Rank *= 2
	}
	w := world(2 * ranks)
	section := func(main bool) Section {
		o := merge.Options{Threads: func(t hang.Thread) bool { return t.Main == main }}
		return Section{"threads", merge.Stacks(w, ev, o)}
	}
	p := Picture{Title: "job", Sections: []Section{section(true), section(false)}, Suspects: rankset.Of(10, ranks)}
	p.NoData = p.Sections[0].Tree.NoData
	runtime.GC() // that of what is above is not the picture's
	before := cpu(t)
	require.NoError(t, SVG(io.Discard, p))
	if !testing.Short() {
		require.Less(t, cpu(t)-before, time.Second)
	}
	d, text := draw(t, p)
	require.Regexp(t, `\d+ functions that are too narrow are left out`, d.Texts[len(d.Texts)-1])
	require.Greater(t, len(text), maxSize/2, "the room is used")
	standing(t, d)
	for _, rank := range []int{10, ranks} {
		its := regexp.MustCompile(fmt.Sprintf(`\(1 rank, .*: %d;`, rank))
		require.True(t, slices.ContainsFunc(d.boxes(), func(b drawnBox) bool { return its.MatchString(b.Title) }),
			"the suspects are there, narrow as they are")
	}
}

// standing: every box has one below it that is as wide.
func standing(t *testing.T, d drawn) {
	t.Helper()
	for _, g := range d.Groups {
		rows := map[float64][]drawnBox{}
		for _, b := range g.Boxes {
			rows[b.Rect.Y] = append(rows[b.Rect.Y], b)
		}
		for _, b := range g.Boxes[1:] {
			require.True(t, slices.ContainsFunc(rows[b.Rect.Y+rowHeight], func(below drawnBox) bool {
				return below.Rect.X <= b.Rect.X+0.02 && b.Rect.X+b.Rect.Width <= below.Rect.X+below.Rect.Width+0.15
			}), b.Title)
		}
	}
}

// cpu is what this process has used.
func cpu(t *testing.T) time.Duration {
	var r syscall.Rusage
	require.NoError(t, syscall.Getrusage(syscall.RUSAGE_SELF, &r))
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func BenchmarkPictureOf16384Ranks(b *testing.B) {
	ev := wild(16384)
	w := world(16384)
	for b.Loop() {
		p := Picture{Sections: []Section{{"all", merge.Stacks(w, ev, merge.Options{})}}, Suspects: rankset.Of(7)}
		var out bytes.Buffer
		require.NoError(b, SVG(&out, p))
		b.ReportMetric(float64(out.Len()), "bytes")
	}
}
