package page

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"dlrover-run/internal/app/bundle"
	"dlrover-run/launcher/streams"
)

// Bounds of downloads.
const (
	maxFiles    = 4 // at a time
	maxFile     = 1 << 30
	profileTime = 5 * time.Second
	fileTime    = 10 * time.Minute // until it is complete; a worker may write its trace for most of that
)

// errLarge: the file breaks off.
var errLarge = fmt.Errorf("it has more than %d MiB, and the page sends no more; dlroverctl does", maxFile>>20)

// file is a download. Its headers are sent with its first byte: until then there can be an error instead.
type file struct {
	w    http.ResponseWriter
	name string
	size int
}

// Write implements io.Writer.
func (f *file) Write(b []byte) (int, error) {
	if f.size == 0 {
		f.w.Header().Set("Content-Type", "application/gzip")
		f.w.Header().Set("Content-Disposition", `attachment; filename="`+f.name+`"`)
	}
	if f.size += len(b); f.size > maxFile {
		return 0, errLarge
	}
	_ = http.NewResponseController(f.w).SetWriteDeadline(time.Now().Add(writeTime))
	return f.w.Write(b)
}

// download answers an order by a file. One that breaks off is an error of the connection, so no browser keeps its part.
func (p *Page) download(w http.ResponseWriter, req *http.Request, o wish) {
	select {
	case p.files <- struct{}{}:
		defer func() { <-p.files }()
	default:
		http.Error(w, fmt.Sprintf("%d downloads are under way; wait for one of them", maxFiles),
			http.StatusServiceUnavailable)
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // its end would be taken for the browser's
	ctx, cancel := context.WithTimeout(req.Context(), fileTime)
	defer cancel()
	f := &file{w: w}
	p.logOrder(req, o)
	send := p.bundle
	if o.Kind == takeProfile {
		send = p.profile
	}
	err := send(ctx, f, req, o)
	if err == nil {
		return
	}
	p.cfg.Log.Info("a download from the page has failed", "run_id", req.PathValue("run"), "kind", o.Kind, "err", err)
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTime))
	if f.size > 0 {
		panic(http.ErrAbortHandler)
	}
	http.Error(w, fmt.Sprintf("%s: %s", o.Kind, err), http.StatusConflict)
}

// bundle sends the archive that dlroverctl makes. There is none of an unknown run.
func (p *Page) bundle(ctx context.Context, f *file, req *http.Request, _ wish) error {
	from := p.cfg.Source.Bundle(req.PathValue("run"))
	if _, err := from.Parts[0].Get(ctx); err != nil {
		return err
	}
	now := time.Now()
	name := bundle.FileName(from.Run, makeBundle, "", now)
	f.name = name + ".tar.gz"
	return bundle.Write(ctx, f, name, now, from)
}

// profile sends the trace of a worker.
func (p *Page) profile(ctx context.Context, f *file, req *http.Request, o wish) error {
	rank, err := strconv.ParseUint(o.Rank, 10, 31)
	if err != nil {
		return fmt.Errorf("rank %.40q: need the rank of a worker, a number from 0", o.Rank)
	}
	run := req.PathValue("run")
	stream, err := p.cfg.Source.Profile(ctx, run, int(rank), req.RemoteAddr+" on the page")
	if err != nil {
		return err
	}
	defer stream.Close()
	defer context.AfterFunc(ctx, func() { _ = stream.Close() })()
	f.name = bundle.FileName(run, takeProfile, fmt.Sprintf("-rank%d", rank), time.Now()) + ".json.gz"
	_, err = streams.CopyTrace(f, stream)
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("there is no trace after %s", fileTime)
	}
	return err
}
