package pystack

import "strings"

// demangle makes c10d::Reducer::finalize_backward of _ZN4c10d7Reducer17finalize_backwardEv: the qualified name of a C++
// function, without the arguments of functions and templates. What it does not understand it leaves as it is.
func demangle(symbol string) string {
	if len(symbol) > maxName || !strings.HasPrefix(symbol, "_Z") {
		return symbol
	}
	d := demangler{s: symbol[2:]}
	if name := d.encoding(); name != "" && !d.bad {
		return name
	}
	return symbol
}

// demangler reads names of the Itanium C++ ABI from left to right.
type demangler struct {
	s     string
	bad   bool
	depth int
}

// maxDemangle bounds how deep names are nested.
const maxDemangle = 64

func (d *demangler) take(prefix string) bool {
	rest, ok := strings.CutPrefix(d.s, prefix)
	d.s = rest
	return ok
}

func (d *demangler) next() byte {
	if d.s == "" {
		d.bad = true
		return 0
	}
	c := d.s[0]
	d.s = d.s[1:]
	return c
}

func (d *demangler) fail() string {
	d.bad = true
	return ""
}

// encoding is the name of a function or a variable; what it is called with is not read.
func (d *demangler) encoding() string {
	if d.depth++; d.depth > maxDemangle {
		return d.fail()
	}
	defer func() { d.depth-- }()
	switch {
	case d.take("GTt"), d.take("Th"), d.take("Tv"): // clones and thunks
		return ""
	case d.take("N"):
		return d.nested()
	case d.take("Z"):
		return d.local()
	}
	name := d.component("")
	d.arguments()
	return name
}

// nested is N ... E.
func (d *demangler) nested() string {
	for d.s != "" && strings.IndexByte("rVKRO", d.s[0]) >= 0 {
		d.s = d.s[1:]
	}
	var parts []string
	for !d.bad && !d.take("E") {
		if strings.HasPrefix(d.s, "I") {
			d.arguments()
			continue
		}
		last := ""
		if len(parts) > 0 {
			last = parts[len(parts)-1]
		}
		parts = append(parts, d.component(last))
	}
	return strings.Join(parts, "::")
}

// local is what is defined in a function: Z encoding E name.
func (d *demangler) local() string {
	outer := d.encoding()
	for !d.bad && !d.take("E") {
		d.token() // the types of its arguments
	}
	if d.take("s") {
		return outer
	}
	if d.take("d") {
		for !d.bad && d.next() != '_' {
		}
	}
	if d.bad {
		return ""
	}
	return outer + "::" + d.encoding()
}

// component is one part of a qualified name; last is the one before it.
func (d *demangler) component(last string) string {
	name := ""
	switch {
	case d.s == "":
		return d.fail()
	case d.s[0] >= '0' && d.s[0] <= '9':
		name = d.source()
	case d.take("St"):
		name = "std"
		if last == "" && d.s != "" && d.s[0] != 'E' && d.s[0] != 'I' {
			name += "::" + d.component("std")
		}
	case d.s[0] == 'S':
		name = d.substitution()
	case d.s[0] == 'L':
		d.s = d.s[1:]
		name = d.source()
	case d.take("C1"), d.take("C2"), d.take("C3"):
		name = last[strings.LastIndexByte(last, ':')+1:]
	case d.take("D0"), d.take("D1"), d.take("D2"):
		name = "~" + last[strings.LastIndexByte(last, ':')+1:]
	case d.take("Ul"):
		for !d.bad && !d.take("E") {
			d.token()
		}
		d.number()
		name = "{lambda}"
	case d.take("Ut"):
		d.number()
		name = "{unnamed}"
	default:
		name = d.operator()
	}
	for d.take("B") { // ABI tags
		d.source()
	}
	return name
}

// source is an identifier behind its length.
func (d *demangler) source() string {
	n := 0
	for d.s != "" && d.s[0] >= '0' && d.s[0] <= '9' && n <= maxName {
		n = 10*n + int(d.next()-'0')
	}
	if n == 0 || n > len(d.s) {
		return d.fail()
	}
	name := d.s[:n]
	d.s = d.s[n:]
	if strings.HasPrefix(name, "_GLOBAL__N") {
		return "(anonymous namespace)"
	}
	return name
}

// number is [digits] _.
func (d *demangler) number() {
	for !d.bad && d.next() != '_' {
	}
}

// substitution is one of the abbreviations for std's classes. Those for earlier parts of the same name do not begin a
// function's.
func (d *demangler) substitution() string {
	name, ok := map[string]string{
		"Sa": "std::allocator", "Sb": "std::basic_string", "Ss": "std::string", "Si": "std::istream", "So": "std::ostream",
		"Sd": "std::iostream",
	}[d.s[:min(2, len(d.s))]]
	if !ok {
		return d.fail()
	}
	d.s = d.s[2:]
	return name
}

// operators are pairs of what stands for one and what it is.
const operators = "nw new na new[] dl delete da delete[] ps + ng - ad & de * co ~ pl + mi - ml * dv / rm % an & or | " +
	"eo ^ aS = pL += mI -= mL *= dV /= rM %= aN &= oR |= eO ^= ls << rs >> lS <<= rS >>= eq == ne != lt < gt > le <= " +
	"ge >= nt ! aa && oo || pp ++ mm -- cm , pm ->* pt -> cl () ix []"

func (d *demangler) operator() string {
	if d.take("cv") {
		d.token()
		return "operator cast"
	}
	if len(d.s) < 2 {
		return d.fail()
	}
	words := strings.Fields(operators)
	for i := 0; i+1 < len(words); i += 2 {
		if d.take(words[i]) {
			if words[i+1][0] >= 'a' && words[i+1][0] <= 'z' {
				return "operator " + words[i+1]
			}
			return "operator" + words[i+1]
		}
	}
	return d.fail()
}

// arguments skips those of a template, I ... E, if there are any.
func (d *demangler) arguments() {
	if !d.take("I") {
		return
	}
	for !d.bad && !d.take("E") {
		d.token()
	}
}

// token skips a type, or a piece of one.
func (d *demangler) token() {
	if d.depth++; d.depth > maxDemangle {
		d.bad = true
	}
	defer func() { d.depth-- }()
	if d.s != "" && d.s[0] >= '0' && d.s[0] <= '9' {
		d.source()
		return
	}
	switch c := d.next(); c {
	case 'I', 'J', 'N', 'X', 'F':
		d.group()
	case 'Z':
		d.group()
		if !d.take("s") && d.s != "" {
			d.token()
		}
	case 'L':
		d.literal()
	case 'A', 'T':
		d.number()
	case 'S':
		if c := d.next(); c == '_' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' {
			for !d.bad && c != '_' {
				c = d.next()
			}
		}
	case 'D':
		if c := d.next(); c == 't' || c == 'T' {
			d.group()
		}
	case 'U':
		if d.take("l") {
			d.group()
			d.number()
		} else if d.take("t") {
			d.number()
		}
	}
}

// group skips tokens up to an E.
func (d *demangler) group() {
	for !d.bad && !d.take("E") {
		d.token()
	}
}

// literal skips a value: L type digits E, or L _Z encoding E.
func (d *demangler) literal() {
	if d.take("_Z") {
		d.group()
		return
	}
	d.token()
	for !d.bad && d.next() != 'E' {
	}
}
