package coordinator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/secure"
)

const (
	// requestTimeout bounds one request: a hub that is silent for longer than it holds requests is away.
	requestTimeout = hold + 35*time.Second
	// Pauses between tries while the hub is away. They are spread, so that it is not overrun when it is back.
	firstPause, longestPause = 50 * time.Millisecond, time.Second
	// maxReply bounds the reply that a client reads: all entries that a hub keeps, and the overhead of JSON.
	maxReply = 4 * maxBytes
	// leastPatience is the time that other nodes have to repeat themselves to a hub without memory.
	leastPatience = 2 * time.Second
	// maxReplays bounds the messages that a client repeats to a new hub.
	maxReplays = 32
)

var (
	errAway = errors.New("the checkpoint coordinator is away")
	// errNotHere: the process at this address does not serve.
	errNotHere = fmt.Errorf("%w", errAway)
)

// client is a Coordinator on a Hub elsewhere. Requests that wait are repeated anyway. A client also keeps its one-time
// messages that no other node may know: a failure, a published save, an agreement, its own address. It repeats them to
// a new hub.
type client struct {
	base   string
	tokens *plainhttp.Tokens
	hc     *http.Client
	among  *plainhttp.Among // that hc dials; nil: hc is the caller's

	mu      sync.Mutex
	term    string   // of the hub that knows all replays
	replays []replay // oldest first
}

type replay struct {
	about, path string
	at          time.Time
	body        any
	lasting     bool // while nothing else is said about it
}

// Client returns the Coordinator of a run on the Hub whose handler is at base, such as "http://10.0.0.1:29400". It
// sends the first of the tokens, and another one if that is refused; nil: none. hc may be nil for a client of its own:
// then base may name several addresses, separated by commas; only the elected one listens. hc must not limit
// requests to less than a minute. While the hub is away every method tries again, until its ctx ends.
func Client(base, run string, tokens func() []string, hc *http.Client) Coordinator {
	base = strings.TrimRight(base, "/")
	var among *plainhttp.Among
	if addrs, plain := strings.CutPrefix(base, "http://"); hc == nil && plain {
		among = plainhttp.NewReplaceable(addrs)
		hc, base = among.Through(nil), "http://"+among.First()
	}
	return &client{base: base + "/v1/runs/" + url.PathEscape(run) + "/checkpoints/",
		tokens: plainhttp.NewTokens(tokens), hc: hc, among: among}
}

// Mover is a Coordinator on a Hub that may be replaced by one elsewhere.
type Mover interface {
	// Over has all connections speak TLS. It is called before the first request; nil changes nothing.
	Over(l *secure.Layer)
	// Move turns to the Hub at HOST:PORT, or at one of several with commas between.
	Move(addrs string)
}

func (c *client) Over(l *secure.Layer) { c.among.Over(l.Dial) }

func (c *client) Move(addrs string) {
	if c.among != nil {
		c.among.Replace(addrs)
	}
}

func (c *client) Post(ctx context.Context, r Report) ([]commit.Entry, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if r.Phase == Prepared {
		c.forget(r.Save.ID) // a second attempt
	} else {
		r.Entries = nil
	}
	var reply reportReply
	err := c.call(ctx, "reports", func() any { return reportBody{Report: r} }, &reply)
	if err == nil && (r.Phase == Failed || r.Phase == Published) {
		c.remember(replay{about: r.Save.ID, path: "reports", body: reportBody{r, true}})
	}
	return reply.Entries, withReport(err, r)
}

func (c *client) Agree(ctx context.Context, key string, node, nodes int, hs []Holding,
	patience time.Duration) (Plan, bool, error) {
	h := agreeEvent{Key: key, Node: node, Nodes: nodes, Holdings: hs}
	left := remaining(patience)
	var a agreeAnswer
	err := c.call(ctx, "agree", func() any { h.Patience = left(); return agreeBody{agreeEvent: h} }, &a)
	if err != nil {
		return Plan{}, false, fmt.Errorf("agree on the newest save in memory (%s): %w", key, err)
	}
	h.Answer, h.Patience = &a, min(patience, leastPatience)
	c.remember(replay{about: "agreement " + key, path: "agree", body: agreeBody{h, true}})
	return a.Plan, a.Found, nil
}

func (c *client) Announce(ctx context.Context, s Participation) error {
	if err := c.call(ctx, "speaks", func() any { return s }, &struct{}{}); err != nil {
		return fmt.Errorf("say what node %d agrees on (%s): %w", s.Node, s.Of, err)
	}
	c.remember(replay{about: "agreements of " + s.Of, path: "speaks", body: s})
	return nil
}

