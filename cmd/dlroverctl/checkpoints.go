package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/cmd/internal/help"
	"dlrover-run/cmd/internal/table"
	"dlrover-run/internal/text"
)

// errDamaged ends a command that worked, and found damage.
var errDamaged = &foundError{errors.New("damaged checkpoints")}

// checkpoints are the commands on a checkpoint directory. They need no daemon.
func (p *program) checkpoints() *cli.Command {
	t := &tender{store: commit.Store{FS: fsx.OS{}, Now: p.now}, out: p.stdout}
	command := func(name, usage string, least, most int, f func(ctx context.Context, args []string) error) *cli.Command {
		return &cli.Command{Name: name, HideHelp: true, OnUsageError: misused, Action: func(c *cli.Context) error {
			if c.NArg() < least || c.NArg() > most {
				return misplaced("checkpoints "+name, usage, c.Args().Slice())
			}
			args := c.Args().Slice()
			dir, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			return f(c.Context, append([]string{dir}, args[1:]...))
		}}
	}
	return &cli.Command{Name: "checkpoints", HideHelp: true, OnUsageError: misused, Subcommands: []*cli.Command{
		command("ls", "DIR", 1, 1, t.list),
		command("verify", "DIR [STEP]", 1, 2, t.verify),
		command("rm", "DIR STEP", 2, 2, t.remove),
	}, Action: func(c *cli.Context) error {
		if c.NArg() == 0 {
			return errors.New("checkpoints alone does nothing: use checkpoints ls, verify or rm")
		}
		return fmt.Errorf("checkpoints %q is unknown: use ls, verify or rm", c.Args().First())
	}}
}

func misused(_ *cli.Context, err error, _ bool) error {
	return fmt.Errorf("checkpoints: %w", help.Misuse("dlroverctl", err))
}

// tender carries out the commands on one store.
type tender struct {
	store commit.Store
	out   io.Writer
}

func (t *tender) list(_ context.Context, args []string) error {
	ms, wrong, err := t.manifests(args[0])
	if err != nil {
		return err
	}
	tracked, ok := t.store.Tracked(args[0])
	w := table.New(t.out, "STEP", "SAVED", "COMMITTED AFTER", "SHARDS", "FILES", "SIZE", "FRAMEWORK", "STATE")
	for _, m := range ms {
		state := t.state(args[0], m)
		if ok && m.Step == tracked {
			state += ", tracked"
		}
		w.Row(strconv.FormatInt(m.Step, 10), m.Saved.Local().Format(time.DateTime),
			m.Committed.Sub(m.Saved).Round(time.Millisecond).String(), strconv.Itoa(m.Shards), strconv.Itoa(len(m.Files)),
			bytesOf(m), m.Framework, state)
	}
	for _, s := range wrong {
		w.Row(strings.TrimPrefix(name(s.Step, tracked, ok), "step "), "", "", "", "", "", "", "DAMAGED: "+s.Reason)
	}
	return w.Flush()
}

// name is how a step is called that cannot be used, or the tracker itself.
func name(step, tracked int64, ok bool) string {
	switch {
	case step == commit.NoStep:
		return commit.Latest
	case ok && step == tracked:
		return fmt.Sprintf("step %d (tracked)", step)
	}
	return fmt.Sprintf("step %d", step)
}

// state is what can be told of a step without reading its files.
func (t *tender) state(dir string, m commit.Manifest) string {
	missing := 0
	for _, f := range m.Files {
		path := f.Path
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if fi, err := os.Lstat(path); err != nil || fi.Size() != f.Size {
			missing++
		}
	}
	if missing > 0 {
		return fmt.Sprintf("DAMAGED: %d files are missing or have another size", missing)
	}
	return "complete"
}

// manifests fails when there is nothing to work on.
func (t *tender) manifests(dir string) (ms []commit.Manifest, wrong []commit.Skipped, err error) {
	if _, err = os.Stat(dir); err == nil {
		ms, err = t.store.Manifests(dir)
	}
	if err == nil {
		wrong, err = t.store.Untrue(dir)
	}
	if err == nil && len(ms)+len(wrong) == 0 {
		err = fmt.Errorf("%s has no committed checkpoint (looked in .dlrover)", dir)
	}
	return ms, wrong, err
}

func bytesOf(m commit.Manifest) string {
	var n int64
	for _, f := range m.Files {
		n += f.Size
	}
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, u := float64(n), 0
	for v >= 1024 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	if u == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, units[u])
}

func (t *tender) verify(ctx context.Context, args []string) error {
	ms, wrong, err := t.manifests(args[0])
	if err != nil {
		return err
	}
	if len(args) == 2 {
		step, err := parseStep(args[1])
		if err != nil {
			return err
		}
		ms = slices.DeleteFunc(ms, func(m commit.Manifest) bool { return m.Step != step })
		wrong = slices.DeleteFunc(wrong, func(s commit.Skipped) bool { return s.Step != step })
		if len(ms)+len(wrong) == 0 {
			return notCommitted(step, args[0])
		}
	}
	tracked, ok := t.store.Tracked(args[0])
	for _, s := range wrong {
		fmt.Fprintf(t.out, "%s: damaged: %s\n", name(s.Step, tracked, ok), text.EscapeLine(s.Reason))
	}
	bad := len(wrong)
	for _, m := range ms {
		if err := t.store.Verify(ctx, args[0], m, nil); err != nil {
			bad++
			fmt.Fprintf(t.out, "%s: damaged: %s\n", name(m.Step, tracked, ok), text.EscapeLine(err.Error()))
			continue
		}
		fmt.Fprintf(t.out, "step %d: %d files, %s, good\n", m.Step, len(m.Files), bytesOf(m))
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d: %w", bad, len(ms)+len(wrong), errDamaged)
	}
	return nil
}

func (t *tender) remove(ctx context.Context, args []string) error {
	step, err := parseStep(args[1])
	if err != nil {
		return err
	}
	if _, _, err := t.manifests(args[0]); err != nil {
		return err
	}
	err = t.store.Remove(ctx, args[0], step)
	switch {
	case errors.Is(err, commit.ErrKept):
		return fmt.Errorf("step %d stays: it is what a tracker names, or it is being saved again (%w)", step, err)
	case errors.Is(err, commit.ErrNone):
		return notCommitted(step, args[0])
	}
	return err
}

func notCommitted(step int64, dir string) error {
	return fmt.Errorf("step %d is not committed in %s", step, dir)
}

func parseStep(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("step %q: need a number from 0", text)
	}
	return n, nil
}
