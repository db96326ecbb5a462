package master

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/token"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous/keeper"
	"dlrover-run/rendezvous/lead"
)

// election is what the options say about several masters; nil: there is one.
type election struct {
	store store
	addr  string    // of this master
	id    string    // of this process
	token token.Job // that all of them have
	tls   *secure.Layer
	log   *slog.Logger
	// seated is closed when this master is a candidate, of many that only watch; nil: all are.
	seated <-chan struct{}

	began    time.Time
	promise  promise
	audience atomic.Pointer[audience] // of the newest leadership

	elected, lost, deposed atomic.Int64 // how often this process was, and how often it has deposed another one
}

const severalMasters = "Several masters" // category of options

// backend is a way to elect one of several masters.
type backend struct {
	option string // chooses it
	flags  []cli.Flag
	open   func(*cli.Context, *slog.Logger) (store, error)
}

func backends() []backend {
	return []backend{
		{"etcd", etcdFlags(), openEtcd},
		{"ha", leaseFlags(), openLease},
	}
}

// elects reports whether the options make this one of several masters.
func elects(c *cli.Context) bool {
	for _, b := range backends() {
		if c.IsSet(b.option) {
			return true
		}
	}
	return false
}

// electionFlags are the options of masters that elect one of them.
func electionFlags() (flags []cli.Flag) {
	for _, b := range backends() {
		flags = append(flags, b.flags...)
	}
	return append(flags,
		&cli.StringFlag{Name: "advertise", Category: severalMasters,
			Usage: "`HOST:PORT`: address of this master for the other masters (default: --listen)"})
}

// newElection returns nil if the options name no backend: this is the only master.
func newElection(c *cli.Context) (*election, error) {
	var chosen *backend
	for _, b := range backends() {
		switch {
		case !c.IsSet(b.option):
			if err := without(c, b.flags, "--"+b.option); err != nil {
				return nil, err
			}
		case chosen != nil:
			return nil, fmt.Errorf("--%s and --%s: choose one way to elect a master", chosen.option, b.option)
		default:
			chosen = &b
		}
	}
	if chosen == nil {
		return nil, without(c, electionFlags(), choices())
	}
	e := &election{addr: c.String("advertise"), id: rand.Text(), began: time.Now()}
	var err error
	if e.log, err = logger(c); err != nil {
		return nil, err
	}
	if e.token, err = token.Find(c.String("token-file"), os.LookupEnv); err != nil {
		return nil, err
	}
	e.token.LogTo(e.log)
	if e.tls, err = layerOf(c, e.token, secure.Asks|secure.Serves, e.log); err != nil {
		return nil, err
	}
	if e.addr == "" {
		if e.addr, err = advertised(c.String("listen")); err != nil {
			return nil, err
		}
	}
	if _, _, err := net.SplitHostPort(e.addr); err != nil {
		return nil, fmt.Errorf("--advertise=%s: need HOST:PORT: %w", e.addr, err)
	}
	e.store, err = chosen.open(c, e.log)
	return e, err
}

// close ends an election that has not run.
func (e *election) close() {
	if e != nil {
		_ = e.store.Close()
	}
}

// without returns an error if one of the flags is set, which have no effect without an option.
func without(c *cli.Context, flags []cli.Flag, option string) error {
	for _, f := range flags {
		if name := f.Names()[0]; c.IsSet(name) {
			return fmt.Errorf("--%s has no effect without %s: add that, or leave it out", name, option)
		}
	}
	return nil
}

