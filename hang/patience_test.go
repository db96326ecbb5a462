package hang

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTimeOfAVerdict(t *testing.T) {
	const soon, long = 20 * time.Second, 10 * time.Minute
	user := patience{after: 30 * time.Second}
	for name, c := range map[string]struct {
		p         patience
		v         Verdict
		tell, act time.Duration
	}{
		"an idle rank":              {patience{}, Verdict{Deadline: soon}, soon, actLate},
		"certain":                   {patience{}, Verdict{Deadline: soon, Certain: true}, soon, soon},
		"a run that pauses":         {patience{longest: 5 * time.Minute}, Verdict{Deadline: soon}, soon, 15 * time.Minute},
		"the user's time":           {user, Verdict{Deadline: soon}, soon, user.after},
		"the user's time, doubtful": {user, Verdict{Deadline: soon, Confidence: Low}, soon, lowWait},
		"a long phase":              {patience{}, Verdict{Deadline: long, Phase: PhaseCompile}, long, long},
		"work that lasts":           {patience{}, Verdict{Deadline: long}, steadyTime, long},
	} {
		f := &file{verdict: c.v, began: dawn, foundAt: dawn}
		require.Equal(t, dawn.Add(c.tell), c.p.dueAt(f, nil, dawn), name)
		require.Equal(t, dawn.Add(c.act), c.p.actAt(&c.v, dawn), name)
		f.told = maxRetold
		require.Equal(t, dawn.Add(c.act), c.p.dueAt(f, &Told{Verdict: behind(3)}, dawn), "%s, which was told often", name)
	}
}

func TestNextLook(t *testing.T) {
	l := nextLook{pause: firstWait}
	l.plan(dawn, time.Time{})
	require.Equal(t, nextLook{at: dawn.Add(firstWait), pause: 2 * firstWait}, l)
	l.plan(dawn, dawn.Add(30*time.Second))
	require.Equal(t, dawn.Add(30*time.Second-lookAhead), l.at, "the evidence takes some time")
	require.Equal(t, 2*firstWait, l.pause)
	l.plan(dawn, dawn.Add(10*time.Second))
	require.Equal(t, dawn.Add(10*time.Second), l.at, "it is fresh enough")
	for range 10 {
		l.plan(dawn, time.Time{})
	}
	require.Equal(t, longestWait, l.pause)
}
