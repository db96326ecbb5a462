package scheduler

import (
	"fmt"
	"strconv"
	"strings"
)

// maxDigits bounds the numbers in a node list.
const maxDigits = 9

// nodes expands a list of Slurm, such as "gpu[1-3,007],login1,r[0-1]n[0-9]": names are separated by commas, and
// brackets hold numbers and ascending ranges. The first number of a range gives the width with leading zeros.
func nodes(list string) ([]string, error) {
	var all []string
	for _, word := range splitOutside(list) {
		expanded, err := expand(strings.TrimSpace(word), maxNodes-len(all))
		if err != nil {
			return nil, err
		}
		all = append(all, expanded...)
	}
	return all, nil
}

// splitOutside splits at commas that are not within brackets.
func splitOutside(list string) []string {
	var words []string
	start, depth := 0, 0
	for i := range len(list) {
		switch list[i] {
		case '[':
			depth++
		case ']':
			depth--
		case ',':
			if depth <= 0 {
				words = append(words, list[start:i])
				start = i + 1
			}
		}
	}
	return append(words, list[start:])
}

// expand returns at most limit names, the last bracket's numbers running fastest.
func expand(word string, limit int) ([]string, error) {
	head, rest, bracketed := strings.Cut(word, "[")
	if err := plain(head); err != nil {
		return nil, err
	}
	if !bracketed {
		if head == "" || limit < 1 {
			return nil, fmt.Errorf("need 1 to %d names of nodes, separated by commas", maxNodes)
		}
		return []string{head}, nil
	}
	inside, tail, closed := strings.Cut(rest, "]")
	if !closed {
		return nil, fmt.Errorf("%.100q has a bracket that is not closed", word)
	}
	numbers, err := numbers(inside, limit)
	if err != nil {
		return nil, err
	}
	tails := []string{""}
	if tail != "" {
		if tails, err = expand(tail, limit/len(numbers)); err != nil {
			return nil, err
		}
	}
	return product(head, numbers, tails), nil
}

func product(head string, numbers, tails []string) []string {
	names := make([]string, 0, len(numbers)*len(tails))
	for _, n := range numbers {
		for _, t := range tails {
			names = append(names, head+n+t)
		}
	}
	return names
}

// plain refuses text that cannot be part of a host's name.
func plain(text string) error {
	for _, c := range text {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("-._", c)) {
			return fmt.Errorf("%.100q: a node's name has letters, digits, '-', '_' and '.', and numbers in brackets", text)
		}
	}
	return nil
}

// numbers expands the text within brackets, to at most limit numbers.
func numbers(text string, limit int) ([]string, error) {
	var all []string
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err1 := digits(from)
		last, err2 := digits(to)
		if err1 != nil || err2 != nil || first > last {
			return nil, fmt.Errorf("%.100q is neither a number nor an ascending range", part)
		}
		if last-first >= limit-len(all) {
			return nil, fmt.Errorf("more than %d nodes", maxNodes)
		}
		for n := first; n <= last; n++ {
			all = append(all, fmt.Sprintf("%0*d", len(from), n))
		}
	}
	return all, nil
}

func digits(text string) (int, error) {
	if len(text) > maxDigits {
		return 0, strconv.ErrRange
	}
	n, err := strconv.ParseUint(text, 10, 32)
	return int(n), err
}
