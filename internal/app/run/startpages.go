package run

import (
	"time"

	"dlrover-run/internal/startpages"
	"dlrover-run/launcher"
)

// settled is the delay after the start of workers. Then the launcher no longer needs the pages of its startup.
const settled = 5 * time.Second

// startPages releases the pages of the startup once the workers run.
type startPages struct{ timer *time.Timer }

func (t *startPages) observe(e launcher.Event) {
	if _, started := e.(launcher.StartInfo); !started {
		return
	}
	if t.timer != nil {
		t.timer.Stop()
	}
	t.timer = time.AfterFunc(settled, startpages.Release)
}
