package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/answers/remote"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/streams"
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
	nc, err := remote.Profile(c, c.daemon.client, c.run(), int(rank), time.Duration(seconds)*time.Second)
	if err != nil {
		return err
	}
	defer nc.Close()
	stop := context.AfterFunc(c, func() { _ = nc.Close() })
	defer stop()
	name := fileName(c, "profile", fmt.Sprintf("-rank%d", rank)) + ".json.gz"
	fmt.Fprintf(c.stderr, "dlroverctl: rank %d is recorded for %d s, and then writes that\n", rank, seconds)
	note := ""
	path, err := newFile(c, name, func(w io.Writer) (err error) {
		if note, err = streams.CopyTrace(w, nc); c.Err() != nil {
			return c.Err()
		}
		if err != nil {
			err = &foundError{errors.New("profile: " + text.EscapeLine(err.Error()))}
		}
		return err
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(c.stderr, "dlroverctl: rank %d: %s; open the file with https://ui.perfetto.dev\n", rank,
		text.EscapeLine(note))
	return c.did(text.EscapeLine(path))
}
