package main

import (
	"bytes"
	"compress/gzip"
	"crypto/md5" // which dpkg --verify reads
	"embed"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"
)

// deb is a Debian package.
type deb struct {
	name, summary, about string
	programs             []string
	tree                 string // of further files, below debian/; "": there are none
	fields               string // more of DEBIAN/control
}

//go:embed debian
var debian embed.FS

const debName = "dlrover-run"

// debs are all packages. gpucheck needs glibc, and so is one of its own.
func debs() []deb {
	return []deb{
		{name: debName, summary: "launcher of distributed training jobs", tree: "debian/dlrover-run",
			programs: []string{"dlrover-run", "dlrover-master", "checkpointd", "dlroverctl"},
			fields:   "Suggests: dlrover-run-gpucheck, python3-torch\n",
			about: " dlrover-run takes the command line of torchrun and of DLRover's dlrover-run. It\n" +
				" starts the workers of a training job, restarts them when they fail, names the\n" +
				" first rank to fail and why, keeps checkpoints in memory, and finds hangs.\n" +
				" dlrover-master is a rendezvous that outlives all nodes, as a service of systemd\n" +
				" that is not enabled by itself. dlroverctl shows and changes jobs.\n"},
		{name: debName + "-gpucheck", summary: "test of NVIDIA GPUs for dlrover-run",
			programs: []string{gpucheck}, fields: "Enhances: dlrover-run\n",
			about: " gpucheck asks NVIDIA's driver for the state of the GPUs of this machine and\n" +
				" the links between them, and copies memory between pairs of them. dlrover-run\n" +
				" runs it before it trains, if it is asked to check the nodes.\n"},
	}
}

// writeDeb writes a package, unless its program could not be built here.
func (r *release) writeDeb(dir string, d deb, a architecture) error {
	if has, err := r.has(a, d.programs); !has {
		return err
	}
	files, err := r.debFiles(d, a)
	if err != nil {
		return err
	}
	control, err := r.control(d, a, files)
	if err != nil {
		return err
	}
	stage, err := os.MkdirTemp("", "dist-deb-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(stage)
	if err := r.stage(stage, append(files, control...)); err != nil {
		return err
	}
	target := filepath.Join(dir, d.name+"_"+r.debian+"_"+a.debian+".deb")
	// Level 6 would be 12 % smaller, and takes seven times as long. One thread: the bytes of several depend on their
	// number.
	build := exec.Command("dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", stage, target)
	build.Env = append(os.Environ(), "DPKG_DEB_THREADS_MAX=1", fmt.Sprint("SOURCE_DATE_EPOCH=", r.time.Unix()))
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("dpkg-deb: %w: %s", err, out)
	}
	return nil
}

// debFiles are the files that a package installs.
func (r *release) debFiles(d deb, a architecture) (files []file, err error) {
	c, err := r.content(d.name, a, d.programs)
	if err != nil {
		return nil, err
	}
	files = c.programsIn("usr/bin/")
	for _, p := range d.programs {
		pages, err := r.pagesOf(p)
		if err != nil {
			return nil, err
		}
		files = append(files, pages...)
	}
	changes, err := os.ReadFile(filepath.Join(r.root, "CHANGELOG.md"))
	if err != nil {
		return nil, err
	}
	var texts []file
	for _, name := range []string{"copyright", "changelog.Debian", "lintian-overrides"} {
		text, err := r.template("debian/"+name, d)
		if err != nil {
			return nil, err
		}
		texts = append(texts, file{name, text, 0o644})
	}
	doc := "usr/share/doc/" + d.name + "/"
	files = append(files, file{doc + "copyright", texts[0].data, 0o644},
		file{doc + "changelog.Debian.gz", zipped(texts[1].data), 0o644}, file{doc + "changelog.gz", zipped(changes), 0o644},
		file{doc + noticesName + ".gz", zipped(c.notices), 0o644}, file{doc + "sbom.cdx.json", c.sbom, 0o644},
		file{"usr/share/lintian/overrides/" + d.name, texts[2].data, 0o644})
	if d.tree == "" {
		return files, nil
	}
	demo, err := python.ReadFile("python/dlrover_run/demo.py")
	if err != nil {
		return nil, err
	}
	tree, _ := fs.Sub(debian, d.tree)
	files, err = appendTree(append(files, file{doc + "examples/demo.py", demo, 0o644}), tree, "")
	for i, f := range files {
		switch {
		case f.name == settingsFile: // it holds a token
			files[i].mode = 0o600
		case strings.HasPrefix(f.name, "DEBIAN/"): // a script
			files[i].mode = 0o755
		}
	}
	return files, err
}

