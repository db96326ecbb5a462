package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

func listener(id string) rendezvous.Join {
	j := joinOf(id, rendezvous.Params{Min: 9, Max: 9})
	j.Node.Can = []rendezvous.Ability{rendezvous.CanNotice}
	return j
}

// joined is a hub with a run of nodes, each of which has heard its directive: the cursors say so.
func joined(t *testing.T, svc Service, ids ...string) map[string]Cursor {
	cursors := map[string]Cursor{}
	for _, id := range ids {
		require.NoError(t, svc.Join(t.Context(), "r", listener(id)))
		n, err := svc.Watch(t.Context(), "r", id, Cursor{WithNotices: true})
		require.NoError(t, err)
		require.Empty(t, n.Notices)
		require.NotZero(t, n.NoticeSeq)
		cursors[id] = Cursor{Directive: n.Seq, WithNotices: true, Notices: n.NoticeSeq}
	}
	return cursors
}

func topics(n News) (ts []string) {
	for _, m := range n.Notices {
		ts = append(ts, m.Topic)
	}
	return ts
}

func TestNoticesOverBothServices(t *testing.T) {
	served := serveHub(t, "0123456789abcdef")
	inside := NewHub(HubConfig{})
	defer inside.Close()
	for name, c := range map[string]struct {
		svc    Service
		notify func(node, topic, body string) error
	}{
		"hub": {inside, func(node, topic, body string) error { return inside.Notify("r", node, topic, body) }},
		"http": {served.client,
			func(node, topic, body string) error { return served.client.Notify(t.Context(), "r", node, topic, body) }},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, c.notify("", "t", ""), ErrUnknownRun)
			at := joined(t, c.svc, "a", "b")
			require.NoError(t, c.notify("", "log-level", "debug"))
			require.NoError(t, c.notify("b", "stacks", ""))
			a, err := c.svc.Watch(t.Context(), "r", "a", at["a"])
			require.NoError(t, err)
			require.Equal(t, []job.Notice{{Seq: at["a"].Notices + 1, Topic: "log-level", Body: "debug"}}, a.Notices)
			require.Equal(t, job.Wait, a.Kind, "the present directive comes along")
			require.Equal(t, at["a"].Directive, a.Seq)
			require.Equal(t, at["b"].Notices+2, a.NoticeSeq)
			b, err := c.svc.Watch(t.Context(), "r", "b", at["b"])
			require.NoError(t, err)
			require.Equal(t, []string{"log-level", "stacks"}, topics(b))
			require.ErrorIs(t, c.notify("nobody", "t", ""), rendezvous.ErrUnknownNode)
		})
	}
}

func TestNoticesAfter(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	base := joined(t, h, "a")["a"]
	for i := range maxNotices + 2 {
		require.NoError(t, h.Notify("r", "", fmt.Sprint(i), ""))
	}
	for name, c := range map[string]struct {
		after       uint64
		first, size int
	}{
		"all that are kept":             {base.Notices, 2, maxNotices},
		"the last":                      {base.Notices + maxNotices + 1, maxNotices + 1, 1},
		"of an earlier daemon":          {1, 2, maxNotices},
		"of a daemon of a faster clock": {1<<64 - 1, 2, maxNotices},
		"from now on":                   {0, 0, 0},
		"nothing new":                   {base.Notices + maxNotices + 2, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := h.Watch(t.Context(), "r", "a", Cursor{WithNotices: true, Notices: c.after})
			require.NoError(t, err)
			require.Len(t, n.Notices, c.size)
			require.Equal(t, base.Notices+maxNotices+2, n.NoticeSeq)
			if c.size > 0 {
				require.Equal(t, fmt.Sprint(c.first), n.Notices[0].Topic)
			}
		})
	}
}

