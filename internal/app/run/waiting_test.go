package run

import (
	"bytes"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous/api"
)

func missing(in time.Duration) *api.Waiting {
	return &api.Waiting{For: "1 of 2 nodes\x1b[2J", Due: "the run fails", In: in}
}

// Without a terminal there is a line every ten seconds, however often the rendezvous answers.
func TestWaitingInALog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		w := &waiting{log: slog.New(slog.NewJSONHandler(&out, nil))}
		require.Equal(t, sayEvery, w.every())
		for left := 60 * time.Second; left > 0; left -= 5 * time.Second {
			w.told(missing(left))
			time.Sleep(5 * time.Second)
		}
		w.told(nil)
		w.told(missing(time.Minute))
		require.Len(t, regexp.MustCompile(`in \d+s: the run fails`).FindAllString(out.String(), -1), 5)
		require.Contains(t, out.String(), "in 50s: the run fails")
		require.NotContains(t, out.String(), "\x1b")
	})
}

// On a terminal one line counts down by itself, until the wait is over.
func TestWaitingOnATerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var drawn []string
		w := &waiting{draw: func(line string) { drawn = append(drawn, line) }}
		require.Equal(t, time.Second, w.every())
		w.told(nil)
		w.told(missing(22 * time.Second))
		time.Sleep(2500 * time.Millisecond)
		w.told(missing(9 * time.Second))
		w.told(nil)
		time.Sleep(time.Minute)
		const line = `waiting for 1 of 2 nodes\x1b[2J; in `
		require.Equal(t, []string{line + "22s: the run fails", line + "21s: the run fails", line + "20s: the run fails",
			line + "9s: the run fails", ""}, drawn)
	})
}

// The launcher on a terminal says for whom it waits until the other one comes, and then nothing of it is left.
func TestWaitingIsVisible(t *testing.T) {
	b := newBench(t)
	_, addr := b.startDaemon("127.0.0.1:0")
	b.env = append(b.env, "DLROVER_MASTER_ADDR="+addr)
	args := b.sh("echo worker", "--nnodes=2", "--rdzv-id=job", "--rdzv-conf=join_timeout=90")
	l, s := b.onTerminal(nil, args...)
	s.shows("waiting for 1 of 2 nodes; in 1m29s: the run fails, unless enough nodes are there\x1b[K\r")
	s.shows("in 1m28s: ")
	other := b.run(args...)
	require.Equal(t, 0, other.wait())
	require.Equal(t, 0, l.wait())
	text := s.text.String()
	last := strings.LastIndex(text, "waiting for 1 of 2 nodes")
	require.Contains(t, text[last:], "\x1b[K\r\x1b[K", "it is replaced")
	require.Contains(t, text[last:], "worker\r\n")
}
