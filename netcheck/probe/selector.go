package probe

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// selector is a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA. Both have the same syntax: a list of prefixes of names,
// separated by commas; "^" before the list takes all others, "=" (after "^", when there are both) whole names in place
// of prefixes; a name may end in :port. See https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
type selector struct {
	exclude, exact bool
	wants          []want
}

type want struct {
	name string
	port int // 0: any
}

// Bounds of a variable's value.
const (
	maxSelector = 4096 // bytes
	maxWants    = 64
	maxPort     = 255
)

// parseSelector reads the value of a variable, which the error names. An empty value selects everything.
func parseSelector(variable, value string) (selector, error) {
	var s selector
	fail := func(format string, args ...any) (selector, error) {
		return selector{}, fmt.Errorf("%s=%s: %s", variable, strconv.Quote(oneLine(value)), fmt.Sprintf(format, args...))
	}
	if len(value) > maxSelector {
		return fail("%d bytes are too many: %d at most", len(value), maxSelector)
	}
	list := strings.TrimSpace(value)
	list, s.exclude = strings.CutPrefix(list, "^")
	list, s.exact = strings.CutPrefix(list, "=")
	for entry := range strings.SplitSeq(list, ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		w, err := parseWant(entry)
		if err != nil {
			return fail("%v", err)
		}
		s.wants = append(s.wants, w)
	}
	if len(s.wants) > maxWants {
		return fail("%d names are too many: %d at most", len(s.wants), maxWants)
	}
	if len(s.wants) == 0 && (s.exclude || s.exact) {
		return fail("no name follows; leave it empty for the default, or give names as in ^docker,lo or =eth0,eth1")
	}
	return s, nil
}

func parseWant(entry string) (want, error) {
	name, port, hasPort := strings.Cut(entry, ":")
	if name == "" {
		return want{}, fmt.Errorf("%q has no name before the colon", entry)
	}
	if i := strings.IndexFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || unicode.IsSpace(r) }); i >= 0 {
		return want{}, fmt.Errorf("%q is not a name: separate names by commas", name)
	}
	if strings.ContainsAny(name, "^=/") {
		return want{}, fmt.Errorf("%q is not a name: ^ and = stand once, before the whole list", name)
	}
	if !hasPort {
		return want{name: name}, nil
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || n > maxPort {
		return want{}, fmt.Errorf("%q: a port is a number from 1 to %d", entry, maxPort)
	}
	return want{name, int(n)}, nil
}

// all reports whether the selector is empty, and so selects everything.
func (s selector) all() bool { return len(s.wants) == 0 }

// match reports whether the device is selected. Port 0 is that of a device without ports.
func (s selector) match(name string, port int) bool {
	if s.all() {
		return true
	}
	for _, w := range s.wants {
		hit := strings.HasPrefix(name, w.name)
		if s.exact {
			hit = name == w.name
		}
		if hit && (w.port == 0 || port == 0 || w.port == port) {
			return !s.exclude
		}
	}
	return s.exclude
}

// Names reports whether the device was requested by its whole name, so that it must be there and work.
func (s selector) Names(name string) bool {
	for _, w := range s.wants {
		if w.name == name {
			return !s.exclude
		}
	}
	return false
}

// missing are the wanted names that none of the devices has.
func (s selector) missing(devices []string) []string {
	var miss []string
	for _, w := range s.wants {
		one := selector{exact: s.exact, wants: []want{{name: w.name}}}
		if !s.exclude && !slices.ContainsFunc(devices, func(d string) bool { return one.match(d, 0) }) {
			miss = append(miss, w.name)
		}
	}
	return miss
}

// String is the selector in NCCL's syntax.
func (s selector) String() string {
	var b strings.Builder
	if s.exclude {
		b.WriteByte('^')
	}
	if s.exact {
		b.WriteByte('=')
	}
	for i, w := range s.wants {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(w.name)
		if w.port != 0 {
			fmt.Fprintf(&b, ":%d", w.port)
		}
	}
	return b.String()
}
