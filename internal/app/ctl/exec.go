package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/console"
	"dlrover-run/internal/duration"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/streams"
)

const execAbout = `The command has the worker's environment and directory. dlroverctl exits as it does;
124: it took longer than --timeout; 125: it was not tried, or its end is unknown; 126: it
cannot be executed; 127: it was not found; 128+N: signal N ended it.`

func timeoutOption() cli.Flag {
	return &cli.GenericFlag{Name: "timeout", Value: new(duration.Value),
		Usage: "`DURATION`: end the command and its children after this time (default: never)"}
}

// exitError ends the program with the status of another one; all messages have been printed.
type exitError struct{ code int }

func (e *exitError) Error() string { return fmt.Sprintf("exit status %d", e.code) }

// exec executes a command next to a worker, and ends as it does.
func (c *call) exec() error {
	words := c.args.Args().Slice()
	rank, err := strconv.ParseUint(words[1], 10, 31)
	if err != nil {
		return &usageError{fmt.Errorf("exec %s %s: need the rank of a worker, a number from 0", words[0], words[1])}
	}
	req := streams.Request{
		Rank: int(rank), Args: words[2:], Timeout: time.Duration(*c.args.Generic("timeout").(*duration.Value)),
	}
	if err := req.CheckArgs(); err != nil {
		return &usageError{fmt.Errorf("exec: %w", err)}
	}
	if req.Timeout < 0 {
		return &usageError{errors.New("exec: --timeout needs a duration from 0, such as 30s")}
	}
	nc, err := c.daemon.client.Open(c, c.run(), "streams/exec?rank="+words[1], streams.Protocol)
	if err != nil {
		return c.notTried(noStreams(err))
	}
	defer nc.Close()
	stop := context.AfterFunc(c, func() { _ = nc.Close() })
	defer stop()
	if _, err := nc.Write(streams.Frame{Kind: streams.KindRequest, Data: streams.JSON(req)}.Append(nil)); err != nil {
		return c.notTried(err)
	}
	return c.attend(nc)
}

// notTried explains that a command was not executed, or that its end is unknown.
func (c *call) notTried(err error) error {
	console.Complain(c.stderr, "dlroverctl", c.explain(err))
	return &exitError{streams.CodeRefused}
}

// attend passes on the command's input and output until it has ended.
func (c *call) attend(nc io.ReadWriteCloser) error {
	in, credit := streams.NewReader(nc), newCredit()
	defer credit.close()
	out := [2]io.Writer{c.stdout, c.stderr}
	if c.terminal {
		out = [2]io.Writer{&safeWriter{w: c.stdout}, &safeWriter{w: c.stderr}}
	}
	for {
		f, err := in.Next()
		switch {
		case err != nil && c.Err() != nil:
			return &exitError{streams.CodeSignalBase + 2} // as if SIGINT had ended the command
		case err != nil || f.Kind == streams.KindEnd:
			return c.notTried(errors.New("the connection is lost, and with it the command"))
		}
		switch f.Kind {
		case streams.KindNode:
			go sendInput(nc, c.stdin, credit) // which may wait for a terminal for ever
		case streams.KindAck:
			credit.give(int(min(f.Count(), streams.Window)))
		case streams.KindOutput:
			_, _ = out[min(max(f.Std, 1), 2)-1].Write(f.Data)
		case streams.KindExit:
			return c.exitOf(f)
		}
	}
}

func (c *call) exitOf(f streams.Frame) error {
	var e streams.Exit
	if err := f.Decode(&e); err != nil {
		return c.notTried(err)
	}
	if e.Error != "" {
		console.Complain(c.stderr, "dlroverctl", errors.New("exec: "+e.Error))
	}
	if e.Code == 0 {
		return nil
	}
	return &exitError{e.Code}
}

// sendInput sends the command's input while the command reads it.
func sendInput(nc io.Writer, stdin io.Reader, credit *credit) {
	buf, frame := make([]byte, streams.MaxData/2), []byte(nil)
	for stdin != nil {
		n, err := stdin.Read(buf)
		if !credit.take(n) {
			return
		}
		if n > 0 {
			frame = streams.Frame{Kind: streams.KindInput, Data: buf[:n]}.Append(frame[:0])
			if _, err := nc.Write(frame); err != nil {
				return
			}
		}
		if err != nil {
			break
		}
	}
	_, _ = nc.Write(streams.Frame{Kind: streams.KindInputEnd}.Append(nil)) // the command may have ended
}

// credit is how many bytes of input may be sent.
type credit struct {
	mu     sync.Mutex
	more   sync.Cond
	left   int
	closed bool
}

func newCredit() *credit {
	c := &credit{left: streams.Window}
	c.more.L = &c.mu
	return c
}

// take waits for n bytes; it returns false if the command takes no more input.
func (c *credit) take(n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.left < n && !c.closed {
		c.more.Wait()
	}
	c.left -= n
	return !c.closed
}

func (c *credit) give(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left += n
	c.more.Broadcast()
}

func (c *credit) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.more.Broadcast()
}

// safeWriter escapes control characters, which would act on a terminal.
type safeWriter struct {
	w    io.Writer
	rest []byte // the beginning of a character, or of the end of a line
}

// Write implements io.Writer.
func (s *safeWriter) Write(b []byte) (int, error) {
	all := append(s.rest, b...)
	whole := len(all)
	for i := 1; i <= min(utf8.UTFMax-1, len(all)); i++ {
		if c := all[len(all)-i]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(all[len(all)-i:]) || i == 1 && c == '\r' {
				whole -= i
			}
			break
		}
	}
	s.rest = append([]byte(nil), all[whole:]...)
	_, err := io.WriteString(s.w, text.Escape(strings.ReplaceAll(string(all[:whole]), "\r\n", "\n")))
	return len(b), err
}
