package verdict

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// traceback is in the line above a stack: of Python itself, and of loguru, better_exceptions, rich and IPython.
const traceback = "Traceback (most recent call last)"

// groupStart precedes traceback in the first line of a group of exceptions.
const groupStart = "+ Exception Group "

// inStacks are the beginnings of lines, in addition to indented ones, that belong to a stack and not to the error below
// it.
func inStacks() []string {
	return []string{
		`File "`, `> File "`, // stackprinter; loguru's frame that caught
		"File /", "File ~", "Cell In[", "<ipython-input-", "[... skipping", "---", "-->", // IPython
		"│", "┃", "╭", "╰", "├", "❱", "|", "+-", // rich, groups
		"└", "...", "(...)", "^", ellipsis,
	}
}

// stackLine reports whether a line without its prefix is a part of a stack.
func stackLine(line string) bool {
	if line == "" || line[0] == ' ' || line[0] == '\t' {
		return true
	}
	for _, begin := range inStacks() {
		if strings.HasPrefix(line, begin) {
			return true
		}
	}
	return (line[0] == '/' || line[0] == '~') && strings.Contains(line, ".py in ") // IPython before 8
}

// pythonError is the line of the last Python error in text that names its class and its message: the first one below
// its stack. It is a part of text, and "" if there is none.
func pythonError(text string) string {
	if e := lastError(withoutIgnored(text)); e != "" {
		return e
	}
	return lastError(text)
}

// lastError looks below the last frame. Without a header above, as stackprinter writes it, the text there has to be an
// exception by its name. Below a header the first line counts, with any text.
func lastError(text string) string {
	head, frame := lastHeader(text), lastFrame(text)
	if at := max(head, frame); at >= 0 && inGroup(text, at) {
		if start := strings.LastIndex(text, groupStart+traceback); start >= 0 {
			return errorBelow(text, start+len(groupStart))
		}
	}
	if frame > head {
		e := errorBelow(text, frame)
		if name := className(e); head >= 0 && strings.ContainsFunc(name, unicode.IsLower) || isException(name) {
			return e
		}
	}
	if head >= 0 {
		return errorBelow(text, head)
	}
	return ""
}

// lastHeader is where the last traceback begins that is in no box of another one; -1: nowhere.
func lastHeader(text string) int {
	for at := len(text); ; {
		at = strings.LastIndex(text[:at], traceback)
		if at < 0 || !strings.Contains(text[lineStart(text, at):at], "│") {
			return at
		}
	}
}

// lastFrame is where the last frame of a stack begins, such as File "train.py", line 7, in step; -1: nowhere.
func lastFrame(text string) int {
	for at := len(text); ; {
		at = strings.LastIndex(text[:at], `File "`)
		if at < 0 || isFrame(text[at:]) {
			return at
		}
	}
}

// isFrame: Python's fault handler, which reports no exception, writes no comma before "in".
func isFrame(text string) bool {
	line, _, _ := strings.Cut(text, "\n")
	_, after, found := strings.Cut(line, `", line `)
	after = strings.TrimLeft(after, "0123456789")
	return found && (strings.TrimSpace(after) == "" || strings.HasPrefix(after, ", in "))
}

func lineStart(text string, at int) int { return strings.LastIndexByte(text[:at], '\n') + 1 }

// inGroup reports whether the line of at is drawn as a part of a group of exceptions.
func inGroup(text string, at int) bool {
	before := strings.TrimSuffix(text[lineStart(text, at):at], groupStart)
	return len(before) < at-lineStart(text, at) || strings.HasSuffix(strings.TrimRight(before, " >"), " |")
}

