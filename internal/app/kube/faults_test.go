package kube_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/kube/kubetest"
)

// direct calls a server without a network, so that time can be that of synctest.
type direct struct {
	*kubetest.Server
	after func(*http.Request, *http.Response) (*http.Response, error)
}

func (d *direct) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	d.ServeHTTP(w, r)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	if d.after != nil {
		return d.after(r, w.Result())
	}
	return w.Result(), nil
}

// bubble is a server with one node, an account at level Taint, and its client.
type bubble struct {
	*direct
	cfg    kube.Config
	rights []string
	client *kube.Client
	log    bytes.Buffer
}

const node = "n1"

func inBubble(t *testing.T, test func(*testing.T, *bubble)) {
	rights := granted(t, kube.Taint)
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{direct: &direct{Server: kubetest.New(t)}, rights: rights}
		b.AddNode(t, node)
		b.cfg = b.Account(t, rights...)
		b.cfg.Log = slog.New(slog.NewTextHandler(&b.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		var err error
		b.client, err = kube.NewOver(b.cfg, b.direct)
		require.NoError(t, err)
		test(t, b)
		require.NotContains(t, b.log.String(), "secret.token")
	})
}

// first lets f answer the first n requests.
func (b *bubble) first(n int, f http.HandlerFunc) {
	b.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if n--; n < 0 {
			return false
		}
		f(w, r)
		return true
	})
}

func code(c int, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if len(header) > 0 {
			w.Header().Set("Retry-After", header[0])
		}
		w.WriteHeader(c)
		fmt.Fprintf(w, `{"kind":"Status","message":"said of %s"}`, r.Header.Get("Authorization"))
	}
}

func TestWhatPassesIsTriedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		fault    http.HandlerFunc
		min, max time.Duration // until the fifth try, without jitter 3 s
	}{
		"503":                        {code(503), 1500 * time.Millisecond, 4500 * time.Millisecond},
		"500":                        {code(500), 1500 * time.Millisecond, 4500 * time.Millisecond},
		"429":                        {code(429), 1500 * time.Millisecond, 4500 * time.Millisecond},
		"429 with a time":            {code(429, "7"), 28 * time.Second, 28 * time.Second},
		"503 with much too long one": {code(503, "65000"), 2 * time.Minute, 2 * time.Minute},
		"one that makes no sense":    {code(429, "soon"), 1500 * time.Millisecond, 4500 * time.Millisecond},
		"silence":                    {hang, 41500 * time.Millisecond, 44500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bubble) {
				b.first(4, c.fault)
				start := time.Now()
				require.NoError(t, b.client.Apply(t.Context(), kube.Taint, mark(node)))
				require.GreaterOrEqual(t, time.Since(start), c.min)
				require.LessOrEqual(t, time.Since(start), c.max)
				get, list := "GET /api/v1/nodes/n1", b.Requests()
				require.Equal(t, []string{get, get, get, get, get, "PATCH /api/v1/nodes/n1",
					"POST /api/v1/namespaces/default/events"}, list)
				require.Equal(t, 4, strings.Count(b.log.String(), "asked again"))
			})
		})
	}
}

func hang(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

func TestWhatDoesNotPassIsGivenUp(t *testing.T) {
	for name, c := range map[string]struct {
		fault http.HandlerFunc
		tries int
		want  string
	}{
		"500":        {code(500), 5, "given up after 5 tries: kube: get nodes: 500 Internal Server Error: said of Bearer (t"},
		"429":        {code(429), 5, "429 Too Many Requests"},
		"silence":    {hang, 5, "deadline exceeded"},
		"400":        {code(400), 1, "kube: get nodes: 400 Bad Request: said of Bearer (token)"},
		"401":        {code(401), 2, "does not accept"},
		"403":        {code(403), 1, "get nodes: apply docs/kubernetes/rbac-condition.yaml or rbac-taint.yaml"},
		"404":        {code(404), 1, "404"},
		"redirect":   {code(307), 1, "307"},
		"no JSON":    {page, 1, "not what an API server"},
		"much":       {much, 1, "longer than 4194304 bytes"},
		"much of it": {func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(400); much(w, r) }, 1, "longer than"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bubble) {
				b.first(100, c.fault)
				err := b.client.Apply(t.Context(), kube.Taint, mark(node))
				if c.want != "does not accept" {
					require.ErrorContains(t, err, c.want)
				} else {
					require.ErrorIs(t, err, kube.ErrUnauthorized)
				}
				require.NotContains(t, err.Error(), "secret.token")
				require.Less(t, len(err.Error()), 1000)
				require.Len(t, b.Requests(), c.tries)
			})
		})
	}
}