func TestNoticeRules(t *testing.T) {
	h := NewHub(HubConfig{})
	defer h.Close()
	joined(t, h, "a")
	require.NoError(t, h.Join(t.Context(), "r", joinOf("old", rendezvous.Params{Min: 9, Max: 9})))
	for name, c := range map[string]struct {
		run, node, topic, body string
		want                   error
	}{
		"largest":        {"r", "a", strings.Repeat("t", maxTopic), strings.Repeat("b", maxNotice), nil},
		"lines":          {"r", "a", "t", "a\nb", nil},
		"no topic":       {"r", "a", "", "b", ErrBadRequest},
		"long topic":     {"r", "a", strings.Repeat("t", maxTopic+1), "", ErrBadRequest},
		"hostile topic":  {"r", "a", "\x1b[2J", "", ErrBadRequest},
		"long body":      {"r", "a", "t", strings.Repeat("b", maxNotice+1), ErrBadRequest},
		"bytes":          {"r", "a", "t", "\xff", ErrBadRequest},
		"no such run":    {"x", "a", "t", "", ErrUnknownRun},
		"no such node":   {"r", "x", "t", "", rendezvous.ErrUnknownNode},
		"an old version": {"r", "old", "t", "", errNoNotices},
		"all, old ones":  {"r", "", "t", "", nil},
	} {
		t.Run(name, func(t *testing.T) { require.ErrorIs(t, h.Notify(c.run, c.node, c.topic, c.body), c.want) })
	}
	h.Close()
	require.ErrorIs(t, h.Notify("r", "a", "t", ""), ErrClosed)
}

// A held Watch is answered by a notice for its node, and by no other; who did not ask is not woken for nothing.
func TestNoticeWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(HubConfig{})
		defer h.Close()
		at := joined(t, h, "a", "b", "c")
		ctx, cancel := context.WithCancel(t.Context())
		type answer struct {
			id  string
			n   News
			err error
		}
		answers := make(chan answer, 9)
		watch := func(id string, c Cursor) {
			go func() {
				n, err := h.Watch(ctx, "r", id, c)
				answers <- answer{id, n, err}
			}()
		}
		watch("a", at["a"])
		watch("b", at["b"])
		watch("c", Cursor{Directive: at["c"].Directive})
		synctest.Wait()
		require.NoError(t, h.Notify("r", "b", "one", ""))
		got := <-answers
		require.Equal(t, "b", got.id)
		synctest.Wait()
		require.Empty(t, answers)
		require.NoError(t, h.Notify("r", "", "two", ""))
		got = <-answers
		require.Equal(t, "a", got.id)
		require.Equal(t, []string{"two"}, topics(got.n), "only its own")
		synctest.Wait()
		require.Empty(t, answers, "c did not ask")
		time.Sleep(hold(3))
		synctest.Wait()
		require.ErrorIs(t, (<-answers).err, ErrNothingNew)
		cancel()
	})
}

// Who does not ask gets the answer of the first version, to the byte, whatever has been told.
func TestWatchWithoutNotices(t *testing.T) {
	s := serveHub(t, "")
	joined(t, s.hub, "a")
	require.NoError(t, s.hub.Notify("r", "", "t", "b"))
	get := func(query string) string {
		resp, err := http.Get("http://" + s.addr + "/v1/runs/r/watch?node=a&after=0" + query)
		require.NoError(t, err)
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, resp.StatusCode, string(data))
		return string(data)
	}
	defer http.DefaultClient.CloseIdleConnections()
	r, err := s.hub.existing("r")
	require.NoError(t, err)
	m, err := r.round.Member("a")
	require.NoError(t, err)
	d := m.Directive
	require.Equal(t, fmt.Sprintf(`{"seq":%d,"kind":"wait","term":%d,"round":0,"epoch":0}`+"\n", d.Seq, d.Term), get(""))
	require.Contains(t, get("&notices=0"), `"notice_seq":`)
	require.Contains(t, get("&notices=1&something=new"), `"notices":[{"seq":`)
}
