// Package token finds the secret that the nodes of a job and their rendezvous daemon
// share.
package token

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/proc/guard"
)

// minLength bounds a token from below, in bytes.
const minLength = 16

// maxFile bounds the file of a token, in bytes.
const maxFile = 64 << 10

// Sources lists the sources of a job token, for people.
const Sources = "DLROVER_TOKEN (openssl rand -hex 16), DLROVER_TOKEN_FILE or --token-file"

// Find returns the token from the file, else from $DLROVER_TOKEN_FILE, else from
// $DLROVER_TOKEN, else "". The error never holds the token.
func Find(file string, env func(string) (string, bool)) (string, error) {
	if file == "" {
		file, _ = env("DLROVER_TOKEN_FILE")
	}
	if file != "" {
		data, err := openfile.ReadNamed(file, maxFile)
		if err != nil {
			return "", fmt.Errorf("token file: %w", err)
		}
		return Check(strings.TrimSpace(string(data)), "token file "+file)
	}
	if v, ok := env(guard.TokenVariable); ok && v != "" {
		guard.Conceal() // from workers of the same user
		return Check(v, "$"+guard.TokenVariable)
	}
	return "", nil
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
