package hangs

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/hang/dump"
	"dlrover-run/hang/hangtell"
	"dlrover-run/hang/page/pagetest"
	"dlrover-run/hang/pystack"
	"dlrover-run/hang/report"
	"dlrover-run/hang/serve"
	"dlrover-run/hang/watch"
	"dlrover-run/hang/xpu"
	"dlrover-run/internal/app/run/feature/featuretest"
	"dlrover-run/internal/exposition"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
)

func TestPagesOfAnEpochEndWithIt(t *testing.T) {
	base := t.TempDir()
	p := newHangPages(base, slog.New(slog.DiscardHandler))
	require.Empty(t, p.dir())
	e := launcher.Epoch{Directive: launcher.Directive{EpochID: job.EpochID{Term: 7, Round: 1, Epoch: 2}}}
	p.begin(e)
	first := p.dir()
	require.Equal(t, "7.1.2", filepath.Base(first))
	info, err := os.Stat(first)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
	require.NoError(t, os.WriteFile(filepath.Join(first, "l0.page"), nil, 0o600))
	e.Directive.Epoch = 3
	p.begin(e)
	require.NotEqual(t, first, p.dir())
	require.NoDirExists(t, first)
	p.end()
	require.Empty(t, p.dir())
	p.remove()
	left, err := filepath.Glob(filepath.Join(base, "*", "*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// Steps are those of the worker that has made the most, and as old as the newest of any. The first one is remembered
// when no page has it any more. All ages grow on when the pages are gone.
func TestStepsOfPages(t *testing.T) {
	p := newHangPages(t.TempDir(), slog.New(slog.DiscardHandler))
	defer p.remove()
	p.begin(launcher.Epoch{})
	now := watch.Monotonic()
	ago := func(seconds int) time.Duration { return now - time.Duration(seconds)*time.Second }
	write := func(local, steps int, times ...time.Duration) {
		w := hang.Page{PID: 1, WorldSize: 2, Rank: local, Local: local, Steps: uint64(steps), StepTimes: times,
			Blocked: time.Duration(local)}
		if len(times) > 0 {
			w.LastStep = times[len(times)-1]
		}
		path := filepath.Join(p.dir(), fmt.Sprintf("l%d.page", local))
		require.NoError(t, os.WriteFile(path, pagetest.Bytes(w), 0o600))
	}
	require.Equal(t, job.Progress{}, p.progress())
	write(0, 0)
	require.Equal(t, job.Progress{Stepping: true}, p.progress())
	write(0, 2, ago(90), ago(60))
	write(1, 1, ago(50))
	p.mu.Lock()
	want := job.Progress{Step: 2, Stepping: true, Ran: 90 * time.Second, Idle: 50 * time.Second, Blocked: 1}
	require.Equal(t, want, p.progressLocked(now))
	p.mu.Unlock()
	write(0, 400, ago(20), ago(10))
	write(1, 399, ago(21), ago(11))
	p.end()
	got := p.progress()
	require.EqualValues(t, 400, got.Step)
	require.WithinRange(t, time.Time{}.Add(got.Ran), time.Time{}.Add(90*time.Second), time.Time{}.Add(120*time.Second))
	require.Equal(t, 80*time.Second, got.Ran-got.Idle)
	time.Sleep(time.Millisecond)
	require.Greater(t, p.progress().Idle, got.Idle)
}

// Off means off, and outside means outside: no pages, no variables.
func TestPagesThatNobodyWants(t *testing.T) {
	var p *hangPages
	p.begin(launcher.Epoch{})
	require.Empty(t, p.dir())
	p.end()
	p.remove()
	require.Nil(t, (&hangs{}).environ())
	require.Nil(t, newHangPages("/nowhere/at/all", slog.New(slog.DiscardHandler)))
}

// A verdict comes as a notice, and as the answer to a report; it is said once.
func TestVerdictsAreSaidOnce(t *testing.T) {
	var out strings.Builder
	m := newHangMetrics(jobJ())
	h := &hangs{log: slog.New(slog.NewTextHandler(&out, nil)), metrics: m}
	h.epoch.Place.GroupRank = 1 // not the one that writes files
	m.looked([]hang.Sample{{Worker: hang.Worker{Rank: 2, PID: 9}, At: time.Second}}, []hang.Suspicion{{Rank: 2}})
	a := hang.Ask{Seq: 5, Incident: 4, What: hang.TellVerdict, Line: "rank 2 hung\x1b[2J", Kind: hang.KindStopped,
		Suspects: []int{2}}
	body, err := json.Marshal(a)
	require.NoError(t, err)
	h.notice(hang.Topic, string(body))
	h.notice("log-level", "debug")
	h.hear(a)
	require.Equal(t, 1, strings.Count(out.String(), `level=WARN msg="hang: rank 2 hung`))
	require.NotContains(t, out.String(), "\x1b")
	require.Contains(t, scraped(m), `dlrover_hang_verdicts_total{kind="stopped"} 1`)
	require.Contains(t, scraped(m), `dlrover_hang_state{rank="2"} 2`)
	a.Seq, a.Decided, a.Again = 6, true, true
	h.hear(a)
	require.Equal(t, 1, strings.Count(out.String(), `level=ERROR msg="hang: rank 2 hung`), "it counts as a hang now")
	require.Contains(t, scraped(m), `XPU_TIMER_COMMON_HANG{rank="2",local_rank="0",ip="",pod_name="",job_name="j"} 1`)
	require.Contains(t, scraped(m), `dlrover_hang_state{rank="2"} 3`)
	require.Contains(t, scraped(m), `dlrover_hang_verdicts_total{kind="stopped"} 1`)
	h.hear(hang.Ask{Seq: 7, Incident: 4, What: hang.TellOver, Line: "they go on"})
	require.Contains(t, out.String(), "they go on")
	h.hear(hang.Ask{Seq: 8, Incident: 7, What: hang.TellOver, Line: "it was idle"})
	require.NotContains(t, out.String(), "it was idle", "nobody was told that it hangs")
	h.hear(hang.Ask{Seq: 3, Judge: 2, Incident: 9, What: hang.TellVerdict, Line: "rank 3 hung", Suspects: []int{3}})
	require.Contains(t, out.String(), "rank 3 hung", "the clock of the next judge may be behind")
	h.hear(hang.Ask{Seq: 4, Judge: 2, Incident: 9, What: hang.TellOver, Line: "all go on"})
	m.looked([]hang.Sample{{Worker: hang.Worker{Rank: 2, PID: 9}, At: 2 * time.Second}}, nil)
	require.Contains(t, scraped(m), `dlrover_hang_state{rank="2"} 1`)
	require.Contains(t, scraped(m), "dlrover_hang_false_alarms_total 1")
	h.notice(hang.Topic, "{")
	require.Contains(t, out.String(), "the same version")
}

// As with xpu_timer, where the kernel of each of them does not end.
func TestEveryRankOfAHangIsInTheMetric(t *testing.T) {
	m := newHangMetrics(jobJ())
	at := func(d time.Duration, steps ...uint64) (ss []hang.Sample) {
		for rank, n := range steps {
			s := hang.Sample{Worker: hang.Worker{Rank: rank, PID: 9 + rank}, At: d}
			if rank < 4 {
				s.Page = &hang.Page{PID: s.PID, Steps: n}
			}
			s.Proc.Switches, s.Proc.MainCPU = n*1000, time.Duration(n)*time.Second
			ss = append(ss, s)
		}
		return ss
	}
	still := func(want ...int) {
		t.Helper()
		text := scraped(m)
		for rank, n := range want {
			require.Regexp(t, fmt.Sprintf(`XPU_TIMER_COMMON_HANG\{rank="%d",[^}]*\} %d\n`, rank, n), text)
		}
	}
	m.looked(at(time.Second, 5, 5, 5, 5, 5), []hang.Suspicion{{Rank: 2}})
	told := hang.Ask{What: hang.TellVerdict, Suspects: []int{1}, Waiting: "0,4"}
	m.verdict(told)
	still(0, 0, 0, 0, 0)
	told.Decided = true
	m.verdict(told)
	still(1, 1, 1, 0, 1)
	require.Contains(t, scraped(m), `dlrover_hang_state{rank="1"} 3`)
	require.NotContains(t, scraped(m), `dlrover_hang_state{rank="0"} 3`, "whom to blame is told apart")
	m.looked(at(2*time.Second, 5, 5, 5, 6, 6), []hang.Suspicion{{Rank: 2}})
	still(1, 1, 1, 0, 1) // rank 4 has no page and waits by looking again and again
	m.looked(at(3*time.Second, 6, 6, 6, 7, 7), nil)
	still(0, 0, 0, 0, 1)
	m.over()
	still(0, 0, 0, 0, 0)
}

// sleeper is a Python that sleeps in a function load.
func sleeper(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("python3", "-c", "import time\ndef load():\n  print(flush=True)\n  time.sleep(1000)\nload()")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		return err == nil && strings.Contains(string(stat), ") S ")
	}, time.Minute, 5*time.Millisecond)
	return cmd.Process.Pid
}

func TestDumpsOnDemand(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("SKIPPED: DUMPS ON DEMAND ARE NOT TESTED: there is no python3")
	}
	h := &hangs{log: slog.New(slog.DiscardHandler), stacks: sync.OnceValue(pystack.New),
		node: &featuretest.Node{Of: *jobJ()}}
	h.xpuTimer = true
	place := job.Place{GroupRank: 1, GroupWorldSize: 2, RankBase: 2, WorldSize: 4}
	e := launcher.Epoch{Directive: launcher.Directive{EpochID: job.EpochID{Term: 1}, Place: place}}
	pids := []int{sleeper(t), sleeper(t)}
	h.attend(present{e, pids})
	dir := filepath.Join(t.TempDir(), "is", "made")
	all := dump.Answer{Run: "j", World: 4, Workers: []dump.Worker{{Rank: 2, PID: pids[0]}, {Rank: 3, PID: pids[1]}}}
	require.Equal(t, all, h.dump(t.Context(), dump.Request{}), "who is there")
	require.NoDirExists(t, dir)

	a := h.dump(t.Context(), dump.Request{Dir: dir, Ranks: []int{3}, Python: true})
	require.Equal(t, []string{filepath.Join(dir, "00003-00004.stacktrace")}, a.Files, a)
	s, err := xpu.Read(dir)
	require.NoError(t, err)
	require.Len(t, s.Evidence, 1)
	require.Equal(t, "load", s.Evidence[0].Stacks.Threads[0].Python[0].Func)
	require.Equal(t, byte('S'), s.Evidence[0].Samples[0].Proc.State)
	require.Len(t, s.Evidence[0].Stacks.Threads, 1, "native stacks are not wanted")

	t.Setenv(report.TimelinePath, filepath.Join(dir, "named"))
	a = h.dump(t.Context(), dump.Request{Native: true})
	require.Len(t, a.Files, 2, a)
	s, err = xpu.Read(filepath.Join(dir, "named"))
	require.NoError(t, err)
	for _, e := range s.Evidence {
		require.NotEmpty(t, e.Stacks.Threads[0].Native)
		require.Empty(t, e.Stacks.Threads[0].Python)
	}

	for want, r := range map[string]dump.Request{
		"is not an absolute path": {Dir: "x", Python: true}, "none of these workers": {Ranks: []int{0}, Python: true},
		"not a directory": {Dir: "/dev/null/x", Python: true},
	} {
		require.Contains(t, h.dump(t.Context(), r).Error, want)
	}
	later := e
	later.Term = 2
	h.leave(later)
	require.Equal(t, all, h.dump(t.Context(), dump.Request{}), "another epoch has ended")
	h.leave(e)
	require.Contains(t, h.dump(t.Context(), dump.Request{Python: true}).Error, "none of these workers run now")
}

