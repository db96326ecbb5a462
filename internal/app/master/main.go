// Package master is dlrover-master, the rendezvous daemon of training jobs as a process of its own:
// it outlives every launcher, and running workers outlive it.
package master

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/member"
	"dlrover-run/internal/app/page"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/app/traces"
	"dlrover-run/internal/conns"
	"dlrover-run/internal/console"
	"dlrover-run/internal/duration"
	"dlrover-run/internal/eventlog"
	"dlrover-run/internal/help"
	"dlrover-run/internal/job"
	"dlrover-run/internal/secure"
	"dlrover-run/internal/version"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/keeper"
	"dlrover-run/rendezvous/lead/journal"
)

const description = `Launchers find it through DLROVER_MASTER_ADDR=host:port or --rdzv-endpoint.
Without a job token (--token-file, DLROVER_TOKEN_FILE, DLROVER_TOKEN) it serves
only its own user, on loopback. Workers keep running when it ends; a new daemon
takes over.`

// Main is the program; it does not return.
func Main() {
	code := run(os.Args, os.Stdout)
	console.Stderr.Flush()
	os.Exit(code)
}

func run(args []string, stdout io.Writer) int {
	if len(args) == 2 && args[1] == member.Argument {
		return joinElection(os.Stdin, stdout)
	}
	a := app(stdout)
	if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		help.Print(stdout, a, "[options]")
		return 0
	}
	err := a.Run(args)
	if err == nil {
		return 0
	}
	console.Complain(console.Stderr, "dlrover-master", err)
	if _, ok := errors.AsType[*serveError](err); ok {
		return 1
	}
	return 2
}

func app(stdout io.Writer) *cli.App {
	return &cli.App{
		Name: "dlrover-master", Usage: "rendezvous daemon of distributed training jobs", HideVersion: true,
		Description: description, HideHelp: true, HideHelpCommand: true, Writer: io.Discard, ErrWriter: io.Discard,
		Action:         func(c *cli.Context) error { return serve(c, stdout) },
		OnUsageError:   func(_ *cli.Context, err error, _ bool) error { return help.Misuse("dlrover-master", err) },
		ExitErrHandler: func(*cli.Context, error) {},
		Flags: slices.Concat([]cli.Flag{
			&cli.StringFlag{Name: "listen", Category: "Options", Value: "127.0.0.1:50001",
				Usage: "`HOST:PORT`: address to serve at; port 0 takes a free port, an empty host all interfaces (default: " +
					"127.0.0.1:50001)"},
			&cli.StringFlag{Name: "token-file", Category: "Options",
				Usage: "`PATH`: file with the job token (default: $DLROVER_TOKEN_FILE, else the token in $DLROVER_TOKEN)"},
			&cli.BoolFlag{Name: "insecure", Category: "Options",
				Usage: "serve every user, even at a network address, without a job token"},
			&cli.BoolFlag{Name: "open-metrics", Category: "Options",
				Usage: "serve /metrics to everyone, without the job token"},
			&cli.StringFlag{Name: "topology-file", Category: "Options",
				Usage: "`PATH`: file with lines of three words, asw psw ip: nodes under the same switch get adjacent ranks; it " +
					"is read again after a change"},
			&cli.GenericFlag{Name: "python-agents", Category: "Options", Value: new(agentsMode),
				Usage: "let agents of DLRover, in Python, join the run of --python-run. They know no job token: each must name " +
					"the job of --job-uid, unless this is --python-agents=open"},
			&cli.StringFlag{Name: "python-run", Category: "Options",
				Usage: "`RUN`: id of the run of DLRover's agents, which is the --rdzv-id of its launchers (default: " +
					"$ELASTIC_JOB_NAME, else none)"},
			&cli.StringFlag{Name: "job-uid", Category: "Options",
				Usage: "`UID`: the JOB_UID of DLRover's agents; requests with another one, or none, are refused (default: " +
					"$JOB_UID)"},
			&cli.StringFlag{Name: "data-dir", Category: "Options",
				Usage: "`DIR`: directory for a journal of decisions, such as findings about nodes across jobs (dlroverctl " +
					"nodes); made if needed, one for each daemon (default: nothing is kept)"},
			&cli.GenericFlag{Name: "keep-runs", Category: "Options", Value: new(duration.Value(24 * time.Hour)),
				Usage: "`DURATION`: how long a run is kept after its end, for dlroverctl; 10m to 720h (default: 24h)"},
			&cli.StringFlag{Name: "page-of", Category: "Options",
				Usage: "`HOST:PORT`: serve only the page (/ui/) of the runs at this server, such as a launcher that serves its " +
					"job; with --listen and the job token (default: serve runs, and their page)"},
		}, help.TLS("Options", true), nodeFlags(), electionFlags(), []cli.Flag{
			&cli.StringFlag{Name: "event-log", Category: "Options",
				Usage: "`PATH`: append every state change to this file, one JSON object per line"},
			&cli.StringFlag{Name: "otlp-endpoint", Category: "Options",
				Usage: "`URL`: send runs as traces to this collector of OpenTelemetry, by OTLP over HTTP, such as " +
					"http://collector:4318 (default: nothing is sent)"},
			&cli.StringFlag{Name: "log-format", Category: "Options",
				EnvVars: []string{console.FormatVariable}, Usage: console.FormatUsage},
			&cli.BoolFlag{Name: "help", Aliases: []string{"h"}, Category: "Options", Usage: "show this text, and exit"},
			&cli.BoolFlag{Name: "version", Category: "Options", Usage: "print the version, and exit"},
		}),
	}
}

