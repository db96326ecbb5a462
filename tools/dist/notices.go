package main

import (
	"bytes"
	"cmp"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// notices are the licences of the modules that are linked into programs. They have to be passed on with a program.
type notices struct {
	dirs map[string]string // of modules, by path@version
	goes string            // the licence of Go itself
	own  []byte            // the repository's
}

// read finds the modules of all programs, in the cache that they were built from.
func (n *notices) read(r *release) (err error) {
	if n.own, err = os.ReadFile(filepath.Join(r.root, "LICENSE")); err != nil {
		return err
	}
	license, err := os.ReadFile(filepath.Join(runtime.GOROOT(), "LICENSE"))
	if err != nil {
		return err
	}
	n.goes = string(license)
	var programs []string
	for _, a := range architectures {
		found, err := filepath.Glob(r.program(a, "*"))
		if err != nil {
			return err
		}
		programs = append(programs, found...)
	}
	modules, err := modulesOf(programs)
	if err != nil {
		return err
	}
	n.dirs = map[string]string{}
	cmd := exec.Command("go", append([]string{"mod", "download", "-json"}, modules...)...)
	cmd.Dir, cmd.Stderr = r.root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go mod download: %w", err)
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var m struct{ Path, Version, Dir string }
		if err := dec.Decode(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		n.dirs[m.Path+"@"+m.Version] = m.Dir
	}
}

// modulesOf are the modules that are linked into programs, as path@version.
func modulesOf(programs []string) (modules []string, err error) {
	for _, p := range programs {
		info, err := buildinfo.ReadFile(p)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		for _, m := range info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			modules = append(modules, m.Path+"@"+m.Version)
		}
	}
	slices.Sort(modules)
	return slices.Compact(modules), nil
}

// of is the text of all notices for some programs. Modules with the same text share it.
func (n *notices) of(programs []string) ([]byte, error) {
	modules, err := modulesOf(programs)
	if err != nil {
		return nil, err
	}
	users := map[string][]string{n.goes: {"the Go runtime and standard library"}}
	for _, m := range modules {
		files, err := licenseFiles(n.dirs[m])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m, err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				return nil, err
			}
			users[string(text)] = append(users[string(text)], m)
		}
	}
	texts := make([]string, 0, len(users))
	for text := range users {
		texts = append(texts, text)
	}
	slices.SortFunc(texts, func(a, b string) int { // a module can have several
		return cmp.Or(cmp.Compare(users[a][0], users[b][0]), cmp.Compare(a, b))
	})
	var b bytes.Buffer
	b.WriteString("The programs contain software of others, under these licences.\n")
	for _, text := range texts {
		fmt.Fprintf(&b, "\n%s\n%s\n\n%s\n", strings.Repeat("=", 80), strings.Join(users[text], "\n"),
			strings.TrimSpace(text))
	}
	return b.Bytes(), nil
}

var licenseName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice)([.-].*)?$`)
})

// licenseFiles are the licence of a module and the notices that belong to it.
func licenseFiles(dir string) (files []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() && licenseName().MatchString(e.Name()) {
			files = append(files, filepath.Join(dir, e.Name()))
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("there is no licence in %s", dir)
	}
	return files, nil
}
