// Package token finds the secret that the nodes of a job and their rendezvous daemon
// share. A file that holds it is read again while the program runs.
package token

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"

	"dlrover-run/launcher/proc/guard"
)

// minLength bounds a token from below, in bytes.
const minLength = 16

// Sources lists the sources of a job token, for people.
const Sources = "DLROVER_TOKEN (openssl rand -hex 16), DLROVER_TOKEN_FILE or --token-file"

// Job is the token of a job. The zero value is none.
type Job struct {
	Token string // that was sent first
	file  *file  // nil: Token stays
}

// Find returns the token from the file, else from $DLROVER_TOKEN_FILE, else from
// $DLROVER_TOKEN, else none. The error never holds the token.
func Find(path string, env func(string) (string, bool)) (Job, error) {
	if path == "" {
		path, _ = env("DLROVER_TOKEN_FILE")
	}
	if path != "" {
		return open(path)
	}
	if v, ok := env(guard.TokenVariable); ok && v != "" {
		guard.Conceal() // from workers of the same user
		token, err := Check(v, "$"+guard.TokenVariable)
		return Job{Token: token}, err
	}
	return Job{}, nil
}

// LogTo has log say when the file has changed. It is to be called before the token is used.
func (j Job) LogTo(log *slog.Logger) {
	if j.file != nil {
		j.file.log = log
	}
}

// Sent is the token for requests from now on, "" for none.
func (j Job) Sent() string {
	if all := j.Accepted(); len(all) > 0 {
		return all[0]
	}
	return ""
}

// Accepted are the tokens that a server takes from now on.
func (j Job) Accepted() []string {
	switch {
	case j.file != nil:
		return j.file.now()
	case j.Token != "":
		return []string{j.Token}
	}
	return nil
}

// Accepts reports whether a server takes this token.
func (j Job) Accepts(got string) (ok bool) {
	for _, token := range j.Accepted() {
		ok = subtle.ConstantTimeCompare([]byte(got), []byte(token)) == 1 || ok
	}
	return ok
}

// Path is the absolute path of the file that is read again, "" for none.
func (j Job) Path() string {
	if j.file == nil {
		return ""
	}
	return j.file.path
}

// Check returns the token if it can be one; where names its place in errors.
func Check(token, where string) (string, error) {
	switch {
	case len(token) < minLength:
		return "", fmt.Errorf("%s holds %d bytes; a job token needs at least %d, such as the output of: openssl rand -hex 16",
			where, len(token), minLength)
	case strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", errors.New(where + ": a job token consists of printable ASCII without spaces")
	}
	return token, nil
}

// Loopback reports whether host names this machine only.
func Loopback(host string) bool {
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback()
}
