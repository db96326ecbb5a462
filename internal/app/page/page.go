// Package page serves the page of a rendezvous to browsers, below /ui/: all runs, and for each whether it moves, the
// reason, and the next events. It reads the service of its own process, or the API of another one; its numbers are for
// people.
//
// The server writes HTML that needs no script. A script then asks for the changed part of the page whenever the run's
// timeline grows. Nothing is loaded from anywhere else.
package page

import (
	"bytes"
	"compress/gzip"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"
	"time"

	"dlrover-run/rendezvous/api"
)

// Config has the source of a Page, and its visitors' tokens.
type Config struct {
	Source Source
	// Tokens are the job tokens that are right now; nil: there are none, and every request that comes is admitted.
	Tokens func() []string
	// TLS: browsers send the cookie over TLS alone.
	TLS bool
	Log *slog.Logger
}

// Page is an http.Handler for paths below /ui/. It has no goroutines of its own.
type Page struct {
	cfg     Config
	mux     *http.ServeMux
	tickets tickets
	merged  merged
	streams chan struct{} // one place for each open stream
	files   chan struct{} // and for each download
}

// Bounds of visitors.
const (
	maxStreams = 64
	maxBody    = 64 << 10
	writeTime  = 10 * time.Second
)

// policy lets a page load from its own server alone, and be part of no other page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

//go:embed templates/*.html
var templates embed.FS

//go:embed assets
var assets embed.FS

var parsed = sync.OnceValue(func() *template.Template {
	return template.Must(template.New("").Funcs(template.FuncMap{"stamp": stamp}).ParseFS(templates, "templates/*.html"))
})

// New returns a Page.
func New(cfg Config) *Page {
	p := &Page{cfg: cfg, mux: http.NewServeMux(), streams: make(chan struct{}, maxStreams),
		files: make(chan struct{}, maxFiles)}
	p.mux.HandleFunc("GET /ui/login", p.login)
	p.mux.HandleFunc("POST /ui/login", p.login)
	p.mux.HandleFunc("GET /ui/assets/{name}", asset)
	p.mux.HandleFunc("GET /ui/{$}", p.admit(p.runs))
	p.mux.HandleFunc("GET /ui/nodes", p.admit(p.machines))
	p.mux.HandleFunc("GET /ui/runs/{run}", p.admit(p.run))
	p.mux.HandleFunc("GET /ui/runs/{run}/live", p.admit(p.live))
	p.mux.HandleFunc("GET /ui/runs/{run}/check", p.admit(p.check))
	p.mux.HandleFunc("POST /ui/runs/{run}/orders", p.admit(p.order))
	return p
}

// ServeHTTP implements http.Handler.
func (p *Page) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("Referrer-Policy", "same-origin")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(writeTime))
		req.Body = http.MaxBytesReader(w, req.Body, maxBody)
	}
	p.mux.ServeHTTP(w, req)
}

// admit lets only visitors with the token through. A browser is shown the form, a script gets a status.
func (p *Page) admit(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		switch {
		case p.admitted(req):
			api.Trust(req.Context())
			next(w, req)
		case req.Method == http.MethodGet && !isPart(req) && !strings.HasSuffix(req.URL.Path, "/live"):
			w.WriteHeader(http.StatusUnauthorized)
			p.write(w, "login", loginView{Next: inside(req.URL.RequestURI())})
		default:
			http.Error(w, "log in again", http.StatusUnauthorized)
		}
	}
}

// isPart: the script asks for the changing part of a page alone.
func isPart(req *http.Request) bool { return req.URL.Query().Has("part") }

// show writes a page, or its changing part.
func (p *Page) show(w http.ResponseWriter, req *http.Request, name string, view any) {
	if !isPart(req) {
		p.writeTo(w, req, name, view)
		return
	}
	p.writeTo(w, req, name+"-part", view)
}

func (p *Page) write(w http.ResponseWriter, name string, view any) { p.writeTo(w, nil, name, view) }

// writeTo compresses for browsers that take it: a run of 10,000 nodes has megabytes.
func (p *Page) writeTo(w http.ResponseWriter, req *http.Request, name string, view any) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTime))
	var b bytes.Buffer
	if err := parsed().ExecuteTemplate(&b, name, view); err != nil {
		p.cfg.Log.Error("the page cannot be made", "page", name, "err", err)
		http.Error(w, "the page cannot be made; the log of the daemon says why", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if req == nil || !strings.Contains(req.Header.Get("Accept-Encoding"), "gzip") {
		_, _ = w.Write(b.Bytes()) // the browser may be gone
		return
	}
	w.Header().Set("Content-Encoding", "gzip")
	z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // the level is valid
	_, _ = z.Write(b.Bytes())
	_ = z.Close()
}

// asset serves a script or style, for which a browser asks each time: they are few and small.
func asset(w http.ResponseWriter, req *http.Request) {
	data, err := assets.ReadFile("assets/" + path.Base(req.PathValue("name")))
	if err != nil {
		http.NotFound(w, req)
		return
	}
	kinds := map[string]string{".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
		".svg": "image/svg+xml"}
	w.Header().Set("Content-Type", kinds[path.Ext(req.PathValue("name"))])
	w.Header().Set("Cache-Control", "no-cache")
	_, _ = w.Write(data) // the browser may be gone
}

// runs shows all runs.
func (p *Page) runs(w http.ResponseWriter, req *http.Request) {
	runs, err := p.cfg.Source.Runs(req.Context())
	if err != nil {
		p.fail(w, "All runs", err)
		return
	}
	p.show(w, req, "runs", runsView(runs, time.Now()))
}

// run shows one run.
func (p *Page) run(w http.ResponseWriter, req *http.Request) {
	f, err := p.cfg.Source.Facts(req.Context(), req.PathValue("run"))
	if err != nil {
		p.fail(w, req.PathValue("run"), err)
		return
	}
	v := runView(f)
	v.Stacks = p.stacksOf(req.Context(), f.Run.Run, f.Hang)
	p.show(w, req, "run", v)
}

// fail shows why there is no page of a run, or of all. The script keeps the last one that it had.
func (p *Page) fail(w http.ResponseWriter, name string, err error) {
	status := http.StatusNotFound
	if _, lost := errors.AsType[*url.Error](err); lost {
		status, err = http.StatusBadGateway, fmt.Errorf("the server of the run does not answer: %w", err)
	}
	w.WriteHeader(status)
	p.write(w, "lost", lostView{Run: name, Why: err.Error()})
}

type lostView struct{ Run, Why string }

// machines shows machines with findings or marks, across runs.
func (p *Page) machines(w http.ResponseWriter, req *http.Request) {
	known, kept := p.cfg.Source.Machines(req.Context())
	p.show(w, req, "machines", machinesView(known, kept, time.Now()))
}

// stamp is a time for a browser, which shows it in the visitor's zone.
func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }
