package hang

import (
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
)

var dawn = time.Unix(1_700_000_000, 0)

// stage is an Incident with a world of nodes of two workers each, which answer what they are asked.
type stage struct {
	t       testing.TB
	c       *Incident
	now     time.Time
	world   World
	verdict func() Verdict
	saved   int64 // -1: no checkpoint is known
	judged  [][]Evidence

	mute     map[int]bool   // nodes that do not answer
	steps    map[int]uint64 // of ranks
	pageless bool           // nobody has a page
	runs     int            // the rank whose main thread runs then
	spins    []int          // ranks that wait for their devices, running
	answers  time.Duration  // how long nodes take for evidence
	looks    time.Duration  // when nodes look, after each full second
	due      []answer

	asks   []Ask
	notes  []job.Note
	orders []Order
	doubts int
	at     map[string]time.Duration // when something of the kind happened last, since dawn
}

type answer struct {
	at   time.Time
	node int
	ask  Ask
}

func newStage(t testing.TB, action Action, nodes int) *stage {
	s := &stage{t: t, now: dawn, saved: -1, mute: map[int]bool{}, steps: map[int]uint64{}, answers: 5 * time.Second,
		at: map[string]time.Duration{}}
	s.verdict = func() Verdict { return behind(2) }
	s.c = NewIncident(IncidentConfig{
		Spec: Spec{Action: action}, Seq: 100,
		Judge: func(w World, es iter.Seq[Evidence], _ []StoreWait) Verdict {
			require.Equal(t, s.world, w)
			s.judged = append(s.judged, slices.Collect(es))
			return s.verdict()
		},
		Saved: func() (int64, bool) { return s.saved, s.saved >= 0 },
	})
	s.begin(0, nodes)
	return s
}

// behind is a verdict about rank 2, which is node 1's.
func behind(rank int) Verdict {
	return Verdict{
		Kind: KindBehind, Confidence: High, Waiting: "0-1,3", In: "all_reduce #246",
		Suspects: []Suspect{{Rank: rank, Node: fmt.Sprintf("n%d", rank/2), GroupRank: rank / 2, Doing: "asleep"}},
		Tell:     20 * time.Second, Deadline: 20 * time.Second,
	}
}

// A node without workers has nothing to say, and is not waited for.
func TestNodesWithoutWorkersAreNotAsked(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.world.Nodes[0].Slots, s.world.Nodes[1].RankBase = 0, 0
	s.world.Epoch.Epoch++
	s.step(Begin{World: s.world})
	s.suspect(0, 1)
	require.Equal(t, 1, s.c.file.missing)
	require.Equal(t, []int{1}, s.c.Picture(false).Silent)
}

func (s *stage) begin(epoch, nodes int) {
	s.world = World{Epoch: job.EpochID{Term: 1, Round: 1, Epoch: epoch}}
	for i := range nodes {
		s.world.Nodes = append(s.world.Nodes, WorldNode{fmt.Sprintf("n%d", i), 2 * i, 2})
	}
	s.due = nil
	s.step(Begin{World: s.world})
}

func (s *stage) step(ev IncidentEvent) {
	for _, a := range s.c.Step(s.now, ev) {
		switch {
		case a.Ask != nil:
			s.asked(*a.Ask)
		case a.Note != nil:
			s.notes = append(s.notes, *a.Note)
			s.at[string(a.Note.Event)] = s.now.Sub(dawn)
		case a.Order != nil:
			s.orders = append(s.orders, *a.Order)
			s.at["order"] = s.now.Sub(dawn)
		case a.Doubt != "":
			s.doubts++
		}
	}
	if next := s.c.Next(); !next.IsZero() {
		require.True(s.t, next.After(s.now), "%s: Next is %s ago", s.c.state, s.now.Sub(next))
	}
}

func (s *stage) asked(a Ask) {
	if n := len(s.asks); n > 0 {
		require.Greater(s.t, a.Seq, s.asks[n-1].Seq)
	}
	require.Equal(s.t, s.world.Epoch, a.Epoch)
	s.asks = append(s.asks, a)
	s.at[string(a.What)] = s.now.Sub(dawn)
	waits := map[askKind]time.Duration{AskEvidence: s.answers, AskPages: 50 * time.Millisecond, AskStacks: time.Second}
	wait := waits[a.What]
	for i := range s.world.Nodes {
		if wait > 0 && !s.mute[i] {
			s.due = append(s.due, answer{s.now.Add(wait), i, a})
		}
	}
}

// evidence is what a node finds now: three looks, or one.
func (s *stage) evidence(node int, what askKind) (es []Evidence) {
	n := s.world.Nodes[node]
	for rank := n.RankBase; rank < n.RankBase+n.Slots; rank++ {
		w := Worker{Rank: rank, PID: 1000 + rank, Start: 7}
		e := Evidence{Worker: w}
		looks := map[askKind]int{AskEvidence: 3}[what]
		for i := range max(looks, 1) {
			p := &Page{Rank: rank, Steps: s.steps[rank], StepTimes: []time.Duration{1}}
			at := s.now.Sub(dawn) + time.Duration(i)
			x := Sample{Worker: w, At: at, Page: p}
			if s.pageless {
				x.Page = nil
			}
			if s.pageless && (rank == s.runs || slices.Contains(s.spins, rank)) {
				x.Proc.Switches = uint64(at / time.Millisecond)
			}
			e.Samples = append(e.Samples, x)
		}
		if what != AskPages {
			e.Stacks = &Stacks{Interpreter: "CPython 3.11"}
			if slices.Contains(s.spins, rank) {
				e.Stacks = onDeviceStacks()
			}
		}
		es = append(es, e)
	}
	return es
}

// suspect has nodes say that they have made no progress since dawn, plus since.
func (s *stage) suspect(since time.Duration, nodes ...int) {
	for _, i := range nodes {
		s.hear(i, Report{Suspicions: s.suspicions(i, since)})
	}
}

