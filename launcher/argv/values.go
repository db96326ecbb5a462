package argv

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"

	"golang.org/x/sys/unix"
)

// MaxNodes is the largest number of nodes that --nnodes accepts.
const MaxNodes = 100_000

// ParseNNodes reads --nnodes: "4" or "2:8".
func ParseNNodes(s string) (minNodes, maxNodes int, err error) {
	parts := strings.Split(s, ":")
	if len(parts) > 2 {
		return 0, 0, fmt.Errorf("--nnodes: nnodes=%s is not in \"MIN:MAX\" format; write 4 or 2:8", s)
	}
	bounds := make([]int, len(parts))
	for i, part := range parts {
		digits, _ := pyInt(part)
		if bounds[i], err = strconv.Atoi(digits); err != nil {
			return 0, 0, fmt.Errorf("--nnodes: %s is not a number of nodes; write 4 or 2:8", pyRepr(s))
		}
	}
	minNodes, maxNodes = bounds[0], bounds[len(bounds)-1]
	if minNodes < 1 || maxNodes < minNodes || maxNodes > MaxNodes {
		return 0, 0, fmt.Errorf("--nnodes: %s breaks 0 < MIN <= MAX <= %d; write 4 or 2:8", pyRepr(s), MaxNodes)
	}
	return minNodes, maxNodes, nil
}

