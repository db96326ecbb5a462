// Package eventlog appends events to a file, one JSON object a line: time, event,
// and the event's own keys.
package eventlog

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"

	"dlrover-run/internal/openfile"
	"dlrover-run/internal/text"
)

// Log is an event log; a nil *Log drops every event.
type Log struct {
	handler slog.Handler
	closer  io.Closer
}

// Open appends to the file at path, which must not be a link; "" gives a nil Log.
func Open(path string) (*Log, error) {
	if path == "" || path == os.DevNull {
		return nil, nil
	}
	f, err := openfile.Open(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("event log: %w", err)
	}
	return &Log{New(f).handler, f}, nil
}

// New writes to w, which is not closed.
func New(w io.Writer) *Log {
	return &Log{handler: slog.NewJSONHandler(text.JSON(w), &slog.HandlerOptions{ReplaceAttr: replace})}
}

// replace calls the message "event" and drops the level.
func replace(groups []string, a slog.Attr) slog.Attr {
	switch {
	case len(groups) > 0:
	case a.Key == slog.MessageKey:
		a.Key = "event"
	case a.Key == slog.LevelKey:
		return slog.Attr{}
	}
	return a
}

// With returns a Log that adds attrs to every event.
func (l *Log) With(attrs ...slog.Attr) *Log {
	if l == nil {
		return nil
	}
	return &Log{l.handler.WithAttrs(attrs), nil}
}

// Event appends one event.
func (l *Log) Event(name string, attrs ...slog.Attr) {
	if l != nil {
		slog.New(l.handler).LogAttrs(context.Background(), slog.LevelInfo, name, attrs...)
	}
}

// Close closes the file that Open opened.
func (l *Log) Close() error {
	if l == nil || l.closer == nil {
		return nil
	}
	return l.closer.Close()
}
