package token

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/internal/openfile"
)

// maxFile bounds the file of a token, in bytes.
const maxFile = 64 << 10

// A file is read again by the uses of its token, once in lookEvery at most. A change counts when it is as old as
// settled, or was read twice: the writer may not have come to the end.
const (
	lookEvery = time.Second
	settled   = time.Second
)

// file is a token file. It has no goroutine.
type file struct {
	path   string
	log    *slog.Logger
	tokens atomic.Pointer[[]string]

	mu     sync.Mutex // held by the only reader: nobody else waits for a slow disk
	looked time.Time
	last   string // what was read then
	tried  string // what was parsed last
}

// open reads a file. A pipe can be read only once.
func open(path string) (Job, error) {
	data, err := openfile.ReadNamed(path, maxFile)
	if err != nil {
		return Job{}, fmt.Errorf("token file: %w", err)
	}
	tokens, err := parse(string(data), path)
	if err != nil {
		return Job{}, err
	}
	j := Job{Token: tokens[0]}
	if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() {
		return j, nil
	}
	if path, err = filepath.Abs(path); err != nil {
		return j, fmt.Errorf("token file: %w", err)
	}
	j.file = &file{path: path, log: slog.New(slog.DiscardHandler), looked: time.Now(), last: string(data),
		tried: string(data)}
	j.file.tokens.Store(&tokens)
	return j, nil
}

// parse reads a token on each of one or two lines.
func parse(text, path string) (tokens []string, err error) {
	for line := range strings.Lines(strings.TrimSpace(text)) {
		token, err := Check(strings.TrimSpace(line), "token file "+path)
		if err != nil {
			return nil, err
		}
		tokens = append(tokens, token)
	}
	switch len(tokens) {
	case 0:
		_, err = Check("", "token file "+path)
	case 1, 2:
	default:
		err = fmt.Errorf("token file %s has %d lines; it holds a job token, and while that changes a second one", path,
			len(tokens))
	}
	return tokens, err
}

func (f *file) now() []string {
	if f.mu.TryLock() {
		f.look()
		f.mu.Unlock()
	}
	return *f.tokens.Load()
}

// look reads the file if that is due. What stood there stays while it cannot be used.
func (f *file) look() {
	if time.Since(f.looked) < lookEvery {
		return
	}
	f.looked = time.Now()
	data, err := openfile.ReadLinked(f.path, maxFile)
	text := string(data)
	if err != nil {
		text = "error: " + err.Error() // no token
	}
	before := f.last
	if f.last = text; text == f.tried || text != before && !f.isSettled() {
		return
	}
	f.tried = text
	tokens, parseErr := parse(text, f.path)
	if err == nil {
		err = parseErr
	}
	if err != nil {
		f.log.Warn("the token file has changed and cannot be used; the token from before stays", "err", err)
		return
	}
	f.tokens.Store(&tokens)
	f.log.Info("the token file was read again; the first token is sent, and all are accepted", "path", f.path,
		"tokens", len(tokens))
}

func (f *file) isSettled() bool {
	fi, err := os.Stat(f.path)
	return err == nil && time.Since(fi.ModTime()) >= settled
}
