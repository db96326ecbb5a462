// Package remote asks a server for the facts about a run, over its API.
package remote

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/hang/serve"
	"dlrover-run/internal/app/answers"
	"dlrover-run/internal/app/service"
	"dlrover-run/launcher/streams"
	"dlrover-run/rendezvous/api"
)

// NoEvents is how long to wait for the first event of a run: the server holds the request for longer.
const NoEvents = 2 * time.Second

// exchanger has one method of a Client. A program whose templates look methods up by name would link all of them.
type exchanger func(ctx context.Context, run, path, encoding string, body []byte) (*http.Response, error)

// Exchange implements serve.Caller.
func (e exchanger) Exchange(ctx context.Context, run, path, encoding string, body []byte) (*http.Response, error) {
	return e(ctx, run, path, encoding, body)
}

// Hangs asks about hangs.
func Hangs(c *api.Client) serve.Transport { return serve.Over(exchanger(c.Exchange)) }

// Facts completes the facts about a run whose status is known. Only events after the known ones are asked for: if there
// are none in time, there are none.
func Facts(ctx context.Context, c *api.Client, f answers.Facts, inTime time.Duration) (answers.Facts, error) {
	run, after := f.Run.Run, uint64(0)
	if n := len(f.Events); n > 0 {
		after = f.Events[n-1].Seq
	} else {
		inTime = NoEvents
	}
	asking, cancel := context.WithTimeout(ctx, inTime)
	defer cancel()
	es, err := c.Events(asking, run, after)
	if err != nil && asking.Err() == nil && !errors.Is(err, api.ErrNothingNew) {
		return f, err
	}
	f.Events = append(f.Events[:len(f.Events):len(f.Events)], es.Events...)
	var v service.Verdict
	if c.Mounted(ctx, run, "verdict", &v) == nil { // else no epoch has ended
		f.Verdict = &v
	}
	f.Hang, _ = Hangs(c).Picture(ctx, run, false) // without reports there is none
	var saves coordinator.Summary
	if err := c.Mounted(ctx, run, "checkpoints", &saves); err == nil {
		f.Keep(saves)
	}
	_ = c.Global(ctx, "nodes", nil, &f.Machines) // not every server keeps them
	return f, nil
}

// Events are those of a run that its server keeps.
func Events(ctx context.Context, c *api.Client, run string) (api.Events, error) {
	ctx, cancel := context.WithTimeout(ctx, NoEvents)
	defer cancel()
	es, err := c.Events(ctx, run, 0)
	if errors.Is(err, context.DeadlineExceeded) {
		return api.Events{}, nil
	}
	return es, err
}

// Status is that of a run, with its nodes.
func Status(ctx context.Context, c *api.Client, run string) (api.RunStatus, error) {
	runs, err := c.Runs(ctx)
	if err != nil {
		return api.RunStatus{}, err
	}
	i := slices.IndexFunc(runs, func(r api.RunStatus) bool { return r.Run == run })
	if i < 0 {
		return api.RunStatus{}, api.ErrUnknownRun
	}
	return Present(runs[i]), nil
}

// Present has the last nodes of a run that is over as its nodes.
func Present(s api.RunStatus) api.RunStatus {
	if s.Outcome != "" {
		s.Nodes, s.Ended = s.Ended, nil
	}
	return s
}

// Profile opens the stream of a profile of one worker, for streams.CopyTrace.
func Profile(ctx context.Context, c *api.Client, run string, rank int, last time.Duration) (io.ReadCloser, error) {
	q := url.Values{"rank": {strconv.Itoa(rank)}, "seconds": {strconv.Itoa(int(last / time.Second))}}
	nc, err := c.Open(ctx, run, "streams/profile?"+q.Encode(), streams.Protocol)
	if errors.Is(err, api.ErrNotFound) {
		err = errors.New("it is of a version without profiles; start one of this version")
	}
	if err != nil {
		return nil, err
	}
	return nc, nil
}
