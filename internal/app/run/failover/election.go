package failover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

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
	lookPause   = 500 * time.Millisecond // between two tries to tell a launcher of the election

	standPatience = 3 * time.Second        // with a deputy that does not stand yet
	standPause    = 100 * time.Millisecond // between two questions to it
)

// Bound implements api.Succession.
func (h *Failover) Bound() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.voter.Bound()
}

// Parting implements api.Succession. A request that no server has taken changes nothing.
func (h *Failover) Parting(stopped job.EpochID, join func() error) error {
	h.mu.Lock()
	if h.voter.Bound() {
		h.mu.Unlock()
		return api.ErrBound
	}
	asked := h.voter.Parts(stopped)
	h.mu.Unlock()
	err := join()
	h.mu.Lock()
	defer h.mu.Unlock()
	asked(!untaken(err))
	return err
}

// untaken reports whether a request has reached no server, or one that is on standby.
func untaken(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial" || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, api.ErrStandby)
}

// Lost implements api.Succession.
func (h *Failover) Lost(ctx context.Context, why error) (moved bool) {
	if a := h.candidacy(); a.Serves {
		return h.answered(h.self, a)
	}
	if h.recount(ctx) {
		return true
	}
	h.mu.Lock()
	server, bound := h.server, h.voter.Bound()
	h.mu.Unlock()
	if server == "" {
		h.cfg.astray(ctx)
		return false
	}
	if !bound && !h.gone(ctx, server, why) {
		return false
	}
	for end := time.Now().Add(standPatience); ; time.Sleep(standPause) {
		moved, early := h.elect(ctx)
		if !early || time.Now().After(end) || ctx.Err() != nil {
			return moved
		}
	}
}

// candidacy is this launcher's own.
func (h *Failover) candidacy() successor.Answer {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tally.Count(successor.Vote{})
}

// recount asks the deputies that may have counted the launcher's vote.
func (h *Failover) recount(ctx context.Context) (moved bool) {
	h.mu.Lock()
	asked := h.voter.Candidates()
	h.mu.Unlock()
	for _, d := range asked {
		a, err := h.ask(ctx, d, successor.Vote{})
		if err == nil && h.answered(d, a) {
			return true
		}
		if errors.Is(err, syscall.ECONNREFUSED) && refuses(ctx, d.Addr) {
			h.out(d)
		}
	}
	return false
}

// elect asks the deputies in turn, and votes for the first one that stands. It is early if that one does not stand yet:
// hosts notice a silent one within a second or two.
func (h *Failover) elect(ctx context.Context) (moved, early bool) {
	for _, d := range h.deputies() {
		if d.ID == h.cfg.ID {
			return h.campaign(ctx, d), false
		}
		a, err := h.ask(ctx, d, successor.Vote{})
		if err == nil && !a.Unable {
			return h.vote(ctx, d, a)
		}
		if err == nil || errors.Is(err, syscall.ECONNREFUSED) && refuses(ctx, d.Addr) {
			h.out(d)
		} else if !h.bySilence() {
			h.say("the deputy of the launcher that served the rendezvous does not answer; waiting for it", "err", err)
			return false, false
		}
	}
	return h.hopeless(ctx), false
}

// campaign has this launcher stand, and ends early once it is elected.
func (h *Failover) campaign(ctx context.Context, self rendezvous.Deputy) (moved bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(h.elected, cancel)()
	if h.answered(self, h.stand(ctx)) || h.overtaken(ctx) {
		return true
	}
	a := h.candidacy()
	return a.Serves && h.answered(self, a)
}

// overtaken follows a deputy that is behind this launcher in the order, and was elected while this one was silent.
func (h *Failover) overtaken(ctx context.Context) (moved bool) {
	for _, d := range h.deputies() {
		if d.ID == h.cfg.ID || ctx.Err() != nil {
			continue
		}
		if a, err := h.ask(ctx, d, successor.Vote{}); err == nil && h.answered(d, a) {
			return true
		}
	}
	return false
}

// gone reports whether the server is dead or silent.
func (h *Failover) gone(ctx context.Context, server string, why error) bool {
	patience := rendezvous.SuspectAfter
	if silence(why) || !h.bySilence() {
		patience = 0
	}
	dead, silent := look(ctx, server, patience)
	if !dead && !(silent && h.bySilence()) {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deadLocked(server, dead)
	return true
}

func (h *Failover) deadLocked(server string, dead bool) {
	h.dead = dead
	h.sealer = h.sealer || dead && h.plan != nil && server == h.plan.Server
}

// bySilence reports whether a launcher may be replaced because it is silent.
func (h *Failover) bySilence() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.plan != nil && h.plan.Electorate(false) > 0
}

func (h *Failover) deputies() []rendezvous.Deputy {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.voter.Deputies()
}

// out passes over a deputy that is dead, or cannot serve.
func (h *Failover) out(d rendezvous.Deputy) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.voter.Out(d.ID)
}

