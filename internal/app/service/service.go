// Package service is the whole server of a rendezvous. It joins the rounds of all runs, the meeting places of their
// checkpoint daemons, the checks between their nodes, and the judgement of hangs. It has the topology of the network,
// and further handlers, such as the output of workers for its followers. dlrover-master and a launcher that serves the
// other nodes of its job run the same service.
//
// Goroutines: one for the topology file, if there is one, until Close; those of the HTTP server are Serve's.
package service

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/checkpointd/coordinator"
	hangs "dlrover-run/hang/serve"
	"dlrover-run/internal/app/describe"
	"dlrover-run/internal/app/streamhub"
	"dlrover-run/internal/job"
	"dlrover-run/internal/secure"
	"dlrover-run/netcheck/serve"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/topology"
)

// Config holds the differences between the programs that serve.
type Config struct {
	// Token, when not empty, must come with every request below /v1; without one only this process's user is served,
	// unless it is Insecure. Name is a name by which others reach the service, "" for none.
	Token    string
	Insecure bool
	Name     string
	// Accepted are the tokens that are right now; nil: Token alone is.
	Accepted func() []string
	// TLS is what connections speak; nil: none.
	TLS *secure.Layer
	// Peers are other hosts that may send requests without a Token; nil: none. New takes them, also if it fails.
	Peers *api.Peers
	// Self is the ID of the launcher that serves; "" for a daemon.
	Self string
	// Standby is why nothing but Vote is served yet, or any more; nil: all is. Vote, unless it is nil, takes the votes by
	// which launchers elect the one that serves, and hears of the result.
	Standby func() error
	Vote    http.Handler
	// TopologyFile is the path of --topology-file; "" for none.
	TopologyFile string
	// Observe receives every note of every run in order, with the run locked: it must be quick and must not call the
	// service. Nil drops them.
	Observe func(run string, n rendezvous.Note)
	// Cleared receives the ID of a launcher of a run when its node has passed a check. It may be nil.
	Cleared func(run, id string, covered []string)
	// Suspect reports whether spares are preferred to a machine, and Avoid are the machines that replacement pods should
	// avoid. They must be quick, and must not call the service. Both may be nil.
	Suspect func(machine string) bool
	Avoid   func() []string
	// Keep is how long runs that have ended are kept; 0: as api.HubConfig has it.
	Keep time.Duration
	// Keeper is the Hub's, or nil. HangsKept is what an earlier service had to say about the hangs of a run, in the format
	// of KeepHangs.
	Keeper    api.Keeper
	HangsKept func(run string) []byte
	// Global serves paths below /v1 that belong to no run, by their first segment, with the token.
	Global map[string]http.Handler
	// Metrics serves /metrics with the token, and Extra paths outside /v1 without it; nil serves nothing.
	Metrics, Extra http.Handler
	// Page makes the handler for browsers, below /ui/; nil: none are served.
	Page func(*Service) http.Handler
	// Agents makes the handler for DLRover's agents, over HTTP/1.1 and HTTP/2, and a function that ends it; nil: they are
	// not served.
	Agents func(*Service) (handler http.Handler, end func())
	Log    *slog.Logger
}

// Service is a rendezvous with all that belongs to it. Close ends it.
type Service struct {
	Hub         *api.Hub
	Checkpoints *coordinator.Hub
	Checks      *serve.Hub
	Hangs       *hangs.Hub
	Streams     *streamhub.Hub

	cfg      Config
	handler  func() http.Handler // made once: most launchers serve no requests, and a mux of many patterns takes time
	server   *http.Server
	groups   groups
	agents   http.Handler // nil: agents of DLRover are not served
	noAgents func()
	topology atomic.Pointer[rendezvous.Topology]
	stop     context.CancelFunc // ends the background work
	wg       sync.WaitGroup
}

// agentLimits bound what a connection of HTTP/2 takes, which only DLRover's agents have: they make a handful of calls
// at a time. The announced length of a frame is allocated at once, whether the frame comes or not.
var agentLimits = http.HTTP2Config{
	MaxConcurrentStreams: 16, MaxReadFrameSize: 16 << 10, MaxReceiveBufferPerConnection: 128 << 10,
	MaxReceiveBufferPerStream: 64 << 10, WriteByteTimeout: 30 * time.Second,
}

