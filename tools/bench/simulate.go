package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/job"
	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// simulation is some nodes of one run: each has a session and a connection of its
// own, as a launcher has, and starts no workers.
type simulation struct {
	port     string
	token    string
	gate     gating
	params   rendezvous.Params
	count    int
	waiting  chan int64 // when a node was ordered to wait
	released chan int64 // when a node got its place
	failed   chan error
	waits    latencies // for the assignments of a check

	mu       sync.Mutex
	sessions []*api.Session
	clients  []*api.Client
	epoch    job.EpochID                // of the newest Run; written before released
	dialed   atomic.Pointer[chan int64] // when a node has connected again; nil: nobody asks
	readers  sync.WaitGroup
	stop     context.CancelFunc // ends readers
}

// dialers bounds the nodes that join at the same time, so that the daemon's accept
// queue holds them.
const dialers = 64

// daemonAddr spreads the nodes over the loopback addresses of one daemon. All of them share one source address. The
// kernel searches for a free port among the 28,000 of one source and destination; once many are in use, that takes
// longer than all else.
func daemonAddr(node int, port string) string {
	return fmt.Sprintf("127.0.0.%d:%s", 1+node%32, port)
}

// gating is the check of nodes before they have their places. It is "" for none, alone for a report of each node
// that it is healthy, and else the spec of a check.
type gating string

const (
	alone gating = "alone"
	// elastic has no check, and nodes may come and go.
	elastic gating = "elastic"
)

func (g gating) params(total int) rendezvous.Params {
	if g == elastic {
		return rendezvous.Params{Min: total / 2, Max: total * 2, MaxRestarts: 1, LastCall: 5 * time.Minute,
			Quiet: 10 * time.Second, GrowthDelay: time.Second}
	}
	p := rendezvous.Params{Min: total, Max: total, MaxRestarts: 1, Gate: g != ""}
	if g != alone {
		p.Check = string(g)
	}
	return p
}

// openNodes makes nodes from ... from+count-1 of a run of total nodes join.
func openNodes(ctx context.Context, port, token string, total, from, count int, gate gating) (*simulation, error) {
	s := &simulation{
		port: port, token: token, gate: gate, params: gate.params(total), count: count,
		waiting: make(chan int64, 2*count), released: make(chan int64, 2*count), failed: make(chan error, 2*count),
	}
	ctx, s.stop = context.WithCancel(ctx)
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(dialers, count) {
		wg.Go(func() {
			for i := range next {
				if err := s.open(ctx, i); err != nil {
					s.failed <- fmt.Errorf("node %d: %w", i, err)
				}
			}
		})
	}
	for i := range count {
		next <- from + i
	}
	close(next)
	wg.Wait()
	select {
	case err := <-s.failed:
		s.close()
		return nil, err
	default:
		return s, nil
	}
}