// suspicions are what a node knows by its newest look.
func (s *stage) suspicions(node int, since time.Duration) []Suspicion {
	looked := (s.now.Sub(dawn)-s.looks)/lookPeriod*lookPeriod + s.looks
	return []Suspicion{{Rank: 2 * node, Age: looked - since, Limit: 10 * time.Second, Why: "no step"}}
}

func (s *stage) hear(node int, r Report) {
	r.Epoch = s.world.Epoch
	s.step(Heard{node, r})
}

// pass lets time pass: answers come, and nodes repeat what they suspect since then, unless that is negative.
func (s *stage) pass(d, since time.Duration) {
	end, repeat := s.now.Add(d), s.now.Add(RepeatEvery)
	for {
		at := end
		for _, t := range []time.Time{s.c.Next(), repeat} {
			if !t.IsZero() && t.Before(at) {
				at = t
			}
		}
		next := -1
		for i, a := range s.due {
			if a.at.Before(at) {
				at, next = a.at, i
			}
		}
		s.now = at
		switch {
		case next >= 0:
			a := s.due[next]
			s.due = append(s.due[:next:next], s.due[next+1:]...)
			s.answer(a.node, a.ask, since)
		case at.Equal(end):
			s.step(Tick{})
			return
		case at.Equal(repeat):
			repeat = repeat.Add(RepeatEvery)
			if since >= 0 {
				for i := range s.world.Nodes {
					s.suspect(since, i)
				}
			}
		default:
			s.step(Tick{})
		}
	}
}

func (s *stage) answer(node int, a Ask, since time.Duration) {
	r := Report{Ask: a.Seq, Evidence: s.evidence(node, a.What)}
	if since >= 0 {
		r.Suspicions = s.suspicions(node, since)
	}
	s.hear(node, r)
}

func (s *stage) whats() (w []askKind) {
	for _, a := range s.asks {
		w = append(w, a.What)
	}
	return w
}

// hangs: the workers make no progress after dawn, which is seen after 12 s.
func (s *stage) hangs() {
	s.now = dawn.Add(12 * time.Second)
	s.suspect(0, 0, 1)
}

func TestFromSuspicionToVerdict(t *testing.T) {
	s := newStage(t, ActReport, 2)
	require.Equal(t, StateIdle, s.c.Picture(true).State)
	s.hangs()
	require.Equal(t, []askKind{AskEvidence}, s.whats(), "one question, whoever suspects")
	require.Equal(t, "rank 0 (node 0 n0) has made no progress for 12 s: no step", s.notes[0].Text)
	require.Equal(t, StateAsking, s.c.Picture(false).State)
	require.Equal(t, s.asks[0], s.c.Pending(1))
	s.pass(6*time.Second, 0)
	require.Equal(t, StateWaiting, s.c.Picture(false).State)
	require.Len(t, s.judged[0], 4)
	require.Zero(t, s.c.Pending(1))
	s.pass(10*time.Second, 0)
	require.Equal(t, []askKind{AskEvidence, AskPages, TellVerdict}, s.whats())
	require.GreaterOrEqual(t, s.at["hang-verdict"], 22*time.Second, "10 s after the first suspicion")
	require.LessOrEqual(t, s.at["hang-verdict"], 23*time.Second)
	p := s.c.Picture(true)
	require.Equal(t, StateWaiting, p.State, "it is told, but may still go on")
	line := "rank 2 (node 1 n1) hung for 22 s: asleep; ranks 0-1,3 wait in all_reduce #246"
	require.Equal(t, line, s.notes[1].Text)
	require.Equal(t, Ask{
		Seq: s.asks[2].Seq, Judge: 100, Incident: p.Incident, Epoch: s.world.Epoch, What: TellVerdict, Line: line,
		Kind: KindBehind, Confidence: High, Age: p.Verdicts[0].Verdict.Age, Suspects: []int{2}, Waiting: "0-1,3",
		Action: ActReport,
	}, s.asks[2])
	require.Equal(t, "n1", s.notes[1].Node)
	require.InDelta(t, 22, p.Verdicts[0].Verdict.Age.Seconds(), 1, "since the last progress")
	require.Len(t, p.Evidence, 4)
	require.Len(t, p.Evidence[2].Samples, 4, "three looks and the confirmation")
	require.NotNil(t, p.Evidence[2].Stacks, "pages do not take them away")
	require.Nil(t, p.Evidence[2].Samples[0].Page.StepTimes)
	require.NotNil(t, p.Evidence[2].Samples[3].Page.StepTimes)
	require.Equal(t, "n1", p.Evidence[2].Node)
	require.Positive(t, s.c.Held())
	s.pass(time.Hour, 0)
	last := s.asks[len(s.asks)-1]
	require.True(t, last.Decided && last.Again, "%+v", last)
	require.InDelta(t, actLate.Seconds(), last.Age.Seconds(), 1)
	require.LessOrEqual(t, len(s.asks), 9)
	require.Len(t, s.notes, 3)
	require.Equal(t, job.EventHangDecided, s.notes[2].Event)
	require.True(t, s.c.Picture(false).Verdicts[0].Decided)
	require.Empty(t, s.orders)
	require.Equal(t, StateDecided, s.c.Picture(false).State)
	before := len(s.asks)
	s.pass(time.Hour, 0)
	require.Len(t, s.asks, before, "a decided case costs nothing")
}

// A node's suspicions are as old as its newest look, whenever in a second it looks, and however long its answers take.
func TestVerdictIsInTimeWheneverNodesLook(t *testing.T) {
	for i := range 400 {
		s := newStage(t, ActReport, 2)
		s.looks, s.answers = time.Duration(i%20)*50*time.Millisecond, 4*time.Second+time.Duration(i/20)*50*time.Millisecond
		s.verdict = func() Verdict { v := behind(2); v.Tell, v.Deadline = 25*time.Second, 25*time.Second; return v }
		s.hangs()
		s.pass(25*time.Second, 0)
		require.Equal(t, []askKind{AskEvidence, AskPages, TellVerdict}, s.whats(), "%s %s", s.looks, s.answers)
		require.LessOrEqual(t, s.at["hang-verdict"], 27*time.Second)
	}
}

