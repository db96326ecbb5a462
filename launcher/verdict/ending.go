package verdict

import "strings"

// Ending is the end of a worker's output, in whole lines of at most limit bytes together. An error whose C++ stack
// alone is longer, as that of NCCL's watchdog, comes before the end of that stack.
func Ending(text string, limit int) string {
	end := lastLines(text, limit)
	if len(end) == len(text) {
		return text
	}
	from := len(text)
	line := ""
	for from > 0 {
		before := strings.LastIndexByte(text[:from-1], '\n') + 1
		if line = text[before:from]; !inStack(line) {
			from = before
			break
		}
		from = before
	}
	if from >= len(text)-len(end) || inStack(line) {
		return end
	}
	if err := pythonError(text[:from+len(line)]); err != "" && strings.Contains(line, err) {
		line = "Traceback (most recent call last):\n" + err
	}
	first := head(strings.TrimRight(line, "\n"), limit/2) + "\n" + ellipsis + "\n"
	return first + lastLines(text, limit-len(first))
}

// inStack reports whether a line is a part of what c10::Error prints below its message.
func inStack(line string) bool {
	line = strings.TrimSpace(line)
	return line == "" || strings.Contains(line, "frame #") || strings.Contains(line, "Exception raised from ") ||
		strings.Contains(line, "<omitting python frames>")
}

// lastLines is the end of text in whole lines of at most limit bytes.
func lastLines(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	text = text[len(text)-limit:]
	if i := strings.IndexByte(text, '\n'); i >= 0 {
		text = text[i+1:]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
