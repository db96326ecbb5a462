package argv

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// pyInt reads s as Python's int(s) and returns it as plain decimal digits. Go's parsers differ: they refuse blanks and,
// with base 0, take "010" for octal.
func pyInt(s string) (string, bool) {
	s = strings.TrimSpace(s)
	sign := ""
	if s != "" && (s[0] == '-' || s[0] == '+') {
		sign, s = strings.TrimPrefix(s[:1], "+"), s[1:]
	}
	digits, ok := dropUnderscores(s)
	if !ok || digits == "" || strings.Trim(digits, "0123456789") != "" {
		return "", false
	}
	if digits = strings.TrimLeft(digits, "0"); digits == "" {
		return "0", true
	}
	return sign + digits, true
}

// pyFloat reads s as Python's float(s), which unlike Go's ParseFloat has no hexadecimal form and overflows to infinity.
func pyFloat(s string) (float64, bool) {
	s, ok := dropUnderscores(strings.TrimSpace(s))
	if !ok || strings.ContainsAny(s, "xX") {
		return 0, false
	}
	f, err := strconv.ParseFloat(s, 64)
	return f, err == nil || errors.Is(err, strconv.ErrRange)
}

// dropUnderscores removes the underscores of a Python number; each must stand between two digits.
func dropUnderscores(s string) (string, bool) {
	for i := range len(s) {
		if s[i] == '_' && (i == 0 || i == len(s)-1 || !isDigit(s[i-1]) || !isDigit(s[i+1])) {
			return "", false
		}
	}
	return strings.ReplaceAll(s, "_", ""), true
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// isNegativeNumber reports whether argparse takes s for a number and not an option: -\d+ or -\d*\.\d+.
func isNegativeNumber(s string) bool {
	whole, frac, point := strings.Cut(s[1:], ".")
	if strings.Trim(whole+frac, "0123456789") != "" {
		return false
	}
	return point && frac != "" || !point && whole != ""
}

// pyRepr is Python's repr of a string, the form in which argparse quotes values.
func pyRepr(s string) string {
	quote := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	b := append(make([]byte, 0, len(s)+2), quote)
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == rune(quote) || r == '\\':
			b = append(b, '\\', byte(r))
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r == '\t':
			b = append(b, `\t`...)
		case r == utf8.RuneError && n == 1: // how Python keeps a byte of argv that is not UTF-8
			b = fmt.Appendf(b, `\udc%02x`, s[i])
		case unicode.IsPrint(r):
			b = append(b, s[i:i+n]...)
		case r < 0x100:
			b = fmt.Appendf(b, `\x%02x`, r)
		case r < 0x10000:
			b = fmt.Appendf(b, `\u%04x`, r)
		default:
			b = fmt.Appendf(b, `\U%08x`, r)
		}
		i += n
	}
	return string(append(b, quote))
}
