package main

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"crypto/sha256"
	"debug/elf"
	"embed"
	"encoding/base64"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// wheel is a distribution for pip. Each has its programs as scripts.
type wheel struct {
	name, summary string
	programs      []string
	module        fs.FS             // files for site-packages; nil: there are none
	extras        map[string]string // and the distribution that each asks for
}

const mainWheel = "dlrover-run-go"

//go:embed python/dlrover_run/*.py
var python embed.FS

// wheels are all distributions. A wheel has at most 20 MB, so dlrover-master, which contains clients of etcd and
// Kubernetes, has its own, and so has gpucheck, which needs glibc.
func wheels() []wheel {
	module, _ := fs.Sub(python, "python")
	return []wheel{
		{name: mainWheel, summary: "A launcher for distributed training: torchrun's and dlrover-run's command line",
			programs: []string{"dlrover-run", "checkpointd", "dlroverctl"}, module: module,
			extras: map[string]string{"master": mainWheel + "-master", "gpu": mainWheel + "-gpucheck"}},
		{name: mainWheel + "-master", summary: "dlrover-master, the rendezvous daemon of dlrover-run",
			programs: []string{"dlrover-master"}},
		{name: mainWheel + "-gpucheck", summary: "gpucheck, which tests NVIDIA GPUs for dlrover-run",
			programs: []string{gpucheck}},
	}
}

const mostWheel = 20_000_000 // bytes

// writeWheel writes a wheel, unless its program could not be built here.
func (r *release) writeWheel(dir string, w wheel, a architecture) error {
	if has, err := r.has(a, w.programs); !has {
		return err
	}
	tags, err := r.tags(a, w.programs)
	if err != nil {
		return err
	}
	stem := strings.ReplaceAll(w.name, "-", "_") + "-" + r.python
	files, err := r.wheelFiles(stem, w, a, tags)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, stem+"-py3-none-"+strings.Join(tags, ".")+".whl")
	data, err := r.zip(files)
	if err != nil {
		return err
	}
	if len(data) > mostWheel {
		return fmt.Errorf("%s has %d bytes, more than %d: move a program to another wheel", path, len(data), mostWheel)
	}
	return os.WriteFile(path, data, 0o644)
}

// tags are the platforms that programs run on: static ones everywhere, others with the C library that they ask for.
func (r *release) tags(a architecture, programs []string) ([]string, error) {
	minor := 0
	for _, p := range programs {
		n, err := glibc(r.program(a, p))
		if err != nil {
			return nil, err
		}
		minor = max(minor, n)
	}
	if minor > 0 {
		return []string{fmt.Sprintf("manylinux_2_%d_%s", minor, a.uname)}, nil
	}
	return []string{"manylinux_2_17_" + a.uname, "manylinux2014_" + a.uname, "musllinux_1_1_" + a.uname}, nil
}

// glibc is N of the newest symbol version GLIBC_2.N that a program needs; 0: it is static.
func glibc(program string) (minor int, err error) {
	f, err := elf.Open(program)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	symbols, _ := f.ImportedSymbols() // a static program has none
	for _, s := range symbols {
		n := 0
		_, _ = fmt.Sscanf(s.Version, "GLIBC_2.%d", &n) // else it is no such version
		minor = max(minor, n)
	}
	return minor, nil
}

// file is one of a package.
type file struct {
	name string
	data []byte
	mode fs.FileMode
}

// content is a part of every package.
type content struct {
	programs      []file
	sbom, notices []byte
}

// content are some programs, their bill of materials under a name, and the notices that belong to them.
func (r *release) content(name string, a architecture, programs []string) (c content, err error) {
	var paths []string
	for _, p := range programs {
		path := r.program(a, p)
		paths = append(paths, path)
		data, err := os.ReadFile(path)
		if err != nil {
			return c, err
		}
		c.programs = append(c.programs, file{p, data, 0o755})
	}
	if c.sbom, err = r.sbomOf(name, paths); err == nil {
		c.notices, err = r.notices.of(paths)
	}
	return c, err
}

