package main

import (
	"time"

	"dlrover-run/cmd/internal/resident"
	"dlrover-run/launcher"
)

// settled is the delay after the start of workers. Then the launcher no longer needs the pages of its startup.
const settled = 5 * time.Second

// thrift gives memory back once the workers run.
type thrift struct {
	launcher.NopObserver
	timer *time.Timer
}

func (t *thrift) Started(launcher.StartInfo) {
	if t.timer != nil {
		t.timer.Stop()
	}
	t.timer = time.AfterFunc(settled, resident.Release)
}
