package hang

import (
	"fmt"
	"strconv"
	"strings"
)

// MaxRanks bounds the ranks of a world.
const MaxRanks = 1 << 20

// ParseRanks returns the ranks that a text such as 0-3,8 names. They grow; "" names none.
func ParseRanks(s string) ([]int, error) {
	var out []int
	err := eachRange(s, func(first, last int) {
		for r := first; r <= last; r++ {
			out = append(out, r)
		}
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// eachRange calls f with the ranges of a text. They are disjoint and grow, so there are MaxRanks ranks at most.
func eachRange(s string, f func(first, last int)) error {
	next := 0 // the smallest rank that may follow
	for piece := range strings.SplitSeq(s, ",") {
		if s == "" {
			return nil
		}
		low, high, isRange := strings.Cut(piece, "-")
		if !isRange {
			high = low
		}
		first, err := parseRank(low)
		if err != nil {
			return fmt.Errorf("ranks %.40q: %w", s, err)
		}
		last, err := parseRank(high)
		if err != nil {
			return fmt.Errorf("ranks %.40q: %w", s, err)
		}
		if first < next || last < first {
			return fmt.Errorf("ranks %.40q: %.20q does not follow what is before it: write them in order, as 0-3,8", s, piece)
		}
		f(first, last)
		next = last + 1
	}
	return nil
}

// parseRank takes digits only: neither a sign nor an underscore.
func parseRank(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n >= MaxRanks {
		return 0, fmt.Errorf("%.20q is no rank: write a number from 0 to %d", s, MaxRanks-1)
	}
	return int(n), nil
}

// ranksIn reads 0-3,8; of a text that is wrong there are none.
func ranksIn(text string) (s RankSet) {
	err := eachRange(text, func(first, last int) {
		if n := len(s); n > 0 && s[n-1].Last+1 == first {
			s[n-1].Last = last
			return
		}
		s = append(s, RankRun{first, last})
	})
	if err != nil {
		return nil
	}
	return s
}
