package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Bounds of a stream of events.
const (
	streamAlive = 15 * time.Second // a comment is sent when nothing else has been for so long
	writeTime   = 10 * time.Second // for a reader to take one write; a slower one is dropped
)

// events answers with a part of the timeline, or streams it if the request accepts text/event-stream.
func (s *server) events(w http.ResponseWriter, req *http.Request) {
	streams := strings.Contains(req.Header.Get("Accept"), "text/event-stream")
	var es Events
	var after uint64
	run, err := runName(req)
	if err == nil {
		after, err = eventCursor(req, streams)
	}
	switch {
	case err != nil:
	case streams:
		if err = s.stream(w, req, run, after); err == nil {
			return
		}
	default:
		es, err = s.hub.Events(req.Context(), run, after)
	}
	limitWrite(w)
	writeAnswer(w, es, err)
}

// eventCursor is the number after which events are wanted. The [Last-Event-ID] of a browser that reconnects takes
// precedence over the address that it was given first.
//
// [Last-Event-ID]: https://html.spec.whatwg.org/multipage/server-sent-events.html#the-last-event-id-header
func eventCursor(req *http.Request, streams bool) (uint64, error) {
	if last := req.Header.Get("Last-Event-ID"); streams && last != "" {
		return number(url.Values{"Last-Event-ID": {last}}, "Last-Event-ID", false)
	}
	return number(req.URL.Query(), "after", true)
}

// limitWrite bounds the writing of this answer, or of its next part; net/http lifts it for the next request.
func limitWrite(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTime))
}

// stream sends events until the reader goes away or is too slow, or the run or the hub closes. An error is one before
// the first byte.
func (s *server) stream(w http.ResponseWriter, req *http.Request, run string, after uint64) error {
	r, err := s.hub.existing(run)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	alive := time.NewTicker(streamAlive)
	defer alive.Stop()
	for ok := send(w, nil); ok; {
		es, news, err := r.line.since(after)
		if err != nil {
			return nil // the end of the connection is the sign
		}
		if news == nil {
			after, ok = es.Next, send(w, encodeStream(es))
			alive.Reset(streamAlive)
			continue
		}
		select {
		case <-news:
		case <-alive.C:
			ok = send(w, []byte(":\n\n"))
		case <-req.Context().Done():
			return nil
		}
	}
	return nil
}

// send writes and flushes; it reports false when the reader is gone or too slow.
func send(w http.ResponseWriter, data []byte) bool {
	limitWrite(w)
	if _, err := w.Write(data); err != nil {
		return false
	}
	return http.NewResponseController(w).Flush() == nil
}

// encodeStream writes events as a browser's EventSource reads them. "dropped" means that some are missing before these.
func encodeStream(es Events) []byte {
	var b bytes.Buffer
	if es.Dropped {
		b.WriteString("event: dropped\ndata: {}\n\n")
	}
	for _, e := range es.Events {
		data, err := json.Marshal(e)
		if err != nil { // an Event holds nothing that JSON cannot
			continue
		}
		fmt.Fprintf(&b, "id: %s\nevent: %s\ndata: %s\n\n", strconv.FormatUint(e.Seq, 10), e.Event, data)
	}
	return b.Bytes()
}
