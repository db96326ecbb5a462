package upstream

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"sync"
	"time"

	"dlrover-run/internal/job"
)

// failureLog holds the failures of an epoch, each once.
type failureLog []job.Failure

func (l *failureLog) add(fs []job.Failure) {
	for _, f := range fs {
		if !slices.ContainsFunc(*l, func(g job.Failure) bool { return g.Rank == f.Rank && g.At.Equal(f.At) }) {
			*l = append(*l, f)
		}
	}
}

// unsent is a failure of workers that the master does not know yet.
type unsent struct {
	epoch job.EpochID
	data  string
	spent int
	world world
	blame bool // no other node's failure has caused it
}

// reports holds the failures that the master does not know yet.
type reports struct {
	sending chan struct{} // full while they are sent

	mu     sync.Mutex
	unsent []unsent
}

// add takes a failure, once.
func (r *reports) add(u unsent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.ContainsFunc(r.unsent, func(o unsent) bool { return o.epoch == u.epoch && o.data == u.data }) {
		r.unsent = append(r.unsent, u)
	}
}

// send sends all of them. A launcher that leaves may do so during another call.
func (r *reports) send(ctx context.Context, m *master) error {
	select {
	case r.sending <- struct{}{}:
		defer func() { <-r.sending }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		r.mu.Lock()
		all := r.unsent
		r.mu.Unlock()
		if len(all) == 0 {
			return nil
		}
		if all[0].blame {
			m.kv.takeBlame(ctx, all[0].world)
		}
		if err := m.failure(ctx, processError, all[0].data, all[0].spent); err != nil {
			return err
		}
		r.mu.Lock()
		r.unsent = r.unsent[1:]
		r.mu.Unlock()
	}
}

// processErrors is the format of DLRover's agent: an object by global rank, whole within maxErrorData.
func processErrors(fs []job.Failure) string {
	for limit := 1024; ; limit /= 2 {
		all := map[string]any{}
		for _, f := range fs {
			var d struct {
				LocalRank int    `json:"local_rank"`
				ExitCode  int    `json:"exit_code"`
				Message   string `json:"message"`
			}
			_ = json.Unmarshal(f.Detail, &d) // missing fields are zero
			text := d.Message
			if text == "" {
				text = f.Text
			}
			all[strconv.Itoa(f.Rank)] = map[string]any{"local_rank": d.LocalRank, "exitcode": d.ExitCode,
				"message": text[:min(len(text), limit)], "datetime": f.At.UTC().Format(time.DateTime)}
		}
		data, err := json.Marshal(all)
		if err == nil && len(data) <= maxErrorData {
			return string(data)
		}
		if limit == 0 {
			fs = fs[:len(fs)/2]
		}
	}
}
