package secure

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const jobToken = "0123456789abcdef0123456789abcdef"

func fixed(tokens ...string) func() []string { return func() []string { return tokens } }

func layer(t *testing.T, c Choice, token string, side Side) *Layer {
	t.Helper()
	l, err := c.Layer(fixed(token), side, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return l
}

// serve answers "ok", or why a client is not served.
func serve(t *testing.T, l *Layer) (addr string) {
	t.Helper()
	s := httptest.NewUnstartedServer(nil)
	s.Config.ConnContext = func(ctx context.Context, nc net.Conn) context.Context {
		return context.WithValue(ctx, t, nc)
	}
	s.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := Check(r.Context().Value(t).(net.Conn)); err != nil {
			w.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(w, err.Error())
			return
		}
		_, _ = io.WriteString(w, "ok")
	})
	s.Listener = l.Listener(s.Listener)
	s.Start()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// get returns the body of an answer.
func get(t *testing.T, l *Layer, addr string) (string, error) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DialContext: l.Dial(new(net.Dialer).DialContext)}}
	defer c.CloseIdleConnections()
	resp, err := c.Get("http://" + addr)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

func TestAuto(t *testing.T) {
	auto := Choice{Auto: true}
	server := layer(t, auto, jobToken, Asks|Serves)
	addr := serve(t, server)
	for range 2 { // the second one resumes a session
		body, err := get(t, server, addr)
		require.NoError(t, err)
		require.Equal(t, "ok", body)
	}
	_, err := get(t, layer(t, auto, strings.Repeat("fedcba9876543210", 2), Asks), addr)
	require.ErrorContains(t, err, "the server at "+addr+" has another key than the one of this job token")
	ca := testkit.NewAuthority(t, "another")
	_, err = get(t, layer(t, Choice{CA: ca.CA}, "", Asks), addr)
	require.ErrorContains(t, err, "CN=dlrover) is not signed by an authority in --tls-ca="+ca.CA)
	for _, weak := range []string{"", "0123456789abcdef012345678", strings.Repeat("abc", 20)} {
		_, err = auto.Layer(fixed(weak), Asks, nil)
		require.ErrorContains(t, err, "need a random token of at least 26 characters, such as the output of: ")
	}
}

// The certificate that the code writes by itself is one that crypto/x509 knows, signed by its own key.
func TestCertificateOfTheToken(t *testing.T) {
	key, err := ofToken(jobToken)
	require.NoError(t, err)
	c, err := x509.ParseCertificate(key.cert.Certificate[0])
	require.NoError(t, err)
	require.Equal(t, "CN=dlrover", c.Subject.String())
	require.NoError(t, c.CheckSignature(c.SignatureAlgorithm, c.RawTBSCertificate, c.Signature))
	require.Regexp(t, "^4f", hex.EncodeToString(c.PublicKey.(ed25519.PublicKey)), "both sides derive it: it is wire")
}