// programsIn are the programs in a folder.
func (c content) programsIn(dir string) (files []file) {
	for _, p := range c.programs {
		files = append(files, file{dir + p.name, p.data, p.mode})
	}
	return files
}

// wheelFiles are all files of a wheel, the list of them last.
func (r *release) wheelFiles(stem string, w wheel, a architecture, tags []string) (files []file, err error) {
	c, err := r.content(w.name, a, w.programs)
	if err != nil {
		return nil, err
	}
	files = c.programsIn(stem + ".data/scripts/")
	if w.module != nil {
		if files, err = appendTree(files, w.module, ""); err != nil {
			return nil, err
		}
	}
	info := stem + ".dist-info/"
	files = append(files,
		file{info + "METADATA", r.metadata(w), 0o644},
		file{info + "WHEEL", []byte("Wheel-Version: 1.0\nGenerator: dlrover-run\nRoot-Is-Purelib: false\nTag: py3-none-" +
			strings.Join(tags, "\nTag: py3-none-") + "\n"), 0o644},
		file{info + "licenses/LICENSE", r.notices.own, 0o644},
		file{info + "licenses/" + noticesName, c.notices, 0o644},
		file{info + "sboms/" + w.name + ".cdx.json", c.sbom, 0o644})
	var record strings.Builder
	for _, f := range files {
		sum := sha256.Sum256(f.data)
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f.name, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.data))
	}
	fmt.Fprintf(&record, "%sRECORD,,\n", info)
	return append(files, file{info + "RECORD", []byte(record.String()), 0o644}), nil
}

const noticesName = "THIRD-PARTY-LICENSES.txt"

// appendTree adds the files of a tree below a folder.
func appendTree(files []file, tree fs.FS, below string) ([]file, error) {
	err := fs.WalkDir(tree, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := fs.ReadFile(tree, path)
		files = append(files, file{below + path, data, 0o644})
		return err
	})
	return files, err
}

const aboutMain = `
    dlrover-run --nproc-per-node=auto train.py     # as torchrun
    python -m dlrover_run.demo                     # trains on this machine, and loses a worker
    python -m dlrover_run --help                   # the same program as dlrover-run
    from dlrover_run import launch                 # launch(fn, args, nproc_per_node=2): a function, in a notebook too

The Python package dlrover has a script of the same name, dlrover-run. The one that is installed last wins, and
uninstalling either package removes the file: dlrover-run --version and dlroverctl install-names say whose it is.
`

// metadata is the description of a wheel.
func (r *release) metadata(w wheel) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "Metadata-Version: 2.4\nName: %s\nVersion: %s\nSummary: %s\n", w.name, r.python, w.summary)
	b.WriteString("License-Expression: Apache-2.0\nLicense-File: LICENSE\nLicense-File: " + noticesName + "\n" +
		"Requires-Python: >=3.8\nClassifier: Operating System :: POSIX :: Linux\n" +
		"Classifier: Programming Language :: Python :: 3\n")
	extras := make([]string, 0, len(w.extras))
	for e := range w.extras {
		extras = append(extras, e)
	}
	slices.Sort(extras)
	for _, e := range extras {
		fmt.Fprintf(&b, "Provides-Extra: %s\nRequires-Dist: %s == %s; extra == '%s'\n", e, w.extras[e], r.python, e)
	}
	fmt.Fprintf(&b, "Description-Content-Type: text/markdown\n\n%s.\n", w.summary)
	if w.module != nil {
		b.WriteString(aboutMain)
	}
	return []byte(b.String())
}

// zip packs files in their order.
func (r *release) zip(files []file) ([]byte, error) {
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	z.RegisterCompressor(zip.Deflate, func(w io.Writer) (io.WriteCloser, error) {
		return flate.NewWriter(w, flate.BestCompression)
	})
	for _, f := range files {
		h := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: r.time}
		h.SetMode(f.mode)
		w, err := z.CreateHeader(h)
		if err == nil {
			_, err = w.Write(f.data)
		}
		if err != nil {
			return nil, err
		}
	}
	err := z.Close()
	return out.Bytes(), err
}
