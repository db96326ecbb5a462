// Package hostfile reads and writes the host files of MPI programs and DeepSpeed, and the lists by which DeepSpeed's
// --include and --exclude choose among the hosts.
//
// A line is "host slots=4", as DeepSpeed and Open MPI write it, "host:4", as MPICH and Intel MPI do, or a bare "host".
// A # begins a comment. The package is pure: it opens no file and resolves no name.
package hostfile

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Limits of a file.
const (
	maxHosts = 100_000
	MaxSlots = 4096
)

// Host is one line of a file.
type Host struct {
	Name  string
	Slots int // 0: the line gives none
	Line  int // from 1
}

// Parse reads a file. The hosts come in the file's order; an error names the line, the rule and the fix.
func Parse(text string) ([]Host, error) {
	var hosts []Host
	seen := map[string]int{}
	number := 0
	for line := range strings.SplitSeq(strings.TrimPrefix(text, "\ufeff"), "\n") {
		number++
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		h, err := parseLine(words)
		if err == nil && seen[h.Name] > 0 {
			err = fmt.Errorf("host %s is on line %d already; give every host one line", h.Name, seen[h.Name])
		}
		if err == nil && len(hosts) == maxHosts {
			err = fmt.Errorf("there may be %d hosts at most", maxHosts)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		h.Line, seen[h.Name] = number, number
		hosts = append(hosts, h)
	}
	if len(hosts) == 0 {
		return nil, fmt.Errorf("no line names a host; write one such as %q for each", "worker-0 slots=4")
	}
	return hosts, nil
}

func parseLine(words []string) (h Host, err error) {
	name, count, counted := splitCount(words[0])
	if err := checkName(name); err != nil {
		return h, err
	}
	h.Name = name
	if counted {
		if h.Slots, err = slots(words[0], count); err != nil {
			return h, err
		}
	}
	for _, word := range words[1:] {
		key, value, assigned := strings.Cut(word, "=")
		switch {
		case key == "slots" && assigned && counted:
			return h, fmt.Errorf("%q and %q both give the number of slots; keep one", words[0], word)
		case key == "slots" && assigned:
			counted = true
			if h.Slots, err = slots(word, value); err != nil {
				return h, err
			}
		case !assigned || !counted && !slices.Contains(others, key):
			return h, fmt.Errorf("%.100q is not understood; write %q", word, name+" slots=4")
		}
	}
	return h, nil
}

// others are words of MPI's files that say nothing about the number of workers.
var others = []string{"max_slots", "max-slots", "user", "ifhn", "binding"}

// splitCount splits "host:4". The colons of an IPv6 address are no such sign; "[::1]:4" has both.
func splitCount(word string) (name, count string, counted bool) {
	if inner, rest, ok := strings.Cut(strings.TrimPrefix(word, "["), "]"); ok && strings.HasPrefix(word, "[") {
		count, counted = strings.CutPrefix(rest, ":")
		if rest != "" && !counted {
			return word, "", false
		}
		return inner, count, counted
	}
	if strings.Count(word, ":") > 1 {
		return word, "", false
	}
	return strings.Cut(word, ":")
}

func checkName(name string) error {
	if _, err := netip.ParseAddr(name); err == nil {
		return nil
	}
	bad := strings.ContainsFunc(name, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-._", r))
	})
	if bad || name == "" || len(name) > 253 {
		return fmt.Errorf("%.100q is not a host: need a name of letters, digits, '-', '_' and '.', or an address", name)
	}
	return nil
}

func slots(word, text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n < 1 || n > MaxSlots {
		return 0, fmt.Errorf("%.100q: the number of slots must be from 1 to %d, as in slots=4", word, MaxSlots)
	}
	return int(n), nil
}

// Format writes hosts as DeepSpeed and Open MPI read them.
func Format(hosts []Host) string {
	var b strings.Builder
	for _, h := range hosts {
		b.WriteString(h.Name)
		if h.Slots > 0 {
			b.WriteString(" slots=" + strconv.Itoa(h.Slots))
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// Find returns the index of the host that has one of the names, trying the first name first; -1: none has. An address
// is a name, too. A name without a domain matches a single host with that name and a domain, and the other way round.
func Find(hosts []Host, names ...string) int {
	for _, same := range []func(a, b string) bool{strings.EqualFold, sameHost} {
		for _, name := range names {
			is := func(h Host) bool { return name != "" && same(h.Name, name) }
			if i := slices.IndexFunc(hosts, is); i >= 0 && !slices.ContainsFunc(hosts[i+1:], is) {
				return i
			}
		}
	}
	return -1
}

// sameHost compares names; at least one has no domain.
func sameHost(a, b string) bool {
	shortA, _, longA := strings.Cut(a, ".")
	shortB, _, longB := strings.Cut(b, ".")
	return !(longA && longB) && !isAddr(a) && !isAddr(b) && strings.EqualFold(shortA, shortB)
}

func isAddr(name string) bool {
	_, err := netip.ParseAddr(name)
	return err == nil
}