// An older judge does not say that a verdict is decided, but what it does about it.
func TestVerdictsOfAnOlderJudge(t *testing.T) {
	var out strings.Builder
	m := newHangMetrics(jobJ())
	h := &hangs{log: slog.New(slog.NewTextHandler(&out, nil)), metrics: m}
	h.epoch.Place.GroupRank = 1
	m.looked([]hang.Sample{{Worker: hang.Worker{Rank: 2, PID: 9}, At: time.Second}}, nil)
	h.hear(hang.Ask{Seq: 5, Incident: 4, What: hang.TellVerdict, Line: "rank 2 hung", Suspects: []int{2},
		Action: hang.ActRestart})
	require.Contains(t, out.String(), `level=ERROR msg="hang: rank 2 hung`)
	require.Contains(t, scraped(m), `dlrover_hang_state{rank="2"} 3`)
}

// deafJudge refuses all reports.
type deafJudge struct {
	serve.Transport
	err error
}

func (d *deafJudge) Post(context.Context, string, hang.Report) (hang.Ask, error) {
	return hang.Ask{}, d.err
}

// Hang detection that is off because versions differ is said once; that a world has ended is no news.
func TestAJudgeOfAnotherVersion(t *testing.T) {
	_, unread := hang.ParseSpec("action=report sooner=1s")
	for name, c := range map[string]struct {
		err  error
		warn int
	}{
		"our report":                {serve.ErrBadRequest, 1},
		"our Spec":                  {fmt.Errorf("%w: %w", serve.ErrBadRequest, unread), 1},
		"our Spec, says an old one": {fmt.Errorf("%w: %s", serve.ErrNotMember, unread), 1},
		"another epoch":             {serve.ErrNotMember, 0},
	} {
		var out strings.Builder
		h := &hangs{log: slog.New(slog.NewTextHandler(&out, nil)), node: &featuretest.Node{Of: *jobJ()}}
		h.judge = func() serve.Transport { return &deafJudge{err: c.err} }
		for range 3 {
			require.NoError(t, h.post(t.Context(), hang.Report{}))
		}
		require.Equal(t, c.warn, strings.Count(out.String(), "level=WARN"), name)
	}
}

