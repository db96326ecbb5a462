package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"dlrover-run/cmd/internal/console"
	"dlrover-run/internal/duration"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/streams"
	"dlrover-run/rendezvous/api"
)

func (p *program) logs() *cli.Command {
	return &cli.Command{Name: "logs", Category: ofRun, ArgsUsage: "RUN",
		Usage:       "show the output of all workers, by rank",
		Description: "With --json each line of a worker is an object on a line.",
		Flags: connection(followOption(), nodeOption(),
			&cli.IntFlag{Name: "rank", Value: -1, Usage: "`R`: only this rank (default: all)"},
			&cli.IntFlag{Name: "tail", Value: -1, Usage: "`N`: begin with the last N lines of each stream of each worker " +
				"(default: 10 with -f, else the last 64 KiB)"}),
		Action: p.ask((*call).logs)}
}

const execAbout = `The command has the worker's environment and directory. dlroverctl exits as it does;
124: it took longer than --timeout; 125: it was not tried, or its end is unknown; 126: it
cannot be executed; 127: it was not found; 128+N: signal N ended it.`

func (p *program) exec() *cli.Command {
	return &cli.Command{Name: "exec", Category: ofRun, ArgsUsage: "RUN RANK -- COMMAND...",
		Usage: "execute a command next to the worker of that rank", Description: execAbout,
		Flags: connection(&cli.GenericFlag{Name: "timeout", Value: new(duration.Value),
			Usage: "`DURATION`: end the command and its children after this time (default: never)"}),
		Action: p.ask((*call).exec)}
}

// exitError ends the program with a status of another one; everything has been said.
type exitError struct{ code int }

func (e *exitError) Error() string { return fmt.Sprintf("exit status %d", e.code) }

// logs prints what the workers print.
func (c *call) logs() error {
	follow, tail := c.args.Bool("follow"), c.args.Int("tail")
	if follow && !c.args.IsSet("tail") {
		tail = defaultTail
	}
	if tail < -1 || c.args.IsSet("rank") && c.args.Int("rank") < 0 {
		return &usageError{errors.New("logs: --tail and --rank need numbers from 0")}
	}
	p := newLogPrinter(c)
	var lost time.Time
	for first := true; ; first = false {
		q := url.Values{"tail": {strconv.Itoa(tail)}, "follow": {strconv.FormatBool(follow)}, "node": {c.args.String("node")},
			"rank": {strconv.Itoa(c.args.Int("rank"))}}
		nc, err := c.client.Open(c, c.run(), "streams/logs?"+q.Encode(), streams.Protocol)
		if err == nil {
			lost, tail = time.Time{}, 0 // who comes back has seen it
			if err = p.read(c, nc); err == nil {
				return nil
			}
			first = false
		}
		switch {
		case c.Err() != nil:
			return nil // enough
		case first || !follow || !c.mayComeBack(err, &lost):
			return noStreams(err)
		}
	}
}

// defaultTail is with how many lines who follows begins.
const defaultTail = 10

// noStreams says what it means that the daemon has nothing under the path of streams.
func noStreams(err error) error {
	if errors.Is(err, api.ErrNotFound) {
		return errors.New("it is of a version without logs and exec; start one of this version")
	}
	return err
}

// logPrinter prints the output of many workers by lines, each with its node and rank.
type logPrinter struct {
	*call
	mu    sync.Mutex
	lines streams.Lines
	nodes map[uint16]string
	out   bytes.Buffer
}

func newLogPrinter(c *call) *logPrinter {
	p := &logPrinter{call: c, nodes: map[uint16]string{}}
	p.lines.Emit = p.line
	return p
}

// read prints what comes until the end, which is nil, or until the connection breaks.
func (p *logPrinter) read(ctx context.Context, nc io.ReadWriteCloser) error {
	defer nc.Close()
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	defer stop()
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		p.keepShowing(quit)
	}()
	defer func() {
		close(quit)
		<-done
		p.print(p.lines.Finish)
	}()
	in := streams.NewReader(nc)
	for {
		f, err := in.Next()
		if err != nil {
			return err
		}
		if f.Kind == streams.KindEnd {
			return nil
		}
		p.print(func() { p.take(f) })
	}
}

// keepShowing shows lines that stay unfinished.
func (p *logPrinter) keepShowing(quit <-chan struct{}) {
	look := time.NewTicker(500 * time.Millisecond)
	defer look.Stop()
	for {
		select {
		case <-quit:
			return
		case <-look.C:
			p.print(func() { p.lines.Quiet(time.Now()) })
		}
	}
}

// print writes at once what do has made.
func (p *logPrinter) print(do func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	do()
	_, _ = p.out.WriteTo(p.stdout) // a pipe that is closed ends the program
}

func (p *logPrinter) take(f streams.Frame) {
	s := streams.Source{Node: f.Node, Rank: f.Rank, Std: f.Std}
	switch f.Kind {
	case streams.KindNode:
		p.nodes[f.Node] = string(f.Data)
	case streams.KindNote:
		fmt.Fprintf(p.stderr, "dlroverctl: %s\n", text.EscapeLine(string(f.Data)))
	case streams.KindOutput:
		p.lines.Write(s, f.Data, time.Now())
	case streams.KindDropped:
		p.lines.Cut(s, time.Now())
		fmt.Fprintf(p.stderr, "dlroverctl: %s: %d bytes were printed faster than they are read here, and dropped\n",
			text.EscapeLine(p.name(s)), f.Count())
	}
}

func (p *logPrinter) name(s streams.Source) string {
	return p.nodes[s.Node] + "/" + strconv.Itoa(int(s.Rank))
}

func (p *logPrinter) line(s streams.Source, line []byte) {
	shown := string(line)
	if p.args.Bool("json") {
		_ = p.json(logLine{p.nodes[s.Node], int(s.Rank), s.Std, shown}) // a pipe that is closed ends the program
		return
	}
	if p.terminal {
		shown = text.Escape(shown)
	}
	p.out.WriteString(text.EscapeLine(p.name(s)) + ": " + shown + "\n")
}

// logLine is a line of a worker, as --json prints it.
type logLine struct {
	Node string `json:"node"`
	Rank int    `json:"rank"`
	FD   uint8  `json:"fd"` // 1 is standard output, 2 standard error
	Line string `json:"line"`
}

// exec executes a command beside a worker, and ends as it does.
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
	nc, err := c.client.Open(c, c.run(), "streams/exec?rank="+words[1], streams.Protocol)
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

// notTried is the end of a command that was not executed, or is not known to have ended.
func (c *call) notTried(err error) error {
	console.Complain(c.stderr, "dlroverctl", c.explain(err))
	return &exitError{streams.CodeRefused}
}

// attend passes on what the command reads and writes, until it has ended.
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
			return &exitError{streams.CodeSignalBase + 2} // as if the command had heard SIGINT
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

// sendInput sends what the command may read, as long as that reads.
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
	_, _ = nc.Write(streams.Frame{Kind: streams.KindInputEnd}.Append(nil)) // what it was for has ended
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

// take waits for n bytes; false: nobody wants them any more.
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

// safeWriter escapes what acts on a terminal.
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
