package ctl

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/bundle"
	"dlrover-run/internal/text"
)

func bundlePathOption() cli.Flag {
	return pathOption("write there, and make the directory if needed (default: the working directory)")
}

// bundle writes one archive for the later analysis of a run, here or elsewhere. The archive names the parts that do
// not exist.
func (c *call) bundle() (err error) {
	if _, err := c.daemon.status(c); err != nil {
		return err // without the run, the rest is useless
	}
	name, from := fileName(c, "bundle", ""), bundle.Of(c.daemon.client, c.run())
	path, err := newFile(c, name+".tar.gz", func(w io.Writer) error {
		return bundle.Write(c, w, name, c.now(), from)
	})
	if err != nil {
		return err
	}
	return c.did(text.EscapeLine(path))
}

// fileName is that of a file about the run, without its end.
func fileName(c *call, kind, of string) string {
	return bundle.FileName(c.run(), kind, of, c.now())
}

// newFile writes a file in the directory of --path, which is made if need be. It appears with all that it has or not at
// all, and replaces none.
func newFile(c *call, name string, write func(io.Writer) error) (path string, err error) {
	failed := func(err error) (string, error) {
		return "", &foundError{fmt.Errorf("%s: %w", c.args.Command.Name, err)}
	}
	dir := cmp.Or(c.args.String("path"), ".")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return failed(err)
	}
	path = filepath.Join(dir, name)
	staged := filepath.Join(dir, fmt.Sprintf(".%s.%d", name, os.Getpid()))
	f, err := os.OpenFile(staged, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) // logs may hold secrets
	if err != nil {
		return failed(err)
	}
	defer func() { _ = os.Remove(staged) }()
	if err := write(f); err != nil {
		return "", errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return failed(err)
	}
	if _, err := os.Lstat(path); err == nil {
		return failed(fmt.Errorf("%s is there already", path))
	}
	if err := os.Rename(staged, path); err != nil {
		return failed(err)
	}
	return path, nil
}
