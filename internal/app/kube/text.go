package kube

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"dlrover-run/internal/text"
)

// clean is s as one printable line of at most limit bytes, which are at least three.
func clean(s string, limit int) string { return strings.TrimSpace(text.Line(s, limit)) }

// class turns a reason into a valid value of a label, and so of a taint: never "".
func class(reason string) string {
	var b strings.Builder
	for _, r := range reason {
		switch {
		case r < utf8.RuneSelf && (isLower(unicode.ToLower(r)) || strings.ContainsRune("-_.", r)):
			b.WriteRune(r)
		case !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
	}
	label := strings.TrimLeft(b.String(), "-_.")
	if label = strings.TrimRight(label[:min(len(label), 63)], "-_."); label == "" {
		return "faulty"
	}
	return label
}
