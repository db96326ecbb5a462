package gpuchild

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"dlrover-run/switchbox"
)

// ending is how a gpucheck ended.
type ending struct {
	stdout, stderr string
	status         int            // exit status; -1 where there is none
	signal         syscall.Signal // 0 where there is none
	late           bool           // it was still running at the deadline
	stuck          bool           // it did not end when it was killed
	took           time.Duration
}

// Exit statuses that mean something without a report: gpucheck's own for its command line, and the loader's.
const (
	statusUsage  = 2
	statusLoader = 127
)

// crashes are the signals that a program causes itself.
var crashes = []syscall.Signal{
	syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGABRT, syscall.SIGILL, syscall.SIGFPE, syscall.SIGTRAP, syscall.SIGSYS,
}

// report is gpucheck's own report, even if gpucheck failed after it, or else one derived from its exit.
func (e ending) report() (switchbox.Report, error) {
	r, err := switchbox.ParseReport([]byte(e.stdout))
	switch {
	case err == nil:
		return r, nil
	case e.stuck:
		return hangs(e.took), nil
	case e.late:
		return skip("gpucheck did not end within %s and was killed%s", e.took.Round(100*time.Millisecond), e.said()), nil
	case strings.TrimSpace(e.stdout) != "" && e.signal == 0:
		return suspicious("gpucheck printed something else than a report: %v", err), nil
	}
	return e.withoutReport()
}

// withoutReport derives a report from the exit status and from the output of the loader or of Go's runtime.
func (e ending) withoutReport() (switchbox.Report, error) {
	switch {
	case slices.Contains(crashes, e.signal):
		return suspicious("gpucheck crashed in the driver (%s)%s", e.signal, e.said()), nil
	case e.signal != 0: // sent by another process; the OOM killer, for one
		return skip("gpucheck was ended by a signal (%s)%s", e.signal, e.said()), nil
	case strings.Contains(e.stderr, "GLIBC_") && strings.Contains(e.stderr, "not found"):
		return skip("gpucheck needs a newer glibc than this image has%s", e.said()), nil
	case strings.Contains(e.stderr, "undefined symbol"):
		return skip("the NVIDIA driver is too old for gpucheck%s", e.said()), nil
	case e.status == statusLoader:
		return skip("gpucheck cannot be loaded%s", e.said()), nil
	case crashed(e.stderr):
		return suspicious("gpucheck crashed in the driver%s", e.said()), nil
	case e.status == statusUsage && strings.HasPrefix(e.stderr, "gpucheck: "):
		text := firstLine(strings.TrimPrefix(e.stderr, "gpucheck: "))
		return switchbox.Report{}, &UsageError{skip("%s", text).Reason} // which is printable
	default:
		return suspicious("gpucheck ended with status %d and no report%s", e.status, e.said()), nil
	}
}

// crashed reports whether Go's runtime has printed its farewell: it turns a signal into an exit status of 2.
func crashed(stderr string) bool {
	for _, sign := range []string{"fatal error: ", "[signal ", "SIGABRT: ", "SIGSEGV: ", "SIGBUS: ", "panic: ",
		"runtime: "} {
		if strings.HasPrefix(stderr, sign) || strings.Contains(stderr, "\n"+sign) {
			return true
		}
	}
	return false
}

// said is the first line on stderr, as the end of a sentence.
func (e ending) said() string {
	if line := firstLine(e.stderr); line != "" {
		return ": " + line
	}
	return ""
}

func firstLine(text string) string {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			return line
		}
	}
	return ""
}

// suspicious is a Report of a check that came to nothing in a way that a sound driver does not cause. It is no proof
// against the node: the fault may be gpucheck's own, and then all nodes would have it.
func suspicious(format string, args ...any) switchbox.Report {
	r := skip(format, args...)
	r.Findings = []switchbox.Finding{{Check: adaptor, Kind: "gpu.driver", Severity: switchbox.Warn, Text: r.Reason}}
	r.Conclude()
	return r
}

// hangs is the Report of a process that not even SIGKILL ends: it waits in the kernel for the driver.
func hangs(took time.Duration) switchbox.Report {
	r := switchbox.Report{Adaptor: adaptor, Findings: []switchbox.Finding{{
		Check: adaptor, Kind: "gpu.driver", Severity: switchbox.Fatal, Metric: "hang", Value: took.Seconds(), Unit: "s",
		Text: fmt.Sprintf("gpucheck hangs in the NVIDIA driver for %s and cannot be killed",
			took.Round(100*time.Millisecond)),
	}}}
	r.Conclude()
	return r
}
