package serve

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang"
	"dlrover-run/internal/testkit"
)

// caller speaks to a handler without a network.
type caller struct{ http.Handler }

func (c caller) Exchange(ctx context.Context, run, path, encoding string, body []byte) (*http.Response, error) {
	method := http.MethodPost
	if body == nil {
		method = http.MethodGet
	}
	req := httptest.NewRequestWithContext(ctx, method, "/v1/runs/"+run+"/"+path, bytes.NewReader(body))
	req.Header.Set("Content-Encoding", encoding)
	rec := httptest.NewRecorder()
	c.ServeHTTP(rec, req)
	resp := rec.Result()
	if resp.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(resp.Body)
		if err != nil {
			return nil, err
		}
		resp.Body = io.NopCloser(z)
	}
	return resp, nil
}

func TestEvidenceOverHTTP(t *testing.T) {
	r := newRdzv(hang.ActReport, 100)
	h := New(r.config())
	defer h.Close()
	over := Over(caller{h.Handler()})
	ask, err := over.Post(t.Context(), "r", r.suspicion(0, 12*time.Second))
	require.NoError(t, err)
	require.Equal(t, hang.AskEvidence, ask.What)
	for i := range r.nodes {
		rep := r.suspicion(i, 12*time.Second)
		rep.Ask, rep.Evidence, rep.RAS = ask.Seq, evidence(i, 1), "two\nlines"
		rep.Store = []hang.StoreWait{{Key: "k", Waiters: []string{"10.0.0.1:5"}}}
		_, err := over.Post(t.Context(), "r", rep)
		require.NoError(t, err)
	}
	for _, transport := range []Transport{h, over} {
		p, err := transport.Picture(t.Context(), "r", true)
		require.NoError(t, err)
		require.Len(t, p.Evidence, 200)
		require.Len(t, p.Store, 100)
		require.Equal(t, "two\nlines", p.RAS[0].Text)
		want := evidence(99, 1)[1]
		got := p.Evidence[199]
		require.Equal(t, "n99", got.Node)
		require.Equal(t, 99, got.GroupRank)
		require.Equal(t, want.Samples, got.Samples)
		require.Equal(t, want.Groups, got.Groups)
		require.Equal(t, want.Stacks.Threads[0].Python, got.Stacks.Threads[0].Python)
		require.Zero(t, got.Stacks.Threads[0].TID)
		for _, e := range p.Evidence {
			require.Same(t, p.Evidence[0].Stacks, e.Stacks, "what is the same is kept once")
			require.Same(t, &p.Evidence[0].Groups[0], &e.Groups[0])
		}
		p, err = transport.Picture(t.Context(), "r", false)
		require.NoError(t, err)
		require.Empty(t, p.Evidence)
		require.Equal(t, 100, p.Answered)
	}
	require.Less(t, h.Stats().Held, 300<<10)
}

func TestCollectOverHTTP(t *testing.T) {
	r := newRdzv(hang.ActReport, 1)
	h := New(r.config())
	defer h.Close()
	over := Over(caller{h.Handler()})
	seq, err := over.Collect(t.Context(), "r")
	require.NoError(t, err)
	p, err := over.Picture(t.Context(), "r", false)
	require.NoError(t, err)
	require.Equal(t, seq, p.Collection)
	require.False(t, p.Collected)
}

