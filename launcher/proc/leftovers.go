package proc

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/text"
	"dlrover-run/launcher/proc/family"
	"dlrover-run/launcher/proc/guard"
)

// After the launcher's end.
const (
	// secondSweep is the patience with processes that a launcher had the time to end, and could not.
	secondSweep = 5 * time.Second
	// lastSaves is how long PID 1 stays for processes that survive the launcher, as the checkpoint daemon does by itself:
	// its container ends with it.
	lastSaves = 10 * time.Minute
)

// EndLeftovers is the guard's work after the launcher has ended: it kills the remaining processes, and reports that to
// stderr.
func EndLeftovers(w *guard.Watch, stderr io.Writer) {
	patience := secondSweep
	if w.Status.Signaled() {
		patience = family.Patience
	}
	killed, err := (&family.Sweep{
		Spared: func(pid int) bool { return w.Spared[pid] },
		Cgroup: func() ([]int, bool) { return killMembers(w.Cgroup) },
		Reap:   w.Reap,
	}).Run(patience)
	if w.Cgroup != "" {
		killMembers(w.Cgroup)
		_ = family.RemoveCgroup(w.Cgroup, time.Second) // the next launcher tries again
	}
	switch {
	case err != nil:
		fmt.Fprintln(stderr, "dlrover-run: the launcher has ended, but", text.EscapeLine(err.Error()))
	case killed > 0:
		fmt.Fprintf(stderr, "dlrover-run: the launcher died; killed %d of its processes\n", killed)
	}
	if os.Getpid() == 1 {
		awaitSurvivors(w)
	}
}

func killMembers(cgroup string) (members []int, ok bool) {
	if cgroup == "" {
		return nil, false
	}
	members = family.Members(cgroup)
	return members, family.KillCgroup(cgroup) == nil
}

// awaitSurvivors returns early when someone wants the job to end.
func awaitSurvivors(w *guard.Watch) {
	late := time.After(lastSaves)
	for w.Reap(); len(w.Survivors) > 0; w.Reap() {
		select {
		case <-w.Child:
		case s := <-w.Signals:
			if s == unix.SIGTERM || s == unix.SIGINT || s == unix.SIGHUP || s == unix.SIGQUIT {
				return
			}
		case <-late:
			return
		}
	}
}
