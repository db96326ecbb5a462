package xpu

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/merge"
)

// dump is a file as xpu_timer's dump driver writes it.
func dump() message {
	minus := int64(-1)
	native := message{}.number(1, 1142).text(2, "python").
		within(3, message{}.text(1, "futex_wait").text(2, "??").text(3, "#0 0x1 in futex_wait ()")).
		within(3, message{}.text(1, "main").text(2, "/src/Programs/python.c:15"))
	other := message{}.number(1, 1150).within(3, message{}.text(1, "clone").text(2, "/usr/lib64/libc.so.6"))
	python := message{}.number(1, 1142).number(2, 139620998182656).text(3, "MainThread").number(4, 1142).
		number(5, 1).number(6, 1).
		within(7, message{}.text(1, "all_reduce").text(2, "dist.py:7").text(3, "unknown")).
		within(7, message{}.text(1, "<module>").text(2, "train.py:121"))
	return message{}.within(1, native).within(1, other).within(2, python).number(3, 1142).number(4, uint64(minus)).
		text(5, "raw output").within(9, message{}.number(1, 1)).text(11, "S (sleeping)").number(77, 1)
}

func TestParse(t *testing.T) {
	e, err := parseFile(dump())
	require.NoError(t, err)
	require.Equal(t, hang.Evidence{
		Worker:  hang.Worker{Rank: -1, PID: 1142},
		Samples: []hang.Sample{{Proc: hang.Proc{State: 'S'}}},
		Stacks: &hang.Stacks{Threads: []hang.Thread{
			{TID: 1142, Name: "MainThread", Main: true, GIL: true, Python: []hang.Frame{
				{Func: "all_reduce", File: "dist.py", Line: 7}, {Func: "<module>", File: "train.py", Line: 121},
			}},
			{TID: 1142, Name: "python", Main: true, Native: []hang.Frame{
				{Func: "futex_wait", File: "??"}, {Func: "main", File: "/src/Programs/python.c", Line: 15},
			}},
			{TID: 1150, Native: []hang.Frame{{Func: "clone", File: "/usr/lib64/libc.so.6"}}},
		}},
	}, e)
}

func TestWhatToolsComplainedAboutIsKept(t *testing.T) {
	e, err := parseFile(message{}.text(6, "pstack: no such process\n").text(8, "py-spy: denied"))
	require.NoError(t, err)
	require.Equal(t, "pstack: no such process\n\npy-spy: denied", e.Stacks.Error)
	require.Empty(t, e.Samples)
}

func TestSourcesCanBePutTogetherAgain(t *testing.T) {
	for _, s := range []string{"a.py:12", "a.py", "a.py:012", "a.py:", ":3", "a:b:7", "a.py:-1",
		"a.py:99999999999999999999", ""} {
		file, line := source(s)
		require.Equal(t, s, hang.Frame{File: file, Line: line}.Source())
	}
}

func TestWhatIsNoMessageIsRefused(t *testing.T) {
	for _, b := range []message{
		{0xff}, {0x08}, {0x0a, 0x05, 1}, {0x0b}, {0x00, 0x00}, {0x0d, 1}, {0x09, 1}, {0x0a, 0x02, 0x0a, 0x09},
		message{}.within(2, message{}.within(7, message{0x0a})),
	} {
		_, err := parseFile(b)
		require.Error(t, err, "%v", []byte(b))
	}
	var many message
	for range maxThreads + 1 {
		many = many.within(1, message{0x50, 0})
	}
	_, err := parseFile(many)
	require.ErrorContains(t, err, "4096 threads")
}

func TestDeepStacksAreCut(t *testing.T) {
	var deep message
	for i := range maxFrames + 5 {
		deep = deep.within(3, message{}.text(1, fmt.Sprintf("f%d", i)))
	}
	e, err := parseFile(message{}.within(1, deep))
	require.NoError(t, err)
	require.Len(t, e.Stacks.Threads[0].Native, maxFrames)
	require.Equal(t, "f0", e.Stacks.Threads[0].Native[0].Func, "the innermost are kept")
}

