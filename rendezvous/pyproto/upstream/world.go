package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/pickle"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// seat is one node of a world.
type seat struct {
	rank  int // NODE_RANK
	slots int
}

// world is one that the master has sealed, in the order of the group ranks.
type world struct {
	name         string // of the rendezvous
	round, group int
	seats        []seat
	own          int // group rank of this node
	size         int // workers of all
	addr         string
	port         int
}

// readWorld reads the master's answer. mine: this node is in it.
func readWorld(m *pyproto.Message, rank int) (w world, mine bool, err error) {
	w = world{name: training, round: m.Int("round"), group: m.Int("group"), own: -1}
	for _, p := range m.Dict("world").Pairs {
		at := seat{rank: pickle.IntOf(p.Key), slots: pickle.IntOf(p.Value)}
		if at.slots < 1 || at.slots > maxSlots || len(w.seats) >= rendezvous.MaxNodes {
			return w, false, fmt.Errorf("the master's world gives node rank %d %d workers", at.rank, at.slots)
		}
		if at.rank == rank {
			w.own = len(w.seats)
		}
		w.seats = append(w.seats, at)
		w.size += at.slots
	}
	return w, w.own >= 0, nil
}

// maxSlots bounds the workers of one node.
const maxSlots = 4096

// base is the first rank of a group rank's workers.
func (w world) base(group int) (n int) {
	for _, at := range w.seats[:group] {
		n += at.slots
	}
	return n
}

func (w world) place(restarts int) *job.Place {
	base := w.base(w.own)
	return &job.Place{
		GroupRank: w.own, GroupWorldSize: len(w.seats), RankBase: base, WorldSize: w.size, RoleRankBase: base,
		RoleWorldSize: w.size, RestartCount: restarts, MasterAddr: w.addr, MasterPort: w.port, WorkerStore: true,
	}
}

// key is where the agents of a world keep something (MasterKVStore and PrefixStore in DLRover's agent).
func (w world) key(name string) string {
	return fmt.Sprintf("%s/torch.rendezvous.%s.%d.%d/%s", w.name, w.name, w.round, w.group, name)
}

// The keys that agents know, below a world's.
const (
	masterAddr    = "MASTER_ADDR"
	masterPort    = "MASTER_PORT"
	terminalState = "torchelastic/agent/terminal_state"
	fin           = ".FIN"
	lastMember    = terminalState + "/last_member"
	numMembers    = terminalState + "/num_members"
)

// memberKey is the key of a launcher's entry, which only launchers read.
func memberKey(group int) string { return fmt.Sprintf("dlrover-run/member/%d", group) }

func (s *Service) set(ctx context.Context, key string, value []byte) error {
	fields := []pyproto.Field{{Name: "key", Value: key}, {Name: "value", Value: value}}
	return s.cfg.Client.Report(ctx, s.pair("set", fields...))
}

// pair is a message about one key. To 0.4 there was no op.
func (s *Service) pair(op string, fields ...pyproto.Field) *pyproto.Message {
	if s.cfg.Client.Dialect() != pyproto.Grpc {
		fields = append(fields, pyproto.Field{Name: "op", Value: op})
	}
	return s.cfg.Client.New("KeyValuePair", fields...)
}

// get is the value of a key: bytes, text or a number; empty if there is none.
func (s *Service) get(ctx context.Context, key string) (any, error) {
	m, err := s.cfg.Client.Get(ctx, s.pair("get", pyproto.Field{Name: "key", Value: key},
		pyproto.Field{Name: "value", Value: []byte{}}))
	if err != nil {
		return nil, err
	}
	return m.Get("value"), nil
}

func (s *Service) text(ctx context.Context, key string) (string, error) {
	v, err := s.get(ctx, key)
	return string(pyproto.BytesOf(v)), err
}