// serveError is a failure after the options have been accepted.
type serveError struct{ error }

func (e *serveError) Unwrap() error { return e.error }

func serve(c *cli.Context, stdout io.Writer) error {
	if c.Bool("version") {
		fmt.Fprintln(stdout, "dlrover-master", version.Version)
		return nil
	}
	if c.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: dlrover-master takes options only", c.Args().First())
	}
	if c.IsSet("page-of") {
		return servePage(c)
	}
	for _, b := range backends() {
		if c.IsSet(b.option) && c.IsSet("data-dir") {
			return fmt.Errorf("--data-dir has no effect with --%s, which keeps the findings about nodes: leave it out", b.option)
		}
	}
	e, err := newElection(c)
	if err != nil {
		return err
	}
	d, err := newDaemon(c, nil)
	if err != nil {
		e.close()
		return err
	}
	ctx, stop := signal.NotifyContext(c.Context, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if e == nil {
		return serveUntil(ctx, d, c.String("listen"), closeGrace)
	}
	if err := serveElected(ctx, c, e, d); err != nil {
		return &serveError{err}
	}
	return nil
}

// serveElected takes part in an election until ctx ends. checked was opened to check the options: a master that waits
// keeps nothing.
func serveElected(ctx context.Context, c *cli.Context, e *election, checked *daemon) error {
	checked.close(0)
	checked.log.Info("waiting to be elected", "advertise", e.addr)
	return e.run(ctx, func(leading context.Context, t *tenure) error {
		t.nodes = &checked.nodes
		d, err := newDaemon(c, t)
		if err != nil {
			return err
		}
		return serveUntil(leading, d, c.String("listen"), 0) // a deposed master answers nothing
	})
}

// serveUntil is the whole life of a daemon. grace is the time of answers that are under way at its end.
func serveUntil(ctx context.Context, d *daemon, listen string, grace time.Duration) error {
	defer d.close(grace)
	if err := d.serve(ctx, listen); err != nil {
		return &serveError{err}
	}
	return nil
}

// closeGrace is the grace of the only master.
const closeGrace = 2 * time.Second

type daemon struct {
	log     *slog.Logger
	events  *eventlog.Log
	traces  *traces.Exporter // nil without --otlp-endpoint
	metrics *metrics
	service *service.Service
	hub     atomic.Pointer[api.Hub]
	data    *journal.Journal // nil without --data-dir
	keeper  *keeper.Keeper   // nil: nothing is kept of runs
	marks   *marks.Manager   // nil: no record of nodes is kept
	nodes   action           // of marks
	holds   func() bool      // that this is the master that serves; nil: there is one
}

// Bounds of --keep-runs.
const (
	leastKeep = 10 * time.Minute
	mostKeep  = 30 * 24 * time.Hour
)

