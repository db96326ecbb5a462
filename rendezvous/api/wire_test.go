package api

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/httperr"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
)

// testdata/wire/old holds what the first version of the protocol writes, and is never written again; testdata/wire/new
// holds the same and further messages with everything that came later.
var update = flag.Bool("update", false, "write testdata/wire/new anew")

var (
	wireSent    = time.Date(2026, 3, 1, 12, 0, 0, 5e8, time.UTC)
	wireFailure = job.Failure{
		Rank: 3, GroupRank: 1, Text: "rank 3 failed", At: wireSent.Add(-time.Second), Detail: json.RawMessage(`{"code":1}`),
	}
	wireEpoch = job.EpochID{Term: 1700000000000000000, Round: 2, Epoch: 1}
	wirePlace = job.Place{
		GroupRank: 1, GroupWorldSize: 2, RankBase: 2, WorldSize: 4, RoleRankBase: 2, RoleWorldSize: 4, RestartCount: 1,
		MasterAddr: "10.0.0.1", MasterPort: 29500,
	}
	wireCause  = &job.Cause{Kind: job.CauseFailure, Node: "worker-1", Text: "rank 3 failed"}
	wirePaused = &job.Cause{Kind: job.CauseOperator, Text: "maintenance"}
	wireBarred = &job.Cause{Kind: job.CauseCheck, Node: "worker-1", Text: "GPU 3: 41 GB/s, need 300"}
)

func wireParams() rendezvous.Params {
	return rendezvous.Params{
		Min: 2, Max: 4, Unit: 2, LastCall: 30 * time.Second, JoinTimeout: 600 * time.Second, GrowthDelay: time.Second,
		MaxRestarts: 3, Always: true,
	}
}

func gatedParams() rendezvous.Params {
	p := wireParams()
	p.Gate, p.GateTimeout, p.Check = true, 5*time.Minute, "level=full ttl=10m0s"
	return p
}

func wireJoin() rendezvous.Join {
	return rendezvous.Join{
		Node: rendezvous.Node{
			ID: "0123456789abcdef", Name: "worker-1", Rank: 1, Generation: 2, Addr: "10.0.0.2", IP: "10.0.0.2",
			Addrs: []string{"10.0.0.2", "fd00::2"}, Slots: 2, Role: "trainer", Uptime: time.Second,
		},
		Params: wireParams(), Failures: []job.Failure{wireFailure}, Stopped: wireEpoch, Seen: wireEpoch, Restarts: 1,
		Resume: &rendezvous.Resume{
			EpochID: wireEpoch, Place: wirePlace, Decision: rendezvous.RestartCharged,
			Failures: []job.Failure{wireFailure},
		},
	}
}

func wireWorld() []job.Member {
	return []job.Member{
		{GroupRank: 0, Node: "worker-0", Addr: "10.0.0.1", Slots: 2},
		{GroupRank: 1, Node: "worker-1", Addr: "10.0.0.2", Addrs: []string{"10.0.0.2", "fd00::2"}, RankBase: 2,
			Slots: 2, Role: "trainer"},
	}
}

func wireRuns() []RunStatus {
	return []RunStatus{{
		Run: "job",
		Status: rendezvous.Status{
			Phase: "running", Round: 2, Epoch: 1, Params: wireParams(), Restarts: 1, Members: 2, WorldSize: 4,
		},
		Nodes: []rendezvous.NodeStatus{
			{Name: "worker-0", State: "member", GroupRank: 0, Addr: "10.0.0.1", Slots: 2, Connected: true},
			{Name: "worker-1", State: "member", GroupRank: 1, Slots: 2, Suspect: true},
		},
	}}
}

func wireRun() rendezvous.Directive {
	p := wireParams()
	return rendezvous.Directive{
		Seq: 8, Kind: job.Run, EpochID: wireEpoch, Place: &wirePlace, Restarts: 1, Cause: wireCause, Params: &p,
	}
}

