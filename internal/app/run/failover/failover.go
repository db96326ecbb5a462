// Package failover is a launcher's part in the election of the launcher that serves the rendezvous, after the one that
// did so has died. Package successor has the rules.
//
// Proof of a death is that the dead launcher's own address refuses connections: its kernel says so. Silence proves
// nothing, and then nobody serves.
//
// Goroutines: the door's until Close; an elected launcher has one more, which looks for a new launcher at the job's
// endpoint.
package failover

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/successor"
)

// Times of the election.
const (
	askTimeout  = time.Second            // for the answer to a vote
	dialTimeout = time.Second            // to find out whether a launcher is dead
	dialPause   = 25 * time.Millisecond  // between two refusals: the port of a process that starts may open meanwhile
	lookPause   = 500 * time.Millisecond // between two looks at the endpoint

	openPatience = time.Second // with the files of the service
)

// Config describes a launcher.
type Config struct {
	Run, ID string
	// Client asks the launcher that serves.
	Client *api.Client
	// Endpoint is where the job's nodes meet, HOST:PORT.
	Endpoint string
	Token    string
	// Listener is where this launcher serves if it is elected, and Serve makes the service; without a Listener it never
	// is.
	Listener net.Listener
	Serve    func(standby func() error, vote http.Handler) (*service.Service, error)
	Log      *slog.Logger
}

// Failover implements api.Succession.
type Failover struct {
	cfg     Config
	door    *door
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	serving atomic.Pointer[service.Service] // since this launcher was elected

	mu       sync.Mutex
	voter    successor.Voter
	voters   int                 // members of the world besides the server
	deputies []rendezvous.Deputy // of that world
	self     rendezvous.Deputy   // this launcher's entry in the newest Failover that names it
	tally    successor.Tally
	server   string // where the launcher that serves listens itself; "": not known
	dead     bool   // it is
	opening  bool   // svc is being made, or there is one
	svc      *service.Service
	said     string // the newest line about a loss that goes on

	own   string               // where the processes of this launcher reach it, while it serves from its start; else ""
	move  func(servers string) // nil: nobody follows
	moved string               // the servers that it was told last
}

// message is what launchers send to each other: a vote, or the news that the sender was elected.
type message struct {
	successor.Vote
	Addr string `json:"addr,omitempty"` // where it serves, in the term of the vote
}

// New makes a launcher's part. Its listener takes no connection before the launcher is a deputy.
func New(cfg Config) *Failover {
	h := &Failover{cfg: cfg, voter: successor.Voter{ID: cfg.ID}}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	if cfg.Listener != nil {
		h.door = newDoor(cfg.Listener)
	}
	return h
}

// Close ends it. Nil is closed.
func (h *Failover) Close() {
	if h == nil {
		return
	}
	h.cancel()
	h.mu.Lock()
	svc := h.svc
	h.mu.Unlock()
	if svc != nil {
		svc.Streams.Finish("the launcher that serves the run has ended")
		svc.Close(0)
	}
	if h.door != nil {
		h.door.close()
	}
	h.wg.Wait()
}

// Serving is the service of an elected launcher; nil: it is none.
func (h *Failover) Serving() *service.Service {
	if h == nil {
		return nil
	}
	return h.serving.Load()
}

// Servers are where the run is served and, after that, where it may be next, with commas between.
func (h *Failover) Servers() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.serversLocked()
}

// Follow has move called with all later Servers. It must be quick, and must not call h.
func (h *Failover) Follow(move func(servers string)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.move, h.moved = move, h.serversLocked()
}

func (h *Failover) tellLocked() {
	if now := h.serversLocked(); h.move != nil && now != h.moved {
		h.moved = now
		h.move(now)
	}
}

func (h *Failover) serversLocked() string {
	all := []string{cmp.Or(h.own, h.cfg.Client.Addr())}
	for _, deputy := range h.deputies {
		if !slices.Contains(all, deputy.Addr) {
			all = append(all, deputy.Addr)
		}
	}
	return strings.Join(all, ",")
}

// Told implements api.Succession.
func (h *Failover) Told(d rendezvous.Directive) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch d.Kind {
	case job.Run:
		h.voter.Runs(d.EpochID, d.Failover)
	case job.Done, job.Fail:
		h.voter.Parts()
	}
	if d.Failover == nil || d.Kind != job.Run {
		return
	}
	h.server, h.dead, h.said = d.Failover.Server, false, ""
	h.voters, h.deputies = d.Failover.Voters, d.Failover.Deputies
	h.tellLocked()
	for _, deputy := range d.Failover.Deputies {
		if deputy.ID == h.cfg.ID {
			h.self = deputy
			h.openLocked()
		}
	}
}

