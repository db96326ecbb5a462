package ctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/text"
	"dlrover-run/launcher/argv/native"
)

const namesAbout = `It links deepspeed, msrun, torchrun and xpu_timer_launch in DIR to dlrover-run, and
xpu_timer_stacktrace_viewer and xpu_timer_dump_driver to dlroverctl; with NAMEs only these.`

func (p *program) installNames() *cli.Command {
	return &cli.Command{Name: "install-names", Category: ofSetup, ArgsUsage: "DIR [NAME...]",
		Usage: "link names of other launchers to these programs", Description: namesAbout,
		Flags: []cli.Flag{&cli.BoolFlag{Name: "force",
			Usage: "replace other files and links of these names, but no directories"}},
		Action: func(c *cli.Context) error {
			self, err := os.Executable()
			if err != nil {
				return &foundError{err}
			}
			links, err := linksOf(filepath.Dir(self), c.Args().Tail())
			if err != nil {
				return err
			}
			return p.install(c.Args().First(), links, c.Bool("force"), c.Bool("json"))
		}}
}

// link is a name and the program that it leads to.
type link struct{ name, program string }

// linksOf are the links to the requested programs in a directory, all if none is named.
func linksOf(programs string, wanted []string) ([]link, error) {
	launcher, ctl := filepath.Join(programs, "dlrover-run"), filepath.Join(programs, "dlroverctl")
	all := []link{{viewer, ctl}, {driver, ctl}}
	for _, l := range native.Launchers() {
		all = append(all, link{l.Name, launcher})
	}
	slices.SortFunc(all, func(a, b link) int { return strings.Compare(a.name, b.name) })
	var names []string
	for _, l := range all {
		names = append(names, l.name)
	}
	for _, name := range wanted {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("install-names: %q is none of the names: use %s", name, strings.Join(names, ", "))
		}
	}
	if len(wanted) > 0 {
		all = slices.DeleteFunc(all, func(l link) bool { return !slices.Contains(wanted, l.name) })
	}
	for _, l := range all {
		if err := checkProgram(l.program); err != nil {
			return nil, &foundError{err}
		}
	}
	return all, nil
}

// install makes the links in dir. It changes nothing if one of them is refused.
func (p *program) install(dir string, links []link, force, asJSON bool) error {
	real, err := filepath.EvalSymlinks(dir)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		return &foundError{fmt.Errorf("%w: make the directory, or give another one", err)}
	}
	states := make([]linkState, len(links))
	var refused []string
	for i, l := range links {
		if states[i], err = l.state(real); err != nil {
			return &foundError{err}
		}
		if why := states[i].refusal(force); why != "" {
			refused = append(refused, filepath.Join(dir, l.name)+" "+why)
		}
	}
	if len(refused) > 0 {
		return &foundError{errors.New(strings.Join(refused, "; "))}
	}
	out := installed{}
	for i, l := range links {
		done, err := l.put(real, states[i])
		if err != nil {
			return &foundError{err}
		}
		out.Links = append(out.Links, linkRow{filepath.Join(dir, l.name), l.target(real), done})
	}
	out.Notes = append(pathNotes(dir, real, links), ownerNotes(links)...)
	if asJSON {
		return p.json(out)
	}
	for _, l := range out.Links {
		fmt.Fprintf(p.stdout, "%s %s -> %s\n", l.Done, text.EscapeLine(l.Path), text.EscapeLine(l.Target))
	}
	for _, note := range out.Notes {
		fmt.Fprintln(p.stdout, "note: "+text.EscapeLine(note))
	}
	return nil
}

// installed is the result of install-names, as --json prints it.
type installed struct {
	Links []linkRow `json:"links"`
	Notes []string  `json:"notes"`
}

type linkRow struct {
	Path   string `json:"path"`
	Target string `json:"target"`
	Done   string `json:"done"` // made, replaced or kept
}

// pathNotes say why a name may still lead elsewhere.
func pathNotes(dir, real string, links []link) (notes []string) {
	for _, l := range links {
		if first, err := exec.LookPath(l.name); err == nil && !sameFile(first, filepath.Join(real, l.name)) {
			notes = append(notes, "$PATH finds "+first+" first")
		}
	}
	if !slices.ContainsFunc(filepath.SplitList(os.Getenv("PATH")), func(d string) bool { return sameFile(d, real) }) {
		notes = append(notes, dir+" is not in $PATH")
	}
	return notes
}

// linkState is the state of a link's path.
type linkState int

const (
	absent  linkState = iota
	present           // the link itself
	former            // a link to a program of that name elsewhere, or to nothing
	foreign
	folder
)

func (s linkState) refusal(force bool) string {
	switch {
	case s == folder:
		return "is a directory: remove it, or give another directory"
	case s == foreign && !force:
		return "is another program: --force replaces it; or give a directory that comes before it in $PATH"
	}
	return ""
}

func (l link) state(dir string) (linkState, error) {
	path := filepath.Join(dir, l.name)
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return absent, nil
	case err != nil:
		return absent, err
	case info.IsDir():
		return folder, nil
	case info.Mode()&fs.ModeSymlink == 0:
		return foreign, nil
	}
	target, err := os.Readlink(path)
	switch {
	case err != nil:
		return absent, err
	case target == l.target(dir):
		return present, nil
	case filepath.Base(target) == filepath.Base(l.program):
		return former, nil
	}
	return foreign, nil
}

// target is the content of the link. It is relative if the program is in the same tree, which may be an image that
// is still to be moved.
func (l link) target(dir string) string {
	rel, err := filepath.Rel(dir, l.program)
	top := func(path string) string { return strings.SplitN(path, string(filepath.Separator), 3)[1] }
	if err != nil || top(dir) != top(l.program) {
		return l.program
	}
	return rel
}

// put makes the link, replaces the present file at once, and returns a description of the change.
func (l link) put(dir string, s linkState) (string, error) {
	if s == present {
		return "kept", nil
	}
	path, done := filepath.Join(dir, l.name), "made"
	if s != absent {
		done = "replaced"
	}
	temp := fmt.Sprintf("%s.%d.new", path, os.Getpid())
	if err := os.Symlink(l.target(dir), temp); err != nil {
		return "", err
	}
	if err := os.Rename(temp, path); err != nil {
		return "", errors.Join(err, os.Remove(temp))
	}
	return done, nil
}

func sameFile(a, b string) bool {
	one, err := os.Stat(a)
	other, err2 := os.Stat(b)
	return err == nil && err2 == nil && os.SameFile(one, other)
}