// prefixOf is the text before each line of a traceback, such as torch's "[rank0]: "; before is the text in front of its
// header or a frame.
func prefixOf(before string) string {
	before = strings.TrimSuffix(before, "Original ")
	if outer, is := strings.CutSuffix(before, groupStart); is {
		if i := strings.LastIndex(outer, "| "); i >= 0 { // within another one, as Ray writes it
			return outer[:i+2]
		}
		return outer + "| "
	}
	if i := strings.IndexAny(before, "╭+"); i >= 0 {
		return before[:i] // a box
	}
	if name := strings.TrimRight(before, " "); len(before)-len(name) > 1 { // IPython's header names the class
		if i := strings.LastIndexByte(name, ' ') + 1; isClass(name[i:]) {
			return name[:i]
		}
	}
	return before
}

// prefixAt is the prefix of the traceback with a header or frame at at. Text in that line only, such as a progress bar,
// is none.
func prefixAt(text string, at int) string {
	before := text[lineStart(text, at):at]
	prefix := prefixOf(before)
	_, below, _ := strings.Cut(text[at:], "\n")
	next, _, _ := strings.Cut(below, "\n")
	if strings.HasPrefix(next, strings.TrimRight(prefix, " >|")) || strings.TrimSpace(next) == ellipsis {
		return prefix
	}
	prefix = next[:common(prefix, next)]
	if bar := strings.Index(next, "| "); bar >= len(prefix) && strings.HasSuffix(before, groupStart) {
		return next[:bar+2]
	}
	return prefix
}

// errorBelow is the first line below the one of at that is no part of a stack. Lines may have the prefix of that line,
// or a part of it, where it is indented.
func errorBelow(text string, at int) string {
	prefix := prefixAt(text, at)
	_, below, _ := strings.Cut(text[at:], "\n")
	for line := range strings.Lines(below) {
		if line = withoutPrefix(strings.TrimRight(line, " \r\n"), prefix); !stackLine(line) {
			return line
		}
	}
	return ""
}

// withoutPrefix is line without prefix, or without a part of it, where the line is indented.
func withoutPrefix(line, prefix string) string {
	if !strings.HasPrefix(line, strings.TrimRight(prefix, " >|")) {
		return line
	}
	return line[common(prefix, line):]
}

// common is how many bytes a and b have in common at their beginning, in whole characters.
func common(a, b string) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	for n > 0 && n < len(b) && !utf8.RuneStart(b[n]) {
		n--
	}
	return n
}

// withoutIgnored cuts off exceptions that ended nothing, such as those of destructors at the end of the interpreter.
func withoutIgnored(text string) string {
	for {
		head := lastHeader(text)
		if head < 0 {
			return text
		}
		before := strings.TrimSuffix(text[:lineStart(text, head)], "\n")
		start := lineStart(before, len(before))
		line := before[start:]
		if !strings.Contains(line, "Exception ignored ") && !strings.Contains(line, "--- Logging error ---") {
			return text
		}
		text = text[:start]
	}
}

// errorLines are the lines of the error that ended a worker, from its output, without stacks and source. They are those
// of the last Python traceback and of its reasons, or of an exception that C++ did not catch. prefix precedes each of
// them, and is left out.
func errorLines(text string) (lines []string, prefix string) {
	if from := cppStart(text); from >= 0 {
		return plainLines(text[from:], ""), ""
	}
	text = withoutIgnored(text)
	from := lastHeader(text)
	if from >= 0 && inGroup(text, from) {
		if start := strings.LastIndex(text, groupStart+traceback); start >= 0 {
			from = start + len(groupStart)
		}
	}
	if from < 0 {
		from = lastFrame(text)
	}
	if from < 0 || pythonError(text) == "" {
		return nil, ""
	}
	for {
		before := earlier(text[:from])
		if before < 0 || !chained(text[before:from]) {
			break
		}
		from = before
	}
	prefix = prefixAt(text, from)
	return plainLines(text[lineStart(text, from):], prefix), prefix
}

// earlier is where the traceback before the end of text begins, or a frame of it; -1: there is none.
func earlier(text string) int {
	if at := lastHeader(text); at >= 0 {
		return at
	}
	return lastFrame(text)
}

