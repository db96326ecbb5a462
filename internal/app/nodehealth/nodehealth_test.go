package nodehealth

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func after(d time.Duration) time.Time { return noon.Add(d) }

func names(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("n%03d", i)
	}
	return out
}

func find(node string, k Kind) Finding {
	return Finding{Node: node, Run: "r", Kind: k, Text: "as seen"}
}

// brief are acts in short.
func brief(acts []Act) (out []string) {
	for _, a := range acts {
		out = append(out, string(a.Do)+" "+a.Mark.Node)
	}
	return out
}

// sized is a Registry with one run of so many nodes.
func sized(n int) *Registry {
	b := New(Config{})
	b.Size(noon, "r", names(n))
	return b
}

func TestOneHardFindingMarks(t *testing.T) {
	for kind, marks := range map[Kind]bool{
		CheckFailed: true, Unkillable: true, Xid: true, ECC: true,
		Hang: false, Silent: false, Repeated: false, LogRule: false, "new-word": false, operator: false, "": false,
	} {
		b := sized(100)
		acts := b.Find(noon, find("n001", kind))
		require.Equal(t, marks, len(acts) == 1, kind)
		if !marks {
			require.Empty(t, b.Avoid(noon))
			continue
		}
		require.Equal(t, Apply, acts[0].Do)
		require.Equal(t, "r", acts[0].Run)
		require.Contains(t, acts[0].Text, "as seen")
		m := acts[0].Mark
		require.Equal(t, Mark{Node: "n001", Kind: kind, Aspect: aspects[kind], Reason: m.Reason, Evidence: "as seen",
			Run: "r", Since: noon, Until: after(4 * time.Hour), By: byPolicy}, m)
		require.NotEmpty(t, m.Reason)
		require.Equal(t, []string{"n001"}, b.Avoid(noon))
		require.Equal(t, []Mark{m}, b.Marks())
		require.True(t, b.Marked(noon, "n001"))
		require.False(t, b.Marked(m.Until, "n001"), "it has expired")
		require.False(t, b.Marked(noon, "n002") || b.Marked(noon, "unknown"))
		require.True(t, b.Noted("n001"))
		require.False(t, b.Noted("n002") || b.Noted("unknown"))
		require.Equal(t, []string{"r"}, b.RunsOf("n001"))
		require.Empty(t, b.RunsOf("unknown"))
		require.Equal(t, []string{"r"}, b.Runs())
	}
}

func TestSoftFindingsMarkWhenTheyAreRepeated(t *testing.T) {
	b := sized(100)
	require.Empty(t, b.Find(noon, find("n001", Hang)))
	require.Empty(t, b.Find(after(time.Minute), find("n001", Hang)), "the same again is no news")
	require.Empty(t, b.Find(after(time.Hour), find("n001", Hang)))
	acts := b.Find(after(2*time.Hour), find("n001", Silent))
	require.Equal(t, []string{"mark n001"}, brief(acts))
	require.Contains(t, acts[0].Mark.Reason, "3 findings")

	b = sized(100)
	require.Empty(t, b.Find(noon, find("n001", Hang)))
	require.Empty(t, b.Find(after(time.Hour), find("n001", Hang)))
	b.Tick(after(8 * 24 * time.Hour))
	require.Empty(t, b.Find(after(8*24*time.Hour), find("n001", Hang)), "old findings do not count")
}

// A loss that is NaN says nothing of the machine, however often it is told and whatever else is known.
func TestLogRulesAreToldAndNeverMark(t *testing.T) {
	b := sized(100)
	told := func(i int) Finding {
		return Finding{Node: "n001", Run: "r", Kind: LogRule, Text: fmt.Sprint("loss ", i)}
	}
	require.Empty(t, b.Find(noon, find("n001", Hang)))
	for i := range 100 {
		require.Empty(t, b.Find(after(time.Hour), told(i)))
	}
	require.Empty(t, b.Find(after(time.Hour), find("n001", Silent)), "they do not count for the third finding")
	require.Empty(t, b.Find(after(2*time.Hour), told(100)))
	var texts []string
	for _, f := range b.List(after(2 * time.Hour))[0].Findings {
		texts = append(texts, f.Text)
	}
	require.Equal(t, []string{"loss 100", "as seen", "loss 99", "loss 98", "loss 97", "as seen"}, texts,
		"they drive out no other")
	require.Equal(t, []string{"mark n001"}, brief(b.Find(after(3*time.Hour), find("n001", Device))))
	require.Empty(t, b.Find(after(4*time.Hour), told(101)), "and prolong no mark")
}

func TestMarksExpireAndNewFindingsProlongThem(t *testing.T) {
	b := sized(100)
	b.Find(noon, find("n001", ECC))
	require.Empty(t, b.Find(after(time.Minute), find("n001", ECC)), "the same again is no news")
	acts := b.Find(after(time.Hour), find("n001", Xid))
	require.Equal(t, []string{"mark n001"}, brief(acts))
	require.Equal(t, noon, acts[0].Mark.Since)
	require.Equal(t, after(5*time.Hour), acts[0].Mark.Until)

	require.Empty(t, b.Tick(after(5*time.Hour-1)))
	require.Equal(t, []string{"n001"}, b.Avoid(after(5*time.Hour-1)))
	require.Empty(t, b.Avoid(after(5*time.Hour)), "even before the tick")
	acts = b.Tick(after(5 * time.Hour))
	require.Equal(t, []string{"unmark n001"}, brief(acts))
	require.Equal(t, after(5*time.Hour), acts[0].Mark.Until, "who acts learns which mark it was")
	require.Empty(t, b.Tick(after(6*time.Hour)))
	require.Len(t, b.List(after(6 * time.Hour))[0].Findings, 2, "what was found stays")
}

