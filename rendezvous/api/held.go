package api

import (
	"context"
	"net/http"
	"slices"
	"time"

	"dlrover-run/internal/longpoll"
)

// heldWatch is a Watch whose connection waits without a goroutine of its server.
type heldWatch struct {
	visit
	conn   *longpoll.Conn
	expiry *time.Timer
	ended  bool // guarded by the run
}

// hold waits for news, and answers over a connection.
func (w visit) hold(c *longpoll.Conn, most time.Duration) {
	h := &heldWatch{visit: w, conn: c}
	c.Hold(h.hungUp)
	w.run.Lock()
	defer w.run.Unlock()
	if h.ended {
		return
	}
	h.expiry = time.AfterFunc(most, func() { c.Later(h.expire) })
	if !h.waitLocked() {
		c.Later(h.look)
	}
}

// waitLocked waits for news, and reports false if there are some.
func (h *heldWatch) waitLocked() bool {
	n, err := h.run.newerLocked(h.node, h.after, false)
	if n != nil || err != nil {
		return false
	}
	if ws := h.run.watchersLocked(h.node); !slices.Contains(ws.held, h) {
		ws.held = append(ws.held, h)
	}
	return true
}

// look answers if there are news, and expire in any case.
func (h *heldWatch) look(w http.ResponseWriter) bool { return h.answers(w, false) }

func (h *heldWatch) expire(w http.ResponseWriter) bool { return h.answers(w, true) }

func (h *heldWatch) answers(w http.ResponseWriter, last bool) bool {
	n, err := h.news(last)
	switch {
	case n == nil && err == nil:
		return false
	case err == nil && decides(&n.Directive) && h.hub.cfg.Keeper != nil: // which others must not wait for
		go func() {
			n, err := h.end(n, nil, false)
			h.conn.Later(func(w http.ResponseWriter) bool { writeAnswer(w, n, err); return true })
		}()
		return false
	}
	n, err = h.end(n, err, false)
	writeAnswer(w, n, err)
	return true
}

// news are the result of the Watch, which has then ended; nil without an error: it goes on, or has ended before.
func (h *heldWatch) news(last bool) (*News, error) {
	h.run.Lock()
	defer h.run.Unlock()
	if h.ended || !last && h.waitLocked() {
		return nil, nil
	}
	n, err := h.run.newerLocked(h.node, h.after, last)
	if n == nil && err == nil {
		err = ErrNothingNew
	}
	h.endLocked()
	return n, err
}

// endLocked makes sure that nothing else ends the Watch.
func (h *heldWatch) endLocked() {
	h.ended = true
	if h.expiry != nil {
		h.expiry.Stop()
	}
	ws := h.run.wake[h.node]
	if ws == nil {
		return
	}
	ws.held = slices.DeleteFunc(ws.held, func(o *heldWatch) bool { return o == h })
	if len(ws.held) == 0 && ws.waiting == nil {
		delete(h.run.wake, h.node)
	}
}

// hungUp ends the Watch of a launcher that does not wait any more.
func (h *heldWatch) hungUp() {
	h.run.Lock()
	ended := h.ended
	h.endLocked()
	h.run.Unlock()
	if !ended {
		_, _ = h.end(nil, context.Canceled, true)
	}
}
