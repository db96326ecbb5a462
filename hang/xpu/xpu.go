// Package xpu reads and writes the stacks of xpu_timer: files <rank>-<world size>.stacktrace, each a message
// xpu_timer.server.Stacktrace of protocol buffers.
package xpu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/openfile"
)

// Bounds of a file, and of a directory.
const (
	maxFile    = 64 << 20
	maxThreads = 4096
	maxFrames  = 1024 // of a thread, the innermost
	maxWorld   = 1 << 20
)

// ending is that of the files' names.
const ending = ".stacktrace"

// mainThread is the name that Python gives a process's main thread.
const mainThread = "MainThread"

// ErrNone: the directory has no file of xpu_timer.
var ErrNone = errors.New("there is no file <rank>-<world size>.stacktrace, such as 00003-00008.stacktrace")

// apart is how far the ages of files may differ that belong to one hang.
const apart = 10 * time.Minute

// Stacks is the contents of a directory.
type Stacks struct {
	World    hang.World // one node without a name
	Evidence []hang.Evidence
	At       time.Time // the newest file
	Notes    []string  // files that were left out, and oddities of the others
}

// Read reads all files of a directory, but links. A file that cannot be read is a note; if there is nothing to read,
// that is an error, ErrNone if there is no such file.
func Read(dir string) (*Stacks, error) {
	found, notes, err := list(dir)
	if err != nil {
		return nil, err
	}
	s := &Stacks{Notes: notes}
	s.choose(found)
	for _, f := range found {
		if f.size == s.World.Nodes[0].Slots {
			s.read(dir, f)
		}
	}
	if len(s.Evidence) == 0 {
		return nil, fmt.Errorf("%s: none of the files can be read: %s", dir, strings.Join(s.Notes, "; "))
	}
	return s, nil
}

// file is one with a name of xpu_timer's.
type file struct {
	name       string
	rank, size int
	at         time.Time
}

func list(dir string) (found []file, notes []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ending)
		if !ok {
			continue
		}
		f := file{name: e.Name()}
		if f.rank, f.size, err = parseName(name); err != nil {
			notes = append(notes, fmt.Sprintf("%q: %v", e.Name(), err))
			continue
		}
		if info, err := e.Info(); err == nil {
			f.at = info.ModTime()
		}
		found = append(found, f)
	}
	if len(found) == 0 {
		return nil, nil, fmt.Errorf("%s: %w", dir, errors.Join(ErrNone, asError(notes)))
	}
	return found, notes, nil
}

func asError(notes []string) error {
	if len(notes) == 0 {
		return nil
	}
	return errors.New(strings.Join(notes, "; "))
}

func parseName(name string) (rank, size int, err error) {
	first, second, _ := strings.Cut(name, "-")
	r, err1 := strconv.ParseUint(first, 10, 32)
	n, err2 := strconv.ParseUint(second, 10, 32)
	switch {
	case err1 != nil || err2 != nil:
		return 0, 0, errors.New("the name is not <rank>-<world size>")
	case n > maxWorld:
		return 0, 0, fmt.Errorf("the world size is above %d", maxWorld)
	case r >= n:
		return 0, 0, fmt.Errorf("a world of %d has no rank %d", n, r)
	}
	return int(r), int(n), nil
}

// choose takes the world of the newest file. Files have no date but their own, and an earlier hang's look alike.
func (s *Stacks) choose(found []file) {
	oldest, newest := found[0], found[0]
	for _, f := range found {
		if f.at.After(newest.at) {
			newest = f
		}
	}
	others := 0
	oldest = newest
	for _, f := range found {
		switch {
		case f.size != newest.size:
			others++
		case f.at.Before(oldest.at):
			oldest = f
		}
	}
	s.At, s.World = newest.at, hang.World{Nodes: []hang.WorldNode{{Slots: newest.size}}}
	if others > 0 {
		s.Notes = append(s.Notes, fmt.Sprintf("%d files are of a world of another size than %d, that of the newest: left out",
			others, newest.size))
	}
	if age := newest.at.Sub(oldest.at); age > apart {
		s.Notes = append(s.Notes, fmt.Sprintf("%s is %v older than %s: they may be of different hangs",
			oldest.name, age.Round(time.Second), newest.name))
	}
}

