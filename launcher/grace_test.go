package launcher

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
)

// Workers that catch the signal, as JAX's do, are killed soon where others follow and nothing is lost by it.
func TestRestartGrace(t *testing.T) {
	const catches = `[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; trap '' TERM; : > $DIR/up.$RANK; ` +
		`while [ ! -e $DIR/go ]; do sleep 0.01; done; : > $DIR/late.$RANK`
	saved := func(yes bool) func(*Config) {
		return func(c *Config) { c.Saved = func(context.Context) bool { return yes } }
	}
	for name, c := range map[string]struct {
		change    func(*Config)
		kind      job.Kind
		causeKind job.CauseKind
		quick     bool
	}{
		"nothing is known": {func(*Config) {}, job.Stop, "node-loss", false},
		"it was asked for": {func(c *Config) { c.Restart.Always = true }, job.Stop, "node-loss", true},
		"the preset":       {func(c *Config) { c.Preset.QuickRestart = true }, job.Stop, "node-leave", true},
		"a save":           {saved(true), job.Stop, "growth", true},
		"no save":          {saved(false), job.Stop, "hang", false},
		"a pause":          {func(c *Config) { c.Restart.Always = true }, job.Stop, "operator", false},
		"the end":          {func(c *Config) { c.Restart.Always = true }, job.Fail, "node-loss", false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, catches, 0)
			r.cfg.ShutdownTimeout, r.cfg.Restart.Grace = time.Hour, 50*time.Millisecond
			c.change(&r.cfg)
			r.whenUp(t, func() {
				r.fakeRdzv.orderFor(c.kind, c.causeKind)
				if !c.quick {
					time.Sleep(4 * r.cfg.Restart.Grace)
					require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go"), nil, 0o600))
				}
			})
			r.run(t)
			for _, rank := range []string{"0", "1"} {
				_, err := os.Stat(filepath.Join(r.dir, "late."+rank))
				require.Equal(t, c.quick, err != nil, "the end of rank %s", rank)
			}
		})
	}
}

func (s *fakeRdzv) orderFor(k job.Kind, causeKind job.CauseKind) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.d
	d.Kind, d.Cause.Kind = k, causeKind
	s.dirs <- d
}

// Who uses the grace to write what it has keeps it.
func TestRestartGraceIsForSaving(t *testing.T) {
	r := newRig(t, `[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && exec sh -c `+
		`'while [ ! -e $DIR/up.0 ]; do sleep 0.01; done; exit 1'; `+
		`trap 'sleep 0.2; : > $DIR/saved; exit 0' TERM; : > $DIR/up.0; while :; do sleep 0.01; done`, 1)
	<-r.fakeRdzv.dirs
	r.fakeRdzv.d.MaxRestarts = 1
	r.fakeRdzv.dirs <- r.fakeRdzv.d
	r.cfg.ShutdownTimeout, r.cfg.Restart = time.Hour, Restart{Grace: 20 * time.Second, Always: true}
	require.Equal(t, policy.Success, r.run(t).Reason)
	require.FileExists(t, filepath.Join(r.dir, "saved"))
}

// A failure that ends the job leaves the others all the time that they may have.
func TestNoRestartGraceAtTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		act      policy.Action
		spent    int
		restarts bool
	}{
		"charged":     {policy.RestartCharged, 1, true},
		"spent":       {policy.RestartCharged, 2, false},
		"not charged": {policy.RestartFree, 2, true},
		"for good":    {policy.Fail, 0, false},
	} {
		g := &group{epoch: Epoch{Directive: Directive{MaxRestarts: 2, Place: job.Place{RestartCount: c.spent}}}}
		g.failed(c.act)
		require.Equal(t, c.restarts, g.again.Load(), name)
	}
}
