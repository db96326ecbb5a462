package master

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/etcd"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous/lead"
)

// electionFlags are the options of masters that elect one of them.
func electionFlags() []cli.Flag {
	const category = "Several masters"
	return []cli.Flag{
		&cli.StringFlag{Name: "etcd", Category: category,
			Usage: "`HOST:PORT,...`: etcd, 3.4 or newer, in which masters elect the one that serves. The others wait, and " +
				"do not listen (default: this is the only master)"},
		&cli.StringFlag{Name: "etcd-prefix", Category: category, Value: "/dlrover",
			Usage: "`KEY`: prefix of the keys; all masters of an election have the same (default: /dlrover)"},
		&cli.StringFlag{Name: "etcd-ca", Category: category,
			Usage: "`PATH`: certificates that prove etcd's identity; with this or --etcd-cert the connection is encrypted"},
		&cli.StringFlag{Name: "etcd-cert", Category: category,
			Usage: "`PATH`: certificate of this client, with its --etcd-key"},
		&cli.StringFlag{Name: "etcd-key", Category: category, Usage: "`PATH`: private key of --etcd-cert"},
		&cli.StringFlag{Name: "etcd-user", Category: category, Usage: "`NAME`: user, with --etcd-password-file"},
		&cli.StringFlag{Name: "etcd-password-file", Category: category, Usage: "`PATH`: file with the user's password"},
		&cli.StringFlag{Name: "advertise", Category: category,
			Usage: "`HOST:PORT`: address of this master for the other masters (default: --listen)"},
	}
}

// maxSecret bounds a file with a certificate, a key or a password, in bytes.
const maxSecret = 1 << 20

// election is what the options say about several masters; nil: there is one.
type election struct {
	store *etcd.Store
	addr  string // of this master
	log   *slog.Logger
}

func newElection(c *cli.Context, log *slog.Logger) (*election, error) {
	if !c.IsSet("etcd") {
		for _, f := range electionFlags() {
			if name := f.Names()[0]; c.IsSet(name) {
				return nil, fmt.Errorf("--%s has no effect without --etcd: give the addresses of etcd, or leave it out", name)
			}
		}
		return nil, nil
	}
	cfg := etcd.Config{Prefix: c.String("etcd-prefix"), User: c.String("etcd-user")}
	for _, endpoint := range strings.Split(c.String("etcd"), ",") {
		endpoint = strings.TrimSpace(endpoint)
		if _, port, err := net.SplitHostPort(endpoint); err != nil || port == "" {
			return nil, fmt.Errorf("--etcd=%s: %q is not HOST:PORT; write etcd-0:2379,etcd-1:2379", c.String("etcd"), endpoint)
		}
		cfg.Endpoints = append(cfg.Endpoints, endpoint)
	}
	if !strings.HasPrefix(cfg.Prefix, "/") {
		return nil, fmt.Errorf("--etcd-prefix=%s: need a key that begins with a slash, such as /dlrover", cfg.Prefix)
	}
	e := &election{addr: c.String("advertise"), log: log}
	var err error
	if e.addr == "" {
		if e.addr, err = advertised(c.String("listen")); err != nil {
			return nil, err
		}
	}
	if _, _, err := net.SplitHostPort(e.addr); err != nil {
		return nil, fmt.Errorf("--advertise=%s: need HOST:PORT: %w", e.addr, err)
	}
	if cfg.TLS, err = encryption(c); err != nil {
		return nil, err
	}
	if cfg.Password, err = password(c); err != nil {
		return nil, err
	}
	if e.store, err = etcd.Open(cfg); err != nil {
		return nil, err
	}
	return e, nil
}

// advertised is the address under which other hosts reach a listener.
func advertised(listen string) (string, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return "", fmt.Errorf("--listen=%s: need host:port: %w", listen, err)
	}
	if port == "0" {
		return "", fmt.Errorf("--listen=%s: several masters need a fixed port, or each its --advertise", listen)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("--advertise is needed: %w", err)
		}
	}
	return net.JoinHostPort(host, port), nil
}

func encryption(c *cli.Context) (*tls.Config, error) {
	ca, cert, key := c.String("etcd-ca"), c.String("etcd-cert"), c.String("etcd-key")
	if (cert == "") != (key == "") {
		return nil, errors.New("--etcd-cert and --etcd-key belong together: give both or none")
	}
	if ca == "" && cert == "" {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := openfile.ReadNamed(ca, maxSecret)
		if err != nil {
			return nil, fmt.Errorf("--etcd-ca=%s: %w", ca, err)
		}
		if cfg.RootCAs = x509.NewCertPool(); !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--etcd-ca=%s: it has no certificate in PEM", ca)
		}
	}
	if cert == "" {
		return cfg, nil
	}
	certPEM, err := openfile.ReadNamed(cert, maxSecret)
	if err != nil {
		return nil, fmt.Errorf("--etcd-cert=%s: %w", cert, err)
	}
	keyPEM, err := openfile.ReadNamed(key, maxSecret)
	if err != nil {
		return nil, fmt.Errorf("--etcd-key=%s: %w", key, err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("--etcd-cert=%s and --etcd-key=%s: %w", cert, key, err)
	}
	cfg.Certificates = []tls.Certificate{pair}
	return cfg, nil
}