func (s *Stacks) read(dir string, f file) {
	b, err := openfile.Read(filepath.Join(dir, f.name), maxFile)
	if err == nil {
		var e hang.Evidence
		if e, err = parseFile(b); err == nil {
			e.Rank = f.rank
			s.Evidence = append(s.Evidence, e)
			return
		}
	}
	s.Notes = append(s.Notes, fmt.Sprintf("%s: %v", f.name, err))
}

// parseFile reads one file. Threads that have both sorts of stacks are listed twice: the orders of both are kept.
func parseFile(b []byte) (hang.Evidence, error) {
	e := hang.Evidence{Stacks: &hang.Stacks{}}
	var native []hang.Thread
	var problems []string
	err := fields(b, func(f field) (err error) {
		switch f.ID {
		case 1:
			native, err = add(native, f.Bytes, parseNative)
		case 2:
			e.Stacks.Threads, err = add(e.Stacks.Threads, f.Bytes, parsePython)
		case 3:
			e.PID = int(int32(f.Number))
		case 4:
			e.Rank = int(int32(f.Number))
		case 6, 8: // complaints of the parsers of the tools' output
			problems = append(problems, f.text())
		case 11:
			if state := f.text(); state != "" {
				e.Samples = []hang.Sample{{Proc: hang.Proc{State: state[0]}}}
			}
		}
		return err
	})
	if err != nil {
		return hang.Evidence{}, err
	}
	e.Stacks.Error = strings.TrimSpace(strings.Join(problems, "\n"))
	for i, t := range native {
		native[i].Main = t.TID == e.PID && e.PID != 0
	}
	e.Stacks.Threads = append(e.Stacks.Threads, native...)
	return e, nil
}

func add(to []hang.Thread, b []byte, parse func([]byte) (hang.Thread, error)) ([]hang.Thread, error) {
	if len(to) == maxThreads {
		return nil, fmt.Errorf("more than %d threads", maxThreads)
	}
	t, err := parse(b)
	return append(to, t), err
}

func parseNative(b []byte) (t hang.Thread, err error) {
	err = fields(b, func(f field) (err error) {
		switch f.ID {
		case 1:
			t.TID = int(uint32(f.Number))
		case 2:
			t.Name = f.text()
		case 3:
			t.Native, err = addFrame(t.Native, f.Bytes)
		}
		return err
	})
	return t, err
}

func parsePython(b []byte) (t hang.Thread, err error) {
	pid := 0
	err = fields(b, func(f field) (err error) {
		switch f.ID {
		case 1:
			pid = int(uint32(f.Number))
		case 3:
			t.Name = f.text()
		case 4:
			t.TID = int(uint32(f.Number))
		case 6:
			t.GIL = f.Number != 0
		case 7:
			t.Python, err = addFrame(t.Python, f.Bytes)
		}
		return err
	})
	t.Main = t.Name == mainThread || pid != 0 && pid == t.TID
	return t, err
}

// addFrame adds a frame of either sort: the function is field 1, the source field 2.
func addFrame(to []hang.Frame, b []byte) ([]hang.Frame, error) {
	var frame hang.Frame
	err := fields(b, func(f field) error {
		switch f.ID {
		case 1:
			frame.Func = f.text()
		case 2:
			frame.File, frame.Line = source(f.text())
		}
		return nil
	})
	if err != nil || len(to) == maxFrames {
		return to, err
	}
	return append(to, frame), nil
}

// source splits data.py:12 into its parts, so that they can be joined again.
func source(s string) (file string, line int) {
	i := strings.LastIndexByte(s, ':')
	if i <= 0 {
		return s, 0
	}
	n, err := strconv.Atoi(s[i+1:])
	if err != nil || n <= 0 || strconv.Itoa(n) != s[i+1:] {
		return s, 0
	}
	return s[:i], n
}
