package ctl

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/hang/report"
	"dlrover-run/hang/serve"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/text"
	"dlrover-run/netcheck"
	"dlrover-run/rendezvous"
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
	name := fileName(c, "bundle", "")
	path, err := newFile(c, name+".tar.gz", func(w io.Writer) error { return c.writeBundle(w, name) })
	if err != nil {
		return err
	}
	return c.did(text.EscapeLine(path))
}

// fileName is that of a file about the run, without its end.
func fileName(c *call, kind, of string) string {
	return "dlrover-" + kind + "-" + report.FileName(c.run()) + of + "-" + c.now().UTC().Format("20060102T150405Z")
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

// archive is a bundle that is being written.
type archive struct {
	tar     *tar.Writer
	name    string // of the directory in it
	at      time.Time
	missing []string
}

func (c *call) writeBundle(w io.Writer, name string) error {
	zip := gzip.NewWriter(w)
	a := &archive{tar: tar.NewWriter(zip), name: name, at: c.now()}
	err := c.fill(a)
	if err == nil && len(a.missing) > 0 {
		err = a.add("missing.txt", []byte(strings.Join(a.missing, "\n")+"\n"))
	}
	return errors.Join(err, a.tar.Close(), zip.Close())
}

// fill requests one part after the other; only a failed write is an error.
func (c *call) fill(a *archive) error {
	judge := serve.Over(c.daemon.client)
	parts := []struct {
		name string
		get  func() (any, error)
	}{
		{"status.json", func() (any, error) { return c.daemon.status(c) }},
		{"events.json", func() (any, error) { es, err := c.daemon.kept(c); return es.Events, err }},
		{"verdict.json", mounted[service.Verdict](c, "verdict")},
		{"failures.json", mounted[[]rendezvous.EpochEvidence](c, "failures")},
		{"checks.json", mounted[netcheck.Picture](c, "checks")},
		{"checkpoints.json", mounted[json.RawMessage](c, "checkpoints")},
		{"hangs.json", func() (any, error) { return judge.Picture(c, c.run(), false) }},
	}
	for _, p := range parts {
		v, err := p.get()
		if c.Err() != nil {
			return context.Cause(c)
		}
		if err != nil {
			a.lacks(p.name, err)
			continue
		}
		if err := a.addJSON(p.name, v); err != nil {
			return err
		}
	}
	return c.fillStacks(a, judge)
}

// mounted requests the resource name of the run.
func mounted[T any](c *call, name string) func() (any, error) {
	return func() (any, error) {
		var v T
		err := c.daemon.client.Mounted(c, c.run(), name, &v)
		return v, err
	}
}

// fillStacks adds the evidence of the newest incident, which may be over, and the present stacks of the workers.
func (c *call) fillStacks(a *archive, judge serve.Transport) error {
	if p, err := judge.Picture(c, c.run(), true); err == nil && p.Incident > 0 && len(p.Evidence) > 0 {
		if err := a.addIncident("hang", report.Of(c.run(), c.now(), p)); err != nil {
			return err
		}
	}
	found, err := c.daemon.collect(c, judge, c.now())
	if c.Err() != nil {
		return context.Cause(c)
	}
	if err != nil {
		a.lacks("now", err)
		return nil
	}
	return a.addIncident("now", found)
}

func (a *archive) lacks(name string, err error) {
	a.missing = append(a.missing, text.EscapeLine(name+": "+err.Error()))
}

// addIncident adds a report, and for each rank its page, its flight recorder and the end of its output.
func (a *archive) addIncident(dir string, found report.Incident) error {
	files, err := found.Files()
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := a.add(dir+"/"+f.Name, f.Data); err != nil {
			return err
		}
	}
	for i := range found.Evidence {
		e := &found.Evidence[i]
		rank := fmt.Sprintf("%05d", e.Rank)
		if p := e.Page(); p != nil {
			err = errors.Join(err, a.addJSON(dir+"/pages/"+rank+".json", p))
		}
		if e.Flight != nil {
			err = errors.Join(err, a.addJSON(dir+"/recorder/"+rank+".json", e.Flight))
		}
		if e.Log != "" {
			err = errors.Join(err, a.add(dir+"/logs/"+rank+".log", []byte(e.Log)))
		}
	}
	return err
}

func (a *archive) addJSON(name string, v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return a.add(name, b.Bytes())
}

func (a *archive) add(name string, data []byte) error {
	err := a.tar.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: a.name + "/" + name, Size: int64(len(data)), Mode: 0o600, ModTime: a.at,
	})
	if err == nil {
		_, err = a.tar.Write(data)
	}
	return err
}