// oldForms are the values of testdata/wire/old.
func oldForms() map[string]any {
	return map[string]any{
		"join-first": joinBody{rendezvous.Join{
			Node: rendezvous.Node{ID: "a", Name: "a", Rank: -1, Slots: 1}, Params: rendezvous.Params{Min: 1, Max: 1},
		}, sent{wireSent}},
		"join-again": joinBody{wireJoin(), sent{wireSent}},
		"ready":      readyBody{Ready: rendezvous.Ready{ID: "a", EpochID: wireEpoch, Addr: "10.0.0.1", Port: 29500}},
		"failing": failingBody{rendezvous.Failing{
			ID: "a", EpochID: wireEpoch, Decision: rendezvous.Permanent, Failures: []job.Failure{wireFailure},
		}, sent{wireSent}},
		"success": successBody{Success: rendezvous.Success{ID: "a", EpochID: wireEpoch}},
		"leave": leaveBody{
			rendezvous.Leave{ID: "a", Reason: "done", Failures: []job.Failure{wireFailure}}, sent{wireSent},
		},
		"watch-wait": News{
			Directive: rendezvous.Directive{Seq: 7, Kind: job.Wait, EpochID: job.EpochID{Term: 7}},
		},
		"watch-run": News{Directive: wireRun()},
		"watch-fail": News{
			Directive: rendezvous.Directive{Seq: 9, Kind: job.Fail, EpochID: wireEpoch, Restarts: 1, Cause: wireCause},
		},
		"evidence": job.Evidence{
			Outcome: job.Failed, Cause: wireCause, Failures: []job.Failure{wireFailure},
			Losses:   []job.Loss{{Node: "worker-0", Slots: 2, Reason: "silent for 15s", At: wireSent}},
			Restarts: 1, MaxRestarts: 3, WorldSize: 4,
		},
		"world": wireWorld(),
		"runs":  wireRuns(),
		"error": httperr.Body{Code: "taken", Error: "the node rank is taken"},
	}
}

// newForms are those of testdata/wire/new. Where old has the same name, they are the same with what came later.
func newForms() map[string]any {
	join, world, runs, run, p := wireJoin(), wireWorld(), wireRuns(), wireRun(), gatedParams()
	join.Node.Ports, join.Node.Can = []int{40000, 40001}, []rendezvous.Ability{rendezvous.CanGate, rendezvous.CanNotice}
	join.Params, join.Paused, join.Barred = p, wirePaused, wireBarred
	world[1].Ports = []int{40000, 40001}
	runs[0].Params, runs[0].Paused, runs[0].Bars = p, wirePaused, map[string]job.Cause{"worker-1": *wireBarred}
	runs[0].Nodes[1].Barred = wireBarred
	run.Paused, run.Barred, run.Params = wirePaused, wireBarred, &p
	failure := wireFailure
	failure.Fingerprint = "exit code 1"
	lost := job.Loss{Node: "worker-0", Slots: 2, Reason: "silent for 15s", At: wireSent, Silent: true}
	return map[string]any{
		"join-again": joinBody{join, sent{wireSent}},
		"watch-run": News{
			Directive: run, Notices: []job.Notice{{Seq: 1700000000000000001, Topic: "log-level", Body: "debug"}},
			NoticeSeq: 1700000000000000001,
		},
		"evidence": job.Evidence{
			Outcome: job.Failed, Cause: wireCause, Failures: []job.Failure{wireFailure},
			Losses: []job.Loss{lost}, Restarts: 1, MaxRestarts: 3, WorldSize: 4,
		},
		"world": world,
		"runs":  runs,
		"failing": failingBody{rendezvous.Failing{
			ID: "a", EpochID: wireEpoch, Decision: rendezvous.Permanent, Failures: []job.Failure{failure},
		}, sent{wireSent}},
		"watch-bar": News{
			Directive: rendezvous.Directive{Seq: 10, Kind: job.Bar, EpochID: wireEpoch, Cause: wireBarred},
		},
		"watch-idle": News{
			Directive: rendezvous.Directive{Seq: 7, Kind: job.Check, EpochID: job.EpochID{Term: 7}}, NoticeSeq: 7,
		},
		"cleared": clearedBody{rendezvous.Cleared{ID: "a", Until: wireSent.Add(time.Hour), Domain: "b1e0:7"}, sent{wireSent}},
		"doubt":   rendezvous.Doubt{ID: "a", Reason: "mlx5_0: link was down 1 time"},
		"barred":  rendezvous.Barred{ID: "a", Reason: "GPU 3: 41 GB/s, need 300"},
		"order": rendezvous.Order{
			Kind: rendezvous.OrderRestart, Cause: job.CauseHang, Text: "no step for 10 min", Charge: true,
		},
		"order-bar": rendezvous.Order{Kind: rendezvous.OrderBar, Node: "worker-1", Cause: job.CauseOperator},
		"notice":    noticeBody{Node: "worker-1", Topic: "log-level", Body: "debug"},
		"events": Events{Events: []Event{
			{Seq: 1700000000000000001, At: wireSent,
				Note: rendezvous.Note{Event: "join", Node: "worker-1", Text: "2 slots", Nodes: 1}},
			{Seq: 1700000000000000002, At: wireSent, Note: rendezvous.Note{Event: "seal", Round: 1, Nodes: 2, World: 4}},
		}, Next: 1700000000000000002},
		"error": httperr.Body{Code: "unknown_run", Error: `the rendezvous daemon has no such run: "job"`},
	}
}

