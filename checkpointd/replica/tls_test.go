package replica

import (
	"context"
	"log/slog"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/secure"
	"dlrover-run/internal/testkit"
)

// Copies go over TLS, back and forth. A peer with the token, but without what TLS asks for, gets none.
func TestCopiesUnderTLS(t *testing.T) {
	layer := func(c secure.Choice) *secure.Layer {
		tokens := func() []string { return []string{"0123456789abcdef0123456789abcdef"} }
		l, err := c.Layer(tokens, secure.Asks, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		return l
	}
	ca := testkit.NewAuthority(t, "ours")
	cert, key := ca.Issue(t.TempDir(), nil, "127.0.0.1")
	for name, c := range map[string]struct{ good, bad secure.Choice }{
		"auto":         {secure.Choice{Auto: true}, secure.Choice{CA: ca.CA}},
		"certificates": {secure.Choice{Cert: cert, Key: key, CA: ca.CA}, secure.Choice{CA: ca.CA}},
	} {
		t.Run(name, func(t *testing.T) {
			l := layer(c.good)
			owner, partner, restored := newMemory(t), serveWith(t, token, nil, l), newMemory(t)
			p := owner.saved(t, 3, 20, 33<<20, true)
			for _, l := range []*secure.Layer{nil, layer(c.bad)} {
				require.Error(t, (&Client{Token: token, TLS: l}).Push(t.Context(), partner.addr, p))
			}
			require.Empty(t, partner.files(t))
			cl := &Client{Token: token, TLS: l, Conns: 4}
			require.NoError(t, cl.Push(t.Context(), partner.addr, p))
			seg, err := cl.Fetch(t.Context(), partner.addr, 3, p.Meta.Save, restored.Incoming)
			require.NoError(t, err)
			defer seg.Close()
			back, err := seg.Pin()
			require.NoError(t, err)
			defer back.Release()
			requireCopy(t, p, back)
		})
	}
}

// The end of a context that a connection was bound to before does not end what it writes now.
func TestWritesAfterTheEndOfATransfer(t *testing.T) {
	tokens := func() []string { return []string{"0123456789abcdef0123456789abcdef"} }
	l, err := secure.Choice{Auto: true}.Layer(tokens, secure.Asks, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	ours, theirs := net.Pipe()
	to := newConn(t.Context(), l.Server(theirs))
	defer to.Close()
	const writes = 1000
	wrote := make(chan error, 1)
	go func() {
		for range writes {
			ctx, end := context.WithCancel(context.Background())
			to.bind(ctx, to.moved)
			end()
			to.bind(context.Background(), to.moved)
			if err := to.send(message{OK: true}); err != nil {
				wrote <- err
				return
			}
		}
		wrote <- nil
	}()
	from := newConn(t.Context(), l.Client(ours, "there:1"))
	defer from.Close()
	for range writes {
		_, err := from.answer()
		require.NoError(t, err)
	}
	require.NoError(t, <-wrote)
}
