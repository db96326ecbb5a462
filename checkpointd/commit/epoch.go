package commit

import (
	"slices"
	"strconv"
	"strings"
)

// Overtakes reports whether m was made after o, or by workers that were started after those of o. Clocks of nodes
// differ. So across epochs they count only if the epochs do not decide, and o may have been overtaken (late).
func (m Manifest) Overtakes(o Manifest, late bool) bool {
	switch {
	case m.Epoch == o.Epoch:
		return m.Saved.After(o.Saved)
	case follows(m.Epoch, o.Epoch):
		return true
	case follows(o.Epoch, m.Epoch):
		return false
	}
	return late && m.Saved.After(o.Saved)
}

// follows reports whether epoch a is later than b in the same history of a rendezvous. Both are <term>.<round>.<epoch>
// then. The terms of two histories may come from the clocks of two machines, and cannot be compared.
func follows(a, b string) bool {
	x, y := epochOf(a), epochOf(b)
	return x != nil && y != nil && x[0] == y[0] && slices.Compare(x, y) > 0
}

// epochOf returns nil for the epoch of workers that no launcher has named.
func epochOf(epoch string) (numbers []uint64) {
	for _, word := range strings.Split(epoch, ".") {
		n, err := strconv.ParseUint(word, 10, 64)
		if err != nil {
			return nil
		}
		numbers = append(numbers, n)
	}
	if len(numbers) != 3 {
		return nil
	}
	return numbers
}
