package serve

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/httperr"
)

// Caller makes requests below /v1/runs/{run}/: an api.Client is one.
type Caller interface {
	// Exchange posts a body with the encoding of the header Content-Encoding, or gets if body is nil. The answer is
	// returned unchanged, but for an encoding of its own.
	Exchange(ctx context.Context, run, path, encoding string, body []byte) (*http.Response, error)
}

// How long requests may take.
const (
	postTime    = 45 * time.Second // there may be a queue
	pictureTime = 2 * time.Minute
)

// Bounds of the data that a client reads, in bytes.
const (
	maxAnswer  = 4 << 20
	maxPicture = 4 << 30
)

// Over makes a Transport of a Caller.
func Over(c Caller) Transport { return remote{c} }

type remote struct{ Caller }

// Post implements Transport.
func (r remote) Post(ctx context.Context, run string, rep hang.Report) (a hang.Ask, err error) {
	body, encoding, err := encode(rep)
	if err != nil {
		return a, err
	}
	err = r.exchange(ctx, run, "hang/report?"+url.Values{"node": {rep.ID}}.Encode(), encoding, body, &a)
	return a, err
}

// Collect implements Transport.
func (r remote) Collect(ctx context.Context, run string) (uint64, error) {
	var c collected
	err := r.exchange(ctx, run, "hang/stacks", "", []byte("{}"), &c)
	return c.Seq, err
}

// Picture implements Transport.
func (r remote) Picture(ctx context.Context, run string, evidence bool) (p hang.Picture, err error) {
	if !evidence {
		err = r.exchange(ctx, run, "hang", "", nil, &p)
		return p, err
	}
	ctx, cancel := context.WithTimeout(ctx, pictureTime)
	defer cancel()
	resp, err := r.Exchange(ctx, run, "hang/evidence", "", nil)
	if err != nil {
		return p, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return p, received(resp)
	}
	return receivePicture(json.NewDecoder(io.LimitReader(resp.Body, maxPicture)))
}

func (r remote) exchange(ctx context.Context, run, path, encoding string, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, postTime)
	defer cancel()
	resp, err := r.Exchange(ctx, run, path, encoding, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusNoContent:
		return nil
	case http.StatusOK:
		if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(into); err != nil {
			return fmt.Errorf("the daemon's reply about hangs is not ours: %w", err)
		}
		return nil
	}
	return received(resp)
}

// received is the error in an answer.
func received(resp *http.Response) error {
	data, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	body, ok := httperr.Parse(data)
	if !ok {
		return fmt.Errorf("%w: HTTP %s: the daemon knows nothing of hangs (an older version?)", ErrBadRequest, resp.Status)
	}
	return wireErrors().Received(body)
}

// receivePicture reads the output of sendPicture.
func receivePicture(dec *json.Decoder) (p hang.Picture, err error) {
	var shared interner
	var known tables
	shared.of(1)
	for first := true; ; first = false {
		var line pictureLine
		if err := dec.Decode(&line); err != nil {
			return p, fmt.Errorf("read the evidence of a hang: %w", err)
		}
		if first {
			if line.Picture == nil {
				return p, fmt.Errorf("the daemon's reply about hangs is not ours: no picture in it")
			}
			p = *line.Picture
		}
		known.Stacks = append(known.Stacks, line.Stacks...)
		known.Groups = append(known.Groups, line.Groups...)
		q := parcel{tables: known}
		for _, e := range line.Evidence {
			q.report.Evidence = append(q.report.Evidence, e.Evidence)
			q.refs = append(q.refs, ref{e.Stacks, e.Groups})
		}
		q.unpack(&shared)
		p.Evidence = append(p.Evidence, q.report.Evidence...)
		if line.End {
			return p, nil
		}
	}
}
