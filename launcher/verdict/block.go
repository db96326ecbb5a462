package verdict

import (
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Block is the report that torchrun 2.11 and later prints about one node, byte for byte, from the empty line it begins
// with to the closing border, without a newline. root is the index of the failure that is called the first observed
// one. If it is out of range, torchrun's own choice is taken: the earliest whole second, then the order given. Times
// are written in the zone they carry.
func Block(entrypoint string, failures []Failure, root int) string {
	if len(failures) == 0 {
		return ""
	}
	if root < 0 || root >= len(failures) {
		root = earliest(failures)
	}
	title := entrypoint + " FAILED"
	width := utf8.RuneCountInString(title)
	var rootText string
	var others []string
	for i, f := range failures {
		text := failureText(i, f)
		for line := range strings.SplitSeq(text, "\n") {
			width = max(width, utf8.RuneCountInString(line))
		}
		if i == root {
			rootText = text
		} else {
			others = append(others, text)
		}
	}
	if len(others) == 0 {
		others = []string{"  <NO_OTHER_FAILURES>"}
	}
	width = min(width, 60)
	border, section := strings.Repeat("=", width), strings.Repeat("-", width)
	return strings.Join([]string{"", border, title, section, "Failures:", strings.Join(others, "\n"), section,
		"Root Cause (first observed failure):", rootText, border}, "\n")
}

func earliest(failures []Failure) int {
	first := 0
	for i, f := range failures {
		if shownTime(f).Unix() < shownTime(failures[first]).Unix() {
			first = i
		}
	}
	return first
}

func shownTime(f Failure) time.Time {
	if f.ErrorTime.IsZero() {
		return f.At
	}
	return f.ErrorTime
}

func failureText(index int, f Failure) string {
	errorFile, signal := f.ErrorFile, ""
	if errorFile == "" {
		errorFile = "<N/A>"
	}
	if name := signalName(-f.ExitCode); name != "" {
		signal = " (" + name + ")" // after a space that stands there without a signal too
	}
	pid := strconv.Itoa(f.PID)
	return "[" + strconv.Itoa(index) + "]:" +
		"\n  time      : " + shownTime(f).Format("2006-01-02_15:04:05") +
		"\n  host      : " + f.Host +
		"\n  rank      : " + strconv.Itoa(f.Rank) + " (local_rank: " + strconv.Itoa(f.LocalRank) + ")" +
		"\n  exitcode  : " + strconv.Itoa(f.ExitCode) + " (pid: " + pid + ") " + signal +
		"\n  error_file: " + errorFile +
		"\n  traceback : " + failureDetail(f, pid)
}

func failureDetail(f Failure, pid string) string {
	switch {
	case f.Traceback != "":
		return strings.ReplaceAll(f.Traceback, "\n", "\n  ")
	case f.Message != "":
		return f.Message
	case f.ExitCode < 0:
		name := signalName(-f.ExitCode)
		if name == "" {
			name = "<N/A>"
		}
		return "Signal " + strconv.Itoa(-f.ExitCode) + " (" + name + ") received by PID " + pid
	}
	return "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
}
