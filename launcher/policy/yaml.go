package policy

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"

	"go.yaml.in/yaml/v3"
)

// document is the content of a file.
type document struct {
	fields []field // but for rules
	rules  []item
}

// field is a key with a text; a list is its texts with commas between them.
type field struct {
	key, value string
	line       int
}

// item is a rule: fields, or a text.
type item struct {
	fields []field
	text   string
	line   int
}

// maxFields bounds the fields of one mapping. Aliases let a small file have many rules with all of them.
const maxFields = 32

// parseYAML reads a file. It follows an alias no deeper than a list of texts, so that nothing can grow by them.
func parseYAML(text string) (doc document, err error) {
	if len(text) > MaxFile {
		return doc, fmt.Errorf("longer than %d bytes", MaxFile)
	}
	n := 0
	for line := range strings.Lines(strings.TrimPrefix(text, "\uFEFF")) {
		n++
		line = strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r")
		if strings.ContainsRune(line, '\t') {
			return doc, fmt.Errorf("line %d: there is a tab: write spaces", n)
		}
		if err := sound(line, maxRule); err != nil {
			return doc, fmt.Errorf("line %d: %w", n, err)
		}
	}
	root, err := decode(text)
	if err != nil {
		return doc, misread(text, err)
	}
	return doc, doc.read(root)
}

// decode returns the only document of a file.
func decode(text string) (*yaml.Node, error) {
	var root, second yaml.Node
	d := yaml.NewDecoder(strings.NewReader(text))
	if err := d.Decode(&root); errors.Is(err, io.EOF) {
		return &yaml.Node{Kind: yaml.ScalarNode}, nil
	} else if err != nil {
		return nil, err
	}
	if err := d.Decode(&second); err == nil {
		return nil, errors.New("a second document begins")
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return root.Content[0], nil
}

// misread names the line after the longest beginning of text that can be read: the decoder often names the block.
func misread(text string, err error) error {
	lines := strings.SplitAfter(text, "\n")
	n := sort.Search(len(lines)-1, func(n int) bool {
		_, err := decode(strings.Join(lines[:n+1], ""))
		return err != nil
	})
	why := strings.TrimPrefix(err.Error(), "yaml: ")
	if at, after, ok := strings.Cut(why, ": "); ok && strings.HasPrefix(at, "line ") {
		why = after
	}
	return fmt.Errorf("line %d: %.100q is not read as YAML: %s: what has a colon in it, or begins with a mark of YAML's, "+
		"stands in single quotes", n+1, strings.TrimSpace(lines[n]), why)
}

// target is the node that n is an alias of, or n.
func target(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func (doc *document) read(root *yaml.Node) error {
	if root.Kind == yaml.ScalarNode && root.Value == "" {
		return nil
	}
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: write keys with values, such as base: t9k; a list stands below rules:", root.Line)
	}
	listed := 0
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		if target(key).Value != "rules" {
			if err := addField(&doc.fields, key, value); err != nil {
				return err
			}
			continue
		}
		if listed > 0 {
			return fmt.Errorf("line %d: rules is given twice; it stands in line %d, too", key.Line, listed)
		}
		listed = key.Line
		if err := doc.list(key, target(value)); err != nil {
			return err
		}
	}
	return nil
}

func (doc *document) list(key, rules *yaml.Node) error {
	if rules.Kind != yaml.SequenceNode && rules.Value+rules.Anchor != "" || rules.Kind == yaml.MappingNode {
		return fmt.Errorf("line %d: rules is a list: write its elements below it, each behind a dash", key.Line)
	}
	if len(rules.Content) > maxRules {
		return fmt.Errorf("line %d: more than %d rules", rules.Content[maxRules].Line, maxRules)
	}
	for _, n := range rules.Content {
		it := item{line: n.Line}
		switch e := target(n); {
		case e.Kind == yaml.MappingNode:
			for i := 0; i < len(e.Content); i += 2 {
				if err := addField(&it.fields, e.Content[i], e.Content[i+1]); err != nil {
					return err
				}
			}
		case e.Kind == yaml.ScalarNode && e.Value != "":
			it.text = strings.TrimRight(e.Value, "\n")
		default:
			return fmt.Errorf("line %d: a rule is keys with values, such as exit: 1, or a text: exit 1 -> retry", n.Line)
		}
		doc.rules = append(doc.rules, it)
	}
	return nil
}

func addField(to *[]field, key, value *yaml.Node) error {
	k := target(key)
	if k.Kind != yaml.ScalarNode || sound(k.Value, maxName) != nil {
		return fmt.Errorf("line %d: a key is a word, such as action: retry", key.Line)
	}
	if i := slices.IndexFunc(*to, func(f field) bool { return f.key == k.Value }); i >= 0 {
		return fmt.Errorf("line %d: %s is given twice; it stands in line %d, too", key.Line, k.Value, (*to)[i].line)
	}
	if len(*to) == maxFields {
		return fmt.Errorf("line %d: more than %d keys", key.Line, maxFields)
	}
	v, err := valueOf(target(value))
	switch {
	case err != nil:
		return fmt.Errorf("line %d: %s: %w", key.Line, k.Value, err)
	case v == "":
		return fmt.Errorf("line %d: %s has no value", key.Line, k.Value)
	}
	*to = append(*to, field{k.Value, v, key.Line})
	return nil
}

// maxName bounds a key, in bytes.
const maxName = 64

// valueOf is a text, or the texts of a list with commas between them.
func valueOf(n *yaml.Node) (string, error) {
	var words []string
	switch n.Kind {
	case yaml.ScalarNode:
		words = []string{strings.TrimRight(n.Value, "\n")}
	case yaml.SequenceNode:
		for _, e := range n.Content {
			e = target(e)
			if e.Kind != yaml.ScalarNode || e.Value == "" || strings.Contains(e.Value, ",") {
				return "", errors.New("a list has words without commas in them")
			}
			words = append(words, e.Value)
		}
	default:
		return "", errors.New("it is a text or a list of words, not keys with values")
	}
	text := strings.Join(words, ",")
	return text, sound(text, maxRule)
}
