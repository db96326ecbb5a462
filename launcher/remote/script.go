package remote

import (
	_ "embed"
	"strconv"
	"strings"
)

// Argument is the first argument of the program where it is the agent, or is asked for its identity.
const Argument = "--dlrover-remote"

// The words behind Argument.
const (
	asAgent = "agent"
	askID   = "id"
)

// head begins the lines of script and agent before the launcher is started. The output of others until then, such as a
// login shell's greeting, is skipped.
const head = "dlrover-remote: "

// The words behind head.
const (
	sayReady   = "ready"      // the agent waits for its memo
	saySend    = "send"       // the program is to be sent
	sayNowhere = "nowhere"    // there is no directory for it
	sayCannot  = "cannot run" // it is there, and cannot be executed; the machine's kind follows
)

//go:embed bootstrap.sh
var bootstrap string

// bootScript is the input of the remote sh. It executes the agent from the program at own, or one in PATH, if that is
// the file with that size and identity. Where there is none it requests the program, and keeps it, as long as it runs,
// in a new directory of that name.
func bootScript(p *Program, directory string) string {
	own := p.Path
	if strings.ContainsFunc(own, func(r rune) bool { return !plain(r) }) {
		own = ""
	}
	return strings.NewReplacer("@OWN@", own, "@SIZE@", strconv.FormatInt(p.Size, 10), "@ID@", p.ID,
		"@DIR@", directory, "@ARGUMENT@", Argument).Replace(bootstrap)
}

// plain is a character that means nothing else to a shell.
func plain(r rune) bool {
	return r|0x20 >= 'a' && r|0x20 <= 'z' || r >= '0' && r <= '9' || strings.ContainsRune("/._-+", r)
}
