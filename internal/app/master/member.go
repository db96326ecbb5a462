package master

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/app/etcd"
	"dlrover-run/internal/app/member"
	"dlrover-run/internal/app/page"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/console"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/topology"
)

// A run has at most this many nodes that campaign at a time.
const seats = 5

// The token of a run is kept in etcd for tokenLife after the last renewal, by the member that serves.
const (
	tokenKey   = "token"
	tokenLife  = 24 * time.Hour
	tokenRenew = time.Hour
)

// handover is how long a member whose launcher leaves a run that goes on still serves it: the others learn of that.
const handover = time.Second

// beside is dlrover-master beside a launcher, in the election of one run.
type beside struct {
	cfg     member.Config
	secret  token.Job
	etcd    etcd.Config
	store   *etcd.Store
	log     *slog.Logger
	runsLog *slog.Logger // as log, for lines that name their run themselves
	news    chan member.News
	tls     *secure.Layer           // nil: none
	addr    string                  // to serve at, and of other nodes for this one
	hub     atomic.Pointer[api.Hub] // nil: this one does not serve
}

// newsQueue is how many notes wait for the launcher. Those that find no room are dropped.
const newsQueue = 1024

// joinElection is the whole life of such a member. It ends with its standard input, and by no signal: a scheduler may
// send one to all processes of a job, and the launcher decides what that means.
func joinElection(stdin io.Reader, stdout io.Writer) int {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	console.OutliveReaders()
	orders := json.NewDecoder(stdin)
	b := &beside{news: make(chan member.News, newsQueue)}
	if err := orders.Decode(&b.cfg); err != nil {
		console.Complain(console.Stderr, "dlrover-master", fmt.Errorf("%s is for launchers: %w", member.Argument, err))
		return 2
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	go func() { // ends with the process
		defer stop()
		var o member.Order
		if orders.Decode(&o) == nil {
			b.linger(o.Linger)
		}
	}()
	wg.Go(func() {
		defer stop()
		b.tell(ctx, stdout)
	})
	err := b.run(ctx)
	stop()
	wg.Wait()
	if err != nil {
		_ = json.NewEncoder(stdout).Encode(member.News{Error: err.Error()})
		return 1
	}
	return 0
}

// tell writes the news until ctx ends, and repeats who leads.
func (b *beside) tell(ctx context.Context, to io.Writer) {
	out := json.NewEncoder(to)
	beat := time.NewTicker(member.Beat)
	defer beat.Stop()
	var leader member.News
	for {
		n := leader
		select {
		case n = <-b.news:
			if n.Leader != "" {
				leader = n
			}
		case <-beat.C:
		case <-ctx.Done():
			return
		}
		if n != (member.News{}) && out.Encode(n) != nil {
			return
		}
	}
}

// run takes part in the election until ctx ends.
func (b *beside) run(ctx context.Context) error {
	format, err := console.ParseFormat(b.cfg.LogFormat)
	if err != nil {
		return err
	}
	b.runsLog = console.Logger(console.Stderr, "dlrover-master", format, console.Level())
	b.log = b.runsLog.With("run_id", b.cfg.Run)
	console.Libraries(b.log)
	if _, err := topology.Open(b.cfg.TopologyFile); err != nil {
		return err
	}
	port, release, err := reservePort(b.cfg.Host)
	if err != nil {
		return fmt.Errorf("a port to serve the rendezvous at: %w", err)
	}
	defer release()
	b.addr = net.JoinHostPort(b.cfg.Host, port)
	if err := b.open(ctx); err != nil {
		return err
	}
	b.secret = b.found()
	b.news <- member.News{Token: b.cfg.Token}
	if b.tls, err = b.cfg.TLS.Layer(b.secret.Accepted, secure.Asks|secure.Serves, b.log); err != nil {
		return err
	}
	e := &election{store: b.store, addr: b.addr, token: b.secret, tls: b.tls, log: b.log, began: time.Now(),
		seated: b.store.Seated()}
	var wg sync.WaitGroup
	wg.Go(func() { b.follow(ctx) })
	err = e.run(ctx, b.serve)
	wg.Wait()
	return err
}

// found is the job token. A file that cannot be read any more leaves the one that the launcher has.
func (b *beside) found() token.Job {
	if b.cfg.TokenFile != "" {
		if j, err := token.Find(b.cfg.TokenFile, os.LookupEnv); err == nil {
			j.LogTo(b.log)
			return j
		}
	}
	return token.Job{Token: b.cfg.Token}
}

// open finds etcd, and the token of the run in it.
func (b *beside) open(ctx context.Context) error {
	cfg := etcd.Config{Endpoints: b.cfg.Endpoints, Seats: seats,
		Prefix: strings.TrimSuffix(b.cfg.Prefix, "/") + "/" + url.PathEscape(b.cfg.Run)}
	if b.cfg.HTTPS {
		cfg.Endpoints = nil
		for _, e := range b.cfg.Endpoints {
			cfg.Endpoints = append(cfg.Endpoints, "https://"+e)
		}
	}
	key := func(name, value string) setting { return setting{"--rdzv-conf " + name, value} }
	a := access{encrypted: b.cfg.HTTPS, ca: key("ca_cert", b.cfg.CA), cert: key("ssl_cert", b.cfg.Cert),
		key: key("ssl_cert_key", b.cfg.Key), user: key("user", b.cfg.User), password: key("password_file",
			b.cfg.PasswordFile)}
	if err := a.apply(&cfg); err != nil {
		return err
	}
	b.etcd = cfg
	ctx, cancel := context.WithTimeout(ctx, b.cfg.Patience)
	defer cancel()
	pause := retry.Backoff{First: firstCampaign, Most: longestCampaign, Spread: true}
	for {
		err := b.reach(ctx, cfg)
		if err == nil {
			return nil
		}
		if etcd.Refused(err) {
			return fmt.Errorf("etcd at %s: %w", strings.Join(b.cfg.Endpoints, ","), err)
		}
		if !pause.Wait(ctx) {
			if why := unreachable(cfg); why != nil {
				err = why
			}
			return fmt.Errorf("etcd at %s has not answered for %s: %w", strings.Join(b.cfg.Endpoints, ","), b.cfg.Patience,
				err)
		}
	}
}

// unreachable is why no connection can be made, which etcd's client does not say; nil: one can.
func unreachable(cfg etcd.Config) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	dial := (&net.Dialer{}).DialContext
	if cfg.TLS != nil {
		dial = (&tls.Dialer{Config: cfg.TLS}).DialContext
	}
	for _, endpoint := range cfg.Endpoints {
		c, failed := dial(ctx, "tcp", strings.TrimPrefix(endpoint, "https://"))
		if failed == nil {
			return c.Close()
		}
		if err != nil {
			failed = fmt.Errorf("%w; %w", err, failed)
		}
		err = failed
	}
	return err
}

