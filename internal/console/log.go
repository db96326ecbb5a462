package console

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"

	"dlrover-run/internal/text"
)

// Format is how log lines are written.
type Format string

// The formats.
const (
	Auto Format = "auto" // Text on a terminal, JSON otherwise
	Text Format = "text" // a line for people: time, level, node, message, attributes
	JSON Format = "json" // slog's JSON object a line
)

// FormatVariable is the variable that gives --log-format its default in every program.
const FormatVariable = "PET_LOG_FORMAT"

// FormatUsage is the help text of --log-format, after urfave/cli's manner.
const FormatUsage = "`auto|text|json`: format of this program's log lines; auto is text on a terminal and JSON " +
	"otherwise (default: $PET_LOG_FORMAT, else auto)"

// ParseFormat reads the value of --log-format; "" is Auto.
func ParseFormat(text string) (Format, error) {
	switch f := Format(text); f {
	case "":
		return Auto, nil
	case Auto, Text, JSON:
		return f, nil
	}
	return "", fmt.Errorf("--log-format or $PET_LOG_FORMAT: %q is unknown: use auto (text on a terminal, "+
		"else json), text or json", text)
}

// Logger writes records of level and above to w. It escapes control characters, which would act on a terminal.
func Logger(w file, program string, f Format, level slog.Leveler) *slog.Logger {
	log := newLogger(w, program, f, level)
	if r, ok := w.(*relay); ok {
		r.tells(log)
	}
	if _, ok := levelOf(os.Getenv(levelVariable)); !ok {
		log.Warn("LOGLEVEL is not one of DEBUG, INFO, WARNING, ERROR and CRITICAL: INFO counts",
			"value", os.Getenv(levelVariable))
	}
	return log
}

func newLogger(w file, program string, f Format, level slog.Leveler) *slog.Logger {
	if f == Text || f != JSON && IsTerminal(w) {
		return slog.New(newLines(w, program, level))
	}
	return slog.New(slog.NewJSONHandler(text.JSON(w), &slog.HandlerOptions{Level: level})).With("program", program)
}

const levelVariable = "LOGLEVEL"

// Level is the level that $LOGLEVEL names, torchrun's variable: DEBUG, INFO, WARNING, ERROR or CRITICAL; INFO unless
// set. Any other value is INFO, too, and Logger warns of it.
func Level() slog.Level {
	level, _ := levelOf(os.Getenv(levelVariable))
	return level
}

func levelOf(text string) (level slog.Level, known bool) {
	switch strings.ToUpper(text) {
	case "DEBUG", "NOTSET":
		return slog.LevelDebug, true
	case "WARNING", "WARN":
		return slog.LevelWarn, true
	case "ERROR", "CRITICAL", "FATAL":
		return slog.LevelError, true
	case "INFO", "":
		return slog.LevelInfo, true
	}
	return slog.LevelInfo, false
}

// lines is the slog.Handler of Text: one line a record, in one Write.
//
//	15:04:05.000 INFO  gpu-07: workers started world_size=16
//
// The node is the attribute "host" of the logger; a program without one is named instead. A logger's "run_id" is
// left out, because the reader of a terminal knows the run. A record's own "run_id" is shown.
type lines struct {
	out   *output
	who   string
	attrs slog.Handler // writes all but time, level and message to out.attrs
}

// output is shared by the handlers of one logger.
type output struct {
	mu    sync.Mutex
	w     io.Writer
	attrs bytes.Buffer // of the record that is being written
}

func newLines(w io.Writer, program string, level slog.Leveler) *lines {
	out := &output{w: text.JSON(w)}
	return &lines{out, program, slog.NewTextHandler(&out.attrs, &slog.HandlerOptions{Level: level, ReplaceAttr: dropHead})}
}

// dropHead drops the record's own fields, which Handle writes, and empty ones.
func dropHead(groups []string, a slog.Attr) slog.Attr {
	head := len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey || a.Key == slog.MessageKey)
	if head || a.Value.Kind() == slog.KindString && a.Value.String() == "" {
		return slog.Attr{}
	}
	return a
}

// Enabled implements slog.Handler.
func (l *lines) Enabled(ctx context.Context, level slog.Level) bool {
	return l.attrs.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (l *lines) Handle(ctx context.Context, r slog.Record) error {
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	l.out.attrs.Reset()
	if err := l.attrs.Handle(ctx, r); err != nil {
		return err
	}
	head := fmt.Sprintf("%s %-5s %s: %s", r.Time.Format("15:04:05.000"), r.Level, l.who, text.EscapeLine(r.Message))
	_, err := fmt.Fprintln(l.out.w, strings.TrimSpace(head+" "+l.out.attrs.String()))
	return err
}

// WithAttrs implements slog.Handler.
func (l *lines) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := *l
	var rest []slog.Attr
	for _, a := range attrs {
		switch a.Key {
		case "host":
			next.who = text.EscapeLine(a.Value.String())
		case "run_id":
		default:
			rest = append(rest, a)
		}
	}
	if len(rest) > 0 {
		next.attrs = l.attrs.WithAttrs(rest)
	}
	return &next
}

// WithGroup implements slog.Handler.
func (l *lines) WithGroup(name string) slog.Handler {
	next := *l
	next.attrs = l.attrs.WithGroup(name)
	return &next
}
