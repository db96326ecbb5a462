// Package node takes part in a check of nodes for one node. It introduces the node to the service (netcheck/serve),
// carries out its assignments, one after the other, and reports their results, until there is a verdict.
//
// The caller provides the measurements: a Prober for the network, and a Torch for the job's PyTorch.
//
// Goroutines: Run owns one for the request that is under way and one for the assignment. Both have ended when it
// returns, except calls that do not return within a second of their cancellation; Run names these.
package node

import (
	"context"
	"crypto/rand"
	"log/slog"
	mrand "math/rand/v2"
	"slices"
	"time"

	"dlrover-run/netcheck"
	"dlrover-run/netcheck/serve"
)

// Prober measures the network between this node and another one. Both methods return within a second of ctx's end, and
// nothing of the test is open any more then.
type Prober interface {
	// Serve listens, passes its addresses (host:port by rail) to ready, and takes part in one test.
	Serve(ctx context.Context, a netcheck.Assignment, ready func(addrs []string) error) netcheck.Result
	// Dial connects to a.Peer.Addrs and takes part in one test.
	Dial(ctx context.Context, a netcheck.Assignment) netcheck.Result
	// Listen opens the listeners of the next Serve, if they are not open, and returns their addresses; nil: Serve opens
	// them itself.
	Listen(ctx context.Context) (addrs []string)
	// Close closes the listeners for which no Serve has come.
	Close()
}

// Torch measures with the job's PyTorch. Its methods are as a Prober's.
type Torch interface {
	Compute(ctx context.Context, a netcheck.Assignment) netcheck.Result
	Serve(ctx context.Context, a netcheck.Assignment, ready func(addrs []string) error) netcheck.Result
	Dial(ctx context.Context, a netcheck.Assignment) netcheck.Result
	// Join takes part in a collective of a.World processes; ready is for rank 0, which has the store.
	Join(ctx context.Context, a netcheck.Assignment, ready func(addrs []string) error) netcheck.Result
	// Close ends its processes.
	Close()
}

// Config has the inputs of Run.
type Config struct {
	Run       string        // the rendezvous' run
	Node      netcheck.Node // with ID, and with the findings of the local checks
	Transport serve.Transport
	Prober    Prober
	Torch     Torch // nil: none. Run closes it.
	// Noticed returns all findings of the node about itself since its local checks; nil: none. It is called when a test
	// is over, and at the verdict.
	Noticed func() []netcheck.Finding
	// Final reports whether an error of the Transport is permanent; nil: none is.
	Final func(error) bool
	Log   *slog.Logger
}

const (
	// grace bounds the wait for a cancelled call to return.
	grace = time.Second
	// listenAfter is how long an assignment runs before the service is also asked for a newer one. It is longer than a
	// healthy test, which then costs no such request.
	listenAfter = 5 * time.Second
	// A service that is away is tried again after pauses that grow from the first to the longest.
	firstPause, longestPause = 50 * time.Millisecond, time.Second
	// goodbye bounds the last message to the service: that the node leaves the check, or its last findings.
	goodbye = 500 * time.Millisecond
)

// visit is one node's part in one check. All fields are of the goroutine of Run.
type visit struct {
	cfg  *Config
	name string
	seq  uint64         // of the newest assignment
	say  *serve.Request // the message to send, or nil; a newer assignment makes it void
	req  *request       // under way, or nil
	work *work          // the running assignment, or nil
	away outage
	met  bool // the service has answered
}

// Run takes part in the check of a run until the service has decided about the node, and returns the verdict. It is
// patient with a service that is away, or that does not know the node yet. The error is one for which Final returns
// true, or the cause of ctx's end; Run then returns within a second, after a message to the service that the node
// leaves.
func Run(ctx context.Context, cfg Config) (netcheck.Verdict, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	v := &visit{cfg: &cfg, name: rand.Text()}
	verdict, err := v.take(ctx)
	if err == nil {
		verdict = v.noticed(ctx, verdict)
	}
	v.end(ctx, err)
	return verdict, err
}

