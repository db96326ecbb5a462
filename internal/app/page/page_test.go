package page

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/app/page/ticket"
	"dlrover-run/internal/app/service"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const secret = "0123456789abcdef"

// served is a page over a real service.
type served struct {
	*testing.T
	service *service.Service
	at      string
	client  *http.Client
}

func newServed(t *testing.T, tokens ...string) *served {
	cfg := service.Config{Log: slog.New(slog.DiscardHandler)}
	p := Config{Log: cfg.Log}
	if len(tokens) > 0 {
		cfg.Token = tokens[0]
		p.Tokens = func() []string { return tokens }
	}
	cfg.Page = func(s *service.Service) http.Handler {
		p.Source = Own(s, nil)
		return New(p)
	}
	s, err := service.New(cfg)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	client := &http.Client{Transport: &http.Transport{}, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	t.Cleanup(func() {
		client.CloseIdleConnections()
		s.Close(time.Second)
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	})
	return &served{T: t, service: s, at: "http://" + l.Addr().String(), client: client}
}

// do sends a request, with headers in pairs.
func (s *served) do(method, path, body string, headers ...string) (*http.Response, string) {
	s.Helper()
	req, err := http.NewRequestWithContext(s.Context(), method, s.at+path, strings.NewReader(body))
	require.NoError(s, err)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := s.client.Do(req)
	require.NoError(s, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(s, err)
	return resp, string(data)
}

func (s *served) join(run string, nodes ...string) {
	s.Helper()
	for _, n := range nodes {
		require.NoError(s, s.service.Hub.Join(s.Context(), run, rendezvous.Join{
			Node:   rendezvous.Node{ID: n, Name: n, Rank: -1, Slots: 2, Addr: "127.0.0.1"},
			Params: rendezvous.Params{Min: 2, Max: 2, MaxRestarts: 3}}))
	}
}

const form = "application/x-www-form-urlencoded"

func TestOnlyVisitorsWithTheTokenSeeAnything(t *testing.T) {
	s := newServed(t, secret, "the next token")
	s.join("private", "n0")
	later := time.Now().Add(time.Hour)
	for _, path := range []string{"/ui/", "/ui/nodes", "/ui/runs/private", "/ui/runs/none", "/ui/?part",
		"/ui/runs/private/live"} {
		for _, cookie := range []string{"", "x", ticket.New("other", ticket.Cookie, later),
			ticket.New(secret, ticket.Cookie, time.Now().Add(-time.Second)), ticket.New(secret, ticket.Link, later)} {
			resp, body := s.do(http.MethodGet, path, "", "Cookie", "dlrover="+cookie)
			require.Equal(t, http.StatusUnauthorized, resp.StatusCode, path)
			require.NotContains(t, body, "n0")
			require.NotContains(t, strings.ReplaceAll(body, "/ui/runs/private", ""), "private")
		}
	}
	for _, token := range []string{secret, "the next token"} {
		good := ticket.New(token, ticket.Cookie, later)
		resp, body := s.do(http.MethodGet, "/ui/", "", "Cookie", "dlrover="+good)
		require.Equal(t, http.StatusOK, resp.StatusCode)
		require.Contains(t, body, "private")
		require.Contains(t, resp.Header.Get("Content-Security-Policy"), "default-src 'none'")
		require.Equal(t, "no-store", resp.Header.Get("Cache-Control"))
		resp, _ = s.do(http.MethodGet, "/ui/", "", "Authorization", "Bearer "+token)
		require.Equal(t, http.StatusOK, resp.StatusCode)
	}
	resp, _ := s.do(http.MethodGet, "/v1/runs", "", "Cookie", "dlrover="+ticket.New(secret, ticket.Cookie, later))
	require.Equal(t, http.StatusUnauthorized, resp.StatusCode, "the cookie is of the page alone")
}

func TestLoggingIn(t *testing.T) {
	s := newServed(t, secret)
	resp, body := s.do(http.MethodPost, "/ui/login", "token=wrong&next=/ui/nodes", "Content-Type", form)
	require.Equal(t, http.StatusForbidden, resp.StatusCode)
	require.Contains(t, body, "not the job token")
	require.Empty(t, resp.Cookies())

	body = url.Values{"token": {secret}, "next": {"/ui/nodes"}}.Encode()
	resp, _ = s.do(http.MethodPost, "/ui/login", body, "Content-Type", form, "Origin", "http://elsewhere")
	require.Equal(t, http.StatusForbidden, resp.StatusCode)
	resp, _ = s.do(http.MethodPost, "/ui/login", body, "Content-Type", form, "Origin", s.at)
	require.Equal(t, http.StatusSeeOther, resp.StatusCode)
	require.Equal(t, "/ui/nodes", resp.Header.Get("Location"))
	c := resp.Cookies()[0]
	require.True(t, c.HttpOnly)
	require.Equal(t, http.SameSiteStrictMode, c.SameSite)
	require.Equal(t, "/ui/", c.Path)
	resp, _ = s.do(http.MethodGet, "/ui/", "", "Cookie", c.Name+"="+c.Value)
	require.Equal(t, http.StatusOK, resp.StatusCode)

	for _, next := range []string{"http://elsewhere/ui/", "//elsewhere/ui/", "/v1/runs", "/ui/\r\nX: y",
		`/ui/\elsewhere`} {
		link := "/ui/login?" + ticket.Query(secret, next, time.Now())
		resp, _ = s.do(http.MethodGet, link, "")
		require.Equal(t, http.StatusSeeOther, resp.StatusCode)
		require.Equal(t, "/ui/", resp.Header.Get("Location"), next)
		resp, body = s.do(http.MethodGet, link, "")
		require.Equal(t, http.StatusForbidden, resp.StatusCode, "a link counts once")
		require.Contains(t, body, "This link has been used")
	}
}

func TestGuessesAreCounted(t *testing.T) {
	s := newServed(t, secret)
	status := 0
	for i := 0; status != http.StatusTooManyRequests; i++ {
		require.Less(t, i, 20_000)
		resp, _ := s.do(http.MethodPost, "/ui/login", "token=guess", "Content-Type", form)
		status = resp.StatusCode
	}
	resp, _ := s.do(http.MethodGet, "/ui/", "", "Cookie", "dlrover="+
		ticket.New(secret, ticket.Cookie, time.Now().Add(time.Hour)))
	require.Equal(t, http.StatusOK, resp.StatusCode, "a visitor who has logged in")
}

func TestUsedLinksAreBounded(t *testing.T) {
	var used tickets
	now := time.Now()
	for range maxTickets {
		require.True(t, used.use([]string{secret}, ticket.New(secret, ticket.Link, now.Add(time.Minute)), now))
	}
	again := ticket.New(secret, ticket.Link, now.Add(time.Hour))
	require.False(t, used.use([]string{secret}, again, now))
	require.True(t, used.use([]string{secret}, again, now.Add(3*time.Minute)))
	require.Len(t, used.used, 1)
}

func TestOrdersComeFromTheScriptAlone(t *testing.T) {
	s := newServed(t, secret)
	s.join("job", "n0", "n1")
	auth := []string{"Authorization", "Bearer " + secret, "Content-Type", "application/json"}
	pause := `{"kind":"pause"}`
	for _, headers := range [][]string{{}, {orderHeader, "1", "Origin", "http://elsewhere"}} {
		resp, _ := s.do(http.MethodPost, "/ui/runs/job/orders", pause, append(headers, auth...)...)
		require.Equal(t, http.StatusForbidden, resp.StatusCode)
	}
	resp, _ := s.do(http.MethodPost, "/ui/runs/job/orders", pause, orderHeader, "1")
	require.Equal(t, http.StatusUnauthorized, resp.StatusCode)
	for _, body := range []string{`{"kind":"stop"}`, `{`, `{"kind":"resume"}`} {
		resp, _ = s.do(http.MethodPost, "/ui/runs/job/orders", body, append(auth, orderHeader, "1")...)
		require.Equal(t, http.StatusConflict, resp.StatusCode, body)
	}
	resp, _ = s.do(http.MethodPost, "/ui/runs/job/orders", pause, append(auth, orderHeader, "1", "Origin", s.at)...)
	require.Equal(t, http.StatusNoContent, resp.StatusCode)
	run, err := s.service.Hub.Run("job")
	require.NoError(t, err)
	require.NotNil(t, run.Paused)
	_, body := s.do(http.MethodGet, "/ui/runs/job?part", "", auth...)
	require.Contains(t, body, "ordered on the page")
	require.Contains(t, body, `data-kind="resume"`)
}

func TestWithoutATokenOnlyOurOwnPageIsServed(t *testing.T) {
	s := newServed(t)
	for site, status := range map[string]int{"": 200, "none": 200, "same-origin": 200, "cross-site": 403,
		"same-site": 403} {
		resp, _ := s.do(http.MethodGet, "/ui/", "", "Sec-Fetch-Site", site)
		require.Equal(t, status, resp.StatusCode, site)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.at+"/ui/", nil)
	require.NoError(t, err)
	req.Host = "rebound.example"
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	_ = resp.Body.Close()
	require.Equal(t, http.StatusForbidden, resp.StatusCode)
	resp, _ = s.do(http.MethodGet, "/v1/runs", "", "Sec-Fetch-Site", "same-origin")
	require.Equal(t, http.StatusForbidden, resp.StatusCode, "the API is not for pages")
}

func TestABrowserHearsOfNews(t *testing.T) {
	s := newServed(t, secret)
	s.join("job", "n0")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.at+"/ui/runs/job/live", nil)
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+secret)
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	hear := func() {
		t.Helper()
		for lines.Scan() {
			if lines.Text() == "event: change" {
				return
			}
		}
		t.Fatal("the stream has ended")
	}
	hear()
	s.join("job", "n1")
	hear()
	s.service.Hub.Close()
	for lines.Scan() {
		continue
	}
}