// The same finding again and again is no news each time, and its node stays marked.
func TestFindingsThatGoOnProlongAMark(t *testing.T) {
	const every = 9 * time.Minute
	b, told, last := sized(100), 0, time.Duration(0)
	require.Empty(t, b.Find(noon, find("n002", Hang)))
	for at := time.Duration(0); at < 9*time.Hour; at += every {
		require.Empty(t, b.Tick(after(at)), "%v", at)
		told += len(b.Find(after(at), find("n001", ECC)))
		require.Empty(t, b.Find(after(at), find("n002", Hang)), "it counts once")
		last = at
	}
	require.Equal(t, 30, told, "every other one")
	require.Empty(t, b.Tick(after(last-every+4*time.Hour-1)))
	require.Equal(t, []string{"unmark n001"}, brief(b.Tick(after(last+4*time.Hour))))

	b = New(Config{Expiry: 10 * time.Second})
	b.Find(noon, find("n001", ECC))
	require.Empty(t, b.Find(after(5*time.Second-1), find("n001", ECC)))
	acts := b.Find(after(5*time.Second), find("n001", ECC))
	require.Equal(t, []string{"mark n001"}, brief(acts), "a mark that is short is renewed sooner")
	require.Equal(t, after(15*time.Second), acts[0].Mark.Until)
}

func TestTheNextTick(t *testing.T) {
	b := New(Config{Expiry: 10 * time.Minute})
	require.Zero(t, b.Next())
	require.Empty(t, b.Tick(noon))
	require.Zero(t, b.Next())
	b.Size(noon, "r", names(3))
	require.Equal(t, after(time.Hour), b.Next())
	b.Find(noon, find("n001", ECC))
	require.Equal(t, after(10*time.Minute), b.Next())
	_, err := b.SetMark(noon, "n002", "me", "", time.Time{})
	require.NoError(t, err)
	require.Equal(t, after(10*time.Minute), b.Next(), "an operator's mark stays")
	b.Tick(after(10 * time.Minute))
	require.Equal(t, after(time.Hour), b.Next())
	b.Clear(noon, "n002", "me", "")
	for at := noon; !b.Next().IsZero(); at = b.Next() {
		require.True(t, at.Before(after(9*24*time.Hour)), "a Registry that knows nothing has nothing to do")
		b.Tick(at)
	}
	require.Empty(t, b.nodes.of)

	b.Find(noon, Finding{Node: "n001", Kind: Hang})
	require.Equal(t, after(time.Hour), b.Next(), "a finding of no run is forgotten, too")
	b.Size(noon, "r", []string{"n001"}) // as many runs as nodes
	b.Tick(after(time.Hour))
	require.Equal(t, after(2*time.Hour), b.Next())
}

// of is a finding about one aspect.
func of(node string, k Kind, aspect string) Finding {
	f := find(node, k)
	f.Aspect, f.Text = aspect, string(k)+" "+aspect
	return f
}

func TestAPassedCheckClearsMarksOfThePolicy(t *testing.T) {
	b := sized(100)
	b.Find(noon, of("n001", CheckFailed, "network"))
	require.Empty(t, b.Passed(noon, "n002", "network"))
	require.Empty(t, b.Passed(noon, "unknown", "network"))
	require.Empty(t, b.Passed(noon, "n001", "health", "devices"), "what it has not looked at it does not clear")
	require.Empty(t, b.Passed(noon, "n001"))
	require.Equal(t, []string{"unmark n001"}, brief(b.Passed(after(time.Minute), "n001", "host", "network")))
	require.Empty(t, b.Passed(after(time.Minute), "n001", "network"))
	again := brief(b.Find(after(2*time.Minute), of("n001", CheckFailed, "network")))
	require.Equal(t, []string{"mark n001"}, again, "the same again is news once it was disproved")

	_, err := b.SetMark(noon, "n002", "me", "smoke", time.Time{})
	require.NoError(t, err)
	require.Empty(t, b.Passed(after(time.Minute), "n002", "network"), "not what an operator has said")
}

// A mark ends only by a check that can see what it rests on, whatever else that has seen.
func TestWhatACheckCanSee(t *testing.T) {
	all := []string{"host", "network", "pytorch", "health", "devices", "copies", "memory", "xids"}
	for _, c := range []struct {
		f  Finding
		by string // the aspect that clears it; "" is none
	}{
		{of("n001", CheckFailed, "network"), "network"}, {of("n001", CheckFailed, "health"), "health"},
		{of("n001", CheckFailed, ""), ""}, {of("n001", Xid, ""), "xids"}, {of("n001", ECC, ""), "memory"},
		{of("n001", Unkillable, ""), ""},
	} {
		b := sized(100)
		require.Equal(t, []string{"mark n001"}, brief(b.Find(noon, c.f)))
		others := slices.DeleteFunc(slices.Clone(all), func(a string) bool { return a == c.by })
		require.Empty(t, b.Passed(after(time.Minute), "n001", others...), c.f)
		data, err := snapshotOf(b)
		require.NoError(t, err)
		b, err = Restore(Config{}, data)
		require.NoError(t, err)
		require.Equal(t, c.by != "", len(b.Passed(after(time.Minute), "n001", all...)) == 1, c.f)
		require.Len(t, b.Tick(after(5*time.Hour)), map[bool]int{true: 0, false: 1}[c.by != ""], "else it expires")
	}
}

