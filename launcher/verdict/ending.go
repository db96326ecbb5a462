package verdict

import (
	"slices"
	"strings"

	"dlrover-run/internal/text"
)

// Ending is the end of a worker's output, in whole lines of at most limit bytes together. Where the error that ended
// the worker is longer, its own lines come first: those that name it and its causes, without the stacks between them.
func Ending(text string, limit int) string {
	end := lastLines(text, limit)
	if len(end) == len(text) {
		return text
	}
	for { // the lines put first shorten the end, which may then have lost more of the error
		first := missing(text, end, limit)
		if len(first) > limit {
			return end
		}
		rest := lastLines(text, limit-len(first))
		if len(rest) >= len(end) {
			return first + end
		}
		end = rest
	}
}

// missing are the lines of the error at the end of a text that are not in end, or "".
func missing(whole, end string, limit int) string {
	lines, prefix := errorLines(whole)
	e := pythonError(whole)
	if cppStart(whole) >= 0 {
		e = ""
	}
	outer, drawn := strings.CutSuffix(prefix, "| ")
	if len(outer) > limit/8 {
		outer = ""
	}
	prefix, header := outer, outer+traceback
	if drawn {
		prefix, header = outer+"| ", outer+groupStart+traceback
	}
	err := text.Ends(e, limit/4)
	var first strings.Builder
	add := func(before, line string) {
		line = text.Ends(line, limit/4)
		if line != err && !strings.Contains(end, line) && first.Len()+len(before)+len(line) < limit/2 {
			first.WriteString(before + line + "\n")
		}
	}
	leaves := grouped(whole)
	for _, line := range lines {
		if !slices.Contains(leaves, line) {
			add("", line)
		}
	}
	if e != "" && pythonError(end) != e {
		first.WriteString(header + ":\n")
		if !strings.Contains(end, err) {
			first.WriteString(prefix + err + "\n")
		}
	}
	for _, leaf := range leaves {
		add(outer+"  | ", leaf)
	}
	if first.Len() > 0 {
		first.WriteString("  " + ellipsis + "\n") // indented like the omitted lines
	}
	return first.String()
}

// cppStart is the beginning of the message of an uncaught C++ exception; -1 if none ended the worker.
func cppStart(text string) int {
	from := strings.LastIndex(text, "what():")
	if from < 0 {
		return -1
	}
	_, after, _ := strings.Cut(text[from:], "\n")
	for line := range strings.Lines(after) {
		if !inStack(line) {
			return -1
		}
	}
	return from
}

// plainLines are the lines of an error's text that are no part of a stack, without the prefix that each may have.
func plainLines(text, prefix string) []string {
	var out []string
	for line := range strings.Lines(text) {
		line = withoutPrefix(strings.TrimRight(line, " \r\n"), prefix)
		if !stackLine(line) && !strings.Contains(line, traceback) && !inStack(line) {
			out = append(out, line)
		}
	}
	return append(out, grouped(text)...)
}

// inStack reports whether a line is a part of the text that c10::Error and Python's fault handler print below a
// message.
func inStack(line string) bool {
	line = strings.TrimSpace(line)
	if line == "" {
		return true
	}
	for _, part := range []string{"frame #", "Exception raised from ", "<omitting python frames>", "Fatal Python error: ",
		"Python runtime state: ", "Current thread 0x", "Thread 0x", `File "`, "<no Python frame>", "Extension modules: "} {
		if strings.Contains(line, part) {
			return true
		}
	}
	return false
}

// lastLines is the end of text in whole lines of at most limit bytes.
func lastLines(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	text = text[len(text)-max(limit, 0):]
	if i := strings.IndexByte(text, '\n'); i >= 0 {
		text = text[i+1:]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
