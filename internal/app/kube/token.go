package kube

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/openfile"
)

const (
	tokenAge = time.Minute // after which the file is read again
	maxToken = 64 << 10    // bytes
)

// tokenFile is the service account's token, which the kubelet replaces before it expires.
type tokenFile struct {
	path string

	mu    sync.Mutex
	value string
	read  time.Time // zero: read the file before the next use
}

// get returns the token. One that cannot be read is no error while an earlier one has not been refused.
func (t *tokenFile) get() (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.read.IsZero() && time.Since(t.read) < tokenAge {
		return t.value, nil
	}
	value, err := readToken(t.path)
	if err != nil && t.read.IsZero() {
		return "", err
	}
	if err == nil {
		t.value = value
	}
	t.read = time.Now()
	return t.value, nil
}

// forget makes the next get read the file.
func (t *tokenFile) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.read = time.Time{}
}

func readToken(path string) (string, error) {
	text, err := openfile.ReadLinked(path, maxToken)
	if err != nil {
		return "", fmt.Errorf("kube: token of the service account: %w", err)
	}
	value := strings.TrimSpace(string(text))
	odd := func(r rune) bool { return r <= ' ' || r > '~' }
	if value == "" || strings.ContainsFunc(value, odd) {
		return "", errors.New("kube: " + path + ": a token is one line of printable ASCII without spaces")
	}
	return value, nil
}