// Each state of a token file that a job passes through, or skips to, connects to every other one that has a token with
// it in common, in both directions. Others do not.
func TestAutoWhileTheTokenChanges(t *testing.T) {
	first, second := jobToken, strings.Repeat("fedcba9876543210", 2)
	states := map[string][]string{
		"old": {first}, "old, new": {first, second}, "new, old": {second, first}, "new": {second},
	}
	auto := Choice{Auto: true}
	for of, tokens := range states {
		server, err := auto.Layer(fixed(tokens...), Asks|Serves, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		addr := serve(t, server)
		for from, others := range states {
			client, err := auto.Layer(fixed(others...), Asks, slog.New(slog.DiscardHandler))
			require.NoError(t, err)
			common := slices.ContainsFunc(tokens, func(token string) bool { return slices.Contains(others, token) })
			for range 2 {
				_, err = get(t, client, addr)
				require.Equal(t, common, err == nil, "%s asks %s: %v", from, of, err)
			}
		}
	}
}

// The tokens of a Layer change while it is in use. A token that is too weak changes nothing.
func TestAutoFollowsTheToken(t *testing.T) {
	second := strings.Repeat("fedcba9876543210", 2)
	var now atomic.Pointer[[]string]
	says := func(tokens ...string) { now.Store(&tokens) }
	says(jobToken)
	log := &bytes.Buffer{}
	l, err := Choice{Auto: true}.Layer(func() []string { return *now.Load() }, Asks|Serves,
		slog.New(slog.NewTextHandler(log, nil)))
	require.NoError(t, err)
	addr := serve(t, l)
	old, renewed := layer(t, Choice{Auto: true}, jobToken, Asks), layer(t, Choice{Auto: true}, second, Asks)
	asks := func(c *Layer) bool { _, err := get(t, c, addr); return err == nil }
	require.Equal(t, []bool{true, false, true}, []bool{asks(old), asks(renewed), asks(l)})
	says(jobToken, second)
	require.Equal(t, []bool{true, true, true}, []bool{asks(old), asks(renewed), asks(l)})
	says("short")
	require.Equal(t, []bool{true, true, true}, []bool{asks(old), asks(renewed), asks(l)})
	require.Equal(t, 1, strings.Count(log.String(), "no key can be derived"))
	require.NotContains(t, log.String(), jobToken)
	says(second)
	require.Equal(t, []bool{false, true, true}, []bool{asks(old), asks(renewed), asks(l)})
}

func TestCertificates(t *testing.T) {
	ca, other := testkit.NewAuthority(t, "ours"), testkit.NewAuthority(t, "theirs")
	cert, key := ca.Issue(t.TempDir(), nil, "127.0.0.1")
	addr := serve(t, layer(t, Choice{Cert: cert, Key: key, CA: ca.CA}, "", Serves))
	pair := func(a *testkit.Authority, change func(*x509.Certificate), names ...string) Choice {
		cert, key := a.Issue(t.TempDir(), change, names...)
		return Choice{Cert: cert, Key: key, CA: ca.CA}
	}
	old := func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-48*time.Hour), time.Now().Add(-24*time.Hour)
	}
	forServers := func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }
	for name, c := range map[string]struct {
		client Choice
		body   string
	}{
		"served":             {pair(ca, nil, "node"), "ok"},
		"no certificate":     {Choice{CA: ca.CA}, "requires a certificate of its clients: give --tls-cert"},
		"another authority":  {pair(other, nil, "node"), "(CN=node) is not signed by an authority in --tls-ca=" + ca.CA},
		"expired":            {pair(ca, old, "node"), "(CN=node) is valid from "},
		"for servers, alone": {pair(ca, forServers, "node"), "clientAuth"},
	} {
		body, err := get(t, layer(t, c.client, "", Asks), addr)
		require.NoError(t, err, name)
		require.Contains(t, body, c.body, name)
	}
	for name, c := range map[string]struct {
		server Choice
		err    string
	}{
		"another authority": {pair(other, nil, "127.0.0.1"), "(CN=127.0.0.1) is not signed by an authority in --tls-ca=" +
			ca.CA + ": give the file of CN=theirs"},
		"expired":      {pair(ca, old, "127.0.0.1"), "is valid from "},
		"another name": {pair(ca, nil, "a.example", "10.0.0.1"), " is for a.example, 10.0.0.1, not for 127.0.0.1: issue one"},
	} {
		_, err := get(t, layer(t, Choice{CA: ca.CA}, "", Asks), serve(t, layer(t, c.server, "", Serves)))
		require.ErrorContains(t, err, c.err, name)
		_, known := errors.AsType[*Error](err)
		require.True(t, known, name)
	}
}

// All nodes of a job may have one certificate.
func TestOneCertificateForAllNodes(t *testing.T) {
	ca := testkit.NewAuthority(t, "ours")
	cert, key := ca.Issue(t.TempDir(), nil, "job-7.example")
	l := layer(t, Choice{Cert: cert, Key: key, CA: ca.CA}, "", Asks|Serves)
	body, err := get(t, l, serve(t, l))
	require.NoError(t, err)
	require.Equal(t, "ok", body)
}