// A mark that rests on several findings ends when all of them are disproved, in any order.
func TestAMarkThatRestsOnSeveralFindings(t *testing.T) {
	for _, first := range []string{"network", "memory"} {
		b := sized(100)
		b.Find(noon, of("n001", CheckFailed, "network"))
		b.Find(after(time.Hour), of("n001", ECC, ""))
		acts := b.Passed(after(2*time.Hour), "n001", first)
		second := "memory"
		if first == "memory" {
			second = "network"
			require.Equal(t, []string{"mark n001"}, brief(acts), "it says what it rests on now")
			require.Equal(t, "a check of the node has failed: check-failed network", acts[0].Text)
			require.Equal(t, after(4*time.Hour), acts[0].Mark.Until)
		} else {
			require.Empty(t, acts)
		}
		require.Equal(t, []string{"unmark n001"}, brief(b.Passed(after(3*time.Hour), "n001", second)))
	}
}

func TestAMarkTellsOfTheFindingThatIsLeft(t *testing.T) {
	b := sized(100)
	b.Find(noon, of("n001", CheckFailed, "network"))
	b.Find(noon, of("n001", CheckFailed, "memory"))
	acts := b.Passed(noon, "n001", "memory")
	require.Equal(t, []string{"mark n001"}, brief(acts), "the reason is the same")
	require.Equal(t, "check-failed network", acts[0].Mark.Evidence)
}

// What is disproved counts also where the newest finding is another one, which no check can see.
func TestAMarkWhoseNewestFindingStays(t *testing.T) {
	b := sized(100)
	soft := func(hour int, aspect string) []Act {
		f := of("n001", Device, aspect)
		f.Text = fmt.Sprint(hour)
		return b.Find(after(time.Duration(hour)*time.Hour/4), f)
	}
	require.Empty(t, soft(0, "copies"))
	require.Empty(t, soft(1, "devices"))
	require.Equal(t, []string{"mark n001"}, brief(soft(2, "devices")))
	require.Equal(t, []string{"mark n001"}, brief(soft(3, "special")))
	acts := b.Passed(after(time.Hour), "n001", "copies")
	require.Equal(t, []string{"mark n001"}, brief(acts), "fewer findings")
	require.Contains(t, acts[0].Text, "3 findings of the last days")
	require.Empty(t, b.Passed(after(time.Hour), "n001", "copies", "network"))
	require.Equal(t, []string{"unmark n001"}, brief(b.Passed(after(time.Hour), "n001", "devices")))
}

func TestDisprovedFindingsDoNotCount(t *testing.T) {
	b := sized(100)
	for i := range 2 {
		f := find("n001", Device)
		f.Text = fmt.Sprint(i)
		require.Empty(t, b.Find(after(time.Duration(i)*time.Hour), f))
	}
	require.True(t, b.Noted("n001"))
	require.Empty(t, b.Passed(after(2*time.Hour), "n001", "copies"))
	require.Empty(t, b.Find(after(3*time.Hour), find("n001", Device)), "it is the first, not the third")
	require.Len(t, b.List(after(3 * time.Hour))[0].Findings, 3)
}

func TestOperators(t *testing.T) {
	b := sized(100)
	b.Find(noon, find("n001", CheckFailed))
	for _, n := range names(50) { // no breaker
		acts, err := b.SetMark(noon, n, "policy", "smells\x1b of smoke", time.Time{})
		require.NoError(t, err)
		require.Equal(t, []string{"mark " + n}, brief(acts))
		require.Equal(t, Mark{Node: n, Kind: operator, Reason: "smells  of smoke", Since: noon, By: "operator"}, acts[0].Mark)
	}
	require.Empty(t, b.Find(after(time.Minute), find("n001", ECC)), "an operator's mark stands")
	require.Empty(t, b.Tick(after(100*24*time.Hour)))
	require.Len(t, b.Avoid(after(100*24*time.Hour)), 50)

	acts, known := b.Clear(after(time.Minute), "n001", "me", "repaired")
	require.True(t, known)
	require.Equal(t, []string{"unmark n001"}, brief(acts))
	require.Contains(t, acts[0].Text, "cleared by me: repaired")
	acts, known = b.Clear(after(time.Minute), "n001", "me", "repaired")
	require.False(t, known)
	require.Empty(t, acts)
	require.Equal(t, []string{"mark n001"}, brief(b.Find(after(time.Minute), find("n001", ECC))), "a new finding counts")

	for _, bad := range []string{"", "a\nb", strings.Repeat("x", 600)} {
		_, err := b.SetMark(noon, bad, "me", "", time.Time{})
		require.ErrorContains(t, err, "need a name")
	}
	_, err := b.SetMark(noon, "n1", "me", "", after(-time.Second))
	require.ErrorContains(t, err, "has passed")
	acts, err = b.SetMark(noon, "new", "me", "", after(time.Second))
	require.NoError(t, err)
	require.Equal(t, after(time.Second), acts[0].Mark.Until)
	require.Equal(t, "me", acts[0].Mark.By)
	require.Contains(t, brief(b.Tick(after(time.Second))), "unmark new")
}

