// Package console sets up the standard error of the mains: log lines as short text on a terminal and as JSON
// otherwise, and errors for people.
package console

import (
	"fmt"
	"io"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/text"
)

// file is an open file to write to.
type file interface {
	io.Writer
	Fd() uintptr
}

// IsTerminal reports whether f is a terminal.
func IsTerminal(f file) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Columns returns the width of w in columns. It reports false if w is not a terminal, or one without a known width.
func Columns(w io.Writer) (int, bool) {
	f, ok := w.(file)
	if !ok {
		return 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 {
		return 0, false
	}
	return int(size.Col), true
}

// Complain writes an error for people: one line that starts with the program's name.
func Complain(w io.Writer, program string, err error) {
	fmt.Fprintf(w, "%s: error: %s\n", program, text.Escape(err.Error()))
}

// OutliveReaders lets the program live on when the reader of its output is gone: a write fails then. SIGPIPE is
// caught, not ignored, because child processes inherit ignored signals: execve(2) resets only caught ones. See
// https://man7.org/linux/man-pages/man7/signal.7.html.
func OutliveReaders() { signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE) }
