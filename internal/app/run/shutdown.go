package run

import (
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"dlrover-run/internal/duration"
	"dlrover-run/launcher"
	"dlrover-run/launcher/argv"
)

// shutdown is the signals that end the job, and the time that workers have then.
type shutdown struct {
	signals []syscall.Signal
	text    string // --signals-to-handle
	timeout time.Duration
	restart launcher.Restart
}

func readShutdown(o *options) (s shutdown, err error) {
	var warnings []string
	s.text, s.timeout = o.String("signals-to-handle"), 30*time.Second
	if s.signals, warnings, err = argv.ParseSignals(s.text); err != nil {
		return s, err
	}
	for _, w := range warnings {
		o.Warn("%s", w)
	}
	if text := o.Lookup("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"); o.IsSet("shutdown-timeout") {
		s.timeout, err = o.grace("shutdown-timeout")
	} else if text != "" {
		if s.timeout, err = duration.Within(text, 0, maxGrace); err != nil {
			err = fmt.Errorf("$TORCH_ELASTIC_SHUTDOWN_TIMEOUT: %w", err)
		}
	}
	if err != nil {
		return s, err
	}
	s.restart.Always = o.IsSet("restart-grace")
	s.restart.Grace, err = o.grace("restart-grace")
	return s, err
}

// ends reports whether the signal ends the job.
func (s *shutdown) ends(sig os.Signal) bool {
	n, ok := sig.(syscall.Signal)
	return ok && slices.Contains(s.signals, n)
}
