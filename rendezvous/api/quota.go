package api

import "time"

// Bounds of what the nodes of a run tell by one event in quotaTime. Every line goes to the log, to who watches the run
// and to what marks machines, too, so that the room of a timeline does not bound it.
const (
	quotaTime = 10 * time.Minute
	quotaNode = 8
	quotaRun  = 64
)

// quota counts what is told. The zero value is ready for use.
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
