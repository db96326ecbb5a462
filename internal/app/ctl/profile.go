package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/text"
	"dlrover-run/launcher/streams"
	"dlrover-run/rendezvous/api"
)

const profileAbout = `PyTorch's profiler, 2.7 or newer, records all threads of the worker, with their functions
of Python; the worker is slower meanwhile. It needs --hang=auto at the launchers. The trace
goes to dlrover-profile-RUN-rankR-TIME.json.gz here, or in --path=DIR. Open it with
https://ui.perfetto.dev or chrome://tracing.`

const maxSeconds = int(streams.MaxProfile / time.Second)

func profileOptions() []cli.Flag {
	return []cli.Flag{
		&cli.IntFlag{Name: "seconds", Value: 5, Usage: fmt.Sprintf("`N`: for how long, 1 to %d", maxSeconds)},
		pathOption("write the trace there, and make the directory if needed (default: the working directory)"),
	}
}

// profile writes a trace of one worker.
func (c *call) profile() error {
	rank, err := strconv.ParseUint(c.args.Args().Get(1), 10, 31)
	if err != nil {
		return &usageError{fmt.Errorf("profile %s %s: need the rank of a worker, a number from 0", c.run(),
			c.args.Args().Get(1))}
	}
	seconds := c.args.Int("seconds")
	if seconds < 1 || seconds > maxSeconds {
		return &usageError{fmt.Errorf("profile: --seconds=%d: need 1 to %d", seconds, maxSeconds)}
	}
	q := url.Values{"rank": {strconv.Itoa(int(rank))}, "seconds": {strconv.Itoa(seconds)}}
	nc, err := c.daemon.client.Open(c, c.run(), "streams/profile?"+q.Encode(), streams.Protocol)
	if errors.Is(err, api.ErrNotFound) {
		err = errors.New("it is of a version without profiles; start one of this version")
	}
	if err != nil {
		return err
	}
	defer nc.Close()
	stop := context.AfterFunc(c, func() { _ = nc.Close() })
	defer stop()
	name := fileName(c, "profile", fmt.Sprintf("-rank%d", rank)) + ".json.gz"
	fmt.Fprintf(c.stderr, "dlroverctl: rank %d is recorded for %d s, and then writes that\n", rank, seconds)
	note := ""
	path, err := newFile(c, name, func(w io.Writer) (err error) { note, err = trace(c, nc, w); return err })
	if err != nil {
		return err
	}
	fmt.Fprintf(c.stderr, "dlroverctl: rank %d: %s; open the file with https://ui.perfetto.dev\n", rank,
		text.EscapeLine(note))
	return c.did(text.EscapeLine(path))
}

// trace writes the trace of a stream; note says what is in it.
func trace(ctx context.Context, nc io.Reader, to io.Writer) (note string, err error) {
	in, size := streams.NewReader(nc), 0
	for {
		f, err := in.Next()
		switch {
		case ctx.Err() != nil:
			return "", ctx.Err()
		case err != nil || f.Kind == streams.KindEnd:
			return "", &foundError{errors.New("profile: the connection is lost, or the run is over: there is no trace")}
		}
		switch f.Kind {
		case streams.KindOutput:
			if size += len(f.Data); size > streams.MaxTrace {
				return "", &foundError{fmt.Errorf("profile: more than %d MiB arrive", streams.MaxTrace>>20)}
			}
			if _, err := to.Write(f.Data); err != nil {
				return "", &foundError{fmt.Errorf("profile: %w", err)}
			}
		case streams.KindNote:
			note = string(f.Data)
		case streams.KindExit:
			var e streams.Exit
			if err := f.Decode(&e); err != nil || e.Code != 0 || e.Error != "" {
				return "", &foundError{errors.New("profile: " + text.EscapeLine(e.Error))}
			}
			return note, nil
		}
	}
}