// add counts at a key. To 0.4 agents did it in two steps, and so does this.
func (s *Service) add(ctx context.Context, key string) (int, error) {
	if s.cfg.Client.Dialect() == pyproto.Grpc {
		text, err := s.text(ctx, key)
		if err != nil {
			return 0, err
		}
		n, _ := strconv.Atoi(text)
		return n + 1, s.set(ctx, key, []byte(strconv.Itoa(n+1)))
	}
	m, err := s.cfg.Client.Get(ctx, s.pair("add", pyproto.Field{Name: "key", Value: key},
		pyproto.Field{Name: "value", Value: 1}))
	if err != nil {
		return 0, err
	}
	return m.Int("value"), nil
}

// askWorld asks whether the world that this node has joined is complete.
func (s *Service) askWorld(ctx context.Context, turn int) error {
	_, p := s.self()
	n, err := s.waitingFor(ctx, training)
	if err != nil {
		return err
	}
	if again, err := s.checkAgain(ctx, turn); err != nil || again {
		return err
	}
	w, mine, err := s.worldNamed(ctx, training)
	if err != nil {
		return err
	}
	text := s.formed(w, mine, n < 0, turn)
	switch {
	case text != "":
		return s.timedOut(ctx, training, text, p.JoinTimeout)
	case n >= 0 && s.forgotten(w, n):
		return s.asideIs(s.enlist(ctx, turn, training, w.round))
	}
	return nil
}

// forgotten reports that the master, which counts waiting nodes, no longer has this node's join. Either it was started
// again, or it has sealed a world with this node that another node's join has made void.
func (s *Service) forgotten(w world, waiting int) bool {
	waited := time.Since(s.joined)
	return len(w.seats) == 0 && (w.round != s.round || waiting == 0 && waited > s.every.ask || waited > 10*s.every.ask)
}

// checkAgain takes part in the check that another node waits for: it has been started again, and is checked first.
func (s *Service) checkAgain(ctx context.Context, turn int) (bool, error) {
	if s.cfg.Check.Test == nil {
		return false, nil
	}
	n, err := s.waitingFor(ctx, checking)
	if err != nil || n <= 0 {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if turn == s.turn {
		s.enter(inCheck)
	}
	return true, nil
}

// worldNamed asks for the world of a rendezvous; mine: this node is in it.
func (s *Service) worldNamed(ctx context.Context, name string) (w world, mine bool, err error) {
	m, err := s.cfg.Client.Get(ctx, s.request("CommWorldRequest", name))
	if err != nil {
		return w, false, err
	}
	return readWorld(m, s.cfg.Rank)
}

func (s *Service) request(kind, name string) *pyproto.Message {
	node, _ := s.self()
	return s.cfg.Client.New(kind, pyproto.Field{Name: "node_id", Value: s.cfg.Rank},
		pyproto.Field{Name: "local_world_size", Value: node.Slots}, pyproto.Field{Name: "rdzv_name", Value: name})
}

// formed handles the master's answer. It returns a text if time is up.
func (s *Service) formed(w world, mine, stopping bool, turn int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case turn != s.turn:
	case mine:
		s.sealed(w)
	case len(w.seats) > 0:
		s.since = time.Now() // a spare: no limit of the join counts
	case stopping:
		s.fail(job.Cause{Kind: job.CauseOperator, Text: "the master is ending the job"})
	case time.Since(s.since) > s.params.JoinTimeout:
		text := fmt.Sprintf("too few nodes within %s: need %d to %d", s.params.JoinTimeout, s.params.Min, s.params.Max)
		s.fail(job.Cause{Kind: job.CauseTimeout, Text: text})
		return text
	}
	return ""
}

// waiting is the master's count of nodes that want to be in the next world; -1: the job is ending. Where nodes are
// checked they come to the check first.
func (s *Service) waiting(ctx context.Context) (int, error) {
	n, err := s.waitingFor(ctx, training)
	if err != nil || n != 0 || s.cfg.Check.Test == nil {
		return n, err
	}
	return s.waitingFor(ctx, checking)
}

func (s *Service) waitingFor(ctx context.Context, name string) (int, error) {
	m, err := s.cfg.Client.Get(ctx, s.request("WaitingNodeNumRequest", name))
	return m.Int("waiting_num"), err
}

