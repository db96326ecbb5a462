package ctl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/internal/table"
	"dlrover-run/internal/text"
)

// errDamaged ends a successful command that found damage.
var errDamaged = &foundError{errors.New("damaged checkpoints")}

// checkpoints are the commands on a checkpoint directory. They need no daemon.
func (p *program) checkpoints() *cli.Command {
	command := func(name, arguments, usage string, f func(*ckptAdmin) error) *cli.Command {
		return &cli.Command{Name: name, ArgsUsage: arguments, Usage: usage, Action: func(c *cli.Context) error {
			dir, err := filepath.Abs(c.Args().First())
			if err != nil {
				return err
			}
			a := &ckptAdmin{program: p, args: c, store: commit.Store{FS: fsx.OS{}, Now: p.now}, dir: dir}
			a.tracked, a.tracks = a.store.Tracked(dir)
			return f(a)
		}}
	}
	return &cli.Command{Name: "checkpoints", Category: ofCheckpoints, ArgsUsage: "ls|verify|rm",
		Usage: "list, verify or remove committed steps", Subcommands: []*cli.Command{
			command("ls", "DIR", "list the committed steps", (*ckptAdmin).list),
			command("verify", "DIR [STEP]", "read the files of all steps, or of one, and compare checksums",
				(*ckptAdmin).verify),
			command("rm", "DIR STEP", "remove a step, unless the tracker names it", (*ckptAdmin).remove),
		}}
}

// ckptAdmin carries out one command on a directory.
type ckptAdmin struct {
	*program
	args    *cli.Context
	store   commit.Store
	dir     string
	tracked int64
	tracks  bool // there is a tracker, which names tracked
}

// stepRow is a step, as --json prints it: ls in a list, verify on a line each.
type stepRow struct {
	Step      int64     `json:"step"` // commit.NoStep: the tracker itself
	Tracked   bool      `json:"tracked"`
	Saved     time.Time `json:"saved,omitzero"`
	Committed time.Time `json:"committed,omitzero"`
	Shards    int       `json:"shards,omitempty"`
	Files     int       `json:"files,omitempty"`
	Bytes     int64     `json:"bytes,omitempty"`
	Framework string    `json:"framework,omitempty"`
	Damage    string    `json:"damage,omitempty"`
	committed bool      // there is a manifest
}

func (a *ckptAdmin) row(m commit.Manifest, damage string) stepRow {
	r := stepRow{Step: m.Step, Tracked: a.tracks && m.Step == a.tracked, Saved: m.Saved, Committed: m.Committed,
		Shards: m.Shards, Files: len(m.Files), Framework: m.Framework, Damage: damage, committed: true}
	for _, f := range m.Files {
		r.Bytes += f.Size
	}
	return r
}

// wrongRow is the row of a step with an invalid manifest.
func (a *ckptAdmin) wrongRow(s commit.Skipped) stepRow {
	return stepRow{Step: s.Step, Tracked: a.tracks && s.Step == a.tracked, Damage: s.Reason}
}

func (a *ckptAdmin) list() error {
	ms, wrong, err := a.manifests()
	if err != nil {
		return err
	}
	var rows []stepRow
	for _, m := range ms {
		rows = append(rows, a.row(m, a.missing(m)))
	}
	for _, s := range wrong {
		rows = append(rows, a.wrongRow(s))
	}
	if a.args.Bool("json") {
		return a.json(rows)
	}
	w := table.New(a.stdout, "STEP", "SAVED", "COMMITTED AFTER", "SHARDS", "FILES", "SIZE", "FRAMEWORK", "STATE")
	for _, r := range rows {
		r.print(w)
	}
	return w.Flush()
}

func (r stepRow) print(w table.Table) {
	if !r.committed {
		w.Row(strings.TrimPrefix(r.name(), "step "), "", "", "", "", "", "", "DAMAGED: "+r.Damage)
		return
	}
	state := "complete"
	if r.Damage != "" {
		state = "DAMAGED: " + r.Damage
	}
	if r.Tracked {
		state += ", tracked"
	}
	w.Row(strconv.FormatInt(r.Step, 10), r.Saved.Local().Format(time.DateTime),
		r.Committed.Sub(r.Saved).Round(time.Millisecond).String(), strconv.Itoa(r.Shards), strconv.Itoa(r.Files),
		sizeOf(r.Bytes), r.Framework, state)
}

