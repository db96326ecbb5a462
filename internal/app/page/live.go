package page

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"dlrover-run/rendezvous/api"
)

// settle is how long news are gathered before a browser is told: a restart of many nodes is thousands of events.
const settle = 200 * time.Millisecond

// live tells a browser whenever the timeline of a run has grown, until it goes away. A browser that comes back begins
// with the present.
func (p *Page) live(w http.ResponseWriter, req *http.Request) {
	select {
	case p.streams <- struct{}{}:
		defer func() { <-p.streams }()
	default:
		http.Error(w, "too many pages are open", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for after := uint64(0); ; {
		es, err := p.cfg.Source.Events(req.Context(), req.PathValue("run"), after)
		for errors.Is(err, api.ErrNothingNew) && send(w, ":\n\n") {
			es, err = p.cfg.Source.Events(req.Context(), req.PathValue("run"), after)
		}
		if err != nil || !send(w, "event: change\ndata:\n\n") {
			return
		}
		after = es.Next
		select {
		case <-time.After(settle):
		case <-req.Context().Done():
			return
		}
	}
}

// send reports whether the browser has taken it.
func send(w http.ResponseWriter, text string) bool {
	c := http.NewResponseController(w)
	_ = c.SetWriteDeadline(time.Now().Add(writeTime))
	_, err := fmt.Fprint(w, text)
	return err == nil && c.Flush() == nil
}