// When much was asked lately each question has to wait for its turn, but the verdict is told.
func TestVerdictWithLittleRoomToAsk(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.now = dawn.Add(12 * time.Second)
	s.c.asker.room = bucket{at: s.now}
	s.suspect(0, 0, 1)
	s.pass(40*time.Second, 0)
	require.Equal(t, []askKind{AskEvidence, AskPages, TellVerdict}, s.whats())
	require.Equal(t, askEvery+12*time.Second, s.at[string(AskEvidence)])
	require.Equal(t, 2*askEvery+12*time.Second, s.at[string(AskPages)])
}

// A rank that has made progress since its node was heard last is suspected from then on.
func TestProgressBetweenSuspicions(t *testing.T) {
	s := newStage(t, ActReport, 1)
	s.verdict = func() Verdict { v := behind(1); v.Tell, v.Deadline = 90*time.Second, 90*time.Second; return v }
	s.now = dawn.Add(12 * time.Second)
	s.suspect(0, 0)
	s.pass(20*time.Second, 2*time.Second) // late, of the same look
	require.Equal(t, dawn, s.c.suspicions.nodes[0].since)
	s.now = s.now.Add(12 * time.Second)
	s.suspect(33*time.Second, 0)
	require.Equal(t, dawn.Add(33*time.Second), s.c.suspicions.nodes[0].since)
	s.hear(0, Report{Suspicions: []Suspicion{{Rank: 1, Age: 11 * time.Second, Limit: 10 * time.Second}}})
	require.Equal(t, s.now.Add(-11*time.Second), s.c.suspicions.nodes[0].since, "of another rank")
}

func TestActions(t *testing.T) {
	const line = "rank 2 (node 1 n1) hung for 180 s: asleep; ranks 0-1,3 wait in all_reduce #246"
	for action, want := range map[Action][]Order{
		ActReport:  nil,
		ActRestart: {{ActRestart, job.EpochID{Term: 1, Round: 1}, line}},
		ActStop:    {{ActStop, job.EpochID{Term: 1, Round: 1}, line}},
	} {
		t.Run(string(action), func(t *testing.T) {
			s := newStage(t, action, 2)
			s.hangs()
			s.pass(150*time.Second, 0)
			require.Empty(t, s.orders)
			s.pass(30*time.Second, 0)
			require.Equal(t, want, s.orders)
			require.Equal(t, action, s.asks[len(s.asks)-1].Action)
			require.Equal(t, action, s.c.Picture(false).Verdicts[0].Action)
			s.step(Over{s.world.Epoch})
			s.pass(time.Minute, -1)
			p := s.c.Picture(true)
			require.Equal(t, StateIdle, p.State)
			require.Len(t, p.Evidence, 4, "somebody has yet to write the report")
			s.pass(keepTime, -1)
			p = s.c.Picture(true)
			require.Empty(t, p.Evidence)
			require.Len(t, p.Verdicts, 1)
			require.Zero(t, s.c.Next(), "an idle case needs no time")
		})
	}
}

func TestProgressWithdraws(t *testing.T) {
	t.Run("the nodes say so", func(t *testing.T) {
		s := newStage(t, ActRestart, 2)
		s.hangs()
		s.pass(time.Second, 0)
		s.hear(0, Report{})
		require.Equal(t, []askKind{AskEvidence}, s.whats(), "node 1 still suspects something")
		s.hear(1, Report{})
		require.Equal(t, []askKind{AskEvidence, TellOver}, s.whats())
		require.Equal(t, job.EventHangWithdrawn, s.notes[1].Event)
		s.pass(time.Minute, -1)
		require.Empty(t, s.orders)
	})
	t.Run("the pages say so", func(t *testing.T) {
		s := newStage(t, ActRestart, 2)
		s.hangs()
		s.pass(8*time.Second, 0)
		s.steps[3] = 1
		s.pass(3*time.Second, 0)
		require.Equal(t, []askKind{AskEvidence, AskPages, TellOver}, s.whats())
		require.Contains(t, s.notes[1].Text, "rank 3 makes progress")
		require.Empty(t, s.orders)
	})
	t.Run("not of those that wait for their devices", func(t *testing.T) {
		s := newStage(t, ActReport, 2)
		s.pageless, s.runs, s.spins = true, -1, []int{0, 1, 3}
		s.hangs()
		s.pass(18*time.Second, 0)
		require.Len(t, s.c.Picture(false).Verdicts, 1)
	})
	for name, change := range map[string]func(*stage){
		"but then the suspect's own":     func(s *stage) { s.runs = 2 },
		"of those that wait without one": func(s *stage) { s.spins = []int{0, 1}; s.runs = 3 },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, ActReport, 2)
			s.pageless, s.runs, s.spins = true, -1, []int{0, 1, 3}
			change(s)
			s.hangs()
			s.pass(18*time.Second, 0)
			require.Contains(t, s.notes[1].Text, "makes progress")
		})
	}
	t.Run("those of who neither hangs nor waits do not", func(t *testing.T) {
		s := newStage(t, ActRestart, 2)
		s.verdict = func() Verdict { v := behind(2); v.Waiting = "0"; return v }
		s.hangs()
		s.pass(8*time.Second, 0)
		s.steps[3] = 1
		s.pass(actLate, 0)
		require.Len(t, s.orders, 1)
	})
	t.Run("after the verdict", func(t *testing.T) {
		s := newStage(t, ActReport, 2)
		s.hangs()
		s.pass(18*time.Second, 0)
		require.False(t, s.c.Picture(false).Verdicts[0].Withdrawn)
		s.hear(0, Report{})
		s.hear(1, Report{})
		require.True(t, s.c.Picture(false).Verdicts[0].Withdrawn)
	})
	t.Run("what is not repeated counts no more", func(t *testing.T) {
		s := newStage(t, ActRestart, 2)
		s.mute[0], s.mute[1] = true, true
		s.verdict = func() Verdict { return Verdict{} }
		s.hangs()
		s.pass(time.Minute, -1)
		require.Equal(t, TellOver, s.asks[len(s.asks)-1].What)
		require.Zero(t, s.c.Picture(false).Suspecting)
	})
}

