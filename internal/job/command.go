package job

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Bounds of a Command.
const (
	MaxCommand = 64 << 10 // bytes of all words, with one more for each
	maxWords   = 4096
)

// Command is executed by workers in place of the command line of their nodes.
type Command struct {
	// Program is a program or a script with arguments; empty: that of each node.
	Program []string `json:"program,omitempty"`
	// Args follow it. Nil: those of each node if Program is empty, else none.
	Args []string `json:"args"`
}

// Validate reports the first error of c; nil is not a command.
func (c *Command) Validate() error {
	if c == nil {
		return nil
	}
	size := 0
	for _, w := range append(append([]string{}, c.Program...), c.Args...) {
		if !utf8.ValidString(w) || strings.ContainsRune(w, 0) {
			return fmt.Errorf("command: the word %.100q: need UTF-8 without NUL", w)
		}
		size += len(w) + 1
	}
	switch words := len(c.Program) + len(c.Args); {
	case words > maxWords:
		return fmt.Errorf("command: %d words; at most %d are taken", words, maxWords)
	case size > MaxCommand:
		return fmt.Errorf("command: %d bytes; at most %d are taken", size, MaxCommand)
	case len(c.Program) > 0 && c.Program[0] == "":
		return fmt.Errorf("command: the program's name is empty")
	}
	return nil
}

// String is c as one would type it, in at most some 300 bytes.
func (c *Command) String() string {
	var words []string
	for _, w := range c.Program {
		words = append(words, word(w))
	}
	if c.Args != nil {
		words = append(words, "--")
	}
	for _, w := range c.Args {
		words = append(words, word(w))
	}
	text := strings.Join(words, " ")
	if len(text) > 300 {
		text = strings.ToValidUTF8(text[:297], "") + "..."
	}
	return text
}

// word quotes s if it could be taken for more than one word, or does not print.
func word(w string) string {
	if q := strconv.Quote(w); w == "" || strings.Contains(w, " ") || q != `"`+w+`"` {
		return q
	}
	return w
}