func scraped(m *hangMetrics) string {
	var s exposition.Scrape
	m.tell(&s)
	return string(s.Text())
}

func TestWhatTheLivingWereDoing(t *testing.T) {
	stacks := func(frames ...hang.Frame) *hang.Stacks {
		return &hang.Stacks{Interpreter: "CPython", Threads: []hang.Thread{{Main: true, Python: frames}}}
	}
	load := hang.Frame{Func: "load_batch", File: "data.py", Line: 12}
	main := hang.Frame{Func: "<module>", File: "train.py", Line: 3}
	lines := doing([]hang.Evidence{
		{Worker: hang.Worker{Rank: 0}, Stacks: stacks(main)}, {Worker: hang.Worker{Rank: 2}, Stacks: stacks(load, main)},
		{Worker: hang.Worker{Rank: 3}, Stacks: stacks(load, main)}, {Worker: hang.Worker{Rank: 4}},
	})
	require.Len(t, lines, 2)
	require.Equal(t, "ranks 2-3 were in load_batch at data.py:12, called by <module> at train.py:3", lines[0])
}

// Who writes a report makes room for it.
func TestOldEvidenceIsRemoved(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(report.TimelinePath, dir)
	past, err := report.Write(dir, report.Incident{Job: "j", At: time.Now().Add(-2 * report.KeepFor)})
	require.NoError(t, err)
	h := &hangs{log: slog.New(slog.DiscardHandler), node: &featuretest.Node{Of: *jobJ()}}
	hangtell.Write(h.log, h.directory(), report.Incident{Job: "j", At: time.Now()})
	left, err := filepath.Glob(filepath.Join(dir, "hang-j-*"))
	require.NoError(t, err)
	require.Len(t, left, 1)
	require.NotEqual(t, past, left[0])
}

