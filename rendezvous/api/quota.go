package api

import "time"

// Bounds of the lines that the nodes of a run may add by one event in quotaTime. The room of a timeline does not bound
// them: every line also goes to the log, to the watchers of the run and to the marks of machines.
const (
	quotaTime = 10 * time.Minute
	quotaNode = 8
	quotaRun  = 64
)

// quota counts lines from nodes. The zero value is ready for use.
type quota struct {
	begun time.Time
	taken map[[2]string]int // by event and node ("" for all of the run)
}

func (q *quota) take(now time.Time, event, node string) bool {
	if q.taken == nil || now.Sub(q.begun) >= quotaTime {
		q.begun, q.taken = now, map[[2]string]int{}
	}
	own, all := [2]string{event, node}, [2]string{event}
	if q.taken[own] >= quotaNode || q.taken[all] >= quotaRun {
		return false
	}
	q.taken[own]++
	q.taken[all]++
	return true
}
