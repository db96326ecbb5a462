// Package filetimer serves the file timer of torch, which workers find in their environment.
package filetimer

import (
	"errors"
	"fmt"
	"log/slog"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/launcher"
	"dlrover-run/launcher/filetimer"
)

// New is the feature.
func New() feature.Feature {
	var on bool
	var path string // "": one of our own
	return feature.Feature{
		Name: "file timer",
		Settings: func(o feature.Options) error {
			const enable = "TORCHELASTIC_ENABLE_FILE_TIMER"
			text := o.Lookup(enable)
			if on, path = text == "1", o.Lookup("TORCHELASTIC_TIMER_FILE"); !on && text != "" && text != "0" {
				o.Warn("$%s=%q starts no file timer; as in torchrun only 1 does", enable, text)
			}
			return nil
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if !on {
				return nil, nil
			}
			return open(n.Log(), path)
		},
	}
}

// open serves the timer to workers. A path that is served already belongs to a launcher around this one, or
// to another node on this machine. Workers find ours in their environment.
func open(log *slog.Logger, path string) (*feature.Opened, error) {
	fifo, err := filetimer.Listen(path, log)
	if errors.Is(err, filetimer.ErrServed) {
		log.Warn("another process serves $TORCHELASTIC_TIMER_FILE; the workers get a file timer at another path",
			"path", path)
		fifo, err = filetimer.Listen("", log)
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
