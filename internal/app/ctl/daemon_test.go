package ctl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	hangs "dlrover-run/hang/serve"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/verdict"
	"dlrover-run/netcheck/serve"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/ledger"
)

const secret = "0123456789abcdef"

// served is a daemon, and dlroverctl in an environment that names it.
type served struct {
	t      *testing.T
	hub    *api.Hub
	checks *serve.Hub
	hangs  *hangs.Hub
	addr   string
	env    map[string]string
	close  func(grace time.Duration)
}

func newServed(t *testing.T) *served {
	t.Helper()
	return serveAt(t, "127.0.0.1:0")
}

func serveAt(t *testing.T, addr string) *served {
	t.Helper()
	s, err := service.New(service.Config{Token: secret, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	l, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	var once sync.Once
	end := func(grace time.Duration) { once.Do(func() { s.Close(grace); <-done }) }
	t.Cleanup(func() { end(0) })
	addr = l.Addr().String()
	env := map[string]string{"DLROVER_MASTER_ADDR": addr, "DLROVER_TOKEN": secret}
	return &served{t: t, hub: s.Hub, checks: s.Checks, hangs: s.Hangs, addr: addr, env: env, close: end}
}

// result is what a command has printed, and its exit status.
type result struct {
	code     int
	out, err string
}

func (d *served) ctl(args ...string) result { return d.ctlIn(d.t.Context(), args...) }

func (d *served) ctlIn(ctx context.Context, args ...string) result {
	out := &output{written: make(chan struct{})}
	return d.ctlTo(ctx, out, args...)
}

// output is what a command prints; written closes with the first of it.
type output struct {
	bytes.Buffer
	once    sync.Once
	written chan struct{}
}

func (o *output) Write(p []byte) (int, error) {
	o.once.Do(func() { close(o.written) })
	return o.Buffer.Write(p)
}

func (d *served) ctlTo(ctx context.Context, out *output, args ...string) result {
	var err bytes.Buffer
	env := func(k string) (string, bool) { v, ok := d.env[k]; return v, ok }
	p := &program{stdout: out, stderr: &err, env: env, now: time.Now}
	code := p.run(ctx, append([]string{"dlroverctl"}, args...))
	return result{code, out.String(), err.String()}
}

// ok runs a command that works and returns what it prints.
func (d *served) ok(args ...string) string {
	d.t.Helper()
	r := d.ctl(args...)
	require.Zero(d.t, r.code, r.err)
	require.True(d.t, text.Printable(strings.ReplaceAll(r.out, "\n", "")), "%q", r.out)
	return r.out
}

// fails runs a command that ends with a status and an error.
func (d *served) fails(code int, want string, args ...string) {
	d.t.Helper()
	r := d.ctl(args...)
	require.Equal(d.t, code, r.code, "%v: %s%s", args, r.out, r.err)
	require.Regexp(d.t, want, r.err)
	require.Equal(d.t, 1, strings.Count(r.err, "\n"), "one line: %s", r.err)
}

// join brings a launcher, named as its ID, into a run of that many nodes.
func (d *served) join(run, id string, nodes int) {
	d.t.Helper()
	require.NoError(d.t, d.hub.Join(d.t.Context(), run, rendezvous.Join{
		Node: rendezvous.Node{
			ID: id, Name: id, Rank: -1, Addr: "10.0.0.1", Slots: 2,
			Can: []rendezvous.Ability{rendezvous.CanGate, rendezvous.CanNotice},
		},
		Params: rendezvous.Params{Min: nodes, Max: nodes, MaxRestarts: 3},
	}))
}

// start has the world of a run running, and returns its epoch.
func (d *served) start(run, leader string) job.EpochID {
	d.t.Helper()
	n, err := d.hub.Watch(d.t.Context(), run, leader, api.Cursor{})
	require.NoError(d.t, err)
	require.Equal(d.t, job.Lead, n.Kind)
	require.NoError(d.t,
		d.hub.Report(d.t.Context(), run, rendezvous.Ready{ID: leader, EpochID: n.EpochID, Addr: "10.0.0.1", Port: 1}))
	return n.EpochID
}

// fail ends a run by a failure of which the text is hostile.
func (d *served) fail(run, id string, e job.EpochID) {
	d.t.Helper()
	fs := verdict.Pack([]verdict.Failure{
		{NodeName: id, Rank: 1, PID: 7, ExitCode: 3, At: time.Now(), LastLines: "boom \x1b[2J\u202e"},
	})
	require.NoError(d.t, d.hub.Report(d.t.Context(), run,
		rendezvous.Failing{ID: id, EpochID: e, Decision: rendezvous.Permanent, Failures: fs}))
	require.Eventually(d.t, func() bool { return d.hub.Runs(false)[0].Outcome != "" }, 10*time.Second, time.Millisecond)
}

func TestWhomToSpeakTo(t *testing.T) {
	d := newServed(t)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, free.Close())
	nobody := free.Addr().String()

	require.Contains(t, d.ok("runs"), "keeps no run")
	require.Contains(t, d.ok("--master", d.addr, "runs"), "keeps no run")
	d.fails(1, "no daemon answers at "+nobody+": .*refused; is dlrover-master, .* --standalone job can be reached where",
		"runs", "--master="+nobody)
	d.fails(2, `--master=node0: need a host and a port from 1 to 65535, such as node0:29400`, "runs", "--master", "node0")
	d.fails(2, "token file: open /nowhere", "runs", "--token-file=/nowhere")
	d.env["DLROVER_TOKEN"] = "another-secret-0123"
	d.fails(1, "the job token was not accepted: it differs from the daemon's", "runs")
	delete(d.env, "DLROVER_TOKEN")
	d.fails(1, "the job token was not accepted: the request carries none; set DLROVER_TOKEN", "runs")
	delete(d.env, "DLROVER_MASTER_ADDR")
	d.fails(2, "no daemon is named: give --master=HOST:PORT or set DLROVER_MASTER_ADDR", "runs")
	d.env["DLROVER_MASTER_ADDR"] = "[::1"
	d.fails(2, `DLROVER_MASTER_ADDR=\[::1: need a host and a port`, "runs")
}

func TestTheCommandLine(t *testing.T) {
	d := newServed(t)
	for _, c := range []struct {
		want string
		args []string
	}{
		{"status takes RUN, but was given nothing", []string{"status"}},
		{`status takes RUN, but was given ""`, []string{"status", ""}},
		{`bar takes RUN NODE, but was given "job"`, []string{"bar", "job"}},
		{`runs takes no argument, but was given "job"`, []string{"runs", "job"}},
		{"status: unknown option --charge; see dlroverctl status --help", []string{"status", "job", "--charge"}},
		{"status: unknown option --nope", []string{"status", "--nope", "job"}},
		{`log-level "LOUD": need one of debug, info, warn, error`, []string{"log-level", "job", "LOUD"}},
		{"--reason needs a value; see dlroverctl pause --help", []string{"pause", "job", "--reason"}},
		{"--timeout=soon: .* is not a duration", []string{"exec", "job", "0", "--timeout=soon", "--", "ls"}},
		{"--tail=-3: need a number from 0", []string{"logs", "job", "--tail=-3"}},
		{"--master needs a value", []string{"status", "--master", "--", "job"}},
		{`pause: no run is called "\.\."; give its --rdzv-id`, []string{"pause", ".."}},
		{`status: no run is called "\."`, []string{"status", "."}},
		{"checkpoints ls: unknown option --nope", []string{"checkpoints", "ls", "dir", "--nope"}},
		{"checkpoints ls takes DIR, but was given nothing", []string{"checkpoints", "ls"}},
		{`checkpoints takes ls\|verify\|rm, but was given nothing; see dlroverctl checkpoints --help`,
			[]string{"checkpoints"}},
		{`checkpoints takes .*, but was given "mv" "dir"`, []string{"checkpoints", "mv", "dir"}},
		{"--master=node0:http: need a host and a port from 1 to 65535", []string{"runs", "--master=node0:http"}},
		{`unknown command "dance"`, []string{"dance", "job"}},
		{`unknown command "dance"`, []string{"help", "dance"}},
	} {
		d.fails(2, c.want, c.args...)
	}
	d.fails(1, `keeps no run "-x"`, "status", "--", "-x")
	d.join("-x", "n0", 2)
	require.Contains(t, d.ok("status", "--", "-x"), "-x")
}

func TestUnknownRunsAndNodes(t *testing.T) {
	d := newServed(t)
	commands := [][]string{{"status", "jib"}, {"events", "jib"}, {"verdict", "jib"}, {"restart", "jib"},
		{"bar", "jib", "n0"}, {"log-level", "jib", "info"}}
	for _, c := range commands {
		d.fails(1, `keeps no run "jib"; it keeps none`, c...)
	}
	d.join("job", "n0", 2)
	d.join("other", "n0", 2)
	for _, c := range commands {
		d.fails(1, `keeps no run "jib"; it keeps job, other`, c...)
	}
	d.fails(1, `run "job" has no node "n9"; it has n0`, "log-level", "job", "debug", "--node=n9")
	for i := range 30 {
		d.join(fmt.Sprintf("run%02d", i), "n0", 2)
	}
	d.fails(1, `it keeps job, other, run00, .*run17 and 12 more`, "status", "jib")
}

func TestRunsAndStatus(t *testing.T) {
	d := newServed(t)
	d.join("job", "gpu-01", 2)
	require.Regexp(t, `(?m)^job  1 +2 +0 +\S+ +\S+ +0 of 3 +waiting for nodes$`, d.ok("runs"))
	d.join("job", "gpu-02", 2)
	require.Contains(t, d.ok("status", "job"), "starting")
	e := d.start("job", "gpu-01")
	require.Regexp(t, `(?m)^job  2 +2 +4 +1 +0 +0 of 3 +running$`, d.ok("runs"))
	out := d.ok("status", "job")
	require.Regexp(t, `(?m)^nodes +2 in the world, 0 waiting; it wants 2$`, out)
	require.Regexp(t, `(?m)^0 +gpu-01 +10\.0\.0\.1 +2 +member`, out)
	require.NotContains(t, out, "checkpoint")
	require.Regexp(t, `(?m)^last event +\ds ago: run store at 10\.0\.0\.1:1$`, out)

	var s map[string]any
	require.NoError(t, json.Unmarshal([]byte(d.ok("status", "job", "--json")), &s))
	require.Equal(t, "running", s["phase"])
	require.Len(t, s["nodes"], 2)
	var all []map[string]any
	require.NoError(t, json.Unmarshal([]byte(d.ok("--json", "runs")), &all))
	require.Equal(t, "job", all[0]["run"])

	d.fail("job", "gpu-02", e)
	require.Regexp(t, `failed: .*boom \\x1b\[2J`, d.ok("status", "job"))
}

func TestCostOfARun(t *testing.T) {
	d := newServed(t)
	d.join("job", "gpu-01", 2)
	d.join("job", "gpu-02", 2)
	e := d.start("job", "gpu-01")
	require.NoError(t, d.hub.Report(t.Context(), "job", rendezvous.Slowed{EpochID: e, Fewer: 1}))
	time.Sleep(time.Second) // the least that is told
	d.fail("job", "gpu-02", e)
	require.Regexp(t, `(?m)^time +workers ran \d+\.\d % of 1\.\d s \(steps unknown\)`, d.ok("status", "job"))
	out := d.ok("cost", "job")
	require.Regexp(t, `^workers ran .*\n\nCAUSE +NODE +COUNT +TIME +SHARE\n`, out)
	require.Regexp(t, `(?m)^start +- +1 +0\.\d s +\d+\.\d %$`, out)
	require.Regexp(t, `(?m)^worker-failure +gpu-02 +1 +`, out)
	require.Regexp(t, `(?m)^training +1\.\d s +\d+\.\d %\n- slowed +1\.\d s +\d+\.\d %$`, out)
	require.Regexp(t, ` \(slowed \d+\.\d %: 86,000 steps a day fewer\)`, out)
	var r ledger.Report
	require.NoError(t, json.Unmarshal([]byte(d.ok("cost", "job", "--json")), &r))
	require.InDelta(t, r.At.Sub(r.Since), r.Times.Sum(), float64(time.Millisecond), "but for the slew of the clock")
	require.GreaterOrEqual(t, r.Times[ledger.Training], time.Second)
}

func TestCheckpointsOfARun(t *testing.T) {
	d := newServed(t)
	d.join("job", "n0", 2)
	at := func(ago time.Duration) string { return time.Now().Add(-ago).Format(time.RFC3339Nano) }
	body := fmt.Sprintf(`{"node":0,"ages":[{"rank":0,"memory_step":120,"memory_at":%q,"durable_step":100,`+
		`"durable_at":%q},{"rank":1,"memory_step":119,"memory_at":%q,"durable_step":-1}]}`,
		at(time.Minute), at(time.Hour), at(2*time.Minute))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+d.addr+"/v1/runs/job/checkpoints/ages",
		strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+secret)
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Regexp(t, `(?m)^checkpoint +step 119 in memory, 2m\ds old; step 100 on disk, 1h0m old$`, d.ok("status", "job"))
	var s map[string]map[string]any
	_ = json.Unmarshal([]byte(d.ok("status", "job", "--json")), &s)
	require.InDelta(t, 119, s["checkpoint"]["memory_step"], 0)
}

