package upstream

import (
	"context"
	"fmt"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/pickle"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// worldNode is one node of a world.
type worldNode struct {
	rank  int // NODE_RANK
	slots int
}

// world is one that the master has sealed, in the order of the group ranks.
type world struct {
	name         string // of the rendezvous
	round, group int
	nodes        []worldNode
	own          int // group rank of this node
	size         int // workers of all
	addr         string
	port         int
}

// readWorld reads the master's answer. mine: this node is in it.
func readWorld(m *pyproto.Message, rank int) (w world, mine bool, err error) {
	w = world{name: training, round: m.Int("round"), group: m.Int("group"), own: -1}
	for _, p := range m.Dict("world").Pairs {
		at := worldNode{rank: pickle.IntOf(p.Key), slots: pickle.IntOf(p.Value)}
		if at.slots < 1 || at.slots > maxSlots || len(w.nodes) >= rendezvous.MaxNodes {
			return w, false, fmt.Errorf("the master's world gives node rank %d %d workers", at.rank, at.slots)
		}
		if at.rank == rank {
			w.own = len(w.nodes)
		}
		w.nodes = append(w.nodes, at)
		w.size += at.slots
	}
	return w, w.own >= 0, nil
}

// maxSlots bounds the workers of one node.
const maxSlots = 4096

// base is the first rank of a group rank's workers.
func (w world) base(group int) (n int) {
	for _, at := range w.nodes[:group] {
		n += at.slots
	}
	return n
}

func (w world) place(restarts int) *job.Place {
	base := w.base(w.own)
	return &job.Place{
		GroupRank: w.own, GroupWorldSize: len(w.nodes), RankBase: base, WorldSize: w.size, RoleRankBase: base,
		RoleWorldSize: w.size, RestartCount: restarts, MasterAddr: w.addr, MasterPort: w.port, WorkerStore: true,
	}
}

// key is where the agents of a world keep something (MasterKVStore and PrefixStore in DLRover's agent).
func (w world) key(name string) string {
	return fmt.Sprintf("%s/torch.rendezvous.%s.%d.%d/%s", w.name, w.name, w.round, w.group, name)
}

// askWorld asks whether the world that this node has joined is complete.
func (s *Service) askWorld(ctx context.Context, t turn) error {
	n, err := s.master.waitingFor(ctx, training)
	if err != nil {
		return err
	}
	if again, err := s.checkAgain(ctx, t); err != nil || again {
		return err
	}
	w, mine, err := s.master.world(ctx, training)
	if err != nil {
		return err
	}
	text, limit := s.formed(w, mine, n < 0, t)
	switch {
	case text != "":
		return s.master.timedOut(ctx, training, text, limit)
	case n >= 0 && s.enrolment.forgotten(w, n):
		return withoutReasons(s.enlist(ctx, t, w.round))
	}
	return nil
}

// checkAgain takes part in the check that another node waits for: it has been started again, and is checked first.
func (s *Service) checkAgain(ctx context.Context, t turn) (bool, error) {
	if s.cfg.Check.Test == nil {
		return false, nil
	}
	n, err := s.master.waitingFor(ctx, checking)
	if err != nil || n <= 0 {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.lasts() {
		s.at.enter(inCheck)
	}
	return true, nil
}

// formed handles the master's answer. It returns a text and the limit if time is up.
func (s *Service) formed(w world, mine, stopping bool, t turn) (text string, limit time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !t.lasts():
	case mine:
		s.sealed(w)
	case len(w.nodes) > 0:
		s.at.since = time.Now() // a spare: no limit of the join counts
	case stopping:
		s.fail(job.Cause{Kind: job.CauseOperator, Text: "the master is ending the job"})
	case time.Since(s.at.since) > s.params.JoinTimeout:
		text = fmt.Sprintf("too few nodes within %s: need %d to %d", s.params.JoinTimeout, s.params.Min, s.params.Max)
		s.fail(job.Cause{Kind: job.CauseTimeout, Text: text})
		return text, s.params.JoinTimeout
	}
	return "", 0
}

// epochs names the worlds of this launcher.
type epochs struct {
	term  uint64
	count int         // of named ones
	ran   job.EpochID // the last one with workers that were started
}

func (e *epochs) next(round int) job.EpochID {
	e.count++
	return job.EpochID{Term: e.term, Round: max(round, 1), Epoch: e.count}
}

// past reports whether an epoch has run here already. Then its leader has published the address to a restarted master,
// and has not removed it, such as after its death.
func (e *epochs) past(id job.EpochID) bool {
	return id.Round > 0 && id.Term == e.ran.Term && id.Epoch <= e.ran.Epoch
}

// sealed begins an epoch, with s locked. Its numbers are this launcher's own, until the leader has published others.
func (s *Service) sealed(w world) {
	s.world, s.barrier = w, barrier{kv: s.master.kv, world: w}
	s.dir.EpochID = s.epochs.next(w.round)
	s.failures = nil
	if w.own == 0 {
		s.at.enter(leading)
		s.direct(rendezvous.Directive{Kind: job.Lead})
		return
	}
	s.at.enter(following)
}

// ready publishes the workers' meeting place to the other nodes, and then starts its own.
func (s *Service) ready(ctx context.Context, e rendezvous.Ready) error {
	s.mu.Lock()
	w, current := s.world, s.at.phase == leading && e.EpochID == s.dir.EpochID
	s.mu.Unlock()
	if !current {
		return nil
	}
	s.master.kv.publish(ctx, w, s.master.self())
	if err := s.master.kv.lead(ctx, w, e.EpochID, e.Addr, e.Port); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at.phase == leading && e.EpochID == s.dir.EpochID {
		s.begin(e.Addr, e.Port)
	}
	return nil
}

// begin starts the workers, with s locked.
func (s *Service) begin(addr string, port int) {
	s.world.addr, s.world.port, s.epochs.ran = addr, port, s.dir.EpochID
	s.at.enter(running)
	s.direct(rendezvous.Directive{Kind: job.Run, Cause: s.cause})
	s.cause = nil
}

// askAddress asks where the workers meet.
func (s *Service) askAddress(ctx context.Context, t turn) error {
	s.mu.Lock()
	w := s.world
	s.mu.Unlock()
	addr, port, err := s.master.kv.address(ctx, w)
	if err != nil || port == 0 {
		return s.leaderless(ctx, t, err)
	}
	epoch, err := s.master.kv.epoch(ctx, w)
	if err != nil {
		return err
	}
	s.mu.Lock()
	past := s.epochs.past(epoch)
	s.mu.Unlock()
	if past {
		return s.leaderless(ctx, t, nil)
	}
	s.master.kv.publish(ctx, w, s.master.self())
	s.mu.Lock()
	defer s.mu.Unlock()
	if !t.lasts() {
		return nil
	}
	if epoch.Round > 0 {
		s.dir.EpochID = epoch
	}
	s.begin(addr, port)
	return nil
}

// leaderless goes back to the master where the leader does not come, such as when it has died: a node that waits is
// there for the next world.
func (s *Service) leaderless(ctx context.Context, t turn, err error) error {
	if err != nil {
		return err
	}
	n, err := s.master.waitingFor(ctx, training)
	checked := n != 0 // as the waiting nodes were; to check this node again would draw in the others, for ever
	if err == nil && !checked && s.cfg.Check.Test != nil {
		n, err = s.master.waitingFor(ctx, checking)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	late := s.params.JoinTimeout
	switch {
	case !t.lasts() || n <= 0 && time.Since(s.at.since) < late:
		late = 0
	case n > 0:
		late = 0
		next := s.cfg.Check.first(s.cleared)
		if next == inCheck && checked {
			next = joining
		}
		s.at.enter(next)
	default:
		s.fail(job.Cause{Kind: job.CauseTimeout, Text: noLeader})
	}
	s.mu.Unlock()
	if late == 0 {
		return nil
	}
	return s.master.timedOut(ctx, training, noLeader, late)
}

// noLeader is why a run ends without a leader.
const noLeader = "the node of the first rank has not told where the workers meet within the join timeout"