// newDaemon makes the daemon of a leader; t is nil for the only master.
func newDaemon(c *cli.Context, t *tenure) (*daemon, error) {
	secret, err := token.Find(c.String("token-file"), os.LookupEnv)
	if err != nil {
		return nil, err
	}
	if err := checkExposure(c.String("listen"), secret.Token != "", c.Bool("insecure")); err != nil {
		return nil, err
	}
	keep, err := keepRuns(c)
	if err != nil {
		return nil, err
	}
	d := &daemon{metrics: newMetrics()}
	if d.log, err = logger(c); err != nil {
		return nil, err
	}
	console.Libraries(d.log)
	if err := d.trace(c.String("otlp-endpoint")); err != nil {
		return nil, err
	}
	secret.LogTo(d.log)
	layer, err := layerOf(c, secret, secure.Serves, d.log)
	if err != nil {
		return nil, err
	}
	agents, err := d.pythonAgents(c, layer)
	if err != nil {
		return nil, err
	}
	if t, err = d.keepMarks(c, t); err != nil {
		return nil, err
	}
	cfg := service.Config{
		Token: secret.Token, Accepted: secret.Accepted, Insecure: c.Bool("insecure"), TLS: layer,
		TopologyFile: c.String("topology-file"), Observe: d.observe,
		Global: map[string]http.Handler{}, Extra: d.extra(t), Log: d.log, Agents: agents, Keep: keep,
	}
	if secret.Token != "" && !c.Bool("open-metrics") {
		cfg.Metrics = d.metrics.handler()
	}
	cfg.Page = d.page(secret, layer != nil)
	if err := d.open(cfg, t); err != nil {
		d.closeMarks()
		d.leaveData()
		return nil, err
	}
	if d.marks != nil {
		d.marks.Follow(d.service)
	}
	d.metrics.watchAll(d.service, d.marks)
	if d.events, err = eventlog.Open(c.String("event-log")); err != nil {
		d.close(0)
		return nil, err
	}
	if secret.Token == "" {
		d.logExposure(c.String("listen"), c.Bool("insecure"))
	}
	return d, nil
}

// open makes the service, with the runs that earlier leaders have kept.
func (d *daemon) open(cfg service.Config, t *tenure) (err error) {
	if d.marks != nil {
		cfg.Suspect, cfg.Avoid = d.marks.Suspect, d.marks.Avoid
		cfg.Cleared, cfg.Global["nodes"] = d.marks.Cleared, d.marks.Handler()
	}
	if t != nil && t.election != nil {
		cfg.Global["standby"] = t.standby()
		d.metrics.watchElection(t)
		d.holds = t.holds()
	}
	if t != nil {
		if d.keeper, err = t.keeper(d.log); err != nil {
			return err
		}
		cfg.Keeper, cfg.HangsKept = d.keeper, d.keeper.Hangs
	}
	if d.service, err = service.New(cfg); err != nil {
		return err
	}
	if d.keeper != nil {
		d.keeper.Follow(d.service.Hub, d.service.KeepHangs)
		d.metrics.watchKeeper(d.keeper)
	}
	d.hub.Store(d.service.Hub)
	return nil
}

// trace sends runs to a collector; "": to none.
func (d *daemon) trace(endpoint string) (err error) {
	if endpoint == "" {
		return nil
	}
	if d.traces, err = traces.New(endpoint, d.log); err == nil {
		d.metrics.watchTraces(d.traces)
	}
	return err
}

func logger(c *cli.Context) (*slog.Logger, error) {
	format, err := console.ParseFormat(c.String("log-format"))
	if err != nil {
		return nil, err
	}
	return console.Logger(console.Stderr, "dlrover-master", format, console.Level()), nil
}

// layerOf is the TLS of the options; nil: none.
func layerOf(c *cli.Context, secret token.Job, side secure.Side, log *slog.Logger) (*secure.Layer, error) {
	chosen, err := secure.Chosen(c.String, os.LookupEnv)
	if err != nil {
		return nil, err
	}
	return chosen.Layer(secret.Accepted, side, log)
}

func keepRuns(c *cli.Context) (time.Duration, error) {
	keep := time.Duration(*c.Generic("keep-runs").(*duration.Value))
	if keep < leastKeep || keep > mostKeep {
		return 0, fmt.Errorf("--keep-runs=%s: need %s to %s", duration.Text(keep), duration.Text(leastKeep),
			duration.Text(mostKeep))
	}
	return keep, nil
}