func TestCulpritsOfManyFailuresAreSuspect(t *testing.T) {
	b := sized(100)
	fail := func(culprits ...string) (acts []Act) {
		for _, c := range culprits {
			acts = append(acts, b.Failed(noon, "r", c, "exit code 1")...)
		}
		return acts
	}
	require.Empty(t, fail("n001", "n002", "n001", "", ""))
	require.False(t, b.Suspect("n001"))
	fail("n001")
	require.True(t, b.Suspect("n001"))
	require.False(t, b.Suspect("n002"))
	require.False(t, b.Suspect(""))
	fail("n001", "n001", "n001")
	list := b.List(noon)
	require.Len(t, list, 1)
	require.Len(t, list[0].Findings, 1, "one finding, however often it is to blame from then on")
	require.Contains(t, list[0].Findings[0].Text, "3 of the last 6 failures of the run; the last: exit code 1")
	require.True(t, list[0].Suspect)
	require.Empty(t, b.Avoid(noon), "to be suspect is not a mark")

	fail("", "", "", "", "", "", "", "", "")
	require.False(t, b.Suspect("n001"), "only the last ten count")
	for range 3 {
		b.Failed(noon, "other", "n003", "")
	}
	require.True(t, b.Suspect("n003"))
	b.Failed(noon, "other", "n005", "")
	b.Failed(noon, "other", "", "")
	b.Failed(noon, "third", "n006", "")
	for node, want := range map[string]bool{"": false, "n007": false, "n005": true, "n006": true} {
		_, known := b.Clear(noon, node, "me", "")
		require.Equal(t, want, known, node)
	}
	require.True(t, b.Suspect("n003"))
	_, known := b.Clear(noon, "n003", "me", "")
	require.True(t, known)
	require.False(t, b.Suspect("n003"))
	for range 3 {
		b.Failed(noon, "third", "n004", "")
	}
	b.Tick(after(8 * 24 * time.Hour))
	require.False(t, b.Suspect("n004"))
}

// Findings of the last seconds of a large run, one after the other.
func TestBreakers(t *testing.T) {
	marked := func(b *Registry, at time.Time, run string, nodes []string) (n int, why string) {
		for _, name := range nodes {
			for _, a := range b.Find(at, Finding{Node: name, Run: run, Kind: ECC, Text: "x"}) {
				if a.Do == Apply {
					n++
				} else {
					require.Equal(t, Hold, a.Do)
					why = a.Text
				}
			}
		}
		return n, why
	}
	for of, want := range map[int]int{10: 2, 40: 2, 60: 3, 100: 5, 119: 5, 120: 6} {
		n, why := marked(sized(of), noon, "r", names(of)[:of/2])
		require.Equal(t, want, n, "a job of %d", of)
		require.Contains(t, why, "for run r already")
	}

	b := sized(200) // of runs of other jobs: 20 an hour
	total := 0
	for i := range 20 {
		run, all := fmt.Sprint("r", i), names(200)[i*10:i*10+10]
		b.Size(noon, run, all)
		n, why := marked(b, noon, run, all[:3])
		require.LessOrEqual(t, n, 2)
		require.NotEmpty(t, why)
		total += n
	}
	require.Equal(t, 20, total)
	held := b.List(noon)[2]
	require.Equal(t, "n002", held.Name)
	require.Equal(t, 40, b.Held(noon))
	require.Zero(t, b.Held(after(4*time.Hour)), "a mark would have expired")
	require.Nil(t, held.Mark)
	require.Contains(t, held.Held.Why, "2 nodes are marked for run r0 already")
	require.NotContains(t, b.Avoid(noon), "n002")
	n, why := marked(b, after(time.Hour-1), "r15", names(200)[155:156])
	require.Zero(t, n)
	require.Contains(t, why, "20 nodes were marked within 1h0m0s already")
	n, _ = marked(b, after(time.Hour), "r15", names(200)[155:156])
	require.Equal(t, 1, n)
	require.Empty(t, b.Find(after(time.Hour), Finding{Node: "n002", Run: "r0", Kind: ECC, Text: "y"}),
		"what is held back is told once")
	require.Empty(t, b.Tick(after(2*time.Hour)), "and not marked later by itself")
	require.Nil(t, b.List(after(6 * time.Hour))[2].Held, "it is forgotten like a mark")
}