func wireFile(dir, name string) string { return filepath.Join("testdata", "wire", dir, name+".json") }

// decodeAs decodes data into a new value of the type of like.
func decodeAs(t *testing.T, data []byte, like any) any {
	v := reflect.New(reflect.TypeOf(like))
	require.NoError(t, json.Unmarshal(data, v.Interface()))
	return v.Elem().Interface()
}

// What the first version wrote is read as it was meant, and without later features the answers are the same bytes: a
// launcher of that version meets this daemon, and the other way round.
func TestOldWire(t *testing.T) {
	for name, value := range oldForms() {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(wireFile("old", name))
			require.NoError(t, err)
			require.Equal(t, value, decodeAs(t, data, value))
			ours, err := json.Marshal(value)
			require.NoError(t, err)
			if name == "leave" { // the first version sent an epoch of zeros, which nobody read
				require.Equal(t, decodeAs(t, data, oldReport{}), decodeAs(t, ours, oldReport{}))
				return
			}
			require.Equal(t, string(data), string(ours)+"\n")
		})
	}
}

func TestNewWire(t *testing.T) {
	for name, value := range newForms() {
		t.Run(name, func(t *testing.T) {
			ours, err := json.Marshal(value)
			require.NoError(t, err)
			if *update {
				require.NoError(t, os.WriteFile(wireFile("new", name), append(ours, '\n'), 0o644))
			}
			data, err := os.ReadFile(wireFile("new", name))
			require.NoError(t, err)
			require.Equal(t, string(data), string(ours)+"\n")
			require.Equal(t, value, decodeAs(t, data, value))
		})
	}
}

// The first version reads our messages as if the later features were not there.
func TestNewWireInOldEyes(t *testing.T) {
	for name, like := range map[string]any{
		"join-again": oldJoin{}, "watch-run": oldDirective{}, "world": []oldMember{}, "runs": []oldRunStatus{},
	} {
		t.Run(name, func(t *testing.T) {
			before, err := os.ReadFile(wireFile("old", name))
			require.NoError(t, err)
			now, err := os.ReadFile(wireFile("new", name))
			require.NoError(t, err)
			require.NotEqual(t, string(before), string(now))
			require.Equal(t, decodeAs(t, before, like), decodeAs(t, now, like))
		})
	}
}

// The recorded files are all used.
func TestWireFilesAreKnown(t *testing.T) {
	for dir, forms := range map[string]map[string]any{"old": oldForms(), "new": newForms()} {
		files, err := filepath.Glob(wireFile(dir, "*"))
		require.NoError(t, err)
		require.Len(t, files, len(forms), dir)
	}
}