// noticed adds the node's findings about itself since its last test to the verdict, and reports them.
func (v *visit) noticed(ctx context.Context, verdict netcheck.Verdict) netcheck.Verdict {
	found := slices.DeleteFunc(v.cfg.noticed(), func(f netcheck.Finding) bool { return f.In(verdict.Findings) })
	if len(found) == 0 {
		return verdict
	}
	for _, f := range found {
		verdict = verdict.Against(f)
	}
	v.last(ctx, serve.Request{Report: &netcheck.Result{Test: netcheck.AfterVerdict, Findings: slices.Clone(found)}})
	return verdict
}

func (c *Config) noticed() []netcheck.Finding {
	if c.Noticed == nil {
		return nil
	}
	return c.Noticed()
}

// announceEvery is the interval of the announcements: a new service needs one, too.
const announceEvery = 3 * time.Second

// Announce reports to the service that this node is there and does its local checks, until ctx ends. It reports nothing
// if the local checks take no more than a few seconds.
func Announce(ctx context.Context, run, id string, t serve.Transport) {
	every := time.NewTicker(announceEvery)
	defer every.Stop()
	for visit := rand.Text(); ; {
		select {
		case <-every.C:
			_, _ = t.Next(ctx, run, serve.Request{ID: id, Visit: visit, NoWait: true}) // it may be away for a while
		case <-ctx.Done():
			return
		}
	}
}

// take is the node's one loop.
func (v *visit) take(ctx context.Context) (netcheck.Verdict, error) {
	v.introduce(ctx)
	for {
		v.ask(ctx)
		select {
		case rep := <-v.req.answered():
			verdict, err := v.heard(ctx, rep)
			if verdict != nil || err != nil {
				return deref(verdict), err
			}
		case addrs := <-v.work.listens():
			if !v.work.a.Told {
				v.say = &serve.Request{Ready: &serve.Ready{Test: v.work.a.Test, Addrs: addrs}, NoWait: true}
			}
		case res := <-v.work.ended():
			v.work = nil
			v.say = &serve.Request{Report: &res, Listens: v.listens(ctx)}
		case <-v.work.lasts():
			v.work.long = true // ask for a newer assignment meanwhile
		case <-v.away.over():
			v.away.timer = nil
		case <-ctx.Done():
			return netcheck.Verdict{}, context.Cause(ctx)
		}
	}
}

func deref(v *netcheck.Verdict) netcheck.Verdict {
	if v == nil {
		return netcheck.Verdict{}
	}
	return *v
}

// introduce makes the node begin, or begin anew.
func (v *visit) introduce(ctx context.Context) {
	n := v.cfg.Node
	n.Findings = slices.Clone(n.Findings) // Fit cuts them
	v.seq, v.say = 0, &serve.Request{Arrive: &n, Listens: v.listens(ctx)}
}

// listens is where the node listens for its next test.
func (v *visit) listens(ctx context.Context) []string {
	if v.cfg.Prober == nil {
		return nil
	}
	return v.cfg.Prober.Listen(ctx)
}

// ask sends the next request if it is time for one. There is one at a time: a request with a message replaces one that
// only waits for news. None is held while a test runs that will soon have a result.
func (v *visit) ask(ctx context.Context) {
	switch {
	case v.req != nil && v.say != nil && v.req.said == nil:
		v.req.cancel() // its answer, or that there is none, comes through answered
	case v.req != nil || v.away.timer != nil:
	case v.say != nil:
		v.req = v.send(ctx, v.say)
	case v.work == nil || v.work.long:
		v.req = v.send(ctx, nil)
	}
}

// heard takes the answer of the request that was under way. It returns the verdict, once there is one.
func (v *visit) heard(ctx context.Context, rep reply) (*netcheck.Verdict, error) {
	req := v.req
	v.req = nil
	gaveWay := req.ctx.Err() != nil && ctx.Err() == nil
	req.cancel()
	switch {
	case rep.err != nil && gaveWay:
		return nil, nil
	case rep.err != nil && v.cfg.Final != nil && v.cfg.Final(rep.err):
		return nil, rep.err
	case rep.err != nil:
		v.away.wait(v.cfg.Log, rep.err)
		return nil, nil
	}
	v.met = true
	v.away = outage{}
	if req.said == v.say {
		v.say = nil
	}
	return v.follow(ctx, rep.a), nil
}