func TestAMassVerdictMarksNobody(t *testing.T) {
	b := sized(6)
	var all []Finding
	for _, n := range names(6)[:4] {
		all = append(all, find(n, CheckFailed))
	}
	require.Equal(t, []string{"hold n000", "hold n001", "hold n002", "hold n003"}, brief(b.Find(noon, all...)))
	require.Contains(t, b.List(noon)[0].Held.Why, "4 of 6 nodes of the run are blamed at once")
	require.Equal(t, []string{"mark n000"}, brief(b.Find(after(3*time.Minute), Finding{Node: "n000", Run: "r",
		Kind: CheckFailed, Text: "again"})), "later it counts by itself")

	b = sized(3) // one after the other: what was marked is not any more
	require.Equal(t, []string{"mark n000"}, brief(b.Find(noon, find("n000", CheckFailed))))
	require.Equal(t, []string{"unmark n000", "hold n001"}, brief(b.Find(after(time.Second), find("n001", CheckFailed))))
	require.Equal(t, []string{"hold n002"}, brief(b.Find(after(time.Second), find("n002", CheckFailed))))
	require.Empty(t, b.Avoid(noon))

	b = sized(3) // what another run has found stays marked, and what is found of another kind
	b.Size(noon, "other", names(30))
	require.Equal(t, []string{"mark n001", "mark n008", "mark n000"}, brief(b.Find(noon,
		Finding{Node: "n001", Run: "other", Kind: CheckFailed}, find("n008", ECC), find("n000", CheckFailed))))
	require.Equal(t, []string{"unmark n000", "hold n002"}, brief(b.Find(noon, find("n002", CheckFailed))))
	require.Equal(t, []string{"n001", "n008"}, b.Avoid(noon))

	b = sized(3) // nodes that have been replaced do not count
	require.Equal(t, []string{"mark n000"}, brief(b.Find(noon, find("n000", CheckFailed))))
	b.Size(noon, "r", []string{"n001", "n002", "n003"})
	require.Equal(t, []string{"mark n003"}, brief(b.Find(after(time.Second), find("n003", CheckFailed))))

	b = sized(3) // one node is one, however often it is blamed
	require.Equal(t, []string{"mark n000"}, brief(b.Find(noon, find("n000", CheckFailed))))
	b.Size(noon, "r", names(3))
	acts := b.Find(after(time.Second), Finding{Node: "n000", Run: "r", Kind: CheckFailed, Text: "again"})
	require.Equal(t, []string{"mark n000"}, brief(acts))

	b = sized(1)
	require.Equal(t, []string{"mark n000"}, brief(b.Find(noon, find("n000", CheckFailed))), "one is no mass")
	b = sized(4)
	require.Equal(t, []string{"mark n000", "mark n001"},
		brief(b.Find(noon, find("n000", ECC), find("n001", ECC))), "half is no mass")
}

// A mass verdict does not mark one of its machines later, with one finding more.
func TestFindingsOfAMassVerdictDoNotCountLater(t *testing.T) {
	b := sized(4)
	mass := []Finding{find("n001", Hang), find("n002", Hang), find("n003", Hang)}
	require.Empty(t, b.Find(noon, mass...))
	require.Empty(t, b.Find(after(time.Hour), mass...))
	require.Equal(t, []string{"hold n001", "hold n002", "hold n003"}, brief(b.Find(after(2*time.Hour), mass...)))
	b = again(t, b)
	require.Empty(t, b.Find(after(3*time.Hour), find("n001", Hang)))
	require.Empty(t, b.Find(after(4*time.Hour), append(mass, find("n001", Silent))...), "nor at the same time")
	require.Equal(t, []string{"mark n001"}, brief(b.Find(after(5*time.Hour), find("n001", Silent))))
	require.Contains(t, b.Marks()[0].Reason, "3 findings")
}

func TestWhichFindingsAreOfAMassVerdict(t *testing.T) {
	b := sized(5)
	for _, o := range []struct {
		at   time.Duration
		node string
		text string
	}{
		{0, "n000", "too early"}, {3 * time.Minute, "n001", "the first"}, {4 * time.Minute, "n002", "the second"},
		{5*time.Minute - 1, "n003", "the third, and most"}, {5*time.Minute - 1, "n004", "one more"},
		{5*time.Minute - 1, "n001", "the first again"}, {time.Hour, "n001", "much later"},
	} {
		b.Find(after(o.at), Finding{Node: o.node, Run: "r", Kind: Hang, Text: o.text},
			Finding{Node: "n001", Run: "r", Kind: Silent, Text: "another kind " + o.text},
			Finding{Node: o.node, Run: "other", Kind: Hang, Text: "another run " + o.text})
	}
	var got []string
	for _, n := range again(t, b).List(after(time.Hour)) {
		for _, f := range slices.Backward(n.Findings) {
			if f.Mass {
				got = append(got, n.Name+" "+f.Text)
			}
		}
	}
	require.Equal(t, []string{"n001 the first", "n001 the first again", "n002 the second", "n003 the third, and most",
		"n004 one more"}, got)
}

// What a cleared machine was blamed for is no part of a mass verdict, and what the others are blamed for stays one.
func TestClearedMachinesAndMassVerdicts(t *testing.T) {
	for cleared, mass := range map[string]bool{"n000": false, "n001": true} {
		b := sized(3)
		b.Find(noon, find("n000", Hang))
		b.Clear(noon, cleared, "me", "")
		b.Find(noon, find("n002", Hang))
		require.Equal(t, mass, b.nodes.of["n002"].findings[0].Mass, cleared)
	}
}

func TestBounds(t *testing.T) {
	b := sized(100)
	for i := range 3 * MaxPerNode {
		text := strings.Repeat("é", MaxText) + fmt.Sprint(i)
		b.Find(noon, Finding{Node: "n001", Run: fmt.Sprint(i), Kind: Hang, Text: text, At: after(time.Hour)})
		b.Find(noon, Finding{Node: "n002", Run: fmt.Sprint(i), Kind: Hang, Text: "\x1b[31m\xff\u202e"})
	}
	list := b.List(noon)
	for _, n := range list {
		require.LessOrEqual(t, len(n.Findings), MaxPerNode)
		for _, f := range n.Findings {
			require.LessOrEqual(t, len(f.Text), MaxText)
			require.False(t, f.At.After(noon))
			require.NoError(t, checkText(f.Text))
		}
	}
	require.Equal(t, fmt.Sprint(3*MaxPerNode-1), list[1].Findings[0].Run, "the oldest go")
	for _, bad := range []Finding{
		{Kind: ECC}, {Node: "a\x00", Kind: ECC}, {Node: "a", Run: "\n", Kind: ECC}, {Node: "a", Kind: "\n"}, {Node: "a"},
		{Node: "a", Kind: Kind(strings.Repeat("x", MaxKind+1))},
	} {
		require.Empty(t, b.Find(noon, bad))
	}
	require.Empty(t, b.Failed(noon, "", "n001", ""))
	require.Len(t, b.List(noon), 2)
	for _, bad := range []string{"", "\n"} {
		b.Size(noon, bad, names(5))
	}
	b.Size(noon, "a run that is over", nil)
	require.Len(t, b.List(noon), 2)
	require.Len(t, b.Runs(), 3*MaxPerNode+1)
	for i := range maxRuns + 10 {
		b.Size(noon, fmt.Sprint("run", i), names(3))
	}
	require.LessOrEqual(t, len(b.runs.of), maxRuns)
	require.LessOrEqual(t, b.runs.in["n001"], maxRunsNode)
	again(t, b)
}