// The types of the first version, as far as they were on the wire.
type (
	oldNode struct {
		ID         string        `json:"id"`
		Name       string        `json:"name"`
		Rank       int           `json:"rank"`
		Generation int           `json:"generation,omitempty"`
		Addr       string        `json:"addr,omitempty"`
		IP         string        `json:"ip,omitempty"`
		Addrs      []string      `json:"addrs,omitempty"`
		Slots      int           `json:"slots"`
		Role       string        `json:"role,omitempty"`
		Uptime     time.Duration `json:"uptime,omitempty"`
	}
	oldParams struct {
		Min         int           `json:"min"`
		Max         int           `json:"max"`
		Unit        int           `json:"unit,omitempty"`
		LastCall    time.Duration `json:"last_call,omitempty"`
		JoinTimeout time.Duration `json:"join_timeout,omitempty"`
		GrowthDelay time.Duration `json:"growth_delay,omitempty"`
		MaxRestarts int           `json:"max_restarts"`
		Always      bool          `json:"always,omitempty"`
		Static      bool          `json:"static,omitempty"`
	}
	oldEpochID struct {
		Term  uint64 `json:"term"`
		Round int    `json:"round"`
		Epoch int    `json:"epoch"`
	}
	oldPlace struct {
		GroupRank      int    `json:"group_rank"`
		GroupWorldSize int    `json:"group_world_size"`
		RankBase       int    `json:"rank_base"`
		WorldSize      int    `json:"world_size"`
		RoleRankBase   int    `json:"role_rank_base"`
		RoleWorldSize  int    `json:"role_world_size"`
		RestartCount   int    `json:"restart_count"`
		MasterAddr     string `json:"master_addr,omitempty"`
		MasterPort     int    `json:"master_port,omitempty"`
	}
	oldCause struct {
		Kind string `json:"kind"`
		Node string `json:"node,omitempty"`
		Text string `json:"text"`
	}
	oldFailure struct {
		Rank      int             `json:"rank"`
		GroupRank int             `json:"group_rank"`
		Text      string          `json:"text"`
		At        time.Time       `json:"at"`
		Detail    json.RawMessage `json:"detail,omitempty"`
	}
	oldResume struct {
		oldEpochID
		Place    oldPlace     `json:"place"`
		Done     bool         `json:"done,omitempty"`
		Decision string       `json:"decision,omitempty"`
		Failures []oldFailure `json:"failures,omitempty"`
	}
	oldJoin struct {
		Node     oldNode      `json:"node"`
		Params   oldParams    `json:"params"`
		Failures []oldFailure `json:"failures,omitempty"`
		Stopped  oldEpochID   `json:"stopped,omitzero"`
		Seen     oldEpochID   `json:"seen,omitzero"`
		Restarts int          `json:"restarts,omitempty"`
		Resume   *oldResume   `json:"resume,omitempty"`
		SentAt   time.Time    `json:"sent_at"`
	}
	oldReport struct {
		ID string `json:"id"`
		oldEpochID
		Addr     string       `json:"addr,omitempty"`
		Port     int          `json:"port,omitempty"`
		Decision string       `json:"decision,omitempty"`
		Reason   string       `json:"reason,omitempty"`
		Failures []oldFailure `json:"failures,omitempty"`
		SentAt   time.Time    `json:"sent_at"`
	}
	oldDirective struct {
		Seq  uint64 `json:"seq"`
		Kind string `json:"kind"`
		oldEpochID
		Place    *oldPlace  `json:"place,omitempty"`
		Restarts int        `json:"restarts,omitempty"`
		Cause    *oldCause  `json:"cause,omitempty"`
		Params   *oldParams `json:"params,omitempty"`
	}
	oldMember struct {
		GroupRank int      `json:"group_rank"`
		Node      string   `json:"node"`
		Addr      string   `json:"addr,omitempty"`
		Addrs     []string `json:"addrs,omitempty"`
		RankBase  int      `json:"rank_base"`
		Slots     int      `json:"slots"`
		Role      string   `json:"role,omitempty"`
	}
	oldNodeStatus struct {
		Name      string `json:"name"`
		State     string `json:"state"`
		GroupRank int    `json:"group_rank"`
		Addr      string `json:"addr,omitempty"`
		Slots     int    `json:"slots"`
		Connected bool   `json:"connected"`
		Suspect   bool   `json:"suspect,omitempty"`
	}
	oldRunStatus struct {
		Run       string          `json:"run"`
		Phase     string          `json:"phase"`
		Round     int             `json:"round"`
		Epoch     int             `json:"epoch"`
		Params    oldParams       `json:"params"`
		Restarts  int             `json:"restarts"`
		Members   int             `json:"members"`
		Waiting   int             `json:"waiting"`
		WorldSize int             `json:"world_size"`
		Outcome   string          `json:"outcome,omitempty"`
		Cause     *oldCause       `json:"cause,omitempty"`
		Nodes     []oldNodeStatus `json:"nodes,omitempty"`
	}
)
