package logrules

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
	logrule "dlrover-run/launcher/logs/rule"
)

// A worker never waits for rules: what they cannot read in their share of the time goes by.
func TestShareOfRules(t *testing.T) {
	var s share
	start := time.Now()
	require.True(t, s.left(start))
	s.spend(shareBurst + 50*time.Millisecond)
	require.False(t, s.left(start.Add(100*time.Millisecond)))
	require.True(t, s.skipped)
	require.True(t, s.left(start.Add(600*time.Millisecond)))
	s.spend(time.Second)
	require.False(t, s.left(start.Add(5*time.Second)))
	require.True(t, s.left(start.Add(20*time.Second)))
}

// The pumps of earlier workers may still read while new ones run.
func TestOutputOfEarlierWorkersIsTheirs(t *testing.T) {
	r, err := logrule.Parse("x:bad")
	require.NoError(t, err)
	l := &watch{slots: 1, rules: []logrule.Rule{r}}
	l.start(&launcher.StartRequest{})
	old := l.tap(logs.WorkerID{}, logs.Stdout)
	l.start(&launcher.StartRequest{})
	old.Feed([]byte("bad\n"), time.Now())
	found, _ := l.workers[0].take(time.Now())
	require.Empty(t, found)
	l.tap(logs.WorkerID{}, logs.Stderr).Feed([]byte("bad\n"), time.Now())
	found, _ = l.workers[0].take(time.Now())
	require.Len(t, found, 1)
}

// Whoever sleeps until a later time, or for good, must hear that something is due sooner.
func TestTheFirstLineWakesTheWatch(t *testing.T) {
	r, err := logrule.Parse("x:step:every=1s")
	require.NoError(t, err)
	l := &watch{slots: 1, rules: []logrule.Rule{r}}
	l.start(&launcher.StartRequest{})
	tap, w := l.tap(logs.WorkerID{}, logs.Stdout), l.workers[0]
	require.Zero(t, w.next())
	tap.Feed([]byte("step 1\n"), w.begun)
	require.Len(t, l.news, 1)
	<-l.news
	require.Equal(t, w.begun.Add(time.Second), w.next())
	tap.Feed([]byte("step 2\n"), w.begun.Add(time.Second/2))
	require.Empty(t, l.news, "a line like those before wakes nobody")
}

// BenchmarkLogRules measures how many lines of 100 bytes a second a worker gets rid of, and what they cost the
// launcher.
func BenchmarkLogRules(b *testing.B) {
	for _, tc := range []struct{ name, rule string }{
		{"off", ""}, {"other lines", "x:no such text:nan"}, {"every line", "x:loss:nan"}, {"no literal", "x:(?i)LOSS:nan"},
	} {
		b.Run(tc.name, func(b *testing.B) { floodRules(b, tc.rule) })
	}
}

func floodRules(b *testing.B, text string) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	require.NoError(b, err)
	defer null.Close()
	cfg := logs.Config{Dir: b.TempDir(), Stdout: null, Stderr: null, Tee: func(int) logs.Std { return 3 }}
	if text != "" {
		r, err := logrule.Parse(text)
		require.NoError(b, err)
		l := &watch{slots: 1, rules: []logrule.Rule{r}}
		l.start(&launcher.StartRequest{})
		cfg.Tap = l.tap
	}
	l, err := logs.New(cfg)
	require.NoError(b, err)
	defer l.Close()
	a, err := l.Begin(0)
	require.NoError(b, err)
	w, err := a.Worker(logs.WorkerID{})
	require.NoError(b, err)
	line := "step 1200 of 100000, loss: 0.34567, lr 0.0001, grad norm 1.234, " + strings.Repeat("x", 35)
	cmd := exec.Command("/bin/sh", "-c", fmt.Sprintf("yes '%s' | head -n %d", line, b.N))
	cmd.Stdout, cmd.Stderr = w.Stdout(), w.Stderr()
	before, start := ownCPU(), time.Now()
	require.NoError(b, cmd.Start())
	w.Started()
	require.NoError(b, cmd.Wait())
	w.Drain(time.Minute)
	b.ReportMetric(float64(b.N)/time.Since(start).Seconds(), "lines/s")
	b.ReportMetric(float64(ownCPU()-before)/float64(b.N), "cpu-ns/line")
}

func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Whatever time the machine took from it, what comes in small pieces is read.
func TestOnlyAFloodGoesByUnread(t *testing.T) {
	r, err := logrule.Parse("x:bad")
	require.NoError(t, err)
	l := &watch{slots: 1, rules: []logrule.Rule{r}}
	l.start(&launcher.StartRequest{})
	l.workers[0].share = share{since: time.Now(), spent: time.Hour}
	tap := l.tap(logs.WorkerID{}, logs.Stdout)
	tap.Feed([]byte(strings.Repeat("x", flooded)+"bad\n"), time.Now())
	found, skipped := l.workers[0].take(time.Now())
	require.Empty(t, found)
	require.True(t, skipped)
	tap.Feed([]byte("bad\n"), time.Now())
	found, _ = l.workers[0].take(time.Now())
	require.Len(t, found, 1)
}