func page(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") }

func much(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(bytes.Repeat([]byte(" "), 5<<20)) }

func TestNoTryThatCannotEndInTime(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.first(100, code(429, "20"))
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		start := time.Now()
		err := b.client.Apply(ctx, kube.Taint, mark(node))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "429")
		require.Zero(t, time.Since(start))
	})
}

func TestACallThatIsCancelledEnds(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.first(100, code(503, "20"))
		stop := errors.New("the master stops")
		ctx, cancel := context.WithCancelCause(t.Context())
		start := time.Now()
		time.AfterFunc(time.Second, func() { cancel(stop) })
		require.ErrorIs(t, b.client.Remove(ctx, mark(node)), stop)
		require.Equal(t, time.Second, time.Since(start))
	})
}

// An answer that is lost is asked for again: by then the node has changed, and the event exists.
func TestAnswersThatAreLostAreNoDifference(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		lost := map[string]bool{}
		b.after = func(r *http.Request, w *http.Response) (*http.Response, error) {
			if key := r.Method; key != "GET" && !lost[key] {
				lost[key] = true
				return nil, errors.New("connection reset")
			}
			return w, nil
		}
		require.NoError(t, b.client.Apply(t.Context(), kube.Taint, mark(node)))
		patch, event := "PATCH /api/v1/nodes/n1", "POST /api/v1/namespaces/default/events"
		get := "GET /api/v1/nodes/n1"
		require.Equal(t, []string{get, patch, patch, get, event, event}, b.Requests())
		marks, errs := b.client.Marks(t.Context())
		require.Empty(t, errs)
		require.Equal(t, []kube.Mark{mark(node)}, marks)
	})
}

func TestConflicts(t *testing.T) {
	for conflicts, want := range map[int]string{9: "", 10: "node n1 was changed by others at each of 10 tries"} {
		inBubble(t, func(t *testing.T, b *bubble) {
			left := conflicts
			b.Intercept(func(_ http.ResponseWriter, r *http.Request) bool {
				if r.Method == "PATCH" {
					if left--; left >= 0 {
						b.Touch(node)
					}
				}
				return false
			})
			err := b.client.Apply(t.Context(), kube.Taint, mark(node))
			if want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

func TestATokenIsReadAgain(t *testing.T) {
	apply := func(t *testing.T, b *bubble) error { return b.client.Apply(t.Context(), kube.Taint, mark(node)) }
	t.Run("when it is refused", func(t *testing.T) {
		inBubble(t, func(t *testing.T, b *bubble) {
			require.NoError(t, apply(t, b))
			b.Rotate(t, b.cfg, b.rights...)
			b.Requests()
			require.NoError(t, apply(t, b))
			get := "GET /api/v1/nodes/n1"
			require.Equal(t, []string{get, get, "POST /api/v1/namespaces/default/events"}, b.Requests())
		})
	})
	t.Run("when it is a minute old", func(t *testing.T) {
		inBubble(t, func(t *testing.T, b *bubble) {
			b.Rotate(t, b.cfg, b.rights...)
			time.Sleep(time.Minute)
			require.NoError(t, apply(t, b))
			require.Len(t, b.Requests(), 3, "none was refused")
		})
	})
	t.Run("a file that is away for a moment", func(t *testing.T) {
		inBubble(t, func(t *testing.T, b *bubble) {
			require.NoError(t, os.Remove(b.cfg.TokenFile))
			time.Sleep(time.Minute)
			require.NoError(t, apply(t, b))
			b.first(1, code(401))
			require.ErrorIs(t, apply(t, b), os.ErrNotExist)
		})
	})
	for name, text := range map[string]string{
		"empty": " \n", "two lines": "secret.token\nsecret.token", "control": "secret.token\x01",
		"long": strings.Repeat("secret.token", 10000),
	} {
		t.Run(name, func(t *testing.T) {
			cfg := kubetest.New(t).Account(t)
			require.NoError(t, os.WriteFile(cfg.TokenFile, []byte(text), 0o600))
			_, err := kube.NewOver(cfg, nil)
			require.ErrorContains(t, err, cfg.TokenFile)
			require.NotContains(t, err.Error(), "secret.token")
		})
	}
}

// A redirect would take the token elsewhere.
func TestRedirectsAreNotFollowed(t *testing.T) {
	s, elsewhere := kubetest.Start(t), kubetest.Start(t)
	s.AddNode(t, node)
	cfg := s.Account(t, "get nodes")
	s.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, elsewhere.Account(t).Server+r.URL.Path, http.StatusTemporaryRedirect)
		return true
	})
	require.ErrorContains(t, client(t, cfg).Remove(t.Context(), mark(node)), "307")
	require.Empty(t, elsewhere.Requests())
}

func TestStrangersGetNoToken(t *testing.T) {
	s := kubetest.Start(t)
	cfg := s.Account(t, "get nodes")
	cfg.CAFile = "" // the system's do not vouch for the server
	err := client(t, cfg).Remove(t.Context(), mark(node))
	require.ErrorContains(t, err, "certificate")
	require.NotContains(t, err.Error(), "tries")
	require.Empty(t, s.Requests())
}

func TestManyNodesComeInPages(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		for i := range 600 {
			b.AddNode(t, fmt.Sprintf("worker-%03d", i))
		}
		want := []string{"worker-000", "worker-299", "worker-599"}
		for _, name := range want {
			require.NoError(t, b.client.Apply(t.Context(), kube.Taint, mark(name)))
		}
		for expired, requests := range map[int]int{0: 3, 1: 5} {
			left := expired
			b.Requests()
			b.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Query().Get("continue") == "" || left == 0 {
					return false
				}
				left--
				code(http.StatusGone)(w, r)
				return true
			})
			marks, errs := b.client.Marks(t.Context())
			require.Empty(t, errs)
			var got []string
			for _, m := range marks {
				got = append(got, m.Node)
			}
			require.Equal(t, want, got)
			require.Len(t, b.Requests(), requests)
		}
		b.first(100, code(http.StatusGone))
		_, errs := b.client.Marks(t.Context())
		require.Len(t, errs, 1)
	})
}

