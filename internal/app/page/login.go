package page

import (
	"crypto/subtle"
	"net/http"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/app/page/ticket"
)

// A browser proves that its user knows the job token by a cookie or, to get one, by a ticket in a link, which counts
// once.
const (
	cookieName = "dlrover"
	cookieTime = 12 * time.Hour
	maxTickets = 1024 // used ones that are remembered; with more, tickets are refused until some expire
)

// tickets remembers those that were used.
type tickets struct {
	mu   sync.Mutex
	used map[string]time.Time
}

// use reports whether a ticket is valid, and was not used before.
func (t *tickets) use(tokens []string, text string, now time.Time) bool {
	if !ticket.Proves(tokens, ticket.Link, text, now) {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for old, at := range t.used {
		if now.Sub(at) > 2*ticket.LinkTime {
			delete(t.used, old)
		}
	}
	if _, used := t.used[text]; used || len(t.used) >= maxTickets {
		return false
	}
	if t.used == nil {
		t.used = map[string]time.Time{}
	}
	t.used[text] = now
	return true
}

// admitted reports whether a request has proved that its user knows the token.
func (p *Page) admitted(req *http.Request) bool {
	if p.cfg.Tokens == nil {
		return true // the API has checked whose process it is
	}
	if got, ok := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer "); ok {
		return p.right(got)
	}
	c, err := req.Cookie(cookieName)
	return err == nil && ticket.Proves(p.cfg.Tokens(), ticket.Cookie, c.Value, time.Now())
}

func (p *Page) right(got string) (ok bool) {
	for _, token := range p.cfg.Tokens() {
		ok = subtle.ConstantTimeCompare([]byte(got), []byte(token)) == 1 || ok
	}
	return ok
}

// welcome gives a visitor the cookie, and sends the browser on.
func (p *Page) welcome(w http.ResponseWriter, req *http.Request, next string) {
	if p.cfg.Tokens != nil {
		http.SetCookie(w, &http.Cookie{
			Name: cookieName, Value: ticket.New(p.cfg.Tokens()[0], ticket.Cookie, time.Now().Add(cookieTime)), Path: "/ui/",
			MaxAge: int(cookieTime / time.Second), HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: p.cfg.TLS,
		})
	}
	http.Redirect(w, req, next, http.StatusSeeOther)
}

// login answers the form with the token, and links with a ticket.
func (p *Page) login(w http.ResponseWriter, req *http.Request) {
	next := inside(req.FormValue("next"))
	link := req.URL.Query().Get("ticket")
	switch {
	case p.admitted(req), p.cfg.Tokens == nil:
		p.welcome(w, req, next)
	case link != "" && req.Method == http.MethodGet && p.tickets.use(p.cfg.Tokens(), link, time.Now()):
		p.welcome(w, req, next)
	case req.Method == http.MethodPost && sameOrigin(req) && p.right(req.PostFormValue("token")):
		p.welcome(w, req, next)
	case req.Method == http.MethodPost:
		w.WriteHeader(http.StatusForbidden)
		p.write(w, "login", loginView{Next: next, Wrong: "This is not the job token."})
	case link != "":
		w.WriteHeader(http.StatusForbidden)
		p.write(w, "login", loginView{Next: next,
			Wrong: "This link has been used, or is older than a minute. Make another one with dlroverctl open."})
	default:
		p.write(w, "login", loginView{Next: next})
	}
}

type loginView struct{ Next, Wrong string }

// inside is a path of the page, and its first one for any other.
func inside(path string) string {
	if strings.HasPrefix(path, "/ui/") && !strings.ContainsAny(path, "\\\r\n") {
		return path
	}
	return "/ui/"
}

// sameOrigin: the request comes from this page, and not from another one that the browser shows.
func sameOrigin(req *http.Request) bool {
	origin := req.Header.Get("Origin")
	_, host, _ := strings.Cut(origin, "://")
	return origin == "" || host == req.Host
}
