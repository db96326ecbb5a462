package plainhttp

import (
	"net/http"
	"slices"
	"sync"
)

// Tokens are the tokens of a job that a client has. While a job's token changes there are two, and a server may not
// have heard of one of them yet: a client sends the first, and the other one where that is refused.
type Tokens struct {
	all func() []string

	mu   sync.Mutex
	next string // after a refusal; "": the first
}

// NewTokens returns those that all returns, which may change. Nil returns none.
func NewTokens(all func() []string) *Tokens {
	if all == nil {
		all = func() []string { return nil }
	}
	return &Tokens{all: all}
}

// Sent is the token to send now, "" for none.
func (t *Tokens) Sent() string {
	all := t.all()
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case slices.Contains(all, t.next):
		return t.next
	case len(all) == 0:
		return ""
	}
	return all[0]
}

// Refused has another token be sent from now on, and reports whether there is one.
func (t *Tokens) Refused(sent string) (another bool) {
	all := t.all()
	if len(all) < 2 {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next = all[(slices.Index(all, sent)+1)%len(all)]
	return true
}

// Do sends a request with a token, and again with another one if that is refused: each is tried once. The request has
// a body that can be sent again, or none.
func (t *Tokens) Do(hc *http.Client, req *http.Request) (*http.Response, error) {
	for left := len(t.all()); ; left-- {
		sent := t.Sent()
		if sent != "" {
			req.Header.Set("Authorization", "Bearer "+sent)
		}
		resp, err := hc.Do(req)
		if err != nil || resp.StatusCode != http.StatusUnauthorized || !t.Refused(sent) || left <= 1 {
			return resp, err
		}
		_ = resp.Body.Close()
		if req.GetBody != nil {
			if req.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}
