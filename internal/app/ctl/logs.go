package ctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/text"
	"dlrover-run/launcher/streams"
	"dlrover-run/rendezvous/api"
)

func logsOptions() []cli.Flag {
	return []cli.Flag{followOption(), nodeOption(),
		&cli.IntFlag{Name: "rank", Value: -1, Usage: "`R`: only this rank (default: all)"},
		&cli.IntFlag{Name: "tail", Value: -1, Usage: "`N`: begin with the last N lines of each stream of each worker " +
			"(default: 10 with -f, else the last 64 KiB)"}}
}

// logs prints the workers' output.
func (c *call) logs() error {
	follow, tail := c.args.Bool("follow"), c.args.Int("tail")
	if follow && !c.args.IsSet("tail") {
		tail = defaultTail
	}
	for name, least := range map[string]int{"rank": 0, "tail": -1} {
		if n := c.args.Int(name); c.args.IsSet(name) && n < least {
			return &usageError{fmt.Errorf("logs: --%s=%d: need a number from 0", name, n)}
		}
	}
	p := newLogPrinter(c)
	var lost time.Time
	for first := true; ; first = false {
		q := url.Values{"tail": {strconv.Itoa(tail)}, "follow": {strconv.FormatBool(follow)}, "node": {c.args.String("node")},
			"rank": {strconv.Itoa(c.args.Int("rank"))}}
		nc, err := c.daemon.client.Open(c, c.run(), "streams/logs?"+q.Encode(), streams.Protocol)
		if err == nil {
			lost, tail = time.Time{}, 0 // after a reconnect, the tail has been printed already
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

// defaultTail is the number of lines that logs -f begins with.
const defaultTail = 10

// noStreams explains that the daemon serves nothing under the path of streams.
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

// read prints the stream until its end, which is nil, or until the connection breaks.
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

// keepShowing shows lines that remain unfinished.
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

// print writes the output of do at once.
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
