package report

import (
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/stable"
)

// Limits of the reports in a directory.
const (
	keepOfJob = 16 // reports
	keepAll   = 64 // of all jobs
	KeepFor   = 30 * 24 * time.Hour
	// unfinished is how long the staging directory of a report may belong to a running writer.
	unfinished = time.Hour
)

// old is a report that may be removed.
type old struct {
	name, job string
	at        time.Time
	info      fs.FileInfo
}

// Prune makes room in the directory of a report that was just written, at path. It removes reports that are older
// than KeepFor, all but the newest keepOfJob of one job, and all but the newest keepAll. The report at path stays. A
// directory stays as well unless it is this user's, has a report's name and only a report's files. Links are not
// followed.
func Prune(path string, now time.Time) error {
	root, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("remove old reports: %w", err)
	}
	defer root.Close()
	entries, err := list(root)
	if err != nil {
		return fmt.Errorf("remove old reports: %w", err)
	}
	found, left := reportsOf(root, entries, now, own), map[string]int{}
	for i, r := range found {
		if left[r.job]++; r.name == filepath.Base(path) {
			continue
		}
		if i >= keepAll || left[r.job] > keepOfJob || now.Sub(r.at) > KeepFor {
			remove(root, r)
		}
	}
	return nil
}

// reportsOf finds the wanted reports of a directory, the newest first. A report that was left unfinished long ago has
// the zero time.
func reportsOf(root *os.Root, names []string, now time.Time, wanted func(fs.FileInfo) bool) (found []old) {
	shape := regexp.MustCompile(`^(\.?)hang-(.*)-(\d+)-\d+\.\d+\.\d+(-\d+)?(\.\d+)?$`)
	for _, name := range names {
		part := shape.FindStringSubmatch(name)
		info, err := root.Lstat(name)
		if part == nil || err != nil || !wanted(info) {
			continue
		}
		r := old{name: name, job: part[2], info: info}
		if part[1] == "" && part[5] == "" {
			seconds, _ := strconv.ParseInt(part[3], 10, 64)
			r.at = time.Unix(seconds, 0)
		} else if part[1] == "" || part[5] == "" || now.Sub(info.ModTime()) < unfinished {
			continue
		}
		found = append(found, r)
	}
	stable.Sort(found, func(a, b old) int { return cmp.Or(b.at.Compare(a.at), cmp.Compare(b.name, a.name)) })
	return found
}

// own reports whether it is a directory, and this user's.
func own(info fs.FileInfo) bool {
	owner, ok := info.Sys().(*syscall.Stat_t)
	return info.IsDir() && ok && int(owner.Uid) == os.Geteuid()
}

// remove removes a report, if it is one and has not changed.
func remove(root *os.Root, r old) {
	in, err := root.OpenRoot(r.name)
	if err != nil {
		return
	}
	defer in.Close()
	is, err := in.Stat(".")
	if err != nil || !os.SameFile(is, r.info) {
		return
	}
	names, err := list(in)
	strange := func(name string) bool {
		info, err := in.Lstat(name)
		return err != nil || !info.Mode().IsRegular() || !ofReport(name)
	}
	if err != nil || slices.ContainsFunc(names, strange) {
		return
	}
	for _, name := range names {
		_ = in.Remove(name) // another launcher may be at it, too
	}
	_ = root.Remove(r.name) // which fails if anything is left
}

// ofReport reports whether a report has a file of that name, or has had while it was written.
func ofReport(name string) bool {
	if rest, hidden := strings.CutPrefix(name, "."); hidden {
		name = strings.TrimSuffix(rest, filepath.Ext(rest))
	}
	return slices.ContainsFunc(Incident{}.contents(), func(c content) bool { return c.name == name })
}

// list are the names in a directory.
func list(root *os.Root) ([]string, error) {
	d, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}