// A condition's heartbeat moves when the mark is renewed, its transition when the status changes.
func TestHeartbeat(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		client, err := kube.NewOver(b.Account(t, granted(t, kube.Condition)...), b.direct)
		require.NoError(t, err)
		patches := func() int {
			return len(slices.DeleteFunc(b.Requests(), func(r string) bool { return r != "PATCH /api/v1/nodes/n1/status" }))
		}
		require.NoError(t, client.Apply(t.Context(), kube.Condition, mark(node)))
		require.Equal(t, 1, patches())
		time.Sleep(59 * time.Second)
		require.NoError(t, client.Apply(t.Context(), kube.Condition, mark(node)))
		require.Zero(t, patches())
		time.Sleep(2 * time.Second)
		require.NoError(t, client.Apply(t.Context(), kube.Condition, mark(node)))
		require.Equal(t, 1, patches())
		require.NoError(t, client.Remove(t.Context(), mark(node)))
		require.Equal(t, 1, patches())
	})
}

// What is not the name of a node, or no mark, is not sent.
func TestMarksThatMakeNoSense(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		names := []string{
			"", ".", "..", "a/b", "a b", "A", "a..b", "-a", "a-", "a.", "%2e", "a?b", "ä", "a_b", strings.Repeat("a", 254),
		}
		for _, name := range names {
			m := mark(name)
			for _, err := range []error{b.client.Apply(t.Context(), kube.Event, m), b.client.Remove(t.Context(), m)} {
				require.ErrorContains(t, err, "is not the name of a node", name)
			}
		}
		for _, owner := range []string{"", " a", "a\n", "a\x1b[2J", "\xff", strings.Repeat("a", 254)} {
			m := mark(node)
			m.Owner = owner
			for _, err := range []error{b.client.Apply(t.Context(), kube.Event, m), b.client.Remove(t.Context(), m)} {
				require.ErrorContains(t, err, "need 1 to 253 printable bytes", owner)
			}
		}
		m := mark(node)
		m.Until = m.Since.Add(-time.Second)
		require.ErrorContains(t, b.client.Apply(t.Context(), kube.Event, m), "no end before it")
		m = kube.Mark{Node: node, Owner: "a"}
		require.ErrorContains(t, b.client.Apply(t.Context(), kube.Event, m), "need a beginning")
		require.ErrorContains(t, b.client.Apply(t.Context(), "evict", mark(node)), "want none, event")
		require.Empty(t, b.Requests())
	})
}

func TestNewRefusesWhatIsNoServer(t *testing.T) {
	good := kubetest.Start(t).Account(t)
	for _, server := range []string{
		"", "http://127.0.0.1", "https://", "https://a/b", "https://u:secret@a", "https://a?b", "https://a#b", "a",
		"https://[",
	} {
		cfg := good
		cfg.Server = server
		_, err := kube.New(cfg)
		require.ErrorContains(t, err, "https://HOST:PORT", server)
		require.NotContains(t, err.Error(), "secret")
	}
	for _, file := range []string{good.TokenFile, filepath.Join(t.TempDir(), "nope")} {
		cfg := good
		cfg.CAFile = file
		_, err := kube.New(cfg)
		require.ErrorContains(t, err, file)
	}
}
