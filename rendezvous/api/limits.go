package api

import (
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"dlrover-run/internal/conns"
)

// Bounds of the requests in a second, and of those at once. Callers that may not be served are counted by their
// address, others by their token alone: all nodes may be behind one address. A restart takes two requests of each node,
// and a start four.
const (
	refusedRate  = 100
	refusedBurst = 1000
	servedRate   = 50_000
	servedBurst  = 500_000
)

// Bodies of more than largeBody bytes are read a few at a time; until then they wait in the kernel. Each has 2 MiB at
// most.
const (
	largeBody   = 64 << 10
	largeBodies = 128
)

// limits are those of the requests to a server.
type limits struct {
	refusals, services *conns.Rates
	bodies             chan struct{} // holds one for each large body that is read
}

func newLimits() *limits {
	return &limits{refusals: conns.NewRates(refusedRate, refusedBurst), services: conns.NewRates(servedRate, servedBurst),
		bodies: make(chan struct{}, largeBodies)}
}

// refused counts a request that err refuses. It returns the error to be answered.
func (l *limits) refused(req *http.Request, err error) error {
	from := conns.Origin(bare(req.RemoteAddr))
	if l.refusals.Allow(from, time.Now()) {
		return err
	}
	return fmt.Errorf("%w that may not be served come from %s; %d a second are answered", errTooMany, from, refusedRate)
}

// served counts a request that may be served.
func (l *limits) served(req *http.Request) error {
	if l.services.Allow(req.Header.Get("Authorization"), time.Now()) {
		return nil
	}
	return fmt.Errorf("%w with this job token: more than %d a second", errTooMany, servedRate)
}

// serve has a large body wait for its turn.
func (l *limits) serve(next http.Handler, w http.ResponseWriter, req *http.Request) {
	if req.ContentLength >= 0 && req.ContentLength <= largeBody {
		next.ServeHTTP(w, req)
		return
	}
	b := &turn{ReadCloser: req.Body, of: l.bodies, gone: req.Context().Done()}
	defer b.over()
	req.Body = b
	next.ServeHTTP(w, req)
}

// turn is a large body. It has a place among those that are read from its first byte to its last one.
type turn struct {
	io.ReadCloser
	of         chan struct{}
	gone       <-chan struct{}
	begin, end sync.Once
	err        error // why it has no place
}

// Read implements io.Reader.
func (t *turn) Read(p []byte) (n int, err error) {
	if t.begin.Do(t.enter); t.err == nil {
		n, err = t.ReadCloser.Read(p)
	} else {
		err = t.err
	}
	if err != nil {
		t.over()
	}
	return n, err
}

func (t *turn) enter() {
	late := time.NewTimer(requestTimeout)
	defer late.Stop()
	select {
	case t.of <- struct{}{}:
	case <-t.gone:
		t.err = io.ErrUnexpectedEOF
	case <-late.C:
		t.err = fmt.Errorf("%w of more than %d bytes", errTooMany, largeBody)
	}
}

// over gives the place back. A body that is never read needs none.
func (t *turn) over() {
	t.begin.Do(func() { t.err = io.EOF })
	t.end.Do(func() {
		if t.err == nil {
			<-t.of
		}
	})
}
