package console

import (
	"bytes"
	"context"
	"log"
	"log/slog"
)

// Libraries has l take the lines that libraries print through Go's standard logger. Without it they would go to
// standard error unchanged. net/http reports errors of its peers there, and no operator can act on them, so they are
// of level debug. A panic of one of our own handlers is an error. l must not write to the standard logger itself.
func Libraries(l *slog.Logger) {
	log.SetFlags(0)
	log.SetOutput(libraries{l})
}

type libraries struct{ log *slog.Logger }

// Write is one message.
func (l libraries) Write(p []byte) (int, error) {
	level := slog.LevelDebug
	if bytes.Contains(p, []byte(": panic serving ")) {
		level = slog.LevelError
	}
	l.log.Log(context.Background(), level, "a library says", "text", string(bytes.TrimSpace(p)))
	return len(p), nil
}
