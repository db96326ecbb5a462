// Package warm starts workers from prepared processes.
package warm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"dlrover-run/checkpointd/shm"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/pypath"
	"dlrover-run/internal/job"
	"dlrover-run/internal/pytree"
	"dlrover-run/launcher"
	"dlrover-run/launcher/verdict"
	"dlrover-run/launcher/warm"
	"dlrover-run/launcher/warm/python"
)

// warmTree imports modules, forks, and reports a worker's imports. The sitecustomize of hangShim runs it.
var warmTree = pypath.Tree{
	Source: pytree.Source{Name: "warm", Files: python.Files},
	What:   "Python of warm workers", Loss: "workers are started by exec",
}

// Interval of the looks for a worker's imports, and their limit. A worker without steps reports them within a
// minute.
const (
	warmLook     = 100 * time.Millisecond
	warmPatience = 70 * time.Second
)

// pythonFlags is the number of words of a worker's command for the interpreter and its options.
const pythonFlags = 2

// warmSettings are the options of the feature.
type warmSettings struct {
	on      bool
	mode    warm.Mode
	modules []string // nil: auto
	deny    []string
}

// New is the feature.
func New() feature.Feature {
	var k warmSettings
	return feature.Feature{
		Name:     "warm workers",
		Settings: func(o feature.Options) (err error) { k, err = read(o, o.Job().Slots); return err },
		Plan: func(p *feature.Plan) {
			if k.on {
				p.Features["warm"] = k.plan()
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if !k.on {
				return nil, nil
			}
			return open(n, k), nil
		},
	}
}

// read reads the options.
func read(o feature.Options, slots int) (k warmSettings, err error) {
	text := o.String("warm")
	k.on, k.mode = text != "off", warm.Mode(o.String("warm-mode"))
	for _, name := range []string{"warm-mode", "warm-deny"} {
		if !k.on && o.IsSet(name) {
			return k, fmt.Errorf("--%s has no effect without --warm: add that, or leave this out", name)
		}
	}
	if !k.on || o.Bool("check-only") || slots == 0 {
		return warmSettings{}, nil
	}
	if o.Bool("no-python") && !o.Bool("run-path") {
		return k, errors.New("--warm and --no-python contradict each other: what is executed imports by itself; " +
			"use one of them")
	}
	if k.deny, err = moduleNames("--warm-deny", o.String("warm-deny")); err == nil && text != "auto" {
		k.modules, err = moduleNames("--warm", text)
	}
	return k, err
}

// moduleNames reads a list; it returns nil for an empty one.
func moduleNames(option, text string) (names []string, err error) {
	for name := range strings.SplitSeq(text, ",") {
		switch name = strings.TrimSpace(name); {
		case name == "":
		case !isModule(name):
			return nil, fmt.Errorf("%s=%.100q: %q is not the name of a Python module", option, text, name)
		default:
			names = append(names, name)
		}
	}
	return names, nil
}

// isModule reports whether name may be that of a module: identifiers with dots between them.
func isModule(name string) bool {
	for part := range strings.SplitSeq(name, ".") {
		if part == "" || strings.ContainsFunc(part, func(r rune) bool {
			return r < 0x80 && r != '_' && (r < '0' || r > '9' && r < 'A' || r > 'Z' && r < 'a' || r > 'z')
		}) || part[0] <= '9' {
			return false
		}
	}
	return true
}

// planWarm is the feature's part of the --dry-run output.
type planWarm struct {
	Mode    warm.Mode `json:"mode"`
	Modules any       `json:"modules"`
	Deny    []string  `json:"deny,omitempty"`
}

func (k *warmSettings) plan() planWarm {
	p := planWarm{Mode: k.mode, Modules: "auto", Deny: k.deny}
	if k.modules != nil {
		p.Modules = k.modules
	}
	return p
}

// warmWorkers is the part of the launcher that starts workers from prepared processes.
type warmWorkers struct {
	warmSettings
	node    feature.Node
	log     *slog.Logger
	dir     *shm.Dir
	unlock  func() error
	spawner *warm.Spawner
}

// open returns nil, and the job runs without warm workers, where they have no directory.
func open(n feature.Node, k warmSettings) *feature.Opened {
	w := &warmWorkers{warmSettings: k, node: n, log: n.Log()}
	var err error
	if w.dir, err = shm.Create(n.Job().ShmDir, "warm-"+strings.ToLower(rand.Text())); err == nil {
		w.unlock, err = w.dir.Own()
	}
	if err != nil {
		n.Log().Warn("no place for what workers tell of their imports: no warm workers", "shm_dir", n.Job().ShmDir, "err",
			err)
		return nil
	}
	n.Python().Add(pypath.Shim)
	n.Python().Add(warmTree)
	return &feature.Opened{
		Part: launcher.Part{Start: w.start, Run: w.run, Stop: w.stop, End: w.end}, Configure: w.configure,
		Release: w.release,
	}
}

// configure runs when the trees are on disk and all settings of an interpreter are known.
func (w *warmWorkers) configure(cfg *launcher.Config) {
	tree := w.node.Python().Dir(warmTree.Name)
	if tree == "" {
		tree = "/nonexistent" // the parent that cannot be started logs the error once more
	}
	v := cfg.Vars(job.Place{WorldSize: cfg.Slots, GroupWorldSize: 1}, 0, "")
	v.World, _ = w.node.Job().World()
	env, err := cfg.Preset.Environ(v)
	if err != nil {
		w.log.Debug("the workers' environment is not known before they start", "err", err)
	}
	env = append(env, w.node.Python().ImportEnv()...)
	w.spawner = warm.New(warm.Config{
		Mode: w.mode, Slots: cfg.Slots, Modules: w.modules, Deny: w.deny, Command: cfg.Args, Flags: pythonFlags,
		Path: cfg.Path, Program: filepath.Join(tree, python.Parent), Dir: w.dir.Path(), Env: slices.Concat(cfg.Env, env),
		Processes: w.node.Processes(), Log: w.log, Prepared: w.node.Events().WarmPrepared, Started: w.node.Events().WarmStart,
	})
	w.spawner.Joined()
	cfg.Spawn, cfg.Excuse = w.spawner.Spawn, w.spawner.Excuse
	before := cfg.Before
	cfg.Before = func(ctx context.Context, e launcher.Epoch) *verdict.Failure {
		if before != nil {
			if f := before(ctx, e); f != nil {
				return f
			}
		}
		w.spawner.Await(ctx)
		return nil
	}
}

func (w *warmWorkers) start(r *launcher.StartRequest) {
	w.spawner.Starting()
	for i := range r.Env {
		r.Env[i] = append(r.Env[i], w.spawner.Environ(i)...)
	}
}

func (w *warmWorkers) stop(r launcher.StopRequest) {
	if !r.Early {
		w.spawner.Stopped()
	}
}

// run waits for the first step.
func (w *warmWorkers) run(ctx context.Context, _ launcher.RunRequest) {
	defer w.spawner.Stopping()
	w.spawner.Running()
	ticker := time.NewTicker(warmLook)
	defer ticker.Stop()
	late := time.After(warmPatience)
	for known := false; !known; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			known = w.spawner.Learned()
		case <-late:
			w.spawner.Stepped()
			known = true
		}
	}
	<-ctx.Done()
}

func (w *warmWorkers) end(launcher.EndRequest) {
	if w.spawner != nil {
		w.spawner.Close()
	}
}

func (w *warmWorkers) release() {
	if err := errors.Join(w.dir.RemoveAll(), w.unlock()); err != nil {
		w.log.Debug("remove what workers have told of their imports", "err", err)
	}
}
