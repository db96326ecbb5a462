package policy

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// document is what a file holds.
type document struct {
	fields []field // but for rules
	rules  []item
}

// field is a key with a scalar.
type field struct {
	key, value string
	line       int
}

// item is an element of a list: fields, or a text.
type item struct {
	fields []field
	text   string
	line   int
}

// reader reads a document line by line.
type reader struct {
	doc     document
	listed  bool // the list has begun,
	inRules bool // and not ended
	indent  int  // of the dashes of the list; -1: none has come
	column  int  // of the keys of the newest element; -1: it is a text
}

// parseYAML reads the part of YAML that ParseTable documents.
func parseYAML(text string) (document, error) {
	rd := reader{indent: -1, column: -1}
	if len(text) > MaxFile {
		return rd.doc, fmt.Errorf("longer than %d bytes", MaxFile)
	}
	n := 0
	for line := range strings.Lines(strings.TrimPrefix(text, "\uFEFF")) {
		n++
		line = strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r")
		if err := rd.line(line, n); err != nil {
			return rd.doc, fmt.Errorf("line %d: %w", n, err)
		}
	}
	return rd.doc, nil
}

func (rd *reader) line(text string, n int) error {
	if strings.ContainsRune(text, '\t') {
		return errors.New("there is a tab: write spaces")
	}
	if err := sound(text, maxRule); err != nil {
		return err
	}
	body := strings.TrimLeft(text, " ")
	indent := len(text) - len(body)
	switch {
	case body == "" || body[0] == '#', n == 1 && strings.TrimRight(text, " ") == "---":
		return nil
	case body == "-" || strings.HasPrefix(body, "- "):
		return rd.element(indent, body, n)
	case indent == 0:
		rd.inRules = false
		return rd.top(body, n)
	case rd.inRules && indent == rd.column:
		e := &rd.doc.rules[len(rd.doc.rules)-1]
		return addField(&e.fields, body, n)
	}
	return errors.New("the indentation fits nothing: keys of one rule stand below each other, and those of the file at " +
		"the beginning of the line; a text has one line")
}

// top reads a key of the file.
func (rd *reader) top(body string, n int) error {
	key, rest, found := strings.Cut(body, ":")
	if key != "rules" || !found {
		return addField(&rd.doc.fields, body, n)
	}
	if rest = strings.TrimLeft(rest, " "); rest != "" && rest[0] != '#' {
		return errors.New("rules is a list: write its elements below it, each behind a dash")
	}
	if rd.listed {
		return errors.New("rules is given twice")
	}
	rd.listed, rd.inRules = true, true
	return nil
}

// element reads the beginning of an element of the list.
func (rd *reader) element(indent int, body string, n int) error {
	rest := strings.TrimLeft(body[1:], " ")
	switch {
	case !rd.inRules:
		return errors.New("a list stands below rules: only")
	case rd.indent >= 0 && rd.indent != indent:
		return errors.New("the dashes of a list stand below each other")
	case rest == "" || rest[0] == '#':
		return errors.New("write the first key, or the rule, behind the dash")
	}
	rd.indent, rd.column = indent, indent+len(body)-len(rest)
	e := item{line: n}
	if isMapping(rest) {
		if err := addField(&e.fields, rest, n); err != nil {
			return err
		}
	} else {
		text, err := scalar(rest)
		if err != nil {
			return err
		}
		if e.text, rd.column = text, -1; text == "" {
			return errors.New("the rule is empty")
		}
	}
	rd.doc.rules = append(rd.doc.rules, e)
	if len(rd.doc.rules) > maxRules {
		return fmt.Errorf("more than %d rules", maxRules)
	}
	return nil
}

// isMapping reports whether text, which is no comment, is a key with a value.
func isMapping(text string) bool {
	if text[0] == '\'' || text[0] == '"' {
		return false
	}
	text, _, _ = strings.Cut(text, " #")
	return strings.Contains(text, ": ") || strings.HasSuffix(strings.TrimRight(text, " "), ":")
}

func addField(to *[]field, text string, n int) error {
	key, rest, found := strings.Cut(text, ":")
	if !found || rest != "" && rest[0] != ' ' || strings.Trim(key, "abcdefghijklmnopqrstuvwxyz-") != "" || key == "" {
		return fmt.Errorf("%.100q is no key with a value, such as action: retry; what has a colon stands in quotes", text)
	}
	for _, f := range *to {
		if f.key == key {
			return fmt.Errorf("%s is given twice; it stands in line %d, too", key, f.line)
		}
	}
	value, err := scalar(strings.TrimLeft(rest, " "))
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	if value == "" {
		return fmt.Errorf("%s has no value in its line", key)
	}
	*to = append(*to, field{key, value, n})
	return nil
}

// scalar reads the text of a value and the comment behind it.
func scalar(text string) (string, error) {
	if text == "" {
		return "", nil
	}
	switch text[0] {
	case '\'', '"':
		return quoted(text)
	case '[':
		return flow(text)
	}
	text, _, _ = strings.Cut(text, " #")
	text = strings.TrimRight(text, " ")
	switch {
	case text == "" || text[0] == '#':
		return "", nil
	case strings.ContainsRune("]{},&*!|>%@`", rune(text[0])), strings.HasPrefix(text, "- "), strings.HasPrefix(text, "? "),
		text == "-", text == "?", strings.HasPrefix(text, ": "), strings.Contains(text, ": "), strings.HasSuffix(text, ":"):
		return "", fmt.Errorf("%.100q means something else in YAML: write it in single quotes", text)
	case strings.ContainsRune("?:-", rune(text[0])):
		return "", fmt.Errorf("%.100q begins with a mark of YAML's: write it in single quotes", text)
	}
	return text, nil
}

// quoted reads a text in quotes: ' is written ” in single ones, \ and " with a \ before it in double ones.
func quoted(text string) (string, error) {
	quote := text[0]
	var b strings.Builder
	for i := 1; i < len(text); i++ {
		c := text[i]
		next := byte(0)
		if i+1 < len(text) {
			next = text[i+1]
		}
		switch {
		case c == '\'' && quote == c && next == c:
			i++
		case c == quote:
			return b.String(), nothing(text[i+1:])
		case c == '\\' && quote == '"':
			if c = next; c != '\\' && c != '"' {
				return "", fmt.Errorf(`%q: only \\ and \" have a backslash in double quotes: write the text in single quotes`, text)
			}
			i++
		}
		b.WriteByte(c)
	}
	return "", fmt.Errorf("%.100q has no quote at its end in this line", text)
}

// flow reads a list in brackets as words with commas between them.
func flow(text string) (string, error) {
	list, after, found := strings.Cut(text[1:], "]")
	if !found {
		return "", fmt.Errorf("%.100q has no ] at its end in this line", text)
	}
	var words []string
	for w := range strings.SplitSeq(list, ",") {
		w = strings.Trim(w, " ")
		if w == "" || w[0] == '-' || strings.ContainsFunc(w, func(r rune) bool {
			return !strings.ContainsRune("_.-", r) && !unicode.IsLetter(r) && !unicode.IsDigit(r)
		}) {
			return "", fmt.Errorf("%.100q: a list in brackets has words of letters, digits and ._-, with commas between them",
				text)
		}
		words = append(words, w)
	}
	return strings.Join(words, ","), nothing(after)
}

// nothing refuses what is no comment.
func nothing(text string) error {
	if rest := strings.TrimLeft(text, " "); rest != "" && (rest[0] != '#' || rest == text) {
		return fmt.Errorf("%.100q stands behind the end of the value", rest)
	}
	return nil
}
