package proc

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// guardBound is how long the guard kills what is left of a job.
const guardBound = 10 * time.Second

// GuardMain is the main function of the guard process, for a program that finds
// [GuardName] in os.Args[0]. It waits for the launcher to die, kills what the
// launcher left and returns the exit code.
func GuardMain() int {
	// Whoever signals the whole job means the workers. The guard ends by
	// itself, after them.
	signal.Ignore(unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT)
	debug.SetGCPercent(10)
	os.WriteFile("/proc/self/comm", []byte(GuardName), 0) // for ps; it would read "exe"
	if len(os.Args) != 3 || os.Args[1] == "" {
		fmt.Fprintf(os.Stderr, "%s: started by the launcher only, with a job id and a cgroup\n", GuardName)
		return 2
	}
	j := leftovers{id: os.Args[1], cgroup: os.Args[2], sessions: readSessions(os.Stdin)}
	if n := j.end(guardBound); n > 0 {
		fmt.Fprintf(os.Stderr, "%s: the launcher died; killed %d of its processes\n", GuardName, n)
	}
	return 0
}

// readSessions follows the launcher's lines until it is dead.
func readSessions(r io.Reader) map[int]bool {
	sessions := map[int]bool{}
	for sc := bufio.NewScanner(r); sc.Scan(); {
		applySession(sessions, sc.Text())
	}
	return sessions
}

// applySession applies "+<session>" or "-<session>". Sessions 0 and 1 belong to
// the kernel and init and never to a worker.
func applySession(sessions map[int]bool, line string) {
	if len(line) < 2 {
		return
	}
	sid, err := strconv.Atoi(line[1:])
	switch {
	case err != nil || sid <= 1:
	case line[0] == '+':
		sessions[sid] = true
	case line[0] == '-':
		delete(sessions, sid)
	}
}

// leftovers is what a dead launcher may have left.
type leftovers struct {
	id       string // in the environment of its processes
	cgroup   string // "" = none
	sessions map[int]bool
	environ  bytes.Buffer // for one at a time
}

// end kills until two scans in a row find nothing: one could miss a process
// that is being forked. It returns how many it has killed.
func (l *leftovers) end(bound time.Duration) int {
	killed := map[int]bool{}
	deadline := time.Now().Add(bound)
	for clean := 0; clean < 2 && time.Now().Before(deadline); {
		if clean++; l.scan(killed) > 0 {
			clean = 0
		}
		time.Sleep(5 * time.Millisecond)
	}
	if l.cgroup != "" {
		removeCgroup(l.cgroup, time.Second)
	}
	return len(killed)
}

// scan kills what it finds and returns how much that was.
func (l *leftovers) scan(killed map[int]bool) (found int) {
	hit := func(pid int) {
		unix.Kill(pid, unix.SIGKILL)
		killed[pid] = true
		found++
	}
	if l.cgroup != "" {
		for _, pid := range cgroupPIDs(l.cgroup) {
			hit(pid)
		}
		killCgroup(l.cgroup)
	}
	var others []int
	for _, pid := range numbersIn("/proc") {
		st, err := readStat(pid)
		switch {
		case err != nil || st.zombie() || pid == os.Getpid():
		case l.sessions[st.session]:
			hit(pid)
		default:
			others = append(others, pid)
		}
	}
	// Last, because to read the environment of a process that hangs in the
	// kernel may hang as well (mmap lock).
	for _, pid := range others {
		if l.marked(pid) {
			hit(pid)
		}
	}
	return found
}

// marked reports whether the process was started with the id in its
// environment. Processes of other users cannot be read and are not ours.
func (l *leftovers) marked(pid int) bool {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false
	}
	defer f.Close()
	l.environ.Reset()
	l.environ.ReadFrom(f)
	return hasMark(l.environ.Bytes(), l.id)
}

// hasMark looks for id in GuardEnv of a NUL-separated environment.
func hasMark(environ []byte, id string) bool {
	for kv := range bytes.SplitSeq(environ, []byte{0}) {
		if ids, ok := bytes.CutPrefix(kv, []byte(GuardEnv+"=")); ok && bytes.Contains(ids, []byte(id)) {
			return true
		}
	}
	return false
}