// reach asks etcd once.
func (b *beside) reach(ctx context.Context, cfg etcd.Config) (err error) {
	if b.store == nil {
		if b.store, err = etcd.Open(cfg); err != nil { // with a user it logs in
			return err
		}
	}
	if b.cfg.Token != "" && !b.cfg.Agreed {
		return b.store.Reach(ctx)
	}
	b.cfg.Agreed = true
	proposal := b.cfg.Token
	if proposal == "" {
		proposal = rand.Text()
	}
	agreed, err := b.store.Agree(ctx, tokenKey, proposal, tokenLife)
	if err == nil {
		b.cfg.Token, err = token.Check(agreed, "the key "+tokenKey+" of run "+b.cfg.Run+" in etcd")
	}
	return err
}

// follow tells the launcher about leaders until ctx ends.
func (b *beside) follow(ctx context.Context) {
	for l := range b.store.Watch(ctx) {
		if l.Addr == "" {
			continue
		}
		select {
		case b.news <- member.News{Leader: l.Addr, Term: uint64(l.Term), Beats: true}:
		case <-ctx.Done():
		}
	}
}

// serve serves the run for as long as this member leads.
func (b *beside) serve(ctx context.Context, t *tenure) error {
	if _, err := t.decisions.Load(ctx, t.term); err != nil { // its lease may have ended before it was elected
		return err
	}
	s, err := service.New(service.Config{
		Token: b.secret.Token, Accepted: b.secret.Accepted, TLS: b.tls, Name: b.cfg.Host,
		TopologyFile: b.cfg.TopologyFile, Observe: b.observe, Log: b.runsLog,
		Global: map[string]http.Handler{"standby": t.standby()},
		Page: func(s *service.Service) http.Handler {
			return page.New(pageConfig(page.Own(s, nil), b.secret, b.tls != nil, b.log))
		},
	})
	if err != nil {
		return err
	}
	defer s.Close(0) // a deposed member answers nothing
	l, err := api.Listen(ctx, bindAt(b.addr))
	if err != nil {
		return err
	}
	l = guarded(l, t.holds(), b.log)
	b.hub.Store(s.Hub)
	defer b.hub.Store(nil)
	go b.warnOfTorchAgents(ctx)
	failed := make(chan error, 1)
	go func() { failed <- s.Serve(l) }()
	renew := time.NewTicker(tokenRenew)
	defer renew.Stop()
	for {
		select {
		case err := <-failed:
			return err
		case <-ctx.Done():
			return nil
		case <-renew.C:
			b.renewToken(ctx)
		}
	}
}

