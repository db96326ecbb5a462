package verdict

import (
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// Exception is the class of the Python exception that ended f, with its module where the traceback gives one:
// "torch.cuda.OutOfMemoryError", "ValueError". It is "" if no exception is known to have.
func (f Failure) Exception() string {
	texts := []string{pythonError(f.Traceback), pythonError(f.LastLines), firstLine(f.Message)}
	if f.Message == "" && f.ExitCode <= 0 && f.ExitCode != -int(unix.SIGINT) {
		return "" // a signal ended it: whatever it has printed was survived
	}
	for _, text := range texts {
		if name, _, _ := strings.Cut(text, ":"); isClass(name) {
			return name
		}
	}
	return ""
}

// isClass reports whether s can be the dotted name of a Python class.
func isClass(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || unicode.IsDigit([]rune(part)[0]) || strings.ContainsFunc(part, func(r rune) bool {
			return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
		}) {
			return false
		}
	}
	return true
}

// Follows reports whether f ended by an error that says that another process is gone, stuck or told to stop.
func (f Failure) Follows() bool { return f.OOM == nil && f.Timer == "" && followed(f) }