// Who is busy has the time of its phase, and is looked at now and then meanwhile.
func TestDeadlines(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.verdict = func() Verdict { v := behind(2); v.Kind, v.Tell, v.Deadline = KindBusy, 0, 10*time.Minute; return v }
	s.hangs()
	s.pass(9*time.Minute, 0)
	require.Empty(t, s.orders)
	require.LessOrEqual(t, len(s.asks), 8, "looks become rare")
	s.pass(90*time.Second, 0)
	require.Len(t, s.orders, 1)
	require.GreaterOrEqual(t, s.at["order"], 10*time.Minute)
	require.LessOrEqual(t, s.at["order"], 10*time.Minute+10*time.Second)
	require.Less(t, s.at["order"]-s.at["evidence"], 12*time.Second, "evidence is fresh")
}

// What stays the same is told after a while, however long it may last; a phase with a name is not.
func TestWhatStaysTheSameIsTold(t *testing.T) {
	busy := func(int) Verdict {
		v := behind(2)
		v.Kind, v.Tell, v.Deadline = KindBusy, 10*time.Minute, 10*time.Minute
		return v
	}
	for _, c := range []struct {
		name    string
		verdict func(n int) Verdict
		told    time.Duration
		doubt   string
		paused  time.Duration
	}{
		{"busy", busy, steadyTime, "it may take its time", 0},
		{"busy, in a run that has paused for longer", busy, 4 * time.Minute, "it may take its time", 4 * time.Minute},
		{"all in the same collective", func(int) Verdict {
			return Verdict{Kind: KindComm, Confidence: High, Waiting: "0-3", Tell: long, Deadline: long}
		}, steadyTime, "it may take its time", 0},
		{"a checkpoint", func(n int) Verdict { v := busy(n); v.Phase = PhaseCheckpoint; return v }, long, "", 0},
		{"a phase without a right to last", func(n int) Verdict { v := busy(n); v.Phase = PhaseData; return v }, steadyTime,
			"it may take its time", 0},
		{"others every time", func(n int) Verdict { v := busy(n); v.Suspects[0].Rank += n % 2; return v }, 0, "", 0},
		{"others at first", func(n int) Verdict { v := busy(n); v.Suspects[0].Rank += min(n, 5); return v },
			150 * time.Second, "it may take its time", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, n := newStage(t, ActReport, 2), 0
			s.verdict = func() Verdict { n++; return c.verdict(n) }
			if c.paused > 0 {
				s.hear(0, Report{Paused: c.paused})
			}
			s.hangs()
			s.pass(20*time.Minute, 0)
			told := s.c.Picture(false).Verdicts
			if c.told == 0 {
				require.Empty(t, told)
				return
			}
			require.NotEmpty(t, told)
			require.InDelta(t, c.told.Seconds(), told[0].At.Sub(dawn).Seconds(), 10)
			require.Equal(t, c.doubt, told[0].Verdict.Doubt)
		})
	}
}

// Without pages the main thread of a suspect may run, or wake up, without getting on; those that wait may not.
func TestProgressFromOutside(t *testing.T) {
	for rank, want := range map[int]int{2: 1, 3: 0} {
		s := newStage(t, ActReport, 2)
		s.pageless, s.runs = true, rank
		s.hangs()
		s.pass(20*time.Second, 0)
		require.Len(t, s.c.Picture(false).Verdicts, want, "rank %d runs", rank)
	}
}

// That a node has not answered again is no sign that its ranks rest.
func TestSilentRanksDoNotRest(t *testing.T) {
	for muted, want := range map[int]int{0: 0, 1: 1} { // the suspect runs, unless its node is the silent one
		s := newStage(t, ActReport, 2)
		s.pageless, s.runs, s.spins = true, 2, []int{0, 1, 3}
		s.hangs()
		s.pass(6*time.Second, 0)
		s.mute[muted] = true
		s.pass(14*time.Second, 0)
		require.Len(t, s.c.Picture(false).Verdicts, want, "node %d is silent", muted)
	}
}

func TestToldBeforeItIsActedUpon(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.verdict = func() Verdict {
		v := behind(2)
		v.Kind, v.Tell, v.Deadline = KindComm, 20*time.Second, 2*time.Minute
		return v
	}
	s.hangs()
	s.pass(time.Minute, 0)
	require.InDelta(t, 22, s.at["hang-verdict"].Seconds(), 1)
	require.Equal(t, ActReport, s.c.Picture(false).Verdicts[0].Action, "nothing has been done")
	require.False(t, s.c.Picture(false).Verdicts[0].Decided)
	require.Zero(t, s.doubts, "it may be slow; certificates stay")
	require.Empty(t, s.orders)
	s.pass(2*time.Minute, 0)
	require.Len(t, s.orders, 1)
	require.InDelta(t, 180, s.at["order"].Seconds(), 1)
	require.Equal(t, 1, s.doubts, "the network is to be checked")
	require.Len(t, s.c.Picture(false).Verdicts, 1, "it is told once")
	require.Equal(t, ActRestart, s.c.Picture(false).Verdicts[0].Action)
}

// A rank that may take a day, such as one in a debugger, is no reason to wait as long for another one.
func TestAnotherSuspectHasItsOwnTime(t *testing.T) {
	for name, first := range map[string][]int{"the first": {2}, "after as many as are told": {2, 3, 4}} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, ActRestart, 3)
			now, day := first[0], 24*time.Hour
			s.verdict = func() Verdict {
				v := behind(now)
				if now != 5 {
					v.Deadline = day
				}
				return v
			}
			s.hangs()
			for _, rank := range first {
				now = rank
				s.pass(2*time.Minute, 0)
			}
			require.Len(t, s.c.Picture(false).Verdicts, len(first))
			now = 5
			s.pass(10*time.Minute, 0)
			require.Len(t, s.orders, 1)
			told := s.c.Picture(false).Verdicts
			require.Equal(t, 5, told[len(told)-1].Verdict.Suspects[0].Rank)
		})
	}
}

