package remote

import (
	"strconv"
	"strings"
)

// hostWord and rankWord stand for a host and its number in the words of a remote shell.
const (
	hostWord = "{host}"
	rankWord = "{rank}"
)

// Command is the words of a remote shell for one host, and the command that it executes there.
func Command(shell []string, host string, rank int) []string {
	fill := strings.NewReplacer(hostWord, host, rankWord, strconv.Itoa(rank))
	words := make([]string, 0, len(shell)+1)
	for _, w := range shell {
		words = append(words, fill.Replace(w))
	}
	return append(words, "sh")
}
