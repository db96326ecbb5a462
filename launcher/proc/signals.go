package proc

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Real-time signals as the kernel and glibc number them; glibc keeps 32 and 33.
const (
	sigRTMin = 34
	sigRTMax = 64
)

// SignalName returns the name of a signal: "SIGKILL", "SIGRTMIN+2", or
// "signal 32" for a number without a name.
func SignalName(sig syscall.Signal) string {
	switch name := unix.SignalName(sig); {
	case name != "":
		return name
	case sig == sigRTMin:
		return "SIGRTMIN"
	case sig > sigRTMin && sig <= sigRTMax:
		return fmt.Sprintf("SIGRTMIN+%d", sig-sigRTMin)
	default:
		return fmt.Sprintf("signal %d", int(sig))
	}
}