func TestLowConfidenceActsLater(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.c.patience.after = 10 * time.Second
	low := func() Verdict { v := behind(2); v.Confidence, v.Doubt = Low, "no pages"; return v }
	s.verdict = low
	s.hangs()
	s.pass(18*time.Second, 0)
	require.InDelta(t, 20, s.at["hang-verdict"].Seconds(), 1)
	require.Empty(t, s.orders)
	s.pass(50*time.Second, 0)
	require.Len(t, s.orders, 1)
	require.GreaterOrEqual(t, s.at["order"], lowWait)
}

// A user who wants to hear after four seconds hears then.
func TestAShortTimeoutTellsEarly(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.c.patience.after, s.answers = 4*time.Second, time.Second
	s.now = dawn.Add(4 * time.Second)
	for node := range 2 {
		ss := s.suspicions(node, 0)
		ss[0].Limit = 4 * time.Second
		s.hear(node, Report{Suspicions: ss})
	}
	s.pass(4*time.Second, 0)
	require.InDelta(t, 6, s.at["hang-verdict"].Seconds(), 1)
	require.Equal(t, High, s.c.Picture(false).Verdicts[0].Verdict.Confidence)
	require.Empty(t, s.orders)
	s.pass(time.Minute, 0)
	require.Len(t, s.orders, 1)
	require.InDelta(t, 21, s.at["order"].Seconds(), 2, "an early word is no reason to act early, nor late")
	require.Len(t, s.c.Picture(false).Verdicts, 1)
}

// How long nothing is done depends on what the user wants, on what the run has recovered from, and on what is certain.
func TestPatience(t *testing.T) {
	for _, c := range []struct {
		name    string
		after   time.Duration
		paused  time.Duration
		certain bool
		want    time.Duration
	}{
		{"by default", 0, 0, false, actLate},
		{"short pauses change nothing", 0, 50 * time.Second, false, actLate},
		{"three times the longest pause", 0, 90 * time.Second, false, 270 * time.Second},
		{"one of hours counts as one of an hour", 0, 9 * time.Hour, false, 3 * time.Hour},
		{"the user's time", 40 * time.Second, 0, false, 40 * time.Second},
		{"the user's time, and pauses", 40 * time.Second, time.Minute, false, 3 * time.Minute},
		{"what cannot end by itself", 0, time.Hour, true, 22 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStage(t, ActRestart, 2)
			s.c.patience.after = c.after
			s.verdict = func() Verdict { v := behind(2); v.Certain = c.certain; return v }
			s.hear(0, Report{Paused: c.paused})
			s.hangs()
			s.pass(4*time.Hour, 0)
			require.Len(t, s.orders, 1)
			require.InDelta(t, 22, s.at["hang-verdict"].Seconds(), 1)
			require.InDelta(t, c.want.Seconds(), s.at["order"].Seconds(), 1)
		})
	}
}

// A launcher that cannot speak says nothing of its workers: what was told stands, and nothing is done.
func TestSilenceIsNoProgress(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.hangs()
	s.pass(18*time.Second, 0)
	s.mute[0], s.mute[1] = true, true
	s.pass(time.Hour, -1)
	require.Empty(t, s.orders)
	p := s.c.Picture(false)
	require.Equal(t, StateIdle, p.State)
	require.Len(t, p.Verdicts, 1)
	require.False(t, p.Verdicts[0].Withdrawn)
	require.NotContains(t, s.whats(), TellOver)
	s.mute = map[int]bool{}
	s.suspect(0, 0)
	s.pass(time.Minute, 0)
	require.Len(t, s.orders, 1, "it speaks again, and nothing has changed")
}

// What was told before the silence is taken back when a suspect's node speaks again and suspects nothing.
func TestProgressAfterSilence(t *testing.T) {
	for name, verdict := range map[string]func() Verdict{
		"a suspect": func() Verdict { return behind(2) },
		"no suspect": func() Verdict {
			return Verdict{Kind: KindComm, Confidence: High, Waiting: "0-3", Tell: 20 * time.Second, Deadline: time.Hour}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, ActReport, 2)
			s.verdict = verdict
			s.hangs()
			s.pass(18*time.Second, 0)
			s.mute[0], s.mute[1] = true, true
			s.pass(time.Hour, -1)
			require.Equal(t, StateIdle, s.c.Picture(false).State)
			if len(verdict().Suspects) > 0 {
				s.hear(0, Report{})
				require.False(t, s.c.Picture(false).Verdicts[0].Withdrawn, "it is another node's worker that hung")
			}
			s.hear(1, Report{})
			require.True(t, s.c.Picture(false).Verdicts[0].Withdrawn)
			over := s.asks[len(s.asks)-1]
			require.Equal(t, TellOver, over.What)
			require.Equal(t, s.c.Picture(false).Verdicts[0].Incident, over.Incident)
			before := len(s.asks)
			s.hear(1, Report{})
			require.Len(t, s.asks, before, "it is taken back once")
		})
	}
}

func TestAnotherSuspectIsNotBlamedAtOnce(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	n := 0
	s.verdict = func() Verdict { n++; return behind(1 + min(n, 2)) } // rank 2, then 3
	s.hangs()
	s.pass(11*time.Second, 0)
	require.Equal(t, []askKind{AskEvidence, AskPages}, s.whats())
	require.Empty(t, s.orders)
	s.pass(8*time.Second, 0)
	require.Contains(t, s.notes[1].Text, "rank 3 (node 1 n1) hung")
}