// follow makes the newest assignment count.
func (v *visit) follow(ctx context.Context, a netcheck.Assignment) *netcheck.Verdict {
	switch {
	case a.Duty == serve.Introduce:
		v.drop()
		v.introduce(ctx)
		return nil
	case a.Seq == v.seq:
		return nil
	}
	v.drop()
	v.seq, v.say = a.Seq, nil
	v.cfg.Log.Debug("check", "duty", a.Duty, "round", a.Round, "peer", a.Peer.Name, "test", a.Test, "left", a.Left)
	switch a.Duty {
	case netcheck.Rest:
	case netcheck.Decided:
		if a.Verdict != nil {
			return a.Verdict
		}
		return &netcheck.Verdict{State: netcheck.StateNotTested, Reason: "the service has decided without a verdict"}
	default:
		v.work = begin(ctx, v.cfg, a)
	}
	return nil
}

// drop ends the running assignment; its result is void.
func (v *visit) drop() {
	if v.work != nil {
		v.work.cancel()
		<-v.work.done
		v.work = nil
	}
}

// end ends all that is under way, at the same time, and sends Leave if there is no verdict.
func (v *visit) end(ctx context.Context, err error) {
	ended := make(chan struct{}, 4)
	do := func(f func()) {
		go func() { f(); ended <- struct{}{} }()
	}
	do(v.drop)
	do(func() {
		if v.cfg.Prober != nil {
			v.cfg.Prober.Close()
		}
	})
	do(func() {
		if v.req != nil {
			v.req.cancel()
			<-v.req.answer
		}
		if err != nil && v.met {
			v.last(ctx, serve.Request{Leave: true}) // the rendezvous also notifies the service
		}
	})
	do(func() {
		if v.cfg.Torch != nil {
			v.cfg.Torch.Close()
		}
	})
	late := time.NewTimer(grace + grace/10) // drop has its own second
	defer late.Stop()
	for range cap(ended) {
		select {
		case <-ended:
		case <-late.C:
			v.cfg.Log.Warn("the end of a node check does not return; it is left behind")
			return
		}
	}
}

// last sends a message and does not wait for its answer.
func (v *visit) last(ctx context.Context, q serve.Request) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), goodbye)
	defer cancel()
	q = v.signed(q)
	q.NoWait = true
	q.Fit()
	_, _ = v.cfg.Transport.Next(ctx, v.cfg.Run, q)
}

// request is one call of the Transport.
type request struct {
	ctx    context.Context
	cancel context.CancelFunc
	said   *serve.Request // nil: it only waits for news
	answer chan reply
}

type reply struct {
	a   netcheck.Assignment
	err error
}

func (r *request) answered() <-chan reply {
	if r == nil {
		return nil
	}
	return r.answer
}

func (v *visit) send(ctx context.Context, said *serve.Request) *request {
	r := &request{said: said, answer: make(chan reply, 1)}
	var q serve.Request
	if said != nil {
		q = *said
	}
	q = v.signed(q)
	q.Fit()
	r.ctx, r.cancel = context.WithCancel(ctx)
	go func() {
		a, err := v.cfg.Transport.Next(r.ctx, v.cfg.Run, q)
		r.answer <- reply{a, err}
	}()
	return r
}

func (v *visit) signed(q serve.Request) serve.Request {
	q.ID, q.Visit, q.Seq = v.cfg.Node.ID, v.name, v.seq
	return q
}

// outage is the absence of the service.
type outage struct {
	since time.Time
	delay time.Duration
	timer *time.Timer // until the next attempt
	said  bool
}

// sayAfter is when an absence is logged. The rendezvous' own client logs that a daemon is away.
const sayAfter = 5 * time.Second

// wait begins the pause before the next attempt: half to one and a half of the delay, so that nodes do not come at the
// same moment.
func (o *outage) wait(log *slog.Logger, err error) {
	if o.since.IsZero() {
		o.since = time.Now()
	}
	o.delay = min(max(2*o.delay, firstPause), longestPause)
	o.timer = time.NewTimer(o.delay/2 + mrand.N(o.delay))
	if !o.said && time.Since(o.since) >= sayAfter {
		o.said = true
		log.Warn("the node check waits for the rendezvous daemon", "err", err)
	}
}

func (o *outage) over() <-chan time.Time {
	if o.timer == nil {
		return nil
	}
	return o.timer.C
}
