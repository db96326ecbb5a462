package verdict

import (
	"cmp"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// consequences are parts, in lower case, of the errors that a worker gets when another process is gone, stuck or
// stopping. The errors of gloo and TCPStore were seen with torch 1.13 and 2.15, the others read in libtorch 2.15 and
// NCCL 2.30.
func consequences() []string {
	return []string{
		"connection closed by peer",                          // gloo; the peer ended normally
		"connection reset by peer",                           // gloo and TCPStore; the peer was killed
		"broken pipe",                                        // TCPStore before 2.x, writing to a store that is gone
		"connection was likely closed",                       // TCPStore 2.x
		"remote peer closed the connection",                  // c10d sockets
		"socket timeout",                                     // TCPStore before 2.x: a key that was not set
		"wait timeout after",                                 // the same in 2.x
		"socket has timed out after",                         // connecting to a store that is not there
		"for recv operation to complete",                     // gloo: timed out waiting for a peer
		"for send operation to complete",                     //
		"application timeout caused pair closure",            // gloo: in the next collective after such a timeout
		"runtimeerror: operation timed out!",                 // c10d: Work.wait(timeout)
		"remote process exited or there was a network error", // NCCL
		"ncclremoteerror",                                    //
		"connection closed by remote peer",                   //
		"watchdog caught collective operation timeout",       // ProcessGroupNCCL: a peer did not join in
		"nccl communicator was aborted",                      //
		"is killed by signal: terminated",                    // DataLoader, when its worker got the stop signal first
	}
}

// followed reports whether f ended by an error that is a known consequence: an exception, or a SIGABRT when it was
// thrown in a C++ thread such as NCCL's watchdog. Other signals have causes of their own, regardless of the output.
func followed(f Failure) bool {
	if f.Message == "" && f.ExitCode <= 0 && f.ExitCode != -int(unix.SIGABRT) || f.lostSharer() {
		return false
	}
	return isConsequence(cmp.Or(f.Message, cause(f), f.LastLines))
}

func isConsequence(text string) bool {
	text = strings.ToLower(text)
	return slices.ContainsFunc(consequences(), func(c string) bool { return strings.Contains(text, c) })
}

// reactions are parts, in lower case, of a worker's output when it has to stop.
func reactions() []string {
	return []string{"keyboardinterrupt", "systemexit", "signalexception", "got signal", "killed by signal",
		"exited unexpectedly", "termination signal", "sigterm"}
}

// Explains reports whether a worker that the launcher stopped may have failed before. It then has an error file, or its
// output ends in an error that neither the stop nor another process has caused.
func (f Failure) Explains() bool {
	if !f.ErrorTime.IsZero() {
		return true
	}
	e := finalError(f.LastLines)
	if e == "" || isConsequence(e) || f.lostSharer() {
		return false
	}
	e = strings.ToLower(e)
	return !slices.ContainsFunc(reactions(), func(r string) bool { return strings.Contains(e, r) })
}

// EndsInError reports whether an output ends in a Python error: nothing more than the rest of its message follows.
func EndsInError(output string) bool { return finalError(output) != "" }

// finalError is the line of the error that text ends in, "" if it goes on after the last one.
func finalError(text string) string {
	text = withoutIgnored(text)
	e := pythonError(text)
	more := 0
	for line := range strings.Lines(text[strings.LastIndex(text, e)+len(e):]) {
		more += strings.Count(line, "\n")
		if strings.HasSuffix(className(e), "Group") && stackLine(strings.TrimRight(line, "\n")) {
			more-- // of the exceptions in it
		}
	}
	if more > maxMore {
		return ""
	}
	return e
}

// Tells reports whether the worker's own words name an exception.
func (f Failure) Tells() bool { return f.Message != "" || cause(f) != "" }

// maxMore is how many lines may follow an error that ended a worker: the rest of its message.
const maxMore = 5

// LostChild reports whether f names a killed process that the worker had started.
func (f Failure) LostChild() bool {
	text := strings.ToLower(cmp.Or(f.Message, cause(f)))
	return strings.Contains(text, "killed by signal: killed") || strings.Contains(text, "exited unexpectedly") ||
		strings.Contains(text, "terminated with signal sigkill") || f.lostSharer()
}

// lostSharer reports whether a connection broke over which a process of the worker's own was to hand a tensor. Before
// Python 3.14 a DataLoader's worker is a child by default; PyTorch notices its end before it gets that far.
func (f Failure) lostSharer() bool {
	text := cmp.Or(f.Traceback, f.LastLines)
	e := pythonError(text)
	stack := text[:strings.LastIndex(text, e)]
	i := strings.LastIndex(stack, `  File "`)
	return e != "" && i >= 0 && strings.Contains(firstLine(stack[i:]), `multiprocessing/connection.py"`) &&
		strings.Contains(stack, `multiprocessing/resource_sharer.py"`)
}

// cause is the error that ended the worker, from its own output: "ValueError: bad batch". It is "" if no error can be
// recognised.
func cause(f Failure) string {
	if line := firstLine(f.Message); line != "" {
		return withNCCL(line, strings.Split(f.Message, "\n"))
	}
	for _, text := range []string{f.Traceback, f.LastLines} {
		if e := pythonError(text); e != "" {
			if lines, _ := errorLines(text); lines != nil {
				e = withNCCL(e, lines)
			}
			if in := grouped(text); len(in) > 0 {
				e += ", first " + in[0]
			}
			return e
		}
		if e := cppError(text); e != "" {
			return e
		}
	}
	return ""
}

// withNCCL adds to PyTorch's line about an error of NCCL the line in which NCCL names it.
func withNCCL(e string, lines []string) string {
	i := slices.Index(lines, "Last error:") + 1
	if i == 0 || i == len(lines) || !strings.Contains(e, "NCCL error in: ") || !startsWithLetter(lines[i]) {
		return e
	}
	return e + ": " + lines[i]
}

func startsWithLetter(s string) bool { return strings.IndexFunc(s, unicode.IsLetter) == 0 }

// cppError finds the text of std::terminate about an uncaught exception.
func cppError(text string) string {
	if i := strings.LastIndex(text, "what():"); i >= 0 {
		return firstLine(text[i+len("what():"):])
	}
	return ""
}

// firstLine is the first line of s with something in it.
func firstLine(s string) string {
	first, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return strings.TrimSpace(first)
}

// lastLine is the last line of s with something in it.
func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return strings.TrimSpace(s[strings.LastIndexByte(s, '\n')+1:])
}