// What is written is read again, and looks the same to who merges it.
func TestFormat(t *testing.T) {
	lead := hang.Thread{TID: 1150, Name: "trainer", Main: true, State: 'R', Python: []hang.Frame{{Func: "step",
		File: "t.py", Line: 3}, {}}}
	main := hang.Thread{TID: 1142, Name: "python3", GIL: true, State: 'S',
		Python: []hang.Frame{{Func: "join", File: "threading.py", Line: 1}},
		Native: []hang.Frame{{Func: "futex_wait", File: "libc.so.6"}, {Func: "evil\xff", File: "main.c", Line: 15}}}
	e := hang.Evidence{Worker: hang.Worker{Rank: 3, PID: 1142}, Error: "late", Samples: []hang.Sample{
		{Proc: hang.Proc{State: 'R'}}, {Proc: hang.Proc{State: 'D'}}},
		Stacks: &hang.Stacks{Error: "not all", Threads: []hang.Thread{lead, main, {TID: 1151, Name: "idle"}}}}
	got, err := parseFile(Format(e))
	require.NoError(t, err)
	unknown := []hang.Frame{{Func: "step", File: "t.py", Line: 3}, {Func: "??", File: "??"}}
	require.Equal(t, hang.Evidence{
		Worker:  hang.Worker{Rank: 3, PID: 1142},
		Samples: []hang.Sample{{Proc: hang.Proc{State: 'D'}}},
		Stacks: &hang.Stacks{Error: "not all\nlate", Threads: []hang.Thread{
			{TID: 1150, Name: "trainer", Python: unknown},
			{TID: 1142, Name: mainThread, Main: true, GIL: true, Python: main.Python},
			{TID: 1142, Name: "python3", Main: true, Native: []hang.Frame{{Func: "futex_wait", File: "libc.so.6"},
				{Func: "evil\ufffd", File: "main.c", Line: 15}}},
		}},
	}, got)
	for _, native := range []bool{false, true} {
		o := merge.Options{Native: native, Lines: true, States: true}
		world := hang.World{Nodes: []hang.WorldNode{{Slots: 8}}}
		var want, have strings.Builder
		_, _ = merge.Stacks(world, []hang.Evidence{e}, o).Folded(&want)
		_, _ = merge.Stacks(world, []hang.Evidence{got}, o).Folded(&have)
		require.Equal(t, want.String(), have.String())
	}
	require.Equal(t, "00003-00008.stacktrace", Name(3, 8))
	require.Equal(t, "123456-200000.stacktrace", Name(123456, 200000))
}

// A rank of which nothing is known has no file, one that could not be read says why.
func TestFormatOfLittle(t *testing.T) {
	require.Nil(t, Format(hang.Evidence{Worker: hang.Worker{Rank: 1, PID: 7}, Stacks: &hang.Stacks{}}))
	e, err := parseFile(Format(hang.Evidence{Worker: hang.Worker{Rank: 1, PID: 7}, Error: "the process is gone"}))
	require.NoError(t, err)
	require.Equal(t, "the process is gone", e.Stacks.Error)
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(dump()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, err := parseFile(b); err == nil {
			e.Rank = 0
			merge.Stacks(hang.World{}, []hang.Evidence{e}, merge.Options{Native: true, States: true})
			_, err := parseFile(Format(e))
			require.NoError(t, err)
		}
	})
}

func put(t *testing.T, dir, name string, b []byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), b, 0o600))
}

func TestRead(t *testing.T) {
	dir := t.TempDir()
	for _, r := range []int{0, 2, 12345} {
		put(t, dir, fmt.Sprintf("%05d-20000.stacktrace", r), dump())
	}
	put(t, dir, "00001-20000.stacktrace", []byte{0xff})
	put(t, dir, "20000-20000.stacktrace", dump())
	put(t, dir, "x-\x1b8.stacktrace", dump())
	put(t, dir, "00000-99999999.stacktrace", dump())
	put(t, dir, "other.txt", nil)
	put(t, dir, "secret", dump())
	require.NoError(t, os.Symlink("secret", filepath.Join(dir, "00003-20000.stacktrace")))
	require.NoError(t, syscall.Mkfifo(filepath.Join(dir, "00004-20000.stacktrace"), 0o600))
	s, err := Read(dir)
	require.NoError(t, err)
	require.Equal(t, 20000, s.World.Ranks().Len())
	require.Len(t, s.Evidence, 3)
	require.Equal(t, []int{0, 2, 12345}, []int{s.Evidence[0].Rank, s.Evidence[1].Rank, s.Evidence[2].Rank})
	notes := strings.Join(s.Notes, "\n")
	for _, want := range []string{
		"00001-20000.stacktrace: no message of protocol buffers",
		`"20000-20000.stacktrace": a world of 20000 has no rank 20000`,
		`"x-\x1b8.stacktrace": the name is not <rank>-<world size>`, "the world size is above 1048576",
		"00003-20000.stacktrace: a link, which is not followed here", "00004-20000.stacktrace: not a regular file",
	} {
		require.Contains(t, notes, want)
	}
}

func TestFilesOfAnotherHang(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	for name, age := range map[string]time.Duration{
		"00000-00002.stacktrace": 0, "00001-00002.stacktrace": time.Hour, "00003-00008.stacktrace": 2 * time.Hour,
	} {
		put(t, dir, name, dump())
		require.NoError(t, os.Chtimes(filepath.Join(dir, name), now, now.Add(-age)))
	}
	s, err := Read(dir)
	require.NoError(t, err)
	require.Equal(t, 2, s.World.Ranks().Len())
	require.Len(t, s.Evidence, 2)
	require.Equal(t, []string{
		"1 files are of a world of another size than 2, that of the newest: left out",
		"00001-00002.stacktrace is 1h0m0s older than 00000-00002.stacktrace: they may be of different hangs",
	}, s.Notes)
}

func TestNothingToRead(t *testing.T) {
	dir := t.TempDir()
	_, err := Read(dir)
	require.ErrorIs(t, err, ErrNone)
	put(t, dir, "00000-00002.stacktrace", []byte{1})
	_, err = Read(dir)
	require.ErrorContains(t, err, "none of the files can be read")
	_, err = Read(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}
