// Package report writes a hang as files: for people, for programs, and for users of xpu_timer's viewer.
package report

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/flame"
	"dlrover-run/hang/merge"
	"dlrover-run/hang/trace"
)

// Incident is the subject of a report: a hang, or the stacks of a healthy job with a verdict of KindNone.
type Incident struct {
	Job      string           `json:"job"`
	At       time.Time        `json:"at"` // of the verdict, or of the end of the collection
	World    hang.World       `json:"world"`
	Verdict  hang.Verdict     `json:"verdict"`
	Evidence []hang.Evidence  `json:"-"`
	Store    []hang.StoreWait `json:"store,omitempty"`
	RAS      []string         `json:"ras,omitempty"` // reports of NCCL's RAS, each text with the node's name before it
	// Notes describe oddities of the evidence, such as files that were left out.
	Notes []string `json:"notes,omitempty"`
}

// Of is the incident that a picture with evidence shows. Job is the run's id.
func Of(job string, at time.Time, p hang.Picture) Incident {
	c := Incident{Job: job, At: at, World: p.World, Verdict: p.Verdict, Evidence: p.Evidence, Store: p.Store}
	for _, r := range p.RAS {
		c.RAS = append(c.RAS, r.Node+": "+r.Text)
	}
	if silent := p.Asked - p.Answered; silent > 0 {
		c.Notes = append(c.Notes, fmt.Sprintf("%d of %d nodes have not answered", silent, p.Asked))
	}
	return c
}

// The files of a report.
const (
	PythonStacks  = "py_stack"
	PythonPicture = "py_stack.svg"
	NativeStacks  = "cpp_stack"
	NativePicture = "cpp_stack.svg"
	JSONFile      = "hang_report.json"
	textFile      = "hang_report.txt"
	traceFile     = "trace.json"
)

// Newest is the newest report in dir, which may be one itself, and when it was written; "": there is none.
func Newest(dir string) (path string, at time.Time) {
	if info, err := os.Lstat(filepath.Join(dir, JSONFile)); err == nil {
		return dir, info.ModTime()
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", time.Time{}
	}
	defer root.Close()
	names, _ := list(root)
	for _, r := range reportsOf(root, names, time.Now(), fs.FileInfo.IsDir) {
		info, err := root.Lstat(filepath.Join(r.name, JSONFile))
		if err == nil && info.Mode().IsRegular() && !r.at.IsZero() {
			return filepath.Join(dir, r.name), info.ModTime()
		}
	}
	return "", time.Time{}
}

// WriteStacktraces puts files of xpu_timer into dir, each in place of a file with its name. The nil ones are removed:
// files of an earlier hang would be taken for this one's.
func WriteStacktraces(dir string, files map[string][]byte) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	var errs []error
	for name, data := range files {
		if data == nil {
			_ = root.Remove(name)
			continue
		}
		errs = append(errs, create(root, name, func(w io.Writer) error { _, err := w.Write(data); return err }))
	}
	return errors.Join(errs...)
}

// Latest is the link to the newest report of a directory.
const Latest = "latest"

// Write makes the directory hang-<job>-<unix time>-<term>.<round>.<epoch> in dir, with all files, and returns its path.
// The directory appears with all its files or not at all. The link Latest points at it afterwards, unless something
// else has that name, or the file system has no links.
func Write(dir string, c Incident) (string, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", fmt.Errorf("write a report: %w", err)
	}
	defer root.Close()
	name, err := c.write(root)
	if err != nil {
		return "", fmt.Errorf("write a report in %s: %w", dir, err)
	}
	point(root, name)
	return filepath.Join(dir, name), nil
}

func (c Incident) write(root *os.Root) (name string, err error) {
	staged := "." + c.name() + "." + strconv.Itoa(os.Getpid())
	_ = root.RemoveAll(staged) // of a process that had this pid
	if err := root.Mkdir(staged, 0o755); err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = root.RemoveAll(staged)
		}
	}()
	in, err := root.OpenRoot(staged)
	if err != nil {
		return "", err
	}
	defer in.Close()
	if err := createAll(in, c.contents()); err != nil {
		return "", err
	}
	return publish(root, staged, c.name())
}

// publish gives a directory its name, with a number if another report has it.
func publish(root *os.Root, staged, name string) (string, error) {
	for i := 1; ; i++ {
		to := name
		if i > 1 {
			to += "-" + strconv.Itoa(i)
		}
		_, err := root.Lstat(to)
		if err == nil {
			continue
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		return to, root.Rename(staged, to)
	}
}

// name is that of the directory.
func (c Incident) name() string {
	e := c.World.Epoch
	return fmt.Sprintf("hang-%s-%d-%d.%d.%d", FileName(c.Job), c.At.Unix(), e.Term, e.Round, e.Epoch)
}

// FileName is a job's name as far as it can be part of a file's.
func FileName(job string) string {
	plain := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.', r == '_', r == '-':
			return r
		}
		return '_'
	}, job)
	return plain[:min(len(plain), 80)]
}

