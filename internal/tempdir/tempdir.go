// Package tempdir finds room for temporary files where Python's tempfile does: the directory in $TMPDIR may not exist,
// or not be writable. See https://docs.python.org/3/library/tempfile.html#tempfile.gettempdir.
package tempdir

import "os"

// Fallbacks are tried after $TMPDIR. Only tests change them.
var Fallbacks = []string{"/tmp", "/var/tmp"}

// Make makes a directory as os.MkdirTemp does. The error is that of $TMPDIR.
func Make(pattern string) (dir string, err error) {
	err = First(func(base string) (err error) {
		dir, err = os.MkdirTemp(base, pattern)
		return err
	})
	return dir, err
}

// First calls use with one directory for temporary files after the other until there is no error; else it returns the
// first.
func First(use func(base string) error) error {
	first := use(os.TempDir())
	for _, base := range Fallbacks {
		if first == nil {
			break
		}
		if use(base) == nil {
			return nil
		}
	}
	return first
}
