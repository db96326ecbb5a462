// Package bundle makes an archive of everything that a server knows about a run, for later analysis, here or elsewhere.
package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"dlrover-run/hang/report"
	"dlrover-run/internal/app/answers/remote"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/text"
	"dlrover-run/netcheck"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Source has the answers about one run.
type Source struct {
	Run   string
	Judge Judge
	Parts []Part
}

// Part is a file of an archive, and the answer in it.
type Part struct {
	Name string
	Get  func(context.Context) (any, error)
}

// Of is the Source of a server that is asked over its API.
func Of(c *api.Client, run string) Source {
	judge := remote.Hangs(c)
	return Source{Run: run, Judge: judge, Parts: []Part{
		{"status.json", func(ctx context.Context) (any, error) { return remote.Status(ctx, c, run) }},
		{"events.json", func(ctx context.Context) (any, error) {
			es, err := remote.Events(ctx, c, run)
			return es.Events, err
		}},
		{"verdict.json", mounted[service.Verdict](c, run, "verdict")},
		{"failures.json", mounted[[]rendezvous.EpochEvidence](c, run, "failures")},
		{"checks.json", mounted[netcheck.Picture](c, run, "checks")},
		{"checkpoints.json", mounted[json.RawMessage](c, run, "checkpoints")},
		{"hangs.json", func(ctx context.Context) (any, error) { return judge.Picture(ctx, run, false) }},
	}}
}

// mounted requests the resource name of the run.
func mounted[T any](c *api.Client, run, name string) func(context.Context) (any, error) {
	return func(ctx context.Context) (any, error) {
		var v T
		err := c.Mounted(ctx, run, name, &v)
		return v, err
	}
}

// FileName is that of a file about a run, without its end.
func FileName(run, kind, of string, at time.Time) string {
	return "dlrover-" + kind + "-" + report.FileName(run) + of + "-" + at.UTC().Format("20060102T150405Z")
}

// archive is a bundle that is being written.
type archive struct {
	tar     *tar.Writer
	name    string // of the directory in it
	at      time.Time
	missing []string
}

// Write writes an archive, with a directory name. It names the parts that do not exist.
func Write(ctx context.Context, w io.Writer, name string, at time.Time, from Source) error {
	zip := gzip.NewWriter(w)
	a := &archive{tar: tar.NewWriter(zip), name: name, at: at}
	err := a.fill(ctx, from)
	if err == nil && len(a.missing) > 0 {
		err = a.add("missing.txt", []byte(strings.Join(a.missing, "\n")+"\n"))
	}
	return errors.Join(err, a.tar.Close(), zip.Close())
}

// fill requests one part after the other; only a failed write is an error.
func (a *archive) fill(ctx context.Context, from Source) error {
	for _, p := range from.Parts {
		v, err := p.Get(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			a.lacks(p.Name, err)
			continue
		}
		if err := a.addJSON(p.Name, v); err != nil {
			return err
		}
	}
	return a.fillStacks(ctx, from)
}

// fillStacks adds the evidence of the newest incident, which may be over, and the present stacks of the workers.
func (a *archive) fillStacks(ctx context.Context, from Source) error {
	if p, err := from.Judge.Picture(ctx, from.Run, true); err == nil && p.Incident > 0 && len(p.Evidence) > 0 {
		if err := a.addIncident("hang", report.Of(from.Run, a.at, p)); err != nil {
			return err
		}
	}
	found, err := Collect(ctx, from.Judge, from.Run, a.at)
	if ctx.Err() != nil {
		return context.Cause(ctx)
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
