package coordinator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"dlrover-run/checkpointd/commit"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/text"
)

const (
	// Pauses between two looks at the markers.
	firstLook, longestLook = 20 * time.Millisecond, 500 * time.Millisecond
	// Limits of the files that are read.
	maxMarker   = maxBody
	maxManifest = 2 * maxBytes
	// failedName is the leader's marker of an aborted save.
	failedName = "failed"
)

// fileCoordinator is a Coordinator of marker files on storage that all nodes share.
type fileCoordinator struct{ files fsx.FS }

// Files returns a Coordinator that needs no master: it polls the marker files that commit.Store writes, on storage that
// all nodes share. Save.Dir must be set, and a phase must be posted only after the Store has written its file. A shard
// that fails leaves shard-<n>.failed in the stage. The leader alone decides, and then writes "failed", so that the
// others poll two names only. Agree and Peers answer at once, from this node alone; Ages does nothing.
func Files(files fsx.FS) Coordinator { return fileCoordinator{files} }

func (c fileCoordinator) Agree(_ context.Context, _ string, node, _ int, hs []Holding,
	_ time.Duration) (Plan, bool, error) {
	p, ok := alone(node, hs)
	return p, ok, nil
}

func (c fileCoordinator) Announce(context.Context, Participation) error { return nil }

func (c fileCoordinator) Peers(_ context.Context, _ string, self Peer, _ int, _ time.Duration) ([]Peer, error) {
	return []Peer{self}, nil
}

func (c fileCoordinator) Ages(context.Context, string, int, []Age) error { return nil }

func (c fileCoordinator) Post(ctx context.Context, r Report) ([]commit.Entry, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	if r.Save.Dir == "" {
		return nil, fmt.Errorf("%w: save %s has no checkpoint directory", errBadRequest, r.Save.ID)
	}
	dir, err := c.files.Resolve(r.Save.Dir)
	if err != nil {
		return nil, fmt.Errorf("checkpoint directory %s: %w", r.Save.Dir, err)
	}
	s := stage{c.files, r, commit.StageDir(dir, r.Save.ID),
		filepath.Join(dir, ".dlrover", strconv.FormatInt(r.Save.Step, 10)+".json")}
	switch r.Phase {
	case Prepared:
		return s.poll(ctx, s.lookPrepared)
	case Placed:
		return s.poll(ctx, s.lookPlaced)
	case Failed:
		return nil, s.fail()
	}
	return nil, nil
}

// stage is the directory of one save, as seen by the sender of a report.
type stage struct {
	files         fsx.FS
	r             Report
	dir, manifest string
}

func (s stage) path(name string) string { return filepath.Join(s.dir, name) }

func marker(shard int, kind string) string { return fmt.Sprintf("shard-%d.%s", shard, kind) }

// retract removes the markers of earlier failures.
func (s stage) retract() error {
	names := make([]string, 0, len(s.r.Shards)+1)
	for _, n := range s.r.Shards {
		names = append(names, marker(n, "failed"))
	}
	if s.r.leads() {
		names = append(names, failedName)
	}
	for _, name := range names {
		if err := s.files.Remove(s.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("save %s: take back a failure: %w", s.r.Save.ID, err)
		}
	}
	return nil
}

// answer is the result of a look at the markers.
type answer struct {
	entries []commit.Entry
	err     error
}

// poll looks until there is an answer. Storage that fails is looked at again, until ctx ends.
func (s stage) poll(ctx context.Context, look func() (*answer, error)) ([]commit.Entry, error) {
	if err := s.retract(); err != nil {
		return nil, err
	}
	pause := retry.Backoff{First: firstLook, Most: longestLook, Spread: true}
	for {
		a, err := look()
		if a != nil {
			return a.entries, a.err
		}
		if !pause.Wait(ctx) {
			return nil, withReport(ended(ctx, err), s.r)
		}
	}
}

func (s stage) lookPrepared() (*answer, error) {
	if ours, err := s.published(); ours || err != nil {
		return found(ours, fmt.Errorf("%w: save %s of step %d", ErrCommitted, s.r.Save.ID, s.r.Save.Step)), err
	}
	if !s.r.leads() {
		return s.lookIntent()
	}
	seen, err := s.list()
	switch {
	case err != nil:
		return nil, err
	case seen.failed != none:
		return s.abort(seen.failed, ErrAborted)
	case len(seen.prepared) < s.r.Save.Shards:
		return nil, nil
	}
	return s.entries()
}

func found(yes bool, err error) *answer {
	if !yes {
		return nil
	}
	return &answer{err: err}
}

func (s stage) lookIntent() (*answer, error) {
	if yes, err := s.exists("intent"); yes || err != nil {
		return found(yes, nil), err
	}
	return s.lookFailed(ErrAborted)
}