// logExposure logs, without a token, which processes are served.
func (d *daemon) logExposure(listen string, insecure bool) {
	if insecure {
		d.log.Warn("no job token: any process that can reach the address may join and end jobs", "listen", listen)
		return
	}
	d.log.Info("no job token: only processes of this user are served", "listen", listen)
}

// checkExposure: without a token the daemon binds loopback only.
func checkExposure(listen string, hasToken, insecure bool) error {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return fmt.Errorf("--listen=%s: need host:port: %w", listen, err)
	}
	if hasToken || insecure || token.Loopback(host) {
		return nil
	}
	return fmt.Errorf("--listen=%s is a network address and needs a job token: set DLROVER_TOKEN (openssl rand -hex 16), "+
		"DLROVER_TOKEN_FILE or --token-file here and on every node; without one only loopback is served, "+
		"and --insecure serves anyway", listen)
}

// annotate adds a mark to the timeline of a run. Marks may expire before the service exists, when there are no runs
// yet.
func (d *daemon) annotate(run string, event job.Event, node, text string) {
	if hub := d.hub.Load(); hub != nil {
		_ = hub.Annotate(run, event, node, text) // the run may be over
	}
}

// extra serves paths that need no token; that of metrics, unless Metrics of the service does.
func (d *daemon) extra(t *tenure) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", d.metrics.handler())
	mux.HandleFunc("GET /readyz", marks.Ready(func() error { return d.ready(t) }))
	return mux
}

// page makes the page for browsers.
func (d *daemon) page(secret token.Job, tls bool) func(*service.Service) http.Handler {
	return func(s *service.Service) http.Handler {
		var machines func() marks.Known
		if d.marks != nil {
			machines = d.marks.List
		}
		return page.New(pageConfig(page.Own(s, machines), secret, tls, d.log))
	}
}

func (d *daemon) observe(run string, n rendezvous.Note) {
	d.metrics.note(n)
	d.traces.Hear(run, n)
	if d.marks != nil {
		d.marks.Hear(run, n)
	}
	d.events.Event(string(n.Event), slog.String("run_id", run), slog.Int("round", n.Round), slog.Int("epoch", n.Epoch),
		slog.String("node", n.Node), slog.String("text", n.Text), slog.Int("nodes", n.Nodes), slog.Int("world_size", n.World))
	level := slog.LevelInfo
	if n.Event == job.EventJoin || n.Event == job.EventNodeSucceeded {
		level = slog.LevelDebug // one for every node, which in a large run is a flood
	}
	d.log.Log(context.Background(), level, string(n.Event), "run_id", run, "round", n.Round, "epoch", n.Epoch,
		"node", n.Node, "text", n.Text, "nodes", n.Nodes, "world_size", n.World)
}

// closeMarks ends the Manager of marks, before the service that it reports to.
func (d *daemon) closeMarks() {
	if d.marks == nil {
		return
	}
	if err := d.marks.Close(); err != nil {
		d.log.Error("what is known of nodes cannot be written", "err", err)
	}
	d.nodes.cluster.close()
}

func (d *daemon) close(grace time.Duration) {
	d.closeMarks()
	d.service.Close(grace)
	if d.keeper != nil {
		d.keeper.Close()
	}
	d.traces.Close()
	_ = d.events.Close() // nothing is left to be written
	d.leaveData()
}

// reservedFiles are the descriptors that connections leave to everything else.
const reservedFiles = 64

// guarded bounds the connections of l, which answer nothing when holds is false; nil: it never is. The bound is that of
// the nodes that can be connected; each takes one, for moments two. Its connections are the outer ones: they have to
// hear which peers have shown the token.
func guarded(l net.Listener, holds func() bool, log *slog.Logger) net.Listener {
	if holds != nil {
		l = heldListener{l, holds}
	}
	return conns.Listen(l, conns.Below(conns.OpenFiles(), reservedFiles), log)
}

// serve answers until ctx ends.
func (d *daemon) serve(ctx context.Context, listen string) error {
	l, err := api.Listen(ctx, listen)
	if err != nil {
		return err
	}
	l = guarded(l, d.holds, d.log)
	d.log.Info("serving", "addr", l.Addr().String(), "pid", os.Getpid(), "max_open_files", conns.OpenFiles())
	failed := make(chan error, 1)
	go func() { failed <- d.service.Serve(l) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	d.log.Info("stopping; workers that run keep running")
	return nil
}
