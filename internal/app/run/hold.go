package run

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/leavenotice"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/argv"
	"dlrover-run/rendezvous"
)

// holding is the part of the settings for a job that waits, or leaves.
type holding struct {
	onResume   *job.Command  // given in advance; nil: none
	meanwhile  []string      // argv of the command that runs while the run is held
	leaveGrace time.Duration // for a node that leaves; 0: no bound
}

// holdSettings are the options of a job that waits, continues with another command, or leaves.
type holdSettings struct {
	Held      bool     `json:"held,omitempty"`
	Meanwhile []string `json:"meanwhile,omitempty"` // argv of the command that runs while the run is held
	OnResume  string   `json:"resume_command,omitempty"`
	LeaveOn   string   `json:"leave_on,omitempty"`
	Grace     string   `json:"leave_grace,omitempty"`
}

func holdFeature() row {
	var k holdSettings
	return row{
		name:     "hold",
		settings: func(o *options, s *settings) (err error) { k, err = readHold(o, s); return err },
		plan: func(p *plan) {
			if k.Held || k.OnResume != "" || k.LeaveOn != "" {
				p.Features["hold"] = k
			}
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			if k.LeaveOn == "" {
				return nil, nil
			}
			return leavenotice.Open(k.LeaveOn, j.log), nil
		},
	}
}

// Bounds of --leave-grace.
const (
	defaultLeaveGrace = 30 * time.Second // the default terminationGracePeriodSeconds of a pod
	maxLeaveGrace     = 24 * time.Hour
	maxLeaveMargin    = 2 * time.Second
)

func readHold(o *options, s *settings) (k holdSettings, err error) {
	if k.Held = o.IsSet("hold"); k.Held {
		if k.Meanwhile, err = argv.Words(o.String("hold")); err != nil {
			return k, fmt.Errorf("--hold=%s: %w", o.String("hold"), err)
		}
		s.hold.meanwhile = k.Meanwhile
		if s.params.Hold = true; s.rdzv.backend == local {
			o.Warn("--hold: nobody can start a job whose rendezvous stays inside its launcher; it is held until it is ended")
		}
	}
	for _, step := range []func(*options, *settings, *holdSettings) error{readOnResume, readLeaveGrace, readLeaveOn} {
		if err := step(o, s, &k); err != nil {
			return k, err
		}
	}
	s.node.Can = append(s.node.Can, rendezvous.CanHold, rendezvous.CanLeave)
	if s.auth.token != "" { // without a token, anyone could have commands executed through the rendezvous
		s.node.Can = append(s.node.Can, rendezvous.CanCommand)
	}
	return k, nil
}

// readOnResume reads the command that is given in advance.
func readOnResume(o *options, s *settings, k *holdSettings) (err error) {
	if !o.IsSet("resume-command") && !o.IsSet("resume-args") {
		return nil
	}
	if s.auth.token == "" {
		return errors.New("--resume-command and --resume-args need a job token: give every node the same DLROVER_TOKEN, " +
			"DLROVER_TOKEN_FILE or --token-file")
	}
	c := &job.Command{}
	if c.Program, err = argv.Words(o.String("resume-command")); err != nil {
		return fmt.Errorf("--resume-command: %w", err)
	}
	if o.IsSet("resume-args") {
		if c.Args, err = argv.Words(o.String("resume-args")); err != nil {
			return fmt.Errorf("--resume-args: %w", err)
		}
		c.Args = append([]string{}, c.Args...) // none is not the same as this node's own
	}
	s.hold.onResume, k.OnResume = c, c.String()
	return c.Validate()
}

// readLeaveGrace sets the deadline of a node that leaves. A user who sets only the workers' shutdown timeout limits
// nothing else.
func readLeaveGrace(o *options, s *settings, k *holdSettings) (err error) {
	grace := defaultLeaveGrace
	switch {
	case o.IsSet("leave-grace"):
		if grace, err = o.Within("leave-grace", time.Millisecond, maxLeaveGrace); err != nil {
			return err
		}
	case o.IsSet("shutdown-timeout") || o.Lookup("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") != "":
		grace = 0
	}
	k.Grace = grace.String()
	s.hold.leaveGrace = grace - min(maxLeaveMargin, grace/10)
	return nil
}

func readLeaveOn(o *options, _ *settings, k *holdSettings) error {
	k.LeaveOn = o.String("leave-on")
	if k.LeaveOn == "" || filepath.IsAbs(k.LeaveOn) {
		return nil
	}
	u, err := url.Parse(k.LeaveOn)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("--leave-on=%s: need the absolute path of a file, or a URL that begins with http:// or https://",
			k.LeaveOn)
	}
	return nil
}