// openLocked makes a deputy ready to take votes. A directive waits meanwhile, so it does not wait for long: the service
// may read a file, in storage that does not answer.
func (h *Failover) openLocked() {
	if h.opening || h.door == nil || h.ctx.Err() != nil {
		return
	}
	h.opening = true
	made := make(chan func(), 1)
	go func() { // ends once the storage answers
		svc, err := h.cfg.Serve(h.standby, api.Ask(h.received))
		made <- func() { h.openedLocked(svc, err) }
	}()
	late := time.NewTimer(openPatience)
	defer late.Stop()
	select {
	case opened := <-made:
		opened()
	case <-late.C:
		h.cfg.Log.Warn("this launcher cannot serve the rendezvous yet if another one is lost: its files do not answer")
		go func() {
			opened := <-made
			h.mu.Lock()
			defer h.mu.Unlock()
			opened()
		}()
	}
}

func (h *Failover) openedLocked(svc *service.Service, err error) {
	switch {
	case err != nil:
		h.opening = false
		h.cfg.Log.Warn("this launcher cannot serve the rendezvous if another one is lost", "err", err)
	case h.ctx.Err() != nil:
		svc.Close(0)
	default:
		h.svc = svc
		h.wg.Go(func() { _ = svc.ServeRarely(h.door) }) // until Close
		h.door.open()
	}
}

func (h *Failover) standby() error {
	if h.serving.Load() == nil {
		return api.ErrStandby
	}
	return nil
}

// received takes the vote of another launcher.
func (h *Failover) received(run string, m message) (any, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if run != h.cfg.Run || m.Addr != "" {
		return successor.Answer{}, nil
	}
	a := h.tally.Count(m.Vote)
	h.electedLocked(a)
	return a, nil
}

// electedLocked makes the launcher serve once it has the votes: before any voter hears of it.
func (h *Failover) electedLocked(a successor.Answer) {
	if !a.Serves || h.serving.Load() != nil || h.ctx.Err() != nil {
		return
	}
	host, port, _ := net.SplitHostPort(h.self.Addr)
	number, _ := strconv.Atoi(port)
	api.ServedBy(h.svc.Hub, rendezvous.Server{ID: h.cfg.ID, Host: host, Port: number, Term: a.Term})
	h.serving.Store(h.svc)
	have, need := h.tally.Votes()
	h.cfg.Log.Warn("the launcher that served the rendezvous has died, and this one was elected to serve it",
		"dead", h.server, "addr", h.self.Addr, "term", a.Term, "votes", have, "needed", need, "members_left", h.voters)
	news := message{Vote: successor.Vote{Term: a.Term, ID: h.cfg.ID}, Addr: h.self.Addr}
	h.wg.Go(func() { h.announce(news) })
}

// announce tells whoever serves at the endpoint, such as a pod that replaces the dead one, that this launcher does.
func (h *Failover) announce(news message) {
	c := api.NewClient(h.cfg.Endpoint, h.cfg.Token)
	defer c.Close()
	for h.ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(h.ctx, askTimeout)
		_ = c.Call(ctx, h.cfg.Run, api.Vote, news, nil) // usually nobody is there
		cancel()
		select {
		case <-h.ctx.Done():
		case <-time.After(lookPause):
		}
	}
}

// Bound implements api.Succession.
func (h *Failover) Bound() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.voter.Bound()
}

// Parting implements api.Succession. A request that has reached no server changes nothing.
func (h *Failover) Parting(join func() error) error {
	h.mu.Lock()
	if h.voter.Bound() {
		h.mu.Unlock()
		return api.ErrBound
	}
	back := h.voter.Parts()
	h.mu.Unlock()
	err := join()
	if errors.Is(err, syscall.ECONNREFUSED) {
		h.mu.Lock()
		back()
		h.mu.Unlock()
	}
	return err
}