// sealed begins an epoch, with s locked. Its numbers are this launcher's own, until the leader has published others.
func (s *Service) sealed(w world) {
	s.world, s.barrier = w, barrier{}
	s.epochs++
	s.dir.EpochID = job.EpochID{Term: s.term, Round: max(w.round, 1), Epoch: s.epochs}
	s.failures = nil
	if w.own == 0 {
		s.enter(leading)
		s.direct(rendezvous.Directive{Kind: job.Lead})
		return
	}
	s.enter(following)
}

// ready publishes the workers' meeting place to the other nodes, and then starts its own.
func (s *Service) ready(ctx context.Context, e rendezvous.Ready) error {
	s.mu.Lock()
	w, current := s.world, s.phase == leading && e.EpochID == s.dir.EpochID
	s.mu.Unlock()
	if !current {
		return nil
	}
	s.publish(ctx, w)
	if err := s.show(ctx, w, e.Addr, e.Port); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.phase == leading && e.EpochID == s.dir.EpochID {
		s.begin(e.Addr, e.Port)
	}
	return nil
}

// epochKey is the key of the leader's name for the epoch. The nodes of a world need one name for it: their checkpoint
// daemons know by it which shards belong together.
const epochKey = "dlrover-run/epoch"

// show publishes the epoch's name and the workers' meeting place. The address comes last: a node that sees it sees the
// rest as well.
func (s *Service) show(ctx context.Context, w world, addr string, port int) error {
	s.mu.Lock()
	e := s.dir.EpochID
	s.mu.Unlock()
	if err := s.set(ctx, w.key(epochKey), fmt.Appendf(nil, "%d.%d.%d", e.Term, e.Round, e.Epoch)); err != nil {
		return err
	}
	if err := s.set(ctx, w.key(masterPort), []byte(strconv.Itoa(port))); err != nil {
		return err
	}
	return s.set(ctx, w.key(masterAddr), []byte(addr))
}

func (s *Service) showAgain(ctx context.Context) error {
	s.mu.Lock()
	w, due := s.world, s.phase == running && s.world.own == 0 && time.Since(s.shown) > s.every.show
	s.mu.Unlock()
	if !due {
		return nil
	}
	s.shown, s.shownAt = time.Now(), w.key(masterAddr)
	return s.show(ctx, w, w.addr, w.port)
}

// hide removes the address that showAgain has published. A restarted master counts its rounds anew. The nodes of the
// next world with the number of this one would use this one's meeting place.
func (s *Service) hide(ctx context.Context) error {
	if s.shownAt == "" {
		return nil
	}
	err := s.set(ctx, s.shownAt, []byte{})
	if err == nil {
		s.shownAt = ""
	}
	return err
}

// begin starts the workers, with s locked.
func (s *Service) begin(addr string, port int) {
	s.world.addr, s.world.port, s.ran = addr, port, s.dir.EpochID
	s.enter(running)
	s.direct(rendezvous.Directive{Kind: job.Run, Cause: s.cause})
	s.cause = nil
}

// askAddress asks where the workers meet.
func (s *Service) askAddress(ctx context.Context, turn int) error {
	s.mu.Lock()
	w := s.world
	s.mu.Unlock()
	addr, port, err := s.address(ctx, w)
	if err != nil || port == 0 {
		return s.leaderless(ctx, turn, err)
	}
	epoch, err := s.epoch(ctx, w)
	if err != nil {
		return err
	}
	if s.past(epoch) {
		return s.leaderless(ctx, turn, nil)
	}
	s.publish(ctx, w)
	s.mu.Lock()
	defer s.mu.Unlock()
	if turn != s.turn {
		return nil
	}
	if epoch.Round > 0 {
		s.dir.EpochID = epoch
	}
	s.begin(addr, port)
	return nil
}

// past reports whether an epoch has run here already. Then its leader has published the address to a restarted master,
// and has not removed it, such as after its death.
func (s *Service) past(e job.EpochID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return e.Round > 0 && e.Term == s.ran.Term && e.Epoch <= s.ran.Epoch
}