func TestStreamsAreBounded(t *testing.T) {
	s := newServed(t, secret)
	s.join("job", "n0")
	auth := []string{"Authorization", "Bearer " + secret}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range maxStreams {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.at+"/ui/runs/job/live", nil)
		require.NoError(t, err)
		req.Header.Set(auth[0], auth[1])
		resp, err := s.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
	}
	resp, _ := s.do(http.MethodGet, "/ui/runs/job/live", "", auth...)
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
	cancel()
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		req, _ := http.NewRequestWithContext(ctx, http.MethodGet, s.at+"/ui/runs/job/live", nil)
		req.Header.Set(auth[0], auth[1])
		resp, err := s.client.Do(req)
		return err == nil && resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
	}, time.Minute, 100*time.Millisecond)
}

func TestNamesAreShownAsText(t *testing.T) {
	s := newServed(t, secret)
	const name, run = `"><img src=x onerror=alert(1)>`, `a/b?c#d"><script>alert(1)</script>`
	s.join(run, name, "n1")
	_, body := s.do(http.MethodGet, "/ui/runs/"+url.PathEscape(run), "", "Authorization", "Bearer "+secret)
	require.Contains(t, body, "&lt;img src=x")
	require.NotContains(t, body, "<img")
	require.NotContains(t, body, "<script>alert")
	require.Contains(t, body, `data-live="/ui/runs/a%2Fb%3Fc%23d`)
	_, body = s.do(http.MethodGet, "/ui/", "", "Authorization", "Bearer "+secret)
	require.Contains(t, body, `href="/ui/runs/a%2Fb%3Fc%23d`)
}