// name is the name of a step that cannot be used, or of the tracker itself.
func (r stepRow) name() string {
	switch {
	case r.Step == commit.NoStep:
		return commit.Latest
	case r.Tracked:
		return fmt.Sprintf("step %d (tracked)", r.Step)
	}
	return fmt.Sprintf("step %d", r.Step)
}

// missing describes missing files of a step, and files of another size, without reading them; "" if there are none.
func (a *ckptAdmin) missing(m commit.Manifest) string {
	missing := 0
	for _, f := range m.Files {
		path := f.Path
		if !filepath.IsAbs(path) {
			path = filepath.Join(a.dir, path)
		}
		if fi, err := os.Lstat(path); err != nil || fi.Size() != f.Size {
			missing++
		}
	}
	if missing == 0 {
		return ""
	}
	return fmt.Sprintf("%d files are missing or have another size", missing)
}

// manifests returns an error if there is no checkpoint.
func (a *ckptAdmin) manifests() (ms []commit.Manifest, wrong []commit.Skipped, err error) {
	if _, err = os.Stat(a.dir); err == nil {
		ms, err = a.store.Manifests(a.dir)
	}
	if err == nil {
		wrong, err = a.store.Untrue(a.dir)
	}
	if err == nil && len(ms)+len(wrong) == 0 {
		err = fmt.Errorf("%s has no committed checkpoint (looked in .dlrover)", a.dir)
	}
	return ms, wrong, err
}

func sizeOf(n int64) string {
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

func (a *ckptAdmin) verify() error {
	ms, wrong, err := a.manifests()
	if err != nil {
		return err
	}
	if a.args.NArg() == 2 {
		step, err := parseStep(a.args.Args().Get(1))
		if err != nil {
			return err
		}
		ms = slices.DeleteFunc(ms, func(m commit.Manifest) bool { return m.Step != step })
		wrong = slices.DeleteFunc(wrong, func(s commit.Skipped) bool { return s.Step != step })
		if len(ms)+len(wrong) == 0 {
			return a.notCommitted(step)
		}
	}
	for _, s := range wrong {
		a.verified(a.wrongRow(s))
	}
	bad := len(wrong)
	for _, m := range ms {
		damage := ""
		if err := a.store.Verify(a.args.Context, a.dir, m, nil); err != nil {
			bad, damage = bad+1, err.Error()
		}
		a.verified(a.row(m, damage))
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d: %w", bad, len(ms)+len(wrong), errDamaged)
	}
	return nil
}

// verified prints the state of a step at once, because reading the next one may take long.
func (a *ckptAdmin) verified(r stepRow) {
	switch {
	case a.args.Bool("json"):
		_ = a.json(r)
	case r.Damage != "":
		fmt.Fprintf(a.stdout, "%s: damaged: %s\n", r.name(), text.EscapeLine(r.Damage))
	default:
		fmt.Fprintf(a.stdout, "step %d: %d files, %s, good\n", r.Step, r.Files, sizeOf(r.Bytes))
	}
}

func (a *ckptAdmin) remove() error {
	step, err := parseStep(a.args.Args().Get(1))
	if err != nil {
		return err
	}
	if _, _, err := a.manifests(); err != nil {
		return err
	}
	err = a.store.Remove(a.args.Context, a.dir, step)
	switch {
	case errors.Is(err, commit.ErrKept):
		return fmt.Errorf("step %d stays: it is what a tracker names, or it is being saved again (%w)", step, err)
	case errors.Is(err, commit.ErrNone):
		return a.notCommitted(step)
	case err == nil && a.args.Bool("json"):
		return a.did(a.args, fmt.Sprintf("step %d is removed", step))
	}
	return err
}

func (a *ckptAdmin) notCommitted(step int64) error {
	return fmt.Errorf("step %d is not committed in %s", step, a.dir)
}

func parseStep(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("step %q: need a number from 0", text)
	}
	return n, nil
}