func TestNothingCanBeSaid(t *testing.T) {
	s := newStage(t, ActStop, 2)
	s.verdict = func() Verdict { return Verdict{Kind: KindSlow} }
	s.hangs()
	s.pass(10*time.Minute, 0)
	require.NotContains(t, s.whats(), TellVerdict)
	require.Empty(t, s.orders)
	require.LessOrEqual(t, len(s.asks), 8)
}

func TestSilentNodes(t *testing.T) {
	s := newStage(t, ActRestart, 3)
	s.mute[2] = true
	s.hangs()
	s.pass(9*time.Second, 0)
	require.Empty(t, s.judged)
	require.Equal(t, []int{2}, s.c.Picture(false).Silent)
	s.mute[1] = true // a suspect that says nothing to the second question
	s.pass(2*time.Second, 0)
	require.Len(t, s.judged[0], 4, "10 s later it is judged without them")
	s.pass(10*time.Second, 0)
	v := s.c.Picture(false).Verdicts[0].Verdict
	require.Equal(t, Low, v.Confidence)
	require.Contains(t, v.Line, "(uncertain: node 1 n1 did not answer")
	require.LessOrEqual(t, s.at["hang-verdict"], 28*time.Second)
	require.Empty(t, s.orders)
}

func TestLateEvidenceIsBetterThanNone(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.mute[1] = true
	s.hangs()
	s.pass(9*time.Second, 0)
	s.mute[1] = false
	s.pass(time.Second+1, 0)
	require.Len(t, s.judged[0], 2)
	s.answer(1, s.asks[0], 0)
	s.pass(8*time.Second, 0)
	require.Len(t, s.judged[1], 4)
	require.Equal(t, High, s.c.Picture(false).Verdicts[0].Verdict.Confidence)
}

// Nodes that are too busy to answer in time may be so at the next look as well.
func TestLateEvidenceIsJudgedWhenItComes(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.answers = 12 * time.Second
	s.verdict = func() Verdict {
		if len(s.judged[len(s.judged)-1]) < 4 {
			return Verdict{}
		}
		return behind(2)
	}
	s.hangs()
	s.pass(15*time.Second, 0)
	require.Equal(t, []askKind{AskEvidence, AskPages, TellVerdict}, s.whats())
	require.Less(t, s.at["hang-verdict"], 26*time.Second)
	for _, evidence := range s.judged {
		require.NotEqual(t, 2, len(evidence), "that of the other node is on its way")
	}
}

func TestEvidenceThatNobodyWants(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.hangs()
	s.mute[0], s.mute[1] = true, true
	s.due = nil
	ask := s.asks[0]
	strange := s.evidence(1, AskEvidence)
	s.hear(0, Report{Ask: ask.Seq, Evidence: strange, Suspicions: []Suspicion{{}}})
	require.Empty(t, s.c.Picture(true).Evidence, "those are node 1's ranks")
	s.hear(0, Report{Ask: ask.Seq, Evidence: s.evidence(0, AskEvidence), Suspicions: []Suspicion{{}}})
	require.Empty(t, s.c.Picture(true).Evidence, "it has answered")
	s.hear(1, Report{Ask: ask.Seq + 7, Evidence: strange, Suspicions: []Suspicion{{}}})
	s.hear(1, Report{Ask: ask.Incident, Evidence: strange, Suspicions: []Suspicion{{}}})
	s.hear(1, Report{Evidence: strange, Suspicions: []Suspicion{{}}})
	s.step(Heard{1, Report{Epoch: job.EpochID{Term: 9, Round: 9, Epoch: 9}, Ask: ask.Seq, Evidence: strange}})
	s.step(Heard{7, Report{Epoch: s.world.Epoch, Ask: ask.Seq, Evidence: strange}})
	require.Empty(t, s.c.Picture(true).Evidence)
	s.hear(1, Report{Ask: ask.Seq, Evidence: strange, Suspicions: []Suspicion{{}}})
	require.Len(t, s.c.Picture(true).Evidence, 2)
}

// restartOften hangs in one epoch after the other, of which each has made that many steps, until the run is stopped.
func (s *stage) restartOften(epochs int, steps func(epoch int) uint64, life time.Duration) {
	for epoch := range epochs {
		if epoch > 0 {
			s.step(Over{s.world.Epoch})
			s.begin(epoch, 2)
		}
		s.steps[0] = steps(epoch)
		s.pass(life, -1)
		began := s.now.Sub(dawn)
		s.now = s.now.Add(12 * time.Second)
		s.suspect(began, 0, 1)
		s.pass(actLate, began)
	}
}

func (s *stage) actions() (as []Action) {
	for _, o := range s.orders {
		as = append(as, o.Action)
	}
	return as
}

func TestFruitlessRestarts(t *testing.T) {
	const elsewhere = 1 << 20 // steps from which on each hang is in another line
	twice := []Action{ActRestart, ActRestart, ActRestart, ActStop}
	often := []Action{ActRestart, ActRestart, ActRestart, ActRestart}
	for name, c := range map[string]struct {
		saved func(epoch int) int64
		steps func(epoch int) uint64
		life  time.Duration
		want  []Action
	}{
		"no step":                       {nil, func(int) uint64 { return 0 }, time.Second, twice},
		"the same steps, no checkpoint": {nil, func(int) uint64 { return 3 }, time.Second, twice},
		"fewer steps, no checkpoint":    {nil, func(e int) uint64 { return 9 - uint64(e) }, time.Second, twice},
		"more steps, no checkpoint":     {nil, func(e int) uint64 { return 5 + uint64(e) }, time.Second, often},
		"the same steps, elsewhere":     {nil, func(e int) uint64 { return elsewhere + 3 }, time.Second, often},
		"the same steps after long":     {nil, func(int) uint64 { return 3 }, longEpoch, twice},
		"other steps after long":        {nil, func(e int) uint64 { return 9000 - uint64(e) }, longEpoch, often},
		"no step is known, after long":  {nil, func(int) uint64 { return 0 }, longEpoch, twice},
		"the same steps from a save on": {func(int) int64 { return 7 }, func(int) uint64 { return 5 }, time.Second, twice},
		"further with every restart": {func(int) int64 { return 7 }, func(e int) uint64 { return 5 + uint64(e) }, 1,
			often},
		"a newer save": {func(e int) int64 { return int64(e) }, func(int) uint64 { return 5 }, 1, often},
		"the first save": {func(e int) int64 { return min(int64(e)-1, 0) }, func(int) uint64 { return 5 }, 1,
			often},
	} {
		again := func(t *testing.T, replaced bool) {
			s := newStage(t, ActRestart, 2)
			epoch := 0
			s.verdict = func() Verdict {
				v := behind(2)
				if v.Suspects[0].Where.Line = 12; c.steps(0) > elsewhere {
					v.Suspects[0].Where.Line += epoch
				}
				return v
			}
			s.restartOften(4, func(e int) uint64 {
				if epoch = e; replaced && e > 0 {
					s.replace()
				}
				if c.saved != nil {
					s.saved = c.saved(e)
				}
				return c.steps(e)
			}, c.life)
			require.Equal(t, c.want, s.actions())
			if c.want[3] == ActStop {
				require.Regexp(t, "^3 restarts for hangs have brought no newer step: rank 2 ", s.orders[3].Text)
				require.Equal(t, ActStop, s.asks[len(s.asks)-1].Action)
			}
		}
		t.Run(name, func(t *testing.T) { again(t, false) })
		t.Run(name+", by one judge after the other", func(t *testing.T) { again(t, true) })
	}
}

