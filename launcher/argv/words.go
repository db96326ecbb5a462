package argv

import (
	"errors"
	"strings"
)

// Words splits text into words as a POSIX shell does, without expanding anything: blanks separate, '...' and "..."
// quote, and a backslash takes the next character as it is.
func Words(text string) ([]string, error) {
	var words []string
	for {
		text = strings.TrimLeft(text, " \t\n\r")
		if text == "" {
			return words, nil
		}
		word, rest, err := firstWord(text)
		if err != nil {
			return nil, err
		}
		words, text = append(words, word), rest
	}
}

// firstWord reads the word that text begins with.
func firstWord(text string) (word, rest string, err error) {
	var b strings.Builder
	for text != "" && !strings.ContainsRune(" \t\n\r", rune(text[0])) {
		switch c := text[0]; {
		case c == '\'':
			part, after, closed := strings.Cut(text[1:], "'")
			if !closed {
				return "", "", errors.New("a ' is not closed")
			}
			b.WriteString(part)
			text = after
		case c == '"':
			if text, err = quoted(&b, text[1:]); err != nil {
				return "", "", err
			}
		case c == '\\' && len(text) == 1:
			return "", "", errors.New("a backslash is the last character")
		case c == '\\':
			b.WriteByte(text[1])
			text = text[2:]
		default:
			b.WriteByte(c)
			text = text[1:]
		}
	}
	return b.String(), text, nil
}

// quoted reads up to the closing double quote, and returns the rest behind it.
func quoted(b *strings.Builder, text string) (rest string, err error) {
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			return text[i+1:], nil
		case c == '\\' && i+1 < len(text) && strings.IndexByte("\\\"$`", text[i+1]) >= 0:
			i++
			b.WriteByte(text[i])
		default:
			b.WriteByte(c)
		}
	}
	return "", errors.New(`a " is not closed`)
}