func TestALargeClusterIsBounded(t *testing.T) {
	b := New(Config{})
	_, err := b.SetMark(noon.Add(-time.Hour), "kept", "me", "", time.Time{})
	require.NoError(t, err)
	for part := range 3 {
		list := make([]string, MaxNodes/2)
		for i := range list {
			list[i] = fmt.Sprintf("p%d-%d", part, i)
		}
		b.Size(after(time.Duration(part)), fmt.Sprint("r", part), list)
	}
	require.LessOrEqual(t, len(b.nodes.of), MaxNodes)
	require.NotNil(t, b.nodes.of["kept"])
	require.Len(t, b.runs.of["r2"].members, MaxNodes/2)
	require.Less(t, len(b.runs.of["r0"].members), 2)
	if testing.Short() { // 33,000 findings take 20 s with -race
		return
	}
	for i := range maxFindings + 100 {
		b.Find(after(time.Duration(i+3)), Finding{Node: fmt.Sprintf("p2-%d", i), Run: "r2", Kind: Silent})
	}
	require.LessOrEqual(t, b.nodes.findings, maxFindings)
	require.Empty(t, b.nodes.of["p2-0"].findings)
	again(t, b)
}

// snapshotOf is all that a Registry knows, as an older program has written it.
func snapshotOf(g *Registry) ([]byte, error) {
	s := g.saved()
	for _, run := range slices.Sorted(maps.Keys(g.runs.of)) {
		j := g.runs.of[run]
		s.Runs = append(s.Runs, savedRun{run, j.heard, slices.Sorted(maps.Keys(j.members)), j.failures, j.blames})
	}
	return json.Marshal(s)
}

// again restores a Registry and requires that nothing is lost.
func again(t *testing.T, b *Registry) *Registry {
	t.Helper()
	data, err := snapshotOf(b)
	require.NoError(t, err)
	c, err := Restore(b.cfg, data)
	require.NoError(t, err)
	twice, err := snapshotOf(c)
	require.NoError(t, err)
	require.Equal(t, string(data), string(twice))
	require.Equal(t, b.nodes.findings, c.nodes.findings)
	require.Equal(t, b.marks.byRun, c.marks.byRun)
	return c
}

func TestWhichMachinesAreForgottenFirst(t *testing.T) {
	found := []Finding{{Kind: Hang}, {Kind: Hang}}
	want := []*record{{name: "a", seen: noon}, {name: "b", seen: noon}, {name: "0", seen: after(1)},
		{name: "e", seen: noon, findings: found[:1]}, {name: "c", seen: after(1), findings: found}}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, sooner)
	require.Equal(t, want, got)
}

// Records have the machines that matter, the failures of runs, and no members.
func TestRecords(t *testing.T) {
	b := sized(3)
	b.Find(noon, Finding{Node: "n001", Run: "r", Kind: ECC, Text: strings.Repeat("<", MaxText)})
	b.Failed(noon, "r", "n002", "")
	b.Failed(noon, "r", "n002", "")
	records, err := b.Records()
	require.NoError(t, err)
	require.Len(t, records, 3)
	require.Less(t, len(records[machineRecord+digest("n001")]), 3*MaxText, "twice as evidence, and not escaped")
	b.Size(after(time.Minute), "r", names(2))
	later, err := b.Records()
	require.NoError(t, err)
	key := runRecord + digest("r")
	require.Equal(t, string(records[key]), string(later[key]), "only failures change the record of a run")
	again, err := RestoreRecords(b.cfg, records)
	require.NoError(t, err)
	require.Equal(t, b.Marks(), again.Marks())
	require.Empty(t, again.RunsOf("n001"))
	same, err := again.Records()
	require.NoError(t, err)
	require.Equal(t, records, same)
	_, err = again.SetMark(noon, "n009", "me", "", time.Time{})
	require.NoError(t, err)
	require.Len(t, again.List(noon), 2)
	marked, err := again.Records()
	require.NoError(t, err)
	require.Contains(t, marked, machineRecord+digest("n009"), "a mark without findings")
	require.False(t, again.Suspect("n002"))
	again.Failed(noon, "r", "n002", "")
	require.True(t, again.Suspect("n002"), "the third failure")
	records["later"] = []byte("of a newer program")
	fresh, err := RestoreRecords(b.cfg, nil)
	require.NoError(t, err)
	require.Empty(t, fresh.Marks())
	records["machine/x"] = []byte("{")
	_, err = RestoreRecords(b.cfg, records)
	require.ErrorContains(t, err, "record machine/x")
	delete(records, headRecord)
	_, err = RestoreRecords(b.cfg, records)
	require.ErrorContains(t, err, "record head")
}

