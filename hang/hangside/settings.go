package hangside

import (
	"fmt"

	"dlrover-run/hang"
	"dlrover-run/hang/hangtell"
)

// How hangs are found.
const (
	Off     = "off"
	outside = "outside"
)

// Settings reads the options --hang and --hang-action, and XPU_TIMER_HANG_TIMEOUT; nil: no hang is looked for.
func Settings(mode, action string, acts bool, env func(string) (string, bool)) (*Config, error) {
	c := &Config{Spec: hang.Spec{Action: hang.Action(action)}}
	switch {
	case mode != Off && mode != outside:
		return nil, fmt.Errorf("--hang=%s: need outside or off: the shim of auto is the launcher's", mode)
	case c.Spec.Validate() != nil:
		return nil, fmt.Errorf("--hang-action=%s: need report, restart or stop", action)
	case mode == Off && acts:
		return nil, fmt.Errorf("--hang-action=%s needs --hang=outside", action)
	case mode == Off:
		return nil, nil
	}
	text, _ := env("XPU_TIMER_HANG_TIMEOUT")
	if text == "" {
		return c, nil
	}
	after, err := hangtell.Timeout(text)
	c.Spec.After = after
	return c, err
}
