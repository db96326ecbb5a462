package logs

import (
	"bytes"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// seen is what a follower has seen, by stream.
type seen struct {
	mu   sync.Mutex
	text [3]bytes.Buffer
}

func (s *seen) print(_ WorkerID, stream Std, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text[stream].Write(b)
}

func (s *seen) of(stream Std) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text[stream].String()
}

func (s *seen) eventually(t *testing.T, stream Std, want string) {
	t.Helper()
	require.Eventually(t, func() bool { return s.of(stream) == want }, 20*time.Second, 5*time.Millisecond,
		"%q", want)
}

func everything(b []byte) []byte { return b }

// Followers see what was kept and what comes, once and in order, wherever it goes.
func TestFollow(t *testing.T) {
	for name, cfg := range map[string]Config{"console": {Stdout: io.Discard}, "file": {Redirects: all},
		"both": {Tee: all}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, cfg)
			a := r.begin(t)
			w := worker(t, a, 1)
			gate, open, err := os.Pipe()
			require.NoError(t, err)
			cmd := sh("echo one; echo err >&2; read x; echo two; read x; echo three")
			cmd.Stdin = gate
			cmd.Stdout, cmd.Stderr = w.Stdout(), w.Stderr()
			require.NoError(t, cmd.Start())
			w.Started()
			require.Eventually(t, func() bool { out, _ := w.Tail(); return len(out) > 0 }, 20*time.Second, time.Millisecond)
			var from, late, nobody seen
			end := r.Follow(Follower{Tail: everything, Print: from.print})
			endNobody := r.Follow(Follower{Wants: func(id WorkerID) bool { return id.LocalRank == 9 }, Print: nobody.print})
			defer endNobody()
			from.eventually(t, Stdout, "one\n")
			endLate := r.Follow(Follower{Print: late.print})
			_, _ = open.WriteString("\n")
			from.eventually(t, Stdout, "one\ntwo\n")
			late.eventually(t, Stdout, "two\n")
			endLate()
			_, _ = open.WriteString("\n")
			require.NoError(t, cmd.Wait())
			w.Drain(time.Minute)
			a.Close()
			from.eventually(t, Stdout, "one\ntwo\nthree\n")
			from.eventually(t, Stderr, "err\n")
			next := r.begin(t)
			again := worker(t, next, 1)
			run(t, again, sh("echo four"))
			again.Drain(time.Minute)
			from.eventually(t, Stdout, "one\ntwo\nthree\nfour\n")
			end()
			require.Equal(t, "two\n", late.of(Stdout))
			require.Empty(t, nobody.of(Stdout))
			next.Close()
			_, _ = open.Close(), gate.Close()
		})
	}
}

// What is kept of a stream begins with a whole line.
func TestFollowBeginsWithAWholeLine(t *testing.T) {
	r := newRig(t, Config{Stdout: io.Discard, TailBytes: 100})
	a := r.begin(t)
	w := worker(t, a, 1)
	run(t, w, sh("i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done"))
	w.Drain(time.Minute)
	var s seen
	r.Follow(Follower{Tail: everything, Print: s.print})()
	require.True(t, strings.HasPrefix(s.of(Stdout), "line 8"), s.of(Stdout))
	require.True(t, strings.HasSuffix(s.of(Stdout), "line 99\n"))
	a.Close()
}

func TestTapsOfTwoParts(t *testing.T) {
	require.Nil(t, Taps(nil, nil))
	var one, two int
	count := func(n *int, is Std) func(WorkerID, Std) Tap {
		return func(_ WorkerID, std Std) Tap {
			if std&is == 0 {
				return nil
			}
			return feed(func(b []byte, _ time.Time) { *n += len(b) })
		}
	}
	both := Taps(count(&one, Stdout), count(&two, Stdout|Stderr))
	both(WorkerID{}, Stdout).Feed([]byte("abc"), time.Time{})
	both(WorkerID{}, Stderr).Feed([]byte("ab"), time.Time{})
	require.Equal(t, []int{3, 5}, []int{one, two})
	require.Nil(t, Taps(nil, count(&one, Stdout))(WorkerID{}, Stderr))
}
