package master

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/page"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/console"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous/api"
)

func pageConfig(from page.Source, secret token.Job, tls bool, log *slog.Logger) page.Config {
	cfg := page.Config{Source: from, TLS: tls, Log: log}
	if secret.Token != "" {
		cfg.Tokens = secret.Accepted
	}
	return cfg
}

// ofThePage are the options that go together with --page-of.
func ofThePage() []string {
	return append([]string{"page-of", "listen", "token-file", "insecure", "log-format"},
		"tls", "tls-cert", "tls-key", "tls-ca")
}

// servePage is the whole life of a master that only shows the runs of another server.
func servePage(c *cli.Context) error {
	for _, name := range c.FlagNames() {
		if !slices.Contains(ofThePage(), name) {
			return fmt.Errorf("--%s has no effect with --page-of, which serves the page of another server and no run: "+
				"leave one of them out", name)
		}
	}
	of, err := plainhttp.Addresses("--page-of", c.String("page-of"))
	if err != nil {
		return err
	}
	secret, err := token.Find(c.String("token-file"), os.LookupEnv)
	if err != nil {
		return err
	}
	log, err := logger(c)
	if err != nil {
		return err
	}
	console.Libraries(log)
	console.OutliveReaders()
	secret.LogTo(log)
	layer, err := layerOf(c, secret, secure.Asks|secure.Serves, log)
	if err != nil {
		return err
	}
	l, err := pageListener(c, secret.Token != "")
	if err != nil {
		return err
	}
	client := api.NewClient(of, secret.Token).Over(layer)
	defer client.Close()
	client.TokenFrom(secret.Accepted)
	server := api.NewServer(api.PageHandler(api.ServerConfig{
		Token: secret.Token, Insecure: c.Bool("insecure"),
		Page: page.New(pageConfig(page.Elsewhere(client), secret, layer != nil, log)),
	}))
	ctx, stop := signal.NotifyContext(c.Context, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	log.Info("serving the page", "addr", l.Addr().String(), "of", of, "pid", os.Getpid())
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	err = server.Serve(api.Watchful(layer.Listener(guarded(l, nil, log))))
	if !errors.Is(err, http.ErrServerClosed) {
		return &serveError{err}
	}
	return nil
}

// pageListener binds the address. A launcher hands the socket over as standard input, so that the page has the same
// address after a new start.
func pageListener(c *cli.Context, hasToken bool) (l net.Listener, err error) {
	if listen := c.String("listen"); listen != "-" {
		if err := checkExposure(listen, hasToken, c.Bool("insecure")); err != nil {
			return nil, err
		}
		l, err = api.Listen(c.Context, listen)
	} else {
		l, err = net.FileListener(os.Stdin)
	}
	if err != nil {
		return nil, &serveError{err}
	}
	return l, nil
}