func TestVerdict(t *testing.T) {
	d := newServed(t)
	d.join("job", "gpu-01", 1)
	d.fails(1, `run "job" has no verdict: none of its epochs has ended`, "verdict", "job")
	d.fail("job", "gpu-01", d.start("job", "gpu-01"))
	require.Regexp(t, `^round 1, epoch 0: rank 1 .*failed first: .*boom`, d.ok("verdict", "job"))
	var v map[string]any
	require.NoError(t, json.Unmarshal([]byte(d.ok("verdict", "job", "--json")), &v))
	require.InDelta(t, 1, v["root_rank"], 0)
	require.Equal(t, "gpu-01", v["root_node"])
}

func TestEvents(t *testing.T) {
	d := newServed(t)
	d.join("job", "gpu-01", 1)
	require.Regexp(t, `(?m)^\d{4}-\S+ \S+ +1\.0 +seal +gpu-01: 1 nodes, 2 workers$`, d.ok("events", "job"))
	lines := strings.Split(strings.TrimSpace(d.ok("events", "job", "--json")), "\n")
	var e map[string]any
	require.NoError(t, json.Unmarshal([]byte(lines[0]), &e))
	require.Equal(t, "join", e["event"])
	require.Contains(t, e, "seq")
	require.Contains(t, e, "at")
}

