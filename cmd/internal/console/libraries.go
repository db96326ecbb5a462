package console

import (
	"bytes"
	"context"
	"log"
	"log/slog"
)

// Libraries has l take what libraries print through Go's standard logger, which would go to standard error as it is.
// net/http tells there what peers do that it does not like, and nobody can act on it: it is of level debug. But for a
// panic of one of our own handlers, which is an error. l must not write to the standard logger itself.
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