func TestRestoreIsStrict(t *testing.T) {
	b := sized(3)
	b.Find(noon, find("n001", ECC))
	b.Failed(noon, "r", "n002", "")
	good, err := snapshotOf(b)
	require.NoError(t, err)
	const more = `{"node":"n001","kind":"ecc","at":"2026-03-01T12:00:00Z"},`
	edit := func(old, with string) string {
		require.Contains(t, string(good), old)
		return strings.Replace(string(good), old, with, 1)
	}
	many := func(of string, n int, one string) string {
		return fmt.Sprintf(`{"version":1,"%s":[%s]}`, of, strings.Repeat(one+",", n-1)+one)
	}
	for name, c := range map[string]struct{ data, want string }{
		"nothing":       {"", "unexpected end"},
		"half":          {string(good[:len(good)/2]), "unexpected end"},
		"more":          {string(good) + "{}", "after top-level value"},
		"a list":        {"[]", "cannot unmarshal"},
		"no version":    {"{}", "version 0"},
		"newer":         {edit(`"version":1`, `"version":2`), "version 2: this program reads version 1"},
		"no name":       {edit(`"name":"n000"`, `"name":""`), "need a name"},
		"twice":         {edit(`"name":"n000"`, `"name":"n001"`), "twice"},
		"long text":     {edit(`"text":"as seen"`, `"text":"`+strings.Repeat("x", 1025)+`"`), "at most 1024 bytes"},
		"control":       {edit(`"text":"as seen"`, `"text":"\u001b"`), "control characters"},
		"other node":    {edit(`"findings":[{"node":"n001"`, `"findings":[{"node":"n002"`), `about node "n002"`},
		"other mark":    {edit(`"mark":{"node":"n001"`, `"mark":{"node":"n002"`), `about node "n002"`},
		"endless":       {edit(`"until":"2026-03-01T16:00:00Z",`, ""), "has no end"},
		"endless mark":  {edit(`"until":"2026`, `"until":"9999`), "need a year"},
		"old failure":   {edit(`"culprit":"n002","at":"2026`, `"culprit":"n002","at":"0001`), "need a year"},
		"many nodes":    {many("nodes", MaxNodes+1, "{}"), "100001 nodes"},
		"many runs":     {many("runs", maxRuns+1, "{}"), "4097 runs"},
		"many marks":    {many("made", MaxNodes+1, `"2026-03-01T12:00:00Z"`), "100001 marks made"},
		"ancient":       {edit(`"at":"2026`, `"at":"0001`), "need a year"},
		"future":        {edit(`"at":"2026`, `"at":"9999`), "need a year"},
		"no member":     {edit(`"members":["n000"`, `"members":["n009"`), `member "n009"`},
		"member twice":  {edit(`"members":["n000"`, `"members":["n001"`), `member "n001"`},
		"run twice":     {edit(`"runs":[`, `"runs":[{"run":"r","heard":"2026-03-01T12:00:00Z"},`), "twice"},
		"no blame":      {edit(`"blames":[{"node":"n001"`, `"blames":[{"node":""`), "need a name"},
		"many findings": {edit(`"findings":[`, `"findings":[`+strings.Repeat(more, 16)), "at most 16"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Restore(Config{}, []byte(c.data))
			require.ErrorContains(t, err, c.want)
		})
	}
	_, err = Restore(Config{}, []byte(edit(`{"version":1`, `{"later":{"a":[1]},"version":1`)))
	require.NoError(t, err, "what a newer program has added is skipped")
}

// A clock that was a year ahead leaves no mark for a year.
func TestAClockThatWasWrong(t *testing.T) {
	b := New(Config{})
	b.Size(after(365*24*time.Hour), "r", names(100))
	b.Find(after(365*24*time.Hour), find("n001", ECC))
	require.Empty(t, b.Tick(noon))
	require.Empty(t, b.Tick(after(4*time.Hour-1)))
	require.Equal(t, []string{"unmark n001"}, brief(b.Tick(after(4*time.Hour))))
	b.Tick(after(8 * 24 * time.Hour))
	require.Empty(t, b.nodes.of)
}

// history drives a Registry, and another one that is restored from its snapshots, by random events.
type history struct {
	t       *testing.T
	rnd     *rand.Rand
	b, twin *Registry
	now     time.Time
	marks   map[string]Mark
	made    []time.Time
	cleared map[string]bool // and nothing was found since
}

func TestRandomHistories(t *testing.T) {
	counts, histories := map[Do]int{}, int64(60)
	if testing.Short() { // one of them is most of what the machine does for half a second
		histories = 15
	}
	for seed := range histories {
		h := &history{t: t, rnd: rand.New(rand.NewSource(seed)), b: New(Config{}), twin: New(Config{}), now: noon,
			marks: map[string]Mark{}, cleared: map[string]bool{}}
		for range 400 {
			for do, n := range h.step() {
				counts[do] += n
			}
		}
	}
	for _, do := range []Do{Apply, Remove, Hold} {
		require.Greater(t, counts[do], 100, "the histories do too little: %v", counts)
	}
}

func (h *history) node() string { return fmt.Sprintf("n%03d", h.rnd.Intn(60)) }

