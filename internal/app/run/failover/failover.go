// Package failover is a launcher's part in the election of the launcher that serves the rendezvous, after the one that
// did so is lost. Package successor has the rules.
//
// A launcher is dead if its own address refuses connections: its kernel says so. It is silent if its host has given no
// sign of life for rendezvous.SuspectAfter. A process that is stopped, on a host that answers, is neither.
//
// Goroutines: the door's until Close; an elected launcher has one more, which looks for a new launcher at the job's
// endpoint.
package failover

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/successor"
)

// openPatience is how long a directive waits for the files of the service.
const openPatience = time.Second

// Config describes a launcher.
type Config struct {
	Run, ID string
	// Client asks the launcher that serves.
	Client *api.Client
	// Endpoint is where the job's nodes meet, HOST:PORT.
	Endpoint string
	// Alone takes silence for death.
	Alone bool
	// Listener is where this launcher serves if it is elected, and Serve makes the service; without a Listener it never
	// is.
	Listener net.Listener
	Serve    func(standby func() error, vote http.Handler) (*service.Service, error)
	Log      *slog.Logger
	// Won is called on a goroutine of its own once this launcher is elected; nil: nothing is.
	Won func()
}

// Failover implements api.Succession.
type Failover struct {
	cfg          Config
	connect      func(addr string) *api.Client // to another launcher
	door         *door
	ctx          context.Context
	cancel       context.CancelFunc
	wg           sync.WaitGroup
	elected      context.Context // until this launcher is elected, or closed
	endCandidacy context.CancelFunc
	serving      atomic.Pointer[service.Service] // since this launcher was elected
	to           atomic.Pointer[string]          // where a later one serves, for which this launcher has given way

	mu      sync.Mutex
	voter   successor.Voter
	plan    *rendezvous.Failover // of the newest world; nil: it has none
	epoch   job.EpochID          // of the plan
	self    rendezvous.Deputy    // this launcher's entry in the newest plan that names it
	tally   successor.Tally
	server  string // where the launcher that serves listens itself; "": not known
	dead    bool   // it is, and not only silent
	sealer  bool   // the launcher that has sealed the newest world is dead
	opening bool   // svc is being made, or there is one
	svc     *service.Service
	said    string           // the newest line about a loss that goes on
	bars    *rendezvous.Bars // that a deputy was told last

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
	h := &Failover{cfg: cfg, connect: cfg.Client.To, voter: successor.Voter{ID: cfg.ID}}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	h.elected, h.endCandidacy = context.WithCancel(h.ctx)
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
	if h.plan == nil {
		return all[0]
	}
	for _, deputy := range h.plan.Deputies {
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
	if d.Bars != nil {
		h.bars = d.Bars
	}
	switch d.Kind {
	case job.Run:
		h.voter.Runs(d.EpochID, d.Failover)
	case job.Done, job.Fail:
		h.voter.Parts(d.EpochID)(true)
	}
	if d.Failover != nil && d.Kind != job.Run && !h.voter.Member() {
		h.plan, h.server, h.dead, h.said = d.Failover, d.Failover.Server, false, ""
		h.tellLocked()
	}
	if d.Failover == nil || d.Kind != job.Run {
		return
	}
	h.plan, h.epoch, h.server, h.bars = d.Failover, d.EpochID, d.Failover.Server, d.Bars
	h.dead, h.sealer, h.said = false, false, ""
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
	switch to := h.to.Load(); {
	case to != nil:
		return &api.MovedError{To: *to}
	case h.serving.Load() == nil:
		return api.ErrStandby
	}
	return nil
}
