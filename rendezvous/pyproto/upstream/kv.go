package upstream

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// The keys that agents know, below a world's.
const (
	masterAddr    = "MASTER_ADDR"
	masterPort    = "MASTER_PORT"
	terminalState = "torchelastic/agent/terminal_state"
	fin           = ".FIN"
	lastMember    = terminalState + "/last_member"
	numMembers    = terminalState + "/num_members"
)

// epochKey is the key of the leader's name for the epoch. The nodes of a world need one name for it: their checkpoint
// daemons know by it which shards belong together.
const epochKey = "dlrover-run/epoch"

// memberKey is the key of a launcher's entry, which only launchers read.
func memberKey(group int) string { return fmt.Sprintf("dlrover-run/member/%d", group) }

// kvStore is the master's key-value store.
type kvStore struct {
	client *pyproto.Client
	log    *slog.Logger
}

func (k kvStore) set(ctx context.Context, key string, value []byte) error {
	fields := []pyproto.Field{{Name: "key", Value: key}, {Name: "value", Value: value}}
	return k.client.Report(ctx, k.pair("set", fields...))
}

// pair is a message about one key. To 0.4 there was no op.
func (k kvStore) pair(op string, fields ...pyproto.Field) *pyproto.Message {
	if k.client.Dialect() != pyproto.Grpc {
		fields = append(fields, pyproto.Field{Name: "op", Value: op})
	}
	return k.client.New("KeyValuePair", fields...)
}

// get is the value of a key: bytes, text or a number; empty if there is none.
func (k kvStore) get(ctx context.Context, key string) (any, error) {
	m, err := k.client.Get(ctx, k.pair("get", pyproto.Field{Name: "key", Value: key},
		pyproto.Field{Name: "value", Value: []byte{}}))
	if err != nil {
		return nil, err
	}
	return m.Get("value"), nil
}

func (k kvStore) text(ctx context.Context, key string) (string, error) {
	v, err := k.get(ctx, key)
	return string(pyproto.BytesOf(v)), err
}

// add counts at a key. To 0.4 agents did it in two steps, and so does this.
func (k kvStore) add(ctx context.Context, key string) (int, error) {
	if k.client.Dialect() == pyproto.Grpc {
		text, err := k.text(ctx, key)
		if err != nil {
			return 0, err
		}
		n, _ := strconv.Atoi(text)
		return n + 1, k.set(ctx, key, []byte(strconv.Itoa(n+1)))
	}
	m, err := k.client.Get(ctx, k.pair("add", pyproto.Field{Name: "key", Value: key},
		pyproto.Field{Name: "value", Value: 1}))
	if err != nil {
		return 0, err
	}
	return m.Int("value"), nil
}

// lead publishes the epoch's name and the workers' meeting place. The address comes last: a node that sees it sees the
// rest as well.
func (k kvStore) lead(ctx context.Context, w world, e job.EpochID, addr string, port int) error {
	if err := k.set(ctx, w.key(epochKey), fmt.Appendf(nil, "%d.%d.%d", e.Term, e.Round, e.Epoch)); err != nil {
		return err
	}
	if err := k.set(ctx, w.key(masterPort), []byte(strconv.Itoa(port))); err != nil {
		return err
	}
	return k.set(ctx, w.key(masterAddr), []byte(addr))
}

// epoch is the leader's name for the epoch; zero where it is an agent of DLRover's, which has no name for it.
func (k kvStore) epoch(ctx context.Context, w world) (e job.EpochID, err error) {
	text, err := k.text(ctx, w.key(epochKey))
	if n, _ := fmt.Sscanf(text, "%d.%d.%d", &e.Term, &e.Round, &e.Epoch); n < 3 || e.Round < 1 || e.Epoch < 0 {
		return job.EpochID{}, err
	}
	return e, err
}

// address is the one that the leader of a world has published; port 0: nothing yet.
func (k kvStore) address(ctx context.Context, w world) (addr string, port int, err error) {
	if addr, err = k.text(ctx, w.key(masterAddr)); err != nil || addr == "" {
		return "", 0, err
	}
	text, err := k.text(ctx, w.key(masterPort))
	if err != nil || text == "" {
		return "", 0, err
	}
	if port, err = strconv.Atoi(text); err != nil || port < 1 || port > 65535 {
		return "", 0, fmt.Errorf("the leader's address is %q", net.JoinHostPort(addr, text))
	}
	return addr, port, nil
}

// publish stores this node's entry, for presets that need the table of the world. Its failure shows when the table is
// read.
func (k kvStore) publish(ctx context.Context, w world, n rendezvous.Node) {
	data, err := json.Marshal(job.Member{GroupRank: w.own, Node: n.Name, Addr: n.Addr, Addrs: n.Addrs,
		RankBase: w.base(w.own), Slots: w.nodes[w.own].slots, Role: n.Role, Ports: n.Ports, Bases: n.Bases})
	if err == nil {
		err = k.set(ctx, w.key(memberKey(w.own)), data)
	}
	if err != nil {
		k.log.Debug("cannot tell the other nodes of this one", "err", err)
	}
}

// tableTime bounds the wait for the entries of other launchers; agents have none.
const tableTime = 5 * time.Second

func (k kvStore) members(ctx context.Context, w world) ([]job.Member, error) {
	ctx, cancel := context.WithTimeout(ctx, tableTime)
	defer cancel()
	ms := make([]job.Member, len(w.nodes))
	for i, at := range w.nodes {
		ms[i] = k.member(ctx, w, i)
		ms[i].GroupRank, ms[i].RankBase, ms[i].Slots = i, w.base(i), at.slots
	}
	return ms, nil
}

func (k kvStore) member(ctx context.Context, w world, group int) job.Member {
	m := job.Member{Node: fmt.Sprintf("node-%d", w.nodes[group].rank)}
	for {
		v, err := k.get(ctx, w.key(memberKey(group)))
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

// takeBlame records that workers of this node have failed by themselves. If it does not arrive, others pay as well.
func (k kvStore) takeBlame(ctx context.Context, w world) {
	if err := k.set(ctx, w.key(blameKey), []byte{'1'}); err != nil {
		k.log.Debug("cannot tell the other nodes that the failure is this one's", "err", err)
	}
}
