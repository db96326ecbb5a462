package rendezvous

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

// TestSnapshotKnowsEveryField fails when a field is added to the state and not to the Snapshot.
func TestSnapshotKnowsEveryField(t *testing.T) {
	for _, c := range []struct {
		state, snapshot reflect.Type
		other           string // fields that are kept under another name, are counted anew, or live for one Step only
	}{
		{reflect.TypeFor[Round](), reflect.TypeFor[Snapshot](),
			"cfg joined asked again out owing working acts told free commands spent"},
		{reflect.TypeFor[commands](), reflect.TypeFor[Snapshot](), ""},
		{reflect.TypeFor[node](), reflect.TypeFor[NodeSnapshot](), "rank dir"},
		{reflect.TypeFor[resume](), reflect.TypeFor[ResumeSnapshot](), ""},
	} {
		for i := range c.state.NumField() {
			name := c.state.Field(i).Name
			if strings.Contains(" "+c.other+" ", " "+name+" ") {
				continue
			}
			_, ok := c.snapshot.FieldByNameFunc(func(s string) bool { return strings.EqualFold(s, name) })
			require.True(t, ok, "%s.%s is in no snapshot", c.state.Name(), name)
		}
	}
}

// TestSnapshotKeepsEveryField takes every field through JSON and a Round.
func TestSnapshotKeepsEveryField(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 0).UTC() }
	c := func(text string) *job.Cause { return &job.Cause{Kind: job.CauseHang, Node: "n", Text: text} }
	id := job.EpochID{Term: 7, Round: 3, Epoch: 2}
	n := func(id string, arrival int) NodeSnapshot {
		return NodeSnapshot{
			Node: Node{ID: id, Name: id, Rank: arrival, Slots: 1}, State: "checking", GroupRank: 1,
			RankBase: 8, Arrival: arrival,
			Attached: 1, Detached: at(1), Broken: true, Silent: true, HungUp: true,
			Directive: Directive{Seq: 9, Kind: job.Check}, Differs: true, Failed: true, Cleared: true, Until: at(2),
			Domain: "rack", Bar: c("bar"), Again: true, Unsure: true, Late: true, Lone: true, Asked: true, Aside: true,
			Drained: c("drained"), Since: at(13), Starts: 3,
		}
	}
	s := Snapshot{
		Term: 5, Topology: Topology{"ip": "switch"}, Params: Params{Min: 1, Max: 2}, Phase: "gating", ID: id, Seq: 99,
		Arrive: 12, Done: 1, Restarts: 2, WorldSize: 16, Nodes: []NodeSnapshot{n("a", 1), n("b", 2), n("gone", 0)}, Here: 2,
		World: []int{2, 0}, Wishes: map[int]int{2: 1},
		Resume: &ResumeSnapshot{
			World: []int{1, -1}, Missing: 1, Until: at(3), Failing: []Failing{{ID: "a", EpochID: id, Decision: Permanent}},
			Stopped: []int{0}, Restart: &Order{Kind: OrderRestart, Charge: true},
		},
		Charge: true, Elastic: true, Short: true, Resumed: true, Held: true, Cause: c("cause"),
		Failures: []job.Failure{{Rank: 1, Text: "f", At: at(4), Detail: json.RawMessage(`{"x":1}`)}},
		Losses:   []job.Loss{{Node: "l", At: at(5)}},
		Gone:     map[string]*job.Cause{"g": c("g")}, Lacking: c("lack"), LackingFor: 17, SealedAt: at(15), FailAt: at(16),
		Ended:   []NodeStatus{{Name: "e", State: "failed"}},
		Outcome: job.Failed, Left: []string{"x", "y"}, Refused: []string{"z"},
		Bars: map[string]*job.Cause{"n": c("n"), "m": nil}, Paused: c("p"), PausedIn: &id, Unpaused: true,
		Hold: c("h"), Unheld: true, HeldWorld: true, Command: &job.Command{Program: []string{"x"}}, CommandIn: &id,
		OnResume: &job.Command{Args: []string{}},
		Account: account{
			Spent: Spent{
				Since: at(17), Streak: 1, Fruitless: 2, Same: 3, Sum: 4, Alike: "alike",
				Best:   job.Progress{Step: 1, Stepping: true, Checkpoint: 2, Saving: true},
				Recent: []Restarted{{at(18), "n", 3}}, Held: true, HeldUntil: at(19),
			},
			SpentIn: id, Toll: toll{true, true, true, "n", 4, "alike", "t"},
			Progress: job.Progress{Step: 3, Stepping: true, Checkpoint: 4, Saving: true}, RanAt: at(20),
			BrokeAt: at(21), Exhausted: 1, Decision: Hold, Rank0: true, Node0: true, Any: true, BackoffAt: at(22),
			PausedAt: at(23),
		},
		Works: []string{"w"}, FinishedAt: at(6), FormingAt: at(7), GateSince: at(8), GateAt: at(9), LastCallAt: at(10),
		CameAt: at(24), GrowAt: at(11),
		DoomAt: at(12), HoldAt: at(13), LiveAt: at(14), Rechecks: 1, Wary: map[string]bool{"n": true},
	}
	for _, v := range []reflect.Value{reflect.ValueOf(s), reflect.ValueOf(s.Nodes[0]), reflect.ValueOf(*s.Resume),
		reflect.ValueOf(s.Account), reflect.ValueOf(s.Account.Spent), reflect.ValueOf(s.Account.Toll)} {
		for i := range v.NumField() {
			require.False(t, v.Field(i).IsZero(), "%s.%s is not tried", v.Type().Name(), v.Type().Field(i).Name)
		}
	}
	text, err := json.Marshal(s)
	require.NoError(t, err)
	var read Snapshot
	require.NoError(t, json.Unmarshal(text, &read))
	r, err := Restore(Config{}, read)
	require.NoError(t, err)
	require.Equal(t, s, r.Snapshot())
	require.Equal(t, 2, r.again, "nodes are counted anew")
	require.Len(t, r.nodes, 2)
	require.True(t, r.left["x"] && r.left["y"] && r.refused["z"])
	require.NotSame(t, r.nodes["a"], r.world[0])
}

