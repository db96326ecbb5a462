package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// Events of a launcher (--event-log), of a worker (train.py) and of this program.
const (
	evStart      = "start"         // launcher: starts the workers of (Round, Epoch)
	evWorkerExit = "worker-exit"   // launcher
	evPrepared   = "warm-prepared" // launcher: has imported the modules of the next workers
	evUp         = "up"            // worker: has joined its process group
	evStep       = "step"          // worker of rank 0: has done a step
	evTrained    = "trained"       // worker of rank 0: has done the last one
	evFault      = "fault"         // we are about to break or add something
	evExit       = "exit"          // a process that we started has ended
)

// record is one event, in the order of arrival. The JSON keys are those of the launcher's event log and of train.py.
type record struct {
	Time      time.Time `json:"time"` // of a worker's line: when it was read
	Event     string    `json:"event"`
	From      string    `json:"-"` // the launcher that wrote it, or that of the worker
	Round     int       `json:"round"`
	Epoch     int       `json:"epoch"`
	Node      int       `json:"node"` // group rank
	Nodes     int       `json:"nodes"`
	WorldSize int       `json:"world_size"`
	Cause     string    `json:"cause"`
	Rank      int       `json:"rank"`
	PID       int       `json:"pid"`
	ExitCode  int       `json:"exit_code"`
	Stopped   bool      `json:"stopped"`
	Step      int       `json:"step"`
	Loss      float64   `json:"loss"`
	Accuracy  float64   `json:"accuracy"`
	What      string    `json:"-"` // of a fault: in words
}

// parseRecord reads a line of either source; ok is false for any other text.
func parseRecord(line []byte) (r record, ok bool) {
	if !bytes.HasPrefix(line, []byte("{")) || json.Unmarshal(line, &r) != nil {
		return record{}, false
	}
	return r, r.Event != ""
}

// recovery is the effect of one fault.
type recovery struct {
	What string
	At   time.Time
	// Launchers is the time until the last launcher of the next world started its
	// workers, Training until these had done a step.
	Launchers, Training time.Duration
	WorldBefore, World  int
	// StepBefore is the last step of the old workers, Step the first of the new.
	StepBefore, Step int
	Epochs           int // worlds that it took
}

// recoveries finds the effects of each fault; the first "fault" is the start of the job. It ends before a fault that
// no training step followed.
func recoveries(rs []record) ([]recovery, error) {
	var out []recovery
	for i, r := range rs {
		if r.Event != evFault {
			continue
		}
		rec, err := recoveryOf(rs, i)
		if err != nil {
			return out, err
		}
		out = append(out, rec)
	}
	return out, nil
}

// recoveryOf finds the first step of a rank 0 without steps before fault f. Lines of the old rank 0 may still arrive
// after the fault.
func recoveryOf(rs []record, f int) (recovery, error) {
	rec := recovery{What: rs[f].What, At: rs[f].Time}
	old := map[int]bool{}
	for i, r := range rs {
		switch {
		case r.Event != evStep:
		case i < f || old[r.PID]:
			old[r.PID] = true
			rec.StepBefore, rec.WorldBefore = r.Step, r.WorldSize
		default:
			rec.Step, rec.World, rec.Training = r.Step, r.WorldSize, r.Time.Sub(rec.At)
			rec.Launchers, rec.Epochs = decided(rs, rec.At, r.Time)
			return rec, nil
		}
	}
	return rec, fmt.Errorf("no training after: %s", rec.What)
}

// decided is the number of epochs between fault and step, and the time until the workers of the newest one had
// started. The last launcher counts.
func decided(rs []record, fault, step time.Time) (last time.Duration, epochs int) {
	var newest [2]int
	for _, r := range rs {
		if r.Event != evStart || r.Time.Before(fault) || r.Time.After(step) {
			continue
		}
		at := [2]int{r.Round, r.Epoch}
		switch c := slices.Compare(at[:], newest[:]); {
		case c > 0:
			newest, last = at, r.Time.Sub(fault)
			epochs++
		case c == 0:
			last = max(last, r.Time.Sub(fault))
		}
	}
	return last, epochs
}

// losses returns the first and the last loss.
func losses(rs []record) (first, last float64) {
	for _, r := range rs {
		if r.Event != evStep {
			continue
		}
		if first == 0 {
			first = r.Loss
		}
		last = r.Loss
	}
	return first, last
}