// Without pages nobody knows the steps, and a long time without a hang counts.
func TestRestartsFromOutsideHelpAfterLong(t *testing.T) {
	for life, want := range map[time.Duration]Action{time.Second: ActStop, longEpoch: ActRestart} {
		s := newStage(t, ActRestart, 2)
		s.pageless, s.runs = true, -1
		s.restartOften(4, func(int) uint64 { return 0 }, life)
		require.Equal(t, want, s.actions()[3], life)
	}
}

// replace has another process judge the present epoch, which has what this one has kept.
func (s *stage) replace() {
	s.t.Helper()
	data, err := json.Marshal(s.c.Kept())
	require.NoError(s.t, err)
	cfg := s.c.cfg
	cfg.Kept = Kept{}
	require.NoError(s.t, json.Unmarshal(data, &cfg.Kept))
	cfg.Seq += 1 << 40
	s.c, s.due = NewIncident(cfg), nil
	s.step(Begin{World: s.world})
}

// An Incident that begins after a hang has begun, as that of a new service, comes to the same verdict.
func TestJudgeIsReplacedBetweenSuspicionAndVerdict(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.hangs()
	s.pass(3*time.Second, 0)
	s.c = NewIncident(IncidentConfig{Spec: Spec{Action: ActRestart}, Seq: 1 << 60, Judge: s.c.cfg.Judge})
	s.due = nil
	s.step(Begin{World: s.world})
	s.pass(30*time.Second, 0)
	require.LessOrEqual(t, s.at["hang-verdict"], 40*time.Second)
	s.pass(actLate, 0)
	require.Len(t, s.orders, 1)
}

func TestCollection(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.step(Collect{})
	seq, recent := s.c.Collection()
	require.True(t, recent)
	require.Equal(t, []askKind{AskStacks}, s.whats())
	p := s.c.Picture(false)
	require.Equal(t, StateCollecting, p.State)
	require.False(t, p.Collected)
	s.step(Collect{})
	require.Len(t, s.asks, 1, "it is under way")
	s.pass(2*time.Second, -1)
	p = s.c.Picture(true)
	require.Equal(t, seq, p.Collection)
	require.True(t, p.Collected)
	require.Len(t, p.Evidence, 4)
	require.NotNil(t, p.Evidence[0].Stacks)
	require.Empty(t, s.judged, "no rank is blamed")
	s.pass(keepTime+time.Second, -1)
	require.Empty(t, s.c.Picture(true).Evidence)
	for range 2 * maxAsks {
		s.step(Collect{})
		s.pass(6*time.Second, -1)
	}
	require.Less(t, len(s.asks), 2*maxAsks, "nor are nodes asked all the time")
	_, recent = s.c.Collection()
	require.False(t, recent)
}

func TestCollectionOfSilentNodes(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.mute[1] = true
	s.step(Collect{})
	s.pass(collectTime-time.Second, -1)
	require.False(t, s.c.Picture(false).Collected)
	require.Equal(t, s.asks[0], s.c.Pending(1))
	s.pass(2*time.Second, -1)
	require.True(t, s.c.Picture(false).Collected)
	require.Equal(t, []int{1}, s.c.Picture(false).Silent)
}

// A hang that begins while stacks are collected takes nothing from who wants to see them, nor the other way round.
func TestCollectionBesideAnIncident(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.now = dawn.Add(11500 * time.Millisecond)
	s.step(Collect{})
	s.hangs()
	s.pass(2*time.Second, 0)
	p := s.c.Picture(true)
	require.True(t, p.Collected)
	require.Len(t, p.Evidence, 4)
	require.Equal(t, StateAsking, p.State)
	s.pass(5*time.Second, 0)
	s.step(Collect{})
	require.False(t, s.c.Picture(false).Collected)
	s.pass(2*time.Second, 0)
	require.True(t, s.c.Picture(false).Collected, "the nodes have answered this one, too")
	s.pass(13*time.Second, 0)
	s.pass(actLate, 0)
	require.Len(t, s.orders, 1)
}

// Who suspects and takes it back all the time costs the others little, and leaves room in the timeline.
func TestFlapping(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	for range 1000 {
		s.now = s.now.Add(100 * time.Millisecond)
		s.suspect(0, 0)
		s.hear(0, Report{})
	}
	require.Less(t, len(s.notes), 50)
	require.Less(t, len(s.asks), 50)
	s.pass(time.Minute, -1)
	began := s.now.Sub(dawn)
	s.pass(actLate+20*time.Second, began)
	require.Len(t, s.orders, 1, "and a hang is found all the same")
}