// Lost implements api.Succession.
func (h *Failover) Lost(ctx context.Context) (moved bool) {
	h.mu.Lock()
	server, dead := h.server, h.dead
	h.mu.Unlock()
	if server == "" || !dead && !refuses(ctx, server) {
		return false
	}
	for ctx.Err() == nil {
		h.mu.Lock()
		h.dead = true
		deputy, vote, ok := h.voter.Ballot()
		h.mu.Unlock()
		if !ok {
			return h.hopeless(ctx)
		}
		a, err := h.ask(ctx, deputy, vote)
		if err != nil && refuses(ctx, deputy.Addr) {
			h.mu.Lock()
			h.voter.HeirDead()
			h.mu.Unlock()
			continue
		}
		if err != nil {
			h.say("the deputy of the launcher that served the rendezvous does not answer; waiting for it", "err", err)
			return false
		}
		return h.answered(deputy, a)
	}
	return false
}

// answered follows a deputy that serves.
func (h *Failover) answered(deputy rendezvous.Deputy, a successor.Answer) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.voter.Answered(a) {
		h.dead = h.voter.Bound() // else a new launcher may serve there, whose death is to be proved, too
		return false
	}
	h.followLocked(deputy.Addr)
	if deputy.ID != h.cfg.ID {
		h.cfg.Log.Warn("the launcher that served the rendezvous has died; another one was elected", "addr", deputy.Addr,
			"term", a.Term)
	}
	return true
}

func (h *Failover) follow(addr string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.followLocked(addr)
}

func (h *Failover) followLocked(addr string) {
	h.server, h.dead, h.said, h.own = addr, false, "", ""
	h.cfg.Client.Move(addr)
	h.tellLocked()
}

// hopeless has a launcher without a vote, or without a deputy, look where the job's nodes meet, unless it was
// redirected from there to a launcher that lives.
func (h *Failover) hopeless(ctx context.Context) bool {
	if addr := h.cfg.Client.Addr(); addr != h.cfg.Endpoint && !refuses(ctx, addr) {
		return false
	}
	h.say("the launcher that served the rendezvous has died, and this one has no vote, or no deputy is left; " +
		"waiting for a new launcher at the job's endpoint")
	h.cfg.Client.Move(h.cfg.Endpoint)
	return false
}

func (h *Failover) say(text string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sayLocked(text, args...)
}

// sayLocked logs a line, unless it was the last one about this loss.
func (h *Failover) sayLocked(text string, args ...any) {
	if h.said != text {
		h.said = text
		h.cfg.Log.Warn(text, append(args, "dead", h.server, "endpoint", h.cfg.Endpoint)...)
	}
}

// ask sends a vote to its deputy, which may be this launcher.
func (h *Failover) ask(ctx context.Context, deputy rendezvous.Deputy, vote successor.Vote) (
	a successor.Answer, err error,
) {
	if deputy.ID == h.cfg.ID {
		return h.stand(ctx, vote), nil
	}
	c := api.NewClient(deputy.Addr, h.cfg.Token)
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err = c.Call(ctx, h.cfg.Run, api.Vote, message{Vote: vote}, &a)
	return a, err
}

// stand is a vote for oneself. A candidate gives up when a new launcher serves in the dead one's place.
func (h *Failover) stand(ctx context.Context, vote successor.Vote) successor.Answer {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.svc == nil {
		return successor.Answer{}
	}
	a := h.tally.Stand(vote, h.voters)
	h.electedLocked(a)
	if a.Serves {
		return a
	}
	have, need := h.tally.Votes()
	h.sayLocked("the launcher that served the rendezvous has died, and this one is a candidate; waiting for votes",
		"votes", have, "needed", need)
	h.mu.Unlock()
	back := h.serves(ctx, h.cfg.Endpoint)
	h.mu.Lock()
	if back && h.tally.Withdraw() {
		return successor.Answer{}
	}
	return h.tally.Count(vote) // votes may have come meanwhile
}

// serves reports whether a launcher of this run answers at the address.
func (h *Failover) serves(ctx context.Context, addr string) bool {
	c := api.NewClient(addr, h.cfg.Token)
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return c.Call(ctx, h.cfg.Run, api.Vote, message{}, nil) == nil
}

// refuses reports whether the host at addr refuses connections, so that the process that listened there is dead. The
// port of a process that is being killed may be closed a little later than its connections.
func refuses(ctx context.Context, addr string) bool {
	for i := range 2 {
		if i > 0 {
			time.Sleep(dialPause)
		}
		if err := dial(ctx, addr); !errors.Is(err, syscall.ECONNREFUSED) {
			return false
		}
	}
	return true
}

func dial(ctx context.Context, addr string) error {
	d := net.Dialer{Timeout: dialTimeout}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err == nil {
		_ = c.Close()
	}
	return err
}
