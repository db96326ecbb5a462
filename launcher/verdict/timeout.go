package verdict

import (
	"cmp"
	"slices"
	"strings"
)

// timeouts are parts, in lower case, of the errors by which a collective, or the wait for its members, ends because a
// rank did not come in time. The errors of gloo and c10d were produced with torch 1.13 and 2.x; those of NCCL and HCCL
// are in public reports of torch 1.13 to 2.8. A connection that was closed, reset or refused is none of them: then the
// peer is gone.
func timeouts() []string {
	return []string{
		"caught collective operation timeout",         // ProcessGroupNCCL, its watchdog or a blocking wait
		"watchdog got stuck for",                      // ProcessGroupNCCL, the monitor of the watchdog
		"due to a collective timeout from",            // ProcessGroupNCCL, on the other ranks
		"for recv operation to complete",              // gloo: Timed out waiting 1800000ms for recv operation to complete
		"for send operation to complete",              // gloo
		"application timeout caused pair closure",     // gloo, in the collective after that
		"runtimeerror: operation timed out!",          // c10d: Work.wait(timeout)
		"timed out in monitoredbarrier",               // gloo
		"failed to pass monitoredbarrier",             // gloo
		"runtimeerror: socket timeout",                // TCPStore before 2.x: a key that was not set
		"runtimeerror: wait timeout",                  // FileStore: the same
		"wait timeout after",                          // the same in 2.x
		"wait execution of the notify register times", // HCCL
	}
}

// TimedOut reports whether text, an error of a worker or a cause that names one, means that a collective has timed out.
// The ranks that did not take part in it may still be there to be examined.
func TimedOut(text string) bool {
	text = strings.ToLower(text)
	return slices.ContainsFunc(timeouts(), func(t string) bool { return strings.Contains(text, t) })
}

// Timeout is in one line the timeout that ended f; "" if something else did.
func (f Failure) Timeout() string {
	for line := range strings.Lines(cmp.Or(f.Message, cause(f), f.LastLines)) {
		if TimedOut(line) {
			return clean(strings.TrimSpace(line), maxCause)
		}
	}
	return ""
}
