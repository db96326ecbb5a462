package master

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/retry"
	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
)

// A master that waits sends a small request to the one that serves again and again. No answer, while the kernel of its
// host has acknowledged the request, means that the leader is frozen. A request that is not acknowledged tells nothing
// of the process: the host or the network is silent, and the lease decides.
const (
	beat = 200 * time.Millisecond // between an answer and the next request
	// A leader is frozen when it has not answered for so many turns. They are counted one by one, so that time in which
	// this process did not run itself counts as one turn.
	turn        = 100 * time.Millisecond
	frozenTurns = 7
	restOfPulse = 2 * time.Second // for the rest of an answer that has begun
	maxPulse    = 4 << 10         // bytes of an answer
	dialTimeout = 2 * time.Second
	firstDial   = 20 * time.Millisecond // pause before the leader is dialed again, at first
	redial      = time.Second
)

var (
	errGone = errors.New("its host refuses connections")
	errTwin = errors.New("another master serves at this address")
	// errTwinWaits is of the later one of two that have never served.
	errTwinWaits = errors.New("another master that waits has this address, too")
	errFrozen    = errors.New("it has answered nothing for a while, though its host has received the question")
)

// pulse is the answer to a standby.
type pulse struct {
	Term lead.Term `json:"term"`
	// Question is set by a leader whose store is away: do all candidates follow it? It is a time, which they send back.
	Question time.Duration `json:"question,omitempty"`
	// Twin: another standby has the address of this one, and had it before.
	Twin bool `json:"twin,omitempty"`
}

// standby answers the masters that wait, at /v1/standby.
func (t *tenure) standby() http.Handler {
	return api.Answer(func(req *http.Request) (any, error) {
		q := req.URL.Query()
		if q.Get("term") == fmt.Sprint(t.term) {
			question, err := strconv.ParseInt(q.Get("question"), 10, 64)
			if err != nil {
				return nil, fmt.Errorf("%w: question=%.40q: need a number", api.ErrBadRequest, q.Get("question"))
			}
			t.audience.hear(q.Get("addr"), time.Duration(question))
		}
		p := pulse{Term: t.term, Twin: t.audience.meet(q.Get("addr"), q.Get("id"))}
		if s, ok := t.election.store.(failsafe); ok && s.Silence() > asks {
			p.Question = time.Since(t.audience.began)
		}
		return p, nil
	})
}

// follow exchanges pulses with another master that leads, until ctx ends, which is nil, or it is known that the leader
// does not serve any more: its process is gone, so that its host refuses connections after one was made, or it is
// frozen. A leader that has just been elected may not listen yet, or take its time to answer.
func (e *election) follow(ctx context.Context, l lead.Leader) error {
	switch l.Addr {
	case "":
		<-ctx.Done()
		return nil
	case e.addr:
		return e.twin(ctx, l)
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	pause := retry.Backoff{First: firstDial, Most: redial}
	for connected, answered := false, false; ; {
		c, err := dialer.DialContext(ctx, "tcp", l.Addr)
		if err == nil {
			connected = true
			n, err := e.pulses(ctx, c, l, answered)
			if n > 0 {
				answered = true
				pause.Reset()
			}
			if errors.Is(err, errFrozen) || errors.Is(err, errTwinWaits) {
				return err
			}
			if n > 0 {
				continue // without a pause: the process may be gone
			}
		}
		if connected && errors.Is(err, syscall.ECONNREFUSED) {
			e.promise.void(l.Term)
			return errGone
		}
		if !pause.Wait(ctx) {
			return nil
		}
	}
}

// twin looks, until ctx ends, whether another process than this one answers as the leader at the address of this one. A
// leadership of an earlier process may last a little.
func (e *election) twin(ctx context.Context, l lead.Leader) error {
	dialer := net.Dialer{Timeout: dialTimeout}
	for !e.leads(l.Term) {
		if c, err := dialer.DialContext(ctx, "tcp", l.Addr); err == nil {
			var p pulse
			if err = e.ask(ctx, c, l, p); err == nil {
				p, err = hear(c, bufio.NewReaderSize(c, maxPulse))
			}
			_ = c.Close()
			if err == nil && p.Term == l.Term && !e.leads(l.Term) {
				return fmt.Errorf("--advertise=%s: %w, in term %d; give each an address of its own", e.addr, errTwin, p.Term)
			}
		}
		if !retry.Sleep(ctx, redial) {
			return nil
		}
	}
	<-ctx.Done()
	return nil
}

// leads reports whether a term is that of this process, which is known before it answers.
func (e *election) leads(term lead.Term) bool {
	a := e.audience.Load()
	return a != nil && a.term == term
}

// pulses asks over one connection until that breaks, or the leader is frozen, and returns how many answers came.
func (e *election) pulses(ctx context.Context, c net.Conn, l lead.Leader, answered bool) (n int, err error) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if e.tls != nil {
		s := e.tls.Client(c, l.Addr)
		if err := greet(ctx, s, answered); err != nil {
			return 0, err
		}
		c = s
	}
	r := bufio.NewReaderSize(c, maxPulse)
	for last := (pulse{}); ; n++ {
		if err := e.ask(ctx, c, l, last); err != nil {
			return n, err
		}
		if err := await(c, r, answered || n > 0); err != nil {
			return n, err
		}
		if last, err = hear(c, r); err != nil {
			return n, err
		}
		if last.Twin {
			return n + 1, fmt.Errorf("--advertise=%s: %w; give each an address of its own", e.addr, errTwinWaits)
		}
		if !answered && n == 0 {
			e.log.Info("following the master that serves", "addr", l.Addr, "term", l.Term)
		}
		_ = c.SetReadDeadline(time.Now().Add(beat))
		if _, err := r.Peek(1); !errors.Is(err, os.ErrDeadlineExceeded) {
			return n + 1, err // its end, or an answer to nothing
		}
	}
}