func (s *simulation) open(ctx context.Context, i int) error {
	addr := daemonAddr(i, s.port)
	layer, err := layerOf(s.token)
	if err != nil {
		return err
	}
	client := api.NewClient(addr, s.token).Over(layer)
	client.WhenDialed(func(net.Addr) {
		if c := s.dialed.Load(); c != nil {
			tell(ctx, *c, now())
		}
	})
	node := rendezvous.Node{
		ID: fmt.Sprintf("%016x", i), Name: fmt.Sprintf("node-%d", i), Rank: -1, Addr: "127.0.0.1", IP: "127.0.0.1", Slots: 8,
		Role: "default", Can: []rendezvous.Ability{rendezvous.CanGate},
	}
	session, err := api.Open(ctx, client, api.SessionConfig{Run: benchRun, Node: node, Params: s.params, Where: addr})
	if err != nil {
		client.Close()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions, s.clients = append(s.sessions, session), append(s.clients, client)
	s.readers.Go(func() { s.follow(ctx, session, client, node) })
	return nil
}

// layerOf is the TLS of one node; nil: none.
func layerOf(token string) (*secure.Layer, error) {
	chosen, err := secure.Chosen(func(string) string { return "" }, os.LookupEnv)
	if err != nil {
		return nil, err
	}
	return chosen.Layer(func() []string { return []string{token} }, secure.Asks, slog.New(slog.DiscardHandler))
}

// follow executes the directives until the session is closed.
func (s *simulation) follow(ctx context.Context, session *api.Session, client *api.Client, node rendezvous.Node) {
	for d := range session.Directives() {
		var err error
		switch d.Kind {
		case job.Wait:
			select {
			case s.waiting <- now():
			default: // nobody asks again
			}
		case job.Check:
			err = s.passGate(ctx, session, client, node)
		case job.Lead:
			err = session.Report(ctx, rendezvous.Ready{ID: session.ID(), EpochID: d.EpochID, Addr: "127.0.0.1", Port: 29500})
		case job.Run:
			at := now()
			s.mu.Lock()
			s.epoch = d.EpochID
			s.mu.Unlock()
			tell(ctx, s.released, at)
			if s.gate != elastic && d.Place.GroupWorldSize != s.params.Max {
				err = fmt.Errorf("a world of %d nodes", d.Place.GroupWorldSize)
			}
		case job.Stop:
			err = session.Rejoin(ctx, d.EpochID, nil)
		default:
			err = fmt.Errorf("unexpected directive %q: %v", d.Kind, d.Cause)
		}
		if err != nil {
			tell(ctx, s.failed, fmt.Errorf("node %s: %w", session.ID(), err))
			return
		}
	}
}

// tell gives up when ctx ends: there may be no receiver any more.
func tell[T any](ctx context.Context, to chan<- T, v T) {
	select {
	case to <- v:
	case <-ctx.Done():
	}
}

// breakWorld reports the failure of a worker of the first node.
func (s *simulation) breakWorld(ctx context.Context) error {
	s.mu.Lock()
	node, epoch := s.sessions[0], s.epoch
	s.mu.Unlock()
	return node.Report(ctx, rendezvous.Failing{ID: node.ID(), EpochID: epoch, Decision: rendezvous.RestartCharged})
}

// collect waits for all nodes and returns the time of the last one.
func (s *simulation) collect(ctx context.Context, times <-chan int64) (at int64, err error) {
	for range s.count {
		select {
		case t := <-times:
			at = max(at, t)
		case err := <-s.failed:
			return 0, err
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
	return at, nil
}

// cut breaks the connections of all nodes, and returns when the last one was back.
func (s *simulation) cut(ctx context.Context) (at int64, err error) {
	dialed := make(chan int64, 2*s.count)
	s.dialed.Store(&dialed)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0, err
	}
	for _, f := range fds {
		fd, _ := strconv.Atoi(f.Name()) // a number
		if peer, err := unix.Getpeername(fd); err == nil {
			if a, ok := peer.(*unix.SockaddrInet4); ok && strconv.Itoa(a.Port) == s.port {
				_ = unix.Shutdown(fd, unix.SHUT_RDWR) // it may be closed already
			}
		}
	}
	return s.collect(ctx, dialed)
}

func (s *simulation) close() {
	s.stop()
	for i := range s.sessions {
		s.sessions[i].Close()
		s.clients[i].Close()
	}
	s.readers.Wait()
}

// simulate is the main function of a process of simulated nodes, with the arguments PORT TOTAL FROM COUNT GATE. It
// prints when all its nodes wait, when all have their places, and whenever all have them again. If nodes are checked,
// it prints how long assignments took. SIGUSR1 cuts all connections; it prints when all are there again. It stays until
// it is ended.
func simulate(args []string, out io.Writer) error {
	if len(args) != 5 {
		return errors.New("simulate: want PORT TOTAL FROM COUNT GATE")
	}
	gate := gating(args[4])
	var n [3]int
	for i := range n {
		var err error
		if n[i], err = strconv.Atoi(args[i+1]); err != nil {
			return fmt.Errorf("simulate: %w", err)
		}
	}
	debug.SetGCPercent(400) // 5,000 launchers on one machine keep the daemon waiting for their garbage
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s, err := openNodes(ctx, args[0], os.Getenv("DLROVER_TOKEN"), n[0], n[1], n[2], gate)
	if err != nil {
		return err
	}
	defer s.close()
	cuts := make(chan os.Signal, 1)
	signal.Notify(cuts, syscall.SIGUSR1)
	go func() {
		for range cuts {
			if at, err := s.cut(ctx); err == nil {
				fmt.Fprintln(out, "back", at)
			}
		}
	}()
	for i := 0; ; i++ {
		step, times := "restarted", s.released
		switch i {
		case 0:
			step, times = "joined", s.waiting
		case 1:
			step = "released"
		}
		at, err := s.collect(ctx, times)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		fmt.Fprintln(out, step, at)
		if step == "released" && s.params.Check != "" {
			fmt.Fprintln(out, "assigned", s.waits.high())
		}
	}
}