func TestErrorsOverHTTP(t *testing.T) {
	r := newRdzv(hang.ActReport, 1)
	h := New(r.config())
	over := Over(caller{h.Handler()})
	_, err := over.Post(t.Context(), "r", hang.Report{ID: "stranger", Epoch: r.epoch})
	require.ErrorIs(t, err, ErrNotMember)
	_, err = over.Post(t.Context(), "r", hang.Report{ID: id(0)})
	require.ErrorIs(t, err, ErrNotMember)
	require.ErrorContains(t, err, "another epoch")
	for _, evidence := range []bool{false, true} {
		_, err = over.Picture(t.Context(), "r", evidence)
		require.ErrorIs(t, err, ErrUnknownRun)
	}
	_, err = over.Collect(t.Context(), "r")
	require.NoError(t, err)
	h.Close()
	_, err = over.Collect(t.Context(), "r")
	require.ErrorIs(t, err, errClosed)
	old := Over(caller{http.NotFoundHandler()})
	_, err = old.Post(t.Context(), "r", hang.Report{})
	require.ErrorIs(t, err, ErrBadRequest)
	require.ErrorContains(t, err, "an older version?")
	other := Over(caller{http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") })})
	_, err = other.Collect(t.Context(), "r")
	require.ErrorContains(t, err, "is not ours")
	for _, with := range []bool{false, true} {
		_, err = other.Picture(t.Context(), "r", with)
		require.Error(t, err)
	}
}

func zipped(text string) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = z.Write([]byte(text))
	_ = z.Close()
	return b.Bytes()
}

func TestBadReports(t *testing.T) {
	r := newRdzv(hang.ActReport, 1)
	h := New(r.config())
	defer h.Close()
	for name, c := range map[string]struct {
		encoding string
		body     []byte
		want     string
	}{
		"no JSON":       {"", []byte("{"), "unexpected end"},
		"a list":        {"", []byte("[]"), "cannot unmarshal"},
		"a bomb":        {"gzip", zipped(strings.Repeat(" ", maxPlain+1)), "more than 8 MiB when it is unpacked"},
		"too large":     {"", bytes.Repeat([]byte(" "), maxBody+1), "more than 1024 KiB"},
		"half a zip":    {"gzip", zipped("{}")[:15], "EOF"},
		"no zip":        {"gzip", []byte("{}"), "EOF"},
		"odd encoding":  {"br", []byte("{}"), `encoding "br"`},
		"negative time": {"", []byte(`{"suspicions":[{"age":-1e99}]}`), "cannot unmarshal"},
	} {
		t.Run(name, func(t *testing.T) {
			resp, err := caller{h.Handler()}.Exchange(t.Context(), "r", "hang/report?node="+id(0), c.encoding, c.body)
			require.NoError(t, err)
			require.Equal(t, http.StatusBadRequest, resp.StatusCode)
			err = received(resp)
			require.ErrorIs(t, err, ErrBadRequest)
			require.ErrorContains(t, err, c.want)
		})
	}
	require.Empty(t, h.runs.All())
}

// A stranger is sent away before anything that it sends is read.
func TestStrangersAreNotRead(t *testing.T) {
	h := New(newRdzv(hang.ActReport, 1).config())
	defer h.Close()
	body := io.Reader(unreadable{t})
	req := httptest.NewRequest(http.MethodPost, "/v1/runs/r/hang/report?node=stranger", body)
	rec := httptest.NewRecorder()
	h.Handler().ServeHTTP(rec, req)
	require.Equal(t, http.StatusNotFound, rec.Code)
}

type unreadable struct{ t *testing.T }

func (u unreadable) Read([]byte) (int, error) {
	u.t.Error("somebody reads")
	return 0, io.EOF
}

// One that sends slowly holds one place, however often it tries.
func TestSlowSender(t *testing.T) {
	r := newRdzv(hang.ActReport, 2)
	h := New(r.config())
	defer h.Close()
	slow, feed := io.Pipe()
	done := make(chan int)
	go func() {
		req := httptest.NewRequest(http.MethodPost, "/v1/runs/r/hang/report?node="+id(0), slow)
		rec := httptest.NewRecorder()
		h.Handler().ServeHTTP(rec, req)
		done <- rec.Code
	}()
	_, _ = feed.Write([]byte(`{"epoch":`)) // somebody reads
	large := r.suspicion(0, time.Second)
	large.Epoch, large.RAS = r.epoch, strings.Repeat("x", 1000)
	for i := range 20 {
		large.RAS += fmt.Sprint(i * i * 1234567)
	}
	body, err := json.Marshal(large)
	require.NoError(t, err)
	body = append(body, bytes.Repeat([]byte(" "), largeBody)...)
	post := func(node int) int {
		resp, err := caller{h.Handler()}.Exchange(t.Context(), "r", "hang/report?node="+id(node), "", body)
		require.NoError(t, err)
		return resp.StatusCode
	}
	require.Equal(t, http.StatusServiceUnavailable, post(0))
	require.Equal(t, http.StatusOK, post(1))
	_, _ = feed.Write([]byte(`{"term":7,"round":1,"epoch":0}}`))
	_ = feed.Close()
	require.Equal(t, http.StatusOK, <-done)
	require.Equal(t, http.StatusOK, post(0))
}

func TestReportsAreCutToTheirBounds(t *testing.T) {
	long := strings.Repeat("ä", 64<<10)
	es := evidence(0, 1)
	es[0].Stacks = &hang.Stacks{Threads: make([]hang.Thread, 1000), Error: strings.Repeat("x", 3<<20)}
	es[0].Stacks.Threads[0] = hang.Thread{Name: "evil\x1b[2J\u202e", Python: frames("f", 1000), Native: frames("g", 1000)}
	es[0].Error, es[0].Sockets, es[0].Work = long, make([]string, 1000), hang.Work(long)
	es[0].Flight = &hang.Flight{Entries: make([]hang.FlightEntry, 1000)}
	es[0].Samples = append(es[0].Samples, make([]hang.Sample, 100)...)
	es[1].Samples[0].Page.StepTimes = make([]time.Duration, 1000)
	es[0].Groups = make([]hang.Group, 1000)
	rep := hang.Report{
		Evidence: es, RAS: "a\n\x1b" + long, Partial: long, Ask: 1,
		Store:      []hang.StoreWait{{Key: long, Waiters: make([]string, 1000)}},
		Suspicions: []hang.Suspicion{{Age: -5, Limit: 1 << 62, Why: "x\r\ny"}},
		Summary:    &hang.Summary{Slow: long},
	}
	body, encoding, err := encode(rep)
	require.NoError(t, err)
	p, err := decode(body, encoding)
	require.NoError(t, err)
	var shared interner
	shared.of(1)
	p.unpack(&shared)
	got := p.report
	require.Equal(t, hang.Suspicion{Age: 0, Limit: maxAge, Why: "x  y"}, got.Suspicions[0])
	require.LessOrEqual(t, len(got.RAS), maxLong)
	require.Equal(t, "a\n ä", got.RAS[:5])
	require.LessOrEqual(t, len(got.Partial), maxText)
	require.LessOrEqual(t, len(got.Summary.Slow), maxText)
	require.LessOrEqual(t, len(got.Store[0].Key), maxName)
	require.Len(t, got.Store[0].Waiters, maxWaiters)
	e := got.Evidence[0]
	require.Len(t, e.Samples, maxSamples)
	require.LessOrEqual(t, len(e.Work), maxName)
	require.Len(t, got.Evidence[1].Samples[0].Page.StepTimes, maxSteps)
	require.Len(t, e.Sockets, maxSockets)
	require.Len(t, e.Flight.Entries, maxFlight)
	require.LessOrEqual(t, len(e.Error), maxText)
	require.Nil(t, e.Stacks, "a table of more than 2 MiB is dropped")
	require.Len(t, e.Groups, maxGroups)

	es[0].Stacks.Error = ""
	body, encoding, err = encode(hang.Report{Evidence: es})
	require.NoError(t, err)
	p, err = decode(body, encoding)
	require.NoError(t, err)
	p.unpack(&shared)
	s := p.report.Evidence[0].Stacks
	require.Len(t, s.Threads, maxThreads)
	require.Len(t, s.Threads[0].Python, maxFrames)
	require.Len(t, s.Threads[0].Native, maxFrames)
	require.Equal(t, "evil [2J ", s.Threads[0].Name)
}

// What is too much for a request is left out by who sends it, the least useful first.
func TestLargeReportsAreMadeSmaller(t *testing.T) {
	testkit.Long(t, "it packs megabytes of noise")
	var noise strings.Builder
	for i := range 200_000 {
		fmt.Fprintf(&noise, "%x", i*i*2654435761)
	}
	for name, c := range map[string]struct {
		log, stack    string
		logs, stacked bool
	}{
		"small":        {"x", "x", true, true},
		"a large log":  {noise.String(), "x", false, true},
		"a large line": {"x", noise.String(), false, false},
	} {
		t.Run(name, func(t *testing.T) {
			es := evidence(0, 1)
			es[0].Log, es[0].Stacks = c.log, &hang.Stacks{Interpreter: c.stack}
			es[0].Samples = append(es[0].Samples, es[0].Samples[0])
			es[0].Samples[0].Page.StepTimes = []time.Duration{1, 2}
			body, encoding, err := encode(hang.Report{Evidence: es})
			require.NoError(t, err)
			require.Less(t, len(body), maxBody)
			require.Equal(t, c.log, es[0].Log, "the caller's stays what it is")
			p, err := decode(body, encoding)
			require.NoError(t, err)
			var shared interner
			shared.of(1)
			p.unpack(&shared)
			got := p.report.Evidence[0]
			require.Equal(t, c.logs, got.Log != "")
			require.Equal(t, c.stacked, got.Stacks != nil)
			require.Equal(t, !c.logs, p.report.Partial != "")
			require.Nil(t, got.Samples[0].Page.StepTimes, "only the newest page has them")
			require.Equal(t, es[0].Samples[1].Page.StepTimes, got.Samples[1].Page.StepTimes)
		})
	}
}

// Whatever comes is refused, or can be judged.
func FuzzReports(f *testing.F) {
	r := newRdzv(hang.ActStop, 2)
	good, _, _ := encode(hang.Report{Epoch: r.epoch, Ask: 1, Evidence: evidence(0, 1)[:1]})
	f.Add(good)
	f.Add([]byte(`{"epoch":{"term":7,"round":1},"suspicions":[{"rank":1,"age":9}],"stack_table":[1,{}],` +
		`"group_table":["x"],` +
		`"evidence":[{"rank":0,"stacks":1,"groups":1},{"rank":1,"stacks":-7,"groups":99}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		r := newRdzv(hang.ActStop, 2) // what it has been told fills up
		p, err := decode(body, "")
		if err != nil {
			require.ErrorIs(t, err, ErrBadRequest)
			return
		}
		cfg := r.config()
		cfg.judge = nil
		h := New(cfg)
		defer h.Close()
		ask, err := h.Post(t.Context(), "r", r.suspicion(1, time.Second))
		require.NoError(t, err)
		p.report.Epoch, p.report.Ask = r.epoch, ask.Seq
		_, err = h.take("r", id(0), p)
		require.NoError(t, err)
		pic, err := h.Picture(t.Context(), "r", true)
		require.NoError(t, err)
		w, err := r.world("r")
		require.NoError(t, err)
		hang.Judge(w, slices.Values(pic.Evidence), pic.Store)
		_, err = json.Marshal(pic)
		require.NoError(t, err)
	})
}

// Rows of one report, whose memory the next one uses, are not in that.
func TestTablesAreUsedAgain(t *testing.T) {
	first, err := decode([]byte(`{"stack_table":[{"error":"a secret"},{"error":"another"}],"group_table":[[]]}`), "")
	require.NoError(t, err)
	first.spent()
	for body, want := range map[string]int{`{"stack_table":[null]}`: 1, `{"stack_table":[{}]}`: 1, `{}`: 0} {
		next, err := decode([]byte(body), "")
		require.NoError(t, err)
		require.Len(t, next.Stacks, want)
		require.Empty(t, next.Groups)
		for _, row := range next.Stacks {
			require.NotContains(t, string(row), "secret")
		}
		next.spent()
	}
}