// epoch is the leader's name for the epoch; zero where it is an agent of DLRover's, which has no name for it.
func (s *Service) epoch(ctx context.Context, w world) (e job.EpochID, err error) {
	text, err := s.text(ctx, w.key(epochKey))
	if n, _ := fmt.Sscanf(text, "%d.%d.%d", &e.Term, &e.Round, &e.Epoch); n < 3 || e.Round < 1 || e.Epoch < 0 {
		return job.EpochID{}, err
	}
	return e, err
}

// address is the one that the leader of a world has published; port 0: nothing yet.
func (s *Service) address(ctx context.Context, w world) (addr string, port int, err error) {
	if addr, err = s.text(ctx, w.key(masterAddr)); err != nil || addr == "" {
		return "", 0, err
	}
	text, err := s.text(ctx, w.key(masterPort))
	if err != nil || text == "" {
		return "", 0, err
	}
	if port, err = strconv.Atoi(text); err != nil || port < 1 || port > 65535 {
		return "", 0, fmt.Errorf("the leader's address is %q", net.JoinHostPort(addr, text))
	}
	return addr, port, nil
}

// leaderless goes back to the master where the leader does not come, such as when it has died: a node that waits is
// there for the next world.
func (s *Service) leaderless(ctx context.Context, turn int, err error) error {
	if err != nil {
		return err
	}
	n, err := s.waitingFor(ctx, training)
	checked := n != 0 // as the waiting nodes were; to check this node again would draw in the others, for ever
	if err == nil && !checked && s.cfg.Check.Test != nil {
		n, err = s.waitingFor(ctx, checking)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	late := s.params.JoinTimeout
	switch {
	case turn != s.turn || n <= 0 && time.Since(s.since) < late:
		late = 0
	case n > 0:
		late = 0
		next := s.before()
		if next == inCheck && checked {
			next = joining
		}
		s.enter(next)
	default:
		s.fail(job.Cause{Kind: job.CauseTimeout, Text: noLeader})
	}
	s.mu.Unlock()
	if late == 0 {
		return nil
	}
	return s.timedOut(ctx, training, noLeader, late)
}

// noLeader is why a run ends whose leader has neither come nor been replaced.
const noLeader = "the node of the first rank has not told where the workers meet within the join timeout"

// publish stores this node's entry, for presets that need the table of the world. Its failure shows when the table is
// read.
func (s *Service) publish(ctx context.Context, w world) {
	m := job.Member{GroupRank: w.own, Node: s.node.Name, Addr: s.node.Addr, Addrs: s.node.Addrs,
		RankBase: w.base(w.own), Slots: w.seats[w.own].slots, Role: s.node.Role, Ports: s.node.Ports, Bases: s.node.Bases}
	data, err := json.Marshal(m)
	if err == nil {
		err = s.set(ctx, w.key(memberKey(w.own)), data)
	}
	if err != nil {
		s.cfg.Log.Debug("cannot tell the other nodes of this one", "err", err)
	}
}

// tableTime bounds the wait for the entries of other launchers; agents have none.
const tableTime = 5 * time.Second

func (s *Service) members(ctx context.Context, w world) ([]job.Member, error) {
	ctx, cancel := context.WithTimeout(ctx, tableTime)
	defer cancel()
	ms := make([]job.Member, len(w.seats))
	for i, at := range w.seats {
		ms[i] = s.member(ctx, w, i)
		ms[i].GroupRank, ms[i].RankBase, ms[i].Slots = i, w.base(i), at.slots
	}
	return ms, nil
}

func (s *Service) member(ctx context.Context, w world, group int) job.Member {
	m := job.Member{Node: fmt.Sprintf("node-%d", w.seats[group].rank)}
	for {
		v, err := s.get(ctx, w.key(memberKey(group)))
		if data := pyproto.BytesOf(v); err == nil && len(data) > 0 {
			_ = json.Unmarshal(data, &m) // an unreadable entry counts as empty
			return m
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return m
		}
	}
}
