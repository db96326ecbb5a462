package run

import (
	"errors"
	"fmt"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/launcher"
	"dlrover-run/launcher/filetimer"
)

// fileTimerFeature is torch's file timer, which workers find in their environment.
func fileTimerFeature() row {
	var on bool
	var path string // "": one of our own
	return row{
		name: "file timer",
		settings: func(o *options, s *settings) error {
			const enable = "TORCHELASTIC_ENABLE_FILE_TIMER"
			text := o.Lookup(enable)
			if on, path = text == "1", o.Lookup("TORCHELASTIC_TIMER_FILE"); !on && text != "" && text != "0" {
				o.Warn("$%s=%q starts no file timer; as in torchrun only 1 does", enable, text)
			}
			return nil
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			if !on {
				return nil, nil
			}
			return openFileTimer(j, path)
		},
	}
}

// openFileTimer serves the timer to workers. A path that is served already belongs to a launcher around this one, or
// to another node on this machine. Workers find ours in their environment.
func openFileTimer(j *nodeJob, path string) (*feature.Opened, error) {
	fifo, err := filetimer.Listen(path, j.log)
	if errors.Is(err, filetimer.ErrServed) {
		j.log.Warn("another process serves $TORCHELASTIC_TIMER_FILE; the workers get a file timer at another path",
			"path", path)
		fifo, err = filetimer.Listen("", j.log)
	}
	if err != nil {
		return nil, feature.Unusable(fmt.Errorf("$TORCHELASTIC_ENABLE_FILE_TIMER=1: %w; set TORCHELASTIC_TIMER_FILE to a "+
			"path that this user may write to, or leave the timer out", err))
	}
	configure := func(cfg *launcher.Config) {
		cfg.Timers, cfg.Env = fifo.Requests(), append(cfg.Env, "TORCHELASTIC_TIMER_FILE="+fifo.Path())
	}
	return &feature.Opened{Configure: configure, Close: fifo.Close}, nil
}
