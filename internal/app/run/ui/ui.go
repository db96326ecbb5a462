// Package ui has a dlrover-master beside the launcher serve the page of the job, while the launcher serves its
// rendezvous. The launcher itself can write no HTML.
package ui

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/app/run/elector"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/secure"
	"dlrover-run/launcher"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/proc/guard"
)

// settings are those of --ui.
type settings struct {
	Program string `json:"program"`
	Listen  string `json:"listen"`
}

// New is the feature.
func New() feature.Feature {
	var s *settings
	return feature.Feature{
		Name:     "ui",
		Settings: func(o feature.Options) (err error) { s, err = read(o); return err },
		Plan: func(p *feature.Plan) {
			if s != nil {
				p.Features["ui"] = s
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if s == nil {
				return nil, nil
			}
			return open(n, *s)
		},
	}
}

// read reads --ui; it returns nil if that is not set.
func read(o feature.Options) (s *settings, err error) {
	text := o.String("ui")
	if text == "" {
		return nil, nil
	}
	host, port, err := net.SplitHostPort(text)
	n, notNumber := strconv.ParseUint(port, 10, 16)
	j := o.Job()
	switch {
	case err != nil || notNumber != nil:
		return nil, fmt.Errorf("--ui=%s: need [HOST]:PORT, such as :8080; port 0 is a free one", text)
	case j.Master:
		return nil, errors.New("--ui is for a job whose launcher serves the rendezvous; this one has a dlrover-master, " +
			"whose page dlroverctl open finds: leave --ui out")
	case !token.Loopback(host) && j.Token == "" && !j.Insecure:
		return nil, fmt.Errorf("--ui=%s is a network address and needs a job token: set %s; without one only loopback is "+
			"served, such as --ui=127.0.0.1:%d", text, token.Sources, n)
	}
	program, err := elector.Find("--ui", o.LookPath)
	return &settings{Program: program, Listen: text}, err
}

// page is the page of a job, which is served once this launcher serves the rendezvous.
type page struct {
	settings
	node   feature.Node
	pauses []time.Duration // before each new start
	addr   atomic.Pointer[net.TCPAddr]
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	socket *os.File // that listens; nil: none does
	wg     sync.WaitGroup
}

func open(n feature.Node, s settings) (*feature.Opened, error) {
	p := &page{settings: s, node: n, pauses: []time.Duration{time.Second, 5 * time.Second, 25 * time.Second}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	if n.Job().First {
		if err := p.listen(); err != nil {
			return nil, feature.Unusable(fmt.Errorf("--ui: %w; end what listens there, or give another port", err))
		}
	}
	return &feature.Opened{
		Part:   launcher.Part{End: func(launcher.EndRequest) { p.end() }},
		Page:   http.HandlerFunc(p.redirect),
		Joined: func() { n.Rendezvous().WhenServing(p.start) },
		Close:  p.close,
	}, nil
}

// listen binds the address. The socket is handed to each helper in turn, so that the page keeps its address.
func (p *page) listen() error {
	l, err := net.Listen("tcp", p.Listen)
	if err != nil {
		return err
	}
	defer l.Close()
	at := l.Addr().(*net.TCPAddr)
	if p.socket, err = l.(*net.TCPListener).File(); err == nil {
		p.addr.Store(at)
	}
	return err
}

// later is when the first helper starts: the workers come first. A browser is connected meanwhile, and waits.
const later = 300 * time.Millisecond

// start serves the page of the rendezvous that this process serves at an address.
func (p *page) start(rendezvous string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return
	}
	log := p.node.Log()
	if p.socket == nil {
		if err := p.listen(); err != nil {
			log.Warn("the page is not served; the job goes on", "why", err)
			return
		}
	}
	host, _ := os.Hostname()
	link := p.at(host)
	link.Path = "/ui/runs/" + p.node.Job().RunID
	link.RawPath = "/ui/runs/" + url.PathEscape(p.node.Job().RunID)
	log.Info("the page of this job; where there is a job token, it asks for it", "url", link.String())
	p.wg.Go(func() {
		if retry.Sleep(p.ctx, later) {
			feature.Keep(p.ctx, log, "the page's "+p.Program, p.pauses,
				func(ctx context.Context) string { return p.once(ctx, rendezvous) })
		}
	})
}

// once runs a helper, and returns why it has ended.
func (p *page) once(ctx context.Context, rendezvous string) string {
	j := p.node.Job()
	args := []string{p.Program, "--page-of=" + rendezvous, "--listen=-", "--log-format=" + string(j.LogFormat)}
	if j.TokenFile != "" {
		args = append(args, "--token-file="+j.TokenFile)
	}
	if j.Insecure {
		args = append(args, "--insecure")
	}
	h, err := p.node.Processes().Start(proc.Spec{Path: p.Program, Args: args, Env: environ(p.node.Environ(), j),
		Stdin: p.socket, Stderr: os.Stderr, Helper: true})
	if err != nil {
		return err.Error()
	}
	select {
	case <-h.Done():
	case <-ctx.Done():
		_ = h.Signal(syscall.SIGKILL) // it keeps nothing
		<-h.Done()
	}
	return fmt.Sprintf("exit code %d", h.Exit().Code)
}

// environ gives a helper the job's token and TLS, and not those of the variables.
func environ(env []string, j *feature.Job) []string {
	for _, name := range append(secure.Variables[:], "DLROVER_TOKEN_FILE") {
		env = append(env, name+"=")
	}
	return append(append(env, guard.TokenVariable+"="+j.Token), j.TLS.Environ()...)
}

// redirect sends browsers that come to the rendezvous to the page.
func (p *page) redirect(w http.ResponseWriter, req *http.Request) {
	if p.addr.Load() == nil {
		http.NotFound(w, req)
		return
	}
	host, _, err := net.SplitHostPort(req.Host)
	if err != nil {
		host = req.Host
	}
	to := p.at(host)
	to.Path, to.RawPath, to.RawQuery = req.URL.Path, req.URL.RawPath, req.URL.RawQuery
	w.Header().Set("Location", to.String()) // the host is that which the browser has asked
	w.WriteHeader(http.StatusTemporaryRedirect)
}

// at is the address of the page, by a name of this host unless it is at one address alone.
func (p *page) at(host string) *url.URL {
	at, scheme := p.addr.Load(), "http"
	if p.node.Job().TLS.On() {
		scheme = "https"
	}
	if !at.IP.IsUnspecified() {
		host = at.IP.String()
	}
	return &url.URL{Scheme: scheme, Host: net.JoinHostPort(host, strconv.Itoa(at.Port))}
}

func (p *page) end() {
	p.mu.Lock()
	p.cancel()
	p.mu.Unlock()
	p.wg.Wait()
}

// close frees the port.
func (p *page) close() error {
	p.end()
	if p.socket == nil {
		return nil
	}
	return p.socket.Close()
}
