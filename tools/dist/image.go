package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// image is one from scratch, in an archive for docker load, podman load and ctr image import.
type image struct {
	suffix, title string
	programs      []string
	names         bool // of other launchers, too
	most          int  // bytes
}

func images() []image {
	return []image{
		{suffix: "", title: "dlrover-run, dlrover-master, checkpointd, dlroverctl, gpucheck", names: true, most: 40_000_000,
			programs: []string{"dlrover-run", "dlrover-master", "checkpointd", "dlroverctl"}},
		{suffix: "-launcher", title: "dlrover-run", programs: []string{"dlrover-run"}, most: 10_000_000},
	}
}

const nobody = "65534:65534"

func (r *release) writeImage(dir string, im image, a architecture) error {
	layer, err := r.layer(im, a)
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return err
	}
	config.Architecture, config.OS, config.Created = a.debian, "linux", v1.Time{Time: r.time}
	config.History = []v1.History{{Created: config.Created, CreatedBy: "make dist"}}
	config.Config = v1.Config{
		User: nobody, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}, Entrypoint: []string{"/usr/local/bin/dlrover-run"},
		Labels: map[string]string{
			"org.opencontainers.image.title":       im.title,
			"org.opencontainers.image.description": "Launcher of distributed training jobs, to copy into a training image",
			"org.opencontainers.image.version":     r.version,
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.created":     r.time.Format("2006-01-02T15:04:05Z07:00"),
		},
	}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return err
	}
	tag, err := name.NewTag("dlrover-run:" + r.version + im.suffix)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, "dlrover-run"+im.suffix+"-"+r.version+"-image.tar")
	if err := tarball.WriteToFile(path, tag, img); err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err == nil && info.Size() > int64(im.most) {
		err = fmt.Errorf("%s has %d bytes, more than %d", path, info.Size(), im.most)
	}
	return err
}

// layer is the only layer of an image.
func (r *release) layer(im image, a architecture) (v1.Layer, error) {
	files, err := r.imageFiles(im, a)
	if err != nil {
		return nil, err
	}
	links := map[string]string{}
	if im.names {
		if links, err = r.otherNames(); err != nil {
			return nil, err
		}
	}
	var out bytes.Buffer
	if err := r.tar(&out, files, links); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(out.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithCompressionLevel(gzip.BestCompression))
}

// imageFiles are the programs, and their papers. gpucheck cannot run in such an image, but is copied from it.
func (r *release) imageFiles(im image, a architecture) (files []file, err error) {
	programs := slices.Clone(im.programs)
	if has, _ := r.has(a, []string{gpucheck}); has && im.names {
		programs = append(programs, gpucheck)
	}
	c, err := r.content("dlrover-run"+im.suffix+"-image", a, programs)
	if err != nil {
		return nil, err
	}
	demo, err := python.ReadFile("python/dlrover_run/demo.py")
	doc := "usr/local/share/doc/dlrover-run/"
	return append(c.programsIn("usr/local/bin/"),
		file{doc + "LICENSE", r.notices.own, 0o644}, file{doc + noticesName, c.notices, 0o644},
		file{doc + "demo.py", demo, 0o644}, file{doc + "sbom.cdx.json", c.sbom, 0o644}), err
}

// otherNames are the links that dlroverctl install-names makes, such as torchrun, to the names of the programs.
func (r *release) otherNames() (map[string]string, error) {
	dir, err := os.MkdirTemp("", "dist-names-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	ctl := r.program(architecture{debian: runtime.GOARCH}, "dlroverctl")
	if out, err := exec.Command(ctl, "install-names", dir).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s install-names: %w: %s", ctl, err, out)
	}
	links := map[string]string{}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		links["usr/local/bin/"+e.Name()] = filepath.Base(target)
	}
	return links, err
}

// tar writes files and links, with the folders that they are in, all of root and of one time. Jobs need a /tmp.
func (r *release) tar(w io.Writer, files []file, links map[string]string) error {
	entries := map[string]*tar.Header{"tmp/": {Typeflag: tar.TypeDir, Mode: 0o1777}}
	data := map[string][]byte{}
	for _, f := range files {
		entries[f.name] = &tar.Header{Typeflag: tar.TypeReg, Mode: int64(f.mode), Size: int64(len(f.data))}
		data[f.name] = f.data
	}
	for name, target := range links {
		entries[name] = &tar.Header{Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}
	}
	names := make([]string, 0, len(entries))
	for name := range entries {
		names = append(names, name)
	}
	for _, name := range names {
		for dir := path.Dir(strings.TrimSuffix(name, "/")); dir != "."; dir = path.Dir(dir) {
			if entries[dir+"/"] == nil {
				entries[dir+"/"] = &tar.Header{Typeflag: tar.TypeDir, Mode: 0o755}
				names = append(names, dir+"/")
			}
		}
	}
	slices.Sort(names)
	t := tar.NewWriter(w)
	for _, name := range names {
		h := entries[name]
		h.Name, h.ModTime, h.Format = name, r.time, tar.FormatUSTAR
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		if _, err := t.Write(data[name]); err != nil {
			return err
		}
	}
	return t.Close()
}
