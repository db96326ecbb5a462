package api

import (
	"errors"
	"fmt"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
)

// A web page can have the browser that shows it send requests to any address, also to one that only this host reaches.
// Such requests are recognized by Origin in all that change something, by Sec-Fetch-Site, or by a Content-Type that
// needs no [preflight]. A Host of the page's own, whose name resolves to our address, is another sign.
//
// [preflight]: https://developer.mozilla.org/docs/Web/HTTP/Guides/CORS

// programsOnly rejects requests of the scripts and forms of web pages.
func programsOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if len(req.Header["Origin"]) > 0 {
			turnAway(w, fmt.Errorf("%w: it has an Origin, %.100q", errPage, req.Header.Get("Origin")))
			return
		}
		next.ServeHTTP(w, req)
	})
}

// checkMedia rejects bodies of other types than JSON. Launchers of earlier versions send no type.
func checkMedia(req *http.Request) error {
	said := req.Header.Get("Content-Type")
	kind, _, _ := mime.ParseMediaType(said)
	if req.Method == http.MethodGet || said == "" || kind == "application/json" {
		return nil
	}
	return fmt.Errorf("%w: %.100q; need application/json (curl: -H 'Content-Type: application/json')", errMedia, said)
}

// visitors lets browsers of this user through where there is no token. Where there is one, the page asks for it, and
// requests that may be guesses are counted as those that the API refuses.
func (s *server) visitors(page http.Handler) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		err := certified(req)
		switch {
		case err != nil:
		case s.cfg.Token == "":
			if err = s.checkHost(req, "same-origin"); err == nil {
				err = s.checkUser(req)
			}
		case req.Method == http.MethodPost || req.Header.Get("Authorization") != "":
			err = s.limits.refused(req, nil)
		}
		if err == nil && s.cfg.Standby != nil {
			err = s.cfg.Standby()
		}
		if err != nil {
			turnAway(w, err)
			return
		}
		page.ServeHTTP(w, req)
	}
}

// PageHandler serves the page of cfg alone.
func PageHandler(cfg ServerConfig) http.Handler {
	s := &server{cfg: cfg, limits: newLimits()}
	top := http.NewServeMux()
	top.HandleFunc("/ui/", s.visitors(cfg.Page))
	return top
}

// checkHost refuses names that others may have given to an address of this host. It is for requests without a token,
// which no page has but our own: its requests come from the site own.
func (s *server) checkHost(req *http.Request, own string) error {
	if site := req.Header.Get("Sec-Fetch-Site"); site != "" && site != "none" && site != own {
		return fmt.Errorf("%w: it has Sec-Fetch-Site, %.20q", errPage, site)
	}
	local, ok := req.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if s.cfg.Insecure || !ok || !local.IP.IsLoopback() || s.ownName(hostOf(req.Host)) {
		return nil // --insecure serves a network, and a proxy on this host, by any name
	}
	return fmt.Errorf("%w: Host is %.100q; without a job token need an address, localhost or this host's name", errPage,
		req.Host)
}

func hostOf(hostPort string) string {
	if host, _, err := net.SplitHostPort(hostPort); err == nil {
		return host
	}
	return strings.Trim(hostPort, "[]")
}

// ownName reports whether host is a name that cannot be registered: one without a dot, or one below localhost.
func (s *server) ownName(host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	own, _ := os.Hostname()
	return !strings.Contains(host, ".") || strings.HasSuffix(host, ".localhost") || host == strings.ToLower(own) ||
		host == strings.ToLower(s.cfg.Name)
}

// turnAway answers a rejected caller, and ends the connection.
func turnAway(w http.ResponseWriter, err error) {
	w.Header().Set("Connection", "close")
	if errors.Is(err, errTooMany) {
		w.Header().Set("Retry-After", "1") // by then the bound allows a hundred of them, or more
	}
	limitBody(w)
	wireErrors.Write(w, err)
}