// The page of a run that nobody knows, and of none.
func TestUnknownRuns(t *testing.T) {
	s := newServed(t, secret)
	resp, body := s.do(http.MethodGet, "/ui/runs/nothing", "", "Authorization", "Bearer "+secret)
	require.Equal(t, http.StatusNotFound, resp.StatusCode)
	require.Contains(t, body, "nothing")
	_, body = s.do(http.MethodGet, "/ui/", "", "Authorization", "Bearer "+secret)
	require.Contains(t, body, "No run is here yet")
}

// The page of a server that is asked over its API says the same, follows it, and gives its orders.
func TestThePageOfAnotherServer(t *testing.T) {
	s := newServed(t, secret)
	s.join("a/b", "n0", "n1")
	from := api.NewClient(strings.TrimPrefix(s.at, "http://"), secret)
	defer from.Close()
	cfg := api.ServerConfig{Token: secret, Page: New(Config{Source: Elsewhere(from), Log: slog.New(slog.DiscardHandler),
		Tokens: func() []string { return []string{secret} }})}
	elsewhere := httptest.NewServer(api.PageHandler(cfg))
	defer elsewhere.Close()
	there := *s
	there.at = elsewhere.URL
	auth := []string{"Authorization", "Bearer " + secret}
	for _, path := range []string{"/ui/", "/ui/runs/a%2Fb", "/ui/runs/none", "/ui/nodes"} {
		resp, body := s.do(http.MethodGet, path, "", auth...)
		same, again := there.do(http.MethodGet, path, "", auth...)
		require.Equal(t, resp.StatusCode, same.StatusCode, path)
		require.Equal(t, titles(body), titles(again), path)
	}
	resp, _ := there.do(http.MethodGet, "/ui/", "")
	require.Equal(t, http.StatusUnauthorized, resp.StatusCode)
	resp, _ = there.do(http.MethodGet, "/v1/runs", "", auth...)
	require.Equal(t, http.StatusNotFound, resp.StatusCode, "it has the page alone")
	resp, _ = there.do(http.MethodPost, "/ui/runs/a%2Fb/orders", `{"kind":"pause"}`, append(auth, orderHeader, "1")...)
	require.Equal(t, http.StatusNoContent, resp.StatusCode)
	time.Sleep(2 * leastFresh)
	_, body := there.do(http.MethodGet, "/ui/runs/a%2Fb?part", "", auth...)
	require.Contains(t, body, "ordered on the page")
	require.Contains(t, body, `data-kind="resume"`)

	dead := api.NewClient("127.0.0.1:1", secret)
	p := New(Config{Source: Elsewhere(dead), Log: slog.New(slog.DiscardHandler)})
	for _, path := range []string{"/ui/", "/ui/runs/a"} {
		w := httptest.NewRecorder()
		p.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		require.Equal(t, http.StatusBadGateway, w.Code)
		require.Contains(t, w.Body.String(), "the server of the run does not answer")
	}
}

// titles are the headings and sentences of a page, without times.
func titles(page string) []string {
	return regexp.MustCompile(`(?s)<(?:h1|dt|th|p)[ >].*?[<\n]`).FindAllString(page, -1)
}
