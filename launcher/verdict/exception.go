package verdict

import (
	"slices"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// Exceptions are the classes of the Python exception that ended f, with their modules where the traceback gives them:
// "torch.cuda.OutOfMemoryError", "ValueError". There are several for a group of exceptions, and for an exception of
// Ray's, which counts as the wrapped ones, too. There are none if no exception is known to have ended it.
func (f Failure) Exceptions() []string {
	if f.Message == "" && f.ExitCode <= 0 && f.ExitCode != -int(unix.SIGINT) {
		return nil // a signal ended it, so that it survived all printed exceptions
	}
	for _, text := range []string{f.Traceback, f.LastLines} {
		if name := className(pythonError(text)); name != "" {
			return append([]string{name}, others(text)...)
		}
	}
	if name := className(firstLine(f.Message)); name != "" {
		return []string{name}
	}
	return nil
}

// others are the classes of a group's exceptions, and of the wrappers of an exception of another process.
func others(text string) (names []string) {
	for _, line := range grouped(text) {
		if name := className(line); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	lines, _ := errorLines(text)
	for _, line := range lines {
		outer, inner, is := strings.Cut(line, "(")
		if name, _, ends := strings.Cut(inner, "):"); is && ends && isClass(outer) && isClass(name) {
			names = append(names, outer)
		}
	}
	return names
}

// LastException is the line that names the exception of the last Python traceback in an output, "" without any.
func LastException(output string) string { return pythonError(Plain([]byte(output))) }

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

// Follows reports whether the error that ended f means that another process is gone, stuck or stopping.
func (f Failure) Follows() bool { return f.OOM == nil && f.Timer == "" && followed(f) }
