package ctl

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"dlrover-run/internal/openfile"
)

// The Python package dlrover has a script dlrover-run, and so has our own distribution for pip. pip replaces the file
// of another package without a word, and removes it with either of them.

const restore = "pip install --force-reinstall --no-deps dlrover_run_go-*.whl"

// mostRecord is the limit of the list of a package's files, in bytes; PyTorch's has 2 MB.
const mostRecord = 16 << 20

// checkProgram returns an error if a program beside this one is missing, or is a script of another package.
func checkProgram(path string) error {
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("%w: dlroverctl looks for %s beside itself; if pip has removed it with another package: %s",
			err, filepath.Base(path), restore)
	}
	f, err := openfile.OpenLinked(path)
	if err != nil {
		return err
	}
	defer f.Close()
	begin := make([]byte, 2)
	if _, err := f.Read(begin); err == nil && string(begin) == "#!" {
		return fmt.Errorf("%s is a script of %s, to which the links would lead: %s puts this program back", path,
			cmp.Or(strings.Join(strangers(path), " or "), "another package"), restore)
	}
	return nil
}

// strangers are the Python packages other than ours that have a file at this path, in the form "dlrover 0.6.1".
func strangers(path string) (names []string) {
	dir, name := filepath.Split(path)
	records, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Clean(dir)), "lib*", "python3*", "*-packages",
		"*.dist-info", "RECORD")) // the pattern is well-formed
	for _, r := range records {
		data, err := openfile.Read(r, mostRecord)
		row := []byte("../../../" + filepath.Base(filepath.Clean(dir)) + "/" + name + ",")
		if err == nil && (bytes.HasPrefix(data, row) || bytes.Contains(data, append([]byte("\n"), row...))) {
			stem := strings.TrimSuffix(filepath.Base(filepath.Dir(r)), ".dist-info")
			names = append(names, strings.Replace(stem, "-", " ", 1))
		}
	}
	names = slices.DeleteFunc(names, func(n string) bool { return strings.HasPrefix(n, "dlrover_run_go ") })
	slices.Sort(names)
	return slices.Compact(names) // lib64 can be a link to lib
}

// ownerNotes say which programs are files of other packages as well, and where $PATH finds others of their names.
func ownerNotes(links []link) (notes []string) {
	var programs []string
	for _, l := range links {
		programs = append(programs, l.program)
	}
	slices.Sort(programs)
	for _, path := range slices.Compact(programs) {
		if first, err := exec.LookPath(filepath.Base(path)); err == nil && !sameFile(first, path) {
			notes = append(notes, fmt.Sprintf("the links lead to %s, but $PATH finds %s first", path, first))
		}
		if others := strangers(path); len(others) > 0 {
			notes = append(notes, fmt.Sprintf("%s is this program, and also a file of %s: to install or remove that package "+
				"removes this program; then: %s", path, strings.Join(others, " and of "), restore))
		}
	}
	return notes
}
