package nodehealth

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// job is one run.
type job struct {
	heard    time.Time
	members  map[string]bool // names in the nodeTable
	failures []failure       // the last Config.Of, the oldest first
	blames   []blame         // of the last Config.MassWithin, the oldest first
	blamed   map[Kind]int    // how many of blames are about members
	known    map[about]bool  // subjects of blames
	massed   map[Kind]bool   // there is a mass verdict, which the findings until now record
}

// about is the subject of a blame.
type about struct {
	node string
	kind Kind
}

// failure is the end of an epoch; culprit may be "".
type failure struct {
	Culprit string    `json:"culprit,omitempty"`
	At      time.Time `json:"at"`
}

// blame is the first finding of a kind about a machine.
type blame struct {
	Node string    `json:"node"`
	Kind Kind      `json:"kind"`
	At   time.Time `json:"at"`
}

func newJob() *job {
	return &job{members: map[string]bool{}, blamed: map[Kind]int{}, known: map[about]bool{}, massed: map[Kind]bool{}}
}

// count counts the blames anew.
func (j *job) count() {
	clear(j.blamed)
	clear(j.known)
	for _, f := range j.blames {
		j.known[about{f.Node, f.Kind}] = true
		if j.members[f.Node] {
			j.blamed[f.Kind]++
		}
	}
}

// blame counts a finding for the mass rule, once for each machine and kind.
func (j *job) blame(now time.Time, within time.Duration, f Finding) {
	j.expire(now.Add(-within))
	is := about{f.Node, f.Kind}
	if j.known[is] || len(j.blames) >= MaxNodes {
		return
	}
	j.known[is] = true
	j.blames = append(j.blames, blame{f.Node, f.Kind, now})
	if j.members[f.Node] {
		j.blamed[f.Kind]++
	}
}

// expire forgets blames up to a time.
func (j *job) expire(until time.Time) {
	n := 0
	for n < len(j.blames) && !j.blames[n].At.After(until) {
		o := j.blames[n]
		delete(j.known, about{o.Node, o.Kind})
		if j.members[o.Node] {
			j.blamed[o.Kind]--
		}
		n++
	}
	j.blames = slices.Delete(j.blames, 0, n)
}

// mass reports whether more than half of a run's machines are blamed for a kind of finding. j may be nil.
func (j *job) mass(k Kind) bool {
	return j != nil && j.blamed[k] >= 2 && 2*j.blamed[k] > len(j.members)
}

// failed records the end of an epoch, as one of the last that are kept. It returns how often its culprit was to blame
// before, and is now.
func (j *job) failed(now time.Time, culprit string, kept int) (before, times int) {
	before = j.times(culprit)
	j.failures = append(j.failures, failure{culprit, now})
	j.failures = slices.Delete(j.failures, 0, max(0, len(j.failures)-kept))
	return before, j.times(culprit)
}

// times is how often a machine was to blame.
func (j *job) times(culprit string) (n int) {
	for _, f := range j.failures {
		if f.Culprit == culprit {
			n++
		}
	}
	return n
}

// absolve takes the blame from a machine; false: there was none.
func (j *job) absolve(node string) (known bool) {
	for i := range j.failures {
		if j.failures[i].Culprit == node && node != "" {
			j.failures[i].Culprit, known = "", true
		}
	}
	j.blames = slices.DeleteFunc(j.blames, func(o blame) bool { return o.Node == node })
	j.count()
	return known
}

// sweep forgets old failures and blames. Times of a clock that was wrong become now.
func (j *job) sweep(now, old time.Time, mass time.Duration) {
	j.heard = earlier(j.heard, now)
	for i := range j.failures {
		j.failures[i].At = earlier(j.failures[i].At, now)
	}
	j.failures = slices.DeleteFunc(j.failures, func(f failure) bool { return !f.At.After(old) })
	for i := range j.blames {
		j.blames[i].At = earlier(j.blames[i].At, now)
	}
	j.expire(now.Add(-mass))
}

