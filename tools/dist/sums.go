package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const sumsName = "SHA256SUMS"

// writeSums writes the sums of all files of a folder, as sha256sum -c reads them, and prints their sizes.
func writeSums(dir string, stdout io.Writer) error {
	var sums strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == sumsName {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(data), name)
		fmt.Fprintf(stdout, "%8.2f MB  %s\n", float64(len(data))/1e6, filepath.Join(filepath.Base(dir), name))
		return err
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, sumsName), []byte(sums.String()), 0o644)
}