// lookFailed looks for the leader's word, which holds until the shard that it names has taken its failure back.
func (s stage) lookFailed(is error) (*answer, error) {
	f, err := s.failure(failedName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	stands, err := s.exists(marker(f.Shard, "failed"))
	return found(stands, failureError(is, s.r.Save, f.Shard, f.Error)), err
}

func (s stage) lookPlaced() (*answer, error) {
	if ours, err := s.published(); ours || err != nil {
		return found(ours, nil), err
	}
	if !s.r.leads() {
		return s.lookFailed(ErrStalled)
	}
	seen, err := s.list()
	switch {
	case err != nil:
		return nil, err
	case len(seen.placed) == s.r.Save.Shards:
		return &answer{}, nil
	case seen.failed != none && !seen.placed[seen.failed]:
		return s.abort(seen.failed, ErrStalled)
	}
	return nil, nil
}

// abort publishes the failure of a shard to all writers.
func (s stage) abort(shard int, is error) (*answer, error) {
	f, err := s.failure(marker(shard, "failed"))
	if err != nil {
		return nil, err
	}
	f.Shard = shard
	if err := s.write(failedName, f); err != nil {
		return nil, err
	}
	return &answer{err: failureError(is, s.r.Save, shard, f.Error)}, nil
}

// fail writes the marker of a failure, and then checks whether it is too late: so either the leader sees the marker, or
// the failure is refused.
func (s stage) fail() error {
	if err := s.files.MkdirAll(s.dir); err != nil {
		return fmt.Errorf("save %s: leave word of a failure: %w", s.r.Save.ID, err)
	}
	for _, n := range s.r.Shards {
		if err := s.write(marker(n, "failed"), failure{n, text.Head(s.r.Error, maxReason)}); err != nil {
			return err
		}
	}
	if s.r.leads() {
		if err := s.write(failedName, failure{0, text.Head(s.r.Error, maxReason)}); err != nil {
			return err
		}
	}
	return s.tooLate()
}

func (s stage) tooLate() error {
	written, err := s.exists("intent")
	if err != nil {
		return err
	}
	if written {
		return fmt.Errorf("%w: save %s: the intent is written; keep the files", ErrDecided, s.r.Save.ID)
	}
	seen, err := s.list()
	if err == nil && !s.r.leads() && len(seen.prepared) == s.r.Save.Shards {
		return fmt.Errorf("%w: save %s: all shards are prepared and the leader may have gone on; keep the files",
			ErrDecided, s.r.Save.ID)
	}
	return err
}

// seen is a listing of the stage. failed is the lowest shard that has failed, or none.
type seen struct {
	prepared, placed map[int]bool
	failed           int
}

const none = -1

func (s stage) list() (seen, error) {
	names, err := s.files.List(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return seen{}, err
	}
	all := seen{map[int]bool{}, map[int]bool{}, none}
	for _, e := range names {
		n, kind, ok := parseMarker(e.Name)
		if !ok || n >= s.r.Save.Shards {
			continue
		}
		switch kind {
		case "prepared":
			all.prepared[n] = true
		case "placed":
			all.placed[n] = true
		case "failed":
			if all.failed == none || n < all.failed {
				all.failed = n
			}
		}
	}
	return all, nil
}

// parseMarker takes shard-<n>.<kind> apart.
func parseMarker(name string) (shard int, kind string, ok bool) {
	rest, ok := strings.CutPrefix(name, "shard-")
	if !ok {
		return 0, "", false
	}
	digits, kind, _ := strings.Cut(rest, ".")
	n, err := strconv.Atoi(digits)
	return n, kind, err == nil && n >= 0 && name == marker(n, kind)
}

// entries reads the entries of all prepared shards.
func (s stage) entries() (*answer, error) {
	es := make([]commit.Entry, s.r.Save.Shards)
	for n := range es {
		path := s.path(marker(n, "prepared"))
		data, err := s.files.ReadFile(path, maxMarker)
		if unfit(err) {
			return &answer{err: err}, nil
		}
		if err != nil {
			return nil, err
		}
		if es[n], err = parseEntry(data, n); err != nil {
			return &answer{err: fmt.Errorf("%s: %w", path, err)}, nil
		}
	}
	return &answer{entries: es}, nil
}

func parseEntry(data []byte, shard int) (e commit.Entry, err error) {
	if err := json.Unmarshal(data, &e); err != nil {
		return e, fmt.Errorf("damaged: %w", err)
	}
	if e.Shard != shard {
		return e, fmt.Errorf("damaged: it is about shard %d", e.Shard)
	}
	return e, nil
}

// failure is the content of a failed marker.
type failure struct {
	Shard int    `json:"shard"`
	Error string `json:"error"`
}

func (s stage) failure(name string) (failure, error) {
	data, err := s.files.ReadFile(s.path(name), maxMarker)
	if err != nil {
		return failure{}, err
	}
	return parseFailure(data), nil
}

// parseFailure treats a damaged marker as a failure without a reason.
func parseFailure(data []byte) failure {
	var f failure
	if err := json.Unmarshal(data, &f); err != nil || f.Shard < 0 || f.Shard >= maxShards {
		f = failure{}
	}
	f.Error = text.Head(f.Error, maxReason)
	if f.Error == "" {
		f.Error = "no reason given"
	}
	return f
}

func (s stage) write(name string, f failure) error {
	data, err := json.Marshal(f)
	if err == nil {
		err = s.files.WriteFile(s.path(name), data)
	}
	if err != nil {
		return fmt.Errorf("save %s: leave word of a failure: %w", s.r.Save.ID, err)
	}
	return nil
}

func (s stage) exists(name string) (bool, error) { return exists(s.files, s.path(name)) }

func exists(files fsx.FS, path string) (bool, error) {
	_, err := files.Size(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// published reports whether the manifest of the step is that of this save.
func (s stage) published() (bool, error) {
	data, err := s.files.ReadFile(s.manifest, maxManifest)
	if errors.Is(err, fs.ErrNotExist) || unfit(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return manifestOf(data) == s.r.Save.ID, nil
}

// unfit reports that a path that should be a small file is something else. Waiting does not repair that.
func unfit(err error) bool {
	return errors.Is(err, fsx.ErrNotRegular) || errors.Is(err, fsx.ErrTooLong)
}

// manifestOf returns the save of a manifest; "" of a damaged one.
func manifestOf(data []byte) string {
	var m struct {
		Save string `json:"save"`
	}
	if json.Unmarshal(data, &m) != nil {
		return ""
	}
	return m.Save
}