// vote votes for a deputy that stands. One of an older version does not say so, and does not stand unless the server is
// dead.
func (h *Failover) vote(ctx context.Context, d rendezvous.Deputy, a successor.Answer) (moved, early bool) {
	h.mu.Lock()
	moved = h.answeredLocked(d, a)
	early = !a.Serves && a.Candidacy == 0 && !h.dead
	if moved || !h.withdrawLocked() || a.Serves || early || !h.voter.Member() { // it may have parted meanwhile
		h.mu.Unlock()
		return moved, early
	}
	ballot := h.voter.Ballot(d.ID, a.Candidacy)
	h.mu.Unlock()
	a, err := h.ask(ctx, d, ballot)
	return err == nil && h.answered(d, a), false
}

// withdrawLocked ends this launcher's own candidacy. It reports false if it was elected.
func (h *Failover) withdrawLocked() bool {
	if !h.tally.Withdraw() {
		return false
	}
	h.voter.Answered(h.cfg.ID, successor.Answer{})
	return true
}

func (h *Failover) answered(d rendezvous.Deputy, a successor.Answer) (moved bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.answeredLocked(d, a)
}

// answeredLocked follows a deputy that serves.
func (h *Failover) answeredLocked(d rendezvous.Deputy, a successor.Answer) (moved bool) {
	if !h.voter.Answered(d.ID, a) {
		return false
	}
	if d.ID != h.cfg.ID {
		h.cfg.Log.Warn(h.loss()+"; another one was elected", "addr", d.Addr, "term", a.Term)
		h.tally.Withdraw()
	}
	h.followLocked(d.Addr)
	return true
}

// loss says what has become of the server.
func (h *Failover) loss() string {
	if h.dead {
		return "the launcher that served the rendezvous has died"
	}
	return "the host of the launcher that serves the rendezvous is silent"
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

// hopeless has a launcher without a vote, or without a deputy, follow the one that others have elected. Else it looks
// where the job's nodes meet, unless it was redirected from there to a launcher that may live.
func (h *Failover) hopeless(ctx context.Context) (moved bool) {
	h.mu.Lock()
	var known []rendezvous.Deputy
	if h.plan != nil {
		known = h.plan.Deputies
	}
	h.mu.Unlock()
	for _, d := range known {
		if a, err := h.serves(ctx, d.Addr); d.ID != h.cfg.ID && err == nil && h.answered(d, a) {
			return true
		}
	}
	h.mu.Lock()
	h.sayLocked(h.loss() + ", and this one has no vote, or no deputy is left; waiting for one at the job's endpoint")
	dead := h.dead
	h.mu.Unlock()
	if dead {
		h.cfg.astray(ctx)
	}
	return false
}

// astray has a launcher look where the job's nodes meet if the one that it asks is dead.
func (c Config) astray(ctx context.Context) {
	if addr := c.Client.Addr(); addr != c.Endpoint && refuses(ctx, addr) {
		c.Client.Move(c.Endpoint)
	}
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
		h.cfg.Log.Warn(text, append(args, "server", h.server, "endpoint", h.cfg.Endpoint)...)
	}
}

// ask sends a vote to its deputy, or with an empty one a question.
func (h *Failover) ask(ctx context.Context, d rendezvous.Deputy, vote successor.Vote) (a successor.Answer, err error) {
	if vote.ID == "" {
		h.mu.Lock()
		vote = h.voter.Question(d.ID)
		h.mu.Unlock()
	}
	c := h.connect(d.Addr)
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err = c.Call(ctx, h.cfg.Run, api.Vote, message{Vote: vote}, &a)
	return a, err
}

// stand is a vote for oneself. A candidate gives up when the lost launcher is back, or a new one in its place.
func (h *Failover) stand(ctx context.Context) successor.Answer {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.svc == nil || h.to.Load() != nil || !h.voter.Member() { // it may have parted meanwhile
		return successor.Answer{}
	}
	own, electorate, server := h.voter.Ballot(h.cfg.ID, 0), h.plan.Electorate(h.sealer), h.server
	a := h.tally.Stand(own, electorate)
	h.electedLocked(a)
	if a.Serves {
		return a
	}
	have, need := h.tally.Votes()
	h.sayLocked(h.loss()+", and this one is a candidate; waiting for votes", "votes", have, "needed", need)
	h.mu.Unlock()
	_, gone := h.serves(ctx, h.cfg.Endpoint)
	if gone != nil && server != h.cfg.Endpoint {
		_, gone = h.serves(ctx, server)
	}
	dead := refuses(ctx, server)
	h.mu.Lock()
	if gone == nil && h.tally.Withdraw() {
		return successor.Answer{}
	}
	h.deadLocked(server, h.dead || dead)
	return h.tally.Count(own) // votes may have come meanwhile
}