func (h *history) run() string { return fmt.Sprint("r", h.rnd.Intn(3)) }

// step does the same to both Books, and checks what comes of it.
func (h *history) step() map[Do]int {
	h.now = h.now.Add(time.Duration(h.rnd.Int63n(int64([]time.Duration{
		time.Second, time.Minute, time.Hour, 5 * time.Hour, 30 * time.Hour}[h.rnd.Intn(5)]))))
	if h.rnd.Intn(4) == 0 {
		h.twin = again(h.t, h.twin)
	}
	op := h.op()
	acts := op(h.b)
	require.Equal(h.t, acts, op(h.twin), "a restored Registry does the same")
	h.check(acts)
	if h.rnd.Intn(3) == 0 {
		acts2 := h.b.Tick(h.now)
		require.Equal(h.t, acts2, h.twin.Tick(h.now))
		h.check(acts2)
		for _, m := range h.b.Marks() {
			require.True(h.t, m.Until.IsZero() || m.Until.After(h.now), "no mark outlives its expiry")
		}
		acts = append(acts, acts2...)
	}
	require.Equal(h.t, h.b.List(h.now), h.twin.List(h.now))
	n := map[Do]int{}
	for _, a := range acts {
		n[a.Do]++
	}
	return n
}

func (h *history) op() func(*Registry) []Act {
	node, run, now := h.node(), h.run(), h.now
	kinds := []Kind{CheckFailed, Hang, Unkillable, Xid, ECC, Silent, "other"}
	switch h.rnd.Intn(10) {
	case 0:
		perm := h.rnd.Perm(60)[:h.rnd.Intn(61)]
		list := make([]string, len(perm))
		for i, p := range perm {
			list[i] = fmt.Sprintf("n%03d", p)
		}
		return func(b *Registry) []Act { b.Size(now, run, list); return nil }
	case 1:
		delete(h.cleared, node)
		return func(b *Registry) []Act { return b.Failed(now, run, node, "failed") }
	case 2:
		return func(b *Registry) []Act { return b.Passed(now, node, "network", "xids") }
	case 3:
		delete(h.cleared, node)
		until := []time.Time{{}, now.Add(time.Hour)}[h.rnd.Intn(2)]
		return func(b *Registry) []Act {
			acts, err := b.SetMark(now, node, "me", "why", until)
			require.NoError(h.t, err)
			return acts
		}
	case 4, 5:
		h.cleared[node] = true
		return func(b *Registry) []Act { acts, _ := b.Clear(now, node, "me", "why"); return acts }
	}
	fs := make([]Finding, 1+h.rnd.Intn(3)*h.rnd.Intn(3))
	kind := kinds[h.rnd.Intn(len(kinds))]
	for i := range fs {
		fs[i] = Finding{Node: h.node(), Run: run, Kind: kind, Text: fmt.Sprint("text ", h.rnd.Intn(5))}
		delete(h.cleared, fs[i].Node)
	}
	return func(b *Registry) []Act { return b.Find(now, fs...) }
}

// check follows the acts, and counts what the breaker must bound.
func (h *history) check(acts []Act) {
	for _, a := range acts {
		m := a.Mark
		require.False(h.t, h.cleared[m.Node] && a.Do != Remove, "a clear is final until something is found: %+v", a)
		_, had := h.marks[m.Node]
		switch a.Do {
		case Remove:
			require.True(h.t, had, "what is removed was there: %+v", a)
			delete(h.marks, m.Node)
			continue
		case Hold:
			require.False(h.t, had)
			continue
		}
		h.marks[m.Node] = m
		if m.By != byPolicy {
			continue
		}
		require.False(h.t, m.Until.After(h.now.Add(4*time.Hour)))
		if !had {
			h.made = append(h.made, h.now)
			h.bounded(m.Run)
		}
	}
	require.Len(h.t, h.b.Marks(), len(h.marks))
	for _, m := range h.b.Marks() {
		require.Equal(h.t, h.marks[m.Node], m)
	}
}

func (h *history) bounded(run string) {
	inRun := 0
	for _, m := range h.marks {
		if m.By == byPolicy && m.Run == run {
			inRun++
		}
	}
	require.LessOrEqual(h.t, inRun, max(2, len(h.b.runs.of[run].members)/20))
	inHour := len(slices.DeleteFunc(slices.Clone(h.made), func(t time.Time) bool { return h.now.Sub(t) >= time.Hour }))
	require.LessOrEqual(h.t, inHour, max(2, len(h.b.nodes.of)/10))
}

func FuzzRestore(f *testing.F) {
	b := sized(4)
	b.Find(noon, find("n001", ECC), find("n002", Hang))
	b.Find(noon, find("n003", ECC))
	for range 3 {
		b.Failed(noon, "r", "n001", "x")
	}
	_, _ = b.SetMark(noon, "n000", "me", "", time.Time{})
	data, err := snapshotOf(b)
	require.NoError(f, err)
	f.Add(data)
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := Restore(Config{}, data)
		if err != nil {
			return
		}
		c := again(t, b)
		require.Equal(t, b.Tick(noon), c.Tick(noon))
		b.Find(noon, find("n001", ECC), find("n009", Hang))
		b.Size(noon, "r", names(3))
		b.Failed(noon, "r", "n001", "")
		b.Clear(noon, "n001", "me", "")
		b.Suspect("n001")
		b.Avoid(noon)
		b.Tick(b.Next())
		again(t, b)
	})
}
