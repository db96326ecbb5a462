package scheduler

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// reader reads for one scheduler, and remembers the variables that it has used.
type reader struct {
	System
	named bool // the user names this scheduler
	from  []string
}

// variable is one that is set, and not to nothing.
type variable struct{ name, value string }

func (v variable) String() string { return fmt.Sprintf("$%s=%.200s", v.name, v.value) }

// peek is the first of the variables with a value; it does not count as used.
func (r *reader) peek(names ...string) (variable, bool) {
	for _, name := range names {
		if v, _ := r.Env(name); strings.TrimSpace(v) != "" {
			return variable{name, strings.TrimSpace(v)}, true
		}
	}
	return variable{}, false
}

// all reports whether each of the variables has a value.
func (r *reader) all(names ...string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { _, set := r.peek(name); return !set })
}

func (r *reader) lookup(names ...string) (variable, bool) {
	v, found := r.peek(names...)
	if found {
		r.from = append(r.from, v.name)
	}
	return v, found
}

// number reads a whole number from lo to hi; 0 where none of the variables is set.
func (r *reader) number(lo, hi int, names ...string) (int, variable, error) {
	v, found := r.lookup(names...)
	if !found {
		return 0, v, nil
	}
	n, err := strconv.Atoi(v.value)
	if err != nil || n < lo || n > hi {
		return 0, v, fmt.Errorf("%v: need a whole number from %d to %d", v, lo, hi)
	}
	return n, v, nil
}

// worker reports whether this process is itself a worker of a launcher, so that its variables are not a scheduler's.
func (r *reader) worker() bool {
	_, is := r.peek("LOCAL_RANK", "TORCHELASTIC_RUN_ID")
	return is && !r.named
}

// port is $MASTER_PORT, 0 without one.
func (r *reader) port() (int, error) {
	n, _, err := r.number(1, 65535, "MASTER_PORT")
	return n, err
}

// domain is the rest of this host's full name behind its name, with the dot, as the kubelet writes it for a pod with a
// subdomain; "" where there is none.
func (r *reader) domain() string {
	const hosts = "/etc/hosts"
	text, err := r.ReadFile(hosts)
	if err != nil || r.Host == "" {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		for i, name := range strings.Fields(line) {
			if rest, is := strings.CutPrefix(name, r.Host+"."); i > 0 && is && strings.Contains(name, ".svc.") {
				r.from = append(r.from, hosts)
				return "." + rest
			}
		}
	}
	return ""
}
