package probe

import (
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

func controls(t *testing.T) (*control, *control) {
	a, b := net.Pipe()
	t.Cleanup(func() { a.Close(); b.Close() })
	limit := time.Now().Add(time.Hour)
	return newControl(a, []byte("key"), dialerRole, limit), newControl(b, []byte("key"), serverRole, limit)
}

func TestControl(t *testing.T) {
	a, b := controls(t)
	go func() {
		_ = a.send(kindGo, nil)
		_ = a.send(kindMTU, []byte("body"))
	}()
	_, err := b.want(kindGo, time.Minute, "test")
	require.NoError(t, err)
	body, err := b.want(kindMTU, time.Minute, "test")
	require.NoError(t, err)
	require.Equal(t, "body", string(body))
}

func TestControlRefuses(t *testing.T) {
	wrongKey := func(c *control) { c.key = []byte("other"); _ = c.send(kindGo, nil) }
	for name, send := range map[string]func(*control){
		"another key":     wrongKey,
		"a number twice":  func(c *control) { _ = c.send(kindGo, nil); c.sent = 0; _ = c.send(kindGo, nil) },
		"sent back":       func(c *control) { c.role = serverRole; _ = c.send(kindGo, nil) },
		"too long":        func(c *control) { _ = c.send(kindGo, make([]byte, maxBody+1)) },
		"another message": func(c *control) { _ = c.send(kindStop, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := controls(t)
			go send(a)
			_, err := b.want(kindGo, time.Minute, "waiting")
			if err == nil {
				_, err = b.want(kindGo, time.Minute, "waiting")
			}
			require.Equal(t, netcheck.Reset, asFault(err, "").class)
			require.ErrorContains(t, err, "waiting: ")
		})
	}
}

func TestControlWaitsNoLongerThanItMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := controls(t)
		began := time.Now()
		_, err := b.want(kindGo, usual.answer, "waiting")
		require.Equal(t, netcheck.Stalled, asFault(err, "").class)
		require.Equal(t, usual.answer, time.Since(began))
		b.limit = time.Now().Add(time.Second)
		_, err = b.want(kindGo, usual.answer, "waiting")
		require.Error(t, err)
		require.Equal(t, usual.answer+time.Second, time.Since(began))

		time.AfterFunc(time.Second, func() { a.abort(faultf(netcheck.Stalled, "given up")) })
		_, err = a.want(kindGo, time.Hour, "waiting")
		require.ErrorContains(t, err, "given up")
		_, err = a.want(kindGo, time.Hour, "waiting")
		require.ErrorContains(t, err, "given up", "and nothing waits any more")
	})
}

// An end whose time ends as it sends something still tells why.
func TestByeAfterTheDeadline(t *testing.T) {
	a, b := controls(t)
	_ = a.SetWriteDeadline(time.Unix(1, 0))
	require.ErrorIs(t, a.send(kindGo, nil), os.ErrDeadlineExceeded)
	go a.bye(faultf(netcheck.Stalled, "not over in time"), time.Minute)
	_, err := b.want(kindGo, time.Minute, "waiting")
	require.EqualError(t, err, "the other end: not over in time")
}

func TestBye(t *testing.T) {
	for theirs, mine := range map[netcheck.Class]netcheck.Class{
		netcheck.Stalled: netcheck.Stalled, netcheck.Reset: netcheck.Reset, netcheck.MTU: netcheck.MTU,
		netcheck.Own: netcheck.Canceled, netcheck.Canceled: netcheck.Canceled,
		netcheck.OK: netcheck.Reset, "made-up": netcheck.Reset, netcheck.Slow: netcheck.Reset,
	} {
		a, b := controls(t)
		go a.bye(faultf(theirs, "what\x1b[2J\nhappened %s", strings.Repeat("x", 1000)), time.Minute)
		_, err := b.want(kindGo, time.Minute, "waiting")
		f := asFault(err, "")
		require.Equal(t, mine, f.class, "%q", theirs)
		require.Contains(t, f.text, "happened")
		require.NotContains(t, f.text, "\x1b")
		require.NotContains(t, f.text, "\n")
		require.LessOrEqual(t, len(f.text), maxText)
	}
}

// script is a connection that has said all it will say.
type script struct {
	net.Conn
	r *strings.Reader
}

func (s script) Read(p []byte) (int, error)      { return s.r.Read(p) }
func (s script) SetReadDeadline(time.Time) error { return nil }

func FuzzControl(f *testing.F) {
	f.Add([]byte("g\x00\x00aaaaaaaaaaaaaaaa"), []byte("{}"))
	f.Add([]byte("b\xff\xff"), []byte("\x05reset why"))
	f.Fuzz(func(t *testing.T, wire, body []byte) {
		c := newControl(script{r: strings.NewReader(string(wire))}, []byte("key"), dialerRole, time.Now().Add(time.Hour))
		_, err := c.want(kindGo, time.Minute, "waiting")
		require.Error(t, err, "nobody guesses a MAC")
		require.LessOrEqual(t, len(peerFault(body, "waiting").text), maxText)
		if step, err := parseStep(body); err == nil {
			require.True(t, step.Port >= 0 && step.Port < 1<<16 && step.Mbps >= 0)
		}
	})
}
