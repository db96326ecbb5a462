package warm

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A failure soon after a warm start is ours until the workers have made a step, and once for a job.
func TestEarlyFailuresAreExcusedOnce(t *testing.T) {
	const ours, theirs = true, false
	ended := func(ran bool, refused string) *child {
		c := &child{over: make(chan struct{}), ran: ran, refused: refused}
		close(c.over)
		return c
	}
	for name, c := range map[string]struct {
		child   *child
		age     time.Duration
		code    int
		learned string
		stepped bool
		want    bool
		first   bool // start of the launcher
	}{
		"an exception at first":          {ended(true, ""), 0, 1, "", false, theirs, true},
		"a crash at first":               {ended(true, ""), 0, -11, "", false, ours, true},
		"not begun at first":             {ended(false, ""), 0, 1, "", false, ours, true},
		"before a step":                  {ended(true, ""), 0, 1, "", false, ours, false},
		"the imports are told at an end": {ended(true, ""), 0, 1, `{"why":"exit"}`, false, ours, false},
		"after a step, not heard yet":    {ended(true, ""), 0, 1, `{"why":"step"}`, false, theirs, false},
		"after a step":                   {ended(true, ""), 0, 1, "", true, theirs, false},
		"later":                          {ended(true, ""), time.Minute, 1, "", false, theirs, false},
		"a success":                      {ended(true, ""), 0, 0, "", false, theirs, false},
		"not begun":                      {ended(false, ""), time.Minute, 0, "", false, ours, false},
		"refused":                        {ended(false, "x"), time.Minute, 0, "", false, ours, false},
		"by exec":                        {nil, 0, 1, "", false, theirs, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := New(Config{Mode: modeFork, Slots: 1, Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
			if s.Starting(); !c.first {
				s.Starting()
			}
			s.stepped = c.stepped
			s.workers[0] = &worker{pid: 7, began: time.Now().Add(-c.age), child: c.child}
			if c.learned != "" {
				require.NoError(t, os.WriteFile(s.learnFile(), []byte(c.learned), 0o600))
			}
			require.Equal(t, c.want, s.Excuse(0, 7, c.code) != "")
			require.Empty(t, s.Excuse(0, 8, 1), "another process")
			s.Starting()
			require.Equal(t, c.want, s.exec != "", "the next ones are started by exec")
			s.Starting()
			require.Empty(t, s.exec, "and those after them as ever")
			s.workers[0] = &worker{pid: 9, began: time.Now(), child: ended(true, "")}
			again := s.Excuse(0, 9, 1)
			require.Equal(t, c.want, again == "", "once")
		})
	}
}
