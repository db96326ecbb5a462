package kube

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// clean is text as one printable line of at most limit bytes.
func clean(text string, limit int) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(text, "?"))
	return cut(strings.TrimSpace(text), limit)
}

// cut shortens valid UTF-8 to at most limit bytes, which are at least three.
func cut(text string, limit int) string {
	const more = "..."
	if len(text) <= limit {
		return text
	}
	end := limit - len(more)
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + more
}

// class is what a label's value, and so a taint's, can hold of a reason: never "".
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
	text := strings.TrimLeft(b.String(), "-_.")
	if text = strings.TrimRight(text[:min(len(text), 63)], "-_."); text == "" {
		return "faulty"
	}
	return text
}
