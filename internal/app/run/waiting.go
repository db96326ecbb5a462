package run

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/console"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous/api"
)

// waiting shows the wait of a node without workers: on a terminal as its last line, which the next output replaces,
// else as a log line every ten seconds.
type waiting struct {
	log  *slog.Logger
	draw func(line string) // nil: there is no terminal

	mu    sync.Mutex
	news  *api.Waiting // nil: it does not wait
	at    time.Time    // of news
	said  time.Time    // the last log line, or the beginning
	timer *time.Timer  // until the line is drawn again
}

// sayEvery is the time between log lines.
const sayEvery = 10 * time.Second

func newWaiting(log *slog.Logger, format console.Format) *waiting {
	w := &waiting{log: log}
	if format != console.JSON && console.IsTerminal(console.Stderr) && log.Enabled(context.Background(), slog.LevelInfo) {
		w.draw = drawLine
	}
	return w
}

// drawLine leaves the cursor at the beginning of the line, where the next output finds it: the line must not wrap.
func drawLine(line string) {
	columns, known := console.Columns(console.Stderr)
	if !known {
		columns = 80
	}
	if runes := []rune(line); len(runes) >= columns {
		line = string(runes[:columns-1])
	}
	_, _ = console.Stderr.Write([]byte(line + "\x1b[K\r"))
}

// every is how often told wants to be called.
func (w *waiting) every() time.Duration {
	if w.draw != nil {
		return time.Second
	}
	return sayEvery
}

// told takes the newest news; nil: the wait is over.
func (w *waiting) told(news *api.Waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before, now := w.news, time.Now()
	w.news, w.at = news, now
	switch {
	case w.draw != nil && news == nil && before != nil:
		w.timer.Stop()
		w.draw("")
	case w.draw != nil && news != nil:
		w.drawLocked(now)
	case w.draw != nil || news == nil:
	case before == nil: // the agent logs the beginning
		w.said = now
	case now.Sub(w.said) >= sayEvery-time.Second: // the rendezvous answers no later, as a rule
		w.said = now
		w.log.Info(describe.Waiting(*news, 0))
	}
}

func (w *waiting) drawLocked(now time.Time) {
	w.draw(text.EscapeLine(describe.Waiting(*w.news, now.Sub(w.at))))
	if w.timer == nil {
		w.timer = time.AfterFunc(time.Second, w.redraw)
		return
	}
	w.timer.Reset(time.Second)
}

func (w *waiting) redraw() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.news != nil {
		w.drawLocked(time.Now())
	}
}