// runTable holds the runs, and the machines that are members of them.
type runTable struct {
	of       map[string]*job
	in       map[string]int  // in how many runs a machine is
	suspects map[string]bool // nil: not known
}

func newRunTable() runTable { return runTable{of: map[string]*job{}, in: map[string]int{}} }

// touch returns a run that was heard of now, and makes room for it.
func (t *runTable) touch(now time.Time, run string) *job {
	j := t.of[run]
	if j == nil {
		if len(t.of) >= maxRuns {
			t.dropOldest()
		}
		j = newJob()
		t.of[run] = j
	}
	j.heard = now
	return j
}

// dropOldest forgets the run that was not heard of for longest.
func (t *runTable) dropOldest() {
	oldest := ""
	for _, name := range t.names() {
		if oldest == "" || t.of[name].heard.Before(t.of[oldest].heard) {
			oldest = name
		}
	}
	t.drop(oldest)
}

func (t *runTable) drop(run string) {
	t.setMembers(t.of[run], nil)
	delete(t.of, run)
	t.suspects = nil
}

func (t *runTable) names() []string { return slices.Sorted(maps.Keys(t.of)) }

// setMembers replaces the members of a run.
func (t *runTable) setMembers(j *job, members map[string]bool) {
	for name := range j.members {
		if !members[name] {
			t.leave(j, name)
		}
	}
	for name := range members {
		if !j.members[name] {
			t.in[name]++
			j.members[name] = true
		}
	}
	j.count()
}

func (t *runTable) leave(j *job, node string) {
	delete(j.members, node)
	if t.in[node]--; t.in[node] == 0 {
		delete(t.in, node)
	}
}

// forget takes machines out of all runs.
func (t *runTable) forget(nodes []string) {
	for _, name := range nodes {
		if t.in[name] == 0 {
			continue
		}
		for _, j := range t.of {
			if j.members[name] {
				t.leave(j, name)
				j.count()
			}
		}
	}
}

// suspect reports whether a machine is the culprit of so many failures of one run.
func (t *runTable) suspect(node string, repeats int) bool {
	if t.suspects == nil {
		t.suspects = map[string]bool{}
		for _, j := range t.of {
			for _, f := range j.failures {
				if f.Culprit != "" && j.times(f.Culprit) >= repeats {
					t.suspects[f.Culprit] = true
				}
			}
		}
	}
	return t.suspects[node]
}

// absolve takes the blame from a machine; false: there was none.
func (t *runTable) absolve(node string) (known bool) {
	for _, j := range t.of {
		known = j.absolve(node) || known
	}
	t.suspects = nil
	return known
}

// sweep forgets records that are older than old.
func (t *runTable) sweep(now, old time.Time, mass time.Duration) {
	for name, j := range t.of {
		if j.sweep(now, old, mass); !j.heard.After(old) {
			t.drop(name)
		}
	}
	t.suspects = nil
}

// load adds the members of a run that is restored.
func (t *runTable) load(j *job, members []string, known func(node string) bool) error {
	for _, name := range members {
		if !known(name) || j.members[name] || t.in[name] == maxRunsNode {
			return fmt.Errorf("member %.100q is not a node, is there twice, or takes part in more than %d runs", name,
				maxRunsNode)
		}
		j.members[name] = true
		t.in[name]++
	}
	return nil
}

// check reports errors in the job's blames and failures.
func (j *job) check(failures []failure) error {
	for i := range failures {
		f := &failures[i]
		if f.Culprit != "" && CheckName(f.Culprit) != nil {
			return CheckName(f.Culprit)
		}
		if err := reasonable(&f.At); err != nil {
			return err
		}
	}
	for i := range j.blames {
		o := &j.blames[i]
		if err := errors.Join(CheckName(o.Node), checkKind(o.Kind), reasonable(&o.At)); err != nil {
			return err
		}
	}
	return nil
}
