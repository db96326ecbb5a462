// Package console sets up what the mains write to standard error: log lines as text
// on a terminal and as JSON otherwise.
package console

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/printable"
)

// Logger writes to w from the level that $LOGLEVEL names (torchrun's variable:
// DEBUG, INFO, WARNING, ERROR, CRITICAL; INFO unless set). Nothing in a record reaches w
// that could act on a terminal.
func Logger(w *os.File, program string) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level(os.Getenv("LOGLEVEL"))}
	if IsTerminal(w) {
		return slog.New(slog.NewTextHandler(printable.JSON(w), opts)).With("program", program)
	}
	return slog.New(slog.NewJSONHandler(printable.JSON(w), opts)).With("program", program)
}

func level(name string) slog.Level {
	switch strings.ToUpper(name) {
	case "DEBUG", "NOTSET":
		return slog.LevelDebug
	case "WARNING", "WARN":
		return slog.LevelWarn
	case "ERROR", "CRITICAL", "FATAL":
		return slog.LevelError
	}
	return slog.LevelInfo
}

// IsTerminal reports whether f is a terminal.
func IsTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Complain writes an error for people: one line that starts with the program's name.
func Complain(w io.Writer, program string, err error) {
	fmt.Fprintf(w, "%s: error: %s\n", program, printable.Text(err.Error()))
}

// OutliveReaders lets the program live on when whoever reads its output is gone: a write
// fails then. SIGPIPE is caught, not ignored, because what is ignored is so in
// the programs that are started, too, and exec resets only what is caught.
func OutliveReaders() { signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE) }
