package serve

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

// post sends a body to the service of run r.
func post(t *testing.T, at, body string) (int, string) {
	t.Helper()
	resp, err := http.Post(at+"/v1/runs/r/checks/next", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(data)
}

func overHTTP(t *testing.T) (*place, string) {
	p := newPlace(t)
	s := httptest.NewServer(p.Handler())
	t.Cleanup(func() {
		p.Close()
		_ = s.Config.Close()
		s.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return p, s.URL
}

func text(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(data)
}

func TestOverHTTP(t *testing.T) {
	p, at := overHTTP(t)
	status, body := post(t, at, text(arrive("a")))
	require.Equal(t, 404, status)
	require.Contains(t, body, `"unknown_node"`)
	require.NoError(t, p.Expect("r", []string{"a", "b"}, nil))
	status, body = post(t, at, text(atOnce(arrive("a"))))
	require.Equal(t, 200, status)
	require.JSONEq(t, `{"seq":0,"duty":"rest"}`, body)
	_, _ = post(t, at, text(atOnce(arrive("b"))))
	status, body = post(t, at, text(ask("a", 0)))
	require.Equal(t, 200, status)
	var s netcheck.Assignment
	require.NoError(t, json.Unmarshal([]byte(body), &s))
	require.Equal(t, netcheck.Serve, s.Duty)
	require.Len(t, s.Key, 32)
	require.NotContains(t, body, `"b"`)
	held := make(chan string)
	go func() {
		_, body := post(t, at, text(ask("b", 0)))
		held <- body
	}()
	_, _ = post(t, at, text(atOnce(listens("a", s))))
	require.Contains(t, <-held, `"duty":"dial"`)
}

func TestThePictureTellsNoSecrets(t *testing.T) {
	p, at := overHTTP(t)
	get := func(path string) (int, string) {
		resp, err := http.Get(at + "/v1/runs/r/checks" + path)
		require.NoError(t, err)
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(data)
	}
	status, body := get("")
	require.Equal(t, 404, status)
	require.Contains(t, body, `no check has been made in run \"r\"`)
	require.NoError(t, p.Expect("r", []string{"secret-a", "secret-b"}, nil))
	for _, id := range []string{"secret-a", "secret-b"} {
		r := arrive(id)
		r.Arrive.Name = "node-" + id[len("secret-"):]
		p.next(t, "r", atOnce(r))
	}
	s := p.next(t, "r", ask("secret-a", 0))
	require.Len(t, s.Key, 32)
	for _, path := range []string{"", "/"} {
		status, body = get(path)
		require.Equal(t, 200, status)
		require.Contains(t, body, `"name":"node-b"`)
		require.NotContains(t, body, "secret")
		require.NotContains(t, body, strings.Trim(text(s.Key), `"`))
	}
	status, _ = get("/next")
	require.Equal(t, 405, status)
}

func introducing(n netcheck.Node) string { return text(Request{ID: "a", Visit: "v", Arrive: &n}) }

func reporting(r netcheck.Result) string { return text(Request{ID: "a", Visit: "v", Report: &r}) }

// A launcher that is newer than the daemon takes part, without what the daemon does not know.
func TestFieldsOfNewerLaunchers(t *testing.T) {
	for name, body := range map[string]string{
		"of a request": `{"id":"a","visit":"v","admin":true,"arrive":{"name":"n"}}`,
		"of a node":    `{"id":"a","visit":"v","arrive":{"name":"n","key":"x","numa":{"nodes":[2]}}}`,
	} {
		q, err := decode([]byte(body))
		require.NoError(t, err, name)
		require.Equal(t, Request{ID: "a", Visit: "v", Arrive: &netcheck.Node{Name: "n"}}, q, name)
	}
}

func TestHostileRequests(t *testing.T) {
	p, at := overHTTP(t)
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	for name, body := range map[string]string{
		"nothing":                   ``,
		"no JSON":                   `hello`,
		"another type":              `[]`,
		"half a value":              `{"id":"a"`,
		"two values":                text(arrive("a")) + `{}`,
		"no ID":                     `{"visit":"v"}`,
		"no visit":                  `{"id":"a"}`,
		"a long visit":              text(Request{ID: "a", Visit: strings.Repeat("v", maxVisit+1)}),
		"a terminal's commands":     introducing(netcheck.Node{Name: "\x1b[2J"}),
		"two things":                `{"id":"a","visit":"v","leave":true,"report":{"test":"t"}}`,
		"another's ID":              `{"id":"a","visit":"v","arrive":{"id":"b","name":"n"}}`,
		"a nameless node":           `{"id":"a","visit":"v","arrive":{}}`,
		"many NICs":                 introducing(netcheck.Node{Name: "n", NICs: make([]netcheck.NIC, 17)}),
		"a NIC at a name":           `{"id":"a","visit":"v","arrive":{"name":"n","nics":[{"name":"e","addr":"host"}]}}`,
		"a NIC of infinite speed":   `{"id":"a","visit":"v","arrive":{"name":"n","nics":[{"addr":"::1","mbps":1e999}]}}`,
		"negative GPUs":             `{"id":"a","visit":"v","arrive":{"name":"n","gpus":-1}}`,
		"many findings":             introducing(netcheck.Node{Name: "n", Findings: make([]netcheck.Finding, 65)}),
		"an unknown severity":       `{"id":"a","visit":"v","arrive":{"name":"n","findings":[{"severity":"mortal"}]}}`,
		"no addresses":              `{"id":"a","visit":"v","ready":{"test":"t","addrs":[]}}`,
		"no port":                   `{"id":"a","visit":"v","ready":{"test":"t","addrs":["10.0.0.1"]}}`,
		"port 0":                    `{"id":"a","visit":"v","ready":{"test":"t","addrs":["10.0.0.1:0"]}}`,
		"a judgement":               `{"id":"a","visit":"v","report":{"test":"t","class":"slow"}}`,
		"a silent reporter":         `{"id":"a","visit":"v","report":{"test":"t","class":"silent"}}`,
		"a negative rate":           `{"id":"a","visit":"v","report":{"test":"t","flows":[{"mbps":-1}]}}`,
		"an endless rate":           `{"id":"a","visit":"v","report":{"test":"t","flows":[{"mbps":1e300}]}}`,
		"a share above 1":           `{"id":"a","visit":"v","report":{"test":"t","flows":[{"retrans":1.5}]}}`,
		"a rail of nobody":          `{"id":"a","visit":"v","report":{"test":"t","flows":[{"rail":16}]}}`,
		"a negative latency":        `{"id":"a","visit":"v","report":{"test":"t","torch":{"latency":-1}}}`,
		"a negative multiplication": `{"id":"a","visit":"v","report":{"test":"t","torch":{"matmul":[-1]}}}`,
		"a long error":              reporting(netcheck.Result{Test: "t", Text: strings.Repeat("x", MaxText+1)}),
		"a large body":              `{"id":"` + strings.Repeat("x", maxBody) + `"}`,
	} {
		status, answer := post(t, at, body)
		require.Equal(t, 400, status, name)
		require.Contains(t, answer, `"bad_request"`, name)
		require.Less(t, len(answer), 2000, name)
	}
	require.Len(t, p.checks[0].events, 1, "none of them reached the check")
	status, _ := post(t, at, text(arrive("a")))
	require.Equal(t, 200, status)
}

// Whoever sends large requests, or slowly, keeps nobody else from being heard.
func TestLargeRequestsTakeTurns(t *testing.T) {
	p, at := overHTTP(t)
	require.NoError(t, p.Expect("r", []string{"a"}, nil))
	bodies := make([]*io.PipeWriter, maxLarge)
	done := make(chan error, maxLarge)
	for i := range bodies {
		r, w := io.Pipe()
		bodies[i] = w
		go func() {
			resp, err := http.Post(at+"/v1/runs/r/checks/next", "application/json", r)
			if err == nil {
				err = resp.Body.Close()
			}
			done <- err
		}()
	}
	require.Eventually(t, func() bool { return len(p.large) == maxLarge }, 10*time.Second, time.Millisecond)
	large := arrive("a")
	for range 60 {
		f := netcheck.Finding{Severity: netcheck.Info, Text: strings.Repeat("x", 1000)}
		large.Arrive.Findings = append(large.Arrive.Findings, f)
	}
	status, body := post(t, at, text(large))
	require.Equal(t, 503, status)
	require.Contains(t, body, `"busy"`)
	status, _ = post(t, at, text(arrive("a")))
	require.Equal(t, 200, status)
	for _, w := range bodies {
		_ = w.Close()
	}
	for range bodies {
		require.NoError(t, <-done)
	}
	status, _ = post(t, at, text(large))
	require.Equal(t, 200, status)
}

func TestFit(t *testing.T) {
	long := strings.Repeat("é\x1b", 2000)
	n := &netcheck.Node{Name: "n", NoTorch: long, Switch: long, NICs: make([]netcheck.NIC, 20)}
	q := Request{ID: "a", Visit: "v", Arrive: n}
	for i := range q.Arrive.NICs {
		q.Arrive.NICs[i] = netcheck.NIC{Name: fmt.Sprint("eth", i), Addr: "10.0.0.1"}
	}
	for i := range 200 {
		s := netcheck.Info
		if i%3 == 1 {
			s = netcheck.Warn
		}
		if i == 199 {
			s = netcheck.Fatal
		}
		q.Arrive.Findings = append(q.Arrive.Findings, netcheck.Finding{Check: long, Peer: long, Text: long, Severity: s})
	}
	require.Error(t, q.check())
	q.Fit()
	require.NoError(t, q.check())
	require.LessOrEqual(t, len(q.Arrive.Findings), netcheck.MaxFindings)
	require.Equal(t, netcheck.Fatal, q.Arrive.Findings[len(q.Arrive.Findings)-1].Severity)
	q = Request{ID: "a", Visit: "v", Report: &netcheck.Result{Test: "t", Text: long, Flows: make([]netcheck.Flow, 100)}}
	q.Report.Torch = &netcheck.TorchResult{Backend: long}
	q.Fit()
	require.NoError(t, q.check())
	require.LessOrEqual(t, len(q.Report.Text), MaxText)
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(text(arrive("a"))))
	f.Add([]byte(text(listens("a", netcheck.Assignment{Test: "t"}))))
	f.Add([]byte(text(reports("a", netcheck.Assignment{Test: "t"}, netcheck.Stalled))))
	f.Add([]byte(`{"id":"a","visit":"v","report":{"test":"t","torch":{"matmul":[1e9]},"flows":[{"streams":[1,2]}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		q, err := decode(data)
		if err != nil {
			require.ErrorIs(t, err, errBadRequest)
			return
		}
		again, err := decode([]byte(text(q)))
		require.NoError(t, err)
		require.True(t, bytes.Equal([]byte(text(q)), []byte(text(again))))
		q.Fit()
		require.NoError(t, q.check())
		p := newPlace(t) // none of it breaks a service
		require.NoError(t, p.Expect("r", []string{q.ID}, nil))
		_, _ = p.Next(t.Context(), "r", atOnce(q))
	})
}
