package logs

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// tapped collects what taps see.
type tapped struct {
	mu   sync.Mutex
	text map[WorkerID]map[Std]string
}

func (p *tapped) of(id WorkerID, is Std) Tap {
	return feed(func(b []byte, _ time.Time) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.text == nil {
			p.text = map[WorkerID]map[Std]string{}
		}
		if p.text[id] == nil {
			p.text[id] = map[Std]string{}
		}
		p.text[id][is] += string(b)
	})
}

type feed func(b []byte, now time.Time)

func (f feed) Feed(b []byte, now time.Time) { f(b, now) }

// A tap sees every stream, wherever that goes, and changes nothing of it.
func TestTapSeesEveryStream(t *testing.T) {
	for name, cfg := range map[string]Config{"console": {}, "file": {Redirects: all}, "both": {Tee: all}} {
		t.Run(name, func(t *testing.T) {
			var p tapped
			cfg.Tap = p.of
			r := newRig(t, cfg)
			a := r.begin(t)
			w := worker(t, a, 1)
			run(t, w, sh("printf 'out\\nbar 1\\rbar 2'; echo err >&2"))
			w.Drain(time.Minute)
			out, err := w.Tail()
			require.Equal(t, "out\nbar 1\rbar 2", string(out))
			require.Equal(t, "err\n", string(err))
			a.Close()
			require.Len(t, p.text, 1)
			for id, text := range p.text {
				require.Equal(t, 1, id.LocalRank)
				require.Equal(t, map[Std]string{Stdout: "out\nbar 1\rbar 2", Stderr: "err\n"}, text)
			}
			if name != "console" {
				require.Equal(t, "out\nbar 1\rbar 2", read(t, a.Dir(), "1", "stdout.log"))
			}
		})
	}
}

// Who has no tap is read by nobody if a file is all that it needs.
func TestNoTapNoPump(t *testing.T) {
	r := newRig(t, Config{Redirects: all, Tap: func(id WorkerID, is Std) Tap {
		if id.LocalRank == 1 && is == Stderr {
			return feed(func([]byte, time.Time) {})
		}
		return nil
	}})
	a := r.begin(t)
	one, other := worker(t, a, 0), worker(t, a, 1)
	require.Nil(t, one.streams[0].pump)
	require.Nil(t, one.streams[1].pump)
	require.Nil(t, other.streams[0].pump)
	require.NotNil(t, other.streams[1].pump)
	one.Started()
	other.Started()
	a.Close()
}
