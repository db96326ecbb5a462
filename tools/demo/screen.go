package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"dlrover-run/internal/console"
)

// screen shows the scenario: lines, and on a terminal one more line at the bottom that moves. It is used by one
// goroutine.
type screen struct {
	w      io.Writer
	tty    bool
	colour bool
	began  time.Time
	said   time.Time // the last line
}

const clearLine = "\r\x1b[K"

func newScreen(f *os.File) *screen {
	tty := console.IsTerminal(f)
	return &screen{w: f, tty: tty, colour: tty && os.Getenv("NO_COLOR") == "", began: time.Now()}
}

// line prints a line as it is.
func (s *screen) line(format string, args ...any) {
	if s.tty {
		fmt.Fprint(s.w, clearLine)
	}
	fmt.Fprintf(s.w, format+"\n", args...)
	s.said = time.Now()
}

// tell prints a line with the time of its event.
func (s *screen) tell(at time.Time, format string, args ...any) {
	s.line("%s  %s", s.clock(at), fmt.Sprintf(format, args...))
}

func (s *screen) clock(at time.Time) string {
	return fmt.Sprintf("%6.2f s", at.Sub(s.began).Seconds())
}

// maxSilence is how long a screen that is no terminal stays as it is.
const maxSilence = 2 * time.Second

// status replaces the moving line, or is a line after a silence. It must fit a line of a terminal.
func (s *screen) status(format string, args ...any) {
	switch {
	case s.tty:
		fmt.Fprintf(s.w, clearLine+"%.78s", fmt.Sprintf(format, args...))
	case format != "" && time.Since(s.said) >= maxSilence:
		s.line(format, args...)
	}
}

// clear removes the moving line.
func (s *screen) clear() { s.status("") }

// Colours of a terminal (SGR).
const (
	bold  = "1"
	red   = "1;31"
	green = "32"
)

func (s *screen) paint(colour, text string) string {
	if !s.colour {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}