// New returns a Service without runs. It fails only for a topology file that cannot be used.
func New(cfg Config) (*Service, error) {
	file, err := topology.Open(cfg.TopologyFile)
	if err != nil {
		cfg.Peers.Close()
		return nil, err
	}
	s := &Service{cfg: cfg, Checkpoints: coordinator.NewHub()}
	s.Checkpoints.Connection = api.Connection
	s.Hub = api.NewHub(api.HubConfig{
		Topology: file.First(), Observe: s.observe, Gate: s.gate, Released: s.released, Suspicious: suspicious,
		Saved: s.saved, Cleared: cfg.Cleared, Suspect: cfg.Suspect, Avoid: cfg.Avoid,
		Keep: cfg.Keep, Keeper: cfg.Keeper,
		Waits: func(r api.RunStatus) []string {
			return describe.Waits(r, s.Checks.Progress(r.Run), time.Now())
		},
	})
	s.groups.hub = s.Hub
	s.Checks = s.newChecks()
	s.Hangs = s.newHangs()
	s.Streams = s.newStreams()
	s.setSwitches(file.First())
	if cfg.Agents != nil {
		s.agents, s.noAgents = cfg.Agents(s)
	}
	var page http.Handler
	if cfg.Page != nil {
		page = cfg.Page(s)
	}
	s.handler = sync.OnceValue(func() http.Handler {
		return api.Handler(s.Hub, api.ServerConfig{
			Token: cfg.Token, Accepted: cfg.Accepted, Insecure: cfg.Insecure, Name: cfg.Name, Extra: cfg.Extra,
			Metrics: cfg.Metrics, Python: s.agents, Global: cfg.Global, Peers: cfg.Peers, PeerCalls: peerCalls(),
			Standby: cfg.Standby, Mounts: s.mounts(), Page: page,
		})
	})
	s.server = api.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		s.handler().ServeHTTP(w, req)
	}))
	if s.agents != nil {
		s.server.Protocols = new(http.Protocols)
		s.server.Protocols.SetHTTP1(true)
		s.server.Protocols.SetUnencryptedHTTP2(true)
		s.server.HTTP2 = &agentLimits
	}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	if file != nil {
		s.wg.Go(func() { file.Follow(ctx, cfg.Log, s.rewire) })
	}
	return s, nil
}

func (s *Service) mounts() map[string]http.Handler {
	all := map[string]http.Handler{
		"checkpoints": s.Checkpoints.Handler(), "checks": s.Checks.Handler(), "hang": s.Hangs.Handler(),
		"streams":    s.Streams.Handler(),
		"verdict":    api.Answer(func(req *http.Request) (any, error) { return s.Verdict(req.PathValue("run")) }),
		"failures":   api.Answer(func(req *http.Request) (any, error) { return s.Failures(req.PathValue("run")) }),
		"findings":   api.Take(s.Found),
		"groups":     api.Ask(func(run string, q GroupRequest) (any, error) { return s.Place(run, q) }),
		"lighthouse": api.Ask(func(run string, q LighthouseRequest) (any, error) { return s.Lighthouse(run, q) }),
	}
	if s.cfg.Vote != nil {
		all[api.Vote] = s.cfg.Vote
	}
	return all
}

// peerCalls are the requests of launchers and their checkpoint daemons to mounted handlers.
func peerCalls() []string {
	return []string{"POST checkpoints/reports", "POST checkpoints/agree", "POST checkpoints/speaks",
		"POST checkpoints/peers", "POST checkpoints/ages", "POST checks/next", "GET checks", "POST hang/report",
		"POST findings", "POST groups", "POST lighthouse", "GET streams/feed", "POST " + api.Vote}
}

// rewire makes a new topology count: for the ranks of the next world, for the partners that its checkpoint daemons then
// choose, and for nodes that are checked from then on.
func (s *Service) rewire(topo rendezvous.Topology) {
	s.setSwitches(topo)
	s.Hub.SetTopology(topo)
}

func (s *Service) setSwitches(topo rendezvous.Topology) {
	s.topology.Store(&topo)
	s.Checkpoints.SetSwitches(topo)
}

// Serve answers requests on l until Close, which makes it return http.ErrServerClosed. It closes l.
func (s *Service) Serve(l net.Listener) error {
	s.handler() // or the first request would wait for it
	return s.ServeRarely(l)
}

// ServeRarely is Serve for a server that expects no requests: the first one waits a little.
func (s *Service) ServeRarely(l net.Listener) error {
	return s.server.Serve(api.Watchful(s.cfg.TLS.Listener(l)))
}

// Close ends the service. Requests that are held are answered at once; others have grace to come to their end, before
// their connections are closed.
func (s *Service) Close(grace time.Duration) {
	s.stop()
	s.wg.Wait()
	s.cfg.Peers.Close()
	if s.agents != nil {
		s.noAgents()
	}
	s.Streams.Close()
	s.Hub.Close()
	s.Checkpoints.Close()
	s.Checks.Close()
	s.Hangs.Close()
	s.groups.quorums.close()
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if grace <= 0 || s.server.Shutdown(ctx) != nil {
		_ = s.server.Close()
	}
}

// observe has the run locked.
func (s *Service) observe(run string, n rendezvous.Note) {
	if n.Event == job.EventNodeLoss && n.Rank >= 0 {
		s.Checkpoints.Lost(run, n.Term, n.Round, n.Rank)
	}
	if n.ID != "" {
		s.Checks.Gone(run, n.ID)
	}
	if endsEpoch(n.Event) {
		s.Hangs.Ended(run, job.EpochID{Term: n.Term, Round: n.Round, Epoch: n.Epoch})
	}
	s.groups.observed(run, n)
	s.Streams.Happened(run, n.Event)
	if s.cfg.Observe != nil {
		s.cfg.Observe(run, n)
	}
	logWorld(s.cfg.Log, run, n)
}