func (b *beside) renewToken(ctx context.Context) {
	if !b.cfg.Agreed {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if _, err := b.store.Agree(ctx, tokenKey, b.cfg.Token, tokenLife); err != nil {
		b.log.Warn("the job token in etcd was not renewed", "err", err)
	}
}

func (b *beside) observe(_ string, n rendezvous.Note) {
	select {
	case b.news <- member.News{Note: &n}:
	default:
	}
}

// linger serves until the other nodes know that the run has ended, or that this one leaves.
func (b *beside) linger(most time.Duration) {
	began := time.Now()
	for {
		hub := b.hub.Load()
		if hub == nil || hub.Idle() || time.Since(began) > most || !ended(hub) && time.Since(began) > handover {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func ended(h *api.Hub) bool {
	for _, r := range h.Runs(false) {
		if r.Outcome == "" {
			return false
		}
	}
	return true
}

// bindAt is the address to listen at, on loopback or everywhere.
func bindAt(addr string) string {
	host, port, _ := net.SplitHostPort(addr) // it was joined before
	if token.Loopback(host) {
		if host != "::1" {
			host = "127.0.0.1"
		}
		return net.JoinHostPort(host, port)
	}
	return net.JoinHostPort("", port)
}

// reservePort takes a free port that nobody else can have, and at which the host refuses connections until this process
// listens there as well.
func reservePort(host string) (port string, release func(), err error) {
	var at unix.Sockaddr = &unix.SockaddrInet6{}
	family := unix.AF_INET6
	switch bound, _, _ := net.SplitHostPort(bindAt(net.JoinHostPort(host, "0"))); {
	case bound == "::1":
		at = &unix.SockaddrInet6{Addr: [16]byte{15: 1}}
	case bound != "":
		at, family = &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}, unix.AF_INET
	}
	if port, release, err = reserve(family, at); err != nil && family == unix.AF_INET6 { // the kernel has no IPv6
		return reserve(unix.AF_INET, &unix.SockaddrInet4{})
	}
	return port, release, err
}

func reserve(family int, at unix.Sockaddr) (port string, release func(), err error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, os.NewSyscallError("socket", err)
	}
	release = func() { _ = unix.Close(fd) }
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err == nil && family == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	}
	if err == nil {
		err = unix.Bind(fd, at)
	}
	if err == nil {
		at, err = unix.Getsockname(fd)
	}
	if err != nil {
		release()
		return "", nil, os.NewSyscallError("bind", err)
	}
	switch at := at.(type) {
	case *unix.SockaddrInet4:
		return strconv.Itoa(at.Port), release, nil
	case *unix.SockaddrInet6:
		return strconv.Itoa(at.Port), release, nil
	}
	release()
	return "", nil, errors.New("bind: no port")
}