const settingsFile = "etc/default/dlrover-master"

// pagesOf are the man page and the completions of a program.
func (r *release) pagesOf(program string) (files []file, err error) {
	for from, to := range map[string]string{
		"man/" + program + ".1":     "usr/share/man/man1/" + program + ".1.gz",
		"bash/" + program:           "usr/share/bash-completion/completions/" + program,
		"zsh/_" + program:           "usr/share/zsh/vendor-completions/_" + program,
		"fish/" + program + ".fish": "usr/share/fish/vendor_completions.d/" + program + ".fish",
	} {
		data, err := os.ReadFile(filepath.Join(r.pages, from))
		if err != nil {
			return nil, err
		}
		if path.Ext(to) == ".gz" {
			data = zipped(data)
		}
		files = append(files, file{to, data, 0o644})
	}
	return files, nil
}

// template fills a text in.
func (r *release) template(name string, d deb) ([]byte, error) {
	t, err := template.ParseFS(debian, name)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = t.Execute(&b, map[string]any{"Name": d.name, "Programs": d.programs, "Version": r.debian,
		"Main": d.name == debName, "Year": r.time.Year(), "Date": r.time.Format(time.RFC1123Z), "Maintainer": maintainer})
	return b.Bytes(), err
}

const maintainer = "The dlrover-run developers <developers@dlrover-run.invalid>"

// control are the files in DEBIAN/.
func (r *release) control(d deb, a architecture, files []file) ([]file, error) {
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	size, sums, config := 0, strings.Builder{}, strings.Builder{}
	for _, f := range files {
		size += (len(f.data) + 1023) / 1024
		if strings.HasPrefix(f.name, "DEBIAN/") {
			continue
		}
		if strings.HasPrefix(f.name, "etc/") {
			config.WriteString("/" + f.name + "\n")
			continue
		}
		fmt.Fprintf(&sums, "%x  %s\n", md5.Sum(f.data), f.name)
	}
	minor := 0
	for _, p := range d.programs {
		n, err := glibc(r.program(a, p))
		if err != nil {
			return nil, err
		}
		minor = max(minor, n)
	}
	text := fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: %s\nInstalled-Size: %d\n"+
		"Section: science\nPriority: optional\n", d.name, r.debian, a.debian, maintainer, size)
	if minor > 0 {
		text += fmt.Sprintf("Depends: libc6 (>= 2.%d)\n", minor)
	}
	text += d.fields + "Description: " + d.summary + "\n" + d.about
	control := []file{{"DEBIAN/control", []byte(text), 0o644}, {"DEBIAN/md5sums", []byte(sums.String()), 0o644}}
	if config.Len() > 0 {
		control = append(control, file{"DEBIAN/conffiles", []byte(config.String()), 0o644})
	}
	return control, nil
}

// stage writes files below a folder, which is the root of a package, with one time for all.
func (r *release) stage(dir string, files []file) error {
	for _, f := range files {
		path := filepath.Join(dir, f.name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, f.data, f.mode); err != nil {
			return err
		}
		if err := os.Chmod(path, f.mode); err != nil { // despite the umask
			return err
		}
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(path, 0o755)
		}
		if err != nil {
			return err
		}
		return os.Chtimes(path, r.time, r.time)
	})
}

// zipped is data as gzip -9n makes it.
func zipped(data []byte) []byte {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // a level that there is
	_, _ = z.Write(data)                                  // into memory
	_ = z.Close()
	return b.Bytes()
}
