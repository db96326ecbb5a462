package rule

import "regexp/syntax"

// required is a text that every line has that matches the expression, "" if none is known. To look for it is many times
// faster than to match.
func required(pattern string) []byte {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return nil
	}
	return []byte(longest(re.Simplify()))
}

func longest(re *syntax.Regexp) string {
	switch re.Op {
	case syntax.OpLiteral:
		if re.Flags&syntax.FoldCase == 0 {
			return string(re.Rune)
		}
	case syntax.OpCapture, syntax.OpPlus:
		return longest(re.Sub[0])
	case syntax.OpRepeat:
		if re.Min > 0 {
			return longest(re.Sub[0])
		}
	case syntax.OpConcat:
		best := ""
		for _, sub := range re.Sub {
			if s := longest(sub); len(s) > len(best) {
				best = s
			}
		}
		return best
	}
	return ""
}