// Files that change count for the next connection, and not before they fit together.
func TestRotation(t *testing.T) {
	dir := t.TempDir()
	ca := testkit.NewAuthority(t, "ours")
	cert, key := ca.Issue(dir, nil, "127.0.0.1")
	l := layer(t, Choice{Cert: cert, Key: key, CA: ca.CA}, "", Asks|Serves)
	serial := func() string {
		l.mu.Lock()
		l.looked = time.Time{} // the next look is due
		l.mu.Unlock()
		return l.identity().server.Certificates[0].Leaf.SerialNumber.String()
	}
	addr, first := serve(t, l), serial()
	require.Equal(t, first, serial())
	other, _ := ca.Issue(t.TempDir(), nil, "127.0.0.1")
	require.NoError(t, syscall.Rename(cert, cert+".old"))
	require.Equal(t, first, serial(), "there is none")
	require.NoError(t, syscall.Rename(other, cert))
	require.Equal(t, first, serial(), "the key does not fit")
	require.NoError(t, syscall.Rename(cert+".old", cert))
	ca.Issue(dir, nil, "127.0.0.1")
	require.NotEqual(t, first, serial())
	body, err := get(t, l, addr)
	require.NoError(t, err)
	require.Equal(t, "ok", body)
}

func TestOneSideWithoutTLS(t *testing.T) {
	l := layer(t, Choice{Auto: true}, jobToken, Asks|Serves)
	addr := serve(t, l)
	body, err := get(t, nil, addr)
	require.NoError(t, err)
	require.Contains(t, body, `{"code":"tls","error":"this server speaks TLS, and the client does not: give the client`)
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, "\x00 neither")
	require.NoError(t, err)
	answer, err := io.ReadAll(c)
	require.NoError(t, err)
	require.NotContains(t, string(answer), "HTTP")
	_, err = get(t, l, serve(t, nil))
	require.ErrorContains(t, err, "does not speak TLS: give it --tls, or the certificate of --tls-cert, as well, or")
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, free.Close())
	_, err = get(t, l, free.Addr().String())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

func TestChosen(t *testing.T) {
	for _, c := range []struct {
		options, env, want, err string
	}{
		{},
		{env: "DLROVER_TLS=auto", want: "DLROVER_TLS=auto"},
		{options: "tls=off", env: "DLROVER_TLS=auto DLROVER_TLS_CA=x", want: "DLROVER_TLS=off"},
		{options: "tls-ca=/b", env: "DLROVER_TLS_CERT=a DLROVER_TLS_KEY=a DLROVER_TLS_CA=a", want: "DLROVER_TLS_CA=/b"},
		{env: "DLROVER_TLS_CERT=/a DLROVER_TLS_KEY=/b DLROVER_TLS_CA=/c",
			want: "DLROVER_TLS_CERT=/a DLROVER_TLS_KEY=/b DLROVER_TLS_CA=/c"},
		{options: "tls-cert=a tls-ca=c", err: "--tls-cert and --tls-key belong together"},
		{options: "tls=auto", env: "DLROVER_TLS_CA=x", err: "--tls=auto derives certificates from the job token, and takes"},
		{env: "DLROVER_TLS=yes", err: "DLROVER_TLS=yes: need auto or off"},
	} {
		from := func(list string) func(string) (string, bool) {
			return func(name string) (string, bool) {
				for pair := range strings.FieldsSeq(list) {
					if value, ok := strings.CutPrefix(pair, name+"="); ok {
						return value, true
					}
				}
				return "", false
			}
		}
		options := from(c.options)
		got, err := Chosen(func(name string) string { v, _ := options(name); return v }, from(c.env))
		if c.err != "" {
			require.ErrorContains(t, err, c.err)
			continue
		}
		require.NoError(t, err)
		if c.want != "" {
			require.Equal(t, c.want, strings.Join(got.Environ(), " "))
		}
	}
	_, err := Choice{CA: testkit.NewAuthority(t, "ours").CA}.Layer(nil, Serves, nil)
	require.ErrorContains(t, err, "--tls-ca alone is for clients")
	_, err = Choice{Cert: "x", Key: "y"}.Layer(nil, Asks, nil)
	require.ErrorContains(t, err, "--tls-cert without --tls-ca")
	_, err = Choice{CA: "/none"}.Layer(nil, Asks, nil)
	require.ErrorContains(t, err, "--tls-ca=/none: ")
}