func TestRestoreRefusesWhatFitsNowhere(t *testing.T) {
	for want, change := range map[string]func(*Snapshot){
		`phase "asleep" is unknown`:            func(s *Snapshot) { s.Phase = "asleep" },
		"-1 nodes are here, of 1":              func(s *Snapshot) { s.Here = -1 },
		"2 nodes are here, of 1":               func(s *Snapshot) { s.Here = 2 },
		"world: node 1 is not between 0 and 0": func(s *Snapshot) { s.World = []int{1} },
		"world: node -1 is not":                func(s *Snapshot) { s.World = []int{-1} },
		"wishes: node 1":                       func(s *Snapshot) { s.Wishes = map[int]int{0: 1} },
		"world being rebuilt: node -2": func(s *Snapshot) {
			s.Resume = &ResumeSnapshot{World: []int{-2}}
		},
		"nodes that have stopped: node -1": func(s *Snapshot) {
			s.Resume = &ResumeSnapshot{Stopped: []int{-1}}
		},
		"world: nobody is in it, but the phase is running":              func(s *Snapshot) { s.Phase = "running" },
		"world: nobody is in it, but the phase is releasing":            func(s *Snapshot) { s.Phase = "releasing" },
		`rendezvous: bad snapshot: node "a": state "drowsy" is unknown`: func(s *Snapshot) { s.Nodes[0].State = "drowsy" },
	} {
		s := Snapshot{Phase: "forming", Nodes: []NodeSnapshot{{Node: Node{ID: "a"}, State: "waiting"}}, Here: 1}
		_, err := Restore(Config{}, s)
		require.NoError(t, err)
		change(&s)
		_, err = Restore(Config{}, s)
		require.ErrorContains(t, err, want)
	}
}