func TestFollowedEventsEndWithTheRun(t *testing.T) {
	d := newServed(t)
	d.join("job", "gpu-01", 1)
	got := make(chan result, 1)
	go func() { got <- d.ctl("events", "-f", "job") }()
	d.fail("job", "gpu-01", d.start("job", "gpu-01"))
	r := <-got
	require.Zero(t, r.code, r.err)
	require.Regexp(t, `(?s)join.*seal.*run.*failed`, r.out)
}

// A daemon that shuts down says so, and the next one knows the run only when its launchers are back.
func TestFollowedEventsOutliveTheDaemon(t *testing.T) {
	for name, grace := range map[string]time.Duration{"killed": 0, "shut down": time.Minute} {
		t.Run(name, func(t *testing.T) {
			d := newServed(t)
			d.join("job", "gpu-01", 2)
			got, out := make(chan result, 1), &output{written: make(chan struct{})}
			go func() { got <- d.ctlTo(t.Context(), out, "events", "-f", "job") }()
			<-out.written
			d.close(grace)
			next := serveAt(t, d.addr)
			time.Sleep(2 * askAgain) // it is asked for a run that it does not know
			next.join("job", "gpu-01", 1)
			next.fail("job", "gpu-01", next.start("job", "gpu-01"))
			r := <-got
			require.Zero(t, r.code, r.err)
			require.Regexp(t, `(?s)join.*join.*seal.*run.*failed`, r.out)
			require.Equal(t, 1, strings.Count(r.err, "is away, or has lost the run; waiting for it"))
		})
	}
}

func TestFollowedEventsEndWhenInterrupted(t *testing.T) {
	d := newServed(t)
	d.join("job", "gpu-01", 2)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan result, 1)
	go func() { got <- d.ctlIn(ctx, "events", "job", "--follow") }()
	cancel()
	require.Zero(t, (<-got).code)
}