func TestOldEpochs(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.hangs()
	s.step(Begin{World: s.world})
	require.Equal(t, 2, s.c.Picture(false).Suspecting, "it is the same epoch")
	s.begin(1, 2)
	s.pass(time.Minute, -1)
	require.Equal(t, []askKind{AskEvidence}, s.whats(), "it has ended with its epoch")
	s.step(Over{job.EpochID{Term: 1, Round: 1}})
	_, live := s.c.Epoch()
	require.True(t, live, "that is long over")
	s.step(Over{s.world.Epoch})
	s.suspect(0, 0)
	require.Len(t, s.asks, 1)
	s.step(Collect{})
	require.Len(t, s.asks, 1, "no workers run")
}

// The evidence is kept for some time after an incident, and never forgotten in the middle of one.
func TestHowLongEvidenceIsKept(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.hangs()
	s.step(Collect{})
	s.pass(2*keepTime, 0)
	require.NotZero(t, s.c.File(), "it goes on")
	s.hear(0, Report{})
	s.hear(1, Report{})
	require.Equal(t, StateIdle, s.c.state)
	s.pass(keepTime-1, -1)
	require.NotZero(t, s.c.File())
	s.pass(1, -1)
	require.Zero(t, s.c.File())
}

// Stacks that are being collected are not asked for again, however long that takes.
func TestOneCollectionAtATime(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.mute[0] = true
	s.step(Collect{})
	s.pass(pagesTime+time.Second, -1)
	s.step(Collect{})
	require.Len(t, s.asks, 1)
	s.pass(collectTime, -1)
	s.step(Collect{})
	require.Len(t, s.asks, 2)
}

// What nodes say cannot make a time that lies nowhere.
func TestSuspicionsOfAnyAge(t *testing.T) {
	for _, age := range []time.Duration{0, -1, math.MaxInt64, math.MinInt64, 1} {
		s := newStage(t, ActRestart, 1)
		s.hear(0, Report{Suspicions: []Suspicion{{Age: age, Limit: age}}})
		for range 10 {
			s.pass(time.Second, -1)
			s.hear(0, Report{Suspicions: []Suspicion{{Age: age, Limit: age}}})
		}
		require.LessOrEqual(t, len(s.orders), 1)
	}
}

func TestTimeGoesBack(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.hangs()
	s.now = dawn
	s.suspect(0, 0)
	require.Equal(t, dawn.Add(12*time.Second), s.c.now)
}

func TestAsksFitIntoANotice(t *testing.T) {
	s := newStage(t, ActRestart, 2)
	s.verdict = func() Verdict {
		v := behind(2)
		v.In = strings.Repeat("ä\"", 4000)
		for i := range 500 {
			v.Suspects = append(v.Suspects, Suspect{Rank: 100_000 + i})
		}
		return v
	}
	s.hangs()
	s.pass(12*time.Second, 0)
	last := s.asks[len(s.asks)-1]
	require.Equal(t, TellVerdict, last.What)
	data, err := json.Marshal(last)
	require.NoError(t, err)
	require.Less(t, len(data), 4<<10)
}

func TestPictureIsBounded(t *testing.T) {
	s := newStage(t, ActReport, 200)
	for i := range 200 {
		s.hear(i, Report{Summary: &Summary{Slow: "slow"}, Suspicions: []Suspicion{{Rank: 2 * i}, {Rank: 2*i + 1}}})
	}
	s.pass(5*time.Second, 0)
	p := s.c.Picture(false)
	require.Equal(t, 200, p.Suspecting)
	require.Len(t, p.Suspicions, maxListed)
	require.Len(t, p.Slow, maxListed)
	require.Empty(t, p.Evidence)
	require.Empty(t, p.World.Nodes)
	for i := range 200 {
		s.hear(i, Report{Ask: s.asks[0].Seq, RAS: "ras", Store: make([]StoreWait, 2)})
	}
	p = s.c.Picture(true)
	require.Len(t, p.RAS, maxRAS)
	require.Len(t, p.Store, maxStoreWaits)
}

// A user may ask for an incident that there is not, and a node that there is not may report.
func TestNothingIsKnownOfNobody(t *testing.T) {
	s := newStage(t, ActReport, 2)
	require.Zero(t, s.c.File())
	require.Zero(t, s.c.Held())
	require.Zero(t, s.c.Pending(0))
	s.hangs()
	require.NotZero(t, s.c.File())
	for _, node := range []int{-1, 2} {
		require.Zero(t, s.c.Pending(node))
		s.hear(node, Report{Ask: s.asks[0].Seq, Suspicions: []Suspicion{{}}})
	}
	require.Zero(t, s.c.Held())
	require.Equal(t, 2, s.c.Picture(false).Suspecting)
	s.pass(6*time.Second, 0)
	require.Positive(t, s.c.Held())
	s.step(Over{s.world.Epoch})
	require.Zero(t, s.c.Pending(0))
}

func TestTheOldestSuspicionIsNamed(t *testing.T) {
	s := newStage(t, ActReport, 1)
	old := Suspicion{Rank: 1, Age: 40 * time.Second, Why: "w"}
	s.hear(0, Report{Suspicions: []Suspicion{{Rank: 0, Age: 11 * time.Second}, old}})
	require.Equal(t, "rank 1 (node 0 n0) has made no progress for 40 s: w", s.notes[0].Text)
}

// The second look shows that the same rank may take longer.
func TestWhatMayTakeLongerIsNotTold(t *testing.T) {
	s := newStage(t, ActReport, 2)
	s.verdict = func() Verdict {
		v := behind(2)
		if len(s.judged) > 1 {
			v.Tell, v.Deadline, v.Phase = 10*time.Minute, 10*time.Minute, PhaseCheckpoint
		}
		return v
	}
	s.hangs()
	s.pass(9*time.Minute, 0)
	require.NotContains(t, s.whats(), TellVerdict)
	s.pass(time.Minute, 0)
	require.Contains(t, s.whats(), TellVerdict)
}