// greet makes the handshake of TLS. If that is to be told, a leader that does not answer is frozen.
func greet(ctx context.Context, c *secure.Conn, tell bool) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- c.Handshake(ctx) }()
	turns := time.NewTicker(turn)
	defer turns.Stop()
	for n := 1; ; n++ {
		select {
		case err := <-done:
			return err
		case <-turns.C:
		}
		if tell && n >= frozenTurns && received(c) {
			cancel()
			<-done
			return errFrozen
		}
	}
}

// ask sends a request, with the answer to the leader's last question.
func (e *election) ask(ctx context.Context, c net.Conn, l lead.Leader, last pulse) error {
	u := url.URL{Scheme: "http", Host: l.Addr, Path: "/v1/standby"}
	q := url.Values{"addr": {e.addr}, "id": {e.id}}
	if last.Question > 0 && last.Term == l.Term && e.promise.give(l.Term) {
		q.Set("term", fmt.Sprint(l.Term))
		q.Set("question", strconv.FormatInt(int64(last.Question), 10))
	}
	u.RawQuery = q.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	if secret := e.token.Sent(); secret != "" {
		req.Header.Set("Authorization", "Bearer "+secret)
	}
	_ = c.SetWriteDeadline(time.Now().Add(dialTimeout))
	return req.Write(c)
}

// await returns when an answer has begun, the connection is broken, or, if that is to be told, the leader is frozen.
func await(c net.Conn, r *bufio.Reader, tell bool) error {
	for n := 1; ; n++ {
		_ = c.SetReadDeadline(time.Now().Add(turn))
		_, err := r.Peek(1)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if tell && n >= frozenTurns && received(c) {
			return errFrozen
		}
	}
}

// hear reads an answer. An earlier version answers that there is no such path, which tells as much of its life.
func hear(c net.Conn, r *bufio.Reader) (p pulse, err error) {
	_ = c.SetReadDeadline(time.Now().Add(restOfPulse))
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return p, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPulse))
	if err == nil && resp.Close {
		err = fmt.Errorf("the leader ends the connection: HTTP %s", resp.Status)
	}
	if err == nil && resp.StatusCode == http.StatusOK {
		err = json.Unmarshal(body, &p)
	}
	return p, err
}

// received reports whether the other end's kernel has acknowledged all that was sent.
func received(c net.Conn) bool {
	t := secure.TCP(c)
	if t == nil {
		return false
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return false
	}
	all := false
	_ = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		all = err == nil && info.Unacked == 0 && info.Notsent_bytes == 0
	})
	return all
}