// Every node leaves files of xpu_timer of its own ranks, where xpu_timer is meant.
func TestStacktracesOfAVerdict(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(report.TimelinePath, dir)
	past := filepath.Join(dir, "00003-00004.stacktrace")
	require.NoError(t, os.WriteFile(past, nil, 0o600))
	h := &hangs{log: slog.New(slog.DiscardHandler), node: &featuretest.Node{Of: *jobJ()}}
	h.xpuTimer = true
	h.epoch.Place.GroupRank = 1
	e := job.EpochID{Term: 1}
	h.epoch.Term = 1
	collected := h.collected(e, 4)
	collected([]hang.Evidence{{Worker: hang.Worker{Rank: 2, PID: 7}, Stacks: &hang.Stacks{Threads: []hang.Thread{{TID: 7,
		Main: true, Python: []hang.Frame{{Func: "load", File: "t.py", Line: 3}}}}}}, {Worker: hang.Worker{Rank: 3}}})
	collected(nil)
	tell := hang.Ask{Seq: 1, Incident: 1, Epoch: e, What: hang.TellVerdict, Line: "rank 2 hung", Suspects: []int{2}}
	h.hear(tell)
	h.writing.Wait()
	found, err := xpu.Read(dir)
	require.NoError(t, err)
	require.Len(t, found.Evidence, 1)
	require.Equal(t, "load", found.Evidence[0].Stacks.Threads[0].Python[0].Func)
	require.Equal(t, 4, found.World.Ranks().Len())
	require.NoFileExists(t, past, "nothing is known of rank 3 now")

	require.NoError(t, os.Remove(filepath.Join(dir, "00002-00004.stacktrace")))
	tell.Seq, tell.Epoch = 2, job.EpochID{Term: 2}
	h.epoch.Term = 2
	h.hear(tell)
	h.writing.Wait()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries, "those are stacks of another epoch")
}

func TestTheEndOfATextIsText(t *testing.T) {
	require.Equal(t, "batch", ending("bad batch", 5))
	require.Equal(t, "bad", ending("bad", 5))
	require.Equal(t, "ß", ending("größ", 3), "no half of a character")
	require.Empty(t, ending("bad", 0))
}