func choices() string {
	var options []string
	for _, b := range backends() {
		options = append(options, "--"+b.option)
	}
	return strings.Join(options, " or ")
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

// store is where masters elect one of them.
type store interface {
	lead.Store
	Close() error
}

// Times of an election.
const (
	firstCampaign   = 100 * time.Millisecond // pause while the store is away, at first
	longestCampaign = 2 * time.Second
	resignTimeout   = time.Second
	rude            = 10 * time.Second // between two times that one master deposes the same other one
)

// tenure is one leadership of this master.
type tenure struct {
	election  *election // nil: this is the only master
	decisions lead.Decisions
	term      lead.Term
	audience  *audience // nil for the only master
	nodes     *action   // that this process has asked for at its start; nil: it has not
}

// loadTimeout is for all that earlier leaders have kept of runs.
const loadTimeout = 5 * time.Second

// keeper has what earlier leaders have kept of runs.
func (t *tenure) keeper(log *slog.Logger) (*keeper.Keeper, error) {
	ctx, cancel := context.WithTimeout(context.Background(), loadTimeout)
	defer cancel()
	return keeper.Load(ctx, t.decisions, t.term, log)
}

// run calls serve whenever this master leads, with a context that ends with its leadership, until ctx ends. A master
// that cannot serve lets another one lead, and tries again. One whose address another one has ends with an error.
func (e *election) run(ctx context.Context, serve func(context.Context, *tenure) error) (twin error) {
	if s, ok := e.store.(failsafe); ok {
		s.Failsafe(func(term lead.Term, candidates []string) bool {
			a := e.audience.Load()
			return a != nil && a.term == term && a.vouch(candidates)
		})
	}
	ctx, stop := context.WithCancel(ctx)
	watched := make(chan error, 1)
	go func() {
		err := e.deposeTheDead(ctx)
		if err != nil {
			stop()
		}
		watched <- err
	}()
	defer func() {
		stop()
		twin = <-watched
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
		e.elected.Add(1)
		t := &tenure{election: e, decisions: e.store, term: term, audience: newAudience(term)}
		e.audience.Store(t.audience)
		err = e.lead(ctx, lost, func(leading context.Context) error {
			if err := e.permit(leading); err != nil {
				return err
			}
			if s, ok := e.store.(failsafe); ok {
				s.Serves(term)
			}
			return serve(leading, t)
		})
		if err != nil {
			if !errors.Is(err, lead.ErrDeposed) {
				e.log.Error("this master was elected and cannot serve", "err", err)
			}
			pause.Wait(ctx)
			continue
		}
		pause.Reset()
	}
	return nil
}

// lead serves until the leadership or ctx ends.
func (e *election) lead(ctx context.Context, lost <-chan struct{}, serve func(context.Context) error) error {
	e.promise.refuse(true)
	defer e.promise.refuse(false)
	leading, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { e.tellSilence(leading) })
	wg.Go(func() {
		select {
		case <-lost:
			e.lost.Add(1)
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

// deposeTheDead ends the leadership of a master whose process is gone or frozen, seconds before it would expire; only
// candidates connect to it. It returns an error if another master has the address of this one.
func (e *election) deposeTheDead(ctx context.Context) error {
	if e.seated != nil {
		select {
		case <-e.seated:
		case <-ctx.Done():
			return nil
		}
	}
	leaders := e.store.Watch(ctx)
	deposed := map[string]time.Time{} // by address: the next leader may fail as well
	for leader, ok := <-leaders; ok; {
		following, stop := context.WithCancel(ctx)
		end, followed := make(chan error, 1), leader
		go func() { end <- e.follow(following, followed) }()
		select {
		case leader, ok = <-leaders:
			stop()
			<-end
			continue
		case why := <-end:
			stop()
			if errors.Is(why, errTwin) || errors.Is(why, errTwinWaits) {
				return why
			}
			if why != nil && time.Since(deposed[leader.Addr]) > rude {
				deposed[leader.Addr] = time.Now()
				e.depose(ctx, leader, why)
			}
		}
		select { // a frozen one may wake, and is followed again
		case leader, ok = <-leaders:
		case <-time.After(redial):
		}
	}
	return nil
}

func (e *election) depose(ctx context.Context, l lead.Leader, why error) {
	e.deposed.Add(1)
	e.log.Info("the master that leads serves no longer, and is deposed", "addr", l.Addr, "why", why)
	if err := e.store.Depose(ctx, l); err != nil {
		e.log.Warn("its lease has to expire", "err", err)
	}
}
