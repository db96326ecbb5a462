package node

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"dlrover-run/internal/openfile"
	"dlrover-run/internal/tempdir"
	"dlrover-run/launcher/streams"
)

// writeTime is how long a worker may take for a trace on top of what it records.
const writeTime = 9 * time.Minute

// profile has the worker record what it does, and sends the trace.
func (n *Node) profile(c *conn, gone <-chan struct{}, req streams.Request) streams.Exit {
	if n.cfg.Profile == nil {
		return refused("rank %d cannot be profiled: its launcher adds nothing to its workers; start it with --hang=auto",
			req.Rank)
	}
	if !n.enter() {
		return refused("the launcher of rank %d has %d commands and profiles already; wait for one of them", req.Rank,
			maxCommands)
	}
	defer n.leave()
	ctx, cancel := context.WithTimeout(context.Background(), min(req.Profile, streams.MaxProfile)+writeTime)
	defer cancel()
	go func() {
		select {
		case <-gone:
		case <-n.ending:
		case <-ctx.Done():
		}
		cancel()
	}()
	dir, err := tempdir.Make("dlrover-profile-")
	if err != nil {
		return refused("no room for the trace of rank %d: %s", req.Rank, err)
	}
	defer os.RemoveAll(dir)
	to := filepath.Join(dir, "trace.json")
	note, err := n.cfg.Profile(ctx, req.Rank, min(req.Profile, streams.MaxProfile), to)
	if err == nil {
		err = c.sendTrace(to, req.Rank)
	}
	if err != nil {
		return refused("there is no profile of rank %d: %s", req.Rank, err)
	}
	_ = c.send(streams.Frame{Kind: streams.KindNote, Rank: int32(req.Rank), Data: []byte(note)})
	return streams.Exit{}
}

// sendTrace sends a file, compressed.
func (c *conn) sendTrace(path string, rank int) error {
	f, err := openfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && info.Size() > streams.MaxTrace {
		err = fmt.Errorf("its trace has %d MiB; at most %d are sent: take fewer --seconds", info.Size()>>20,
			streams.MaxTrace>>20)
	}
	if err != nil {
		return err
	}
	zip, err := gzip.NewWriterLevel(&outputWriter{c, int32(rank)}, gzip.BestSpeed)
	if err != nil {
		return err
	}
	_, err = io.Copy(zip, io.LimitReader(f, streams.MaxTrace))
	return errors.Join(err, zip.Close())
}

// outputWriter sends what is written as output.
type outputWriter struct {
	c    *conn
	rank int32
}

// Write implements io.Writer.
func (w *outputWriter) Write(b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		part := b[n:min(len(b), n+streams.MaxData)]
		err = w.c.send(streams.Frame{Kind: streams.KindOutput, Std: 1, Rank: w.rank, Data: part})
		n += len(part)
	}
	return n, err
}