// point replaces the link, but nothing else that has its name.
func point(root *os.Root, name string) {
	if info, err := root.Lstat(Latest); err == nil && info.Mode()&fs.ModeSymlink == 0 {
		return
	}
	staged := "." + Latest + "." + strconv.Itoa(os.Getpid())
	_ = root.Remove(staged)
	if root.Symlink(name, staged) == nil && root.Rename(staged, Latest) != nil {
		_ = root.Remove(staged)
	}
}

// content is a file of a report.
type content struct {
	name  string
	write func(io.Writer) error
}

// contents are all files of a report.
func (c Incident) contents() []content {
	trace := func(w io.Writer) error { return trace.Write(w, c.World, c.Evidence, c.Verdict) }
	return append(c.stackContents(),
		content{JSONFile, c.WriteJSON}, content{textFile, c.WriteText}, content{traceFile, trace})
}

// stackContents are those that xpu_timer's viewer writes, too.
func (c Incident) stackContents() []content {
	folded := func(native bool) func(io.Writer) error {
		return func(w io.Writer) error { return c.writeFolded(w, native) }
	}
	picture := func(native bool) func(io.Writer) error {
		return func(w io.Writer) error { return c.writePicture(w, native) }
	}
	return []content{
		{PythonStacks, folded(false)}, {PythonPicture, picture(false)},
		{NativeStacks, folded(true)}, {NativePicture, picture(true)},
	}
}

// File is a file of a report, in memory.
type File struct {
	Name string
	Data []byte
}

// Files returns the files that Write would write.
func (c Incident) Files() (files []File, err error) {
	for _, f := range c.contents() {
		var b bytes.Buffer
		if err := f.write(&b); err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		files = append(files, File{f.name, b.Bytes()})
	}
	return files, nil
}

func createAll(in *os.Root, files []content) error {
	for _, f := range files {
		if err := create(in, f.name, f.write); err != nil {
			return err
		}
	}
	return nil
}

// WriteStacks writes the merged stacks of both sorts into dir, as xpu_timer's viewer does: text and pictures, in
// place of files with their names.
func WriteStacks(dir string, c Incident) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return createAll(root, c.stackContents())
}

// writeFolded writes the merged stacks as text, see merge.Tree.Folded.
func (c Incident) writeFolded(w io.Writer, native bool) error {
	_, err := merge.Stacks(c.World, c.Evidence, merge.Options{Native: native, Lines: true, States: true}).Folded(w)
	return err
}

// writePicture draws the merged stacks of the suspects, of all main threads and of the other threads, and the states
// of the processes.
func (c Incident) writePicture(w io.Writer, native bool) error {
	suspects := c.Verdict.SuspectRanks()
	main := func(t hang.Thread) bool { return t.Main }
	tree := func(o merge.Options) *merge.Tree {
		o.Native = native
		return merge.Stacks(c.World, c.Evidence, o)
	}
	of := "Python"
	if native {
		of = "native"
	}
	p := flame.Picture{Title: "merged " + of + " stacks of " + c.Job, Subtitle: c.headline(), Suspects: suspects}
	if len(suspects) > 0 {
		p.Sections = append(p.Sections, flame.Section{
			Title: "suspects: " + ranks(suspects) + " (leak: of these)",
			Tree:  tree(merge.Options{Ranks: suspects.Has, Threads: main}),
		})
	}
	p.Sections = append(p.Sections,
		flame.Section{Title: "main (training) threads of all ranks", Tree: tree(merge.Options{Threads: main})},
		flame.Section{Title: "other threads of all ranks", Tree: tree(merge.Options{
			Threads: func(t hang.Thread) bool { return !t.Main },
		})},
		flame.Section{Title: "children of ranks, such as workers of data loaders",
			Tree: tree(merge.Options{Children: true})},
		flame.Section{Title: "states of the processes", Tree: tree(merge.Options{
			States: true, Threads: func(hang.Thread) bool { return false },
		})})
	p.NoData = c.World.Ranks()
	for _, s := range p.Sections {
		p.NoData = p.NoData.Without(s.Tree.Known)
	}
	return flame.SVG(w, p)
}

// created counts files; several with one name may be written at a time.
var created atomic.Uint64

// create writes a file, which has its name when all of it is there.
func create(in *os.Root, name string, write func(io.Writer) error) (err error) {
	staged := fmt.Sprintf(".%s.%d.%d", name, os.Getpid(), created.Add(1))
	_ = in.Remove(staged) // of a process that had this pid
	f, err := in.OpenFile(staged, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = in.Remove(staged)
		}
	}()
	w := bufio.NewWriterSize(f, 1<<16)
	if err := errors.Join(write(w), w.Flush(), f.Close()); err != nil {
		return err
	}
	return in.Rename(staged, name)
}