// chained reports whether text, which is between two tracebacks, means that the first one caused the second one.
func chained(text string) bool {
	return strings.Contains(text, "During handling of the above exception, another exception occurred:") ||
		strings.Contains(text, "The above exception was the direct cause of the following exception:") ||
		strings.HasSuffix(text, "Original ") || strings.Contains(text, "terminated with the following error:")
}

// grouped are the lines of the exceptions in the last group in text, without stacks.
func grouped(text string) []string {
	e := pythonError(text)
	if !strings.HasSuffix(className(e), "Group") {
		return nil
	}
	var out []string
	for line := range strings.Lines(text[strings.LastIndex(text, e)+len(e):]) {
		for _, bar := range []string{"| ", "│ "} {
			_, leaf, drawn := strings.Cut(line, bar)
			if leaf = strings.TrimRight(leaf, " \r\n│|"); drawn && className(leaf) != "" {
				out = append(out, leaf)
			}
		}
	}
	return out
}

// className is the class at the beginning of an error's line, with its module where that is written; "" if there is
// none. Ray's "RayTaskError(ValueError)" is a ValueError.
func className(line string) string {
	name, _, _ := strings.Cut(line, ":")
	if outer, inner, is := strings.Cut(strings.TrimSuffix(name, ")"), "("); is && isClass(outer) {
		name = inner
	}
	if !isClass(name) {
		return ""
	}
	return name
}

// isException reports whether a class is an exception's by its name.
func isException(name string) bool {
	for _, end := range []string{"Error", "Exception", "Interrupt", "Exit", "Group", "Iteration", "Expired", "Timeout",
		"Warning"} {
		if strings.HasSuffix(name, end) {
			return true
		}
	}
	return false
}

// Unfold restores the lines of a traceback that is in one line, as loggers write it in JSON or as Python's repr. It
// puts the traceback of structlog's dict_tracebacks below its line.
func Unfold(text string) string {
	if !strings.Contains(text, traceback+`:\n`) && !strings.Contains(text, excType) {
		return text
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		if at := strings.Index(line, traceback+`:\n`); at >= 0 {
			unfold(&b, line, at)
			continue
		}
		b.WriteString(line)
		if name, after := field(line, excType); isClass(name) {
			message, _ := field(after, excValue)
			message, _, _ = strings.Cut(message, "\n")
			b.WriteString("\n" + traceback + ":\n" + name + ": " + message + "\n")
		}
	}
	return strings.TrimRight(b.String(), "\n")
}

const excType, excValue = `"exc_type":`, `"exc_value":`

// unfold writes the line with the string in it that has a traceback at at.
func unfold(b *strings.Builder, line string, at int) {
	open := at - 1
	for open >= 0 && (line[open] != '"' && line[open] != '\'' || open > 0 && line[open-1] == '\\') {
		open--
	}
	if open < 0 {
		b.WriteString(line)
		return
	}
	content, after := unquote(line[open+1:], line[open])
	b.WriteString(line[:open+1] + "\n" + content + "\n" + after)
}

// field is the string after a key, and the rest behind it.
func field(line, key string) (value, after string) {
	_, after, _ = strings.Cut(line, key)
	if after = strings.TrimLeft(after, " "); after == "" || after[0] != '"' {
		return "", after
	}
	return unquote(after[1:], '"')
}

// unquote reads a string up to its closing quote, or as much of it as there is.
func unquote(s string, quote byte) (content, after string) {
	var b strings.Builder
	for s != "" && s[0] != quote {
		r, _, rest, err := strconv.UnquoteChar(s, quote)
		if err != nil { // half of a surrogate pair, or \/
			r, rest = rune(s[0]), s[1:]
		}
		b.WriteRune(r)
		s = rest
	}
	return strings.ToValidUTF8(b.String(), "\uFFFD"), strings.TrimPrefix(s, string(quote))
}