// serves asks the launcher at an address whether it was elected. One that serves from its start gives an empty answer.
func (h *Failover) serves(ctx context.Context, addr string) (a successor.Answer, err error) {
	c := h.connect(addr)
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err = c.Call(ctx, h.cfg.Run, api.Vote, message{}, &a)
	return a, err
}

// received takes the vote of another launcher, or its question.
func (h *Failover) received(run string, m message) (any, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if run != h.cfg.Run {
		return successor.Answer{}, nil
	}
	if m.Addr != "" {
		return successor.Answer{}, h.giveWayLocked(m)
	}
	a := h.tally.Count(m.Vote)
	h.electedLocked(a)
	a.Unable = !a.Serves && !h.voter.Able(m.Term) || h.to.Load() != nil
	return a, nil
}

// electedLocked makes the launcher serve once it has the votes: before any voter hears of it.
func (h *Failover) electedLocked(a successor.Answer) {
	if !a.Serves || h.serving.Load() != nil || h.ctx.Err() != nil {
		return
	}
	host, port, _ := net.SplitHostPort(h.self.Addr)
	number, _ := strconv.Atoi(port)
	api.ServedBy(h.svc.Hub, rendezvous.Server{ID: h.cfg.ID, Host: host, Port: number, Term: a.Term, Elected: true,
		OfDead: h.sealer && h.plan.ByMember(), World: h.plan, Epoch: h.epoch, Alone: h.cfg.Alone,
		Bars: h.bars})
	h.serving.Store(h.svc)
	h.endCandidacy()
	have, need := h.tally.Votes()
	h.cfg.Log.Warn(h.loss()+", and this one was elected to serve it", "server", h.server, "addr", h.self.Addr,
		"term", a.Term, "votes", have, "needed", need, "members", h.plan.Members, "alone", h.plan.Alone)
	if h.cfg.Won != nil {
		h.wg.Go(h.cfg.Won)
	}
	news := message{Vote: successor.Vote{Term: a.Term, ID: h.cfg.ID}, Addr: h.self.Addr}
	h.wg.Go(func() { h.announce(h.cfg.Endpoint, news) })
	if h.server != h.cfg.Endpoint && !h.dead {
		server := h.server
		h.wg.Go(func() { h.announce(server, news) })
	}
}

// announce tells a launcher that serves, such as one that replaces the dead one at the endpoint, that this one does.
func (h *Failover) announce(addr string, news message) {
	c := h.connect(addr)
	defer c.Close()
	for h.ctx.Err() == nil && h.to.Load() == nil {
		ctx, cancel := context.WithTimeout(h.ctx, askTimeout)
		_ = c.Call(ctx, h.cfg.Run, api.Vote, news, nil) // usually nobody is there
		cancel()
		select {
		case <-h.ctx.Done():
		case <-time.After(lookPause):
		}
	}
}

// giveWayLocked ends the service of an elected launcher for that of a later term. It does not serve again.
func (h *Failover) giveWayLocked(m message) error {
	if _, _, err := net.SplitHostPort(m.Addr); err != nil {
		return fmt.Errorf("%w: the address of an elected launcher: %w", api.ErrBadRequest, err)
	}
	a := h.tally.Count(successor.Vote{})
	if !a.Serves || m.Term <= a.Term {
		return nil
	}
	h.to.Store(&m.Addr)
	h.tally = successor.Tally{}
	h.cfg.Log.Warn("members of this run have elected another launcher while this one did not answer; joining it",
		"addr", m.Addr, "term", m.Term)
	if svc := h.serving.Swap(nil); svc != nil {
		svc.Hub.Close()
	}
	return nil
}

// silence reports whether a request has failed because the server's host was silent: a connection that was alive has
// broken by that, and no other one could be made.
func silence(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return api.IsSilence(err) || ok && op.Op == "dial" && op.Timeout()
}

// look finds out what has become of the launcher at addr, whose host may be silent for so long until it is suspect.
//
// It is dead if its host refuses connections. The port of a process that is being killed may be closed a little later
// than its connections, and so two of them are tried.
func look(ctx context.Context, addr string, patience time.Duration) (dead, silent bool) {
	refused := 0
	for end := time.Now().Add(patience); ; time.Sleep(dialPause) {
		switch err := dial(ctx, addr); {
		case err == nil, ctx.Err() != nil:
			return false, false
		case !errors.Is(err, syscall.ECONNREFUSED):
			if refused = 0; !time.Now().Before(end) {
				return false, true
			}
		default:
			if refused++; refused == 2 {
				return true, false
			}
		}
	}
}

// refuses reports whether the launcher at addr is dead.
func refuses(ctx context.Context, addr string) bool {
	dead, _ := look(ctx, addr, 0)
	return dead
}

func dial(ctx context.Context, addr string) error {
	d := net.Dialer{Timeout: dialTimeout}
	c, err := d.DialContext(ctx, "tcp", addr)
	if err == nil {
		_ = c.Close()
	}
	return err
}
