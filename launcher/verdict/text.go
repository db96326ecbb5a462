package verdict

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

const ellipsis = "…"

// clean makes s fit on a terminal's line: whatever does not print is escaped as in Go source, and at most limit bytes
// are left. Output of a worker may hold terminal commands and text that reverses the direction of writing.
func clean(s string, limit int) string {
	var b strings.Builder
	cut := 0 // where b ends if an ellipsis must follow
	for i, r := range s {
		piece := string(r)
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], piece): // a byte that is no UTF-8
			piece = `\x` + strconv.FormatUint(uint64(s[i]), 16)
		case !strconv.IsPrint(r):
			piece = strings.Trim(strconv.QuoteRune(r), "'")
		}
		if b.Len()+len(piece) > limit {
			return b.String()[:cut] + ellipsis
		}
		b.WriteString(piece)
		if b.Len() <= limit-len(ellipsis) {
			cut = b.Len()
		}
	}
	return b.String()
}

// head is the beginning of s, cut to limit bytes.
func head(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit-len(ellipsis)], "") + ellipsis
}

// tail is the end of s, cut to limit bytes.
func tail(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return ellipsis + strings.ToValidUTF8(s[len(s)-limit+len(ellipsis):], "")
}
