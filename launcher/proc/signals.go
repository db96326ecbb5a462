package proc

import (
	"fmt"
	"strconv"
	"strings"
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

// ParseSignal reads a signal by name in any case, with or without SIG, or by
// number: "SIGTERM", "term", "15", "SIGRTMIN+2", "SIGRTMAX-1".
func ParseSignal(text string) (syscall.Signal, error) {
	name := strings.TrimPrefix(strings.ToUpper(strings.TrimSpace(text)), "SIG")
	if n, err := strconv.Atoi(name); err == nil && n >= 1 && n <= sigRTMax {
		return syscall.Signal(n), nil
	}
	if sig := namedSignal(name); sig != 0 {
		return sig, nil
	}
	return 0, fmt.Errorf("unknown signal %q: give a name such as SIGTERM, or a number from 1 to %d", text, sigRTMax)
}

func namedSignal(name string) syscall.Signal {
	switch name { // second names that x/sys does not know
	case "IOT":
		return unix.SIGIOT
	case "CLD":
		return unix.SIGCLD
	case "POLL":
		return unix.SIGPOLL
	}
	if off, ok := strings.CutPrefix(name, "RTMIN"); ok {
		return realTime(sigRTMin, off, "+")
	}
	if off, ok := strings.CutPrefix(name, "RTMAX"); ok {
		return realTime(sigRTMax, off, "-")
	}
	return unix.SignalNum("SIG" + name)
}

// realTime returns base moved by off ("", "+2", "-1"); 0 if that is no
// real-time signal.
func realTime(base int, off, sign string) syscall.Signal {
	n := 0
	if off != "" {
		var err error
		if n, err = strconv.Atoi(off); err != nil || !strings.HasPrefix(off, sign) {
			return 0
		}
	}
	if n += base; n < sigRTMin || n > sigRTMax {
		return 0
	}
	return syscall.Signal(n)
}