func password(c *cli.Context) (string, error) {
	user, path := c.String("etcd-user"), c.String("etcd-password-file")
	if (user == "") != (path == "") {
		return "", errors.New("--etcd-user and --etcd-password-file belong together: give both or none")
	}
	if path == "" {
		return "", nil
	}
	data, err := openfile.ReadNamed(path, maxSecret)
	if err != nil {
		return "", fmt.Errorf("--etcd-password-file=%s: %w", path, err)
	}
	return strings.TrimRight(string(data), "\r\n"), nil
}

// Times of an election.
const (
	firstCampaign   = 100 * time.Millisecond // pause while etcd is away, at first
	longestCampaign = 2 * time.Second
	resignTimeout   = time.Second
	dialTimeout     = 2 * time.Second       // to the leader
	firstDial       = 20 * time.Millisecond // pause before the leader is dialed again, at first
	redial          = time.Second
	rude            = 10 * time.Second // between two leaders that one master deposes
)

// tenure is one leadership of this master.
type tenure struct {
	decisions lead.Decisions
	term      lead.Term
}

// run calls serve whenever this master leads, with a context that ends with its leadership, until ctx ends. A master
// that cannot serve lets another one lead, and tries again.
func (e *election) run(ctx context.Context, serve func(context.Context, *tenure) error) {
	watching, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { e.deposeTheDead(watching) })
	defer func() {
		stop()
		wg.Wait()
		_ = e.store.Close()
	}()
	pause := retry.Backoff{First: firstCampaign, Most: longestCampaign, Spread: true}
	for ctx.Err() == nil {
		term, lost, err := e.store.Campaign(ctx, e.addr)
		if err != nil {
			if ctx.Err() == nil {
				e.log.Warn("no master can be elected", "err", err)
			}
			pause.Wait(ctx)
			continue
		}
		e.log.Info("elected", "term", term, "advertise", e.addr)
		t := &tenure{e.store, term}
		if err := e.lead(ctx, lost, func(leading context.Context) error { return serve(leading, t) }); err != nil {
			if !errors.Is(err, lead.ErrDeposed) {
				e.log.Error("this master was elected and cannot serve", "err", err)
			}
			pause.Wait(ctx)
			continue
		}
		pause.Reset()
	}
}

// lead serves until the leadership or ctx ends.
func (e *election) lead(ctx context.Context, lost <-chan struct{}, serve func(context.Context) error) error {
	leading, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-lost:
			e.log.Warn("deposed: another master may lead, and this one serves no longer")
			stop()
		case <-leading.Done():
		}
	})
	err := serve(leading)
	stop()
	wg.Wait()
	resigning, cancel := context.WithTimeout(context.WithoutCancel(ctx), resignTimeout)
	defer cancel()
	_ = e.store.Resign(resigning) // else its lease ends it
	return err
}

// deposeTheDead ends the leadership of a master whose process is gone. etcd would notice that after two seconds.
func (e *election) deposeTheDead(ctx context.Context) {
	leaders := e.store.Watch(ctx)
	var deposed time.Time
	leader, ok := <-leaders
	for ok {
		following, stop := context.WithCancel(ctx)
		gone := make(chan bool, 1)
		go func() { gone <- e.follow(following, leader) }()
		select {
		case leader, ok = <-leaders:
			stop()
			<-gone
			continue
		case dead := <-gone:
			stop()
			if dead && time.Since(deposed) > rude {
				deposed = time.Now()
				e.log.Info("the master that leads is gone, or serves no longer", "addr", leader.Addr)
				if err := e.store.Depose(ctx, leader); err != nil {
					e.log.Warn("its lease has to expire", "err", err)
				}
			}
		}
		leader, ok = <-leaders
	}
}

// follow keeps a connection to another master that leads, until ctx ends or its process is gone: its host refuses
// connections after one was made. A leader that has just been elected may not listen yet.
func (e *election) follow(ctx context.Context, l lead.Leader) (gone bool) {
	if l.Addr == "" || l.Addr == e.addr {
		<-ctx.Done()
		return false
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	pause := retry.Backoff{First: firstDial, Most: redial}
	for connected, short := false, 0; ; {
		c, err := dialer.DialContext(ctx, "tcp", l.Addr)
		if err == nil {
			if connected, short = true, short+1; await(ctx, c) > redial {
				short = 0
				pause.Reset()
			}
			if short < 2 {
				continue
			}
		}
		if connected && errors.Is(err, syscall.ECONNREFUSED) {
			return true
		}
		if !pause.Wait(ctx) {
			return false
		}
	}
}

// await returns when the other end closes a connection, or ctx ends, and how long that took.
func await(ctx context.Context, c net.Conn) time.Duration {
	began := time.Now()
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	_, _ = io.Copy(io.Discard, c)
	return time.Since(began)
}
