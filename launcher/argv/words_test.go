package argv

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWords(t *testing.T) {
	for text, want := range map[string][]string{
		"":                           nil,
		" \t\n":                      nil,
		"sleep inf":                  {"sleep", "inf"},
		`/usr/sbin/sshd  -D `:        {"/usr/sbin/sshd", "-D"},
		`sh -c 'a; b "$C"'`:          {"sh", "-c", `a; b "$C"`},
		`a"b c"'d e'\ f ""`:          {"ab cd e f", ""},
		`"\$x \" \\ \n" '\n'`:        {`$x " \ \n`, `\n`},
		`--name=größe "日本 語" \"x\"`:  {"--name=größe", "日本 語", `"x"`},
		"python train.py --lr\n 0.1": {"python", "train.py", "--lr", "0.1"},
	} {
		words, err := Words(text)
		require.NoError(t, err, text)
		require.Equal(t, want, words, text)
	}
	for text, want := range map[string]string{`'a`: "a ' is", `"a\"`: `a " is`, `a\`: "backslash"} {
		_, err := Words(text)
		require.ErrorContains(t, err, want)
	}
}

func FuzzWords(f *testing.F) {
	f.Add(`a "b c" 'd' \e`)
	f.Fuzz(func(t *testing.T, text string) {
		words, err := Words(text)
		if err != nil {
			return
		}
		var quoted []string
		for _, w := range words {
			quoted = append(quoted, "'"+strings.ReplaceAll(w, "'", `'\''`)+"'")
		}
		again, err := Words(strings.Join(quoted, " "))
		require.NoError(t, err)
		require.Equal(t, words, again)
	})
}
