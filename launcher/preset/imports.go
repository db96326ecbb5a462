package preset

import (
	"bytes"
	"strings"
)

// MaxScript is the size of the largest script that is looked at, in bytes.
const MaxScript = 1 << 20

// Import is a module that a script imports, or an attribute of such a module that it uses.
type Import struct {
	Name string // with dots
	Line int    // from 1
	Text string // of that line, without the space around it
}

// Imports finds the import statements of a Python script, wherever they stand, and the first uses of attributes of
// imported modules, as far as both are in the text. Each name is found once, in the order of the script.
func Imports(src []byte) []Import {
	s := importScanner{lexer: lexer{src: src, line: 1, kind: endOfStatement}}
	s.names, s.seen = map[string]string{}, map[string]bool{}
	for s.next(); s.kind != endOfFile; {
		s.statement()
	}
	return s.found
}

// importScanner looks at one token after the other.
type importScanner struct {
	lexer
	found []Import
	names map[string]string // of modules, by the name under which the script knows them
	seen  map[string]bool
}

// statement reads one token, or an import statement.
func (s *importScanner) statement() {
	switch start := s.start; {
	case s.kind != name:
		s.next()
	case start && string(s.text) == "import":
		s.next()
		s.importNames()
	case start && string(s.text) == "from":
		s.next()
		s.importFrom()
	default:
		s.use()
	}
}

// importNames reads the names behind import.
func (s *importScanner) importNames() {
	for {
		module := s.dotted()
		if module == "" {
			return
		}
		s.find(module)
		if as := s.as(); as != "" {
			s.names[as] = module
		} else {
			top, _, _ := strings.Cut(module, ".")
			s.names[top] = top
		}
		if !s.skip(",") {
			return
		}
	}
}

// importFrom reads the names behind from. Relative names are the script's own.
func (s *importScanner) importFrom() {
	module := s.dotted()
	if module == "" || !s.skipName("import") {
		return
	}
	s.find(module)
	s.skip("(")
	for s.kind == name {
		part := string(s.text)
		s.next()
		full := module + "." + part
		s.find(full)
		if as := s.as(); as != "" {
			part = as
		}
		s.names[part] = full
		if !s.skip(",") {
			return
		}
	}
}

// use reads a name with dots, which may begin with that of a module.
func (s *importScanner) use() {
	module, known := s.names[string(s.text)]
	s.next()
	for s.skip(".") {
		if s.kind != name {
			return
		}
		if known {
			module += "." + string(s.text)
			s.find(module)
			known = strings.Count(module, ".") < maxDots
		}
		s.next()
	}
}

// maxDots bounds how far attributes are followed.
const maxDots = 2

// dotted reads a name with dots; "" if there is none.
func (s *importScanner) dotted() string {
	if s.kind != name {
		return ""
	}
	module := string(s.text)
	for s.next(); s.skip("."); s.next() {
		if s.kind != name {
			return ""
		}
		module += "." + string(s.text)
	}
	return module
}

// as reads "as NAME".
func (s *importScanner) as() string {
	if !s.skipName("as") || s.kind != name {
		return ""
	}
	as := string(s.text)
	s.next()
	return as
}

func (s *importScanner) skip(op string) bool {
	if s.kind != operator || string(s.text) != op {
		return false
	}
	s.next()
	return true
}

func (s *importScanner) skipName(word string) bool {
	if s.kind != name || string(s.text) != word {
		return false
	}
	s.next()
	return true
}

func (s *importScanner) find(module string) {
	if s.seen[module] || len(s.found) == maxFound {
		return
	}
	s.seen[module] = true
	s.found = append(s.found, Import{Name: module, Line: s.tokenLine, Text: s.lineText()})
}

// maxFound bounds the number of imports of a script.
const maxFound = 4096

// lexer splits a Python script into names, operators of one character, and ends of statements.
type lexer struct {
	src       []byte
	at        int // of the text behind the token
	line      int // of at
	depth     int // of brackets
	kind      tokenKind
	text      []byte // of a name or operator
	start     bool   // the token begins a statement
	tokenAt   int
	tokenLine int
}

type tokenKind int

const (
	endOfFile tokenKind = iota
	endOfStatement
	name
	operator // and everything else
)

// next reads a token.
func (l *lexer) next() {
	l.start = l.kind == endOfStatement
	for l.blank() {
	}
	l.tokenAt, l.tokenLine = l.at, l.line
	if l.at == len(l.src) {
		l.kind, l.text = endOfFile, nil
		return
	}
	c := l.src[l.at]
	switch {
	case isNameByte(c):
		l.word()
	case c == '"' || c == '\'':
		l.quoted()
	default:
		l.mark(c)
	}
}

// blank skips space, a comment or the end of a line that ends no statement.
func (l *lexer) blank() bool {
	rest := l.src[l.at:]
	switch {
	case len(rest) == 0:
		return false
	case rest[0] == '#':
		n := bytes.IndexByte(rest, '\n')
		if n < 0 {
			n = len(rest)
		}
		l.at += n
	case rest[0] == ' ' || rest[0] == '\t' || rest[0] == '\r' || rest[0] == '\f':
		l.at++
	case rest[0] == '\\' && len(rest) > 1 && (rest[1] == '\n' || rest[1] == '\r'):
		l.at += 2
		if rest[1] == '\r' && len(rest) > 2 && rest[2] == '\n' {
			l.at++
		}
		l.line++
	case rest[0] == '\n' && l.depth > 0:
		l.at++
		l.line++
	default:
		return false
	}
	return true
}

// word reads a name, a number, or a string with letters before it.
func (l *lexer) word() {
	begin := l.at
	for l.at < len(l.src) && isNameByte(l.src[l.at]) {
		l.at++
	}
	l.kind, l.text = name, l.src[begin:l.at]
	if l.at < len(l.src) && (l.src[l.at] == '"' || l.src[l.at] == '\'') && len(l.text) <= 3 {
		l.quoted()
	}
}

func isNameByte(c byte) bool {
	return c == '_' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= 0x80
}

// quoted reads a string; without three quotes it ends at the end of the line at the latest.
func (l *lexer) quoted() {
	l.kind, l.text = operator, nil
	quote := l.src[l.at : l.at+1]
	if three := bytes.Repeat(quote, 3); bytes.HasPrefix(l.src[l.at:], three) {
		quote = three
	}
	for l.at += len(quote); l.at < len(l.src); l.at++ {
		switch c := l.src[l.at]; {
		case bytes.HasPrefix(l.src[l.at:], quote):
			l.at += len(quote)
			return
		case c == '\\' && l.at+1 < len(l.src):
			if l.at++; l.src[l.at] == '\n' {
				l.line++
			}
		case c == '\n' && len(quote) == 1:
			return
		case c == '\n':
			l.line++
		}
	}
}

// mark reads one character that is no part of a name.
func (l *lexer) mark(c byte) {
	l.at++
	l.kind, l.text = operator, l.src[l.at-1:l.at]
	switch c {
	case '(', '[', '{':
		l.depth++
	case ')', ']', '}':
		l.depth = max(0, l.depth-1)
	case '\n':
		l.line++
		l.kind = endOfStatement
	case ';', ':':
		if l.depth == 0 {
			l.kind = endOfStatement
		}
	}
}

// lineText is the line of the token.
func (l *lexer) lineText() string {
	begin := bytes.LastIndexByte(l.src[:l.tokenAt], '\n') + 1
	line := l.src[begin:]
	if n := bytes.IndexByte(line, '\n'); n >= 0 {
		line = line[:n]
	}
	return string(bytes.TrimSpace(line))
}