// ParseConf reads --rdzv-conf: "k=v,k=v". Blanks around keys and values do not count, nor does a pair of quotes around
// the whole: a shell or a manifest with one pair too many leaves it. Of a repeated key the last one counts.
func ParseConf(s string) (map[string]string, error) {
	s = strings.TrimSpace(s)
	if n := len(s); n >= 2 && (s[0] == '\'' || s[0] == '"') && s[n-1] == s[0] {
		s = strings.TrimSpace(s[1 : n-1])
	}
	conf := map[string]string{}
	if s == "" {
		return conf, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		key, value, _ := strings.Cut(part, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		if key == "" {
			return nil, fmt.Errorf(
				"--rdzv-conf: %s: The rendezvous configuration string must be in format <key1>=<value1>,...,<keyN>=<valueN>",
				pyRepr(s))
		}
		if value == "" {
			return nil, fmt.Errorf(
				"--rdzv-conf: %[1]s: The rendezvous configuration option '%[2]s' must have a value specified; write %[2]s=VALUE",
				pyRepr(s), key)
		}
		conf[key] = value
	}
	return conf, nil
}

// std is a set of a worker's output streams.
type std int

// The sets of streams, with torchrun's numbers.
const (
	stdNone std = iota
	stdOut
	stdErr
	stdBoth
)

// StdMap is the set of streams of every local rank. The zero value has none.
type StdMap struct {
	all    std
	byRank map[int]std // nil if all holds for every rank
}

// For returns the streams of a local rank; none for a rank that a mapping does not name.
func (m StdMap) For(localRank int) std {
	if m.byRank == nil {
		return m.all
	}
	return m.byRank[localRank]
}

// ParseStd reads --redirects or --tee, whichever opt is: one of 0-3 for all workers, or "0:1,1:3" by local rank.
// torchrun has local ranks of one digit only; here they may have more.
func ParseStd(opt, s string) (StdMap, error) {
	if v, ok := parseStd(s); ok {
		return StdMap{all: v}, nil
	}
	m := StdMap{byRank: map[int]std{}}
	for part := range strings.SplitSeq(s, ",") {
		rank, value, _ := strings.Cut(part, ":")
		n, err := strconv.ParseUint(rank, 10, 31)
		v, ok := parseStd(value)
		if err != nil || !ok {
			return StdMap{}, fmt.Errorf(
				`%s: %s does not match: <^[0123]$> or <^(\d+:[0123],)*(\d+:[0123])$>; `+
					"write 3 or 0:3,1:2 (0 none, 1 stdout, 2 stderr, 3 both)",
				opt, s)
		}
		m.byRank[int(n)] = v
	}
	return m, nil
}

func parseStd(s string) (std, bool) {
	if len(s) != 1 || s[0] < '0' || s[0] > '3' {
		return 0, false
	}
	return std(s[0] - '0'), true
}

// ParseSignals reads --signals-to-handle: signal names separated by commas. A name that this system does not know is a
// warning only, as in torchrun; a signal that cannot stop a job is an error.
func ParseSignals(s string) (signals []syscall.Signal, warnings []string, err error) {
	for name := range strings.SplitSeq(s, ",") {
		name = strings.TrimSpace(name)
		sig := signalNumber(name)
		switch sig {
		case 0:
			warnings = append(warnings, fmt.Sprintf("--signals-to-handle: no signal %s on this system; ignored", pyRepr(name)))
			continue
		case syscall.SIGKILL, syscall.SIGSTOP:
			return nil, nil, fmt.Errorf("--signals-to-handle: %s cannot be caught by any process; remove it", name)
		case syscall.SIGCHLD, syscall.SIGURG:
			// The kernel sends SIGCHLD when a worker ends, the Go runtime sends itself SIGURG to preempt a goroutine.
			return nil, nil, fmt.Errorf("--signals-to-handle: %s is used by the launcher itself and would stop the job at "+
				"any time; remove it", name)
		}
		if !slices.Contains(signals, sig) {
			signals = append(signals, sig)
		}
	}
	return signals, warnings, nil
}

// signalNumber knows the names of Python's signal module on Linux, 0 for any other.
func signalNumber(name string) syscall.Signal {
	switch name {
	case "SIGCLD":
		return syscall.SIGCHLD
	case "SIGIOT":
		return syscall.SIGABRT
	case "SIGPOLL":
		return syscall.SIGIO
	case "SIGRTMIN": // glibc keeps 32 and 33 for its threads
		return 34
	case "SIGRTMAX":
		return 64
	}
	return unix.SignalNum(name)
}

// ParseRanks reads --local-ranks-filter: local ranks separated by commas. nil means all.
func ParseRanks(s string) (map[int]bool, error) {
	if s == "" {
		return nil, nil
	}
	ranks := map[int]bool{}
	for part := range strings.SplitSeq(s, ",") {
		digits, _ := pyInt(part)
		n, err := strconv.Atoi(digits)
		if err != nil {
			return nil, fmt.Errorf("--local-ranks-filter: %s must be a comma-separated list of integers e.g. "+
				"--local-ranks-filter=0,1,2", pyRepr(s))
		}
		ranks[n] = true
	}
	return ranks, nil
}

// ParseFilters reads --duplicate-stdout-filters and --duplicate-stderr-filters: texts separated by commas, ",," being a
// comma within a text. No text at all means no filter (torchrun: every line); an empty one among others matches every
// line, as in torchrun.
func ParseFilters(s string) []string {
	if s == "" {
		return nil
	}
	const comma = "\x00" // cannot be in an argument
	filters := strings.Split(strings.ReplaceAll(s, ",,", comma), ",")
	for i, f := range filters {
		filters[i] = strings.ReplaceAll(f, comma, ",")
	}
	return filters
}

// Ring is the value of --box-pairs in place of pairs.
const Ring = "ring"

// ParsePairs reads the values of --box-pairs: "0:1", or lists such as "0:1,2:4".
func ParsePairs(values []string) ([][2]int, error) {
	var pairs [][2]int
	for _, s := range values {
		list := splitPairs(s)
		if list == nil {
			return nil, fmt.Errorf("--box-pairs: %s is not a list of device pairs; write 0:1,2:4, or ring alone", pyRepr(s))
		}
		for _, text := range list {
			a, b, _ := strings.Cut(text, ":")
			x, errX := strconv.Atoi(a)
			y, errY := strconv.Atoi(b)
			if errX != nil || errY != nil || x == y {
				return nil, fmt.Errorf("--box-pairs: %s does not name two different devices; write 0:1,2:4", pyRepr(text))
			}
			pairs = append(pairs, [2]int{x, y})
		}
	}
	return pairs, nil
}

// splitPairs returns the "A:B" of a list separated by commas or blanks, nil if s is anything else.
func splitPairs(s string) []string {
	list := strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
	if len(list) == 0 {
		return nil
	}
	for _, pair := range list {
		a, b, _ := strings.Cut(pair, ":")
		if a == "" || b == "" || strings.Trim(a+b, "0123456789") != "" {
			return nil
		}
	}
	return list
}

// ParseSize reads a size in bytes such as "4096", "64K", "10M" or "1G", in powers of 1024; "" is 0.
func ParseSize(s string) (int64, error) {
	if s == "" {
		return 0, nil
	}
	shift := 0
	digits := s
	if i := strings.IndexByte("KMG", s[len(s)-1]&^0x20); i >= 0 { // &^0x20: to upper case
		shift, digits = 10*(i+1), s[:len(s)-1]
	}
	n, err := strconv.ParseUint(digits, 10, 63)
	switch {
	case errors.Is(err, strconv.ErrRange) || err == nil && n > math.MaxInt64>>shift:
		return 0, fmt.Errorf("size %s is more than 64 bits hold; write a smaller one", pyRepr(s))
	case err != nil:
		return 0, fmt.Errorf("size %s is not a whole number of bytes; write 4096, 64K, 10M or 1G", pyRepr(s))
	}
	return int64(n) << shift, nil
}

// ParseEndpoint reads --rdzv-endpoint: HOST, HOST:PORT, [IPV6], [IPV6]:PORT or a bare IPv6 address; "" is localhost.
// Where a bare address could also be read as one with a port behind it ("fd00::1:99"), it is, as in torchrun.
func ParseEndpoint(s string, defaultPort int) (host string, port int, err error) {
	if s = strings.TrimSpace(s); s == "" {
		return "localhost", defaultPort, nil
	}
	host, port = s, defaultPort
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !bareAddress(s, s[:i]) {
		host = s[:i]
		p, perr := strconv.ParseUint(s[i+1:], 10, 16)
		if perr != nil || len(s)-i > 6 {
			return "", 0, fmt.Errorf("--rdzv-endpoint: "+
				"The port number of the rendezvous endpoint '%s' must be an integer between 0 and 65535; write host:29400", s)
		}
		port = int(p)
	}
	if n := len(host); n > 1 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	if host == "" || strings.ContainsFunc(host, notInHost) {
		return "", 0, fmt.Errorf("--rdzv-endpoint: "+
			"The hostname of the rendezvous endpoint '%s' must be a dot-separated list of labels, "+
			"an IPv4 address, or an IPv6 address; write host:29400 or [::1]:29400", s)
	}
	return host, port, nil
}

// bareAddress reports whether s is an address without a port, head being s up to its last colon.
func bareAddress(s, head string) bool {
	if s[0] == '[' {
		return s[len(s)-1] == ']'
	}
	_, err := netip.ParseAddr(s)
	_, headErr := netip.ParseAddr(head)
	return err == nil && headErr != nil
}

func notInHost(r rune) bool {
	return !unicode.IsLetter(r) && !unicode.IsNumber(r) && !strings.ContainsRune("_.:-", r)
}

// SubstituteLocalRank puts localRank into a worker's argument like Python's string.Template.safe_substitute, which
// torchrun uses: ${local_rank} and $local_rank are replaced, $$ becomes $, everything else stays.
func SubstituteLocalRank(arg string, localRank int) string {
	const key = "local_rank"
	var b strings.Builder
	for {
		head, rest, found := strings.Cut(arg, "$")
		b.WriteString(head)
		if !found {
			return b.String()
		}
		name := identifier(rest)
		switch {
		case strings.HasPrefix(rest, "$"):
			b.WriteByte('$')
			rest = rest[1:]
		case strings.HasPrefix(rest, "{"+key+"}"):
			b.WriteString(strconv.Itoa(localRank))
			rest = rest[len(key)+2:]
		case name == key:
			b.WriteString(strconv.Itoa(localRank))
			rest = rest[len(key):]
		default:
			b.WriteByte('$')
		}
		arg = rest
	}
}

// identifier returns the Python identifier, in ASCII, that s begins with.
func identifier(s string) string {
	n := 0
	for n < len(s) && (s[n] == '_' || s[n]|0x20 >= 'a' && s[n]|0x20 <= 'z' || n > 0 && isDigit(s[n])) {
		n++
	}
	return s[:n]
}
