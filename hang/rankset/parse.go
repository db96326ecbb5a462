package rankset

import (
	"fmt"
	"strconv"
	"strings"
)

// Max bounds the ranks of a world.
const Max = 1 << 20

// Parse returns the ranks that a text such as 0-3,8 names, in ascending order; "" names none.
func Parse(text string) (s Set, err error) {
	next := 0 // the smallest rank that may follow
	for piece := range strings.SplitSeq(text, ",") {
		if text == "" {
			return nil, nil
		}
		low, high, isRange := strings.Cut(piece, "-")
		if !isRange {
			high = low
		}
		first, err := parseRank(low)
		if err != nil {
			return nil, fmt.Errorf("ranks %.40q: %w", text, err)
		}
		last, err := parseRank(high)
		if err != nil {
			return nil, fmt.Errorf("ranks %.40q: %w", text, err)
		}
		if first < next || last < first {
			return nil, fmt.Errorf("ranks %.40q: %.20q does not follow what is before it: write them in order, as 0-3,8", text,
				piece)
		}
		s.addRun(Run{first, last})
		next = last + 1
	}
	return s, nil
}

// addRun adds a run that is behind all others.
func (s *Set) addRun(r Run) {
	if n := len(*s); n > 0 && (*s)[n-1].Last+1 == r.First {
		(*s)[n-1].Last = r.Last
		return
	}
	*s = append(*s, r)
}

// Named is Parse, but a text that is wrong names no ranks.
func Named(text string) Set {
	s, _ := Parse(text) // nil with an error
	return s
}

// parseRank takes digits only: neither a sign nor an underscore.
func parseRank(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n >= Max {
		return 0, fmt.Errorf("%.20q is not a rank: write a number from 0 to %d", s, Max-1)
	}
	return int(n), nil
}
