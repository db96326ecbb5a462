package verdict

import (
	"slices"
	"strings"
	"unicode"

	"dlrover-run/internal/text"
)

// maxFingerprint bounds a fingerprint, in bytes.
const maxFingerprint = 256

// Fingerprint is the same text for failures of one kind: Reason without the parts that differ between ranks, nodes and
// starts.
func (f Failure) Fingerprint() string {
	f.Message, f.LastLines, f.Timer = f.masked(cause(f)), f.masked(lastLine(f.LastLines)), f.masked(f.Timer)
	f.Traceback = ""
	if f.OOM != nil {
		f.OOM = &OOM{}
	}
	return text.Head(why(f), maxFingerprint)
}

// masked replaces the names of the worker's node in text, and each word with a digit: ranks, pids, addresses, times.
func (f Failure) masked(text string) string {
	var b strings.Builder
	for text != "" {
		rest := strings.TrimLeftFunc(text, inWord)
		word := text[:len(text)-len(rest)]
		name := strings.TrimRight(word, ".:")
		if name != "" && slices.Contains([]string{f.NodeName, f.Host}, name) || strings.ContainsAny(word, "0123456789") {
			word = "#"
		}
		text = strings.TrimLeftFunc(rest, func(c rune) bool { return !inWord(c) })
		b.WriteString(word + rest[:len(rest)-len(text)])
	}
	return b.String()
}

// inWord reports whether c can be a part of a name, an address or a number.
func inWord(c rune) bool {
	return unicode.IsLetter(c) || unicode.IsDigit(c) || strings.ContainsRune(".:-_", c)
}
