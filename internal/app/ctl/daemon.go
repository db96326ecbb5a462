package ctl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/answers/remote"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/help"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/secure"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// connection are the options of a command that connects to a daemon, after its own.
func connection(own ...cli.Flag) []cli.Flag {
	own = append(own,
		&cli.StringFlag{Name: "master", Usage: "`HOST:PORT`: dlrover-master, or the node that serves the job's rendezvous " +
			"(default: $DLROVER_MASTER_ADDR)"},
		&cli.StringFlag{Name: "token-file",
			Usage: "`PATH`: file with the job token (default: $DLROVER_TOKEN_FILE, else the token in $DLROVER_TOKEN)"})
	return append(own, help.TLS("", false)...)
}

// call is a command with its connection to a daemon.
type call struct {
	*program
	context.Context
	args   *cli.Context
	daemon *daemon
}

// daemon is the one that a command is for, and one run of it.
type daemon struct {
	client *api.Client
	addr   string
	scheme string // of the page
	token  string
	run    string
}

// run is the first argument of most commands.
func (c *call) run() string { return c.daemon.run }

// node is the second argument.
func (c *call) node() string { return c.args.Args().Get(1) }

// did is program.did for the command of the call.
func (c *call) did(text string) error { return c.program.did(c.args, text) }

// call connects and calls f. Its errors are those of the daemon, or of the connection.
func (p *program) call(args *cli.Context, f func(*call) error) error {
	addr, err := p.master(args.String("master"))
	if err != nil {
		return err
	}
	secret, err := token.Find(args.String("token-file"), p.env)
	if err != nil {
		return err
	}
	chosen, err := secure.Chosen(args.String, p.env)
	if err != nil {
		return err
	}
	layer, err := chosen.Layer(secret.Accepted, secure.Asks, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	d := &daemon{client: api.NewClient(addr, secret.Token).Over(layer), addr: addr, scheme: "http", token: secret.Sent(),
		run: args.Args().First()}
	if layer != nil {
		d.scheme = "https"
	}
	d.client.TokenFrom(secret.Accepted)
	defer d.client.Close()
	c := &call{program: p, Context: args.Context, args: args, daemon: d}
	return c.explain(f(c))
}

// master is the address of the daemon that the options or the environment name.
func (p *program) master(option string) (string, error) {
	addr, from := option, "--master"
	if addr == "" {
		addr, _ = p.env("DLROVER_MASTER_ADDR")
		from = "DLROVER_MASTER_ADDR"
	}
	if addr == "" {
		return "", errors.New("no daemon is named: give --master=HOST:PORT or set DLROVER_MASTER_ADDR to the address of " +
			"dlrover-master, or of the node that serves the job (its --rdzv-endpoint)")
	}
	return plainhttp.Addresses(from, addr)
}

// usageError is an error of the command line that is found while a command runs.
type usageError struct{ error }

// explain adds a remedy to an error of the daemon.
func (c *call) explain(err error) error { return c.daemon.explain(c, c.args.String("node"), err) }

// explain adds a remedy to an error of a command, which may be about a node.
func (d *daemon) explain(ctx context.Context, node string, err error) error {
	var netErr *url.Error
	var tlsErr *secure.Error
	var usage *usageError
	var found *foundError
	switch {
	case err == nil, errors.As(err, &usage), errors.As(err, &found):
		return err
	case errors.Is(err, api.ErrUnknownRun):
		err = d.unknownRun(ctx)
	case errors.Is(err, rendezvous.ErrUnknownNode):
		err = d.unknownNode(ctx, node)
	case errors.Is(err, context.Canceled):
		err = errors.New("interrupted")
	case errors.As(err, &tlsErr):
		err = tlsErr
	case errors.As(err, &netErr):
		err = fmt.Errorf("no daemon answers at %s: %w; is dlrover-master, or the launcher that serves the job, "+
			"running there? A --standalone job can be reached where it has a job token", d.addr, netErr.Err)
	default:
		err = fmt.Errorf("the daemon at %s: %w", d.addr, err)
	}
	return &foundError{err}
}

// unknownRun is an error that lists the runs.
func (d *daemon) unknownRun(ctx context.Context) error {
	runs, err := d.client.Runs(ctx)
	if err != nil {
		return fmt.Errorf("the daemon at %s keeps no run %q", d.addr, d.run)
	}
	var names []string
	for _, r := range runs {
		names = append(names, r.Run)
	}
	return fmt.Errorf("the daemon at %s keeps no run %q; it keeps %s", d.addr, d.run, several(names))
}

// unknownNode is an error that lists the nodes.
func (d *daemon) unknownNode(ctx context.Context, name string) error {
	s, err := d.status(ctx)
	if err != nil {
		return fmt.Errorf("run %q has no node %q", d.run, name)
	}
	var names []string
	for _, n := range s.Nodes {
		names = append(names, n.Name)
	}
	return fmt.Errorf("run %q has no node %q; it has %s", d.run, name, several(names))
}

// maxNamed is how many names an error lists.
const maxNamed = 20

// several lists names, or the first of them in alphabetical order.
func several(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	slices.Sort(names)
	more := ""
	if n := len(names) - maxNamed; n > 0 {
		names, more = names[:maxNamed], fmt.Sprintf(" and %d more", n)
	}
	return text.EscapeLine(strings.Join(names, ", ")) + more
}

// status is that of the run, with its nodes.
func (d *daemon) status(ctx context.Context) (api.RunStatus, error) {
	return remote.Status(ctx, d.client, d.run)
}