func (c *client) Peers(ctx context.Context, key string, self Peer, nodes int, patience time.Duration) ([]Peer, error) {
	left := remaining(patience)
	h := peersEvent{Key: key, Self: self, Nodes: nodes}
	var reply peersReply
	ask := func() error {
		return c.call(ctx, "peers", func() any { h.Patience = left(); return peersBody{peersEvent: h} }, &reply)
	}
	err := ask()
	if errors.Is(err, errBadRequest) { // perhaps a hub of an earlier release, which refuses unknown fields
		h.Self.Copies = plain(self.Copies)
		err = ask()
	}
	if err != nil {
		return nil, fmt.Errorf("find the peers of node %d (%s): %w", self.Node, key, err)
	}
	h.Patience = min(patience, leastPatience)
	c.remember(replay{about: "peers", path: "peers", body: peersBody{h, true}, lasting: true})
	return reply.Peers, nil
}

// plain keeps the fields of copies that every release knows.
func plain(cs []Copy) []Copy {
	out := make([]Copy, len(cs))
	for i, c := range cs {
		out[i] = Copy{Rank: c.Rank, Shard: c.Shard, Save: c.Save, Step: c.Step}
	}
	return out
}

func (c *client) Ages(ctx context.Context, of string, node int, ages []Age) error {
	if err := c.call(ctx, "ages", func() any { return agesBody{of, node, ages} }, &struct{}{}); err != nil {
		return fmt.Errorf("report the ages of checkpoints: %w", err)
	}
	return nil
}

// remaining counts patience down over the repetitions of a request.
func remaining(patience time.Duration) func() time.Duration {
	end := time.Now().Add(patience)
	return func() time.Duration { return max(time.Until(end), min(patience, leastPatience)) }
}

// call sends body() until the answer is final; the answer 204 asks to repeat the request.
func (c *client) call(ctx context.Context, path string, body func() any, reply any) error {
	var last error // why the hub could not be reached
	pause := retry.Backoff{First: firstPause, Most: longestPause, Spread: true}
	for {
		begin := time.Now()
		err := c.send(ctx, path, body(), reply)
		pending := errors.Is(err, errPending)
		switch {
		case ctx.Err() != nil && err != nil:
			return ended(ctx, last)
		case !pending && !errors.Is(err, errAway):
			return err
		case !pending:
			last = err
		case time.Since(begin) > firstPause: // else it is a proxy that does not hold requests
			last = nil
			pause.Reset()
			continue
		}
		if !pause.Wait(ctx) {
			return ended(ctx, last)
		}
	}
}

// ended is the error of a ctx that ended while the last try failed with last, which may be nil.
func ended(ctx context.Context, last error) error {
	if last == nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w; last: %w", context.Cause(ctx), last)
}

// send makes one request, and brings a new hub up to date. Messages that cannot be delivered are left for the next
// time.
func (c *client) send(ctx context.Context, path string, body, reply any) error {
	term, err := c.exchange(ctx, path, body, reply)
	for _, n := range c.unknown(term) {
		if _, lost := c.exchange(ctx, n.path, n.body, &struct{}{}); errors.Is(lost, errAway) {
			return err
		}
	}
	c.setTerm(term)
	return err
}

func (c *client) exchange(ctx context.Context, path string, body, reply any) (term string, err error) {
	data, err := json.Marshal(body)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+path, bytes.NewReader(data))
	if err != nil {
		return "", fmt.Errorf("%w: checkpoint coordinator: %w", errBadRequest, err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.tokens.Do(c.hc, req)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errAway, err) // a *url.Error, which names method and address
	}
	defer resp.Body.Close()
	err = read(resp, reply)
	if c.among != nil && errors.Is(err, errNotHere) {
		c.among.Failed()
	}
	return resp.Header.Get(termHeader), err
}

func read(resp *http.Response, reply any) error {
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxReply))
	switch {
	case err != nil:
		return fmt.Errorf("%w: read the reply: %w", errAway, err)
	case resp.StatusCode == http.StatusNoContent:
		return errPending
	case resp.StatusCode != http.StatusOK:
		return errorOf(resp.StatusCode, data)
	}
	if err := json.Unmarshal(data, reply); err != nil {
		return fmt.Errorf("%w: the reply is not ours (another service on this port?): %w", errBadRequest, err)
	}
	return nil
}

// remember keeps a replay for as long as a hub would.
func (c *client) remember(n replay) {
	c.forget(n.about)
	c.mu.Lock()
	defer c.mu.Unlock()
	n.at = time.Now()
	c.replays = append(c.replays, n)
	if len(c.replays) > maxReplays {
		oldest := slices.IndexFunc(c.replays, func(n replay) bool { return !n.lasting })
		c.replays = slices.Delete(c.replays, oldest, oldest+1)
	}
}

func (c *client) forget(about string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replays = slices.DeleteFunc(c.replays, func(n replay) bool {
		return n.about == about || !n.lasting && time.Since(n.at) > forgetAfter
	})
}

// unknown returns the messages that the hub of this term does not have yet. The term "" is no hub.
func (c *client) unknown(term string) []replay {
	c.mu.Lock()
	defer c.mu.Unlock()
	if term == "" || term == c.term {
		return nil
	}
	return slices.Clone(c.replays)
}

func (c *client) setTerm(term string) {
	if term == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.term = term
}
