// dist packs the programs for users without Go: wheels, Debian packages, images and their sums, the same bytes every
// time: "make dist". The programs are built before, into a folder for each architecture.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// release is all that the packages of one version share.
type release struct {
	version, python, debian string // as git names it, and by the rules of two packagers
	time                    time.Time
	root                    string // of the repository
	programs                string // a folder with one for each architecture: amd64/dlrover-run
	pages                   string // man pages and completions
	out                     string
	only                    string // architectures, as Go names them
	notices                 *notices
}

// architecture has its names in Go and Debian, and in uname and wheels.
type architecture struct{ debian, uname string }

var architectures = []architecture{{"amd64", "x86_64"}, {"arm64", "aarch64"}}

func main() {
	r := release{notices: &notices{}}
	flag.StringVar(&r.version, "version", "", "version, as git describe has it")
	flag.StringVar(&r.root, "root", "../..", "`folder` of the repository")
	flag.StringVar(&r.programs, "programs", "", "`folder` with the programs, below one for each architecture")
	flag.StringVar(&r.pages, "pages", "", "`folder` with man pages and completions")
	flag.StringVar(&r.out, "to", "", "`folder` that is filled")
	flag.StringVar(&r.only, "only", "amd64 arm64", "architectures")
	flag.Parse()
	if err := r.pack(); err != nil {
		fmt.Fprintln(os.Stderr, "dist:", err)
		os.Exit(1)
	}
}

func (r *release) pack() (err error) {
	if r.python, r.debian, err = versions(r.version); err != nil {
		return err
	}
	if r.time, err = sourceDate(os.Getenv("SOURCE_DATE_EPOCH")); err != nil {
		return err
	}
	if err := r.notices.read(r); err != nil {
		return err
	}
	errs := make([]error, len(architectures))
	var all sync.WaitGroup
	for i, a := range architectures {
		if !slices.Contains(strings.Fields(r.only), a.debian) {
			continue
		}
		all.Go(func() { errs[i] = r.packFor(a) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return writeSums(r.out, os.Stdout)
}

// packFor makes the packages of one architecture, in a folder with its name.
func (r *release) packFor(a architecture) error {
	dir := filepath.Join(r.out, a.uname)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, w := range wheels() {
		if err := r.writeWheel(dir, w, a); err != nil {
			return fmt.Errorf("wheel %s for %s: %w", w.name, a.uname, err)
		}
	}
	for _, d := range debs() {
		if err := r.writeDeb(dir, d, a); err != nil {
			return fmt.Errorf("package %s for %s: %w", d.name, a.debian, err)
		}
	}
	for _, im := range images() {
		if err := r.writeImage(dir, im, a); err != nil {
			return fmt.Errorf("image %s for %s: %w", im.title, a.uname, err)
		}
	}
	return r.writeBill(dir, a)
}

// writeBill writes the bill of materials of all programs, which scanners read.
func (r *release) writeBill(dir string, a architecture) error {
	programs, err := filepath.Glob(r.program(a, "*"))
	if err != nil {
		return err
	}
	bill, err := r.sbomOf("dlrover-run", programs)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "dlrover-run-"+r.version+".cdx.json"), bill, 0o644)
}

// sourceDate is the time of all files. A wheel, which is a zip archive, cannot have one before 1980.
func sourceDate(epoch string) (time.Time, error) {
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if t := time.Unix(seconds, 0).UTC(); err == nil && t.Year() >= 1980 {
		return t, nil
	}
	return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH=%q: give seconds since 1970, in 1980 or later, as make dist does",
		epoch)
}

// program is the path of one for an architecture.
func (r *release) program(a architecture, name string) string {
	return filepath.Join(r.programs, a.debian, name)
}

// has reports whether all programs are there: gpucheck is built where there is a C compiler for the architecture.
func (r *release) has(a architecture, programs []string) (bool, error) {
	for _, p := range programs {
		_, err := os.Stat(r.program(a, p))
		if errors.Is(err, fs.ErrNotExist) && p == gpucheck {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

const gpucheck = "gpucheck"
